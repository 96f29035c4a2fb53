//! The unstable set: the inodes with changes that are not durable, and the sessions of these
//! changes.
//!
//! * UNSTABLE-1: what a client decides under a write lease builds on durable changes and on its
//!   own. The server makes durable what others have changed of the inode before it sends the grant.
//!   So the client can replay its changes after a crash, whether the others come back or not. It
//!   can replay what it changed before it had the lease, too.
//! * UNSTABLE-2: a change counts from before it is applied until it is durable: first as being
//!   applied, then as entered. Its session counts it before it is entered, so a sync that removes
//!   it has told the session. A sync removes what was entered before it began.
//! * UNSTABLE-3: no client observes or builds on another client's change until it is durable. So
//!   only the client that made a change has seen what a crash takes away, and it replays that: no
//!   other client has changed anything since.

use crate::rt::collections::HashMap;

use crate::rt::Mutex;
use ferry_fs::Ino;

use super::leases::SessionId;

/// So many inodes are known; beyond that, all inodes count as changed by others.
const INODES_MAX: usize = 1 << 20;

#[derive(Debug)]
struct LastChange {
    /// The session of the newest change, and the number of that change among all.
    session: SessionId,
    number: u64,
    /// Others have changed it before.
    shared: bool,
}

#[derive(Debug, Default)]
struct State {
    inodes: HashMap<Ino, LastChange>,
    /// Inodes that a session is changing without a write lease.
    changing: HashMap<Ino, SessionId>,
    newest: u64,
    /// The newest change that found no room.
    unknown: u64,
    durable: u64,
}

/// The unstable set of one server.
#[derive(Debug, Default)]
pub(super) struct UnstableSet(Mutex<State>);

impl UnstableSet {
    /// A session begins to change these; no other session changes them meanwhile. They are entered
    /// when the result is dropped.
    pub(super) fn begin(&self, session: SessionId, inos: Vec<Ino>) -> Changing<'_> {
        self.0.lock().changing.extend(inos.iter().map(|ino| (*ino, session)));
        Changing { unstable: self, session, inos, made: None }
    }

    /// A change was replayed. Its inodes are not known.
    pub(super) fn enter_unknown(&self) {
        let mut state = self.0.lock();
        state.newest += 1;
        state.unknown = state.newest;
    }

    /// A session has changed these.
    fn enter(&self, session: SessionId, inos: impl Iterator<Item = Ino>) {
        let mut state = self.0.lock();
        state.newest += 1;
        let number = state.newest;
        for ino in inos {
            state.changing.remove(&ino);
            if let Some(last) = state.inodes.get_mut(&ino) {
                let shared = last.shared || last.session != session;
                *last = LastChange { session, number, shared };
            } else if state.inodes.len() < INODES_MAX {
                state.inodes.insert(ino, LastChange { session, number, shared: false });
            } else {
                state.unknown = number;
            }
        }
    }

    /// Whether others have changed one of these, or may have, and that is not durable. A change
    /// that touches no inode builds on nothing: a client that replays opens many files, each
    /// between two changes, and waits for no sync.
    pub(super) fn is_others(&self, session: SessionId, inos: &[Ino]) -> bool {
        let state = self.0.lock();
        let others = |last: &LastChange| last.shared || last.session != session;
        let changing = |ino: &Ino| state.changing.get(ino).is_some_and(|by| *by != session);
        !inos.is_empty() && state.unknown > state.durable
            || inos.iter().any(|ino| state.inodes.get(ino).is_some_and(others))
            || !state.changing.is_empty() && inos.iter().any(changing)
    }

    /// The newest entry: a sync that begins now covers it.
    pub(super) fn newest(&self) -> u64 {
        self.0.lock().newest
    }

    /// A sync has succeeded that covers entries up to this one.
    pub(super) fn are_durable(&self, covered: u64) {
        let mut state = self.0.lock();
        state.durable = covered.max(state.durable);
        state.inodes.retain(|_, last| last.number > covered);
    }
}

/// A change that is being applied.
pub(super) struct Changing<'a> {
    unstable: &'a UnstableSet,
    session: SessionId,
    inos: Vec<Ino>,
    /// The inode that it has made.
    pub(super) made: Option<Ino>,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if !self.inos.is_empty() {
            self.unstable.enter(self.session, self.inos.iter().copied().chain(self.made));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_another_session_is_unstable_until_it_is_durable() {
        let unstable = UnstableSet::default();
        unstable.enter(1, [5, 6].into_iter());
        assert!(!unstable.is_others(1, &[5, 6, 7]) && unstable.is_others(2, &[7, 6]));
        let covered = unstable.newest();
        unstable.enter(2, [6].into_iter());
        unstable.enter(2, [7].into_iter());
        assert!(unstable.is_others(2, &[6]) && !unstable.is_others(2, &[7]));
        unstable.are_durable(covered);
        assert!(!unstable.is_others(2, &[5]), "it is durable");
        assert!(unstable.is_others(2, &[6]), "of the older one that is not known");
        unstable.are_durable(unstable.newest());
        assert!(!unstable.is_others(1, &[5, 6, 7]));
    }

    #[test]
    fn a_change_in_progress_stays_unstable_across_a_sync() {
        let unstable = UnstableSet::default();
        let changing = unstable.begin(1, vec![5]);
        unstable.are_durable(unstable.newest());
        assert!(unstable.is_others(2, &[5]) && !unstable.is_others(1, &[5]));
        drop(changing);
        assert!(unstable.is_others(2, &[5]));
        unstable.are_durable(unstable.newest());
        assert!(!unstable.is_others(2, &[5]));
        unstable.enter_unknown();
        assert!(unstable.is_others(1, &[5]) && unstable.is_others(2, &[6]));
        assert!(!unstable.is_others(1, &[]), "it touches nothing");
        unstable.are_durable(unstable.newest());
        assert!(!unstable.is_others(2, &[5]));
    }
}
