//! A ring thread that has to wait for the processor is raised to the real-time class.
//!
//! The caller waits meanwhile, often with a lock of the kernel's that others wait for. Beside
//! programs that keep every processor busy, the normal class lets each request wait until their
//! slices end, milliseconds each. So a ring thread watches how long it waits for the processor
//! before each of its runs ([`WAIT_MIN`]). If that is long, it runs in the real-time class for some
//! time, with the lowest priority there, where this process may (`CAP_SYS_NICE`, or
//! `RLIMIT_RTPRIO`). Then it watches again. A thread that does not wait stays in the normal class:
//! one program alone, or a client beside its server, is faster so.
//!
//! The real-time class has no fairness, so its use is bounded:
//!
//! * In each [`WINDOW`] a thread has [`BUDGET`] of processor time in that class. A thread that has
//!   used it up goes on in the normal class until the window ends. So the normal class keeps at
//!   least a quarter of each processor.
//! * The thread looks at its clocks between requests. If one request takes longer than a sweep of
//!   [`RealTime::watch`], that thread is lowered from outside.
//! * Threads that a ring thread starts begin in the normal class.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use crate::sys;

/// The budget is for this much time.
const WINDOW: Duration = Duration::from_millis(4);
/// Processor time in the real-time class in each window.
const BUDGET: Duration = Duration::from_millis(3);
/// A thread whose runs begin so late, on average, waits for other programs. A sleeping processor
/// takes some 20 µs to wake, a slice of another program about 3 ms to end.
const WAIT_MIN: Duration = Duration::from_micros(250);
/// The average is over so many runs, or more.
const RUNS_MIN: u64 = 8;
/// A thread that waited is raised for this time. Each time that it waits again at once, for twice
/// the time, up to the longest: watching costs its callers the waits that it sees.
const RAISED_TIME: Duration = Duration::from_millis(100);
const RAISED_TIME_MAX: Duration = Duration::from_millis(3_200);
/// The thread reads its clocks after requests of this weight: so many small ones.
const LOOK_EVERY: usize = 16;
/// So many bytes weigh as much as one small request.
const WEIGHT_BYTES: usize = 16 << 10;

/// Where a ring thread stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// In the normal class.
    Normal,
    /// In the real-time class.
    Raised,
    /// In the normal class for good: this process may not use the other.
    Refused,
    /// The thread has ended.
    Ended,
}

/// What a thread's clocks say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Clocks {
    real: Duration,
    processor: Duration,
    /// How long it has waited for a processor while it could run.
    waited: Duration,
    /// How often it began to run.
    runs: u64,
}

/// What a thread does with its clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It looks in the normal class whether its runs begin late.
    Watching { since: Clocks },
    /// It is raised, within its budget.
    Boosted { until: Duration, window: Window },
}

/// A window of a raised thread, and what the thread has used of its budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    began: Duration,
    /// Processor time in the real-time class that no budget has paid for yet.
    charged: Duration,
    /// The thread's processor time at the last look.
    processor: Duration,
    /// The last look left the thread in the real-time class.
    raised: bool,
}

impl Window {
    fn new(now: Clocks) -> Self {
        let Clocks { real, processor, .. } = now;
        Self { began: real, charged: Duration::ZERO, processor, raised: true }
    }

    /// Where the thread should stand now. Each window that is over pays for one budget; what was
    /// used beyond that is left for the next ones to pay.
    fn look(&mut self, now: Clocks) -> Standing {
        if self.raised {
            self.charged += now.processor.saturating_sub(self.processor);
        }
        self.processor = now.processor;
        let over = now.real.saturating_sub(self.began).as_nanos() / WINDOW.as_nanos();
        if over > 0 {
            let paid = BUDGET.saturating_mul(u32::try_from(over).unwrap_or(u32::MAX));
            self.charged = self.charged.saturating_sub(paid);
            self.began = now.real;
        }
        self.raised = self.charged < BUDGET;
        if self.raised { Standing::Raised } else { Standing::Normal }
    }
}

/// When a thread is raised and lowered.
#[derive(Debug)]
struct Course {
    phase: Phase,
    /// How long it is raised the next time.
    raised_time: Duration,
}

impl Course {
    fn new(now: Clocks) -> Self {
        Self { phase: Phase::Watching { since: now }, raised_time: RAISED_TIME }
    }

    /// Where the thread should stand now.
    fn look(&mut self, now: Clocks) -> Standing {
        match &mut self.phase {
            Phase::Watching { since } => {
                let runs = now.runs.saturating_sub(since.runs);
                if runs < RUNS_MIN {
                    return Standing::Normal;
                }
                let waited = now.waited.saturating_sub(since.waited);
                if waited < WAIT_MIN.saturating_mul(u32::try_from(runs).unwrap_or(u32::MAX)) {
                    *self = Self::new(now);
                    return Standing::Normal;
                }
                let until = now.real + self.raised_time;
                self.phase = Phase::Boosted { until, window: Window::new(now) };
                self.raised_time = (2 * self.raised_time).min(RAISED_TIME_MAX);
                Standing::Raised
            }
            Phase::Boosted { until, .. } if *until <= now.real => {
                self.phase = Phase::Watching { since: now };
                Standing::Normal
            }
            Phase::Boosted { window, .. } => window.look(now),
        }
    }
}

/// A ring thread, as the watch sees it.
#[derive(Debug)]
struct RingThread {
    id: i32,
    /// Held while the class is changed, so that it is what this says.
    standing: Mutex<Standing>,
    /// Odd while the thread serves what has arrived.
    turn: AtomicU64,
    /// The turn of the last sweep.
    seen: AtomicU64,
    /// How often it was raised.
    raised: AtomicU64,
}

impl RingThread {
    /// Changes the class, if it is another one.
    fn stand(&self, wanted: Standing) {
        let mut standing = self.standing.lock();
        let changes = matches!(
            (*standing, wanted),
            (Standing::Raised, Standing::Normal) | (Standing::Normal, Standing::Raised)
        );
        if !changes {
            return;
        }
        let raise = wanted == Standing::Raised;
        match sys::set_realtime(self.id, raise) {
            Ok(()) => *standing = wanted,
            // The right to raise it can be taken away. It can always be lowered.
            Err(error) => {
                tracing::debug!(%error, raise, "cannot change the class of a ring thread");
                *standing = Standing::Refused;
            }
        }
        self.raised.fetch_add(u64::from(raise), Ordering::Relaxed);
    }
}

/// The ring threads of a mount.
#[derive(Debug, Default)]
pub(crate) struct RealTime(Mutex<Vec<Arc<RingThread>>>);

impl RealTime {
    /// Lowers each thread that has been serving since the last sweep without a look at its clocks.
    pub(crate) fn watch(&self) {
        for thread in &*self.0.lock() {
            let turn = thread.turn.load(Ordering::Relaxed);
            if turn % 2 == 1 && turn == thread.seen.swap(turn, Ordering::Relaxed) {
                thread.stand(Standing::Normal);
            }
        }
    }

    /// `{"class": "real-time" or "normal", "may_be_raised": bool, "raised": n}`: the highest class
    /// of a thread now, and how often one was raised; `null` without ring threads.
    pub(crate) fn json(&self) -> Value {
        let threads = self.0.lock();
        if threads.is_empty() {
            return Value::Null;
        }
        let stands = |at| threads.iter().any(|thread| *thread.standing.lock() == at);
        let class = if stands(Standing::Raised) { "real-time" } else { "normal" };
        let raised = threads.iter().map(|t| t.raised.load(Ordering::Relaxed)).sum::<u64>();
        let members = [
            ("class".into(), class.into()),
            ("may_be_raised".into(), (!stands(Standing::Refused)).into()),
            ("raised".into(), raised.into()),
        ];
        Value::Object(members.into_iter().collect())
    }

    /// Adds the calling thread.
    pub(crate) fn enter(&self) -> Boost {
        let id = thread_id();
        // Tried now, so that the figures say whether it may be raised.
        let tried = sys::set_realtime(id, true).and_then(|()| sys::set_realtime(id, false));
        let standing = match tried {
            Ok(()) => Standing::Normal,
            Err(error) => {
                tracing::debug!(%error, "ring threads stay in the normal class");
                Standing::Refused
            }
        };
        let thread = Arc::new(RingThread {
            id,
            standing: Mutex::new(standing),
            turn: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            raised: AtomicU64::new(0),
        });
        self.0.lock().push(Arc::clone(&thread));
        let waits = Waits::of_this_thread();
        let origin = now();
        let course = Course::new(clocks(origin, &waits));
        Boost { thread, origin, waits, course, weight: 0 }
    }
}

/// How long a thread waited for a processor, as the kernel counts it.
struct Waits(Option<File>);

impl Waits {
    /// Of the calling thread. Where the kernel does not count, a thread never seems to wait.
    fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// The time, and the number of its runs.
    fn read(&self) -> Option<(Duration, u64)> {
        let mut bytes = [0; 64];
        let len = self.0.as_ref()?.read_at(&mut bytes, 0).ok()?;
        // Processor time, time waited, runs.
        let mut fields = std::str::from_utf8(&bytes[..len]).ok()?.split_ascii_whitespace().skip(1);
        let waited = Duration::from_nanos(fields.next()?.parse().ok()?);
        Some((waited, fields.next()?.parse().ok()?))
    }
}

fn clocks(origin: Instant, waits: &Waits) -> Clocks {
    let (waited, runs) = waits.read().unwrap_or_default();
    Clocks { real: now() - origin, processor: processor_time(), waited, runs }
}

/// A ring thread's own side. Dropped when the thread ends.
pub(crate) struct Boost {
    thread: Arc<RingThread>,
    origin: Instant,
    waits: Waits,
    course: Course,
    /// Of the requests since the last look.
    weight: usize,
}

impl Boost {
    /// The thread begins to serve what has arrived.
    pub(crate) fn begin_turn(&self) {
        self.turn();
    }

    /// It has served all of it.
    pub(crate) fn end_turn(&self) {
        self.turn();
    }

    fn turn(&self) {
        // Only this thread writes it.
        let turn = self.thread.turn.load(Ordering::Relaxed);
        self.thread.turn.store(turn + 1, Ordering::Relaxed);
    }

    /// A request was served that may have taken long, however small it is.
    pub(crate) fn served_long(&mut self) {
        self.served(LOOK_EVERY * WEIGHT_BYTES);
    }

    /// A request with so many bytes was served.
    pub(crate) fn served(&mut self, bytes: usize) {
        self.weight += 1 + bytes / WEIGHT_BYTES;
        if self.weight < LOOK_EVERY {
            return;
        }
        self.weight = 0;
        let clocks = clocks(self.origin, &self.waits);
        self.thread.stand(self.course.look(clocks));
    }
}

impl Drop for Boost {
    fn drop(&mut self) {
        *self.thread.standing.lock() = Standing::Ended;
    }
}

#[expect(clippy::disallowed_methods, reason = "processor time is real time")]
fn now() -> Instant {
    Instant::now()
}

/// What the calling thread has used so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The calling thread's number.
fn thread_id() -> i32 {
    gettid().as_raw_nonzero().get()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(real: u32, processor: u32) -> Clocks {
        Clocks { real: real * MS / 10, processor: processor * MS / 10, ..Clocks::default() }
    }

    #[test]
    fn a_thread_that_used_its_budget_is_lowered_until_its_window_ends() {
        let mut window = Window::new(at(0, 0));
        assert_eq!(window.look(at(29, 29)), Standing::Raised);
        assert_eq!(window.look(at(30, 30)), Standing::Normal);
        assert_eq!(window.look(at(39, 30)), Standing::Normal);
        assert_eq!(window.look(at(40, 30)), Standing::Raised);
        assert_eq!(window.look(at(69, 59)), Standing::Raised);
        assert_eq!(window.look(at(70, 60)), Standing::Normal);
    }

    #[test]
    fn a_thread_that_used_little_begins_its_next_window_with_a_whole_budget() {
        let mut window = Window::new(at(0, 0));
        assert_eq!(window.look(at(1000, 25)), Standing::Raised);
        assert_eq!(window.look(at(1029, 54)), Standing::Raised);
        assert_eq!(window.look(at(1031, 55)), Standing::Normal);
    }

    #[test]
    fn a_busy_thread_has_three_quarters_of_the_time_however_seldom_it_looks() {
        for step in [7, 22, 39, 41, 100] {
            let mut window = Window::new(at(0, 0));
            let (mut raised, mut now) = (0, 0);
            let mut standing = Standing::Raised;
            while now < 100_000 {
                now += step;
                raised += if standing == Standing::Raised { step } else { 0 };
                standing = window.look(at(now, now));
            }
            assert!(raised <= now / 4 * 3 + 2 * step, "{raised} of {now}, looks every {step}");
        }
    }

    fn class_of(id: i32) -> u32 {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{id}/stat")).expect("Linux");
        // Field 41; the name, field 2, may hold spaces.
        let fields = stat.rsplit(')').next().expect("a name in parentheses").split_whitespace();
        fields.clone().nth(41 - 3).and_then(|policy| policy.parse().ok()).expect("a policy")
    }

    const NORMAL: u32 = libc::SCHED_OTHER as u32;
    const REAL_TIME: u32 = libc::SCHED_RR as u32;

    /// After so many runs that began `wait` late, in tenths of milliseconds.
    fn after(real: u32, runs: u64, wait: u32) -> Clocks {
        let waited = u32::try_from(runs).expect("few") * wait * MS / 10;
        Clocks { waited, runs, ..at(real, 0) }
    }

    #[test]
    fn a_thread_whose_runs_begin_late_is_raised_for_some_time_and_then_watched_again() {
        let mut course = Course::new(at(0, 0));
        assert_eq!(course.look(after(100, RUNS_MIN - 1, 30)), Standing::Normal, "too few runs");
        assert_eq!(course.look(after(120, RUNS_MIN, 30)), Standing::Raised);
        assert_eq!(course.look(after(1_119, 100, 0)), Standing::Raised);
        assert_eq!(course.look(after(1_120, 100, 0)), Standing::Normal);
        // It does not wait any more.
        assert_eq!(course.look(after(1_200, 200, 0)), Standing::Normal);
        assert_eq!(course.look(after(1_300, 300, 0)), Standing::Normal);
        assert_eq!(course.raised_time, RAISED_TIME);
    }

    #[test]
    fn a_thread_whose_runs_begin_in_time_stays_in_the_normal_class() {
        let mut course = Course::new(at(0, 0));
        for look in 1..1_000 {
            assert_eq!(course.look(after(look, u64::from(look) * 16, 2)), Standing::Normal);
        }
    }

    #[test]
    fn a_thread_that_waits_whenever_it_is_watched_is_watched_seldom() {
        let mut course = Course::new(at(0, 0));
        let (mut now, mut watched) = (after(0, 0, 30), 0);
        for real in (0..1_000_000).step_by(30) {
            now = if course.look(now) == Standing::Normal {
                watched += 30;
                after(real, now.runs + 1, 30)
            } else {
                Clocks { real: real * MS / 10, ..now }
            };
        }
        assert!(watched < 1_000_000 / 50, "watched for {watched} of 1,000,000");
    }

    /// A boost of the calling thread, which was raised, if it may be.
    fn raised_boost(all: &RealTime) -> (Boost, bool) {
        let mut boost = all.enter();
        let allowed = *boost.thread.standing.lock() == Standing::Normal;
        let now = clocks(boost.origin, &boost.waits);
        let until = now.real + 3_600_000 * MS;
        boost.course.phase = Phase::Boosted { until, window: Window::new(now) };
        boost.thread.stand(Standing::Raised);
        (boost, allowed)
    }

    #[test]
    fn a_thread_that_serves_one_request_for_too_long_is_lowered_and_raised_again_later() {
        let all = RealTime::default();
        let (mut boost, allowed) = raised_boost(&all);
        let id = boost.thread.id;
        let raised = if allowed { REAL_TIME } else { NORMAL };
        assert_eq!(class_of(id), raised);
        assert_eq!(all.json()["class"], if allowed { "real-time" } else { "normal" });
        assert_eq!(all.json()["may_be_raised"], allowed);
        for _ in 0..3 {
            all.watch(); // it waits for requests, however long
        }
        boost.begin_turn();
        all.watch();
        assert_eq!(class_of(id), raised, "it has served for less than one sweep");
        all.watch();
        assert_eq!(class_of(id), NORMAL);
        boost.end_turn();
        // The window in which it was lowered is over.
        boost.origin -= WINDOW;
        boost.served(LOOK_EVERY * WEIGHT_BYTES);
        assert_eq!(class_of(id), raised);
        assert_eq!(all.json()["raised"], 2 * u64::from(allowed));
        boost.thread.stand(Standing::Normal);
    }

    #[test]
    fn the_kernel_counts_how_long_a_thread_waits_for_a_processor() {
        let waits = Waits::of_this_thread();
        let (_, before) = waits.read().expect("the kernel counts it");
        // Waiting for a thread's end usually ends a run.
        while waits.read().expect("the kernel counts it").1 == before {
            std::thread::spawn(|| ()).join().expect("it ends");
        }
    }

    #[test]
    fn a_thread_that_has_ended_is_left_alone() {
        let all = RealTime::default();
        let (boost, _) = raised_boost(&all);
        boost.begin_turn();
        let id = boost.thread.id;
        drop(boost);
        let before = class_of(id);
        all.watch();
        all.watch();
        assert_eq!(class_of(id), before);
        sys::set_realtime(id, false).expect("a class can be lowered");
    }

    #[test]
    fn a_thread_that_a_ring_thread_starts_is_in_the_normal_class() {
        let all = RealTime::default();
        let (boost, _) = raised_boost(&all);
        let class = std::thread::spawn(|| class_of(thread_id())).join().expect("it reads");
        assert_eq!(class, NORMAL);
        sys::set_realtime(boost.thread.id, false).expect("a class can be lowered");
    }
}
