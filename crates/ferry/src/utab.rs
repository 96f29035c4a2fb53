//! Options that mount(8) shows beside the kernel's. It reads them from libmount's table,
//! `/run/mount/utab`.
//!
//! Only root may write that table, and only `mount` without arguments reads these options: an error
//! here is no reason to fail.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The directory of libmount's table.
const DIRECTORY: &str = "/run/mount";
/// How often to try for the table's lock, and the pause after each try.
const TRIES: u32 = 100;
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// What precedes the options of a line; blanks in paths are escaped.
const OPTIONS: &[u8] = b" OPTS=";

/// Makes `mount` show these options for the mount at `target`.
pub fn show(source: &Path, target: &Path, words: &str) {
    let line = entry(source, target, words);
    tell(edit(Path::new(DIRECTORY), |lines| {
        lines.retain(|line| !is_at(line, target));
        lines.push(line);
    }));
}

/// Replaces the options with the same keys, if the table has this mount.
pub fn change(target: &Path, words: &[String]) {
    tell(edit(Path::new(DIRECTORY), |lines| {
        for line in lines.iter_mut().filter(|line| is_at(line, target)) {
            *line = changed(line, words);
        }
    }));
}

/// The options that `mount` shows for the mount at `target`.
pub fn words(target: &Path) -> String {
    let text = std::fs::read(Path::new(DIRECTORY).join("utab")).unwrap_or_default();
    let line = text.split(|b| *b == b'\n').find(|line| is_at(line, target)).unwrap_or_default();
    let (_, words) = split(line);
    String::from_utf8_lossy(words).into_owned()
}

/// Removes the line of an ended mount.
pub fn forget(target: &Path) {
    tell(edit(Path::new(DIRECTORY), |lines| lines.retain(|line| !is_at(line, target))));
}

fn tell(done: io::Result<()>) {
    if let Err(error) = done {
        tracing::debug!(%error, "mount(8) does not show this mount's options");
    }
}

/// Edits the table under its lock; replaces the file only if something changed.
fn edit(directory: &Path, change: impl FnOnce(&mut Vec<Vec<u8>>)) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    std::fs::create_dir_all(directory)?;
    let table = directory.join("utab");
    let _lock = lock(&directory.join("utab.lock"))?;
    let text = match std::fs::read(&table) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        text => text?,
    };
    let mut lines: Vec<Vec<u8>> =
        text.split(|b| *b == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect();
    change(&mut lines);
    let new: Vec<u8> = lines.into_iter().flat_map(|line| [line, b"\n".to_vec()].concat()).collect();
    if new == text {
        return Ok(());
    }
    let beside = directory.join("utab.ferry");
    std::fs::write(&beside, new)?;
    std::fs::rename(&beside, &table)
}

/// Locks the table. mount(8) and umount(8) hold the lock only briefly, but any program may hold it
/// for ever.
fn lock(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    for _ in 0..TRIES {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => drop(poll(&mut [], Some(&PAUSE))),
            locked => return locked.map(|()| file).map_err(io::Error::from),
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}

fn entry(source: &Path, target: &Path, words: &str) -> Vec<u8> {
    let (source, target) = (escape(source), escape(target));
    [b"SRC=", &source[..], b" TARGET=", &target, b" ROOT=/", OPTIONS, words.as_bytes()].concat()
}

fn is_at(line: &[u8], target: &Path) -> bool {
    let field = [b"TARGET=", &escape(target)[..]].concat();
    line.split(|b| *b == b' ').any(|found| found == field)
}

/// Splits a line into what precedes its options, and the options.
fn split(line: &[u8]) -> (&[u8], &[u8]) {
    let at = line.windows(OPTIONS.len()).position(|found| found == OPTIONS);
    line.split_at(at.map_or(line.len(), |at| at + OPTIONS.len()))
}

/// The line with these `key=value` options in place of those with the same keys.
fn changed(line: &[u8], words: &[String]) -> Vec<u8> {
    let key = |word: &str| word.split('=').next().map(str::to_owned);
    let (before, options) = split(line);
    let options = String::from_utf8_lossy(options);
    let new = |word: &str| {
        words.iter().find(|new| key(new) == key(word)).map_or(word, String::as_str).to_owned()
    };
    let options: Vec<_> = options.split(',').map(new).collect();
    [before, options.join(",").as_bytes()].concat()
}

/// Escapes a path as the kernel's tables do: `\040` for a blank.
fn escape(path: &Path) -> Vec<u8> {
    let octal = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        _ => vec![*byte],
    };
    path.as_os_str().as_bytes().iter().flat_map(octal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_has_one_line_and_other_lines_stay() {
        let mine = Path::new("/mnt/my data");
        let line = entry(Path::new("/v.ferry"), mine, "flush=adaptive,fast_flush=2ms");
        assert_eq!(
            line,
            b"SRC=/v.ferry TARGET=/mnt/my\\040data ROOT=/ OPTS=flush=adaptive,fast_flush=2ms"
        );
        assert!(is_at(&line, mine) && !is_at(&line, Path::new("/mnt/my")));
        let line = changed(&line, &["flush=each".into()]);
        assert!(line.ends_with(b"data ROOT=/ OPTS=flush=each,fast_flush=2ms"));
    }

    #[test]
    fn the_table_is_replaced_as_a_whole() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path();
        let other = b"SRC=/dev/sdb1 TARGET=/srv ROOT=/ OPTS=uhelper=x";
        std::fs::write(path.join("utab"), [&other[..], b"\n"].concat()).expect("written");
        edit(path, |lines| lines.push(b"more".to_vec())).expect("a directory of our own");
        assert_eq!(
            std::fs::read(path.join("utab")).expect("there"),
            [&other[..], b"\nmore\n"].concat()
        );
        edit(path, |lines| lines.retain(|line| line != b"more")).expect("a directory of our own");
        assert_eq!(std::fs::read(path.join("utab")).expect("there"), [&other[..], b"\n"].concat());
        let held = lock(&path.join("utab.lock")).expect("free");
        assert!(edit(path, |_| ()).is_err(), "somebody else has the lock");
        drop(held);
        edit(path, |_| ()).expect("free again");
    }
}
