//! Log space: one number taken by compare-and-swap, two queues, and hand-off with the wake-up.
//!
//! Whoever takes space holds it when the call returns; the number can never go below zero, so the log cannot be
//! overrun. Who does not fit joins a queue: *urgent* takers (operations that already hold uncommitted state, or give
//! space back) go before new ones, each queue first come, first served. A release makes one pass: it deducts the
//! bytes of each waiter that fits, takes it off its queue and wakes it, holding its grant. So nobody is woken to find
//! nothing, and nobody twice. The alternative, waking everyone to look again, wastes the processor in proportion to
//! the number of waiters. While the first waiter would not fit, a release takes no lock.
//!
//! Bytes below `keep_back` go to urgent takers only.

use crate::sync::{Arc, AtomicU64, Condvar, Mutex, Ordering};
use std::collections::VecDeque;

/// The log was shut down, or has no room to hope for; what was asked is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGrant {
    /// No space will ever be given out again.
    Stopped,
    /// The log cannot be emptied for now.
    Full,
}

/// Bit 0 of the word: new takers wait. A new taker may then not pass by.
const NEW_WAIT: u64 = 1;
/// Bit 1 of the word: urgent takers wait.
const URGENT_WAIT: u64 = 2;
/// The free bytes are in the bits above the two flags.
const SHIFT: u32 = 2;

/// The free space of a log.
pub struct Space {
    /// Free bytes and, in the same word so that nobody passes a queue by, who waits.
    word: AtomicU64,
    /// Free bytes from which the first waiter fits; `u64::MAX` while nobody waits.
    first_fits: AtomicU64,
    /// Bytes only for urgent takers.
    keep_back: u64,
    queues: Mutex<Queues>,
    waits: AtomicU64,
    wakes: AtomicU64,
    grants: AtomicU64,
    passes: AtomicU64,
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceStats {
    /// Takers that had to wait.
    pub waits: u64,
    /// Waiters woken.
    pub wakes: u64,
    /// Waiters that were given what they asked for.
    pub grants: u64,
    /// Releases that looked at the queues under their lock.
    pub passes: u64,
}

#[derive(Default)]
struct Queues {
    urgent: VecDeque<Arc<Waiter>>,
    new: VecDeque<Arc<Waiter>>,
    stopped: bool,
}

struct Waiter {
    bytes: u64,
    outcome: Mutex<Option<Result<(), NoGrant>>>,
    wake: Condvar,
}

impl Waiter {
    fn end(&self, outcome: Result<(), NoGrant>) {
        *self.outcome.lock().expect("no holder panics") = Some(outcome);
        self.wake.notify_one();
    }

    fn wait(&self) -> Result<(), NoGrant> {
        let mut outcome = self.outcome.lock().expect("no holder panics");
        loop {
            if let Some(outcome) = *outcome {
                return outcome;
            }
            outcome = self.wake.wait(outcome).expect("no holder panics");
        }
    }
}

impl Space {
    /// A log with `free` bytes, of which `keep_back` are for urgent takers only.
    pub fn new(free: u64, keep_back: u64) -> Self {
        Self {
            word: AtomicU64::new(free << SHIFT),
            first_fits: AtomicU64::new(u64::MAX),
            keep_back,
            queues: Mutex::new(Queues::default()),
            waits: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
            grants: AtomicU64::new(0),
            passes: AtomicU64::new(0),
        }
    }

    /// Free bytes now.
    pub fn free(&self) -> u64 {
        self.word.load(Ordering::Relaxed) >> SHIFT
    }

    /// Somebody waits.
    pub fn has_waiters(&self) -> bool {
        self.word.load(Ordering::SeqCst) & (NEW_WAIT | URGENT_WAIT) != 0
    }

    /// Counters.
    pub fn stats(&self) -> SpaceStats {
        SpaceStats {
            waits: self.waits.load(Ordering::Relaxed),
            wakes: self.wakes.load(Ordering::Relaxed),
            grants: self.grants.load(Ordering::Relaxed),
            passes: self.passes.load(Ordering::Relaxed),
        }
    }

    fn floor(&self, urgent: bool) -> u64 {
        if urgent { 0 } else { self.keep_back }
    }

    /// Takes `bytes` if they are there and nobody who goes first waits.
    pub fn try_take(&self, bytes: u64, urgent: bool) -> bool {
        let behind = if urgent { URGENT_WAIT } else { NEW_WAIT | URGENT_WAIT };
        self.deduct(bytes, self.floor(urgent), behind)
    }

    /// Takes `bytes` by compare-and-swap if at least `floor` stay and no flag of `behind` is set.
    fn deduct(&self, bytes: u64, floor: u64, behind: u64) -> bool {
        let mut word = self.word.load(Ordering::SeqCst);
        loop {
            if word & behind != 0 || word >> SHIFT < bytes + floor {
                return false;
            }
            match self.word.compare_exchange_weak(
                word,
                word - (bytes << SHIFT),
                Ordering::SeqCst,
                Ordering::SeqCst,
            ) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Takes `bytes`, waiting in turn. `before_wait` is called once if it has to wait, before it does.
    pub fn take(&self, bytes: u64, urgent: bool, before_wait: impl FnOnce()) -> Result<(), NoGrant> {
        if self.try_take(bytes, urgent) {
            return Ok(());
        }
        let waiter = Arc::new(Waiter { bytes, outcome: Mutex::new(None), wake: Condvar::new() });
        {
            let mut queues = self.queues.lock().expect("no holder panics");
            if queues.stopped {
                return Err(NoGrant::Stopped);
            }
            self.waits.fetch_add(1, Ordering::Relaxed);
            if urgent { &mut queues.urgent } else { &mut queues.new }.push_back(waiter.clone());
            // What was released between the attempt above and this moment has seen no waiter: look again, with the
            // flag up and the lock held.
            self.pass(&mut queues);
        }
        before_wait();
        waiter.wait()
    }

    /// Gives `bytes` back and hands them on.
    pub fn release(&self, bytes: u64) {
        let word = self.word.fetch_add(bytes << SHIFT, Ordering::SeqCst) + (bytes << SHIFT);
        if word & (NEW_WAIT | URGENT_WAIT) != 0 && word >> SHIFT >= self.first_fits.load(Ordering::SeqCst) {
            self.pass(&mut self.queues.lock().expect("no holder panics"));
        }
    }

    /// Grants, in turn, everyone who fits; then says in the word and in `first_fits` who waits for how much.
    fn pass(&self, queues: &mut Queues) {
        self.passes.fetch_add(1, Ordering::Relaxed);
        loop {
            while let Some((first, floor)) =
                Self::first(queues).map(|(w, urgent)| (w.clone(), self.floor(urgent)))
            {
                if !self.deduct(first.bytes, floor, 0) {
                    break;
                }
                if queues.urgent.pop_front().is_none() {
                    queues.new.pop_front();
                }
                self.grants.fetch_add(1, Ordering::Relaxed);
                self.wakes.fetch_add(1, Ordering::Relaxed);
                first.end(Ok(()));
            }
            if self.publish(queues) {
                return;
            }
        }
    }

    fn first(queues: &Queues) -> Option<(&Arc<Waiter>, bool)> {
        queues.urgent.front().map(|w| (w, true)).or_else(|| queues.new.front().map(|w| (w, false)))
    }

    /// Publishes who waits. `false` if the first waiter fits by now: a release that came before saw the old word.
    fn publish(&self, queues: &Queues) -> bool {
        let need = Self::first(queues).map_or(u64::MAX, |(w, urgent)| w.bytes + self.floor(urgent));
        self.first_fits.store(need, Ordering::SeqCst);
        let mut flags = 0;
        if !queues.new.is_empty() {
            flags |= NEW_WAIT;
        }
        if !queues.urgent.is_empty() {
            flags |= URGENT_WAIT;
        }
        let word = self
            .word
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |w| Some(w & !(NEW_WAIT | URGENT_WAIT) | flags))
            .expect("the update always gives a value");
        word >> SHIFT < need
    }

    /// Ends everyone's wait without a grant: the log cannot be emptied for now. Later takers may wait again.
    pub fn turn_away(&self) {
        let mut queues = self.queues.lock().expect("no holder panics");
        self.end_all(&mut queues, NoGrant::Full);
    }

    /// Ends everyone's wait, now and later. Takers for whom there is space still get it.
    pub fn stop(&self) {
        let mut queues = self.queues.lock().expect("no holder panics");
        queues.stopped = true;
        self.end_all(&mut queues, NoGrant::Stopped);
    }

    fn end_all(&self, queues: &mut Queues, why: NoGrant) {
        let waiters: Vec<_> = queues.urgent.drain(..).collect();
        let waiters = waiters.into_iter().chain(queues.new.drain(..).collect::<Vec<_>>());
        self.publish(queues);
        for waiter in waiters {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            waiter.end(Err(why));
        }
    }
}
