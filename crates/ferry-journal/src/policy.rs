//! When those who asked for durability sail: the fsync policies.
//!
//! [`Dispatcher`] is told who comes, what is sealed and what lands, and answers one question: seal now? It has no lock and no
//! clock of its own: it is asked under the pipe's lock, with the time.
//!
//! * P1: while nothing is in flight, a caller waits for company only under a deadline.
//! * P2: a lone caller never waits: who is waited for was released by an earlier crossing together with, or beside,
//!   whoever waits, and has twice in a row come back soon: within a crossing, or two where there are few callers (of many, the last
//!   one comes late, and all others would wait for it).
//! * P3: a hold that was in vain doubles the number of crossings until the next one, so being wrong about what callers
//!   will do costs less and less.
//! * P4: two callers wait for each other only where it pays. While they come back and their record is written, the device has no
//!   flush to do; sharing one saves the other. Where that takes less, flushes follow each other without a pause: who comes
//!   during one is written beside it, and takes the next. More than two callers share: each flush then saves several.
//! * P5: many callers are waited for only while they come back in less than half a crossing. Where they need longer, the processors
//!   are what is short; two groups that take turns then cross as many, and nobody waits for the slowest.
//!
//! Rejected for `adaptive`: a hold until as many are back as the last crossing released. Two callers who began one after the
//! other would never be released together, and of many the one who began alone would stay alone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Callers whose habits are remembered, at most.
const HABITS_MAX: usize = 1024;
/// So many times in a row a caller has to come back soon before others wait for it.
const TRUSTED: u8 = 2;
/// Landings that say how many callers there are: who has a flush of its own is among those whom so many released.
const RECENT: usize = 4;
/// Callers are few up to this number.
const FEW: usize = 4;
/// Crossings without a hold after one in vain, at most.
const SKIP_MAX: u32 = 63;

/// When a context that somebody waits for is sealed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FlushPolicy {
    /// Every force seals and flushes for itself: what the others are compared with.
    Each,
    /// The first caller waits for the average time of a flush, then commits for all who came.
    Delay,
    /// Whoever comes while a commit is under way boards the next one together.
    Gather,
    /// As `Gather`, and the next commit is held for those who have just been released and are known to be back at once.
    #[default]
    Adaptive,
}

impl FlushPolicy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Each, Self::Delay, Self::Gather, Self::Adaptive];

    /// The word that options use.
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
        found.ok_or_else(|| format!("{word:?} is not a flush policy: use adaptive, gather, delay or each"))
    }
}

/// Who asks for durability: a thread's number, or whatever tells callers apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Caller(pub u32);

impl Caller {
    /// Nobody waits for it, and it waits for nobody: it ends a hold.
    pub const UNKNOWN: Self = Self(0);
}

/// The answer to whether those on board sail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sail {
    /// Seal.
    Now,
    /// The question comes again when a record has become durable.
    AfterLanding,
    /// When somebody boards, or at this time at the latest.
    Until(Duration),
}

/// What a caller did after it was released.
#[derive(Clone, Copy, Debug, Default)]
struct Habit {
    released_at: Duration,
    /// How often in a row it was back soon, up to [`TRUSTED`].
    trust: u8,
}

/// When a record went through its stages.
#[derive(Clone, Copy, Debug)]
pub struct Crossing {
    pub sealed_at: Duration,
    pub written_at: Duration,
    /// The flush that made it durable began.
    pub flush_at: Duration,
}

/// What holds came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Holds {
    /// Commits that were held.
    pub holds: u64,
    /// Those that ended without the callers that they were for.
    pub in_vain: u64,
    /// Callers on board of them.
    pub callers: u64,
    /// How long they were held, together.
    pub time: Duration,
    /// Commits that were sealed beside the flush before them.
    pub beside: u64,
}

/// A running average of times: a quarter of it is the newest.
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

/// Decides when a context that somebody waits for is sealed.
pub struct Dispatcher {
    policy: FlushPolicy,
    fast_flush: Duration,
    /// Who came first for the context being collected, and when.
    first: Option<(Caller, Duration)>,
    /// Who was that for the last one.
    last_first: Option<Caller>,
    /// Somebody on board cannot be held.
    urgent: bool,
    /// Times between seal and landing, for the record's write, and for the flush.
    crossing: Average,
    write: Average,
    flush: Average,
    /// Time in which those who were released are back, and of the last landing the slowest so far.
    back: Average,
    slowest: Option<Duration>,
    /// Callers whom the last landings released.
    recent: VecDeque<Vec<Caller>>,
    /// How many they are, up to a little more than [`FEW`].
    company: usize,
    /// Flushes follow each other: nobody is waited for (P4).
    beside: bool,
    /// Groups take turns: nobody is waited for (P5).
    in_turn: bool,
    landed_at: Duration,
    /// Who was released by the last landing and is expected back.
    awaited: HashSet<Caller>,
    habits: HashMap<Caller, Habit>,
    /// Crossings without a hold: still to come, and to come after the next hold in vain.
    skip: u32,
    next_skip: u32,
    held_since: Option<Duration>,
    holds: Holds,
    #[cfg(test)]
    pub planted: Planted,
}

/// Bugs that the models must catch.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(dead_code, reason = "planted by the model in tests/")]
pub enum Planted {
    #[default]
    Nothing,
    /// A hold has no deadline.
    HoldsForEver,
    /// Who is written is answered by the flush that ends next, whenever that began.
    JoinsAnyFlush,
    /// A flush that failed is taken for one that did not.
    SwallowsErrors,
    /// A lone caller is held, too.
    HoldsTheLone,
}

impl Dispatcher {
    /// Nobody on board, nothing known.
    pub fn new(policy: FlushPolicy, fast_flush: Duration) -> Self {
        Self {
            policy,
            fast_flush,
            first: None,
            last_first: None,
            urgent: false,
            crossing: Average::default(),
            write: Average::default(),
            flush: Average::default(),
            back: Average::default(),
            slowest: None,
            recent: VecDeque::new(),
            company: 0,
            beside: false,
            in_turn: false,
            landed_at: Duration::ZERO,
            awaited: HashSet::new(),
            habits: HashMap::new(),
            skip: 0,
            next_skip: 1,
            held_since: None,
            holds: Holds::default(),
            #[cfg(test)]
            planted: Planted::Nothing,
        }
    }

    /// From now on; what was learned about callers is forgotten.
    pub fn set(&mut self, policy: FlushPolicy, fast_flush: Duration) {
        (self.policy, self.fast_flush) = (policy, fast_flush);
        self.awaited.clear();
        self.habits.clear();
        self.recent.clear();
        (self.skip, self.next_skip) = (0, 1);
        (self.back, self.slowest) = (Average::default(), None);
        (self.beside, self.in_turn) = (false, false);
    }

    /// The policy, and below which average time of a flush `delay` does not wait.
    pub fn get(&self) -> (FlushPolicy, Duration) {
        (self.policy, self.fast_flush)
    }

    /// What holds came to.
    pub fn holds(&self) -> Holds {
        self.holds
    }

    /// Average time between seal and landing.
    pub fn crossing(&self) -> Duration {
        self.crossing.get()
    }

    /// A flush serves the record that it was made for, and no other.
    pub fn flushes_alone(&self) -> bool {
        self.policy == FlushPolicy::Each
    }

    /// Somebody asks for durability and has to wait; `boards` the context being collected, or joins one under way.
    pub fn came(&mut self, now: Duration, caller: Caller, boards: bool) {
        let soon = self.patience();
        if let Some(habit) = self.habits.get_mut(&caller) {
            let after = now.saturating_sub(habit.released_at);
            habit.trust = if after <= soon { TRUSTED.min(habit.trust + 1) } else { 0 };
            if after <= soon {
                self.slowest = self.slowest.max(Some(after));
            }
        }
        self.awaited.remove(&caller);
        if boards {
            self.urgent |= caller == Caller::UNKNOWN;
            self.first.get_or_insert((caller, now));
        }
    }

    /// Somebody is on board: does the context sail? Of the records in flight, `unflushed` are not of the flush that is under
    /// way. `avg_flush` is the device's average time of a flush.
    pub fn sails(
        &mut self,
        now: Duration,
        in_flight: usize,
        unflushed: usize,
        avg_flush: impl Fn() -> Duration,
    ) -> Sail {
        if self.policy == FlushPolicy::Each {
            return Sail::Now;
        }
        if in_flight > 0 {
            return if self.beside && unflushed == 0 { Sail::Now } else { Sail::AfterLanding };
        }
        let until = match self.policy {
            _ if self.urgent => None,
            FlushPolicy::Each | FlushPolicy::Gather => None,
            FlushPolicy::Delay => self.delayed_until(avg_flush()),
            FlushPolicy::Adaptive => (!self.awaited.is_empty()).then(|| self.held_until()),
        };
        #[cfg(test)]
        let until = match self.planted {
            Planted::HoldsForEver => until.map(|_| Duration::MAX),
            Planted::HoldsTheLone => until.or(Some(self.held_until())),
            _ => until,
        };
        match until {
            Some(until) if now < until => {
                self.held_since.get_or_insert(now);
                Sail::Until(until)
            }
            _ => Sail::Now,
        }
    }

    fn held_until(&self) -> Duration {
        self.landed_at + self.patience()
    }

    /// How long after a landing callers are expected back.
    fn patience(&self) -> Duration {
        self.crossing.get() * if self.company <= FEW { 2 } else { 1 }
    }

    fn delayed_until(&self, avg_flush: Duration) -> Option<Duration> {
        let (caller, came) = self.first?;
        (avg_flush >= self.fast_flush && self.last_first != Some(caller)).then(|| came + avg_flush)
    }

    /// The context with `boarded` callers was sealed, for whatever reason, with so many records in flight.
    pub fn sealed(&mut self, now: Duration, boarded: usize, in_flight: usize) {
        if boarded == 0 {
            return;
        }
        self.holds.beside += u64::from(in_flight > 0);
        self.last_first = self.first.take().map(|(caller, _)| caller);
        self.urgent = false;
        if let Some(since) = self.held_since.take() {
            self.holds.holds += 1;
            self.holds.callers += boarded as u64;
            self.holds.time += now.saturating_sub(since);
            self.learn_from_hold(now);
        }
        self.awaited.clear();
    }

    /// P3. Who was waited for and did not come is not trusted again soon.
    fn learn_from_hold(&mut self, now: Duration) {
        if self.policy != FlushPolicy::Adaptive {
            return;
        }
        if self.awaited.is_empty() {
            self.next_skip = 1;
        } else if now >= self.held_until() {
            self.holds.in_vain += 1;
            for caller in &self.awaited {
                if let Some(habit) = self.habits.get_mut(caller) {
                    habit.trust = 0;
                }
            }
            self.skip = self.next_skip;
            self.next_skip = (2 * self.next_skip + 1).min(SKIP_MAX);
        }
    }

    /// A context is durable; these callers are released.
    pub fn landed(&mut self, now: Duration, times: Crossing, released: impl Iterator<Item = Caller>) {
        self.crossing.add(now.saturating_sub(times.sealed_at));
        self.write.add(times.written_at.saturating_sub(times.sealed_at));
        self.flush.add(now.saturating_sub(times.flush_at));
        self.landed_at = now;
        if self.policy != FlushPolicy::Adaptive {
            return;
        }
        let released: Vec<_> = released.filter(|caller| *caller != Caller::UNKNOWN).collect();
        self.weigh_company(&released);
        for caller in released {
            if self.habits.len() >= HABITS_MAX && !self.habits.contains_key(&caller) {
                self.habits.clear();
            }
            let habit = self.habits.entry(caller).or_default();
            habit.released_at = now;
            if habit.trust >= TRUSTED && self.skip == 0 && !self.beside && !self.in_turn {
                self.awaited.insert(caller);
            }
        }
        self.skip = self.skip.saturating_sub(1);
    }

    /// P4 and P5. These have just been released.
    fn weigh_company(&mut self, released: &[Caller]) {
        if let Some(slowest) = self.slowest.take() {
            self.back.add(slowest);
        }
        self.recent.truncate(RECENT - 1);
        self.recent.push_front(released.iter().copied().take(FEW + 1).collect());
        self.company = self.recent.iter().flatten().collect::<HashSet<_>>().len();
        // Who is waited for comes back later than one who is not, because both use the same processors.
        let back = if self.beside { 2 * self.back.get() } else { self.back.get() };
        self.beside = self.company == 2 && self.flush.get() < self.write.get() + back;
        self.in_turn = self.company > FEW && self.crossing.get() < 2 * self.back.get();
    }

    /// Nobody is on board any more: they were told of a failure.
    pub fn abandoned(&mut self) {
        self.first = None;
        self.urgent = false;
        self.held_since = None;
        self.awaited.clear();
    }
}
