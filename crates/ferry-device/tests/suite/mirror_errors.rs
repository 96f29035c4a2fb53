//! Mirrors while a side fails in the middle of a copy: what is acknowledged is on the side that
//! remains.

use crate::composite_support::*;
use ferry_device::{
    BLOCK_SIZE, BlockDevice, ComponentState, CompositeError, HEAD_LEN, HookedDevice, Io,
    MirrorDevice, Op, Request,
};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        thread::yield_now();
    }
}

/// Two sides in use, and a device that may become one.
fn two_and_a_new_one() -> (Vec<Arc<HookedDevice>>, Arc<MirrorDevice>, Arc<Memory>) {
    let mut devices = new_mirror(2);
    devices.push(device(HEAD_LEN + MIRROR_LEN));
    let memory: Arc<Memory> = Arc::default();
    let dev = Arc::new(open(&devices, &[0, 1], &memory));
    (devices, dev, memory)
}

fn begin_write(dev: &MirrorDevice, offset: u64, seed: u64) -> mpsc::Receiver<io::Result<()>> {
    let (tx, rx) = mpsc::channel();
    let buf = Arc::new(filled(BLOCK_SIZE, seed));
    dev.submit(vec![Io::Write {
        offset,
        buf,
        done: Box::new(move |result| tx.send(result).unwrap()),
    }]);
    rx
}

fn replace(dev: &MirrorDevice, old: &str, devices: &[Arc<HookedDevice>], zeroed: bool) {
    dev.rebuild(old, "c".into(), devices[2].clone(), 902, zeroed).unwrap();
}

/// `act` is called once, when `device` is asked for what is at `offset` of the mirror; the thread
/// that asks waits until it returns.
fn at_look(device: &HookedDevice, offset: u64, act: impl FnOnce() + Send + 'static) {
    let looks = move |request: &Request| {
        matches!(request.op, Op::Read | Op::NextData) && request.offset == HEAD_LEN + offset
    };
    at_first(device, looks, act);
}

/// `act` is called once, before the first request that `is_it` names is served.
fn at_first(
    device: &HookedDevice,
    is_it: impl Fn(&Request) -> bool + Send + Sync + 'static,
    act: impl FnOnce() + Send + 'static,
) {
    let act = Mutex::new(Some(act));
    device.set_hook(move |request, serve| {
        let act = if is_it(request) { act.lock().unwrap().take() } else { None };
        act.into_iter().for_each(|act| act());
        serve()
    });
}

#[test]
fn a_rebuild_never_copies_from_a_side_whose_failed_write_is_not_judged() {
    let (devices, dev, memory) = two_and_a_new_one();
    dev.write(4 * MIB, &filled(BLOCK_SIZE, 1)).unwrap();
    // When the copy has begun, a write to a later region begins, and is held on both sides.
    let (tx, ended) = mpsc::channel();
    let (writer, holding) = (Arc::downgrade(&dev), devices.clone());
    at_look(&devices[0], 0, move || {
        holding[..2].iter().for_each(|side| hold(side));
        tx.send(begin_write(&writer.upgrade().unwrap(), 4 * MIB, 2)).unwrap();
    });
    replace(&dev, "b", &devices, false);
    let ended = ended.recv().unwrap();
    // The copy has come to that region and waits for the writer inside.
    until(|| dev.components()[2].rebuilt.is_some_and(|(at, _)| at == 4 * MIB));
    release(&devices[0], false);
    release(&devices[1], true);
    ended.recv().unwrap().unwrap();
    dev.flush().unwrap();
    until(|| !dev.is_rebuilding());
    assert_eq!(dev.components()[0].state, ComponentState::Failed);
    assert_eq!(dev.components()[2].state, ComponentState::Active);
    assert!(contents(&*dev, 4 * MIB, BLOCK_SIZE) == *filled(BLOCK_SIZE, 2));
    drop(dev);
    let dev = open(&devices, &[2], &memory);
    assert!(
        contents(&dev, 4 * MIB, BLOCK_SIZE) == *filled(BLOCK_SIZE, 2),
        "acknowledged and flushed"
    );
}

#[test]
fn a_repair_never_copies_from_a_side_whose_failed_write_is_not_judged() {
    let (devices, dev, memory) = two_and_a_new_one();
    // Read from the second side.
    let at = 5 * MIB;
    dev.write(at, &filled(BLOCK_SIZE, 1)).unwrap();
    dev.write(at + BLOCK, &filled(BLOCK_SIZE, 1)).unwrap();
    devices[..2].iter().for_each(|side| hold(side));
    let ended = begin_write(&dev, at, 2);
    // The neighbour cannot be read on the second side: the repair is asked for, and waits for the
    // writer.
    spoil(&devices[1], at + BLOCK);
    assert!(contents(&*dev, at, 2 * BLOCK_SIZE)[BLOCK_SIZE..] == *filled(BLOCK_SIZE, 1));
    release(&devices[0], false);
    release(&devices[1], true);
    ended.recv().unwrap().unwrap();
    dev.flush().unwrap();
    assert_eq!(dev.live_sides(), 1);
    drop(dev);
    let dev = open(&devices, &[1], &memory);
    assert!(contents(&dev, at, BLOCK_SIZE) == *filled(BLOCK_SIZE, 2), "acknowledged and flushed");
}

#[test]
fn a_rebuild_repeats_what_it_copied_from_a_side_that_became_stale() {
    let (devices, dev, memory) = two_and_a_new_one();
    for n in 0..8 {
        dev.write(n * 4 * MIB, &filled(BLOCK_SIZE, n)).unwrap();
    }
    // The first side loses what it had not made durable, and says so at a flush: after the first
    // half of it was copied.
    devices[0].inner().write(HEAD_LEN, &filled(BLOCK_SIZE, 77)).unwrap();
    let failing = devices.clone();
    let (tx, asked) = mpsc::channel();
    let flusher = Arc::downgrade(&dev);
    at_look(&devices[0], 16 * MIB, move || {
        failing[0].fail_after(CHANGES, 0);
        let done = Box::new(move |result| tx.send(result).unwrap());
        flusher.upgrade().unwrap().submit(vec![Io::Flush { done }]);
    });
    replace(&dev, "b", &devices, true);
    asked.recv().unwrap().unwrap();
    until(|| !dev.is_rebuilding());
    assert_eq!(dev.components()[2].state, ComponentState::Active);
    drop(dev);
    let dev = open(&devices, &[2], &memory);
    for n in 0..8 {
        assert!(contents(&dev, n * 4 * MIB, BLOCK_SIZE) == *filled(BLOCK_SIZE, n), "{n}");
    }
}

#[test]
fn a_write_that_began_before_the_rebuild_is_on_the_new_side() {
    let (devices, dev, memory) = two_and_a_new_one();
    dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
    // In a region that is marked, and a hole so far.
    devices[..2].iter().for_each(|side| hold(side));
    let ended = begin_write(&dev, 2 * MIB, 2);
    let looked = Arc::new(AtomicBool::new(false));
    let look = looked.clone();
    at_look(&devices[0], 0, move || look.store(true, Ordering::SeqCst));
    let early = thread::scope(|scope| {
        let rebuild = scope.spawn(|| replace(&dev, "b", &devices, true));
        until(|| dev.components().len() == 3);
        for _ in 0..20_000 {
            thread::yield_now();
        }
        let early = looked.load(Ordering::SeqCst);
        release(&devices[0], true);
        release(&devices[1], true);
        rebuild.join().unwrap();
        early
    });
    assert!(!early, "nothing is copied or skipped while that writer is inside");
    ended.recv().unwrap().unwrap();
    dev.flush().unwrap();
    until(|| !dev.is_rebuilding());
    drop(dev);
    let dev = open(&devices, &[2], &memory);
    assert!(contents(&dev, 2 * MIB, BLOCK_SIZE) == *filled(BLOCK_SIZE, 2));
}

#[test]
fn a_block_that_no_side_can_read_does_not_prevent_a_rebuild_and_is_counted() {
    let (devices, dev, memory) = two_and_a_new_one();
    for n in 0..8 {
        dev.write(n * 4 * MIB, &filled(4 * BLOCK_SIZE, n)).unwrap();
    }
    devices[1].fail_after(CHANGES, 0);
    dev.write(0, &filled(4 * BLOCK_SIZE, 0)).unwrap();
    assert_eq!(dev.live_sides(), 1);
    let bad = 8 * MIB + 2 * BLOCK;
    spoil(&devices[0], bad);
    replace(&dev, "b", &devices, false);
    until(|| !dev.is_rebuilding());
    let states: Vec<_> = dev.components().iter().map(|one| (one.state, one.unreadable)).collect();
    let (active, failed) = (ComponentState::Active, ComponentState::Replaced);
    assert_eq!(states, [(active, 0), (failed, 0), (active, 1)]);
    drop(dev);
    let dev = open(&devices, &[2], &memory);
    for n in 0..8 {
        let mut expected = filled(4 * BLOCK_SIZE, n).to_vec();
        if n == 2 {
            expected[2 * BLOCK_SIZE..3 * BLOCK_SIZE].fill(0);
        }
        assert!(contents(&dev, n * 4 * MIB, 4 * BLOCK_SIZE) == expected, "{n}");
    }
}

#[test]
fn a_rebuild_is_given_up_when_the_last_side_is_gone_as_a_whole() {
    let (devices, dev, _) = two_and_a_new_one();
    dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
    let failing = devices.clone();
    at_look(&devices[0], 4 * MIB, move || {
        failing[..2].iter().for_each(|side| side.fail_after(READS, 0))
    });
    replace(&dev, "b", &devices, false);
    until(|| !dev.is_rebuilding());
    assert_eq!(dev.components()[2].state, ComponentState::Failed);
    devices[..2].iter().for_each(|side| side.heal());
    assert!(contents(&*dev, 0, BLOCK_SIZE) == *filled(BLOCK_SIZE, 1));
    assert_eq!(dev.live_sides(), 2);
}

#[test]
fn each_side_may_have_bad_blocks_of_its_own() {
    let (devices, dev, memory) = two_and_a_new_one();
    dev.write(0, &filled(4 * BLOCK_SIZE, 1)).unwrap();
    spoil(&devices[0], 0);
    spoil(&devices[1], BLOCK);
    assert!(contents(&*dev, 0, 4 * BLOCK_SIZE) == *filled(4 * BLOCK_SIZE, 1));
    until(|| dev.components()[..2].iter().all(|one| one.repairs == 1));
    assert!(
        contents(&*devices[1], HEAD_LEN, 4 * BLOCK_SIZE) == *filled(4 * BLOCK_SIZE, 1),
        "written anew"
    );
    // After a crash, too: the mirror opens, and only what no side can read is lost.
    drop(dev);
    let dev = open(&devices, &[0, 1], &memory);
    dev.write(0, &filled(4 * BLOCK_SIZE, 2)).unwrap();
    let crashed: Vec<Arc<HookedDevice>> = (0..2).map(|i| copy_of(&devices[i])).collect();
    for (side, own) in [(0, 0), (1, BLOCK)] {
        spoil(&crashed[side], own);
        spoil(&crashed[side], 3 * BLOCK);
    }
    let again = open(&crashed, &[0, 1], &memory);
    assert!(contents(&again, 0, 3 * BLOCK_SIZE) == filled(4 * BLOCK_SIZE, 2)[..3 * BLOCK_SIZE]);
    let mut block = filled(BLOCK_SIZE, 0);
    assert_eq!(again.read(3 * BLOCK, &mut block).unwrap_err().raw_os_error(), Some(libc::EIO));
}

#[test]
fn a_side_knows_that_it_is_stale_without_the_volume_file() {
    let (devices, dev, memory) = two_and_a_new_one();
    dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
    memory.refuses.store(true, Ordering::SeqCst);
    hold(&devices[1]);
    let ended = begin_write(&dev, 0, 2);
    release(&devices[1], false);
    ended.recv().unwrap().unwrap();
    assert_eq!((dev.live_sides(), memory.generation.load(Ordering::SeqCst)), (1, 0));
    let found = MirrorDevice::open(sides(&devices, &[1]), true, 1, Arc::<Memory>::default());
    assert!(
        matches!(found.err(), Some(CompositeError::Stale { .. })),
        "alone it would be taken for the newest"
    );
    // The file is written as soon as it can be.
    memory.refuses.store(false, Ordering::SeqCst);
    dev.write(20 * MIB, &filled(BLOCK_SIZE, 1)).unwrap();
    until(|| memory.generation.load(Ordering::SeqCst) == 2);
}

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_new_side_that_fails_with_all_others_at_the_end_is_written_no_more() {
    let (devices, dev, memory) = two_and_a_new_one();
    dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
    // Of what follows the look at the last chunk, the map and its flush succeed, and the copy
    // before them; no header does.
    let failing = devices.clone();
    at_look(&devices[0], MIRROR_LEN - MIB, move || {
        for (side, well) in failing.iter().zip([2, 2, 3]) {
            side.fail_after(CHANGES, well);
        }
    });
    replace(&dev, "b", &devices, false);
    until(|| !dev.is_rebuilding());
    assert_eq!(dev.live_sides(), 2);
    devices[..2].iter().for_each(|side| side.heal());
    // To a region that is not marked yet. If this hangs, so would the end of the mirror.
    std::mem::forget(Arc::clone(&dev));
    begin_write(&dev, 20 * MIB, 2).recv_timeout(LONG).expect("it ends").unwrap();
    assert_eq!(dev.components()[2].state, ComponentState::Failed);
    let dev = open(&devices, &[0, 1], &memory);
    assert!(contents(&dev, 20 * MIB, BLOCK_SIZE) == *filled(BLOCK_SIZE, 2));
}

#[test]
fn a_write_that_fails_while_the_mirror_is_closed_is_answered() {
    for round in 0..30 {
        let (devices, dev, _) = two_and_a_new_one();
        dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
        devices[..2].iter().for_each(|side| hold(side));
        let ended = begin_write(&dev, 0, 2);
        let closer = thread::spawn(move || drop(dev));
        for _ in 0..round {
            thread::yield_now();
        }
        release(&devices[0], false);
        release(&devices[1], true);
        ended.recv_timeout(LONG).expect("it is answered").unwrap();
        closer.join().unwrap();
    }
}

#[test]
fn a_flush_is_not_answered_before_a_failure_beside_it_is_judged() {
    let (devices, dev, _) = two_and_a_new_one();
    dev.write(0, &filled(BLOCK_SIZE, 1)).unwrap();
    // When the first side has flushed, it fails a write, of which the worker does not know yet: the
    // second side is still at it.
    let (failing, writer) = (devices.clone(), Arc::downgrade(&dev));
    at_first(
        &devices[1],
        |request| request.op == Op::Flush,
        move || {
            failing[0].fail_after(CHANGES, 0);
            hold(&failing[1]);
            begin_write_untold(&writer.upgrade().unwrap(), 0);
        },
    );
    let (tx, flushed) = mpsc::channel();
    dev.submit(vec![Io::Flush { done: Box::new(move |result| tx.send(result).unwrap()) }]);
    let early = flushed.try_recv();
    devices[1].release_all();
    assert!(early.is_err(), "after a crash now the first side would count");
    flushed.recv_timeout(LONG).expect("it is answered").unwrap();
    assert_eq!(dev.live_sides(), 1);
}

fn begin_write_untold(dev: &MirrorDevice, offset: u64) {
    let buf = Arc::new(filled(BLOCK_SIZE, 9));
    dev.submit(vec![Io::Write { offset, buf, done: Box::new(drop) }]);
}

fn copy_of(side: &HookedDevice) -> Arc<HookedDevice> {
    let copy = device(side.capacity());
    let mut buf = filled(1 << 20, 0);
    for at in (0..side.capacity()).step_by(1 << 20) {
        side.inner().read(at, &mut buf).unwrap();
        copy.inner().write(at, &buf).unwrap();
    }
    copy
}

/// No generation is noted that no side has: all of them would be stale for good.
#[test]
fn a_mirror_that_cannot_be_written_when_it_is_opened_opens_later() {
    for after in 0..4 {
        let (devices, memory) = (new_mirror(2), Arc::<Memory>::default());
        memory.generation.store(1, Ordering::SeqCst);
        drop(open(&devices, &[0, 1], &memory));
        // Without its other side it is to have a new list.
        devices[0].fail_after(&[Op::Write, Op::Flush], after);
        let generation = memory.generation.load(Ordering::SeqCst);
        let opened =
            MirrorDevice::open(sides(&devices, &[0]), false, generation, memory.clone()).map(drop);
        assert!(matches!(opened, Err(CompositeError::Io { .. })), "{after}");
        devices[0].heal();
        assert_eq!(open(&devices, &[0], &memory).live_sides(), 1);
    }
}
