//! Composites get another length.

use crate::composite_support::*;
use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, ComponentHeader, ComponentState, CompositeOptions,
    CompositeVolume, HEAD_LEN, HookedDevice, Kind, Longest, MirrorDevice, Op, OpenMode,
    STRIPE_CHUNK, Side, SpanDevice,
};
use ferry_env::Env;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const KINDS: [Kind; 3] = [Kind::Linear, Kind::Stripe, Kind::Mirror];

#[track_caller]
fn fails<T>(result: io::Result<T>, errno: i32) {
    assert_eq!(result.err().and_then(|error| error.raw_os_error()), Some(errno));
}

/// Writes a block at each of these offsets that lies inside, and then all are read back.
fn write_at(dev: &dyn BlockDevice, offsets: impl Iterator<Item = u64>) {
    for at in offsets.filter(|at| *at < dev.capacity()) {
        dev.write(at, &filled(BLOCK_SIZE, at)).unwrap();
    }
    dev.flush().unwrap();
}

#[track_caller]
fn holds(dev: &dyn BlockDevice, offsets: impl Iterator<Item = u64>) {
    for at in offsets {
        assert!(contents(dev, at, BLOCK_SIZE) == filled(BLOCK_SIZE, at)[..], "at {at}");
    }
}

/// A place in each MiB, up to `end`.
fn offsets(end: u64) -> impl Iterator<Item = u64> {
    (0..end).step_by(MIB as usize).chain([end - BLOCK])
}

/// A composite on devices in memory, with its components' headers on them.
struct Set {
    kind: Kind,
    devices: Vec<Arc<HookedDevice>>,
    memory: Arc<Memory>,
}

impl Set {
    /// Of three components of so many bytes behind the heads.
    fn new(kind: Kind, len: u64) -> Self {
        let devices: Vec<_> = (0..3).map(|_| device(HEAD_LEN + len)).collect();
        for side in span_sides(kind, &devices, &[len; 3], STRIPE_CHUNK) {
            let mut header = side.header;
            if kind == Kind::Mirror {
                (header.unit, header.active) = (4 << 20, vec![100, 101, 102]);
            }
            header.write(&*side.device).unwrap();
        }
        let memory = Arc::new(Memory::default());
        memory.generation.store(1, Ordering::SeqCst);
        Self { kind, devices, memory }
    }

    fn headers(&self) -> Vec<ComponentHeader> {
        self.devices.iter().map(|dev| ComponentHeader::read(&**dev).unwrap().unwrap()).collect()
    }

    fn lens(&self) -> Vec<u64> {
        self.headers().iter().map(|header| header.len).collect()
    }

    /// What the devices have behind their heads.
    fn capacities(&self) -> Vec<u64> {
        self.devices.iter().map(|dev| dev.capacity() - HEAD_LEN).collect()
    }

    fn mirror(&self, these: &[usize]) -> MirrorDevice {
        open(&self.devices, these, &self.memory)
    }

    fn open(&self) -> Box<dyn BlockDevice> {
        match self.kind {
            Kind::Mirror => Box::new(self.mirror(&[0, 1, 2])),
            _ => {
                let side = |(device, header): (&Arc<HookedDevice>, ComponentHeader)| Side {
                    name: NAMES[header.slot as usize].into(),
                    device: device.clone(),
                    header,
                };
                Box::new(SpanDevice::open(
                    self.devices.iter().zip(self.headers()).map(side).collect(),
                ))
            }
        }
    }
}

/// The components' lengths for a capacity.
fn lens_of(kind: Kind, before: u64, capacity: u64) -> Vec<u64> {
    match kind {
        Kind::Linear => vec![before, before, capacity - 2 * before],
        Kind::Stripe => vec![capacity / 3; 3],
        Kind::Mirror => vec![capacity; 3],
    }
}

#[test]
fn a_composite_becomes_longer_and_shorter_and_keeps_its_contents() {
    for kind in KINDS {
        let set = Set::new(kind, 12 * MIB);
        let dev = set.open();
        let first = dev.capacity();
        write_at(&*dev, offsets(first));
        let mut least = first;
        for size in [first + 9 * MIB, first + 3 * MIB, first + 600 * MIB, first - 3 * MIB, first] {
            dev.resize(size).unwrap();
            assert_eq!(dev.capacity(), size, "{kind}");
            let lens = lens_of(kind, 12 * MIB, size);
            assert_eq!((set.lens(), set.capacities()), (lens.clone(), lens), "{kind}");
            least = least.min(size);
            holds(&*dev, (0..least).step_by(MIB as usize));
            // All of it is used.
            write_at(&*dev, offsets(size));
            holds(&*dev, offsets(size));
            least = size;
            fails(dev.write(size, &filled(BLOCK_SIZE, 0)), libc::EINVAL);
        }
        drop(dev);
        let dev = set.open();
        assert_eq!(dev.capacity(), first);
        holds(&*dev, offsets(first));
    }
}

#[test]
fn a_length_that_does_not_fit_the_components_is_rounded_up() {
    let stripe = Set::new(Kind::Stripe, 12 * MIB);
    let dev = stripe.open();
    dev.resize(36 * MIB + BLOCK).unwrap();
    assert_eq!(dev.capacity(), 36 * MIB + 3 * STRIPE_CHUNK, "a chunk of each");
    dev.resize(0).unwrap();
    assert_eq!(dev.capacity(), 3 * STRIPE_CHUNK);
    let linear = Set::new(Kind::Linear, 12 * MIB);
    let dev = linear.open();
    write_at(&*dev, offsets(20 * MIB));
    // What is in front keeps its length, and is used first when the volume becomes longer.
    dev.resize(20 * MIB).unwrap();
    assert_eq!(
        (dev.capacity(), linear.capacities()),
        (24 * MIB + BLOCK, vec![12 * MIB, 12 * MIB, BLOCK])
    );
    dev.resize(24 * MIB).unwrap();
    assert_eq!(dev.capacity(), 24 * MIB + BLOCK);
    dev.resize(30 * MIB).unwrap();
    assert_eq!(linear.capacities(), [12 * MIB, 12 * MIB, 6 * MIB]);
    holds(&*dev, offsets(20 * MIB));
}

#[test]
fn how_long_it_may_become_is_what_its_components_say() {
    let each = u64::MAX / 2 - HEAD_LEN;
    let each = each / BLOCK * BLOCK;
    for (kind, wanted) in [
        (Kind::Linear, 24 * MIB + each),
        (Kind::Stripe, u64::MAX / 3 / STRIPE_CHUNK * STRIPE_CHUNK * 3),
        (Kind::Mirror, each),
    ] {
        assert_eq!(Set::new(kind, 12 * MIB).open().capacity_max().unwrap(), Longest::Asked(wanted));
    }
    let set = Set::new(Kind::Mirror, 12 * MIB);
    let sides = sides(&set.devices, &[0, 1, 2]);
    let readers = MirrorDevice::open(sides, true, 1, set.memory.clone()).unwrap();
    fails(readers.resize(24 * MIB), libc::EROFS);
    assert_eq!(set.lens(), [12 * MIB; 3]);
}

#[test]
fn a_component_that_cannot_become_longer_leaves_all_as_it_was() {
    for kind in KINDS {
        for bad in 0..3 {
            if kind == Kind::Linear && bad < 2 {
                continue;
            }
            let set = Set::new(kind, 12 * MIB);
            let dev = set.open();
            let before = dev.capacity();
            write_at(&*dev, offsets(before));
            let (headers, full) = (set.headers(), Arc::new(AtomicBool::new(true)));
            let is_full = full.clone();
            set.devices[bad].set_hook(move |request, serve| {
                // It became longer for a moment, which could not be made durable.
                let result = serve();
                match request.op {
                    Op::Resize if is_full.swap(false, Ordering::SeqCst) => {
                        Err(io::Error::from_raw_os_error(libc::ENOSPC))
                    }
                    _ => result,
                }
            });
            fails(dev.resize(before + 60 * MIB), libc::ENOSPC);
            assert_eq!((dev.capacity(), set.capacities()), (before, vec![12 * MIB; 3]), "{kind}");
            assert_eq!(set.headers(), headers);
            holds(&*dev, offsets(before));
            assert!(dev.components().iter().all(|one| one.state == ComponentState::Active));
            dev.resize(before + 60 * MIB).unwrap();
            assert_eq!(dev.capacity(), before + 60 * MIB);
        }
    }
}

/// What a crash in the middle leaves: devices that are longer, and headers that disagree.
#[test]
fn a_set_that_a_crash_left_in_disorder_is_as_long_as_the_shortest_and_comes_in_order() {
    for (kind, changing, longer) in [
        (Kind::Linear, vec![2], 54 * MIB),
        (Kind::Stripe, vec![0, 1, 2], 90 * MIB),
        (Kind::Mirror, vec![0, 1, 2], 30 * MIB),
    ] {
        for of_new in 0..1_u32 << changing.len() {
            let set = Set::new(kind, 12 * MIB);
            let dev = set.open();
            let before = dev.capacity();
            write_at(&*dev, offsets(before));
            drop(dev);
            for (bit, i) in changing.iter().enumerate() {
                set.devices[*i].resize(HEAD_LEN + 30 * MIB).unwrap();
                let mut header = set.headers()[*i].clone();
                if of_new & 1 << bit != 0 {
                    (header.len, header.generation) = (30 * MIB, 2);
                    header.write(&*set.devices[*i]).unwrap();
                }
            }
            let dev = set.open();
            let all_new = of_new == (1 << changing.len()) - 1;
            assert_eq!(dev.capacity(), if all_new { longer } else { before }, "{kind} {of_new}");
            holds(&*dev, offsets(before));
            dev.resize(before).unwrap();
            assert_eq!((set.lens(), set.capacities()), (vec![12 * MIB; 3], vec![12 * MIB; 3]));
            holds(&*dev, offsets(before));
        }
    }
}

#[test]
fn a_side_whose_header_cannot_be_written_is_out_and_has_the_old_length() {
    // The map and its flush come first, then each copy and its flush.
    for after in 0..6 {
        for longer in [true, false] {
            let set = Set::new(Kind::Mirror, 12 * MIB);
            let dev = set.mirror(&[0, 1, 2]);
            write_at(&dev, offsets(12 * MIB));
            set.devices[1].fail_after(&[Op::Write, Op::Flush], after);
            let size = if longer { 40 * MIB } else { 8 * MIB };
            dev.resize(size).unwrap();
            assert_eq!((dev.capacity(), dev.live_sides()), (size, 2), "{after}");
            write_at(&dev, offsets(size));
            drop(dev);
            set.devices[1].heal();
            // Alone it is known to be stale.
            let alone = MirrorDevice::open(
                sides(&set.devices, &[1]),
                false,
                set.memory.generation.load(Ordering::SeqCst),
                set.memory.clone(),
            );
            assert!(alone.is_err());
            let dev = set.mirror(&[0, 1, 2]);
            assert_eq!((dev.capacity(), dev.live_sides()), (size, 2), "{after}");
            holds(&dev, offsets(size));
            // Another takes its place, which was made for the old length.
            let new = device(HEAD_LEN + 12 * MIB);
            // Each block that is copied takes long, until this test has looked.
            let looked = Arc::new(AtomicBool::new(false));
            let has_looked = Arc::clone(&looked);
            new.set_hook(move |request, serve| {
                let copies = request.op == Op::Write && request.offset >= HEAD_LEN;
                if copies && !has_looked.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(50));
                }
                serve()
            });
            dev.rebuild("b", "d".into(), new.clone(), 103, true).unwrap();
            fails(dev.capacity_max(), libc::EBUSY);
            fails(dev.resize(50 * MIB), libc::EBUSY);
            looked.store(true, Ordering::SeqCst);
            while dev.is_rebuilding() {
                std::thread::yield_now();
            }
            assert_eq!(dev.live_sides(), 3);
            drop(dev);
            assert_eq!(ComponentHeader::read(&*new).unwrap().unwrap().len, size);
            let side = Side {
                name: "d".into(),
                header: ComponentHeader::read(&*new).unwrap().unwrap(),
                device: new,
            };
            let generation = set.memory.generation.load(Ordering::SeqCst);
            let dev =
                MirrorDevice::open(vec![side], false, generation, set.memory.clone()).unwrap();
            assert_eq!(dev.capacity(), size);
            holds(&dev, offsets(size));
        }
    }
}

#[test]
fn a_mirror_whose_sides_all_fail_keeps_its_length() {
    let set = Set::new(Kind::Mirror, 12 * MIB);
    let dev = set.mirror(&[0, 1, 2]);
    write_at(&dev, offsets(12 * MIB));
    for after in 0..6 {
        for size in [40 * MIB, 8 * MIB] {
            set.devices.iter().for_each(|side| side.fail_after(&[Op::Write, Op::Flush], after));
            fails(dev.resize(size), libc::EIO);
            set.devices.iter().for_each(|side| side.heal());
            assert_eq!((dev.capacity(), dev.live_sides()), (12 * MIB, 3));
            holds(&dev, offsets(12 * MIB));
            write_at(&dev, offsets(12 * MIB));
        }
    }
    dev.resize(40 * MIB).unwrap();
    drop(dev);
    let dev = set.mirror(&[0, 1, 2]);
    assert_eq!((dev.capacity(), dev.live_sides()), (40 * MIB, 3));
    holds(&dev, offsets(12 * MIB));
}

#[test]
fn a_side_that_was_absent_stays_stale_whatever_its_length_is() {
    for size in [40 * MIB, 8 * MIB] {
        let set = Set::new(Kind::Mirror, 12 * MIB);
        write_at(&set.mirror(&[0, 1, 2]), offsets(12 * MIB));
        let dev = set.mirror(&[0, 1]);
        dev.resize(size).unwrap();
        write_at(&dev, offsets(size));
        drop(dev);
        assert_eq!(set.lens(), [size, size, 12 * MIB]);
        let dev = set.mirror(&[2, 0, 1]);
        assert_eq!((dev.capacity(), dev.live_sides()), (size, 2));
        holds(&dev, offsets(size));
    }
}

/// Programs write while the regions become longer, again and again; then the devices are as after a
/// crash, and the mirror makes equal what differs.
#[test]
fn a_mirror_becomes_longer_while_programs_write() {
    for round in 0..10 {
        let set = Set::new(Kind::Mirror, 40 * MIB);
        let dev = set.mirror(&[0, 1, 2]);
        let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for writer in 0..3_u64 {
                let (dev, stop, written) = (&dev, &stop, &written);
                scope.spawn(move || {
                    let mut n = writer;
                    while !stop.load(Ordering::SeqCst) {
                        // Its own block of each MiB.
                        let at = n * 7 % 40 * MIB + writer * BLOCK;
                        dev.write(at, &filled(BLOCK_SIZE, at)).unwrap();
                        if n % 16 == 0 {
                            dev.flush().unwrap();
                            dev.discard(at, BLOCK).unwrap();
                            dev.write(at, &filled(BLOCK_SIZE, at)).unwrap();
                        }
                        written.fetch_add(1, Ordering::SeqCst);
                        n += 1;
                    }
                });
            }
            let mut region_len = 4 * MIB;
            for size in [60 * MIB, 4096 * MIB, 50 * MIB, 90 << 30, 3 << 40, 40 * MIB] {
                let before = written.load(Ordering::SeqCst);
                while written.load(Ordering::SeqCst) < before + 50 {
                    std::thread::yield_now();
                }
                dev.resize(size).unwrap();
                let found = set.headers();
                assert!(found.iter().all(|header| header.len == size));
                assert!(found[0].unit >= region_len && size.div_ceil(found[0].unit) <= 16_384);
                region_len = found[0].unit;
            }
            assert!(region_len > 64 * MIB, "there were more than the map has room for");
            stop.store(true, Ordering::SeqCst);
        });
        let offsets = || {
            let of = |writer| (0..40).map(move |n| n * MIB + writer * BLOCK);
            (0..3).flat_map(of).filter(|at| contents(&dev, *at, BLOCK_SIZE).iter().any(|b| *b != 0))
        };
        let offsets: Vec<u64> = offsets().collect();
        assert!(!offsets.is_empty(), "{round}");
        holds(&dev, offsets.iter().copied());
        drop(dev);
        for side in 0..3 {
            let one = set.mirror(&[side, (side + 1) % 3, (side + 2) % 3]);
            holds(&one, offsets.iter().copied());
            drop(one);
            for at in &offsets {
                assert!(
                    contents(&*set.devices[side], HEAD_LEN + at, BLOCK_SIZE)
                        == filled(BLOCK_SIZE, *at)[..],
                    "side {side}"
                );
            }
        }
    }
}

/// What was written and not flushed when a crash came is compared, although the map was made anew.
#[test]
fn dirty_regions_stay_dirty_when_they_get_another_length() {
    for size in [20 * MIB, 4 << 30, 8 * MIB] {
        let set = Set::new(Kind::Mirror, 12 * MIB);
        let dev = set.mirror(&[0, 1, 2]);
        dev.write(5 * MIB, &filled(BLOCK_SIZE, 1)).unwrap();
        dev.resize(size).unwrap();
        // As if a crash had least it from one side: the mirror is never closed.
        std::mem::forget(dev);
        set.devices[1].write(HEAD_LEN + 5 * MIB, &AlignedBuf::zeroed(BLOCK_SIZE)).unwrap();
        let dev = set.mirror(&[0, 1, 2]);
        assert_eq!(dev.capacity(), size);
        let copies: Vec<_> = set
            .devices
            .iter()
            .map(|side| contents(&**side, HEAD_LEN + 5 * MIB, BLOCK_SIZE))
            .collect();
        assert!(copies.windows(2).all(|two| two[0] == two[1]), "{size}");
        // And what was not written is not read.
        let reads = set.devices[0].asked(Op::Read).bytes;
        assert!(reads < 70 * MIB, "{reads} bytes were compared");
        drop(dev);
    }
}

#[test]
fn a_volume_in_files_gets_another_length_and_its_list_stays_true() {
    for kind in KINDS {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = |name: &str| -> PathBuf { folder.path().canonicalize().unwrap().join(name) };
        let paths = vec![at("a"), at("b")];
        let options = CompositeOptions { kind, paths, size: 32 * MIB, overwrite: false };
        let volume = CompositeVolume::create(&at("vol"), &options, &Env::real()).unwrap();
        let len = |name: &str| fs::metadata(at(name)).unwrap().len() - HEAD_LEN;
        write_at(&volume, offsets(32 * MIB));
        assert!(matches!(volume.capacity_max(), Ok(Longest::Asked(most)) if most > 1 << 61));
        for size in [64 * MIB, 40 * MIB, 1 << 30, 32 * MIB] {
            volume.resize(size).unwrap();
            let wanted = match kind {
                Kind::Linear => (16 * MIB, size - 16 * MIB),
                Kind::Stripe => (size / 2, size / 2),
                Kind::Mirror => (size, size),
            };
            assert_eq!(((len("a"), len("b")), volume.capacity()), (wanted, size), "{kind}");
            holds(&volume, offsets(32 * MIB));
        }
        volume.resize(64 * MIB).unwrap();
        drop(volume);
        let volume = CompositeVolume::open(&at("vol"), OpenMode::ReadWrite, &Env::real()).unwrap();
        assert_eq!(volume.capacity(), 64 * MIB);
        holds(&volume, offsets(32 * MIB));
        if kind == Kind::Mirror {
            let listed = fs::read_to_string(at("vol")).unwrap();
            assert!(listed.contains("generation 6"), "{listed}");
        }
        drop(volume);
        let reader = CompositeVolume::open(&at("vol"), OpenMode::ReadOnly, &Env::real()).unwrap();
        fails(reader.capacity_max(), libc::EROFS);
        fails(reader.resize(32 * MIB), libc::EROFS);
    }
}
