//! How the threads of a journal wake and wait for each other.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Wakes the background thread.
#[derive(Default)]
pub struct Signal {
    state: Mutex<SignalState>,
    wake: Condvar,
    /// Whether the thread sleeps, and no context is to be sealed when it wakes.
    pub asleep: AtomicBool,
}

#[derive(Default)]
struct SignalState {
    kicked: bool,
    stop: bool,
}

impl Signal {
    /// Wakes the thread: there is something to do now.
    pub fn kick(&self) {
        let mut state = self.state.lock();
        if !state.kicked {
            state.kicked = true;
            self.wake.notify_one();
        }
    }

    /// A context was begun: the thread must seal it in time.
    pub fn active(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            self.kick();
        }
    }

    /// Tells the thread to end.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify_one();
    }

    /// Waits until kicked, or for `time` if given. Returns `false` when the thread is to end.
    pub fn wait(&self, time: Option<Duration>) -> bool {
        let mut state = self.state.lock();
        if !state.kicked && !state.stop {
            match time {
                Some(time) => drop(self.wake.wait_for(&mut state, time)),
                None => self.wake.wait_while(&mut state, |s| !s.kicked && !s.stop),
            }
        }
        state.kicked = false;
        !state.stop
    }
}

/// The alarm of the hold thread. Its lock is taken below the pipe's.
#[derive(Default)]
pub struct HoldTimer {
    state: Mutex<TimerState>,
    wake: Condvar,
}

#[derive(Default)]
struct TimerState {
    /// When the thread drives the pipe, by the journal's clock.
    until: Option<Duration>,
    stop: bool,
}

impl HoldTimer {
    /// Has the thread drive the pipe at this time, or before. In a journal without threads the
    /// owner asks when a hold ends.
    pub fn arm(&self, until: Duration) {
        let mut state = self.state.lock();
        if state.until.is_none_or(|armed| until < armed) {
            state.until = Some(until);
            self.wake.notify_one();
        }
    }

    /// Tells the thread to end.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify_one();
    }

    /// Waits until the alarm's time, once. Returns `false` when the thread is to end.
    pub fn wait(&self, now: impl Fn() -> Duration) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return false;
            }
            match state.until.map(|until| until.saturating_sub(now())) {
                None => self.wake.wait(&mut state),
                Some(Duration::ZERO) => {
                    state.until = None;
                    return true;
                }
                Some(left) => drop(self.wake.wait_for(&mut state, left)),
            }
        }
    }
}

/// Whether the log is being replaced by a larger one.
#[derive(Default)]
pub struct Growth {
    pub going: Mutex<bool>,
    pub over: Condvar,
}

impl Growth {
    /// Waits while contexts cannot be sealed.
    pub fn wait_over(&self) {
        let mut going = self.going.lock();
        self.over.wait_while(&mut going, |going| *going);
    }
}
