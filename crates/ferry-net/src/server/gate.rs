//! After a crash: who may have kept something that was promised is waited for, and makes it again,
//! before others see or change anything.
//!
//! * GRACE-1: as long as the gate is shut, whatever reads waits, and each change but those that are
//!   made again, and those that touch no inode.
//! * GRACE-2: it opens when all sessions that had promised anything have said that they are done;
//!   those that have not come by the end of the hold are not waited for any longer, and can make
//!   nothing again.
//! * GRACE-3: who has come by then is waited for as long as it goes on making it again, or the
//!   server has something to do for it. Who does nothing of that for too long is given up: what it
//!   has not made again then is lost, and it is told.

use crate::rt::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rt::Mutex;

/// What waits.
type Run = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    /// Sessions that may have something to make again; `true`: it has come.
    awaited: HashMap<u128, bool>,
    waiting: Vec<Run>,
    /// The server stops: nothing goes on.
    stopped: bool,
}

/// Of one server.
pub(super) struct Gate {
    shut: AtomicBool,
    state: Mutex<State>,
}

impl Gate {
    /// Waits for these sessions.
    pub(super) fn new(awaited: Vec<u128>) -> Self {
        let shut = AtomicBool::new(!awaited.is_empty());
        let awaited = awaited.into_iter().map(|session| (session, false)).collect();
        Self { shut, state: Mutex::new(State { awaited, ..State::default() }) }
    }

    pub(super) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Acquire)
    }

    /// Runs `run` when the gate is open. It must not wait for anything itself.
    pub(super) fn wait(&self, run: Run) {
        {
            let mut state = self.state.lock();
            if state.stopped {
                return;
            }
            if self.is_shut() {
                state.waiting.push(run);
                return;
            }
        }
        run();
    }

    /// A session has come back; `true`: it was waited for, and may make again what it had promised.
    /// Once.
    pub(super) fn come(&self, session: u128) -> bool {
        let mut state = self.state.lock();
        state.awaited.get_mut(&session).is_some_and(|come| !std::mem::replace(come, true))
    }

    /// A session is done, or has ended.
    pub(super) fn done(&self, session: u128) {
        let mut state = self.state.lock();
        state.awaited.remove(&session);
        self.open_if_done(state);
    }

    /// The hold is over: gives those that have not come.
    pub(super) fn give_up_absent(&self) -> Vec<u128> {
        let mut state = self.state.lock();
        if state.stopped {
            return Vec::new();
        }
        let absent =
            state.awaited.extract_if(|_, come| !*come).map(|(session, _)| session).collect();
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
        if self.is_shut() {
            state.stopped = true;
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            drop(waiting);
            return false;
        }
        true
    }

    fn open_if_done(&self, mut state: crate::rt::MutexGuard<'_, State>) {
        if !state.awaited.is_empty() || state.stopped || !self.is_shut() {
            return;
        }
        self.shut.store(false, Ordering::Release);
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
        let gate = Gate::new(vec![1, 2, 3]);
        gate.wait(run());
        assert!(gate.come(1) && !gate.come(1) && !gate.come(9));
        gate.done(1);
        assert!(gate.is_shut() && gate.come(2));
        assert_eq!(gate.give_up_absent(), [3]);
        assert!(!gate.come(3), "too late");
        assert!(gate.is_shut() && ran.load(Ordering::SeqCst) == 0);
        assert_eq!(gate.awaited(), [2]);
        gate.done(2);
        gate.wait(run());
        assert!(!gate.is_shut() && ran.load(Ordering::SeqCst) == 2);
        assert!(gate.stop() && !Gate::new(Vec::new()).is_shut());
    }

    #[test]
    fn nothing_goes_on_when_the_server_stops_before() {
        let gate = Gate::new(vec![1]);
        gate.wait(Box::new(|| panic!("it was not made")));
        assert!(!gate.stop());
        gate.done(1);
        assert!(gate.is_shut());
    }
}
