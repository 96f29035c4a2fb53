//! The log grows on a single device, a linear set, a stripe and a mirror, while requests fail and
//! while power is lost: what was made durable is there afterwards, and the log can grow again.

use crate::grow_support::{
    Files, assert_clean, contents, format, grow, log_len, make, open, read, sync,
};
use ferry_device::{
    BlockDevice, ComponentHeader, HEAD_LEN, HookedDevice, Kind, MirrorDevice, Observer,
    Op as HookedOp, STRIPE_CHUNK, Side, SpanDevice,
};
use ferry_fs::volume::LOG_MIN;
use ferry_sim::device::{Fault, Op, SimDevice, SimRng};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes of the volume.
const VOLUME: u64 = 48 << 20;
const GROWN: u64 = 4 << 20;
const KINDS: [Option<Kind>; 4] = [None, Some(Kind::Linear), Some(Kind::Stripe), Some(Kind::Mirror)];
/// Crashes of each kind.
const CRASHES: usize = 25;

/// The devices that a volume is on, and how they are put together.
struct Set {
    kind: Option<Kind>,
    sides: Vec<Arc<SimDevice>>,
    generation: Arc<Generation>,
}

/// The newest generation of a mirror that its owner was told.
struct Generation(AtomicU64);

impl Observer for Generation {
    fn raised(&self, generation: u64) -> io::Result<()> {
        self.0.store(generation, Ordering::SeqCst);
        Ok(())
    }
    fn rebuilt(&self, _old: &str, _new: &str) {}
}

/// Bytes of one of two sides.
fn side_len(kind: Option<Kind>) -> u64 {
    match kind {
        Some(Kind::Linear | Kind::Stripe) => VOLUME / 2,
        Some(Kind::Mirror) | None => VOLUME,
    }
}

impl Set {
    fn new(kind: Option<Kind>) -> Self {
        let count = if kind.is_some() { 2 } else { 1 };
        let sides =
            (0..count).map(|_| Arc::new(SimDevice::new(HEAD_LEN + side_len(kind)))).collect();
        let set = Self { kind, sides, generation: Arc::new(Generation(AtomicU64::new(1))) };
        for (slot, side) in set.sides.iter().enumerate() {
            let Some(kind) = kind else { continue };
            let header = ComponentHeader {
                kind,
                set: *b"a set of sides..",
                id: 100 + slot as u64,
                slot: slot as u32,
                slots: 2,
                len: side_len(Some(kind)),
                unit: if kind == Kind::Stripe { STRIPE_CHUNK } else { 1 << 20 },
                generation: 1,
                active: if kind == Kind::Mirror { vec![100, 101] } else { Vec::new() },
            };
            header.write(&**side).unwrap();
        }
        set
    }

    /// The same on other devices.
    fn on(&self, sides: Vec<Arc<SimDevice>>, generation: u64) -> Self {
        Self {
            kind: self.kind,
            sides,
            generation: Arc::new(Generation(AtomicU64::new(generation))),
        }
    }

    /// The volume's device as it is after the set was put together again.
    fn device(&self) -> Arc<dyn BlockDevice> {
        let sides = || {
            let side = |device: &Arc<SimDevice>| {
                let header = ComponentHeader::read(&**device).unwrap().unwrap();
                Side { name: "side".into(), device: device.clone(), header }
            };
            self.sides.iter().map(side).collect()
        };
        match self.kind {
            None => self.sides[0].clone(),
            Some(Kind::Mirror) => {
                let generation = self.generation.0.load(Ordering::SeqCst);
                Arc::new(
                    MirrorDevice::open(sides(), false, generation, self.generation.clone())
                        .unwrap(),
                )
            }
            Some(_) => Arc::new(SpanDevice::open(sides())),
        }
    }
}

/// A volume with files on it, closed.
fn prepared(kind: Option<Kind>) -> (Set, Files) {
    let (set, mut files) = (Set::new(kind), Files::new());
    format(&set.device(), LOG_MIN);
    let fs = open(set.device(), false);
    for n in 0..20 {
        make(&fs, &mut files, format!("before {n}"), contents(n));
    }
    fs.close().unwrap();
    (set, files)
}

/// Everything is there that was made durable; the volume can be used, and its log can grow.
fn check(set: &Set, files: &Files, what: &str) {
    let fs = open(set.device(), false);
    let holds = |files: &Files| {
        for (name, data) in files {
            assert_eq!(read(&fs, name).as_ref(), Some(data), "{what}: {name}");
        }
    };
    holds(files);
    if fs.stats()["log"]["bytes"] != GROWN {
        grow(&fs, GROWN).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    let mut more = Files::new();
    for n in 0..5 {
        make(&fs, &mut more, format!("more {n}"), contents(n));
    }
    holds(&more);
    fs.close().unwrap();
    drop(fs);
    assert_clean(&set.device());
    assert_eq!(log_len(&set.device()), GROWN, "{what}");
}

/// Each request of the growth fails once, on each of the sides.
#[test]
fn a_request_fails_while_the_log_grows() {
    for kind in KINDS {
        let (clean, files) = prepared(kind);
        let faults = [
            (Op::Write, libc::EIO),
            (Op::Write, libc::ENOSPC),
            (Op::Flush, libc::EIO),
            (Op::Allocate, libc::ENOSPC),
        ];
        // What a mirror's other side has is enough; but space is taken from both or from none.
        let survives = |op| kind == Some(Kind::Mirror) && op != Op::Allocate;
        for (side, (op, errno)) in
            (0..clean.sides.len()).flat_map(|side| faults.map(|fault| (side, fault)))
        {
            let (mut failed, mut after) = (0, 0);
            loop {
                let generation = clean.generation.0.load(Ordering::SeqCst);
                let set = clean
                    .on(clean.sides.iter().map(|side| Arc::new(side.copy())).collect(), generation);
                let what = format!("{kind:?}, side {side}, {op:?} {after} fails with {errno}");
                let fs = open(set.device(), false);
                set.sides[side].inject(Fault { op, after, errno, sticky: false });
                let grown = grow(&fs, GROWN);
                let struck = set.sides[side].struck() > 0;
                failed += u64::from(grown.is_err());
                assert!(struck || grown.is_ok(), "{what}: {grown:?}");
                assert!(grown.is_ok() || !survives(op), "{what}: {grown:?}");
                set.sides[side].heal();
                // As if the daemon were killed.
                drop(fs);
                check(&set, &files, &what);
                if !struck {
                    break;
                }
                after += 1;
            }
            assert_eq!(
                failed > 0,
                after > 0 && !survives(op),
                "{kind:?}, side {side}, {op:?}: {failed} of {after}"
            );
        }
    }
}

/// How far each side's trace was, at each moment.
type CrashPoints = Arc<Mutex<Vec<Vec<usize>>>>;

/// The set's device, which notes where each side's trace is before and after each request that
/// changes something.
fn watched(set: &Set, points: &CrashPoints) -> Arc<dyn BlockDevice> {
    let device = HookedDevice::new(set.device());
    let (sides, points) = (set.sides.clone(), Arc::clone(points));
    let note =
        move || points.lock().unwrap().push(sides.iter().map(|side| side.trace_len()).collect());
    device.set_hook(move |request, serve| {
        if !matches!(request.op, HookedOp::Write | HookedOp::Flush | HookedOp::Discard) {
            return serve();
        }
        note();
        let result = serve();
        note();
        result
    });
    Arc::new(device)
}

#[test]
fn power_is_lost_while_the_log_of_a_set_grows() {
    for kind in KINDS {
        let (set, mut files) = prepared(kind);
        let points = CrashPoints::default();
        let fs = open(watched(&set, &points), false);
        make(&fs, &mut files, "just before".into(), contents(2));
        sync(&fs);
        set.sides.iter().for_each(|side| side.restart_trace());
        points.lock().unwrap().clear();
        grow(&fs, GROWN).unwrap();
        drop(fs);
        let points = std::mem::take(&mut *points.lock().unwrap());
        let (mut rng, generation) = (SimRng::new(11), set.generation.0.load(Ordering::SeqCst));
        let mut lens = [0; 2];
        for crash in 0..CRASHES {
            let point = &points
                [points.len() * crash / (CRASHES - 1).max(1) - usize::from(crash == CRASHES - 1)];
            let images = set
                .sides
                .iter()
                .zip(point)
                .map(|(side, at)| Arc::new(side.crash_image(*at, &mut rng)));
            let crashed = set.on(images.collect(), generation);
            lens[usize::from(log_len(&crashed.device()) == GROWN)] += 1;
            check(&crashed, &files, &format!("{kind:?}, power lost at {point:?}"));
        }
        assert!(
            lens.iter().all(|n| *n > 0),
            "{kind:?}: crashes on both sides of the change: {lens:?}"
        );
    }
}
