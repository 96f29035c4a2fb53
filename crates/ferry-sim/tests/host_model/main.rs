//! FerryFS beside the host's file system: the same operations have the same results and errors; and
//! FerryFS beside itself: what runs at the same time has an order in which it could have run alone.

mod ferry;
mod host;
mod ops;
mod order;
mod together;

use ferry::Ferry;
use ferry_sim::device::SimRng;
use host::Host;
use ops::{Op, Outcome, System, draw};
use order::{Event, has_order};
use std::sync::atomic::Ordering;
use together::{Lie, Together};

/// Random sequences that are compared.
const RUNS: u64 = if cfg!(debug_assertions) { 150 } else { 600 };
/// Operations of each.
const OPS: usize = 150;

/// Histories of several threads.
const HISTORIES: usize = if cfg!(debug_assertions) { 3000 } else { 10000 };
/// Histories on one mount.
const HISTORIES_EACH: usize = 250;
/// Threads of one history, and operations of each.
const SHAPES: [(usize, usize); 3] = [(2, 6), (3, 5), (4, 4)];

/// Where the two may differ, and why.
fn may_differ(
    op: &Op,
    ferry: &Outcome,
    host: &Outcome,
    rest_is_zeros: impl FnOnce(u64) -> bool,
) -> bool {
    match (op, ferry, host) {
        // Where data ends and a hole begins is the file system's affair (a small file is data as a
        // whole, zeros that were written may be a hole), as long as no byte of data lies in what is
        // called a hole.
        (Op::Seek { data: false, .. }, Outcome::Number(_), Outcome::Number(_)) => true,
        (
            Op::Seek { data: true, .. },
            Outcome::Number(_),
            Outcome::Number(_) | Outcome::Error(libc::ENXIO),
        ) => true,
        (Op::Seek { data: true, offset, .. }, Outcome::Error(libc::ENXIO), Outcome::Number(_)) => {
            rest_is_zeros(*offset)
        }
        _ => false,
    }
}

/// Runs a sequence on both; says where they differ.
fn compare(ops: &[Op], ferry: &mut dyn System) -> Result<(), String> {
    let dir = tempfile::tempdir().expect("there is room for a directory");
    let mut host = Host::new(dir.path());
    for (n, op) in ops.iter().enumerate() {
        let (ours, theirs) = (ferry.run(op, n), host.run(op, n));
        if ours == theirs {
            continue;
        }
        let rest_is_zeros = |offset| match op {
            Op::Seek { slot, .. } => match host.run(&Op::Read(*slot, offset, 1 << 20), n) {
                Outcome::Bytes(bytes) => bytes.iter().all(|b| *b == 0),
                _ => false,
            },
            _ => false,
        };
        if !may_differ(op, &ours, &theirs, rest_is_zeros) {
            return Err(format!("operation {n}, {op:?}: {ours:?}; the host says {theirs:?}"));
        }
    }
    same_tree(&mut Vec::new(), ferry, &mut host)
}

/// Everything that is there in the end is there on both sides.
fn same_tree(
    path: &mut Vec<u8>,
    ferry: &mut dyn System,
    host: &mut dyn System,
) -> Result<(), String> {
    let list = Op::List(path.clone());
    let names = ask_both(&list, ferry, host)?;
    let Outcome::Names(names) = names else { return Ok(()) };
    for n in 0..5 {
        let Some(kind) = names.get(&ops::name(n)) else { continue };
        path.push(n);
        ask_both(&Op::Stat(path.clone()), ferry, host)?;
        match *kind {
            libc::S_IFDIR => same_tree(path, ferry, host)?,
            libc::S_IFREG => {
                ask_both(&Op::Open { path: path.clone(), slot: 0, truncate: false }, ferry, host)?;
                ask_both(&Op::Read(0, 0, 1 << 20), ferry, host)?;
                ask_both(&Op::ListXattr(path.clone()), ferry, host)?;
            }
            libc::S_IFLNK => drop(ask_both(&Op::Readlink(path.clone()), ferry, host)?),
            _ => {}
        }
        path.pop();
    }
    Ok(())
}

fn ask_both(op: &Op, ferry: &mut dyn System, host: &mut dyn System) -> Result<Outcome, String> {
    let (ours, theirs) = (ferry.run(op, 0), host.run(op, 0));
    if ours == theirs {
        Ok(ours)
    } else {
        Err(format!("in the end, {op:?}: {ours:?}; the host says {theirs:?}"))
    }
}

fn run(ops: &[Op]) -> Result<(), String> {
    let mut ferry = Ferry::new();
    compare(ops, &mut ferry)?;
    ferry.end();
    Ok(())
}

/// Leaves out what is not needed for a difference.
fn shrink(mut ops: Vec<Op>, fails: &dyn Fn(&[Op]) -> Option<String>) -> (Vec<Op>, String) {
    let mut what = fails(&ops).expect("it failed before");
    let mut count = ops.len().div_ceil(2);
    while count > 0 {
        let mut at = 0;
        let mut shrunk = false;
        while at < ops.len() {
            let mut fewer = ops.clone();
            fewer.drain(at..(at + count).min(ops.len()));
            match fails(&fewer) {
                Some(again) => (ops, what, shrunk) = (fewer, again, true),
                None => at += count,
            }
        }
        if !shrunk {
            count /= 2;
        }
    }
    (ops, what)
}

#[test]
fn ferryfs_gives_the_same_results_as_the_host() {
    rustix::process::umask(rustix::fs::Mode::empty());
    for seed in 0..RUNS {
        let ops = draw(&mut SimRng::new(seed), OPS);
        if run(&ops).is_err() {
            let (ops, what) = shrink(ops, &|ops| run(ops).err());
            let ops: Vec<_> = ops.iter().map(|op| format!("\n  {op:?}")).collect();
            panic!("seed {seed}: {what}{}", ops.concat());
        }
    }
}

/// FerryFS, but now and then a write is acknowledged that was not made.
struct Forgetful(Ferry, usize);

impl System for Forgetful {
    fn run(&mut self, op: &Op, n: usize) -> Outcome {
        if let Op::Write(_, _, len @ 1..) = op {
            self.1 += 1;
            if self.1.is_multiple_of(8) {
                return Outcome::Number(*len);
            }
        }
        self.0.run(op, n)
    }
}

/// Planted: a write that is acknowledged and not made.
#[test]
fn a_comparison_with_the_host_finds_a_dropped_write() {
    rustix::process::umask(rustix::fs::Mode::empty());
    let noticed = (0..20).find_map(|seed| {
        let ops = draw(&mut SimRng::new(seed), OPS);
        compare(&ops, &mut Forgetful(Ferry::new(), 0)).err()
    });
    assert!(noticed.is_some());
}

/// Runs histories until one has no order.
fn disorder(seed: u64, histories: usize, lie: Lie) -> Option<String> {
    let mut rng = SimRng::new(seed);
    let mut mount = Together::new(lie);
    for n in 0..histories {
        if n % HISTORIES_EACH == HISTORIES_EACH - 1 {
            assert!(mount.parked.load(Ordering::Relaxed) > 0, "some reads need the device");
            std::mem::replace(&mut mount, Together::new(lie)).end();
        }
        let (threads, count) = *rng.pick(&SHAPES);
        let data = rng.chance(1, 2);
        let threads: Vec<_> =
            (0..threads).map(|t| together::draw(&mut rng, count, t, data)).collect();
        let (start, mut events) = mount.run(n, &threads);
        if !has_order(&start, &events) {
            events.sort_by_key(|event| event.began);
            return Some(format!(
                "history {n} of seed {seed}:{}",
                events.iter().map(brief).collect::<String>()
            ));
        }
    }
    mount.end();
    None
}

fn brief(event: &Event) -> String {
    let answer = match &event.answer {
        order::Answer::Bytes(bytes) => runs(bytes),
        other => format!("{other:?}"),
    };
    format!("\n  {}–{} thread {}: {:?}: {answer}", event.began, event.ended, event.thread, event.op)
}

/// Bytes as tags and how often they follow each other.
fn runs(bytes: &[u8]) -> String {
    bytes.chunk_by(|a, b| a == b).map(|run| format!("{}×{} ", run.len(), run[0])).collect()
}

#[test]
fn concurrent_operations_have_a_sequential_order() {
    if let Some(what) = disorder(1, HISTORIES, Lie::None) {
        panic!("{what}");
    }
}

/// Planted: stale reads, writes in two halves, names that are not found.
#[test]
fn answers_that_contradict_each_other_have_no_order() {
    for lie in [Lie::StaleRead, Lie::HalfWrites, Lie::LostName] {
        assert!(disorder(1, 1000, lie).is_some(), "{lie:?}");
    }
}
