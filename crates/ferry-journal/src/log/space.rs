//! Log space: one number taken by compare-and-swap, two queues, and hand-off with the wake-up.
//!
//! A caller that takes space holds it when the call returns. The number can never go below zero, so
//! the log cannot be overrun. A caller that does not fit joins a FIFO wait queue: *urgent* takers
//! (operations that already hold uncommitted state, or give space back) go before new ones, each
//! queue first come, first served. A release makes one pass: it deducts the bytes of each waiter
//! that fits, takes it off its queue and wakes it, holding its grant. So no waiter is woken in
//! vain, and none twice. While the first waiter would not fit, a release takes no lock.
//!
//! The alternatives, kept for comparison ([`Wake`]): a release wakes the waiters that there is room
//! for, and each takes its space itself when it runs. Until then it stays in its queue, and the
//! next release wakes it again (`all`) or looks at it again (`flag`). A woken waiter takes only
//! what no waiter before it in the queues needs, so these are first come, first served too.
//!
//! Bytes below `keep_back` go to urgent takers only.

use crate::sync::{Arc, AtomicU64, Condvar, Mutex, Ordering};
use std::collections::VecDeque;

/// How waiters for log space are woken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wake {
    /// Each once, with its space in hand.
    #[default]
    Handoff,
    /// Each that there is room for, unless it is awake already; it takes its space itself.
    Flag,
    /// Each that there is room for, awake or not; it takes its space itself.
    All,
}

impl Wake {
    /// Every way to wake.
    pub const WAYS: [Self; 3] = [Self::Handoff, Self::Flag, Self::All];

    /// The name of the way in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Handoff => "handoff",
            Self::Flag => "flag",
            Self::All => "all",
        }
    }
}

impl std::fmt::Display for Wake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Wake {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::WAYS.into_iter().find(|way| way.name() == word);
        found.ok_or_else(|| format!("{word:?} is not a way to wake: use handoff, flag or all"))
    }
}

/// Why a taker gets no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGrant {
    /// The log was shut down: no space will be granted again.
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
    wake: Wake,
    /// Free bytes and, in the same word so that no taker overtakes a queue, which queues have
    /// waiters.
    word: AtomicU64,
    /// Free bytes from which on the first waiter fits; `u64::MAX` while no taker waits.
    first_fits: AtomicU64,
    /// Bytes only for urgent takers.
    keep_back: AtomicU64,
    queues: Mutex<Queues>,
    waits: AtomicU64,
    wakes: AtomicU64,
    grants: AtomicU64,
    passes: AtomicU64,
    passes_spared: AtomicU64,
}

/// Statistics of the log's space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceStats {
    /// Takers that had to wait.
    pub waits: u64,
    /// Takers that wait now.
    pub waiting: u64,
    /// Waiters woken for space.
    pub wakes: u64,
    /// Waiters that got what they asked for.
    pub grants: u64,
    /// Releases, and arrivals of waiters, that looked at the queues under their lock.
    pub passes: u64,
    /// Releases that could not help the first waiter, and so took no lock.
    pub passes_spared: u64,
}

#[derive(Default)]
struct Queues {
    urgent: VecDeque<Arc<Waiter>>,
    new: VecDeque<Arc<Waiter>>,
    stopped: bool,
}

impl Queues {
    /// All waiters in the order in which they are served; `true`: urgent.
    fn in_turn(&self) -> impl Iterator<Item = (&Arc<Waiter>, bool)> {
        self.urgent.iter().map(|w| (w, true)).chain(self.new.iter().map(|w| (w, false)))
    }

    fn first(&self) -> Option<(Arc<Waiter>, bool)> {
        self.in_turn().next().map(|(w, urgent)| (w.clone(), urgent))
    }

    /// Bytes that the waiters before `waiter` need, if it is in a queue.
    fn before(&self, waiter: &Arc<Waiter>) -> Option<u64> {
        let mut bytes = 0;
        for (w, _) in self.in_turn() {
            if Arc::ptr_eq(w, waiter) {
                return Some(bytes);
            }
            bytes += w.bytes;
        }
        None
    }

    fn remove(&mut self, waiter: &Arc<Waiter>) {
        self.urgent.retain(|w| !Arc::ptr_eq(w, waiter));
        self.new.retain(|w| !Arc::ptr_eq(w, waiter));
    }
}

struct Waiter {
    bytes: u64,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Clone, Copy)]
enum State {
    Asleep,
    /// To look for space itself (not with [`Wake::Handoff`]).
    Roused,
    Ended(Result<(), NoGrant>),
}

impl Waiter {
    fn end(&self, outcome: Result<(), NoGrant>) {
        *self.state.lock().expect("no holder panics") = State::Ended(outcome);
        self.wake.notify_one();
    }

    /// Wakes it; with `once`, only if it is not awake already. Returns whether it did.
    fn rouse(&self, once: bool) -> bool {
        let mut state = self.state.lock().expect("no holder panics");
        if once && matches!(*state, State::Roused) {
            return false;
        }
        *state = State::Roused;
        drop(state);
        self.wake.notify_one();
        true
    }

    /// Sleeps until the wait has ended, or until roused: `None`.
    fn sleep(&self) -> Option<Result<(), NoGrant>> {
        let mut state = self.state.lock().expect("no holder panics");
        loop {
            match std::mem::replace(&mut *state, State::Asleep) {
                State::Asleep => state = self.wake.wait(state).expect("no holder panics"),
                State::Roused => return None,
                State::Ended(outcome) => return Some(outcome),
            }
        }
    }
}

impl Space {
    /// A log with `free` bytes, of which `keep_back` are for urgent takers only.
    pub fn new(free: u64, keep_back: u64, wake: Wake) -> Self {
        Self {
            wake,
            word: AtomicU64::new(free << SHIFT),
            first_fits: AtomicU64::new(u64::MAX),
            keep_back: AtomicU64::new(keep_back),
            queues: Mutex::new(Queues::default()),
            waits: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
            grants: AtomicU64::new(0),
            passes: AtomicU64::new(0),
            passes_spared: AtomicU64::new(0),
        }
    }

    /// Bytes that are free now.
    pub fn free(&self) -> u64 {
        self.word.load(Ordering::Relaxed) >> SHIFT
    }

    /// Bytes free for takers of this kind, if no taker waits.
    pub fn room(&self, urgent: bool) -> u64 {
        self.free().saturating_sub(self.floor(urgent))
    }

    /// Whether a taker waits.
    pub fn has_waiters(&self) -> bool {
        self.word.load(Ordering::SeqCst) & (NEW_WAIT | URGENT_WAIT) != 0
    }

    /// Counters of grants and waits.
    pub fn stats(&self) -> SpaceStats {
        let waiting = self.queues.lock().expect("no holder panics").in_turn().count() as u64;
        SpaceStats {
            waiting,
            waits: self.waits.load(Ordering::Relaxed),
            wakes: self.wakes.load(Ordering::Relaxed),
            grants: self.grants.load(Ordering::Relaxed),
            passes: self.passes.load(Ordering::Relaxed),
            passes_spared: self.passes_spared.load(Ordering::Relaxed),
        }
    }

    fn floor(&self, urgent: bool) -> u64 {
        if urgent { 0 } else { self.keep_back.load(Ordering::SeqCst) }
    }

    /// Takes `bytes` if they are free and no taker that goes first waits.
    pub fn try_take(&self, bytes: u64, urgent: bool) -> bool {
        let behind = if urgent { URGENT_WAIT } else { NEW_WAIT | URGENT_WAIT };
        self.deduct(bytes, self.floor(urgent), behind).is_some()
    }

    /// Takes `bytes` by compare-and-swap if at least `floor` stay and no flag of `behind` is set.
    /// Returns what stays.
    fn deduct(&self, bytes: u64, floor: u64, behind: u64) -> Option<u64> {
        let mut word = self.word.load(Ordering::SeqCst);
        loop {
            if word & behind != 0 || word >> SHIFT < bytes + floor {
                return None;
            }
            match self.word.compare_exchange_weak(
                word,
                word - (bytes << SHIFT),
                Ordering::SeqCst,
                Ordering::SeqCst,
            ) {
                Ok(_) => return Some((word >> SHIFT) - bytes),
                Err(now) => word = now,
            }
        }
    }

    /// Takes `bytes`, waiting in turn. `before_wait` is called once if it has to wait, before it
    /// does.
    pub fn take(
        &self,
        bytes: u64,
        urgent: bool,
        before_wait: impl FnOnce(),
    ) -> Result<(), NoGrant> {
        if self.try_take(bytes, urgent) {
            return Ok(());
        }
        let waiter =
            Arc::new(Waiter { bytes, state: Mutex::new(State::Asleep), wake: Condvar::new() });
        {
            let mut queues = self.queues.lock().expect("no holder panics");
            if queues.stopped {
                return Err(NoGrant::Stopped);
            }
            self.waits.fetch_add(1, Ordering::Relaxed);
            if urgent { &mut queues.urgent } else { &mut queues.new }.push_back(waiter.clone());
            // What was released between the attempt above and this moment has seen no waiter: look
            // again, with the flag up and the lock held.
            self.pass(&mut queues);
        }
        before_wait();
        loop {
            if let Some(outcome) = waiter.sleep() {
                return outcome;
            }
            if self.take_own(&waiter, urgent) {
                return Ok(());
            }
        }
    }

    /// A roused waiter takes its bytes if there are enough for it and for all waiters before it.
    fn take_own(&self, waiter: &Arc<Waiter>, urgent: bool) -> bool {
        let mut queues = self.queues.lock().expect("no holder panics");
        let Some(before) = queues.before(waiter) else {
            // Its wait has ended meanwhile.
            return false;
        };
        let Some(left) = self.deduct(waiter.bytes, before + self.floor(urgent), 0) else {
            return false;
        };
        queues.remove(waiter);
        self.grants.fetch_add(1, Ordering::Relaxed);
        // A release since then may have looked at what the first waiter needed before.
        if self.publish(&queues) > left {
            self.pass(&mut queues);
        }
        true
    }

    /// Gives `bytes` back and hands them on.
    pub fn release(&self, bytes: u64) {
        let word = self.word.fetch_add(bytes << SHIFT, Ordering::SeqCst) + (bytes << SHIFT);
        if word & (NEW_WAIT | URGENT_WAIT) == 0 {
            return;
        }
        if word >> SHIFT >= self.first_fits.load(Ordering::SeqCst) {
            self.pass(&mut self.queues.lock().expect("no holder panics"));
        } else {
            self.passes_spared.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The log has become larger by `bytes`; from now on `keep_back` bytes are for urgent takers
    /// only.
    pub fn grow(&self, bytes: u64, keep_back: u64) {
        let mut queues = self.queues.lock().expect("no holder panics");
        self.keep_back.store(keep_back, Ordering::SeqCst);
        self.word.fetch_add(bytes << SHIFT, Ordering::SeqCst);
        self.pass(&mut queues);
    }

    /// Serves, in turn, every waiter that fits; then publishes in the word and in `first_fits`
    /// which waiter waits for how much.
    fn pass(&self, queues: &mut Queues) {
        self.passes.fetch_add(1, Ordering::Relaxed);
        match self.wake {
            Wake::Handoff => self.hand_on(queues),
            Wake::Flag => self.rouse(queues, true),
            Wake::All => self.rouse(queues, false),
        }
    }

    fn hand_on(&self, queues: &mut Queues) {
        loop {
            while let Some((first, urgent)) = queues.first() {
                if self.deduct(first.bytes, self.floor(urgent), 0).is_none() {
                    break;
                }
                if queues.urgent.pop_front().is_none() {
                    queues.new.pop_front();
                }
                self.grants.fetch_add(1, Ordering::Relaxed);
                self.wakes.fetch_add(1, Ordering::Relaxed);
                first.end(Ok(()));
            }
            // If the first waiter fits by now, a release that came before has seen the old word.
            if self.publish(queues) < self.first_fits.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// Wakes all waiters that there is room for; with `once`, except those that are awake.
    fn rouse(&self, queues: &Queues, once: bool) {
        loop {
            let free = self.free();
            let mut left = free;
            for (waiter, urgent) in queues.in_turn() {
                if left < waiter.bytes + self.floor(urgent) {
                    break;
                }
                left -= waiter.bytes;
                self.wakes.fetch_add(u64::from(waiter.rouse(once)), Ordering::Relaxed);
            }
            if self.publish(queues) <= free {
                return;
            }
        }
    }

    /// Publishes which queues have waiters, and how much the first waiter needs. Returns the bytes
    /// that were free at that moment.
    fn publish(&self, queues: &Queues) -> u64 {
        let need = queues.first().map_or(u64::MAX, |(w, urgent)| w.bytes + self.floor(urgent));
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
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |w| {
                Some(w & !(NEW_WAIT | URGENT_WAIT) | flags)
            })
            .expect("the update always gives a value");
        word >> SHIFT
    }

    /// Ends all waits without a grant: the log cannot be emptied for now. Later takers may wait
    /// again.
    pub fn fail_waiters(&self) {
        let mut queues = self.queues.lock().expect("no holder panics");
        self.end_all(&mut queues, NoGrant::Full);
    }

    /// Ends all waits, now and later. Takers that there is space for still get it.
    pub fn stop(&self) {
        let mut queues = self.queues.lock().expect("no holder panics");
        queues.stopped = true;
        self.end_all(&mut queues, NoGrant::Stopped);
    }

    fn end_all(&self, queues: &mut Queues, why: NoGrant) {
        let waiters: Vec<_> = queues.urgent.drain(..).collect();
        let waiters = waiters.into_iter().chain(queues.new.drain(..).collect::<Vec<_>>());
        self.publish(queues);
        waiters.for_each(|waiter| waiter.end(Err(why)));
    }
}
