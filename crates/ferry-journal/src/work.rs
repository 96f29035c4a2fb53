//! What has to be done without anyone waiting for it: sealing in time, stamping an idle log, checkpoints, merging.

use crate::checkpoint::{Checkpoint, LAYERS_MAX};
use crate::core::Core;
use crate::format::LOG_BLOCK;
use crate::{JournalError, Seq};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A log is idle when nothing was committed for so many commit intervals; then it is checkpointed.
const IDLE_INTERVALS: u32 = 5;

/// Wakes the background thread.
#[derive(Default)]
pub struct Signal {
    state: Mutex<SignalState>,
    wake: Condvar,
    /// The thread sleeps without a deadline.
    asleep: AtomicBool,
}

#[derive(Default)]
struct SignalState {
    kicked: bool,
    stop: bool,
}

impl Signal {
    /// There is something to do now.
    pub fn kick(&self) {
        let mut state = self.state.lock();
        if !state.kicked {
            state.kicked = true;
            self.wake.notify_one();
        }
    }

    /// A context was begun: in time it must be sealed.
    pub fn active(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            self.kick();
        }
    }

    /// The thread is to end.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify_one();
    }

    /// Waits until kicked or for `time`, if given. `false` when the thread is to end.
    fn wait(&self, time: Option<Duration>) -> bool {
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

impl Core {
    /// The background thread.
    pub fn run(self: &Arc<Self>) {
        loop {
            let seen = self.durable();
            let time = self.work();
            if time.is_none() {
                self.signal.asleep.store(true, Ordering::SeqCst);
                if self.moved_on(seen) {
                    self.signal.kick();
                }
            }
            let go_on = self.signal.wait(time);
            self.signal.asleep.store(false, Ordering::SeqCst);
            if !go_on {
                return;
            }
        }
    }

    /// A context was begun since `seen` was durable, perhaps before it was known that we sleep: nobody has kicked us.
    /// Wherever it has got to, it shows: collected, under way, or durable.
    fn moved_on(&self, seen: Seq) -> bool {
        if self.failure().is_some() {
            return false;
        }
        // The head before the pipe: a context goes that way.
        if !self.head.read().is_empty() {
            return true;
        }
        let idle = self.pipe.lock().idle();
        !idle || self.durable() != seen
    }

    /// Does what is due; how long until more may be, `None` if only a kick can bring more.
    fn work(self: &Arc<Self>) -> Option<Duration> {
        if self.failure().is_some() {
            return None;
        }
        self.tidy(false);
        if self.fills_up() {
            // An error has been reported to those it concerns: by `failed`, or by `turn_away`.
            let _ = self.press();
        }
        self.seal_in_time().or_else(|| self.idle())
    }

    /// Empties the log as far as that is possible without waiting: what is durable goes home, what is being collected
    /// sails.
    fn press(self: &Arc<Self>) -> Result<(), JournalError> {
        if self.releasable() > 0 {
            self.stats.checkpoint_pushes.fetch_add(1, Ordering::Relaxed);
            self.checkpoint(Checkpoint::Log)?;
        }
        if self.space.has_waiters() {
            let seq = self.head.read().seq;
            self.seal_if(seq);
        }
        Ok(())
    }

    /// Seals a context whose time has come; how long until the present one's, if there is one.
    pub fn seal_in_time(self: &Arc<Self>) -> Option<Duration> {
        let (since, seq) = {
            let head = self.head.read();
            (!head.is_empty()).then_some((head.since, head.seq))?
        };
        let age = self.env.clock.monotonic().saturating_sub(since);
        match self.options.commit_interval.checked_sub(age) {
            Some(left) if !left.is_zero() => Some(left),
            _ => {
                self.seal_if(seq);
                Some(self.options.commit_interval)
            }
        }
    }

    /// With nothing being collected: stamps what is durable, later takes it home.
    fn idle(self: &Arc<Self>) -> Option<Duration> {
        let interval = self.options.commit_interval;
        if !self.pipe.lock().idle() {
            return Some(interval);
        }
        let durable = self.durable();
        if self.stamped() < durable && self.space.try_take(LOG_BLOCK as u64, true) {
            self.write_stamp(durable, Box::new(|_| ()));
            return Some(interval);
        }
        if self.releasable() == 0 {
            return None;
        }
        let since = Duration::from_nanos(self.sealed_at.load(Ordering::Relaxed));
        let idle = self.env.clock.monotonic().saturating_sub(since);
        match (interval * IDLE_INTERVALS).checked_sub(idle) {
            Some(left) if !left.is_zero() => Some(left),
            _ => self.checkpoint(Checkpoint::Calm).map_or(None, |()| None),
        }
    }

    /// Newest context that a durable stamp covers.
    pub fn stamped(&self) -> Seq {
        Seq(self.stamped.load(Ordering::Acquire))
    }

    /// After contexts became durable: what they make necessary.
    pub fn after_commit(self: &Arc<Self>) {
        self.tidy(true);
        if self.options.background && (self.fills_up() || self.crowded()) {
            self.signal.kick();
        }
    }

    /// There are layers to merge that took too long to merge in passing.
    fn crowded(&self) -> bool {
        self.head.read().view.layers.len() > 2 * LAYERS_MAX
    }

    /// Due work, without a thread to do it.
    pub fn tick(self: &Arc<Self>) -> Result<(), JournalError> {
        self.tidy(false);
        if self.short_of_space() {
            self.press()?;
        }
        let _ = self.seal_in_time().or_else(|| self.idle());
        self.drive();
        self.failure().map_or(Ok(()), Err)
    }

    /// Empties the log for a transaction that does not fit, without a thread to do it.
    pub fn make_room(self: &Arc<Self>) -> Result<(), JournalError> {
        let seq = self.head.read().seq;
        self.seal_if(seq);
        self.checkpoint(Checkpoint::Log)
    }
}
