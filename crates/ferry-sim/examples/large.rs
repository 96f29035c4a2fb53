//! Volumes that are too large for a test, for `scripts/bench-large`:
//!
//! `large make VOLUME [FILES]`: a volume with so many files; `large age VOLUME`: one file in five
//! of it is changed, in no order, so that its metadata lies in no order; `large plant VOLUME`:
//! faults in what that volume says of itself; `large fill VOLUME LOG_BYTES`: a volume whose log is
//! as full as it can get when the program dies; `large open VOLUME`: how long recovery takes
//! (nothing is written, so it can be repeated) and how much memory.

use ferry_device::{BlockDevice, FileDevice, OpenMode};
use ferry_env::Env;
use ferry_fs::keys::{self, Dentry, Extent, InodeRecord, Key};
use ferry_fs::volume::read_superblock;
use ferry_fs::{
    Errno, Filesystem, FsOptions, InProcess, Ino, LocalFs, MkfsOptions, ROOT, SetAttr, mkfs,
};
use ferry_journal::{Bystander, Credits, Journal, JournalOptions};
use std::path::Path;
use std::sync::Arc;

type Any = Box<dyn std::error::Error>;

/// Files in one directory.
const PER_DIRECTORY: u64 = 1000;
/// The volume's size, in bytes.
const SIZE: u64 = 64 << 30;
/// Contents of four files: most files of a source tree are small; one of four has an extent.
const TREE: [usize; 4] = [500, 500, 1500, 6000];
/// Contents that the log holds.
const LOGGED: [usize; 4] = [500, 500, 1500, 2000];
/// The log is looked at after so many operations, which take less of it than so many bytes.
const STEP: u64 = 32;
const STEP_MAX: u64 = 256 << 10;

fn errno(errno: Errno) -> Any {
    format!("{errno}").into()
}

fn made(
    path: &Path,
    log_size: Option<u64>,
    options: FsOptions,
    env: &Env,
) -> Result<Arc<LocalFs>, Any> {
    let device: Arc<dyn BlockDevice> = Arc::new(FileDevice::create(path, SIZE, false, env)?);
    mkfs(&device, &MkfsOptions { log_size, ..MkfsOptions::default() }, env)?;
    Ok(LocalFs::open(device, options, env.clone())?)
}

fn make_dir(fs: &LocalFs, name: &str) -> Result<Ino, Any> {
    let entry = InProcess::default()
        .call(|cx| fs.mkdir(cx, ROOT, name.as_bytes(), 0o755))
        .map_err(errno)?;
    Ok(entry.attr.ok_or("made")?.ino)
}

fn make_file(fs: &LocalFs, dir: Ino, n: u64, sizes: &[usize; 4]) -> Result<(), Any> {
    let user = InProcess::default();
    let (name, mode) = (format!("some-file-{n}.c"), libc::S_IFREG | 0o644);
    let made = user.call(|cx| fs.create(cx, dir, name.as_bytes(), mode, libc::O_RDWR));
    let (entry, opened) = made.map_err(errno)?;
    let ino = entry.attr.ok_or("made")?.ino;
    let bytes = vec![b'x'; sizes[(n % 4) as usize]];
    user.call(|cx| fs.write(cx, ino, opened.fh, 0, &bytes, false, false)).map_err(errno)?;
    let released = user.call(|cx| {
        fs.release(cx, ino, opened.fh);
        Ok(())
    });
    released.map_err(errno)?;
    fs.forget(ino, 1);
    Ok(())
}

fn make(path: &Path, files: u64, env: &Env) -> Result<(), Any> {
    let fs = made(path, None, FsOptions::default(), env)?;
    for d in 0..files.div_ceil(PER_DIRECTORY) {
        let dir = make_dir(&fs, &format!("d{d}"))?;
        for n in 0..PER_DIRECTORY.min(files - d * PER_DIRECTORY) {
            make_file(&fs, dir, n, &TREE)?;
        }
        fs.forget(dir, 1);
        fs.sync()?;
    }
    fs.close()?;
    println!("{files} files made in {:.1} s", env.clock.monotonic().as_secs_f64());
    Ok(())
}

/// The inode that a name leads to, which is looked up once more.
fn find(fs: &LocalFs, dir: Ino, name: &str) -> Result<Option<Ino>, Any> {
    let entry =
        InProcess::default().call(|cx| fs.lookup(cx, dir, name.as_bytes())).map_err(errno)?;
    Ok(entry.attr.map(|attr| attr.ino))
}

/// Changes the permissions of many files, in no order.
fn age(path: &Path, env: &Env) -> Result<(), Any> {
    let device: Arc<dyn BlockDevice> = Arc::new(FileDevice::open(path, OpenMode::ReadWrite, env)?);
    let fs = LocalFs::open(device, FsOptions::default(), env.clone())?;
    let mut dirs = Vec::new();
    while let Some(dir) = find(&fs, ROOT, &format!("d{}", dirs.len()))? {
        dirs.push(dir);
    }
    let (files, mut changed) = (dirs.len() as u64 * PER_DIRECTORY, 0);
    for n in 0..files / 5 {
        // A step that divides no such number: all of them are different.
        let at = n * 500_009 % files;
        let name = format!("some-file-{}.c", at % PER_DIRECTORY);
        let Some(ino) = find(&fs, dirs[(at / PER_DIRECTORY) as usize], &name)? else { continue };
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        InProcess::default().call(|cx| fs.setattr(cx, ino, None, &set)).map_err(errno)?;
        fs.forget(ino, 1);
        changed += 1;
    }
    dirs.into_iter().for_each(|dir| fs.forget(dir, 1));
    fs.close()?;
    println!("{changed} files changed in {:.1} s", env.clock.monotonic().as_secs_f64());
    Ok(())
}

/// A key and its value.
type Row = (Vec<u8>, Vec<u8>);

/// Keys that lie in `[from, to)`.
fn rows(journal: &Journal, from: &[u8], to: &[u8]) -> Result<Vec<Row>, Any> {
    let mut rows = Vec::new();
    journal.scan(from, to, &mut |key, value| {
        rows.push((key.to_vec(), value.to_vec()));
        true
    })?;
    Ok(rows)
}

/// The inodes that a directory names, and the key of each name.
fn names(journal: &Journal, dir: Ino) -> Result<Vec<(Vec<u8>, Ino)>, Any> {
    let rows = rows(journal, &keys::dentry_from(dir, 0), &keys::dentry_end(dir))?;
    let ino = |value: &[u8]| Dentry::decode(value).map(|dentry| dentry.ino);
    rows.into_iter().map(|(key, value)| Ok((key, ino(&value).map_err(|_| "a name")?))).collect()
}

/// A volume with files that have lost their name or their record, wrong counts, and blocks that two
/// files claim.
fn plant(path: &Path, env: &Env) -> Result<(), Any> {
    let device: Arc<dyn BlockDevice> = Arc::new(FileDevice::open(path, OpenMode::ReadWrite, env)?);
    let geometry = read_superblock(&device)?.geometry();
    let options = JournalOptions { read_only: false, ..JournalOptions::offline(64 << 20) };
    let (journal, _) = Journal::open(device, geometry, options, env.clone(), Arc::new(Bystander))?;
    let dirs = names(&journal, ROOT)?;
    let mut claimed = None;
    let mut txn = journal.begin(Credits { keys: 64, bytes: 64 << 10, urgent: true })?;
    for (n, (_, dir)) in dirs.iter().step_by(dirs.len().div_ceil(8)).enumerate() {
        let files = names(&journal, *dir)?;
        let (name, ino) = files.get(7).ok_or("a directory with files")?;
        match n {
            0..2 => txn.delete(name),
            2..4 => txn.delete(&keys::inode(*ino)),
            4 => {
                let record = journal.get(&keys::inode(*ino))?.ok_or("a record")?;
                let record = InodeRecord::decode(&record).map_err(|_| "a record")?;
                txn.put(&keys::inode(*ino), &InodeRecord { nlink: 9, ..record }.encode());
            }
            // Of two files with extents, the second claims the blocks of the first.
            _ => {
                for (_, ino) in &files {
                    let extents = rows(&journal, &keys::extent(*ino, 0), &keys::extent_end(*ino))?;
                    let Some((key, value)) = extents.into_iter().next() else { continue };
                    let Ok(Extent::Data { .. }) = Extent::decode(&value) else { continue };
                    match claimed.take() {
                        None => claimed = Some(value),
                        Some(theirs) => {
                            txn.put(&key, &theirs);
                            break;
                        }
                    }
                }
            }
        }
    }
    txn.delete(&keys::counters());
    let some = rows(&journal, &keys::segment(0), &keys::segment_end())?;
    if let Some((key, _)) =
        some.iter().find(|(key, _)| matches!(keys::parse(key), Some(Key::Segment(_))))
    {
        txn.delete(key);
    }
    txn.commit();
    journal.close()?;
    Ok(())
}

/// Free bytes of the log when everything is durable; it must not have been emptied before.
fn log_free(fs: &LocalFs) -> Result<u64, Any> {
    fs.sync()?;
    let stats = fs.stats();
    let number = |name: &str| stats["log"][name].as_u64().ok_or("a counter");
    if number("checkpoints")? > 0 {
        return Err("there was a checkpoint: the log will not be full".into());
    }
    Ok(number("free_bytes")?)
}

/// Makes files until they find no more room in the log without a checkpoint, then removes some, for
/// which more of it is there; makes it all durable and dies.
fn fill(path: &Path, log_size: u64, env: &Env) -> Result<(), Any> {
    let options = FsOptions { background: false, cache_bytes: 1 << 30, ..FsOptions::default() };
    let fs = made(path, Some(log_size), options, env)?;
    // What making files leaves for those who remove some.
    let reserve = log_size / 8;
    let (mut dir, mut count) = (0, 0);
    while count % STEP > 0 || log_free(&fs)? > reserve + STEP_MAX {
        if count % PER_DIRECTORY == 0 {
            dir = make_dir(&fs, &format!("d{}", count / PER_DIRECTORY))?;
        }
        make_file(&fs, dir, count % PER_DIRECTORY, &LOGGED)?;
        count += 1;
    }
    let user = InProcess::default();
    let mut removed = 0;
    // Each for itself takes whole blocks of the log.
    while removed < count && log_free(&fs)? > STEP_MAX / 4 {
        let (d, n) = (removed / PER_DIRECTORY, removed % PER_DIRECTORY);
        if n == 0 {
            dir = find(&fs, ROOT, &format!("d{d}"))?.ok_or("there")?;
        }
        let name = format!("some-file-{n}.c");
        user.call(|cx| fs.unlink(cx, dir, name.as_bytes())).map_err(errno)?;
        removed += 1;
    }
    let free = log_free(&fs)?;
    println!(
        "{:.1} MiB of {} MiB of log hold {count} files made and {removed} removed",
        (log_size - free) as f64 / f64::from(1 << 20),
        log_size >> 20
    );
    std::process::abort();
}

fn open(path: &Path, env: &Env) -> Result<(), Any> {
    let device: Arc<dyn BlockDevice> = Arc::new(FileDevice::open(path, OpenMode::ReadOnly, env)?);
    let begun = env.clock.monotonic();
    let fs =
        LocalFs::open(device, FsOptions { read_only: true, ..FsOptions::default() }, env.clone())?;
    let time = env.clock.monotonic() - begun;
    let keys = fs.stats()["log"]["overlay_keys"].as_u64().ok_or("a counter")?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default().trim();
    println!("recovered in {:.2} s, {keys} keys, {peak} of memory", time.as_secs_f64());
    Ok(fs.close()?)
}

fn main() -> Result<(), Any> {
    let env = Env::real();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["make", path] => make(Path::new(path), 1_000_000, &env),
        ["make", path, files] => make(Path::new(path), files.parse()?, &env),
        ["age", path] => age(Path::new(path), &env),
        ["plant", path] => plant(Path::new(path), &env),
        ["fill", path, log_bytes] => fill(Path::new(path), log_bytes.parse()?, &env),
        ["open", path] => open(Path::new(path), &env),
        _ => {
            Err("usage: large make VOLUME [FILES] | age VOLUME | plant VOLUME | fill VOLUME LOG_BYTES | open VOLUME"
                .into())
        }
    }
}
