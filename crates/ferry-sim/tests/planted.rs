//! The simulation can fail: bugs of the kinds that it is there to find are planted, one at a time,
//! and it finds each.
//!
//! One test, because a bug is planted in the whole process.

use ferry_env::planted::{Bug, plant};
use ferry_fs::FlushPolicy;
use ferry_sim::crash::{Failure, Plan};
use ferry_sim::device::{Fault, Op};
use ferry_sim::shrink::{describe, shrink};

/// Plans to try, in order.
type Plans = fn() -> Box<dyn Iterator<Item = Plan>>;

/// By looking at what a volume holds; an operation that fails outright is not what the simulation
/// is praised for here.
fn found_on_the_volume(failure: &Failure) -> bool {
    failure.stage.starts_with("crash at") || failure.stage == "after close"
}

/// The first of these plans that fails.
fn first_failure(plans: impl Iterator<Item = Plan>) -> Option<(Plan, Failure)> {
    let mut failures =
        plans.filter_map(|plan| plan.run_apart().err().map(|failure| (plan, failure)));
    failures.find(|(_, failure)| found_on_the_volume(failure))
}

fn short() -> impl Iterator<Item = Plan> {
    (0..40).map(|seed| Plan { fault: None, ..Plan::fifty(seed) })
}

/// Long sequences on a volume that runs full.
fn heavy() -> impl Iterator<Item = Plan> {
    let long = (0..).map(|seed| Plan { fault: None, points_max: 60, ..Plan::draw(seed) });
    long.filter(|plan| plan.lives[0].len() > 200).take(12)
}

/// Many fsyncs under way together.
fn overlapping() -> impl Iterator<Item = Plan> {
    (0..20).map(|seed| Plan { fault: None, ..Plan::under_way(seed, FlushPolicy::Gather) })
}

/// The same on a log of 4 MiB, which is written round and round.
fn wrapping() -> impl Iterator<Item = Plan> {
    (0..20).map(|seed| Plan { fault: None, ..Plan::wrapping(seed, FlushPolicy::Gather) })
}

/// The same, and one flush fails.
fn failing() -> impl Iterator<Item = Plan> {
    let fails = |after| Some(Fault { op: Op::Flush, after, errno: libc::EIO, sticky: false });
    (0..20).map(move |seed| Plan {
        fault: fails(5 + 3 * seed),
        ..Plan::under_way(seed, FlushPolicy::Gather)
    })
}

#[test]
fn each_planted_bug_is_found() {
    let bugs: [(Bug, Plans); 8] = [
        (Bug::EarlyAnswer, || Box::new(short())),
        (Bug::StaleRecord, || Box::new(heavy())),
        (Bug::EarlyReuse, || Box::new(heavy())),
        (Bug::ForgottenOrphan, || Box::new(short())),
        (Bug::HalfContext, || Box::new(short())),
        (Bug::JoinedFlush, || Box::new(overlapping())),
        (Bug::JoinedFlush, || Box::new(wrapping())),
        (Bug::SwallowedError, || Box::new(failing())),
    ];
    for (bug, plans) in bugs {
        let planted = plant(bug);
        let found = first_failure(plans());
        let (plan, failure) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        let first_line = failure.what.lines().next().unwrap_or_default();
        println!("{bug:?}: seed {}, {}: {first_line}", plan.seed, failure.stage);
        // Long ones take their time to shrink.
        let (plan, failure) =
            if plan.ops() < 100 { shrink(&plan, failure) } else { (plan, failure) };
        assert!(plan.ops() <= 10 || plan.ops() >= 100, "{bug:?}: {}", describe(&plan, &failure));
        drop(planted);
        plan.run_apart().unwrap_or_else(|failure| panic!("without {bug:?}: {failure}"));
    }
}
