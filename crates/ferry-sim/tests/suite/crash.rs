//! The crash simulation as it runs in CI, and that it sees what it is there to see.

use ferry_env::Env;
use ferry_fs::FlushPolicy;
use ferry_sim::campaign::{Done, Limits, run};
use ferry_sim::crash::Plan;
use ferry_sim::device::SimRng;
use ferry_sim::enumerate::Enumeration;
use ferry_sim::shrink::shrink;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Debug builds are for finding mistakes quickly; the full numbers are for release builds. The
/// seeds are the same each time: `scripts/long` runs new ones, for as long as it is told.
const fn count(release: u64) -> u64 {
    if cfg!(debug_assertions) { release / 20 } else { release }
}

fn campaign(plan: &(dyn Fn(u64) -> Option<Plan> + Sync), first: u64, count: u64) -> Done {
    let limits = Limits { runs: Some(count), ..Limits::default() };
    let done = run(plan, first, limits, threads(), &Env::real())
        .unwrap_or_else(|report| panic!("{report}"));
    println!("{done}");
    done
}

/// Several lives, small and long, errors of the device, old volumes below.
#[test]
fn nothing_acknowledged_is_lost_in_any_crash() {
    let runs = count(160);
    let tally = campaign(&|seed| Some(Plan::draw(seed)), 0, runs).tally;
    assert_eq!(tally.runs, runs);
    assert!(tally.images > 10 * runs && tally.crashed_recoveries > runs && tally.resumed > runs);
    assert!(tally.emptied > runs / 2 && tally.in_checkpoint > runs);
    assert!(tally.no_space < tally.ops / 10, "most operations find space");
}

#[test]
fn sequences_of_fifty_operations_survive() {
    let runs = count(1000);
    let tally = campaign(&|seed| Some(Plan::fifty(seed)), 0, runs).tally;
    assert_eq!(tally.runs, runs);
    assert!(tally.ops > 30 * runs && tally.points > 20 * runs);
}

/// Whatever the flush policy: fsyncs of many callers under way together, records completed out of
/// order, a log that wraps.
#[test]
fn answered_fsyncs_survive_with_every_flush_policy() {
    let runs = count(20);
    for policy in FlushPolicy::ALL {
        let tally = campaign(&|seed| Some(Plan::under_way(seed, policy)), 0, runs).tally;
        println!("{}: {tally:?}", policy.name());
        assert_eq!(tally.runs, runs);
        assert!(tally.overlapped > 50 * runs && tally.log_rounds > runs, "{policy:?}: {tally:?}");
        let most = if policy == FlushPolicy::Each { 8 } else { 2 };
        assert!(tally.in_flight_max >= most, "{policy:?}: {tally:?}");
        let holds = matches!(policy, FlushPolicy::Delay | FlushPolicy::Adaptive);
        assert_eq!(tally.holds > runs, holds, "{policy:?}: {tally:?}");
    }
}

/// The same on a log of 4 MiB and with long records, of which up to eight are under way.
#[test]
fn a_log_of_4_mib_is_written_round_and_round() {
    let runs = count(10);
    let tally = campaign(&|seed| Some(Plan::wrapping(seed, FlushPolicy::Each)), 0, runs).tally;
    println!("{tally:?}");
    assert!(tally.runs == runs && tally.log_rounds > runs && tally.in_flight_max == 8, "{tally:?}");
}

/// Power is lost while the cleaner moves blocks.
#[test]
fn cleaning_loses_nothing() {
    let runs = count(20);
    let tally = campaign(&|seed| Some(Plan::churning(seed)), 0, runs).tally;
    assert!(tally.runs == runs && tally.in_cleaning > runs, "{tally:?}");
}

#[test]
fn every_sequence_of_one_and_two_operations_survives() {
    for length in 1..=2 {
        let all = Enumeration::new(length).unwrap_or_else(|failure| panic!("{failure}"));
        let tally = campaign(&|number| all.plan(number), 0, all.count()).tally;
        assert!(tally.runs > all.count() / 3 && tally.points >= 3 * tally.runs, "{tally:?}");
    }
}

#[test]
fn some_sequences_of_three_operations_survive() {
    let all = Enumeration::new(3).unwrap_or_else(|failure| panic!("{failure}"));
    let mut rng = SimRng::new(3);
    let numbers: Vec<_> = (0..count(2000)).map(|_| rng.below(all.count())).collect();
    let tally = campaign(&|n| all.plan(numbers[n as usize]), 0, numbers.len() as u64).tally;
    assert!(tally.runs > numbers.len() as u64 / 5, "{tally:?}");
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    let plan = Plan::draw(7);
    let (one, two) = (plan.run(), plan.run());
    assert_eq!(format!("{one:?}"), format!("{two:?}"));
}

/// A planted bug: a device that says "flushed" and is not.
#[test]
fn a_flush_that_lies_is_noticed_and_shrunk() {
    let lied = (0..20).find_map(|seed| {
        let plan = Plan { flush_lies: true, ..Plan::draw(seed) };
        plan.run_apart().err().map(|failure| (plan, failure))
    });
    let (plan, failure) = lied.expect("20 runs on a device that loses everything");
    let (small, _) = shrink(&plan, failure);
    assert!(small.ops() <= 5, "a few operations show it: {:?}", small.lives);
    assert!(small.run_apart().is_err());
    assert!(Plan { flush_lies: false, ..small }.run_apart().is_ok(), "the device is to blame");
}

/// As the program tells it: the number that it prints is enough to see the same failure, shrunk the
/// same way.
#[test]
fn the_program_shrinks_a_failure_and_its_number_repeats_it() {
    let crash = |args: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_crash")).args(args).output();
        let output = output.expect("the program is there");
        (output.status.code(), String::from_utf8(output.stderr).expect("text"))
    };
    for mode in [&["fifty"][..], &["overlapping"], &["enumerate", "--length", "2"]] {
        let (code, told) = crash(&[mode, &["--lie", "--from", "0", "--count", "1000"]].concat());
        assert_eq!(code, Some(1), "{mode:?}: {told}");
        let number = told
            .strip_prefix("number ")
            .and_then(|rest| rest.split(' ').next())
            .expect("a number")
            .to_owned();
        assert!(told.contains("\nshrunk:\nseed "), "{told}");
        let again = crash(&[mode, &["--lie", "--from", &number, "--one"]].concat());
        assert_eq!(again, (Some(1), told), "{mode:?}");
        let (code, told) = crash(&[mode, &["--from", &number, "--one"]].concat());
        assert_eq!(code, Some(0), "{mode:?}: the device was to blame: {told}");
    }
}

/// Sequences that once failed, shrunk; each says what went wrong.
#[test]
fn sequences_that_failed_once_pass() {
    use ferry_sim::ops::{Move, Op, Path, Which};
    let path = |names: &[u8]| Path(names.to_vec());
    let file = |names: &[u8]| Which::At(path(names));
    let sequences = [
        // A directory above was renamed: fsync of a file that was durable already left its new path
        // behind.
        vec![
            Op::Mkdir(path(&[3])),
            Op::Mkdir(path(&[3, 0])),
            Op::Mkdir(path(&[1])),
            Op::Create(path(&[3, 0, 1])),
            Op::Fsync(file(&[3, 0, 1]), false),
            Op::Rename(path(&[1]), path(&[3]), Move::Exchange),
            Op::Fsync(file(&[1, 0, 1]), false),
        ],
    ];
    for ops in sequences {
        let plan = Plan {
            lives: vec![ops],
            points_max: usize::MAX,
            images: 8,
            fault: None,
            ..Plan::draw(1)
        };
        plan.run().unwrap_or_else(|failure| panic!("{failure}"));
    }
}
