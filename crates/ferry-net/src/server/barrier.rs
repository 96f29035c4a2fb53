//! After a crash: who may have kept something that was promised is waited for, and makes it again,
//! before others see or change anything.
//!
//! * GRACE-1: as long as the barrier is closed, whatever reads waits, and each change but those that are
//!   made again, and those that touch no inode.
//! * GRACE-2: it opens when all sessions that had promised anything have said that they are done;
//!   those that have not arrived by the end of the hold are not waited for any longer, and can make
//!   nothing again.
//! * GRACE-3: who has arrived by then is waited for as long as it goes on making it again, or the
//!   server has something to do for it. Who does nothing of that for too long is given up: what it
//!   has not made again then is lost, and it is told.

use crate::rt::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rt::Mutex;

/// What waits.
type Run = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    /// Sessions that may have something to make again; `true`: it has arrived.
    awaited: HashMap<u128, bool>,
    waiting: Vec<Run>,
    /// The server stops: nothing goes on.
    stopped: bool,
}

/// Of one server.
pub(super) struct Barrier {
    closed: AtomicBool,
    state: Mutex<State>,
}

impl Barrier {
    /// Waits for these sessions.
    pub(super) fn new(awaited: Vec<u128>) -> Self {
        let closed = AtomicBool::new(!awaited.is_empty());
        let awaited = awaited.into_iter().map(|session| (session, false)).collect();
        Self { closed, state: Mutex::new(State { awaited, ..State::default() }) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Runs `run` when the barrier is open. It must not wait for anything itself.
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

    /// A session has arrived back; `true`: it was waited for, and may make again what it had promised.
    /// Once.
    pub(super) fn arrive(&self, session: u128) -> bool {
        let mut state = self.state.lock();
        state.awaited.get_mut(&session).is_some_and(|arrived| !std::mem::replace(arrived, true))
    }

    /// A session is done, or has ended.
    pub(super) fn release(&self, session: u128) {
        let mut state = self.state.lock();
        state.awaited.remove(&session);
        self.open_if_done(state);
    }

    /// The hold is over: gives those that have not arrived.
    pub(super) fn give_up_absent(&self) -> Vec<u128> {
        let mut state = self.state.lock();
        if state.stopped {
            return Vec::new();
        }
        let absent =
            state.awaited.extract_if(|_, arrived| !*arrived).map(|(session, _)| session).collect();
        self.open_if_done(state);
        absent
    }

    /// Those that are not done and may be given up: none where the server stops, for they go on at
    /// the next one.
    pub(super) fn awaited(&self) -> Vec<u128> {
        let state = self.state.lock();
        if state.stopped { Vec::new() } else { state.awaited.keys().copied().collect() }
    }

    /// The server stops; `true`: everything that clients had promised to the one before has been
    /// made again, or given up.
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
    fn it_opens_when_all_are_done_or_given_up() {
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
        barrier.wait(run());
        assert!(!barrier.is_closed() && ran.load(Ordering::SeqCst) == 2);
        assert!(barrier.stop() && !Barrier::new(Vec::new()).is_closed());
    }

    #[test]
    fn nothing_goes_on_when_the_server_stops_before() {
        let barrier = Barrier::new(vec![1]);
        barrier.wait(Box::new(|| panic!("it was not made")));
        assert!(!barrier.stop());
        barrier.release(1);
        assert!(barrier.is_closed());
    }
}
