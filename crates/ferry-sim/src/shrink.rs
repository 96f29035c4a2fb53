//! Makes a failing run small: leaves operations out as long as what remains still fails.

use crate::crash::{Failure, Plan};

/// Runs tried for one shrinking, at most.
const TRIES_MAX: usize = 400;

/// A smaller plan that fails, and how; the given one if none is found.
pub fn shrink(plan: &Plan, failure: Failure) -> (Plan, Failure) {
    let mut best = (plan.clone(), failure);
    // Lives after the one that failed do not matter.
    best.0.lives.truncate(best.1.life + 1);
    // With fewer operations the crash points move: more images at more points find the failure
    // again.
    best.0.points_max = usize::MAX;
    best.0.images = 3;
    match best.0.run_apart() {
        Err(failure) => best.1 = failure,
        Ok(_) => return (plan.clone(), best.1),
    }
    let mut tries = 0;
    for life in (0..best.0.lives.len()).rev() {
        // An earlier life may turn out to be enough.
        let len = best.0.lives.get(life).map_or(0, Vec::len);
        let mut count = len.div_ceil(2);
        while count > 0 && tries < TRIES_MAX && life < best.0.lives.len() {
            if !pass(&mut best, life, count, &mut tries) {
                count /= 2;
            }
        }
    }
    best
}

/// Leaves out each run of so many operations in turn; says whether any was not needed.
fn pass(best: &mut (Plan, Failure), life: usize, count: usize, tries: &mut usize) -> bool {
    let mut at = 0;
    let mut shrunk = false;
    while life < best.0.lives.len() && at < best.0.lives[life].len() && *tries < TRIES_MAX {
        let mut plan = best.0.clone();
        let end = (at + count).min(plan.lives[life].len());
        plan.lives[life].drain(at..end);
        *tries += 1;
        match plan.run_apart() {
            Err(failure) => {
                plan.lives.truncate(failure.life + 1);
                *best = (plan, failure);
                shrunk = true;
            }
            Ok(_) => at = end,
        }
    }
    shrunk
}

/// A plan as people read it.
pub fn describe(plan: &Plan, failure: &Failure) -> String {
    use std::fmt::Write as _;
    let mut out = format!(
        "seed {}, on {}: volume of {} MiB, log of {} KiB, cache of {} KiB\n",
        plan.seed,
        plan.begin.describe(),
        plan.volume_bytes >> 20,
        plan.log_bytes >> 10,
        plan.cache_bytes >> 10
    );
    for (life, ops) in plan.lives.iter().enumerate() {
        writeln!(out, "life {life}:").expect("a string takes any write");
        for (i, op) in ops.iter().enumerate() {
            writeln!(out, "  {i}: {op}").expect("a string takes any write");
        }
    }
    write!(out, "{failure}").expect("a string takes any write");
    out
}
