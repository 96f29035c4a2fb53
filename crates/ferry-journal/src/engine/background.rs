//! Background work: sealing in time, writing the durable point of an idle log, checkpoints, merging
//! layers.

use super::checkpoint::{Checkpoint, LAYERS_MAX};
use super::core::Core;
use crate::log::format::LOG_BLOCK;
use crate::{JournalError, Seq};
use ferry_env::activity::{self, Operation};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The log is idle, and is checkpointed, if nothing was committed for this many commit intervals.
const IDLE_INTERVALS: u32 = 5;
/// How often this thread looks whether waiters for log space are overdue; `hold.rs` does it during
/// a checkpoint. None of them sleeps beside free space for longer than two such times, however long
/// running transactions take.
pub(super) const OVERDUE_LOOK: Duration = Duration::from_millis(10);

impl Core {
    /// The loop of the background thread.
    pub fn run(self: &Arc<Self>) {
        let mut looked = Duration::ZERO;
        loop {
            let doing = activity::begin(Operation::Journal);
            let seen = self.durable();
            let (seals, due) = self.work();
            let look = self.look_at_waiters(&mut looked);
            let time = due.into_iter().chain(look).min();
            if !seals {
                // The first transaction of a context wakes it, however long it would sleep.
                self.signal.asleep.store(true, Ordering::SeqCst);
                let has_begun = || !self.head.read().is_empty();
                if if time.is_none() { self.moved_on(seen) } else { has_begun() } {
                    self.signal.kick();
                }
            }
            drop(doing);
            let go_on = self.signal.wait(time);
            self.signal.asleep.store(false, Ordering::SeqCst);
            if !go_on {
                return;
            }
        }
    }

    /// Whether a context was begun since `seen` was durable. Its transaction may not have known
    /// that this thread is about to sleep, and so has not kicked it. At each stage the context
    /// shows: it is open, in flight, or durable.
    fn moved_on(&self, seen: Seq) -> bool {
        if self.failure().is_some() {
            return false;
        }
        // The head before the pipe: contexts move in this direction.
        if !self.head.read().is_empty() {
            return true;
        }
        let idle = self.pipe.lock().idle();
        !idle || self.durable() != seen
    }

    /// Serves waiters for log space that are overdue, at most once in [`OVERDUE_LOOK`]; `looked` is
    /// when it did. Returns the time until the next look, if a transaction waits.
    fn look_at_waiters(&self, looked: &mut Duration) -> Option<Duration> {
        if !self.space.has_waiters() {
            return None;
        }
        let now = self.env.clock.monotonic();
        match (*looked + OVERDUE_LOOK).checked_sub(now) {
            Some(left) if !left.is_zero() => Some(left),
            _ => {
                self.space.serve_overdue();
                *looked = now;
                Some(OVERDUE_LOOK)
            }
        }
    }

    /// Does what is due. Returns the time until more may be due (`None`: only a kick brings more),
    /// and whether the open context is to be sealed then.
    fn work(self: &Arc<Self>) -> (bool, Option<Duration>) {
        if self.failure().is_some() {
            return (false, None);
        }
        self.merge_layers(false);
        if self.fills_up() {
            // The error has been reported already: by `failed`, or by `fail_waiters`.
            let _ = self.empty_log();
        }
        match self.seal_in_time() {
            None => (false, self.idle()),
            seals => (true, seals),
        }
    }

    /// Empties the log as far as that is possible without waiting: checkpoints what is durable, and
    /// seals the open context.
    fn empty_log(self: &Arc<Self>) -> Result<(), JournalError> {
        if self.releasable() > 0 {
            self.stats.checkpoint_pushes.fetch_add(1, Ordering::Relaxed);
            self.checkpoint(Checkpoint::Log)?;
        }
        if self.space.is_short() {
            let seq = self.head.read().seq;
            self.seal_if(seq);
        }
        Ok(())
    }

    /// Seals the open context if its commit interval is over. Returns the time until the open
    /// context must be sealed, if it has changes.
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

    /// While the open context has no changes: writes a durable point, later checkpoints.
    fn idle(self: &Arc<Self>) -> Option<Duration> {
        let interval = self.options.commit_interval;
        if !self.pipe.lock().idle() {
            return Some(interval);
        }
        let durable = self.durable();
        if self.durable_point() < durable && self.space.try_take_for_log(LOG_BLOCK as u64) {
            self.write_durable_point(durable, Box::new(|_| ()));
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

    /// The durable point: the newest context that a durable record, or the home store, names as
    /// durable.
    pub fn durable_point(&self) -> Seq {
        Seq(self.durable_point.load(Ordering::Acquire))
    }

    /// Work that durable contexts make necessary.
    pub fn after_commit(self: &Arc<Self>) {
        self.merge_layers(true);
        if self.options.background && (self.fills_up() || self.has_many_layers()) {
            self.signal.kick();
        }
    }

    /// So many layers have gathered that merging them takes too long for the thread of a
    /// completion.
    fn has_many_layers(&self) -> bool {
        self.head.read().view.layers.len() > 2 * LAYERS_MAX
    }

    /// Does due work, in a journal without threads.
    pub fn tick(self: &Arc<Self>) -> Result<(), JournalError> {
        self.merge_layers(false);
        if self.short_of_space() {
            self.empty_log()?;
        }
        let _ = self.seal_in_time().or_else(|| self.idle());
        self.drive();
        self.failure().map_or(Ok(()), Err)
    }

    /// Empties the log for a transaction that does not fit, in a journal without threads.
    pub fn make_room(self: &Arc<Self>) -> Result<(), JournalError> {
        let seq = self.head.read().seq;
        self.seal_if(seq);
        self.checkpoint(Checkpoint::Log)
    }
}
