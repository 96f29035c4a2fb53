//! Owners of a volume in a simulated object store.
//!
//! A run of its own: `OBJECT_SECONDS=600 OBJECT_SEED=1 cargo test --release -p ferry-sim --lib
//! object::tests::for_so_many_seconds -- --ignored --nocapture`. A failure prints its seed and all
//! that happened.

use super::{Plan, VolumePlan};
use ferry_env::Env;
use ferry_env::planted::{Bug, plant};

/// Seeds in which each bug is looked for, at most.
const PLANTED_SEEDS: u64 = 10_000;

#[derive(Default)]
struct Sum {
    requests: u64,
    /// Before the volume was open, and behind that.
    crashes: [u64; 2],
    opened: u64,
    swept: u64,
    repacked: u64,
    /// Snapshots that were read, and deleted.
    snapshots: (u64, u64),
    /// Times that a volume went back to a snapshot.
    rollbacks: u64,
    /// Clones that were made, and read.
    clones: (u64, u64),
    /// Local logs that were uploaded by the next owner, and those that had lost flushes.
    replayed: (u64, u64),
}

/// Runs a seed: nothing that was flushed is lost, and no owner reads what a newer one has changed.
fn run(seed: u64, sum: &mut Sum) {
    let outcome = Plan::draw(seed).run(false);
    if let Some(violation) = outcome.violation {
        let again = Plan::draw(seed).run(true);
        panic!("seed {seed}: {violation}\n{}", again.trace.join("\n"));
    }
    sum.requests += outcome.requests;
    sum.crashes[0] += outcome.crashes[0];
    sum.crashes[1] += outcome.crashes[1];
    sum.opened += outcome.opened;
    sum.swept += outcome.swept;
    sum.repacked += outcome.repacked;
    sum.snapshots.0 += outcome.snapshots.0;
    sum.snapshots.1 += outcome.snapshots.1;
    sum.rollbacks += outcome.rollbacks;
    sum.clones.0 += outcome.clones.0;
    sum.clones.1 += outcome.clones.1;
    sum.replayed.0 += outcome.replayed.0;
    sum.replayed.1 += outcome.replayed.1;
}

#[test]
fn one_seed_is_one_run() {
    let _planted = plant(Bug::None);
    for seed in 0..20 {
        let (first, second) = (Plan::draw(seed).run(false), Plan::draw(seed).run(true));
        assert_eq!((first.digest, first.requests), (second.digest, second.requests), "seed {seed}");
    }
}

#[test]
fn nothing_flushed_is_lost_whatever_owners_and_store_do() {
    let _planted = plant(Bug::None);
    let mut sum = Sum::default();
    (0..1000).for_each(|seed| run(seed, &mut sum));
    assert!(sum.swept > 1000, "{} orphans", sum.swept);
    assert!(sum.repacked > 1 << 20, "{} bytes repacked", sum.repacked);
    let (read, deleted) = sum.snapshots;
    assert!(read > 1000 && deleted > 1000, "{read} snapshots read, {deleted} deleted");
    assert!(sum.rollbacks > 50, "{} rollbacks", sum.rollbacks);
    let (cloned, read) = sum.clones;
    assert!(cloned > 100 && read > 200, "{cloned} clones, {read} read");
    let (replayed, lost) = sum.replayed;
    assert!(replayed > 100 && lost > 10, "{replayed} local logs, {lost} of them lost flushes");
    let ([opening, serving], opened) = (sum.crashes, sum.opened);
    assert!(
        opening > 1000 && serving > 500 && opened > 2000,
        "{opening} crashes before an opening, {serving} behind it, {opened} openings"
    );
}

/// A claimant slept while later owners wrote and deleted the log that it followed.
#[test]
fn a_claimant_whose_log_is_gone_gives_up() {
    let _planted = plant(Bug::None);
    run(33_843, &mut Sum::default());
}

#[test]
#[ignore = "runs for as long as it is told"]
fn for_so_many_seconds() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
    };
    let (seconds, first) = (number("OBJECT_SECONDS", 60), number("OBJECT_SEED", 1000));
    let _planted = plant(Bug::None);
    let clock = Env::real().clock;
    let begun = clock.monotonic();
    let (mut seed, mut sum) = (first, Sum::default());
    while (clock.monotonic() - begun).as_secs() < seconds {
        run(seed, &mut sum);
        seed += 1;
    }
    let Sum { requests, crashes, opened, swept, repacked, snapshots, rollbacks, .. } = sum;
    let Sum { clones, replayed, .. } = sum;
    println!(
        "{} seeds: {requests} requests, {crashes:?} crashes before and behind {opened} openings, {swept} orphans, \
         {repacked} bytes repacked, {snapshots:?} snapshots read and deleted, {rollbacks} rollbacks, \
         {clones:?} clones made and read, \
         {replayed:?} local logs",
        seed - first
    );
}

#[test]
fn each_planted_bug_of_an_owner_is_found() {
    let bugs = [
        Bug::FlushBeforeGap,
        Bug::LogBeforeData,
        Bug::InstalledInAnyOrder,
        Bug::ReadsAfterTerm,
        Bug::SkippedTerm,
        Bug::ServedInTerm,
        Bug::NoTakeoverRoot,
        Bug::DeletedFence,
        Bug::SweptAfterLook,
        Bug::SweptLog,
        Bug::RepackedAnyway,
        Bug::ForgottenPin,
        Bug::SweptPinned,
        Bug::SnapshotFollowsLog,
        Bug::RolledBackLog,
        Bug::PinnedBehindSuper,
        Bug::AcknowledgedBeforeLocalFlush,
        Bug::UploadedOverAnother,
        Bug::UploadedBeforeData,
        Bug::RootBeforeUploads,
    ];
    for bug in bugs {
        let planted = plant(bug);
        let found = (0..PLANTED_SEEDS)
            .find_map(|seed| Some((seed, Plan::draw(seed).run(false).violation?)));
        drop(planted);
        let (seed, violation) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?}: seed {seed}: {violation}");
    }
}

#[test]
fn a_file_system_survives_a_crash_at_each_request_to_the_store() {
    let _planted = plant(Bug::None);
    let (mut points, mut resized, mut deletes, mut rolled_back, mut cloned) =
        (0, 0, 0, [0; 2], [0; 2]);
    for seed in 0..12 {
        let plan = VolumePlan { seed, ops: 150, points_max: 60 };
        let tally = plan.run().unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        points += tally.points;
        resized += tally.resized;
        deletes += tally.deletes;
        rolled_back[0] += tally.rolled_back[0];
        rolled_back[1] += tally.rolled_back[1];
        cloned[0] += tally.cloned[0];
        cloned[1] += tally.cloned[1];
    }
    let [before, behind] = rolled_back;
    println!(
        "{points} crash points, {resized} with another size, {before} and {behind} of a rollback, {cloned:?} of a clone, {deletes} deletions"
    );
    assert!(points > 400 && resized > 200 && deletes > 0 && before > 24 && behind >= 12);
    assert!(cloned[0] > 60 && cloned[1] >= 12, "{cloned:?}");
}
