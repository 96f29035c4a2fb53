//! A workload for a real mount whose daemon gets killed: it keeps, outside of the mount, a log of
//! what it was about to do and of what was acknowledged, and tells afterwards whether all that was
//! acknowledged is there.
//!
//! The log has one line for each step: `begin PATH VERSION` before a file is changed, `done PATH
//! VERSION` when the fsync that makes it durable has returned. Version 0 means that the file does
//! not exist. A file's bytes follow from its path and version, so that any byte that nobody wrote
//! shows. Version n of a file named `log…` is the first n records of it (it is only appended to);
//! any other file is replaced as a whole, by a new file or by `rename`.

use crate::device::SimRng;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

/// Files of each thread.
const FILES: u64 = 40;
/// Bytes of one record of an appended file, at most.
const RECORD_MAX: u64 = 6000;

/// The bytes of a version of a file that is replaced as a whole.
fn whole(path: &str, version: u64) -> Vec<u8> {
    let mut rng = rng_of(path, version);
    let most = *rng.pick(&[100, 3000, 10_000, 300_000]);
    let mut bytes = vec![0; 1 + rng.below(most) as usize];
    rng.fill(&mut bytes);
    bytes
}

/// One record of a file that is appended to.
fn record(path: &str, number: u64) -> Vec<u8> {
    let mut rng = rng_of(path, number);
    let mut bytes = vec![0; 1 + rng.below(RECORD_MAX) as usize];
    rng.fill(&mut bytes);
    bytes
}

fn rng_of(path: &str, version: u64) -> SimRng {
    let hash = path.bytes().fold(version.wrapping_mul(0x9e37_79b9_7f4a_7c15), |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    SimRng::new(hash)
}

fn is_appended(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|name| name.starts_with("log"))
}

/// One thread of the workload.
pub struct Worker<'w> {
    /// The mount, or a directory in it.
    pub root: &'w Path,
    /// The log, opened for appending.
    pub log: &'w File,
    /// Its own directory is `t` and this number.
    pub number: u64,
    /// Decides what it does.
    pub rng: SimRng,
    /// It syncs every file that replaces another before the rename. Without this it trusts for half
    /// of them that a rename never leaves an empty file, which `cache=writeback` does not
    /// guarantee.
    pub syncs_replacements: bool,
}

impl Worker<'_> {
    /// Works until something fails or `stop` says so; returns the number of acknowledgements and
    /// what failed.
    pub fn work(mut self, stop: &dyn Fn() -> bool) -> (u64, io::Result<()>) {
        let mut acknowledged = 0;
        let mut versions = BTreeMap::new();
        let dir = format!("t{}", self.number);
        let made = fs::create_dir(self.root.join(&dir))
            .and_then(|()| self.fsync(&dir))
            .and_then(|()| self.fsync("."));
        if made.is_err() {
            return (0, made);
        }
        while !stop() {
            match self.step(&dir, &mut versions) {
                Ok(()) => acknowledged += 1,
                Err(error) => return (acknowledged, Err(error)),
            }
        }
        (acknowledged, Ok(()))
    }

    fn step(&mut self, dir: &str, versions: &mut BTreeMap<String, u64>) -> io::Result<()> {
        let n = self.rng.below(FILES);
        let kind = if n.is_multiple_of(4) { "log" } else { "file" };
        let path = format!("{dir}/{kind}{n}");
        // Versions grow for good, over removals too, so that old contents can be told from new
        // ones.
        let newest = versions.entry(path.clone()).or_default();
        let exists = self.root.join(&path).exists();
        if is_appended(&path) {
            *newest += 1;
            return self.append(&path, *newest);
        }
        if exists && self.rng.chance(1, 5) {
            return self.remove(dir, &path);
        }
        *newest += 1;
        let version = *newest;
        if exists { self.replace(dir, &path, version) } else { self.create(&path, version) }
    }

    fn append(&self, path: &str, version: u64) -> io::Result<()> {
        self.note("begin", path, version)?;
        let mut file = OpenOptions::new().append(true).create(true).open(self.root.join(path))?;
        file.write_all(&record(path, version))?;
        file.sync_data()?;
        self.note("done", path, version)
    }

    fn create(&self, path: &str, version: u64) -> io::Result<()> {
        self.note("begin", path, version)?;
        let mut file = File::create_new(self.root.join(path))?;
        file.write_all(&whole(path, version))?;
        file.sync_all()?;
        self.note("done", path, version)
    }

    fn replace(&mut self, dir: &str, path: &str, version: u64) -> io::Result<()> {
        self.note("begin", path, version)?;
        let temporary = self.root.join(format!("{path}.new"));
        let mut file = File::create(&temporary)?;
        file.write_all(&whole(path, version))?;
        if self.rng.chance(1, 2) || self.syncs_replacements {
            file.sync_all()?;
        }
        fs::rename(&temporary, self.root.join(path))?;
        self.fsync(dir)?;
        self.note("done", path, version)
    }

    fn remove(&self, dir: &str, path: &str) -> io::Result<()> {
        self.note("begin", path, 0)?;
        fs::remove_file(self.root.join(path))?;
        self.fsync(dir)?;
        self.note("done", path, 0)
    }

    fn fsync(&self, dir: &str) -> io::Result<()> {
        File::open(self.root.join(dir))?.sync_all()
    }

    /// One write of a whole line: the lines of several threads do not mix.
    fn note(&self, step: &str, path: &str, version: u64) -> io::Result<()> {
        let mut log = self.log;
        log.write_all(format!("{step} {path} {version}\n").as_bytes())
    }
}

/// What the log says of a file.
#[derive(Debug, Default)]
struct Known {
    /// The version acknowledged last.
    done: u64,
    /// Versions begun since, not acknowledged.
    begun: Vec<u64>,
}

/// Holds what is below `root` against the log; returns the number of files checked, or everything
/// that is wrong.
pub fn verify(root: &Path, log: &str) -> Result<usize, Vec<String>> {
    let mut files: BTreeMap<&str, Known> = BTreeMap::new();
    // The last line may be cut short where the workload itself was killed.
    let whole_lines = log.rfind('\n').map_or("", |end| &log[..end]);
    for line in whole_lines.lines() {
        let mut words = line.split(' ');
        let (Some(step), Some(path), Some(version)) = (words.next(), words.next(), words.next())
        else {
            return Err(vec![format!("the log has a line that makes no sense: {line}")]);
        };
        let Ok(version) = version.parse() else {
            return Err(vec![format!("the log has a line that makes no sense: {line}")]);
        };
        let known = files.entry(path).or_default();
        if step == "done" {
            *known = Known { done: version, begun: Vec::new() };
        } else {
            known.begun.push(version);
        }
    }
    let wrong: Vec<_> =
        files.iter().filter_map(|(path, known)| check(root, path, known).err()).collect();
    if wrong.is_empty() { Ok(files.len()) } else { Err(wrong) }
}

fn check(root: &Path, path: &str, known: &Known) -> Result<(), String> {
    let found = match fs::read(root.join(path)) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(format!("{path}: {error}")),
    };
    if is_appended(path) {
        return check_appended(path, known, &found.unwrap_or_default());
    }
    let may = std::iter::once(known.done).chain(known.begun.iter().copied());
    for version in may.clone() {
        let expected = (version != 0).then(|| whole(path, version));
        if expected == found {
            return Ok(());
        }
    }
    // A new file is not durable, and so may be empty or in part, until its fsync has returned.
    if let (0, Some(found), Some(&version)) = (known.done, &found, known.begun.first()) {
        let expected = whole(path, version);
        let written = |(at, byte): (usize, &u8)| expected.get(at) == Some(byte);
        if found.iter().enumerate().all(written) {
            return Ok(());
        }
    }
    let what = found
        .map_or("is absent".into(), |found| format!("has {} bytes of none of them", found.len()));
    Err(format!(
        "{path}: acknowledged was version {}, begun since {:?}; it {what}",
        known.done, known.begun
    ))
}

fn check_appended(path: &str, known: &Known, found: &[u8]) -> Result<(), String> {
    let mut rest = found;
    for number in 1..=known.done {
        let expected = record(path, number);
        rest = rest.strip_prefix(&expected[..]).ok_or_else(|| {
            format!("{path}: record {number} of {} acknowledged ones is not there", known.done)
        })?;
    }
    let tail: Vec<u8> = known.begun.iter().flat_map(|number| record(path, *number)).collect();
    if tail.starts_with(rest) {
        Ok(())
    } else {
        Err(format!("{path}: {} bytes behind record {} were never written", rest.len(), known.done))
    }
}

#[cfg(test)]
mod tests;
