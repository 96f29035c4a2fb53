//! Which inodes have changes that are not durable, and whose these are.
//!
//! * UNSTABLE-1: what a session decides under a write lease builds on what is durable, and on its
//!   own: what others have changed of the inode is made durable before it is told of the lease. So
//!   what it promises can be made again after a crash, whether they come back or not; and all that
//!   it had changed itself before it had the lease it can make again, too.
//! * UNSTABLE-2: a change counts from before it is made until it is durable: while it is being
//!   made, and then entered. Before that its session counts it as kept, so that a sync which takes
//!   it out has told of it. A sync takes out what was entered before it began.
//! * UNSTABLE-3: nobody sees what another has changed, or changes anything on top of it, before
//!   that is durable. So what a crash takes away was seen by its maker alone, who makes it again:
//!   nobody has changed anything since.

use crate::rt::collections::HashMap;

use crate::rt::Mutex;
use ferry_fs::Ino;

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
    /// Who is changing them, without a write lease.
    making: HashMap<Ino, SessionId>,
    newest: u64,
    /// The newest change that found no room.
    unknown: u64,
    durable: u64,
}

/// Of one server.
#[derive(Debug, Default)]
pub(super) struct Fresh(Mutex<State>);

impl Fresh {
    /// A session begins to change these, which nobody else changes meanwhile. They are entered when
    /// what this gives is dropped.
    pub(super) fn begin(&self, session: SessionId, inos: Vec<Ino>) -> Making<'_> {
        self.0.lock().making.extend(inos.iter().map(|ino| (*ino, session)));
        Making { fresh: self, session, inos, made: None }
    }

    /// A change has been made again, of whatever.
    pub(super) fn enter_unknown(&self) {
        let mut state = self.0.lock();
        state.newest += 1;
        state.unknown = state.newest;
    }

    /// A session has changed these.
    fn enter(&self, session: SessionId, inos: impl Iterator<Item = Ino>) {
        let mut state = self.0.lock();
        state.newest += 1;
        let place = state.newest;
        for ino in inos {
            state.making.remove(&ino);
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
        let making = |ino: &Ino| state.making.get(ino).is_some_and(|by| *by != session);
        state.unknown > state.durable
            || inos.iter().any(|ino| state.inodes.get(ino).is_some_and(others))
            || !state.making.is_empty() && inos.iter().any(making)
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

/// A change is being made.
pub(super) struct Making<'a> {
    fresh: &'a Fresh,
    session: SessionId,
    inos: Vec<Ino>,
    /// What it has made.
    pub(super) made: Option<Ino>,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if !self.inos.is_empty() {
            self.fresh.enter(self.session, self.inos.iter().copied().chain(self.made));
        }
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

    #[test]
    fn what_is_being_changed_is_not_durable_whatever_a_sync_says() {
        let fresh = Fresh::default();
        let making = fresh.begin(1, vec![5]);
        fresh.are_durable(fresh.note());
        assert!(fresh.is_others(2, &[5]) && !fresh.is_others(1, &[5]));
        drop(making);
        assert!(fresh.is_others(2, &[5]));
        fresh.are_durable(fresh.note());
        assert!(!fresh.is_others(2, &[5]));
        fresh.enter_unknown();
        assert!(fresh.is_others(1, &[5]) && fresh.is_others(2, &[6]));
        fresh.are_durable(fresh.note());
        assert!(!fresh.is_others(2, &[5]));
    }
}
