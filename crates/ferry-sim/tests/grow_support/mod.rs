//! A volume with files, whose log grows.
#![allow(dead_code, reason = "each test crate uses a part of this")]

use ferry_check::{FsckOptions, fsck};
use ferry_device::BlockDevice;
use ferry_fs::ioctl::ResizeAnswer;
use ferry_fs::volume::read_superblock;
use ferry_fs::{Errno, Filesystem, FsOptions, InProcess, LocalFs, MkfsOptions, ROOT, ioctl, mkfs};
use ferry_sim::device::sim_env;
use std::collections::BTreeMap;
use std::sync::Arc;

pub const ME: InProcess = InProcess::ROOT;

pub type Files = BTreeMap<String, Vec<u8>>;

pub fn format(device: &Arc<dyn BlockDevice>, log: u64) {
    let options = MkfsOptions { log_size: Some(log), ..MkfsOptions::default() };
    mkfs(device, &options, &sim_env(1).0).unwrap();
}

pub fn open(device: Arc<dyn BlockDevice>, background: bool) -> Arc<LocalFs> {
    let options = FsOptions { background, cache_bytes: 8 << 20, ..FsOptions::default() };
    LocalFs::open(device, options, sim_env(1).0).unwrap()
}

pub fn log_len(device: &Arc<dyn BlockDevice>) -> u64 {
    read_superblock(device).unwrap().log_len
}

pub fn make(fs: &LocalFs, files: &mut Files, name: String, data: Vec<u8>) {
    let made = ME.call(|cx| {
        let (entry, opened) = fs.create(cx, ROOT, name.as_bytes(), 0o644, libc::O_RDWR)?;
        let ino = entry.attr.unwrap().ino;
        fs.write(cx, ino, opened.fh, 0, &data, false, false)?;
        fs.release(cx, ino, opened.fh);
        Ok(())
    });
    made.unwrap_or_else(|e| panic!("{name}: {e}"));
    files.insert(name, data);
}

pub fn sync(fs: &LocalFs) {
    ME.call(|cx| fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).unwrap();
}

pub fn grow(fs: &LocalFs, bytes: u64) -> Result<(), Errno> {
    ME.call(|cx| fs.ioctl(cx, ROOT, ioctl::GROW_LOG, &bytes.to_ne_bytes(), 0)).map(drop)
}

/// The file's contents, if it is there.
pub fn read(fs: &LocalFs, name: &str) -> Option<Vec<u8>> {
    let attr = ME.call(|cx| fs.lookup(cx, ROOT, name.as_bytes())).unwrap().attr?;
    let fh = ME.call(|cx| fs.open(cx, attr.ino, libc::O_RDONLY, false)).unwrap().fh;
    let mut data = vec![0; attr.size as usize];
    let len = ME.call(|cx| fs.read(cx, attr.ino, fh, 0, &mut data)).unwrap();
    assert_eq!(len, data.len());
    Some(data)
}

pub fn assert_clean(device: &Arc<dyn BlockDevice>) {
    let report = fsck(device, FsckOptions::default(), &sim_env(1).0).unwrap();
    assert!(report.clean, "{:?}", report.findings);
}

pub fn contents(n: u32) -> Vec<u8> {
    vec![n as u8; [10, 3000, 20_000][n as usize % 3]]
}

/// Bytes of a large file.
pub const FILE: usize = 300_000;

pub fn large(n: u32) -> Vec<u8> {
    vec![n as u8; FILE]
}

pub fn holds(fs: &LocalFs, files: &Files, what: &str) {
    for (name, data) in files {
        assert!(read(fs, name).as_ref() == Some(data), "{name} {what}");
    }
}

/// Makes so many files, and removes all but each fourth: live data lies at both ends, between dead
/// data.
pub fn fill(fs: &LocalFs, files: &mut Files, count: u32) {
    for n in 0..count {
        make(fs, files, format!("before {n}"), large(n));
        if n % 8 == 7 {
            sync(fs);
        }
    }
    for n in (0..count).filter(|n| n % 4 != 0) {
        let name = format!("before {n}");
        // The kernel knows it from its create and from this.
        let ino = ME.call(|cx| fs.lookup(cx, ROOT, name.as_bytes())).unwrap().attr.unwrap().ino;
        ME.call(|cx| fs.unlink(cx, ROOT, name.as_bytes())).unwrap();
        fs.forget(ino, 2);
        files.remove(&name);
    }
    sync(fs);
}

/// Asks for another size once: a turn of the work.
pub fn ask(fs: &LocalFs, bytes: u64) -> Result<ResizeAnswer, Errno> {
    let answer = ME.call(|cx| fs.ioctl(cx, ROOT, ioctl::RESIZE, &bytes.to_ne_bytes(), 16))?;
    Ok(ResizeAnswer::decode(&answer).unwrap())
}

pub fn resize(fs: &LocalFs, bytes: u64) -> Result<ResizeAnswer, Errno> {
    loop {
        match ask(fs, bytes)? {
            ResizeAnswer::Left(_) => {}
            answer => return Ok(answer),
        }
    }
}
