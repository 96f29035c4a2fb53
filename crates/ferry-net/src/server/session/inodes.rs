//! What a session's client knows and has open (SESSION-4).

use std::time::Duration;

use crate::rt::collections::HashSet;
use ferry_fs::{Errno, Filesystem, Ino};

use super::change::{Change, Open};
use super::link::removed_names;
use super::state::Session;
use crate::message::{DirName, Effect, OPEN_MAX};

/// The server tells a client of the newest names that others have removed between two pings, up to
/// so many bytes.
const REMOVED_NAMES_BYTES_MAX: usize = 2 << 20;
/// Bytes of such a name beside the name itself.
const REMOVED_NAME_BYTES: usize = 64;

impl Session {
    /// An answer names `ino`, for which the file system has counted a lookup. `dir` is the
    /// directory in which it was found (0: it is a directory itself, or that is unknown). Returns
    /// the stamp.
    pub(in crate::server) fn learn(&self, fs: &dyn Filesystem, ino: Ino, dir: Ino) -> u64 {
        self.found_in(ino, dir);
        let (stamp, surplus) = {
            let mut state = self.state.lock();
            state.stamp += 1;
            let stamp = state.stamp;
            let surplus =
                self.is_over() || ino == self.root || state.known.insert(ino, stamp).is_some();
            (stamp, surplus)
        };
        if surplus {
            fs.forget(ino, 1);
        }
        stamp
    }

    /// The client has found an inode in `dir` (0: the inode is a directory, or that is unknown).
    pub(in crate::server) fn found_in(&self, ino: Ino, dir: Ino) {
        if let Some(bounds) = self.bounds.as_ref().filter(|_| dir != 0) {
            bounds.found(ino, dir);
        }
    }

    /// The directory in which the client has found an inode that it knows; 0: that is unknown, or
    /// not needed.
    pub(in crate::server) fn where_found(&self, ino: Ino) -> Ino {
        self.bounds.as_ref().and_then(|bounds| bounds.where_found(ino)).unwrap_or(0)
    }

    /// The client has claimed these, and the file system has counted their lookups. Returns the
    /// stamp.
    pub(in crate::server) fn learn_claimed(
        &self,
        fs: &dyn Filesystem,
        inos: &[Ino],
        now: Duration,
    ) -> u64 {
        let (stamp, surplus) = {
            let mut state = self.state.lock();
            state.stamp += 1;
            let (stamp, over) = (state.stamp, self.is_over());
            let mut learn =
                |ino: &Ino| over || *ino == self.root || state.known.insert(*ino, stamp).is_some();
            let surplus: Vec<Ino> = inos.iter().copied().filter(|ino| learn(ino)).collect();
            if surplus.len() < inos.len() {
                state.claimed_at = Some(now);
            }
            (stamp, surplus)
        };
        surplus.into_iter().for_each(|ino| fs.forget(ino, 1));
        stamp
    }

    /// Whether the client has claimed an inode after `since`, so that it may claim more.
    pub(in crate::server) fn has_claimed(&self, since: Duration) -> bool {
        self.state.lock().claimed_at.is_some_and(|at| at > since)
    }

    /// Another client has removed these names of some of these inodes.
    pub(in crate::server) fn names_removed(&self, inos: &[Ino], names: &[DirName]) {
        let mut state = self.state.lock();
        let knows = |ino: &Ino| self.knows(&state, *ino);
        let is_dir = |ino: &Ino| names.iter().any(|name| name.parent == *ino);
        if self.is_over() || !inos.iter().any(|ino| !is_dir(ino) && knows(ino)) {
            return;
        }
        let known: Vec<&DirName> = names.iter().filter(|name| knows(&name.parent)).collect();
        for DirName { parent, name } in known {
            let (names, bytes) = &mut state.removed_names;
            names.push_back(DirName { parent: self.client_ino(*parent), name: name.clone() });
            *bytes += REMOVED_NAME_BYTES + name.len();
            while *bytes > REMOVED_NAMES_BYTES_MAX
                && let Some(oldest) = names.pop_front()
            {
                *bytes -= REMOVED_NAME_BYTES + oldest.name.len();
            }
        }
    }

    /// The messages about names that others have removed since the last such messages.
    pub(in crate::server) fn take_removed_names(&self) -> Vec<u8> {
        let names: Vec<DirName> = std::mem::take(&mut self.state.lock().removed_names).0.into();
        removed_names(&names)
    }

    /// The client forgets an inode, unless an answer that it has not seen has named it again.
    pub(in crate::server) fn forget(&self, fs: &dyn Filesystem, ino: Ino, stamp: u64) {
        let forgets = {
            let mut state = self.state.lock();
            let forgets = state.known.get(&ino).is_some_and(|newest| *newest <= stamp);
            if forgets {
                state.known.remove(&ino);
            }
            forgets
        };
        if forgets {
            if let Some(bounds) = &self.bounds {
                bounds.forget(ino);
            }
            fs.forget(ino, 1);
        }
    }

    /// Enters an open file, unless its number is in use or there are too many.
    pub(in crate::server) fn open(&self, number: u64, open: Open) -> Result<(), Errno> {
        let mut state = self.state.lock();
        if self.is_over() || state.handles.contains_key(&number) {
            return Err(Errno(libc::EIO));
        }
        if state.handles.len() >= OPEN_MAX {
            return Err(Errno(libc::ENFILE));
        }
        state.handles.insert(number, open);
        Ok(())
    }

    pub(in crate::server) fn is_open(&self, number: u64) -> bool {
        self.state.lock().handles.contains_key(&number)
    }

    pub(in crate::server) fn handle(&self, number: u64) -> Option<Open> {
        self.state.lock().handles.get(&number).copied()
    }

    /// Those of these inodes of which the client has files open.
    pub(in crate::server) fn open_among(&self, mut inos: Vec<Ino>) -> Vec<Ino> {
        if !inos.is_empty() {
            let open: HashSet<Ino> =
                self.state.lock().handles.values().map(|open| open.ino).collect();
            inos.retain(|ino| open.contains(ino));
        }
        inos
    }

    /// The file system's number of a file that the client has open on this inode.
    pub(in crate::server) fn handle_of(&self, ino: Ino) -> Option<u64> {
        let state = self.state.lock();
        state.handles.values().find(|open| open.ino == ino).map(|open| open.fh)
    }

    pub(in crate::server) fn release(&self, number: u64) -> Option<Open> {
        self.state.lock().handles.remove(&number)
    }

    /// The client has lost a lock on this file, and hears of that with the answer to the change
    /// that is being applied. Each use of what it has open of the file fails.
    pub(in crate::server) fn lock_lost(&self, ino: Ino) {
        let mut state = self.state.lock();
        state.handles.values_mut().filter(|open| open.ino == ino).for_each(|open| open.lost = true);
        state.lock_lost = state.applied + 1;
    }

    /// Whether a change was sent before the client heard of a lock that it has lost. It may rely on
    /// that lock, whatever file it is of.
    pub(in crate::server) fn relies_on_lost_lock(&self, change: &Change) -> bool {
        // Hardly ever, so that nothing else is looked at.
        if change.answered >= self.state.lock().lock_lost {
            return false;
        }
        let info = change.op.info();
        info.effect != Effect::Nothing && !info.restores
    }

    /// Returns what the session holds of the file system. It has ended, so nothing is added any
    /// more.
    pub(in crate::server) fn clear(&self, fs: &dyn Filesystem) {
        let (handles, known) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.handles), std::mem::take(&mut state.known))
        };
        let caller = ferry_fs::InProcess::default();
        for open in handles.into_values() {
            let _: Result<(), _> = caller.call(|cx| {
                fs.release(cx, open.ino, open.fh);
                Ok(())
            });
        }
        known.into_keys().for_each(|ino| fs.forget(ino, 1));
    }
}
