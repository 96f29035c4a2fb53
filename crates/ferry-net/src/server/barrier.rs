//! The grace-period barrier: after a crash, clients replay before others see or change anything.
//!
//! * GRACE-1: while the barrier is closed, requests that read wait. So do changes, but for replayed
//!   ones and those that touch no inode.
//! * GRACE-2: the barrier opens when all sessions that could acknowledge early have settled. The
//!   server waits a hold time for sessions to come; those that come later cannot replay.
//! * GRACE-3: the server waits for a session that has come as long as it makes progress, or as long
//!   as the server has something to apply for it. A session that makes no progress for too long is
//!   given up: what it has not replayed is lost, and it is told.

use crate::rt::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rt::Mutex;

/// What runs when the barrier is open.
type Run = Box<dyn FnOnce() + Send>;

/// What has become of a session that may have something to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Absent,
    Arrived,
    /// It comes too late. The barrier waits until the volume says so.
    GivenUp,
}

#[derive(Default)]
struct State {
    awaited: HashMap<u128, Awaited>,
    waiting: Vec<Run>,
    /// The server stops: what waits is dropped.
    stopped: bool,
}

/// The barrier of one server.
pub(super) struct Barrier {
    closed: AtomicBool,
    state: Mutex<State>,
}

impl Barrier {
    /// A barrier that waits for these sessions.
    pub(super) fn new(awaited: Vec<u128>) -> Self {
        let closed = AtomicBool::new(!awaited.is_empty());
        let awaited = awaited.into_iter().map(|session| (session, Awaited::Absent)).collect();
        Self { closed, state: Mutex::new(State { awaited, ..State::default() }) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Runs `run` when the barrier is open. It must not block.
    pub(super) fn wait(&self, run: Run) {
        {
            let mut state = self.state.lock();
            if state.stopped {
                return;
            }
            if self.is_closed() {
                state.waiting.push(run);
                return;
            }
        }
        run();
    }

    /// A session has come back; `true`: it is awaited, and may replay. This is true once.
    pub(super) fn arrive(&self, session: u128) -> bool {
        let mut state = self.state.lock();
        let absent = state.awaited.get_mut(&session).filter(|now| **now == Awaited::Absent);
        absent.map(|now| *now = Awaited::Arrived).is_some()
    }

    /// A session has settled, has ended, or is given up.
    pub(super) fn release(&self, session: u128) {
        let mut state = self.state.lock();
        state.awaited.remove(&session);
        self.open_if_done(state);
    }

    /// The hold time is over. Returns the sessions that have not come and cannot replay any more.
    /// The caller releases each when that is durable.
    pub(super) fn give_up_absent(&self) -> Vec<u128> {
        let mut state = self.state.lock();
        if state.stopped {
            return Vec::new();
        }
        let absent = state.awaited.iter_mut().filter(|(_, now)| **now == Awaited::Absent);
        let given_up = absent.map(|(session, now)| {
            *now = Awaited::GivenUp;
            *session
        });
        given_up.collect()
    }

    /// Sessions that have not settled and may be given up: none if the server stops, because they
    /// go on at the next one.
    pub(super) fn awaited(&self) -> Vec<u128> {
        let state = self.state.lock();
        if state.stopped {
            return Vec::new();
        }
        let awaited = state.awaited.iter().filter(|(_, now)| **now != Awaited::GivenUp);
        awaited.map(|(session, _)| *session).collect()
    }

    /// The server stops; `true`: everything that clients had for the previous server is replayed,
    /// or given up.
    pub(super) fn stop(&self) -> bool {
        let mut state = self.state.lock();
        if self.is_closed() {
            state.stopped = true;
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            drop(waiting);
            return false;
        }
        true
    }

    fn open_if_done(&self, mut state: crate::rt::MutexGuard<'_, State>) {
        if !state.awaited.is_empty() || state.stopped || !self.is_closed() {
            return;
        }
        self.closed.store(false, Ordering::Release);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|run| run());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn the_barrier_opens_when_all_sessions_have_settled_or_are_given_up() {
        let ran = Arc::new(AtomicU32::new(0));
        let run = || {
            let ran = Arc::clone(&ran);
            Box::new(move || {
                ran.fetch_add(1, Ordering::SeqCst);
            }) as Run
        };
        let barrier = Barrier::new(vec![1, 2, 3]);
        barrier.wait(run());
        assert!(barrier.arrive(1) && !barrier.arrive(1) && !barrier.arrive(9));
        barrier.release(1);
        assert!(barrier.is_closed() && barrier.arrive(2));
        assert_eq!(barrier.give_up_absent(), [3]);
        assert!(!barrier.arrive(3), "too late");
        assert!(barrier.is_closed() && ran.load(Ordering::SeqCst) == 0);
        assert_eq!(barrier.awaited(), [2]);
        barrier.release(2);
        assert!(barrier.is_closed(), "that a session was given up is not durable yet");
        assert!(barrier.give_up_absent().is_empty(), "once");
        barrier.release(3);
        barrier.wait(run());
        assert!(!barrier.is_closed() && ran.load(Ordering::SeqCst) == 2);
        assert!(barrier.stop() && !Barrier::new(Vec::new()).is_closed());
    }

    #[test]
    fn what_waits_at_the_barrier_is_dropped_when_the_server_stops() {
        let barrier = Barrier::new(vec![1]);
        barrier.wait(Box::new(|| panic!("it was not made")));
        assert!(!barrier.stop());
        barrier.release(1);
        assert!(barrier.is_closed());
    }
}
