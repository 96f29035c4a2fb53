//! A volume on several devices gets another size: at every point a crash leaves the old size or
//! the new one, and with either everything that was made durable; of a mirror also where a side is
//! missing afterwards.

use crate::grow_support::{
    Files, assert_clean, contents, fill, format, holds, large, make, open, resize, sync,
};
use ferry_check::{Code, FsckOptions, fsck};
use ferry_device::{
    BlockDevice, ComponentHeader, HEAD_LEN, HookedDevice, Kind, MirrorDevice, Observer,
    Op as HookedOp, Request, STRIPE_CHUNK, Side, SpanDevice,
};
use ferry_fs::ioctl::ResizeAnswer;
use ferry_fs::volume::{LOG_MIN, read_superblock};
use ferry_sim::device::{Fault, Op, SimDevice, SimRng, sim_env};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;
const SMALL: u64 = 24 * MIB;
/// A volume of [`LARGE`] bytes becomes so short.
const SHORT: u64 = 32 * MIB;
const LARGE: u64 = 64 * MIB;
const KINDS: [Kind; 3] = [Kind::Linear, Kind::Stripe, Kind::Mirror];
const NAMES: [&str; 2] = ["a", "b"];

/// A point of a run.
#[derive(Clone)]
struct CrashPoint {
    /// How far each device's trace was.
    traces: Vec<usize>,
    /// What the mirror's list said.
    generation: u64,
    /// A device's length or head was being changed.
    special: bool,
}

/// The devices of a volume, and all points so far.
struct Set {
    kind: Kind,
    devices: Vec<Arc<SimDevice>>,
    generation: AtomicU64,
    /// Held during each request, so that a point is one of all devices.
    turn: Mutex<()>,
    points: Mutex<Vec<CrashPoint>>,
}

impl Observer for Set {
    fn raised(&self, generation: u64) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap();
        self.note(true);
        self.generation.store(generation, Ordering::SeqCst);
        self.note(true);
        Ok(())
    }
    fn rebuilt(&self, _old: &str, _new: &str) {}
}

impl Set {
    fn of(kind: Kind, devices: Vec<Arc<SimDevice>>, generation: u64) -> Arc<Self> {
        let generation = generation.into();
        Arc::new(Self {
            kind,
            devices,
            generation,
            turn: Mutex::default(),
            points: Mutex::default(),
        })
    }

    /// Two new devices for a volume of so many bytes.
    fn new(kind: Kind, bytes: u64) -> Arc<Self> {
        let lens = match kind {
            Kind::Linear => [bytes / 4, bytes - bytes / 4],
            Kind::Stripe => [bytes / 2; 2],
            Kind::Mirror => [bytes; 2],
        };
        let devices = lens.map(|len| Arc::new(SimDevice::new(HEAD_LEN + len)));
        for (slot, (device, len)) in devices.iter().zip(lens).enumerate() {
            let header = ComponentHeader {
                kind,
                set: *b"a set of devices",
                id: 100 + slot as u64,
                slot: slot as u32,
                slots: 2,
                len,
                // A longer mirror gets longer regions.
                unit: if kind == Kind::Stripe { STRIPE_CHUNK } else { MIB },
                generation: 1,
                active: if kind == Kind::Mirror { vec![100, 101] } else { Vec::new() },
            };
            header.write(&**device).unwrap();
        }
        Self::of(kind, devices.to_vec(), 1)
    }

    fn note(&self, special: bool) {
        let point = CrashPoint {
            traces: self.devices.iter().map(|device| device.trace_len()).collect(),
            generation: self.generation.load(Ordering::SeqCst),
            special,
        };
        self.points.lock().unwrap().push(point);
    }

    /// A device that notes the point before and after each request that changes something.
    fn watched(self: &Arc<Self>, i: usize) -> Arc<dyn BlockDevice> {
        let (device, set) = (HookedDevice::new(self.devices[i].clone()), self.clone());
        device.set_hook(move |request: &Request, serve| {
            let special = match request.op {
                HookedOp::Resize => true,
                HookedOp::Write => request.offset < HEAD_LEN,
                HookedOp::Flush | HookedOp::Discard => false,
                _ => return serve(),
            };
            let _turn = set.turn.lock().unwrap();
            set.note(special);
            let result = serve();
            set.note(special);
            result
        });
        Arc::new(device)
    }

    fn header(&self, i: usize) -> ComponentHeader {
        ComponentHeader::read(&*self.devices[i]).unwrap().unwrap()
    }

    /// The volume's device, with these of the components.
    fn device(self: &Arc<Self>, these: &[usize]) -> Arc<dyn BlockDevice> {
        let side = |i: &usize| Side {
            name: NAMES[*i].into(),
            device: self.watched(*i),
            header: self.header(*i),
        };
        let sides = these.iter().map(side).collect();
        if self.kind != Kind::Mirror {
            return Arc::new(SpanDevice::open(sides));
        }
        let generation = self.generation.load(Ordering::SeqCst);
        Arc::new(MirrorDevice::open(sides, false, generation, self.clone()).unwrap())
    }

    fn points(&self) -> usize {
        self.points.lock().unwrap().len()
    }

    fn restart(&self) {
        self.devices.iter().for_each(|device| device.restart_trace());
        self.points.lock().unwrap().clear();
    }

    /// What a crash at that point might leave.
    fn crash(&self, point: &CrashPoint, rng: &mut SimRng) -> Arc<Self> {
        let image =
            |(device, point): (&Arc<SimDevice>, &usize)| Arc::new(device.crash_image(*point, rng));
        let images = self.devices.iter().zip(&point.traces).map(image).collect();
        Self::of(self.kind, images, point.generation)
    }

    fn copy(&self) -> Arc<Self> {
        let copies = self.devices.iter().map(|device| Arc::new(device.copy())).collect();
        Self::of(self.kind, copies, self.generation.load(Ordering::SeqCst))
    }
}

/// Sizes before and after, and how many files there are.
const CASES: [(u64, u64, u32); 2] = [(SMALL, LARGE, 20), (LARGE, SHORT, 130)];

/// A volume with files, closed.
fn prepared(kind: Kind, bytes: u64, count: u32) -> (Arc<Set>, Files) {
    let (set, mut files) = (Set::new(kind, bytes), Files::new());
    format(&set.device(&[0, 1]), LOG_MIN);
    let fs = open(set.device(&[0, 1]), false);
    fill(&fs, &mut files, count);
    fs.close().unwrap();
    drop(fs);
    (set, files)
}

/// What each component has is what its header says, and no more is there than the volume needs.
fn assert_in_order(set: &Arc<Set>, these: &[usize], size: u64, what: &str) {
    for i in these {
        let len = set.header(*i).len;
        assert_eq!(set.devices[*i].capacity(), HEAD_LEN + len, "{what}: {}", NAMES[*i]);
    }
    assert_eq!(set.device(these).capacity(), size, "{what}");
}

fn crash_everywhere(kind: Kind, (from, to, count): (u64, u64, u32)) {
    let (set, files) = prepared(kind, from, count);
    let fs = open(set.device(&[0, 1]), false);
    let mut rng = SimRng::new(7);
    set.restart();
    make(&fs, &mut files.clone(), "not synced".into(), contents(1));
    assert_eq!(resize(&fs, to), Ok(ResizeAnswer::Done(to)));
    let resized_at = set.points();
    let mut after = files.clone();
    (0..10).for_each(|n| make(&fs, &mut after, format!("after {n}"), large(n)));
    sync(&fs);
    let synced_at = set.points();
    let points = set.points.lock().unwrap().clone();
    // Each point at which a device's length or head changes, those around the superblocks, and
    // others.
    let mut chosen: Vec<usize> = (0..synced_at).filter(|at| points[*at].special).collect();
    assert!(chosen.len() >= 6, "{} points", chosen.len());
    chosen.extend(resized_at.saturating_sub(30)..resized_at);
    chosen.extend((0..30).map(|_| rng.index(synced_at)));
    chosen.push(synced_at - 1);
    let mut sizes = [0; 2];
    for at in chosen {
        let image = set.crash(&points[at], &mut rng);
        let these: &[usize] = match (kind, rng.below(3)) {
            (Kind::Mirror, 1) => &[0],
            (Kind::Mirror, 2) => &[1],
            _ => &[0, 1],
        };
        let what = format!("{kind} to {to}: after a crash at {at}, with {these:?}");
        assert_clean(&image.device(these));
        let fs = open(image.device(these), false);
        let size = read_superblock(&image.device(these)).unwrap().size;
        assert!([from, to].contains(&size), "{what}: {size}");
        sizes[usize::from(size == to)] += 1;
        assert!(at < resized_at || size == to, "{what}: it was said to be resized");
        holds(&fs, if at + 1 >= synced_at { &after } else { &files }, &what);
        // It is used again, and gets the size again.
        assert_eq!(resize(&fs, to), Ok(ResizeAnswer::Done(to)), "{what}");
        let mut more = Files::new();
        (0..5).for_each(|n| make(&fs, &mut more, format!("more {n}"), large(n)));
        sync(&fs);
        drop(fs);
        assert_in_order(&image, these, to, &what);
        image.note(true);
        let last = image.points.lock().unwrap().last().cloned().unwrap();
        let image = image.crash(&last, &mut rng);
        let fs = open(image.device(these), false);
        holds(&fs, &files, &what);
        holds(&fs, &more, &what);
        fs.close().unwrap();
        drop(fs);
        assert_clean(&image.device(these));
    }
    assert!(sizes.iter().all(|n| *n > 0), "{kind}: both sides of the change: {sizes:?}");
}

#[test]
fn a_crash_while_a_linear_volume_is_resized_leaves_the_old_size_or_the_new_one() {
    CASES.into_iter().for_each(|case| crash_everywhere(Kind::Linear, case));
}

#[test]
fn a_crash_while_a_striped_volume_is_resized_leaves_the_old_size_or_the_new_one() {
    CASES.into_iter().for_each(|case| crash_everywhere(Kind::Stripe, case));
}

#[test]
fn a_crash_while_a_mirrored_volume_is_resized_leaves_the_old_size_or_the_new_one() {
    CASES.into_iter().for_each(|case| crash_everywhere(Kind::Mirror, case));
}

#[test]
fn a_request_of_any_component_may_fail_while_the_volume_is_resized() {
    for (kind, (from, to, count)) in
        KINDS.into_iter().flat_map(|kind| CASES.map(|case| (kind, case)))
    {
        let (prepared, files) = prepared(kind, from, count);
        let faults =
            [(Op::Write, libc::EIO, 3), (Op::Flush, libc::EIO, 1), (Op::Resize, libc::EFBIG, 1)];
        for (bad, (op, errno, step)) in (0..2).flat_map(|bad| faults.map(|fault| (bad, fault))) {
            let mut after = 0;
            loop {
                let what = format!("{kind} to {to}: {op:?} {after} of {} fails", NAMES[bad]);
                let set = prepared.copy();
                let fs = open(set.device(&[0, 1]), false);
                set.devices[bad].inject(Fault { op, after, errno, sticky: false });
                let resized = resize(&fs, to);
                let struck = set.devices[bad].struck() > 0;
                assert!(struck || resized == Ok(ResizeAnswer::Done(to)), "{what}: {resized:?}");
                set.devices[bad].heal();
                // As if the daemon were killed.
                drop(fs);
                // The volume works without the last copy of its superblock, and a mount writes it.
                let report = fsck(&set.device(&[0, 1]), FsckOptions::default(), &sim_env(1).0);
                let found = report.unwrap().findings;
                assert!(
                    found.iter().all(|one| one.code == Code::SuperblockCopy),
                    "{what}: {found:?}"
                );
                let fs = open(set.device(&[0, 1]), false);
                holds(&fs, &files, &what);
                assert_eq!(resize(&fs, to), Ok(ResizeAnswer::Done(to)), "{what}");
                fs.close().unwrap();
                drop(fs);
                assert_clean(&set.device(&[0, 1]));
                if !struck {
                    break;
                }
                after += step;
            }
        }
    }
}
