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
struct LastChange {
    /// Whose change was the newest, and the number of that among all.
    session: SessionId,
    number: u64,
    /// Others have changed it before.
    shared: bool,
}

#[derive(Debug, Default)]
struct State {
    inodes: HashMap<Ino, LastChange>,
    /// Who is changing them, without a write lease.
    changing: HashMap<Ino, SessionId>,
    newest: u64,
    /// The newest change that found no room.
    unknown: u64,
    durable: u64,
}

/// Of one server.
#[derive(Debug, Default)]
pub(super) struct UnstableSet(Mutex<State>);

impl UnstableSet {
    /// A session begins to change these, which nobody else changes meanwhile. They are entered when
    /// what this gives is dropped.
    pub(super) fn begin(&self, session: SessionId, inos: Vec<Ino>) -> Changing<'_> {
        self.0.lock().changing.extend(inos.iter().map(|ino| (*ino, session)));
        Changing { unstable: self, session, inos, made: None }
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

    /// Whether others have changed one of these, and that is not durable.
    pub(super) fn is_others(&self, session: SessionId, inos: &[Ino]) -> bool {
        let state = self.0.lock();
        let others = |last: &LastChange| last.shared || last.session != session;
        let changing = |ino: &Ino| state.changing.get(ino).is_some_and(|by| *by != session);
        state.unknown > state.durable
            || inos.iter().any(|ino| state.inodes.get(ino).is_some_and(others))
            || !state.changing.is_empty() && inos.iter().any(changing)
    }

    /// A sync is about to begin; gives what it covers.
    pub(super) fn newest(&self) -> u64 {
        self.0.lock().newest
    }

    /// It has succeeded.
    pub(super) fn are_durable(&self, covered: u64) {
        let mut state = self.0.lock();
        state.durable = covered.max(state.durable);
        state.inodes.retain(|_, last| last.number > covered);
    }
}

/// A change is being made.
pub(super) struct Changing<'a> {
    unstable: &'a UnstableSet,
    session: SessionId,
    inos: Vec<Ino>,
    /// What it has made.
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
    fn what_others_have_changed_counts_until_it_is_durable() {
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
    fn what_is_being_changed_is_not_durable_whatever_a_sync_says() {
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
        unstable.are_durable(unstable.newest());
        assert!(!unstable.is_others(2, &[5]));
    }
}
