//! Many runs on several threads, one sequence on each.

use crate::crash::{Plan, Tally};
use crate::shrink::{describe, shrink};
use ferry_device::Env;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// When to stop.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// After this time.
    pub time: Option<Duration>,
    /// After so many runs.
    pub runs: u64,
    /// At the first failure, which is then shrunk; otherwise all are told as they are found.
    pub first_failure: bool,
}

/// Runs the plans of the seeds `first`, `first` + 1, …; the tally of all, or the description of the first failure, shrunk.
pub fn run(first: u64, limits: Limits, threads: usize, env: &Env) -> Result<Tally, String> {
    let end = limits.time.map(|time| env.clock.monotonic() + time);
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let tally = Mutex::new(Tally::default());
    let failed = Mutex::new(None);
    let work = || {
        while !stop.load(Ordering::Relaxed) && end.is_none_or(|end| env.clock.monotonic() < end) {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= limits.runs {
                break;
            }
            let plan = Plan::draw(first + n);
            match plan.run_apart() {
                Ok(one) => tally.lock().add(&one),
                Err(failure) => {
                    stop.store(limits.first_failure, Ordering::Relaxed);
                    println!("seed {} fails: {failure}", plan.seed);
                    failed.lock().get_or_insert((plan, failure));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    match failed.into_inner() {
        None => Ok(tally.into_inner()),
        Some((plan, failure)) if !limits.first_failure => {
            Err(format!("seed {} was the first to fail: {failure}", plan.seed))
        }
        Some((plan, failure)) => {
            let whole = format!("seed {} fails: {failure}", plan.seed);
            let (plan, failure) = shrink(&plan, failure);
            Err(format!("{whole}\n\nshrunk:\n{}", describe(&plan, &failure)))
        }
    }
}
