//! The crash simulation as it runs in CI, and that it sees what it is there to see.

use ferry_device::Env;
use ferry_sim::campaign::{Limits, run};
use ferry_sim::crash::Plan;
use ferry_sim::shrink::shrink;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Debug builds are for finding mistakes quickly; the full number is for release builds.
const RUNS: u64 = if cfg!(debug_assertions) { 50 } else { 500 };

#[test]
fn nothing_promised_is_ever_lost() {
    match run(0, Limits { time: None, runs: RUNS, first_failure: true }, threads(), &Env::real()) {
        Ok(tally) => {
            println!("{tally:?}");
            assert_eq!(tally.runs, RUNS);
            assert!(tally.images > 10 * RUNS && tally.crashed_recoveries > RUNS && tally.resumed > RUNS);
            assert!(tally.no_space < tally.ops / 10, "most operations find space");
        }
        Err(report) => panic!("{report}"),
    }
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

/// Sequences that once failed, shrunk; each says what went wrong.
#[test]
fn what_once_failed_stays_right() {
    use ferry_sim::ops::{Move, Op, Path, Which};
    let path = |names: &[u8]| Path(names.to_vec());
    let file = |names: &[u8]| Which::At(path(names));
    let sequences = [
        // A directory above was renamed: fsync of a file that was durable already left its new path behind.
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
        let plan = Plan { lives: vec![ops], points_max: usize::MAX, images: 8, fault: None, ..Plan::draw(1) };
        plan.run().unwrap_or_else(|failure| panic!("{failure}"));
    }
}
