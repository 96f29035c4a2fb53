//! A mirror of two simulated devices, crashed at every request: the sides are equal again before
//! anything is read, nothing that was flushed is lost, and what was not is old or new, sector by
//! sector. Also while a third one takes the place of the second, and with an error that passes at
//! every request.

use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, ComponentHeader, ComponentState, HEAD_LEN, HookedDevice,
    Kind, MirrorDevice, Observer, Op as HookedOp, Side,
};
use ferry_sim::device::{Fault, Op, SimDevice, SimRng};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const LEN: u64 = 256 << 10;
/// Small, so that little must be compared after each of many crashes.
const REGION_LEN: u64 = 64 << 10;
const BLOCK: u64 = BLOCK_SIZE as u64;
const SECTOR: usize = 512;
const EIO: i32 = 5;
const NAMES: [&str; 3] = ["a", "b", "c"];

/// A moment of a run: how far each side's trace was, and what was known outside.
#[derive(Clone, Copy)]
struct CrashPoint {
    points: [usize; 3],
    generation: u64,
    /// Of the steps, so many had begun.
    begun: usize,
    /// A flush that covers all steps before this one was acknowledged.
    durable: usize,
}

/// What a run leaves behind.
struct Run {
    sides: [Arc<SimDevice>; 3],
    /// Held during each request, so that a moment is one of all sides.
    turn: Mutex<()>,
    points: Mutex<Vec<CrashPoint>>,
    generation: AtomicU64,
    begun: AtomicUsize,
    durable: AtomicUsize,
}

impl Run {
    fn note(&self) {
        let point = CrashPoint {
            points: [0, 1, 2].map(|i| self.sides[i].trace_len()),
            generation: self.generation.load(Ordering::SeqCst),
            begun: self.begun.load(Ordering::SeqCst),
            durable: self.durable.load(Ordering::SeqCst),
        };
        self.points.lock().unwrap().push(point);
    }
}

impl Observer for Run {
    fn raised(&self, generation: u64) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap();
        self.generation.store(generation, Ordering::SeqCst);
        self.note();
        Ok(())
    }
    fn rebuilt(&self, _old: &str, _new: &str) {}
}

/// A side that notes the moment before and after each request that changes something. Requests end
/// before the call returns, one after the other, so that these are all the moments there are.
fn watched(run: &Arc<Run>, side: usize) -> Arc<dyn BlockDevice> {
    let (device, run) = (HookedDevice::new(run.sides[side].clone()), run.clone());
    device.set_hook(move |request, serve| {
        if !matches!(request.op, HookedOp::Write | HookedOp::Flush | HookedOp::Discard) {
            return serve();
        }
        let _turn = run.turn.lock().unwrap();
        run.note();
        let result = serve();
        run.note();
        result
    });
    Arc::new(device)
}

/// A write of blocks that all hold the step's number, a flush, or the third device begins to take
/// the second's place.
#[derive(Clone, Copy, Debug)]
enum Step {
    Write { block: u64, blocks: u64 },
    Flush,
    Replace,
}

fn steps(rng: &mut SimRng, count: usize) -> Vec<Step> {
    let step = |rng: &mut SimRng| {
        if rng.chance(1, 4) {
            return Step::Flush;
        }
        // Few blocks, so that they are written again; some across the border of two regions.
        let region = rng.below(LEN / REGION_LEN) * (REGION_LEN / BLOCK);
        let block = (region + rng.below(4)).saturating_sub(2);
        Step::Write { block, blocks: 1 + rng.below(3) }
    };
    (0..count).map(|_| step(rng)).collect()
}

fn numbered(blocks: u64, number: usize) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed((blocks * BLOCK) as usize);
    buf.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&(number as u64).to_le_bytes()));
    buf
}

fn side(name: &str, device: Arc<dyn BlockDevice>) -> Option<Side> {
    let header = ComponentHeader::read(&*device).unwrap()?;
    Some(Side { name: name.into(), device, header })
}

/// Makes the mirror, does the steps, and notes every moment.
fn perform(steps: &[Step], faults: [Option<Fault>; 3]) -> Arc<Run> {
    perform_on(LEN, REGION_LEN, steps, faults)
}

/// The same on a mirror of so many bytes.
fn perform_on(len: u64, region_len: u64, steps: &[Step], faults: [Option<Fault>; 3]) -> Arc<Run> {
    let sides = [(); 3].map(|()| Arc::new(SimDevice::new(HEAD_LEN + len)));
    for (slot, side) in sides[..2].iter().enumerate() {
        let header = ComponentHeader {
            kind: Kind::Mirror,
            set: *b"a set of sides..",
            id: 100 + slot as u64,
            slot: slot as u32,
            slots: 2,
            len,
            unit: region_len,
            generation: 1,
            active: vec![100, 101],
        };
        header.write(&**side).unwrap();
    }
    let run = Arc::new(Run {
        sides,
        turn: Mutex::default(),
        points: Mutex::default(),
        generation: AtomicU64::new(1),
        begun: AtomicUsize::new(0),
        durable: AtomicUsize::new(0),
    });
    let both = (0..2).map(|i| side(NAMES[i], watched(&run, i)).unwrap()).collect();
    let dev = MirrorDevice::open(both, false, 1, run.clone()).unwrap();
    for (side, fault) in run.sides.iter().zip(faults) {
        side.restart_trace();
        fault.into_iter().for_each(|fault| side.inject(fault));
    }
    run.points.lock().unwrap().clear();
    for (number, step) in steps.iter().enumerate() {
        run.begun.store(number + 1, Ordering::SeqCst);
        match step {
            Step::Write { block, blocks } => {
                dev.write(block * BLOCK, &numbered(*blocks, number + 1)).unwrap()
            }
            Step::Flush => {
                dev.flush().unwrap();
                run.durable.store(number, Ordering::SeqCst);
            }
            // Where it fails at once there is none.
            Step::Replace => {
                drop(dev.rebuild(NAMES[1], NAMES[2].into(), watched(&run, 2), 102, true))
            }
        }
        let _turn = run.turn.lock().unwrap();
        run.note();
    }
    while dev.is_rebuilding() {
        std::thread::yield_now();
    }
    drop(dev);
    run
}

/// For each block the numbers of the steps that wrote it, in order.
fn history(steps: &[Step]) -> BTreeMap<u64, Vec<usize>> {
    let mut history: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (number, step) in steps.iter().enumerate() {
        if let Step::Write { block, blocks } = step {
            (*block..block + blocks).for_each(|b| history.entry(b).or_default().push(number + 1));
        }
    }
    history
}

fn crash_and_check(run: &Run, steps: &[Step], point: CrashPoint, rng: &mut SimRng) {
    let images: Vec<Arc<SimDevice>> = run
        .sides
        .iter()
        .zip(point.points)
        .map(|(side, point)| Arc::new(side.crash_image(point, rng)))
        .collect();
    let found = images.iter().zip(NAMES).filter_map(|(image, name)| side(name, image.clone()));
    let memory = Arc::new(Nobody);
    let dev = MirrorDevice::open(found.collect(), false, point.generation, memory).unwrap();
    let states: Vec<_> = dev.components().into_iter().map(|one| (one.name, one.state)).collect();
    let active = |i: &usize| states.contains(&(NAMES[*i].into(), ComponentState::Active));
    let active: Vec<usize> = (0..3).filter(active).collect();
    for (block, writers) in history(steps) {
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        dev.read(block * BLOCK, &mut buf).unwrap();
        let durable =
            writers.iter().rev().find(|n| **n <= point.durable).copied().unwrap_or_default();
        for sector in buf.chunks_exact(SECTOR) {
            let words: Vec<u64> =
                sector.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect();
            assert!(words.iter().all(|word| *word == words[0]), "a torn sector in block {block}");
            let number = words[0] as usize;
            let possible = number == durable
                || (number > durable && number <= point.begun && writers.contains(&number));
            assert!(
                possible,
                "block {block} holds step {number}; durable {durable}, begun {}, sides {states:?}",
                point.begun
            );
        }
        for i in &active {
            let mut other = AlignedBuf::zeroed(BLOCK_SIZE);
            images[*i].read(HEAD_LEN + block * BLOCK, &mut other).unwrap();
            assert!(other[..] == buf[..], "the sides differ in block {block}");
        }
    }
}

struct Nobody;

impl Observer for Nobody {
    fn raised(&self, _generation: u64) -> io::Result<()> {
        Ok(())
    }
    fn rebuilt(&self, _old: &str, _new: &str) {}
}

fn every_point(seed: u64, count: usize, faults: [Option<Fault>; 3]) -> usize {
    let mut rng = SimRng::new(seed);
    let steps = steps(&mut rng, count);
    some_points(&steps, faults, 1, &mut rng)
}

/// One of so many moments, and the end.
fn some_points(steps: &[Step], faults: [Option<Fault>; 3], one_of: u64, rng: &mut SimRng) -> usize {
    let run = perform(steps, faults);
    let points = std::mem::take(&mut *run.points.lock().unwrap());
    let last = *points.last().unwrap();
    let mut chosen: Vec<CrashPoint> =
        points.into_iter().filter(|_| rng.chance(1, one_of)).collect();
    chosen.push(last);
    for point in &chosen {
        crash_and_check(&run, steps, *point, rng);
    }
    chosen.len()
}

#[test]
fn after_every_crash_the_sides_are_equal_and_nothing_flushed_is_lost() {
    let points: usize = (0..60).map(|seed| every_point(seed, 30, [None; 3])).sum();
    assert!(points > 5_000, "{points} moments");
}

#[test]
fn a_side_that_failed_is_stale_after_every_crash() {
    for seed in 0..20 {
        for failing in 0..2 {
            for op in [Op::Write, Op::Flush] {
                let mut faults = [None; 3];
                faults[failing] = Some(Fault { op, after: 3 + seed * 2, errno: EIO, sticky: true });
                assert!(every_point(100 + seed, 20, faults) > 50);
            }
        }
    }
}

#[test]
fn one_failed_write_makes_a_side_stale() {
    for seed in 0..20 {
        let fault = Fault { op: Op::Flush, after: 4, errno: EIO, sticky: false };
        every_point(200 + seed, 20, [None, Some(fault), None]);
    }
}

/// Steps with a replacement among the first of them, which copies while the others go on.
fn steps_with_replace(rng: &mut SimRng, count: usize) -> Vec<Step> {
    let mut steps = steps(rng, count);
    steps[rng.below(count as u64 / 3) as usize] = Step::Replace;
    steps
}

#[test]
fn nothing_flushed_is_lost_after_a_crash_while_a_side_is_replaced() {
    for seed in 0..40 {
        let mut rng = SimRng::new(300 + seed);
        let steps = steps_with_replace(&mut rng, 30);
        some_points(&steps, [None; 3], 2, &mut rng);
    }
}

#[test]
fn a_transient_error_at_any_request_of_a_replacement_loses_nothing() {
    for side in 0..3 {
        for op in [Op::Read, Op::Write, Op::Flush] {
            for after in 0..24 {
                let mut rng = SimRng::new(400 + after);
                let steps = steps_with_replace(&mut rng, 24);
                let mut faults = [None; 3];
                faults[side] = Some(Fault { op, after, errno: EIO, sticky: false });
                some_points(&steps, faults, 8, &mut rng);
            }
        }
    }
}

/// Regions that have come to rest are marked clean, and nothing waits for that to be durable. Then
/// a region is marked dirty in the other slot. A crash may leave neither of the two, and the map
/// before them does not know of what was marked last.
#[test]
fn a_crash_after_regions_became_clean_leaves_no_map_that_is_too_old() {
    // A region for each block, and a round of the worker for each first write. It looks for regions
    // that rest each 64 rounds, and the second look finds the first ones.
    let (blocks, rounds) = (256, 128);
    let write = |block| Step::Write { block, blocks: 1 };
    let mut steps: Vec<Step> = (0..rounds - 1).map(write).collect();
    steps.extend([Step::Flush, write(rounds - 1), write(rounds)]);
    let run = perform_on(blocks * BLOCK, BLOCK, &steps, [None; 3]);
    let points = std::mem::take(&mut *run.points.lock().unwrap());
    let last = points.iter().filter(|point| point.begun == steps.len());
    let mut rng = SimRng::new(500);
    for point in last {
        (0..1500).for_each(|_| crash_and_check(&run, &steps, *point, &mut rng));
    }
}
