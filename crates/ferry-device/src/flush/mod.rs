//! The flush coordinator: concurrent callers share flushes of one device (group flush).
//!
//! `W` counts completed writes. A flush samples `start = W` before it is issued and, when it
//! succeeds, sets `durable = start`. A caller passes a target, a value of `W` that covers its own
//! writes:
//!
//! | situation | what happens |
//! |---|---|
//! | `durable >= target` | the caller is answered at once, without a lock |
//! | a flush is in flight with `start >= target` | the caller shares that flush |
//! | another flush is in flight | the caller waits, and shares the next flush with all who wait |
//! | none is in flight | the caller flushes |
//!
//! * FLUSH-1: one flush is in flight per device.
//! * FLUSH-2: a flush answers only callers whose writes had completed when it started.
//! * FLUSH-3: a flush that fails makes nothing durable. All callers that share it, and all that
//!   wait, get its error, and so does every later caller. The error must stay, because `durable` is
//!   a prefix: what the failed flush covered may be lost, the host reports that once, and a later
//!   flush that succeeds would declare it durable.
//! * FLUSH-4: no caller is held for callers that have not come. A caller waits for the flush in
//!   flight at most, and for its own.
//! * FLUSH-5: the fast path takes no lock that all callers share.
//!
//! The thread that ends a flush answers its waiters, after it has started the next flush. A
//! synchronous caller flushes on its own thread, which is the shortest way. When its flush ends it
//! only starts the next one: it hands that to a synchronous caller that waits, or, if only
//! asynchronous callers wait, to the device's own thread.
//!
//! A single list of waiters with a generation number would be simpler. But each flush would wake
//! every waiter, to look whether it was meant. A completion that is armed again while other threads
//! still test it is a race, too.

mod waiter;

use crate::device::{BlockDevice, Io, IoDone};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, lock};
use ferry_env::planted::{Bug, is_planted};
use std::io;
use std::sync::Arc;
use waiter::{Waiter, Wake, Wakeup, same_error};

/// A number of completed writes that are to be durable. It is valid for the coordinator that
/// returned it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target(u64);

/// Counters of a coordinator. A flush answered `flushes + shared` callers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushStats {
    /// Flushes sent to the device.
    pub flushes: u64,
    /// Callers answered by a flush, beyond the one that `flushes` counts.
    pub shared: u64,
    /// Callers whose writes were durable already.
    pub at_once: u64,
}

/// A value alone on its cache line: a change of it does not slow down readers of the others.
#[repr(align(64))]
struct CacheLine<T>(T);

/// Shares the flushes of one device among its callers. The module's documentation has the rules.
pub struct FlushCoordinator {
    device: Arc<dyn BlockDevice>,
    /// `W` of the module's documentation.
    written: CacheLine<AtomicU64>,
    durable: CacheLine<AtomicU64>,
    at_once: CacheLine<AtomicU64>,
    queue: Mutex<FlushQueue>,
}

/// The flush in flight and the callers that wait for the next. No callback runs while it is locked.
#[derive(Default)]
struct FlushQueue {
    in_flight: Option<InFlight>,
    /// A waiting caller was told to make the next flush and has not begun it. Others still join it.
    handed_over: bool,
    /// Callers that share the next flush.
    waiting: Vec<Waiter>,
    /// The first flush that failed (FLUSH-3).
    failed: Option<io::Error>,
    flushes: u64,
    shared: u64,
}

/// A flush that the device has not answered yet.
struct InFlight {
    /// `W` before it was issued.
    start: u64,
    waiters: Vec<Waiter>,
    /// The waiters, and the caller that flushes on its own thread.
    callers: u64,
    /// The submitting thread has not returned from the device. If the flush ends before, its result
    /// is left here and that thread completes the flush. Otherwise a device that completes within
    /// `submit` would recurse, one level deeper with each flush.
    submitting: bool,
    result: Option<io::Result<()>>,
}

/// A flush that ended, and the waiters to answer.
struct Ended {
    waiters: Vec<Waiter>,
    result: io::Result<()>,
}

/// How the next flush starts.
enum Next {
    /// No caller waits: there is none.
    Nothing,
    /// This synchronous caller makes it.
    HandOver(Arc<Wakeup>),
    /// It has begun, and must be submitted.
    Submit,
}

impl FlushQueue {
    fn is_idle(&self) -> bool {
        self.in_flight.is_none() && !self.handed_over
    }

    /// Begins a flush for all that wait, and for the calling thread if it flushes itself
    /// (`on_caller`).
    fn begin(&mut self, start: u64, on_caller: bool) {
        debug_assert!(self.in_flight.is_none(), "FLUSH-1");
        let waiters = std::mem::take(&mut self.waiting);
        let callers = waiters.len() as u64 + u64::from(on_caller);
        self.handed_over = false;
        self.flushes += 1;
        self.in_flight =
            Some(InFlight { start, waiters, callers, submitting: !on_caller, result: None });
    }
}

impl Ended {
    fn answer_all(self) {
        for waiter in self.waiters {
            waiter.answer(&self.result);
        }
    }
}

impl FlushCoordinator {
    /// A coordinator for `device`. Every flush of the device must go through it.
    pub fn new(device: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self {
            device,
            written: CacheLine(AtomicU64::new(0)),
            durable: CacheLine(AtomicU64::new(0)),
            at_once: CacheLine(AtomicU64::new(0)),
            queue: Mutex::new(FlushQueue::default()),
        })
    }

    /// The device below, for reads and writes.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// Counts a completed write. Call it once for each, before a caller that relies on the write
    /// asks for a target. Returns a target that covers this write and all that completed before it.
    pub fn write_completed(&self) -> Target {
        // Release: a flush that samples this `W` or a later one starts after the write completed.
        Target(self.written.0.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// A target that covers every write that was counted before this call.
    pub fn target(&self) -> Target {
        Target(self.written.0.load(Ordering::Acquire))
    }

    /// Calls `done` once all writes that `target` covers are durable. It runs on this thread if
    /// they are so already, and otherwise on the thread that ends the flush.
    pub fn flush(self: &Arc<Self>, target: Target, done: IoDone) {
        if self.is_durable(target) {
            self.at_once.0.fetch_add(1, Ordering::Relaxed);
            return done(Ok(()));
        }
        let mut queue = lock(&self.queue);
        if let Some(answer) = self.answer_now(&queue, target) {
            drop(queue);
            return done(answer);
        }
        let idle = queue.is_idle();
        self.join(&mut queue, target, Waiter::Callback(done));
        if idle {
            self.start_next(queue, None);
        }
    }

    /// Waits until all writes that `target` covers are durable. If no flush is in flight, the
    /// calling thread flushes. A completion must not call it: on the thread that would end the
    /// flush in flight it waits for ever.
    pub fn flush_wait(self: &Arc<Self>, target: Target) -> io::Result<()> {
        if self.is_durable(target) {
            self.at_once.0.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let mut queue = lock(&self.queue);
        if let Some(answer) = self.answer_now(&queue, target) {
            return answer;
        }
        if queue.is_idle() {
            return self.flush_here(queue);
        }
        let wakeup = Arc::new(Wakeup::default());
        self.join(&mut queue, target, Waiter::Thread(Arc::clone(&wakeup)));
        drop(queue);
        match wakeup.wait() {
            Wake::Ended(result) => result,
            Wake::Flush => self.flush_here(lock(&self.queue)),
        }
    }

    /// Flushes for one caller alone, while other flushes may be in flight: FLUSH-1 and the sharing
    /// do not hold for it. It is there for comparison, on devices that answer each flush for
    /// itself. After a failure it fails (FLUSH-3).
    pub fn flush_alone(self: &Arc<Self>, done: IoDone) {
        let mut queue = lock(&self.queue);
        if let Some(error) = queue.failed.as_ref().map(same_error) {
            drop(queue);
            return done(Err(error));
        }
        queue.flushes += 1;
        drop(queue);
        let me = Arc::clone(self);
        let ended = move |result: io::Result<()>| {
            let mut queue = lock(&me.queue);
            let result = match (result, &queue.failed) {
                // What this one covered may be what the other one lost.
                (Ok(()), Some(error)) => Err(same_error(error)),
                (Err(error), _) => {
                    me.record_failure(&mut queue, &error);
                    Err(error)
                }
                (ok, None) => ok,
            };
            drop(queue);
            done(result);
        };
        self.device.submit(vec![Io::Flush { done: Box::new(ended) }]);
    }

    /// The counters so far.
    pub fn stats(&self) -> FlushStats {
        let queue = lock(&self.queue);
        let at_once = self.at_once.0.load(Ordering::Relaxed);
        FlushStats { flushes: queue.flushes, shared: queue.shared, at_once }
    }

    fn is_durable(&self, target: Target) -> bool {
        self.durable.0.load(Ordering::Acquire) >= target.0
    }

    /// The answer of a caller that need not wait. It looks again, with the lock held: a flush may
    /// have ended since. What was durable before a failure stays durable.
    fn answer_now(&self, queue: &FlushQueue, target: Target) -> Option<io::Result<()>> {
        if self.is_durable(target) {
            self.at_once.0.fetch_add(1, Ordering::Relaxed);
            return Some(Ok(()));
        }
        queue.failed.as_ref().map(|error| Err(same_error(error)))
    }

    /// Joins the flush in flight if it covers the target, and the next one otherwise.
    fn join(&self, queue: &mut FlushQueue, target: Target, waiter: Waiter) {
        match &mut queue.in_flight {
            Some(in_flight) if self.covers(in_flight.start, target) => {
                in_flight.callers += 1;
                in_flight.waiters.push(waiter);
            }
            _ => queue.waiting.push(waiter),
        }
    }

    /// Whether a flush that sampled `start` may answer this target (FLUSH-2).
    fn covers(&self, start: u64, target: Target) -> bool {
        start >= target.0 || is_planted(Bug::SharesAnyFlush)
    }

    /// Flushes on this thread, for the caller and all that wait, and starts the next flush.
    fn flush_here<'a>(
        self: &'a Arc<Self>,
        mut queue: MutexGuard<'a, FlushQueue>,
    ) -> io::Result<()> {
        queue.begin(self.target().0, true);
        drop(queue);
        let result = self.device.flush();
        let mine = match &result {
            Ok(()) => Ok(()),
            Err(error) => Err(same_error(error)),
        };
        let mut queue = lock(&self.queue);
        let ended = self.complete(&mut queue, result);
        self.start_next(queue, Some(ended));
        mine
    }

    /// The device answers a submitted flush.
    fn submitted_ended(self: &Arc<Self>, result: io::Result<()>) {
        let mut queue = lock(&self.queue);
        let in_flight = queue.in_flight.as_mut().expect("the flush that was submitted");
        if in_flight.submitting {
            in_flight.result = Some(result);
            return;
        }
        let ended = self.complete(&mut queue, result);
        self.start_next(queue, Some(ended));
    }

    /// Ends the flush in flight: its start becomes durable, or all waiters get its error (FLUSH-3).
    fn complete(&self, queue: &mut FlushQueue, result: io::Result<()>) -> Ended {
        let in_flight = queue.in_flight.take().expect("a flush is in flight");
        queue.shared += in_flight.callers - 1;
        let mut waiters = in_flight.waiters;
        match &result {
            // The lock is held, and each flush samples a larger start: `durable` never decreases.
            Ok(()) => self.durable.0.store(self.durable_after(in_flight.start), Ordering::Release),
            Err(error) => {
                waiters.append(&mut queue.waiting);
                self.record_failure(queue, error);
            }
        }
        Ended { waiters, result }
    }

    fn durable_after(&self, start: u64) -> u64 {
        if is_planted(Bug::SamplesAfterTheFlush) { self.target().0 } else { start }
    }

    fn record_failure(&self, queue: &mut FlushQueue, error: &io::Error) {
        if !is_planted(Bug::ForgetsFailures) {
            queue.failed = Some(same_error(error));
        }
    }

    /// No flush is in flight: starts the next one if a caller waits, and then answers the waiters
    /// of the one before.
    fn start_next<'a>(
        self: &'a Arc<Self>,
        mut queue: MutexGuard<'a, FlushQueue>,
        mut before: Option<Ended>,
    ) {
        loop {
            let next = self.next_flush(&mut queue);
            drop(queue);
            let ended = match next {
                Next::Nothing => None,
                Next::HandOver(wakeup) => {
                    wakeup.wake(Wake::Flush);
                    None
                }
                Next::Submit => self.submit(),
            };
            // A flush that ended within `submit` still counts as in flight, so that callbacks
            // cannot interfere with it.
            if let Some(before) = before.take() {
                before.answer_all();
            }
            let Some(result) = ended else { return };
            queue = lock(&self.queue);
            before = Some(self.complete(&mut queue, result));
        }
    }

    fn next_flush(&self, queue: &mut FlushQueue) -> Next {
        debug_assert!(queue.is_idle(), "FLUSH-1");
        if is_planted(Bug::ForgetsWaiters) {
            return if queue.flushes == 0 { self.begin_submitted(queue) } else { Next::Nothing };
        }
        if queue.waiting.is_empty() {
            return Next::Nothing;
        }
        let thread = queue.waiting.iter().position(|waiter| matches!(waiter, Waiter::Thread(_)));
        match thread.map(|at| queue.waiting.swap_remove(at)) {
            Some(Waiter::Thread(wakeup)) => {
                queue.handed_over = true;
                Next::HandOver(wakeup)
            }
            _ => self.begin_submitted(queue),
        }
    }

    fn begin_submitted(&self, queue: &mut FlushQueue) -> Next {
        queue.begin(self.target().0, false);
        Next::Submit
    }

    /// Submits the flush that has just begun. Returns its result if it ended already.
    fn submit(self: &Arc<Self>) -> Option<io::Result<()>> {
        let me = Arc::clone(self);
        self.device
            .submit(vec![Io::Flush { done: Box::new(move |result| me.submitted_ended(result)) }]);
        let mut queue = lock(&self.queue);
        let in_flight = queue.in_flight.as_mut().expect("only the submitting thread completes it");
        let result = in_flight.result.take();
        in_flight.submitting = result.is_some();
        result
    }
}

#[cfg(test)]
mod tests;
