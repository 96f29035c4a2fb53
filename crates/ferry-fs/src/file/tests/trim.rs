//! Space goes back to the host: all that is free but for the reserves, and nothing that holds data.

use crate::file::tests::*;
use crate::store::signal::ROUND;
use crate::writeback::trim::Quiet;
use ferry_device::{HookedDevice, Op};
use std::collections::BTreeSet;

const SEGMENTS: u32 = 256;
const SEGMENT: u64 = 256 << 10;

/// Blocks of the volume that take space on the host.
type Held = Arc<Mutex<BTreeSet<u64>>>;

/// A device whose host tells in `held` which parts of the volume take space.
fn host(inner: Arc<MemDevice>, held: Held) -> Arc<HookedDevice> {
    let device = HookedDevice::new(inner).with_host_free(1 << 40);
    device.set_hook(move |request, serve| {
        let range = request.range();
        match request.op {
            Op::Write | Op::Allocate => {
                held.lock().extend(range.start / BLOCK..range.end.div_ceil(BLOCK))
            }
            Op::Discard => {
                held.lock()
                    .retain(|block| !(range.start / BLOCK..range.end / BLOCK).contains(block));
            }
            _ => {}
        }
        serve()
    });
    Arc::new(device)
}

/// The volume, and the blocks of it that the host holds.
fn hosted() -> (Volume, Held) {
    let held = Held::default();
    let there = Arc::clone(&held);
    let volume = Volume::on(SEGMENTS, SEGMENT, 8 << 20, false, |inner| host(inner, there));
    (volume, held)
}

/// Segments of which the host holds something.
fn segments_held(volume: &Volume, held: &Mutex<BTreeSet<u64>>) -> BTreeSet<u32> {
    held.lock()
        .iter()
        .filter_map(|block| volume.store.table.locate(*block).map(|(segment, _)| segment))
        .collect()
}

/// A volume on a device that keeps what is dead. An allocation costs nothing there.
fn keeping() -> (Volume, Held) {
    let held = Held::default();
    let there = Arc::clone(&held);
    let wrap = |inner: Arc<MemDevice>| {
        let device = HookedDevice::new(inner).keeping_what_is_dead();
        device.set_hook(move |request, serve| {
            let range = request.range();
            let blocks = range.start / BLOCK..range.end / BLOCK;
            match request.op {
                Op::Write => there.lock().extend(blocks),
                Op::Discard => there.lock().retain(|block| !blocks.contains(block)),
                _ => {}
            }
            serve()
        });
        Arc::new(device) as Arc<dyn BlockDevice>
    };
    (Volume::on(SEGMENTS, SEGMENT, 8 << 20, false, wrap), held)
}

/// Many large files that go, with a small one between each two that stays.
fn leave_little(volume: &Volume) -> Vec<(Ino, Vec<u8>)> {
    let mut files = Vec::new();
    for n in 0..20 {
        let (large, small) = (100 + n, 200 + n);
        volume.write(&volume.create(large), 0, &pattern(large, 2 << 20));
        files.push((small, pattern(small, 5000)));
        volume.write(&volume.create(small), 0, &files[n as usize].1);
        volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    }
    (0..20).for_each(|n| volume.remove(100 + n));
    files
}

fn check_contents(volume: &Volume, files: &[(Ino, Vec<u8>)]) {
    volume.evict();
    for (ino, contents) in files {
        let file = volume.inodes.inode(*ino).unwrap().unwrap();
        assert!(volume.read(&file, 0, contents.len()) == *contents, "file {ino}");
    }
    volume.check();
}

/// The free segments that stay with the volume: for the home store, for the cleaner.
fn free_and_held(volume: &Volume, held: &Mutex<BTreeSet<u64>>) -> usize {
    let held = segments_held(volume, held);
    let used = volume.store.table.segments_in_use();
    assert!(used.is_subset(&held), "what holds data has its space");
    held.len() - used.len()
}

#[test]
fn after_an_unmount_the_host_has_all_but_the_reserves() {
    let (volume, held) = hosted();
    let fresh = segments_held(&volume, &held).len();
    let files = leave_little(&volume);
    assert!(segments_held(&volume, &held).len() > fresh + 100);
    volume.store.close().unwrap();
    let after = free_and_held(&volume, &held);
    assert!(after <= fresh + 4, "{after} free segments stay; a fresh volume has {fresh}");
    check_contents(&volume, &files);
}

/// The background thread, on a clock of its own.
#[test]
fn free_space_goes_back_to_the_host_within_a_minute_of_quiet() {
    let (volume, held) = hosted();
    let fresh = segments_held(&volume, &held).len();
    let (mut quiet, mut now) = (Quiet::default(), Duration::from_secs(1000));
    let mut rounds = |seconds: u64| {
        for _ in 0..Duration::from_secs(seconds).as_millis() / ROUND.as_millis() {
            now += ROUND;
            volume.store.idle_work(&mut quiet, now).unwrap();
            // What the cleaner has moved becomes free when that is durable, as the journal's own
            // thread sees to.
            volume.journal.force_durable_point().unwrap();
        }
    };
    let files = leave_little(&volume);
    volume.journal.force_durable_point().unwrap();
    volume.store.idle_work(&mut Quiet::default(), Duration::ZERO).unwrap();
    let before = segments_held(&volume, &held).len();
    rounds(19);
    let busy = segments_held(&volume, &held).len();
    assert!(busy > fresh + 20, "of {before} segments {busy} are held while it may be used again");
    // Somebody writes: it is not quiet yet.
    volume.write(&volume.create(400), 0, &pattern(400, 2 << 20));
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    rounds(19);
    assert!(segments_held(&volume, &held).len() > fresh + 20);
    rounds(41);
    let after = free_and_held(&volume, &held);
    assert!(after <= fresh + 4, "{after} free segments stay; a fresh volume has {fresh}");
    check_contents(&volume, &files);
}

#[test]
fn a_trim_gives_back_what_an_earlier_mount_has_left() {
    let (mut volume, held) = hosted();
    let fresh = segments_held(&volume, &held).len();
    let files = leave_little(&volume);
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    // As after a crash: nobody has given anything back.
    volume.journal.force_durable_point().unwrap();
    volume.reopen_on(host(Arc::clone(&volume.dev), Arc::clone(&held)));
    assert!(segments_held(&volume, &held).len() > fresh + 100);
    assert!(volume.store.trim().unwrap() > 100 * SEGMENT);
    let after = free_and_held(&volume, &held);
    assert!(after <= fresh + 4, "{after} free segments stay; a fresh volume has {fresh}");
    assert_eq!(volume.store.trim().unwrap(), 0, "nothing is left to give back");
    check_contents(&volume, &files);
    // What is taken again may be trimmed at any moment.
    for n in 0..20 {
        let file = volume.create(300 + n);
        volume.write(&file, 0, &pattern(n, 1 << 20));
        volume.store.trim().unwrap();
        volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
        volume.store.trim().unwrap();
        assert!(volume.read(&file, 0, 1 << 20) == pattern(n, 1 << 20));
    }
    free_and_held(&volume, &held);
    check_contents(&volume, &files);
}

/// Segments that are free are discarded at once, and half dead ones are cleaned although a local
/// volume would leave them.
#[test]
fn a_device_that_keeps_what_is_dead_is_told_early() {
    let (volume, held) = keeping();
    let files: Vec<_> = (100..1300).map(|ino| (ino, pattern(ino, 32 << 10))).collect();
    for (ino, contents) in &files {
        volume.write(&volume.create(*ino), 0, contents);
        volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    }
    let (left, removed): (Vec<_>, Vec<_>) = files.into_iter().partition(|(ino, _)| ino % 5 < 2);
    removed.iter().for_each(|(ino, _)| volume.remove(*ino));
    volume.journal.force_durable_point().unwrap();
    let (live, dead) = volume.store.table.live_and_dead();
    assert!(dead > live && dead < (512 << 20) / BLOCK, "{dead} blocks are dead, {live} live");
    for _ in 0..20 {
        volume.store.tidy().unwrap();
        volume.journal.force_durable_point().unwrap();
    }
    volume.store.space.reap_now();
    let (live, dead) = volume.store.table.live_and_dead();
    assert!(dead <= ((16 << 20) / BLOCK).max((live + dead) / 5), "{dead} dead, {live} live");
    assert!(volume.store.stats().cleaned_segments > 0);
    let (home, free) = (volume.store.space.counts().3 as usize, free_and_held(&volume, &held));
    assert!(free <= home, "{free} segments hold what is dead, {home} are the home store's");
    check_contents(&volume, &left);
}
