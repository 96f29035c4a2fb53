//! Directories that have lost changes because a process before was killed. A program that has made
//! such a change hears of it when it syncs the directory: once for each directory and each of its
//! threads. The kernel has no open directories here, so programs are told apart by their numbers;
//! those that were started later have lost nothing. But a program of an older one, a shell for
//! example, may sync what another program of that one has made: of all its programs the first one
//! that asks is told. It is the same for who syncs the whole volume.

use crate::api::Ino;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::fs;
use std::sync::OnceLock;

/// Stands for the whole volume: no inode has this number.
pub(crate) const VOLUME: Ino = 0;
/// Programs above a program that are looked at.
const ABOVE_MAX: usize = 64;

/// The directories, if there are any.
#[derive(Default)]
pub(crate) struct LostNames(OnceLock<Lost>);

#[derive(Default)]
struct Lost {
    directories: HashSet<Ino>,
    /// Any directory may have lost its own name, or that of one above it.
    all: bool,
    /// Who has been told of which.
    told: Mutex<HashSet<(Ino, u32)>>,
    /// The processes that there were.
    programs: HashSet<u32>,
}

impl LostNames {
    /// These have lost changes; `all`: so may any other. Called once, before any request is served.
    pub(crate) fn note(&self, directories: HashSet<Ino>, all: bool) {
        if directories.is_empty() && !all {
            return;
        }
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let programs = entries.filter_map(number).collect();
        let _first = self.0.set(Lost { directories, all, told: Mutex::default(), programs });
    }

    /// Whether this thread is to be told now that the directory has lost changes.
    pub(crate) fn tells(&self, directory: Ino, thread: u32) -> bool {
        let Some(lost) = self.0.get() else { return false };
        let has_lost = lost.all || lost.directories.contains(&directory);
        let older = || match status(thread) {
            Some(own) if lost.programs.contains(&own.process) => Some(thread),
            Some(own) => lost.older_above(own),
            // One of another container has no number here.
            None => Some(thread),
        };
        has_lost && older().is_some_and(|asks| lost.told.lock().insert((directory, asks)))
    }

    /// For the process that goes on.
    pub(crate) fn carry(&self) -> Vec<u64> {
        let Some(lost) = self.0.get() else { return Vec::new() };
        let counts = [lost.directories.len() as u64, lost.programs.len() as u64];
        let told = lost.told.lock();
        let told = told.iter().flat_map(|(ino, told)| [*ino, u64::from(*told)]);
        let programs = lost.programs.iter().map(|number| u64::from(*number));
        let all = [u64::from(lost.all)].into_iter().chain(counts);
        all.chain(lost.directories.iter().copied()).chain(programs).chain(told).collect()
    }

    /// What the process before has [carried](Self::carry).
    pub(crate) fn take_over(&self, words: &[u64]) {
        let [all, directories, programs, rest @ ..] = words else { return };
        let split = |words: &[u64], count: u64| {
            let (these, rest) = words.split_at(words.len().min(count as usize));
            (these.to_vec(), rest.to_vec())
        };
        let (directories, rest) = split(rest, *directories);
        let (programs, rest) = split(&rest, *programs);
        let told = rest.chunks_exact(2).map(|pair| (pair[0], pair[1] as u32)).collect();
        let _first = self.0.set(Lost {
            directories: directories.into_iter().collect(),
            all: *all != 0,
            told: Mutex::new(told),
            programs: programs.into_iter().map(|number| number as u32).collect(),
        });
    }
}

impl Lost {
    /// The nearest older program that has started this one, or has started the one that has.
    fn older_above(&self, own: Status) -> Option<u32> {
        let above = std::iter::successors(Some(own), |one| status(one.parent));
        // The first process of the system starts all services.
        let above = above.skip(1).take(ABOVE_MAX).take_while(|one| one.process > 1);
        above.map(|one| one.process).find(|process| self.programs.contains(process))
    }
}

/// The process that a thread belongs to, and the one that has started it.
#[derive(Clone, Copy)]
struct Status {
    process: u32,
    parent: u32,
}

fn status(thread: u32) -> Option<Status> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let number = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|number| number.trim().parse().ok())
    };
    Some(Status { process: number("Tgid:")?, parent: number("PPid:")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_that_was_there_is_told_once_for_each_directory() {
        let (lost, own) = (LostNames::default(), std::process::id());
        assert!(!lost.tells(1, own));
        lost.note(HashSet::from([1, 2, 4]), false);
        assert!(lost.tells(1, own) && !lost.tells(1, own));
        assert!(lost.tells(2, own) && !lost.tells(3, own));
        let start = || std::process::Command::new("sleep").arg("60").spawn().expect("it runs");
        let [mut later, mut last] = [start(), start()];
        assert!(!lost.tells(1, later.id()), "the program that has started it was told");
        assert!(lost.tells(4, later.id()), "it may sync what another one of that program has made");
        assert!(!lost.tells(4, last.id()) && !lost.tells(4, own), "once");
        let next = LostNames::default();
        next.take_over(&lost.carry());
        assert!(!next.tells(1, own) && !next.tells(4, last.id()) && !next.tells(3, own));
        for one in [&mut later, &mut last] {
            one.kill().expect("it is ours");
            one.wait().expect("it ends");
        }
    }

    #[test]
    fn a_lost_move_of_a_directory_concerns_all() {
        let (lost, own) = (LostNames::default(), std::process::id());
        lost.note(HashSet::new(), true);
        assert!(lost.tells(7, own) && !lost.tells(7, own) && lost.tells(8, own));
        let next = LostNames::default();
        next.take_over(&lost.carry());
        assert!(!next.tells(7, own) && next.tells(9, own));
        next.take_over(&[]);
    }
}
