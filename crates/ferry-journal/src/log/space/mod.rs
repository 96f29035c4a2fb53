//! Log space: one word changed by compare-and-swap, two wait queues, and bounded barging.
//!
//! A caller that takes space holds it when the call returns. The free bytes can never go below
//! zero, so the log cannot be overrun. A caller that does not fit joins a FIFO wait queue: *urgent*
//! takers (operations that already hold uncommitted state, or give space back) go before new ones,
//! each queue first come, first served. A waiter is woken once, with its space in hand.
//!
//! If freed space always went to the first waiter, each operation would cost two switches of
//! threads as soon as a queue exists: the thread that ends one queues up for its next, and another
//! wakes. So a running thread may *barge*: take free space before the new takers that wait. These
//! rules bound it:
//!
//! * While a waiter is first in the queue of new takers, at most [`BARGES_MAX`] takers barge. Then
//!   it is *aged*: nobody barges, and freed space gathers until the waiter has what it asked for.
//! * Freed space is left to barge for only while a *crowd* runs: as many operations as there are
//!   processors. Each of them looks again when it ends. So no waiter sleeps beside free space
//!   unless enough others run, and the last one to run hands over.
//! * Operations that run may take long, and end nothing meanwhile. So the owner asks from time to
//!   time ([`Space::serve_overdue`]) that a waiter which is still first gets its space if it fits.
//! * Urgent takers that wait are never passed.
//!
//! While the first waiter would not fit, a release takes no lock. Bytes below `keep_back` go to
//! urgent takers only. Both the free bytes and `keep_back` change when the log grows. A taker that
//! looks at the two without the lock takes only if the log has not grown in between.

#[cfg(feature = "compare")]
mod compare;

use crate::sync::{Arc, AtomicU64, Condvar, Mutex, MutexGuard, Ordering};
#[cfg(feature = "compare")]
pub use compare::Wake;
use ferry_env::activity::{self, Layer};
use std::collections::VecDeque;

/// How many takers may barge while the same waiter is first.
pub const BARGES_MAX: u64 = 4;

/// Why a taker gets no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGrant {
    /// The log was shut down: no space will be granted again.
    Stopped,
    /// The log cannot be emptied for now.
    Full,
}

/// What takers decide by. It is one word, so that none of them overtakes a queue or overruns the
/// log between a look and the change.
///
/// | bits | |
/// |---|---|
/// | 0 | new takers wait |
/// | 1 | urgent takers wait |
/// | 2 to 5 | takers that may still barge; means something only while new takers wait |
/// | 6 to 7 | how often the log has grown, modulo 4 |
/// | 8 to 23 | operations that run: they have taken space and have not ended |
/// | 24 to 63 | free bytes |
#[derive(Clone, Copy)]
struct Word(u64);

const NEW_WAIT: u64 = 1;
const URGENT_WAIT: u64 = 1 << 1;
const BARGE: u64 = 1 << 2;
const GROWTH: u64 = 1 << 6;
const OPERATION: u64 = 1 << 8;
const BYTE: u64 = 1 << 24;
/// More operations never run at the same time: others wait.
const OPERATIONS_MAX: u64 = BYTE / OPERATION - 1;
const _: () = assert!(BARGES_MAX < GROWTH / BARGE, "the word has room for this many");

impl Word {
    fn free(self) -> u64 {
        self.0 / BYTE
    }

    fn operations(self) -> u64 {
        self.0 % BYTE / OPERATION
    }

    fn barges_left(self) -> u64 {
        self.0 % GROWTH / BARGE
    }

    fn has_waiters(self) -> bool {
        self.0 & (NEW_WAIT | URGENT_WAIT) != 0
    }

    fn new_wait(self) -> bool {
        self.0 & NEW_WAIT != 0
    }

    fn urgent_wait(self) -> bool {
        self.0 & URGENT_WAIT != 0
    }

    /// The word once `taker` has taken `bytes`; `None`: it may not, or fewer than `floor` would
    /// stay.
    fn less(self, bytes: u64, floor: u64, taker: Taker) -> Option<Self> {
        let barges = match taker {
            Taker::Running { .. } | Taker::Log if self.urgent_wait() => return None,
            Taker::Running { urgent: false } if self.new_wait() => {
                if self.barges_left() == 0 {
                    return None;
                }
                BARGE
            }
            _ => 0,
        };
        let operation = if taker == Taker::Log { 0 } else { OPERATION };
        if self.free() < bytes + floor || self.operations() == OPERATIONS_MAX {
            return None;
        }
        Some(Self(self.0 - bytes * BYTE - barges + operation))
    }

    /// The word once the log has grown by `bytes`.
    fn grown(self, bytes: u64) -> Self {
        let growths = (self.0 % OPERATION / GROWTH + 1) % (OPERATION / GROWTH) * GROWTH;
        let others = self.0 / OPERATION * OPERATION + self.0 % GROWTH;
        let grown = bytes.checked_mul(BYTE).and_then(|bytes| others.checked_add(bytes));
        Self(grown.unwrap_or_else(|| panic!("a log longer by {bytes} bytes")) + growths)
    }

    /// The same word with other flags, and so many takers that may still barge.
    fn with_waiters(self, flags: u64, barges: u64) -> Self {
        Self(self.0 / GROWTH * GROWTH + barges * BARGE + flags)
    }
}

/// Who takes space.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taker {
    /// A thread that runs, for an operation.
    Running { urgent: bool },
    /// A waiter whose turn it is, for an operation.
    Served,
    /// The log itself, for a record of its own.
    Log,
}

/// The free space of a log.
pub struct Space {
    #[cfg(feature = "compare")]
    wake: Wake,
    /// How many takers may barge while the same waiter is first.
    barges_max: u64,
    /// So many running operations can keep all processors busy.
    crowd: u64,
    word: AtomicU64,
    /// Free bytes from which on the first waiter fits; `u64::MAX` while no taker waits.
    first_fits: AtomicU64,
    /// Bytes only for urgent takers.
    keep_back: AtomicU64,
    queues: Mutex<Queues>,
    waits: AtomicU64,
    wakes: AtomicU64,
    grants: AtomicU64,
    barges: AtomicU64,
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
    /// Takers that barged; each is counted when the waiter that was first has its grant.
    pub barges: u64,
    /// Releases, and arrivals of waiters, that looked at the queues under their lock.
    pub passes: u64,
    /// Releases that found waiters and took no lock: the first one did not fit, or the space was
    /// left to running threads.
    pub passes_spared: u64,
}

#[derive(Default)]
struct Queues {
    urgent: VecDeque<Arc<Waiter>>,
    new: VecDeque<Arc<Waiter>>,
    /// The first waiter at the last [`Space::serve_overdue`].
    first_seen: Option<Arc<Waiter>>,
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
}

struct Waiter {
    bytes: u64,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Clone, Copy)]
enum State {
    Asleep,
    /// To look for space itself.
    #[cfg(feature = "compare")]
    Roused,
    Ended(Result<(), NoGrant>),
}

impl Waiter {
    fn end(&self, outcome: Result<(), NoGrant>) {
        *self.state.lock().expect("no holder panics") = State::Ended(outcome);
        self.wake.notify_one();
    }

    /// Sleeps until the wait has ended.
    #[cfg(not(feature = "compare"))]
    fn sleep(&self) -> Result<(), NoGrant> {
        let mut state = self.state.lock().expect("no holder panics");
        loop {
            match *state {
                State::Asleep => state = self.wake.wait(state).expect("no holder panics"),
                State::Ended(outcome) => return outcome,
            }
        }
    }
}

impl Space {
    /// A log with `free` bytes, of which `keep_back` are for urgent takers only. `crowd` operations
    /// can keep all processors busy.
    pub fn new(free: u64, keep_back: u64, crowd: u64) -> Self {
        assert!(free <= u64::MAX / BYTE, "a log of {free} bytes");
        Self {
            #[cfg(feature = "compare")]
            wake: Wake::Barging,
            barges_max: BARGES_MAX,
            crowd,
            word: AtomicU64::new(free * BYTE),
            first_fits: AtomicU64::new(u64::MAX),
            keep_back: AtomicU64::new(keep_back),
            queues: Mutex::new(Queues::default()),
            waits: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
            grants: AtomicU64::new(0),
            barges: AtomicU64::new(0),
            passes: AtomicU64::new(0),
            passes_spared: AtomicU64::new(0),
        }
    }

    fn word(&self) -> Word {
        Word(self.word.load(Ordering::SeqCst))
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().expect("no holder panics")
    }

    /// Bytes that are free now.
    pub fn free(&self) -> u64 {
        self.word().free()
    }

    /// Bytes free for takers of this kind, if no taker waits.
    pub fn room(&self, urgent: bool) -> u64 {
        self.free().saturating_sub(self.floor(urgent))
    }

    /// Whether a taker waits.
    pub fn has_waiters(&self) -> bool {
        self.word().has_waiters()
    }

    /// Whether a taker waits that only more free space helps.
    pub fn is_short(&self) -> bool {
        let word = self.word();
        word.has_waiters() && word.free() < self.first_fits.load(Ordering::SeqCst)
    }

    /// Counters of grants and waits.
    pub fn stats(&self) -> SpaceStats {
        let waiting = self.lock().in_turn().count() as u64;
        SpaceStats {
            waiting,
            waits: self.waits.load(Ordering::Relaxed),
            wakes: self.wakes.load(Ordering::Relaxed),
            grants: self.grants.load(Ordering::Relaxed),
            barges: self.barges.load(Ordering::Relaxed),
            passes: self.passes.load(Ordering::Relaxed),
            passes_spared: self.passes_spared.load(Ordering::Relaxed),
        }
    }

    fn floor(&self, urgent: bool) -> u64 {
        if urgent { 0 } else { self.keep_back.load(Ordering::SeqCst) }
    }

    /// Takes `bytes` for an operation if that needs no wait. The operation ends with
    /// [`Space::end`].
    pub fn try_take(&self, bytes: u64, urgent: bool) -> bool {
        self.deduct(bytes, || self.floor(urgent), Taker::Running { urgent }).is_some()
    }

    /// Takes `bytes` for a record of the log itself if they are free and no urgent taker waits.
    pub fn try_take_for_log(&self, bytes: u64) -> bool {
        self.deduct(bytes, || 0, Taker::Log).is_some()
    }

    /// Takes `bytes` by compare-and-swap if at least `floor` stay and the taker may. Returns the
    /// word then.
    ///
    /// `floor` is asked again for each word: the log may have grown. A growth raises what is kept
    /// back before it changes the word, and the word counts growths. So the floor of a word that
    /// is still the same is the old one or that of the next growth, whose bytes are not there yet.
    fn deduct(&self, bytes: u64, floor: impl Fn() -> u64, taker: Taker) -> Option<Word> {
        let mut word = self.word();
        loop {
            let less = word.less(bytes, floor(), taker)?;
            match self.word.compare_exchange_weak(
                word.0,
                less.0,
                Ordering::SeqCst,
                Ordering::SeqCst,
            ) {
                Ok(_) => return Some(less),
                Err(now) => word = Word(now),
            }
        }
    }

    /// Takes `bytes` for an operation, waiting in turn. `before_wait` is called once if it has to
    /// wait, before it does. The operation ends with [`Space::end`].
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
            let mut queues = self.lock();
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
        let _waiting = activity::enter(Layer::LogSpace);
        #[cfg(feature = "compare")]
        loop {
            if let Some(outcome) = waiter.sleep() {
                return outcome;
            }
            if self.take_own(&waiter, urgent) {
                return Ok(());
            }
        }
        #[cfg(not(feature = "compare"))]
        waiter.sleep()
    }

    /// An operation ends, and gives `bytes` back.
    pub fn end(&self, bytes: u64) {
        let change = (bytes * BYTE).wrapping_sub(OPERATION);
        let word = Word(self.word.fetch_add(change, Ordering::SeqCst).wrapping_add(change));
        debug_assert!(word.operations() < OPERATIONS_MAX, "more operations ended than began");
        self.after_release(word);
    }

    /// Gives `bytes` back; no operation ends.
    pub fn release(&self, bytes: u64) {
        let change = bytes * BYTE;
        self.after_release(Word(self.word.fetch_add(change, Ordering::SeqCst) + change));
    }

    /// Hands over what has become free, if it is to be.
    fn after_release(&self, word: Word) {
        if !word.has_waiters() {
            return;
        }
        let fits = word.free() >= self.first_fits.load(Ordering::SeqCst);
        if fits && !self.leaves(word) {
            self.pass(&mut self.lock());
        } else {
            self.passes_spared.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether free space is left to barge for.
    fn leaves(&self, word: Word) -> bool {
        !word.urgent_wait() && word.barges_left() > 0 && word.operations() >= self.crowd
    }

    /// The log has become larger by `bytes`; from now on `keep_back` bytes are for urgent takers
    /// only.
    pub fn grow(&self, bytes: u64, keep_back: u64) {
        let mut queues = self.lock();
        self.keep_back.store(keep_back, Ordering::SeqCst);
        self.update(|word| word.grown(bytes));
        self.pass(&mut queues);
    }

    /// Serves all waiters that fit if the first one has been the first since the last call. For an
    /// owner that calls this again and again while takers wait: whatever running operations do,
    /// nobody sleeps beside free space for longer than two such times.
    pub fn serve_overdue(&self) {
        let mut queues = self.lock();
        let first = queues.first().map(|(first, _)| first);
        let overdue = match (&first, &queues.first_seen) {
            (Some(now), Some(then)) => Arc::ptr_eq(now, then),
            _ => false,
        };
        if overdue {
            self.serve(&mut queues, |_| false);
            queues.first_seen = queues.first().map(|(first, _)| first);
        } else {
            queues.first_seen = first;
        }
    }

    /// Serves waiters that are to be served; then publishes who waits for how much.
    fn pass(&self, queues: &mut Queues) {
        self.passes.fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "compare")]
        if self.rouses(queues) {
            return;
        }
        self.serve(queues, |word| self.leaves(word));
    }

    /// Serves, in turn, every waiter that fits while space is not to be left; publishes after each
    /// who waits for how much.
    fn serve(&self, queues: &mut Queues, leaves: impl Fn(Word) -> bool) {
        // A newcomer may be first.
        let mut word = self.publish(queues, false);
        while let Some((first, urgent)) = queues.first() {
            let floor = || self.floor(urgent);
            if leaves(word) || self.deduct(first.bytes, floor, Taker::Served).is_none() {
                // The word that says so is newer than what is published: the next release sees
                // the waiter.
                return;
            }
            if queues.urgent.pop_front().is_none() {
                queues.new.pop_front();
            }
            self.grants.fetch_add(1, Ordering::Relaxed);
            self.wakes.fetch_add(1, Ordering::Relaxed);
            first.end(Ok(()));
            word = self.publish(queues, !urgent);
        }
    }

    /// Publishes which queues have waiters, and how much the first waiter needs. With `served`
    /// another new taker is first than before, and nobody has passed it yet. Returns the word then.
    fn publish(&self, queues: &Queues, served: bool) -> Word {
        let need = queues.first().map_or(u64::MAX, |(w, urgent)| w.bytes + self.floor(urgent));
        self.first_fits.store(need, Ordering::SeqCst);
        let mut flags = 0;
        if !queues.new.is_empty() {
            flags |= NEW_WAIT;
        }
        if !queues.urgent.is_empty() {
            flags |= URGENT_WAIT;
        }
        let renews = |word: Word| served || !word.new_wait();
        let published = |word: Word| {
            let barges = if renews(word) { self.barges_max } else { word.barges_left() };
            word.with_waiters(flags, barges)
        };
        let before = self.update(published);
        if before.new_wait() && renews(before) {
            self.barges.fetch_add(self.barges_max - before.barges_left(), Ordering::Relaxed);
        }
        published(before)
    }

    /// Changes the word. Returns it as it was before.
    fn update(&self, change: impl Fn(Word) -> Word) -> Word {
        let changed = self
            .word
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |word| Some(change(Word(word)).0));
        Word(changed.expect("the update always gives a value"))
    }

    /// Ends all waits without a grant: the log cannot be emptied for now. Later takers may wait
    /// again.
    pub fn fail_waiters(&self) {
        let mut queues = self.lock();
        self.end_all(&mut queues, NoGrant::Full);
    }

    /// Ends all waits, now and later. Takers that there is space for still get it.
    pub fn stop(&self) {
        let mut queues = self.lock();
        queues.stopped = true;
        self.end_all(&mut queues, NoGrant::Stopped);
    }

    fn end_all(&self, queues: &mut Queues, why: NoGrant) {
        let waiters: Vec<_> = queues.urgent.drain(..).collect();
        let waiters = waiters.into_iter().chain(queues.new.drain(..).collect::<Vec<_>>());
        queues.first_seen = None;
        self.publish(queues, false);
        waiters.for_each(|waiter| waiter.end(Err(why)));
    }
}
