//! Ends a hold in time. The thread does nothing else, so that no checkpoint and no merge makes it late; and while a checkpoint is made it
//! seals in time, for the journal's own thread, which may be in it for longer than a commit interval.

use crate::core::Core;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;

/// Tells the thread when to look. Taken below the pipe's lock.
#[derive(Default)]
pub struct HoldTimer {
    state: Mutex<TimerState>,
    wake: Condvar,
}

#[derive(Default)]
struct TimerState {
    /// When the pipe is to be driven, by the clock of the journal.
    until: Option<Duration>,
    stop: bool,
}

impl HoldTimer {
    /// Drives the pipe at this time, or before. Without a thread nothing happens: the owner asks when a hold ends.
    pub fn arm(&self, until: Duration) {
        let mut state = self.state.lock();
        if state.until.is_none_or(|armed| until < armed) {
            state.until = Some(until);
            self.wake.notify_one();
        }
    }

    /// The thread is to end.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify_one();
    }

    /// Waits until the time has come, once; `false` when the thread is to end.
    fn wait(&self, now: impl Fn() -> Duration) -> bool {
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

impl Core {
    /// The thread that ends holds. Whoever drives when it comes looks once more at the time, and arms it again if a hold
    /// goes on. A checkpoint arms it as it begins.
    pub fn run_holds(self: &Arc<Self>) {
        while self.hold_timer.wait(|| self.env.clock.monotonic()) {
            self.drive();
            if self.checkpointing.is_locked() && self.failure().is_none() {
                let left = self.seal_in_time().unwrap_or(self.options.commit_interval);
                self.hold_timer.arm(self.env.clock.monotonic() + left);
            }
        }
    }

    /// How long until a hold ends or the context being collected must be sealed; `None` while neither is to come.
    pub fn next_due(&self) -> Option<Duration> {
        let held_until = self.pipe.lock().held_until;
        let seal_at = {
            let head = self.head.read();
            (!head.is_empty()).then(|| head.since + self.options.commit_interval)
        };
        let due = held_until.into_iter().chain(seal_at).min()?;
        Some(due.saturating_sub(self.env.clock.monotonic()))
    }
}
