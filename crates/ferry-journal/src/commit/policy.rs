//! Flush policies: when the open context is sealed for the callers that wait for it.
//!
//! The pipeline tells [`Dispatcher`] which callers arrive, what is sealed and what becomes durable.
//! The dispatcher answers one question: seal now? It has no lock and no clock of its own: the
//! pipeline asks it under its lock, with the time. A *commit* here is the way of one context from
//! its seal to its durability.
//!
//! * POLICY-1: while no record is in flight, a caller waits for others only under a deadline.
//! * POLICY-2: a lone caller is never held for callers that have not come. It waits for the commit
//!   in flight and for all that its own context has. The dispatcher expects a caller only if an
//!   earlier commit released it together with, or overlapping, the callers that wait now, and if it
//!   has come back soon twice in a row. Soon is within one commit time, or within two where there
//!   are few callers (of many callers the last one comes late, and all others would wait for it).
//! * POLICY-3: a hold in vain doubles the number of commits until the next hold, so a wrong guess
//!   about what callers will do costs less and less.
//! * POLICY-4: two callers wait for each other only where it pays. While they come back and their
//!   record is written, the device has no flush to do; a shared flush saves the other one. Where
//!   that flush would take less, flushes follow each other without a pause: the record of a caller
//!   that arrives during a flush is written meanwhile and takes the next one. More than two callers
//!   share: each flush then saves several.
//! * POLICY-5: the dispatcher holds for many callers only while they come back in less than half a
//!   commit time. Where they need longer, processors are the bottleneck: two groups that alternate
//!   then commit as much, and no caller waits for the slowest.
//! * POLICY-6: with a least interval between flushes, under any policy, a context that callers wait
//!   for is sealed that long after the one before it at the earliest. Callers that arrive meanwhile
//!   share it. It is for devices where a flush costs money. The journal's own callers
//!   ([`Caller::UNKNOWN`]) do not wait for it: they are few, and others wait for them.
//!
//! Rejected for `adaptive`: a hold until as many callers are back as the last commit released. Two
//! callers that began one after the other would never be released together, and one of many callers
//! that began alone would stay alone.

use ferry_env::planted::{Bug, is_planted};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Callers whose habits are remembered, at most.
const HABITS_MAX: usize = 1024;
/// How often in a row a caller has to come back soon before others wait for it.
const TRUSTED: u8 = 2;
/// Number of recent commits used to estimate how many concurrent callers there are.
const RECENT: usize = 4;
/// Up to this number of callers counts as few.
const FEW: usize = 4;
/// Commits without a hold after one in vain, at most.
const SKIP_MAX: u32 = 63;

/// When a context that callers wait for is sealed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FlushPolicy {
    /// Every force seals and flushes for itself: the baseline for comparisons.
    Each,
    /// The first caller waits for the average time of a flush, then commits for all that arrived.
    Delay,
    /// Callers that arrive during a commit share the next one.
    Gather,
    /// As `Gather`, and the next commit is held for callers that have just been released and are
    /// known to come back at once.
    #[default]
    Adaptive,
}

impl FlushPolicy {
    /// Every policy, from the simplest on.
    pub const ALL: [Self; 4] = [Self::Each, Self::Delay, Self::Gather, Self::Adaptive];

    /// The name of the policy in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::Delay => "delay",
            Self::Gather => "gather",
            Self::Adaptive => "adaptive",
        }
    }
}

impl fmt::Display for FlushPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FlushPolicy {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == word);
        found.ok_or_else(|| {
            format!("{word:?} is not a flush policy: use adaptive, gather, delay or each")
        })
    }
}

/// A caller that asks for durability: the number of its thread, or another number that tells
/// callers apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Caller(pub u32);

impl Caller {
    /// No caller waits for this one, and it waits for none: it ends a hold.
    pub const UNKNOWN: Self = Self(0);
}

/// Whether the open context is sealed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealDecision {
    /// Seal at once.
    Now,
    /// Ask again when a record has become durable.
    AfterCompletion,
    /// Ask again when another caller arrives, at the latest at this time.
    Until(Duration),
}

/// What a caller did after commits released it.
#[derive(Clone, Copy, Debug, Default)]
struct Habit {
    released_at: Duration,
    /// How often in a row it came back soon, up to [`TRUSTED`].
    trust: u8,
}

/// When a record went through its stages.
#[derive(Clone, Copy, Debug)]
pub struct CommitTimes {
    pub sealed_at: Duration,
    pub written_at: Duration,
    /// When the flush that made it durable began.
    pub flush_at: Duration,
}

/// Statistics of holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Holds {
    /// Commits that were held.
    pub holds: u64,
    /// Holds that ended before all expected callers had arrived.
    pub in_vain: u64,
    /// Callers that the held commits served.
    pub callers: u64,
    /// Total time of the holds.
    pub time: Duration,
    /// Commits that were sealed during the flush before them.
    pub overlapped: u64,
}

/// A running average of times; the newest one counts a quarter.
#[derive(Clone, Copy, Debug, Default)]
struct Average(Option<Duration>);

impl Average {
    fn add(&mut self, time: Duration) {
        self.0 = Some(self.0.map_or(time, |average| (time + 3 * average) / 4));
    }

    fn get(self) -> Duration {
        self.0.unwrap_or_default()
    }
}

/// Decides when a context that callers wait for is sealed.
pub struct Dispatcher {
    policy: FlushPolicy,
    fast_flush: Duration,
    /// The least interval between flushes (POLICY-6); zero: none.
    interval_min: Duration,
    /// When a context was sealed last.
    sealed_at: Option<Duration>,
    /// The first caller that waits for the open context, and when it arrived.
    first: Option<(Caller, Duration)>,
    /// The first caller of the context before it.
    last_first: Option<Caller>,
    /// A caller that must not be held waits.
    urgent: bool,
    /// Average times from seal to durability, of the record's write, and of the flush.
    commit_time: Average,
    write: Average,
    flush: Average,
    /// Average time in which released callers come back, and the slowest since the last release.
    back: Average,
    slowest: Option<Duration>,
    /// Callers that the last [`RECENT`] commits released.
    recent: VecDeque<Vec<Caller>>,
    /// How many different callers these are, up to a little more than [`FEW`].
    recent_callers: usize,
    /// Flushes follow each other: no commit is held (POLICY-4).
    overlapping: bool,
    /// Groups alternate: no commit is held (POLICY-5).
    alternating: bool,
    last_release_at: Duration,
    /// Callers that the last commit released and that are expected back.
    expected: HashSet<Caller>,
    habits: HashMap<Caller, Habit>,
    /// Commits without a hold: those still to come, and those to come after the next hold in vain.
    skip: u32,
    next_skip: u32,
    held_since: Option<Duration>,
    holds: Holds,
}

impl Dispatcher {
    /// A dispatcher without callers and without experience.
    pub fn new(policy: FlushPolicy, fast_flush: Duration) -> Self {
        Self {
            policy,
            fast_flush,
            interval_min: Duration::ZERO,
            sealed_at: None,
            first: None,
            last_first: None,
            urgent: false,
            commit_time: Average::default(),
            write: Average::default(),
            flush: Average::default(),
            back: Average::default(),
            slowest: None,
            recent: VecDeque::new(),
            recent_callers: 0,
            overlapping: false,
            alternating: false,
            last_release_at: Duration::ZERO,
            expected: HashSet::new(),
            habits: HashMap::new(),
            skip: 0,
            next_skip: 1,
            held_since: None,
            holds: Holds::default(),
        }
    }

    /// The same with a least interval between flushes.
    pub fn with_interval_min(self, interval_min: Duration) -> Self {
        Self { interval_min, ..self }
    }

    /// Changes the policy, and forgets what was learned about callers.
    pub fn set(&mut self, policy: FlushPolicy, fast_flush: Duration) {
        (self.policy, self.fast_flush) = (policy, fast_flush);
        self.expected.clear();
        self.habits.clear();
        self.recent.clear();
        (self.skip, self.next_skip) = (0, 1);
        (self.back, self.slowest) = (Average::default(), None);
        (self.overlapping, self.alternating) = (false, false);
    }

    /// The policy, and below which average time of a flush `delay` does not wait.
    pub fn get(&self) -> (FlushPolicy, Duration) {
        (self.policy, self.fast_flush)
    }

    /// Statistics of holds.
    pub fn holds(&self) -> Holds {
        self.holds
    }

    /// Average time between seal and durability.
    pub fn commit_time(&self) -> Duration {
        self.commit_time.get()
    }

    /// Each flush serves only the record that it was made for.
    pub fn flushes_alone(&self) -> bool {
        self.policy == FlushPolicy::Each
    }

    /// A caller asks for durability and has to wait. With `joins_open` it waits for the open
    /// context, otherwise for one in flight.
    pub fn arrived(&mut self, now: Duration, caller: Caller, joins_open: bool) {
        let soon = self.patience();
        if let Some(habit) = self.habits.get_mut(&caller) {
            let after = now.saturating_sub(habit.released_at);
            habit.trust = if after <= soon { TRUSTED.min(habit.trust + 1) } else { 0 };
            if after <= soon {
                self.slowest = self.slowest.max(Some(after));
            }
        }
        self.expected.remove(&caller);
        if joins_open {
            self.urgent |= caller == Caller::UNKNOWN;
            self.first.get_or_insert((caller, now));
        }
    }

    /// Whether the open context, which callers wait for, is sealed now. Of the records in flight,
    /// `unflushed` are not covered by the flush in flight. `avg_flush` is the device's average
    /// flush time.
    pub fn decide(
        &mut self,
        now: Duration,
        in_flight: usize,
        unflushed: usize,
        avg_flush: impl Fn() -> Duration,
    ) -> SealDecision {
        if let Some(until) = self.spaced_until().filter(|until| now < *until) {
            return SealDecision::Until(until);
        }
        if self.policy == FlushPolicy::Each {
            return SealDecision::Now;
        }
        if in_flight > 0 {
            return if self.overlapping && unflushed == 0 {
                SealDecision::Now
            } else {
                SealDecision::AfterCompletion
            };
        }
        let until = match self.policy {
            _ if self.urgent => None,
            FlushPolicy::Each | FlushPolicy::Gather => None,
            FlushPolicy::Delay => self.delayed_until(avg_flush()),
            FlushPolicy::Adaptive => (!self.expected.is_empty()).then(|| self.held_until()),
        };
        let until = match until {
            Some(_) if is_planted(Bug::HoldsForEver) => Some(Duration::MAX),
            None if is_planted(Bug::HoldsTheLone) => Some(self.held_until()),
            until => until,
        };
        match until {
            Some(until) if now < until => {
                self.held_since.get_or_insert(now);
                SealDecision::Until(until)
            }
            _ => SealDecision::Now,
        }
    }

    /// POLICY-6. When the next context may be sealed.
    fn spaced_until(&self) -> Option<Duration> {
        if self.interval_min.is_zero() || self.urgent {
            return None;
        }
        self.sealed_at.map(|at| at + self.interval_min)
    }

    fn held_until(&self) -> Duration {
        self.last_release_at + self.patience()
    }

    /// How long after their release callers are expected back.
    fn patience(&self) -> Duration {
        self.commit_time.get() * if self.recent_callers <= FEW { 2 } else { 1 }
    }

    fn delayed_until(&self, avg_flush: Duration) -> Option<Duration> {
        let (caller, came) = self.first?;
        (avg_flush >= self.fast_flush && self.last_first != Some(caller)).then(|| came + avg_flush)
    }

    /// The context that `waiters` callers wait for was sealed, for whatever reason, while
    /// `in_flight` records were in flight.
    pub fn sealed(&mut self, now: Duration, waiters: usize, in_flight: usize) {
        self.sealed_at = Some(now);
        if waiters == 0 {
            return;
        }
        self.holds.overlapped += u64::from(in_flight > 0);
        self.last_first = self.first.take().map(|(caller, _)| caller);
        self.urgent = false;
        if let Some(since) = self.held_since.take() {
            self.holds.holds += 1;
            self.holds.callers += waiters as u64;
            self.holds.time += now.saturating_sub(since);
            self.learn_from_hold(now);
        }
        self.expected.clear();
    }

    /// POLICY-3. A caller that was expected and did not come is not trusted again soon.
    fn learn_from_hold(&mut self, now: Duration) {
        if self.policy != FlushPolicy::Adaptive {
            return;
        }
        if self.expected.is_empty() {
            self.next_skip = 1;
        } else if now >= self.held_until() {
            self.holds.in_vain += 1;
            for caller in &self.expected {
                if let Some(habit) = self.habits.get_mut(caller) {
                    habit.trust = 0;
                }
            }
            self.skip = self.next_skip;
            self.next_skip = (2 * self.next_skip + 1).min(SKIP_MAX);
        }
    }

    /// A context is durable; the commit releases these callers.
    pub fn completed(
        &mut self,
        now: Duration,
        times: CommitTimes,
        released: impl Iterator<Item = Caller>,
    ) {
        self.commit_time.add(now.saturating_sub(times.sealed_at));
        self.write.add(times.written_at.saturating_sub(times.sealed_at));
        self.flush.add(now.saturating_sub(times.flush_at));
        self.last_release_at = now;
        if self.policy != FlushPolicy::Adaptive {
            return;
        }
        let released: Vec<_> = released.filter(|caller| *caller != Caller::UNKNOWN).collect();
        self.estimate_callers(&released);
        for caller in released {
            if self.habits.len() >= HABITS_MAX && !self.habits.contains_key(&caller) {
                self.habits.clear();
            }
            let habit = self.habits.entry(caller).or_default();
            habit.released_at = now;
            if habit.trust >= TRUSTED && self.skip == 0 && !self.overlapping && !self.alternating {
                self.expected.insert(caller);
            }
        }
        self.skip = self.skip.saturating_sub(1);
    }

    /// POLICY-4 and POLICY-5. These callers have just been released.
    fn estimate_callers(&mut self, released: &[Caller]) {
        if let Some(slowest) = self.slowest.take() {
            self.back.add(slowest);
        }
        self.recent.truncate(RECENT - 1);
        self.recent.push_front(released.iter().copied().take(FEW + 1).collect());
        self.recent_callers = self.recent.iter().flatten().collect::<HashSet<_>>().len();
        // A caller that shares a commit comes back later than one that does not, because both use
        // the same processors.
        let back = if self.overlapping { 2 * self.back.get() } else { self.back.get() };
        self.overlapping = self.recent_callers == 2 && self.flush.get() < self.write.get() + back;
        self.alternating =
            self.recent_callers > FEW && self.commit_time.get() < 2 * self.back.get();
    }

    /// No caller waits any more: all were given an error.
    pub fn abandoned(&mut self) {
        self.first = None;
        self.urgent = false;
        self.held_since = None;
        self.expected.clear();
    }
}
