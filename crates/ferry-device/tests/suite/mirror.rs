//! Mirrors: sides that fail, stale sides, repair and rebuild.

use crate::composite_support::*;
use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, ComponentHeader, ComponentState, CompositeError, HEAD_LEN,
    HookedDevice, Io, Kind, MirrorDevice, Op,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Writes and flushes in several regions, synchronous and not; what is there afterwards is what
/// `check` expects.
fn work(dev: &dyn BlockDevice) -> std::io::Result<()> {
    for n in 0..6 {
        let offset = n * (5 << 20);
        dev.write(offset, &filled(2 * BLOCK_SIZE, n))?;
        let (tx, rx) = mpsc::channel();
        let also = tx.clone();
        let write = Io::Write {
            offset: offset + 8 * BLOCK,
            buf: Arc::new(filled(BLOCK_SIZE, 100 + n)),
            done: Box::new(move |result| tx.send(result).unwrap()),
        };
        dev.submit(vec![
            write,
            Io::Flush { done: Box::new(move |result| also.send(result).unwrap()) },
        ]);
        rx.iter().collect::<std::io::Result<()>>()?;
        dev.flush()?;
        dev.discard(offset + 16 * BLOCK, BLOCK)?;
    }
    Ok(())
}

fn check(dev: &dyn BlockDevice, shift: u64) {
    for n in 0..6 {
        let offset = shift + n * (5 << 20);
        assert!(contents(dev, offset, 2 * BLOCK_SIZE) == *filled(2 * BLOCK_SIZE, n), "{n}");
        assert!(
            contents(dev, offset + 8 * BLOCK, BLOCK_SIZE) == *filled(BLOCK_SIZE, 100 + n),
            "{n}"
        );
    }
}

fn states(dev: &dyn BlockDevice) -> Vec<ComponentState> {
    dev.components().iter().map(|one| one.state).collect()
}

fn refused(devices: &[Arc<HookedDevice>], these: &[usize], generation: u64) -> CompositeError {
    let opened =
        MirrorDevice::open(sides(devices, these), false, generation, Arc::<Memory>::default());
    opened.err().expect("it must not open")
}

/// Waits for the worker of a mirror.
fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        std::thread::yield_now();
    }
}

#[test]
fn the_sides_are_equal_and_a_clean_mirror_starts_without_a_look() {
    let devices = new_mirror(3);
    let memory = Arc::default();
    let dev = open(&devices, &[0, 1, 2], &memory);
    work(&dev).unwrap();
    check(&dev, 0);
    drop(dev);
    devices.iter().for_each(|side| check(&**side, HEAD_LEN));
    // A difference in a block that nobody wrote since: a clean mirror does not look.
    devices[0].inner().write(HEAD_LEN + (20 << 20), &filled(BLOCK_SIZE, 9)).unwrap();
    drop(open(&devices, &[0, 1, 2], &memory));
    assert!(contents(&*devices[1], HEAD_LEN + (20 << 20), BLOCK_SIZE) != *filled(BLOCK_SIZE, 9));
}

#[test]
fn a_side_may_fail_at_any_request() {
    let count = {
        let devices = new_mirror(2);
        let dev = open(&devices, &[0, 1], &Arc::default());
        let before = changes(&devices[1]);
        work(&dev).unwrap();
        changes(&devices[1]) - before
    };
    assert!(count > 30, "{count} requests");
    for failing in [0, 1] {
        for after in 0..count {
            let devices = new_mirror(2);
            let memory: Arc<Memory> = Arc::default();
            let dev = open(&devices, &[0, 1], &memory);
            devices[failing].fail_after(CHANGES, after);
            work(&dev).unwrap();
            check(&dev, 0);
            let other = 1 - failing;
            assert_eq!(dev.live_sides(), 1, "side {failing} fails after {after}");
            assert_eq!(states(&dev)[failing], ComponentState::Failed);
            assert_eq!(memory.generation.load(Ordering::SeqCst), 2);
            drop(dev);
            // It is stale for ever, whatever it holds, and cannot be used alone.
            devices[failing].heal();
            assert!(matches!(
                refused(&devices, &[failing], 2),
                CompositeError::Stale { found: 1, expected: 2 }
            ));
            let dev = open(&devices, &[0, 1], &memory);
            assert_eq!(dev.live_sides(), 1);
            check(&dev, 0);
            check(&*devices[other], HEAD_LEN);
        }
    }
}

#[test]
fn a_write_is_answered_after_the_other_sides_know_of_the_stale_one() {
    let devices = new_mirror(3);
    let dev = open(&devices, &[0, 1, 2], &Arc::default());
    dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
    devices[2].fail_after(CHANGES, 0);
    dev.write(0, &filled(BLOCK_SIZE, 2)).unwrap();
    for side in [0, 1] {
        let header = ComponentHeader::read(&*devices[side]).unwrap().unwrap();
        assert_eq!((header.generation, header.active), (2, vec![100, 101]));
    }
    // The last but one fails while it is to be told.
    devices[1].fail_after(CHANGES, 0);
    dev.discard(0, BLOCK).unwrap();
    let header = ComponentHeader::read(&*devices[0]).unwrap().unwrap();
    assert_eq!((header.generation, header.active), (3, vec![100]));
    assert_eq!(
        states(&dev),
        [ComponentState::Active, ComponentState::Failed, ComponentState::Failed]
    );
}

#[test]
fn a_mirror_fails_when_all_its_sides_fail() {
    let devices = new_mirror(2);
    let memory: Arc<Memory> = Arc::default();
    let dev = open(&devices, &[0, 1], &memory);
    work(&dev).unwrap();
    devices.iter().for_each(|side| side.fail_after(CHANGES, 0));
    let eio = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO))
    };
    eio(dev.write(0, &filled(BLOCK_SIZE, 1)));
    eio(dev.flush());
    eio(dev.write(31 << 20, &filled(BLOCK_SIZE, 1)));
    eio(dev.discard(0, BLOCK));
    devices.iter().for_each(|side| side.fail_after(READS, 0));
    eio(dev.read(0, &mut filled(BLOCK_SIZE, 1)));
    devices.iter().for_each(|side| side.heal());
    drop(dev);
    // Nobody was put out, and where the write failed the sides are made equal.
    devices[0].inner().write(HEAD_LEN, &filled(BLOCK_SIZE, 7)).unwrap();
    let dev = open(&devices, &[0, 1], &memory);
    assert_eq!(dev.live_sides(), 2);
    assert!(contents(&*devices[1], HEAD_LEN, BLOCK_SIZE) == *filled(BLOCK_SIZE, 7));
}

#[test]
fn an_unreadable_block_is_read_from_another_side_and_rewritten() {
    let devices = new_mirror(2);
    let dev = open(&devices, &[0, 1], &Arc::default());
    work(&dev).unwrap();
    // Bytes below 1 MiB are read from the first side.
    devices[0].inner().write(HEAD_LEN, &filled(BLOCK_SIZE, 66)).unwrap();
    devices[0].fail_after(READS, 0);
    check(&dev, 0);
    until(|| dev.components()[0].repairs >= 1);
    devices[0].heal();
    check(&dev, 0);
    assert!(contents(&*devices[0], HEAD_LEN, BLOCK_SIZE) == *filled(BLOCK_SIZE, 0), "written anew");
    assert_eq!(dev.live_sides(), 2);
    assert!(dev.components()[0].read_errors >= 1);
    // A side that cannot be written either is put out.
    devices[0].fail_after(READS, 0);
    devices[0].fail_after(CHANGES, 0);
    check(&dev, 0);
    until(|| dev.live_sides() == 1);
    check(&dev, 0);
}

#[test]
fn a_started_read_that_fails_on_one_side_succeeds_when_it_is_read_again() {
    let devices = new_mirror(2);
    let dev = open(&devices, &[0, 1], &Arc::default());
    work(&dev).unwrap();
    assert!(started(&dev, 0, BLOCK_SIZE).unwrap()[..] == filled(BLOCK_SIZE, 0)[..]);
    devices[0].fail_after(READS, 0);
    assert!(started(&dev, 0, BLOCK_SIZE).is_err());
    check(&dev, 0);
    until(|| dev.components()[0].repairs >= 1);
    assert!(dev.components()[0].read_errors >= 2, "both reads are counted");
}

#[test]
fn a_started_read_that_a_side_refuses_is_no_error_of_the_side() {
    let devices = new_mirror(2);
    let dev = open(&devices, &[0, 1], &Arc::default());
    work(&dev).unwrap();
    devices.iter().for_each(|device| device.refuse_started_reads());
    let refused = started(&dev, 0, BLOCK_SIZE).expect_err("it would have to wait");
    assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP));
    check(&dev, 0);
    assert!(dev.components().iter().all(|side| side.read_errors == 0));
}

#[test]
fn a_side_with_wrong_bytes_is_written_anew_from_one_with_the_wanted_ones() {
    let devices = new_mirror(2);
    let (memory, offset) = (Arc::default(), 3 * BLOCK);
    let written = filled(BLOCK_SIZE, 7);
    for wrong in [0, 1] {
        let dev = open(&devices, &[0, 1], &memory);
        dev.write(offset, &written).unwrap();
        dev.flush().unwrap();
        devices[wrong].inner().write(HEAD_LEN + offset, &filled(BLOCK_SIZE, 8)).unwrap();
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        assert!(!dev.read_matching(offset, &mut buf, &|_| false), "no side has it");
        assert!(dev.read_matching(offset, &mut buf, &|bytes| bytes == &written[..]));
        assert!(buf[..] == written[..]);
        until(|| dev.components()[wrong].repairs >= 1);
        drop(dev);
        for side in &devices {
            side.inner().read(HEAD_LEN + offset, &mut buf).unwrap();
            assert!(buf[..] == written[..], "both sides have what was written");
        }
    }
}

#[test]
fn a_side_that_was_missing_is_stale_when_it_returns() {
    let devices = new_mirror(2);
    let memory: Arc<Memory> = Arc::default();
    let dev = open(&devices, &[1], &memory);
    assert_eq!(dev.live_sides(), 1);
    work(&dev).unwrap();
    drop(dev);
    assert_eq!(memory.generation.load(Ordering::SeqCst), 2);
    assert!(matches!(refused(&devices, &[0], 2), CompositeError::Stale { .. }));
    let dev = open(&devices, &[0, 1], &memory);
    assert_eq!(dev.live_sides(), 1);
    check(&dev, 0);
}

#[test]
fn sides_that_went_apart_and_sides_given_twice_are_refused() {
    let devices = new_mirror(2);
    drop(open(&devices, &[0], &Arc::default()));
    drop(open(&devices, &[1], &Arc::default()));
    assert!(matches!(refused(&devices, &[0, 1], 1), CompositeError::Diverged(2)));
    assert!(matches!(refused(&devices, &[0, 0], 1), CompositeError::Twice { .. }));
    assert!(matches!(refused(&devices, &[], 1), CompositeError::Stale { .. }));
}

#[test]
fn after_a_crash_the_dirty_regions_are_made_equal_before_anything_else() {
    let devices = new_mirror(2);
    let memory = Arc::default();
    let dev = open(&devices, &[0, 1], &memory);
    dev.write(9 << 20, &filled(BLOCK_SIZE, 1)).unwrap();
    // A crash: what the sides hold at this moment.
    let crashed: Vec<_> = devices.iter().map(|side| copy_of(side)).collect();
    drop(dev);
    crashed[1].inner().write(HEAD_LEN + (9 << 20), &filled(BLOCK_SIZE, 2)).unwrap();
    crashed[1].inner().write(HEAD_LEN + (1 << 20), &filled(BLOCK_SIZE, 3)).unwrap();
    let dev = open(&crashed, &[0, 1], &memory);
    assert!(contents(&dev, 9 << 20, BLOCK_SIZE) == *filled(BLOCK_SIZE, 1));
    assert!(contents(&*crashed[1], HEAD_LEN + (9 << 20), BLOCK_SIZE) == *filled(BLOCK_SIZE, 1));
    assert!(
        contents(&*crashed[1], HEAD_LEN + (1 << 20), BLOCK_SIZE) == *filled(BLOCK_SIZE, 3),
        "not written, not looked at"
    );
    // Without a map that is whole all is looked at.
    drop(dev);
    for block in [BLOCK, 2 * BLOCK] {
        crashed[0].inner().write(block, &filled(BLOCK_SIZE, 5)).unwrap();
    }
    drop(open(&crashed, &[0, 1], &memory));
    assert!(contents(&*crashed[1], HEAD_LEN + (1 << 20), BLOCK_SIZE) == vec![0; BLOCK_SIZE]);
}

fn copy_of(side: &HookedDevice) -> Arc<HookedDevice> {
    let copy = device(side.capacity());
    for at in (0..side.capacity()).step_by(1 << 20) {
        let mut buf = filled(1 << 20, 0);
        side.inner().read(at, &mut buf).unwrap();
        if buf.iter().any(|byte| *byte != 0) {
            copy.inner().write(at, &buf).unwrap();
        }
    }
    copy
}

fn rebuild(
    dev: &MirrorDevice,
    old: &str,
    new: usize,
    devices: &[Arc<HookedDevice>],
) -> std::io::Result<()> {
    dev.rebuild(old, NAMES[new].into(), devices[new].clone(), 900 + new as u64, false)
}

#[test]
fn a_side_is_rebuilt_while_work_goes_on() {
    let mut devices = new_mirror(2);
    devices.push(device(HEAD_LEN + MIRROR_LEN));
    let memory: Arc<Memory> = Arc::default();
    let dev = Arc::new(open(&devices, &[0, 1], &memory));
    work(&*dev).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..3_u64)
        .map(|n| {
            let (dev, stop) = (dev.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut round = 0;
                while !stop.load(Ordering::SeqCst) {
                    round += 1;
                    // Everywhere: each block many times, before and behind the copy.
                    let at = (round * 7919 + n) % (MIRROR_LEN / BLOCK / 4) * 4 + n;
                    dev.write(at * BLOCK, &filled(BLOCK_SIZE, round + n)).unwrap();
                    if round % 16 == 0 {
                        dev.flush().unwrap();
                    }
                }
            })
        })
        .collect();
    rebuild(&dev, "b", 2, &devices).unwrap();
    assert_eq!(rebuild(&dev, "a", 2, &devices).unwrap_err().raw_os_error(), Some(libc::EBUSY));
    until(|| !dev.is_rebuilding());
    stop.store(true, Ordering::SeqCst);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    assert_eq!(
        states(&*dev),
        [ComponentState::Active, ComponentState::Replaced, ComponentState::Active]
    );
    assert_eq!(*memory.rebuilt.lock().unwrap(), [("b".to_owned(), "c".to_owned())]);
    dev.write(0, &filled(BLOCK_SIZE, 4)).unwrap();
    drop(dev);
    let all = MIRROR_LEN as usize;
    assert!(contents(&*devices[0], HEAD_LEN, all) == contents(&*devices[2], HEAD_LEN, all));
    // The old side is stale, the new one is good alone.
    assert!(matches!(refused(&devices, &[1], 2), CompositeError::Stale { .. }));
    let dev = open(&devices, &[2, 1], &memory);
    assert_eq!(dev.live_sides(), 1);
    assert!(contents(&dev, 0, BLOCK_SIZE) == *filled(BLOCK_SIZE, 4));
}

#[test]
fn a_rebuild_that_did_not_end_counts_for_nothing_and_can_be_started_again() {
    let mut devices = new_mirror(2);
    devices.push(device(HEAD_LEN + MIRROR_LEN));
    let memory: Arc<Memory> = Arc::default();
    let dev = open(&devices, &[0, 1], &memory);
    work(&dev).unwrap();
    // The new side fails in the middle: given up, and the others do not care.
    devices[2].fail_after(CHANGES, 15);
    rebuild(&dev, "b", 2, &devices).unwrap();
    until(|| !dev.is_rebuilding());
    assert_eq!(
        states(&dev),
        [ComponentState::Active, ComponentState::Active, ComponentState::Failed]
    );
    assert_eq!(memory.generation.load(Ordering::SeqCst), 0);
    work(&dev).unwrap();
    drop(dev);
    devices[2].heal();
    // It says that it is one of us, and is not believed.
    assert!(matches!(refused(&devices, &[2], 1), CompositeError::Stale { .. }));
    let dev = open(&devices, &[0, 1, 2], &memory);
    assert_eq!(dev.live_sides(), 2);
    rebuild(&dev, "b", 2, &devices).unwrap();
    until(|| !dev.is_rebuilding());
    assert_eq!(dev.live_sides(), 2);
    drop(dev);
    check(&*devices[2], HEAD_LEN);
    let dev = open(&devices, &[2], &memory);
    check(&dev, 0);
}

#[test]
fn a_rebuild_may_be_cut_off_at_any_request_of_the_new_side() {
    for after in [0, 1, 2, 3, 4, 5, 20, 35, 36, 37, 38, 39, 40, 41, 42, 43] {
        let mut devices = new_mirror(2);
        devices.push(device(HEAD_LEN + MIRROR_LEN));
        let memory: Arc<Memory> = Arc::default();
        let dev = open(&devices, &[0, 1], &memory);
        work(&dev).unwrap();
        devices[1].fail_after(CHANGES, 0);
        devices[2].fail_after(CHANGES, after);
        let started = rebuild(&dev, "b", 2, &devices);
        until(|| !dev.is_rebuilding());
        let complete = !memory.rebuilt.lock().unwrap().is_empty();
        assert!(!complete || started.is_ok());
        dev.write(0, &filled(2 * BLOCK_SIZE, 0)).unwrap();
        drop(dev);
        devices[2].heal();
        let there: Vec<usize> = if after < 4 { vec![0] } else { vec![0, 2] };
        let dev = open(&devices, &there, &memory);
        check(&dev, 0);
        drop(dev);
        check(&*devices[0], HEAD_LEN);
    }
}

#[test]
fn a_device_that_is_too_small_is_refused() {
    let mut devices = new_mirror(2);
    devices.push(device(HEAD_LEN + MIRROR_LEN - BLOCK));
    devices[2].fail_after(&[Op::Resize], 0);
    let dev = open(&devices, &[0, 1], &Arc::default());
    assert_eq!(rebuild(&dev, "b", 2, &devices).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert!(!dev.is_rebuilding());
    check_unused(&devices[2]);
}

fn check_unused(device: &HookedDevice) {
    assert_eq!(changes(device), 0);
}

#[test]
fn to_read_only_changes_nothing() {
    let devices = new_mirror(2);
    work(&open(&devices, &[0, 1], &Arc::default())).unwrap();
    let before: Vec<u64> = devices.iter().map(|side| changes(side)).collect();
    let dev = MirrorDevice::open(sides(&devices, &[1]), true, 1, Arc::<Memory>::default()).unwrap();
    check(&dev, 0);
    let erofs = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EROFS))
    };
    erofs(dev.write(0, &filled(BLOCK_SIZE, 1)));
    erofs(dev.discard(0, BLOCK));
    erofs(rebuild(&dev, "a", 0, &devices));
    dev.flush().unwrap();
    drop(dev);
    let after: Vec<u64> = devices.iter().map(|side| changes(side)).collect();
    assert_eq!(before, after);
}

/// A crash may leave a slot that is written as it was, or torn. If the other slot could be lost,
/// too, an older map would count, which does not know of what was marked last.
#[test]
fn a_slot_of_the_map_is_written_only_while_the_other_one_is_durable() {
    let len = 1 << 20;
    let devices: Vec<_> = (0..2).map(|_| device(HEAD_LEN + len)).collect();
    for (slot, device) in devices.iter().enumerate() {
        let header = ComponentHeader {
            kind: Kind::Mirror,
            set: *b"a set of sides..",
            id: 100 + slot as u64,
            slot: slot as u32,
            slots: 2,
            len,
            unit: BLOCK,
            generation: 1,
            active: vec![100, 101],
        };
        header.write(&**device).unwrap();
    }
    let dev = open(&devices, &[0, 1], &Arc::default());
    let (maps, unsafe_maps) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (count, count_unsafe) = (maps.clone(), unsafe_maps.clone());
    let is_volatile = AtomicBool::new(false);
    devices[0].set_hook(move |request, serve| {
        let slots = BLOCK..3 * BLOCK;
        if request.op == Op::Write && slots.contains(&request.offset) {
            count.fetch_add(1, Ordering::SeqCst);
            let other = is_volatile.swap(true, Ordering::SeqCst);
            count_unsafe.fetch_add(other.into(), Ordering::SeqCst);
        }
        let result = serve();
        if request.op == Op::Flush {
            is_volatile.store(false, Ordering::SeqCst);
        }
        result
    });
    // A round of the worker for each first write to a region. It looks for regions that rest each
    // 64 rounds, and marks those clean at the second look.
    let write = |n: u64| dev.write(n * BLOCK, &filled(BLOCK_SIZE, n)).unwrap();
    (0..127).for_each(write);
    dev.flush().unwrap();
    (127..256).for_each(write);
    drop(dev);
    assert!(maps.load(Ordering::SeqCst) > 256, "regions were marked clean in between");
    assert_eq!(unsafe_maps.load(Ordering::SeqCst), 0);
}
