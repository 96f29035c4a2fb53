//! Many runs on several threads, one sequence on each.

use crate::crash::{Plan, Tally};
use crate::shrink::{describe, shrink};
use ferry_env::Env;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// When to stop, and what to say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// After this time.
    pub time: Option<Duration>,
    /// After so many numbers.
    pub runs: Option<u64>,
    /// Not at the first failure, which otherwise is shrunk; all are told as they are found.
    pub all: bool,
    /// Says every so often how far it is.
    pub progress: Option<Duration>,
}

/// What a campaign did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// All runs together.
    pub tally: Tally,
    /// The number that comes next.
    pub next: u64,
    /// How long it took.
    pub time: Duration,
}

struct Campaign<'a> {
    plan: &'a (dyn Fn(u64) -> Option<Plan> + Sync),
    limits: Limits,
    env: &'a Env,
    first: u64,
    begun: Duration,
    next: AtomicU64,
    stop: AtomicBool,
    tally: Mutex<Tally>,
    failed: Mutex<Option<(u64, Plan, crate::crash::Failure)>>,
}

/// Runs the plans of the numbers `first`, `first` + 1, …; a number may have none. What was done, or
/// the description of the first failure, shrunk.
pub fn run(
    plan: &(dyn Fn(u64) -> Option<Plan> + Sync),
    first: u64,
    limits: Limits,
    threads: usize,
    env: &Env,
) -> Result<Done, String> {
    let campaign = Campaign {
        plan,
        limits,
        env,
        first,
        begun: env.clock.monotonic(),
        next: AtomicU64::new(first),
        stop: AtomicBool::new(false),
        tally: Mutex::default(),
        failed: Mutex::default(),
    };
    std::thread::scope(|scope| {
        // Closed when the last thread has ended.
        let (works, working) = mpsc::channel::<()>();
        for _ in 0..threads {
            let (campaign, works) = (&campaign, works.clone());
            scope.spawn(move || {
                campaign.work();
                drop(works);
            });
        }
        drop(works);
        let interval = limits.progress.unwrap_or(Duration::MAX);
        while working.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            println!("{}", campaign.done());
        }
    });
    campaign.outcome()
}

impl Campaign<'_> {
    fn time(&self) -> Duration {
        self.env.clock.monotonic() - self.begun
    }

    fn work(&self) {
        while !self.stop.load(Ordering::Relaxed)
            && self.limits.time.is_none_or(|most| self.time() < most)
        {
            let n = self.next.fetch_add(1, Ordering::Relaxed);
            if self.limits.runs.is_some_and(|most| n - self.first >= most) {
                break;
            }
            let Some(plan) = (self.plan)(n) else { continue };
            match plan.run_apart() {
                Ok(one) => self.tally.lock().add(&one),
                Err(failure) => {
                    self.stop.store(!self.limits.all, Ordering::Relaxed);
                    println!("number {n} fails: {failure}");
                    self.failed.lock().get_or_insert((n, plan, failure));
                }
            }
        }
    }

    fn done(&self) -> Done {
        let end = self.limits.runs.map_or(u64::MAX, |runs| self.first + runs);
        let next = self.next.load(Ordering::Relaxed).min(end);
        Done { tally: *self.tally.lock(), next, time: self.time() }
    }

    fn outcome(self) -> Result<Done, String> {
        let done = self.done();
        match self.failed.into_inner() {
            None => Ok(done),
            Some((n, _, failure)) if self.limits.all => {
                Err(format!("number {n} was the first to fail: {failure}"))
            }
            Some((n, plan, failure)) => {
                let whole = format!("number {n} fails: {failure}");
                let (plan, failure) = shrink(&plan, failure);
                Err(format!("{whole}\n\nshrunk:\n{}", describe(&plan, &failure)))
            }
        }
    }
}

impl std::fmt::Display for Done {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tally { runs, points, images, crashed_recoveries, resumed, emptied, .. } = self.tally;
        let seconds = self.time.as_secs_f64().max(0.001);
        let rate = |count: u64| count as f64 / seconds;
        write!(
            f,
            "{seconds:.0} s, next number {}: {runs} sequences ({:.1}/s), {points} crash points ({:.0}/s, {:.1} million in an hour), \
             {} images recovered; {} points in cleaning, {} in checkpoints; {resumed} worked on, {emptied} emptied",
            self.next,
            rate(runs),
            rate(points),
            rate(points) * 3600.0 / 1e6,
            images + crashed_recoveries,
            self.tally.in_cleaning,
            self.tally.in_checkpoint,
        )
    }
}
