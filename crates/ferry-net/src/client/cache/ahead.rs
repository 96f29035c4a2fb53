//! What walks bring: inodes and whole directories, before anybody asks for them.
//!
//! What is returned, or changed here, while a walk is in flight is not taken from its answer:
//! that may have been read, or leased, before. Each walk keeps which inodes that are, for while
//! somebody removes a tree something is returned and changed all the time.

use crate::rt::collections::{HashMap, HashSet};

use ferry_fs::Ino;

use crate::message::DirName;

/// Beyond so many nothing is taken from the answer.
const STALE_MAX: usize = 1 << 16;

/// A walk in flight.
#[derive(Default)]
pub(super) struct UnderWay {
    /// Inodes that were returned since, or that the server changes for us.
    pub(super) stale: HashSet<Ino>,
    /// Inodes that were changed here since.
    pub(super) changed: HashSet<Ino>,
    /// What was asked for; whether the directory was leased then.
    pub(super) names: Vec<(DirName, bool)>,
}

/// Walks in flight; `None`: nothing is taken from its answer.
#[derive(Default)]
pub(super) struct Walks {
    pub(super) next: u64,
    pub(super) under_way: HashMap<u64, Option<UnderWay>>,
    /// Inodes and directories that walks have brought.
    pub(super) brought: u64,
    pub(super) asked: u64,
}

impl Walks {
    /// These are returned, or changed by the server.
    pub(super) fn leave_out(&mut self, inos: &[Ino]) {
        self.add(inos, |walk| &mut walk.stale);
    }

    /// These are changed here.
    pub(super) fn changed(&mut self, inos: &[Ino]) {
        self.add(inos, |walk| &mut walk.changed);
    }

    fn add(&mut self, inos: &[Ino], to: impl Fn(&mut UnderWay) -> &mut HashSet<Ino>) {
        for walk in self.under_way.values_mut() {
            if let Some(under_way) = walk {
                to(under_way).extend(inos);
                if to(under_way).len() > STALE_MAX {
                    *walk = None;
                }
            }
        }
    }

    /// Nobody knows what is.
    pub(super) fn leave_all_out(&mut self) {
        self.under_way.values_mut().for_each(|walk| *walk = None);
    }
}
