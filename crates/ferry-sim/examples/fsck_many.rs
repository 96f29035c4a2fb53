//! How long a check takes and how much memory: `fsck_many make VOLUME [FILES]`, then `fsck_many check VOLUME`
//! (two processes, so that the memory shown is the check's alone).

use ferry_device::{BlockDevice, Env, FileDevice, OpenMode};
use ferry_fs::{
    Errno, Filesystem, FsOptions, FsckOptions, InProcess, LocalFs, MkfsOptions, ROOT, fsck, mkfs,
};
use std::path::Path;
use std::sync::Arc;

type Any = Box<dyn std::error::Error>;

/// Files in one directory.
const PER_DIRECTORY: u64 = 1000;
/// The volume's size, in bytes.
const SIZE: u64 = 64 << 30;

fn errno(errno: Errno) -> Any {
    format!("{errno}").into()
}

fn make(path: &Path, files: u64, env: &Env) -> Result<(), Any> {
    let device: Arc<dyn BlockDevice> = Arc::new(FileDevice::create(path, SIZE, false, env)?);
    mkfs(&device, &MkfsOptions::default(), env)?;
    let fs = LocalFs::open(device, FsOptions::default(), env.clone())?;
    let user = InProcess::default();
    // Most files of a source tree are small; one of four has an extent.
    let contents = [vec![b'x'; 500], vec![b'x'; 500], vec![b'x'; 1500], vec![b'x'; 6000]];
    for d in 0..files.div_ceil(PER_DIRECTORY) {
        let name = format!("d{d}");
        let entry = user.call(|cx| fs.mkdir(cx, ROOT, name.as_bytes(), 0o755)).map_err(errno)?;
        let dir = entry.attr.ok_or("made")?.ino;
        for f in 0..PER_DIRECTORY.min(files - d * PER_DIRECTORY) {
            let name = format!("some-file-{f}.c");
            let mode = libc::S_IFREG | 0o644;
            let (entry, opened) =
                user.call(|cx| fs.create(cx, dir, name.as_bytes(), mode, libc::O_RDWR)).map_err(errno)?;
            let ino = entry.attr.ok_or("made")?.ino;
            let bytes = &contents[(f % 4) as usize];
            user.call(|cx| fs.write(cx, ino, opened.fh, 0, bytes, false, false)).map_err(errno)?;
            user.call(|cx| {
                fs.release(cx, ino, opened.fh);
                Ok(())
            })
            .map_err(errno)?;
            fs.forget(ino, 1);
        }
        fs.forget(dir, 1);
        fs.sync()?;
    }
    fs.close()?;
    println!("{files} files made in {:?}", env.clock.monotonic());
    Ok(())
}

fn check(path: &Path, env: &Env) -> Result<(), Any> {
    let device: Arc<dyn BlockDevice> = Arc::new(FileDevice::open(path, OpenMode::ReadOnly, env)?);
    let mut progress = 0;
    let mut count = |_| progress += 1;
    let report = fsck(&device, FsckOptions { verify_data: false, progress: Some(&mut count) }, env)?;
    report.findings.iter().for_each(|finding| println!("{finding}"));
    println!("{:?}", report.holdings);
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
    println!("checked in {:?}, told {progress} times, {peak}", env.clock.monotonic());
    Ok(())
}

fn main() -> Result<(), Any> {
    let env = Env::real();
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words[..] {
        [what, path] if what == "check" => check(Path::new(path), &env),
        [what, path] if what == "make" => make(Path::new(path), 1_000_000, &env),
        [what, path, files] if what == "make" => make(Path::new(path), files.parse()?, &env),
        _ => Err("usage: fsck_many make VOLUME [FILES] | fsck_many check VOLUME".into()),
    }
}
