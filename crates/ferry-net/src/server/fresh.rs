//! Which inodes have changes that are not durable, and whose these are.
//!
//! * F1: what a session decides under a write lease builds on what is durable, and on its own: what others have changed of the inode is made
//!   durable before the lease is granted. So what it promises can be made again after a crash, whether they come back or not; and all that
//!   it had changed itself before it had the lease it can make again, too.
//! * F2: a change is entered when it is made, before its turn ends. A sync takes out what was entered before it began.

use std::collections::HashMap;

use ferry_fs::Ino;
use parking_lot::Mutex;

use super::leases::SessionId;

/// Inodes of which it is known; beyond that all are taken for changed by others.
const INODES_MAX: usize = 1 << 20;

#[derive(Debug)]
struct Last {
    /// Whose change was the newest, and the place of that among all.
    session: SessionId,
    place: u64,
    /// Others have changed it before.
    shared: bool,
}

#[derive(Debug, Default)]
struct State {
    inodes: HashMap<Ino, Last>,
    newest: u64,
    /// The newest change that found no room.
    unknown: u64,
    durable: u64,
}

/// Of one server.
#[derive(Debug, Default)]
pub(super) struct Fresh(Mutex<State>);

impl Fresh {
    /// A session has changed these.
    pub(super) fn enter(&self, session: SessionId, inos: impl Iterator<Item = Ino>) {
        let mut state = self.0.lock();
        state.newest += 1;
        let place = state.newest;
        for ino in inos {
            if let Some(last) = state.inodes.get_mut(&ino) {
                let shared = last.shared || last.session != session;
                *last = Last { session, place, shared };
            } else if state.inodes.len() < INODES_MAX {
                state.inodes.insert(ino, Last { session, place, shared: false });
            } else {
                state.unknown = place;
            }
        }
    }

    /// Whether others have changed one of these, and that is not durable.
    pub(super) fn is_others(&self, session: SessionId, inos: &[Ino]) -> bool {
        let state = self.0.lock();
        let others = |last: &Last| last.shared || last.session != session;
        state.unknown > state.durable || inos.iter().any(|ino| state.inodes.get(ino).is_some_and(others))
    }

    /// A sync is about to begin; gives what it covers.
    pub(super) fn note(&self) -> u64 {
        self.0.lock().newest
    }

    /// It has succeeded.
    pub(super) fn are_durable(&self, noted: u64) {
        let mut state = self.0.lock();
        state.durable = noted.max(state.durable);
        state.inodes.retain(|_, last| last.place > noted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_changed_counts_until_it_is_durable() {
        let fresh = Fresh::default();
        fresh.enter(1, [5, 6].into_iter());
        assert!(!fresh.is_others(1, &[5, 6, 7]) && fresh.is_others(2, &[7, 6]));
        let noted = fresh.note();
        fresh.enter(2, [6].into_iter());
        fresh.enter(2, [7].into_iter());
        assert!(fresh.is_others(2, &[6]) && !fresh.is_others(2, &[7]));
        fresh.are_durable(noted);
        assert!(!fresh.is_others(2, &[5]), "it is durable");
        assert!(fresh.is_others(2, &[6]), "of the older one that is not known");
        fresh.are_durable(fresh.note());
        assert!(!fresh.is_others(1, &[5, 6, 7]));
    }
}
