//! Directories that have lost changes because a process before was killed. A program that has made
//! such a change hears of it when it syncs the directory: once for each directory and each of its
//! threads. The kernel has no open directories here, so programs are told apart by their numbers;
//! those that were started later have lost nothing.

use crate::api::Ino;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::OnceLock;

/// The directories, if there are any.
#[derive(Default)]
pub(crate) struct LostNames(OnceLock<Lost>);

struct Lost {
    /// Who has been told, by directory.
    told: HashMap<Ino, Mutex<HashSet<u32>>>,
    /// The processes that there were.
    programs: HashSet<u32>,
}

impl LostNames {
    /// These have lost changes. Called once, before any request is served.
    pub(crate) fn note(&self, directories: Vec<Ino>) {
        if directories.is_empty() {
            return;
        }
        let told = directories.into_iter().map(|ino| (ino, Mutex::default())).collect();
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let lost = Lost { told, programs: all.filter_map(number).collect() };
        let _first = self.0.set(lost);
    }

    /// Whether this thread is to be told now that the directory has lost changes.
    pub(crate) fn tells(&self, directory: Ino, thread: u32) -> bool {
        let Some(lost) = self.0.get() else { return false };
        let Some(told) = lost.told.get(&directory) else { return false };
        // One of another container has no number here.
        let is_older = process_of(thread).is_none_or(|process| lost.programs.contains(&process));
        is_older && told.lock().insert(thread)
    }
}

/// The process that a thread belongs to.
fn process_of(thread: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_that_was_there_is_told_once_for_each_directory() {
        let (lost, own) = (LostNames::default(), std::process::id());
        assert!(!lost.tells(1, own));
        lost.note(vec![1, 2]);
        assert!(lost.tells(1, own) && !lost.tells(1, own));
        assert!(lost.tells(2, own) && !lost.tells(3, own));
        let mut later = std::process::Command::new("sleep").arg("60").spawn().expect("it runs");
        assert!(!lost.tells(1, later.id()), "it was started later");
        later.kill().expect("it is ours");
        later.wait().expect("it ends");
    }
}
