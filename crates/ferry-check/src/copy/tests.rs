//! Copies between devices in memory: what is copied, what is refused, and what damage does.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::*;
use crate::testing::{make_dir, make_file, mount};
use ferry_device::{HookedDevice, MemDevice, Op};
use ferry_fs::api::{Filesystem, ROOT};
use ferry_fs::keys::{self, Extent, Key};
use ferry_fs::volume::{MkfsOptions, mkfs};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

const VOLUME_BYTES: u64 = 64 << 20;

fn env() -> Env {
    Env::real()
}

fn empty(bytes: u64) -> Arc<dyn BlockDevice> {
    Arc::new(MemDevice::new(bytes))
}

/// A closed volume with files.
fn volume() -> Arc<dyn BlockDevice> {
    let dev = empty(VOLUME_BYTES);
    mkfs(&dev, &MkfsOptions::default(), &env()).unwrap();
    let fs = mount(&dev, false);
    let dir = make_dir(&fs, ROOT, "dir");
    for n in 0..20_usize {
        let data: Vec<u8> = (0..n * 30_000).map(|at| (at / 7 + n) as u8).collect();
        make_file(&fs, dir, &format!("f{n}"), &data);
    }
    fs.detach();
    fs.close().unwrap();
    dev
}

/// A copy has many chunks, legs and windows.
fn small() -> CopyOptions {
    let (chunk_bytes, leg_bytes, window_bytes) = (64 << 10, 1 << 20, 5 << 20);
    CopyOptions { restart: false, chunk_bytes, leg_bytes, window_bytes }
}

fn copied(from: &Arc<dyn BlockDevice>, to: &Arc<dyn BlockDevice>) -> Result<Copied, CopyError> {
    copy(from, to, small(), &env(), &mut |_| ControlFlow::Continue(()))
}

fn is_clean(dev: &Arc<dyn BlockDevice>) -> bool {
    fsck(dev, FsckOptions { verify_data: true, ..FsckOptions::default() }, &env()).unwrap().clean
}

/// All keys and values.
fn view(dev: &Arc<dyn BlockDevice>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all = Vec::new();
    let inspector = Inspector::open(dev, &env()).unwrap();
    let scanned = inspector.keys(&[], &[0xff; 32], &mut |key, value| {
        all.push((key.to_vec(), value.to_vec()));
        true
    });
    scanned.unwrap();
    all
}

/// The first block of the device that holds data of a file.
fn data_block(dev: &Arc<dyn BlockDevice>) -> u64 {
    let extents =
        view(dev).into_iter().filter(|(key, _)| matches!(keys::parse(key), Some(Key::Extent(..))));
    let data = extents.filter_map(|(_, value)| match Extent::decode(&value) {
        Ok(Extent::Data { block, .. }) => Some(block),
        _ => None,
    });
    data.min().unwrap()
}

#[test]
fn a_copy_is_the_volume_and_the_source_stays_as_it_was() {
    let from = volume();
    let before = view(&from);
    let to = empty(VOLUME_BYTES);
    let done = copied(&from, &to).unwrap();
    assert!(done.bytes == done.bytes_total && done.bytes < VOLUME_BYTES, "{done:?}");
    assert_eq!(read_superblock(&from).unwrap(), read_superblock(&to).unwrap());
    assert!(view(&to) == before && view(&from) == before);
    assert!(is_clean(&from) && is_clean(&to));
}

#[test]
fn a_volume_that_was_not_closed_is_copied_with_its_log() {
    let from = volume();
    let fs = mount(&from, false);
    make_file(&fs, ROOT, "late", &[7; 100_000]);
    // What the device has at this moment.
    let to = empty(VOLUME_BYTES);
    copied(&from, &to).unwrap();
    assert!(view(&to) == view(&from) && is_clean(&to));
    fs.detach();
    fs.close().unwrap();
}

#[test]
fn a_copy_that_is_stopped_is_no_volume_and_goes_on() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let stopped = copy(&from, &to, small(), &env(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(CopyError::Stopped)));
    assert!(matches!(read_superblock(&to), Err(VolumeError::Unfinished)));
    assert!(fsck(&to, FsckOptions::default(), &env()).is_err());
    copied(&from, &to).unwrap();
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn a_copy_goes_on_only_with_the_state_that_it_was_begun_with() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let stopped = copy(&from, &to, small(), &env(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(CopyError::Stopped)));
    let fs = mount(&from, false);
    make_file(&fs, ROOT, "more", b"more");
    fs.detach();
    fs.close().unwrap();
    assert!(matches!(copied(&from, &to), Err(CopyError::OtherState)));
    assert!(matches!(copied(&volume(), &to), Err(CopyError::OtherState)));
    copy(&from, &to, CopyOptions { restart: true, ..small() }, &env(), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn what_is_no_empty_device_is_refused_and_left_alone() {
    let from = volume();
    let other = volume();
    let before = view(&other);
    for restart in [false, true] {
        let options = CopyOptions { restart, ..small() };
        let refused = copy(&from, &other, options, &env(), &mut |_| ControlFlow::Continue(()));
        assert!(matches!(refused, Err(CopyError::NotEmpty(VolumeError::Exists { .. }))));
    }
    assert!(view(&other) == before);
    let foreign = empty(VOLUME_BYTES);
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    block.fill(1);
    foreign.write(0, &block).unwrap();
    assert!(matches!(copied(&from, &foreign), Err(CopyError::NotEmpty(VolumeError::Foreign))));
    let short = empty(VOLUME_BYTES / 2);
    assert!(matches!(copied(&from, &short), Err(CopyError::TooSmall { .. })));
    assert!(matches!(copied(&empty(VOLUME_BYTES), &short), Err(CopyError::Source(_))));
}

#[test]
fn damaged_data_and_blocks_that_cannot_be_read_end_a_copy() {
    let from = volume();
    let offset = data_block(&from) * BLOCK;
    let hooked = Arc::new(HookedDevice::new(from.clone()));
    hooked.set_unreadable([offset]);
    let unreadable: Arc<dyn BlockDevice> = hooked;
    let to = empty(VOLUME_BYTES);
    let failed = copied(&unreadable, &to);
    assert!(matches!(failed, Err(CopyError::SourceRead { offset: at, .. }) if at == offset));
    let mut good = AlignedBuf::zeroed(BLOCK_SIZE);
    from.read(offset, &mut good).unwrap();
    let mut bad = AlignedBuf::zeroed(BLOCK_SIZE);
    bad.copy_from_slice(&good);
    bad[9] ^= 1;
    from.write(offset, &bad).unwrap();
    let failed = copied(&from, &to);
    assert!(matches!(failed, Err(CopyError::SourceData { offset: at }) if at == offset));
    assert!(matches!(read_superblock(&to), Err(VolumeError::Unfinished)));
    from.write(offset, &good).unwrap();
    copied(&from, &to).unwrap();
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn a_full_target_ends_a_copy_which_goes_on_when_there_is_room() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let total = copied(&from, &empty(VOLUME_BYTES)).unwrap().bytes_total;
    let full = Arc::new(HookedDevice::new(to.clone()));
    let (written, room) = (AtomicU64::new(0), 3 << 20);
    full.set_hook(move |request, serve| match request.op {
        // The marks have their blocks from the beginning on.
        Op::Write if request.len > BLOCK => {
            match written.fetch_add(request.len, Ordering::Relaxed) < room {
                true => serve(),
                false => Err(io::ErrorKind::StorageFull.into()),
            }
        }
        _ => serve(),
    });
    let full: Arc<dyn BlockDevice> = full;
    let failed = copied(&from, &full);
    let is_full = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
    assert!(matches!(&failed, Err(CopyError::Target { source, .. }) if is_full(source)));
    assert!(matches!(read_superblock(&to), Err(VolumeError::Unfinished)));
    let copied = copied(&from, &to).unwrap();
    assert!(copied.bytes < total && copied.bytes + (room + (1 << 20)) >= total, "{copied:?}");
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn a_mark_that_is_left_on_a_device_with_other_data_lets_no_copy_begin() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let stopped = copy(&from, &to, small(), &env(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(CopyError::Stopped)));
    let mut other = AlignedBuf::zeroed(BLOCK_SIZE);
    other.fill(7);
    to.write(0, &other).unwrap();
    let all = |dev: &Arc<dyn BlockDevice>| {
        let mut bytes = AlignedBuf::zeroed(VOLUME_BYTES as usize);
        dev.read(0, &mut bytes).unwrap();
        bytes.to_vec()
    };
    let before = all(&to);
    for restart in [false, true] {
        let options = CopyOptions { restart, ..small() };
        let refused = copy(&from, &to, options, &env(), &mut |_| ControlFlow::Continue(()));
        assert!(matches!(refused, Err(CopyError::NotEmpty(VolumeError::Foreign))));
    }
    assert!(all(&to) == before);
}

/// A block in the log behind where it ends: nothing needs it.
fn unused_block(from: &Arc<dyn BlockDevice>) -> u64 {
    let geometry = read_superblock(from).unwrap().geometry();
    let end = log_end(from, &geometry, &log_start(from, &geometry).unwrap()).unwrap();
    geometry.log_offset
        + (end.offset - geometry.log_offset + geometry.log_len / 2) % geometry.log_len
}

/// From now on so many reads of the block at `offset` fail.
fn fail_reads(hooked: &HookedDevice, offset: u64, times: u64) {
    let left = AtomicU64::new(times);
    let one_less = move || {
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    };
    hooked.set_hook(move |request, serve| {
        if request.op == Op::Read && request.range().contains(&offset) && one_less() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        serve()
    });
}

#[test]
fn a_read_error_that_passes_puts_no_zeros_into_a_copy() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let (unused, hooked) = (unused_block(&from), Arc::new(HookedDevice::new(from.clone())));
    let source: Arc<dyn BlockDevice> = hooked.clone();
    let checked = Checked::new(&source, &env(), &mut |_| ControlFlow::Continue(())).unwrap();
    let copied =
        || copy_checked(&checked, &to, small(), &env(), &mut |_| ControlFlow::Continue(()));
    // A device that is away reads nothing, not even the superblocks.
    hooked.set_unreadable(checked.sb.offsets().into_iter().chain([unused]));
    assert!(matches!(copied(), Err(CopyError::SourceUnread { offset, .. }) if offset == unused));
    hooked.set_unreadable([]);
    // The chunk, then the block alone, and then again.
    fail_reads(&hooked, unused, 3);
    assert_eq!(copied().unwrap().zeroed, 0);
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn what_a_store_cannot_give_is_no_zeros_in_a_copy() {
    let from = volume();
    let unused = unused_block(&from);
    let hooked = Arc::new(HookedDevice::new(from.clone()).keeping_what_is_dead());
    hooked.set_unreadable([unused]);
    let source: Arc<dyn BlockDevice> = hooked.clone();
    let to = empty(VOLUME_BYTES);
    let failed = copied(&source, &to);
    assert!(matches!(failed, Err(CopyError::SourceUnread { offset, .. }) if offset == unused));
    hooked.set_unreadable([]);
    copied(&source, &to).unwrap();
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn a_log_that_cannot_be_read_after_the_check_ends_the_copy() {
    let live = volume();
    let fs = mount(&live, false);
    make_file(&fs, ROOT, "late", &[7; 100_000]);
    // What the device has at this moment.
    let from = empty(VOLUME_BYTES);
    copied(&live, &from).unwrap();
    fs.detach();
    fs.close().unwrap();
    let geometry = read_superblock(&from).unwrap().geometry();
    let start = log_start(&from, &geometry).unwrap();
    let first = geometry.log_offset + start.position * BLOCK % geometry.log_len;
    let asked = std::cell::Cell::new(0);
    let all = Checked::new(&from, &env(), &mut |_| {
        asked.set(asked.get() + 1);
        ControlFlow::Continue(())
    });
    all.unwrap();
    let before_the_last = asked.replace(0) - 1;
    let hooked = Arc::new(HookedDevice::new(from.clone()));
    let source: Arc<dyn BlockDevice> = hooked.clone();
    let failed = Checked::new(&source, &env(), &mut |_| {
        asked.set(asked.get() + 1);
        if asked.get() == before_the_last {
            // The reader asks for many blocks, and then for this one.
            fail_reads(&hooked, first, 2);
        }
        ControlFlow::Continue(())
    });
    let failed = failed.err();
    assert!(
        matches!(failed, Some(CopyError::SourceUnread { offset, .. }) if offset == first),
        "{failed:?}"
    );
}

#[test]
fn blocks_that_nothing_needs_and_that_cannot_be_read_are_zeros_in_the_copy() {
    let from = volume();
    let geometry = read_superblock(&from).unwrap().geometry();
    let unused = unused_block(&from);
    let hooked = Arc::new(HookedDevice::new(from.clone()));
    hooked.set_unreadable([unused]);
    let unreadable: Arc<dyn BlockDevice> = hooked.clone();
    let to = empty(VOLUME_BYTES);
    assert_eq!(copied(&unreadable, &to).unwrap().zeroed, 1);
    assert!(view(&to) == view(&from) && is_clean(&to));
    // A segment of the home store.
    let mut home = None;
    let inspector = Inspector::open(&from, &env()).unwrap();
    let seen = inspector.segments(&mut |segment| {
        if segment.used == crate::inspect::SegmentUse::Home {
            home = Some(segment.offset + geometry.segment_len - BLOCK);
        }
        true
    });
    seen.unwrap();
    hooked.set_unreadable([home.unwrap()]);
    let failed = copied(&unreadable, &empty(VOLUME_BYTES));
    assert!(matches!(failed, Err(CopyError::SourceUnread { offset, .. }) if Some(offset) == home));
}

#[test]
fn a_copy_that_goes_on_finds_that_what_it_had_was_changed() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let stop_late = |told: Copying| match told.bytes < told.bytes_total {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    let stopped = copy(&from, &to, small(), &env(), &mut { stop_late });
    assert!(matches!(stopped, Err(CopyError::Stopped)));
    let offset = data_block(&from) * BLOCK;
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    to.read(offset, &mut block).unwrap();
    block[9] ^= 1;
    to.write(offset, &block).unwrap();
    assert!(matches!(copied(&from, &to), Err(CopyError::TargetDamaged { .. })));
    assert!(matches!(read_superblock(&to), Err(VolumeError::Unfinished)));
}

/// A block that is not zeros, at each of these bytes of the device.
fn write_noise(to: &Arc<dyn BlockDevice>, offsets: &[u64]) {
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    block.fill(7);
    offsets.iter().for_each(|offset| to.write(*offset, &block).unwrap());
}

/// Whether the block at each of these bytes of the device is zeros.
fn zeros(to: &Arc<dyn BlockDevice>, offsets: &[u64]) -> Vec<bool> {
    let is_zeros = |offset: &u64| {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        to.read(*offset, &mut block).unwrap();
        block.iter().all(|byte| *byte == 0)
    };
    offsets.iter().map(is_zeros).collect()
}

/// A closed volume that is twice as large as the others, and has no files.
fn larger() -> Arc<dyn BlockDevice> {
    let dev = empty(VOLUME_BYTES * 2);
    mkfs(&dev, &MkfsOptions::default(), &env()).unwrap();
    dev
}

fn begun_anew(from: &Arc<dyn BlockDevice>, to: &Arc<dyn BlockDevice>) -> Result<Copied, CopyError> {
    let options = CopyOptions { restart: true, ..small() };
    copy(from, to, options, &env(), &mut |_| ControlFlow::Continue(()))
}

/// A copy of `from` that is stopped when it has begun.
fn stop_at_once(from: &Arc<dyn BlockDevice>, to: &Arc<dyn BlockDevice>) {
    let stopped = copy(from, to, small(), &env(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(CopyError::Stopped)));
}

const LARGER_END: u64 = VOLUME_BYTES * 2;

#[test]
fn a_copy_that_begins_anew_discards_what_a_larger_one_wrote_and_nothing_behind_it() {
    let (from, to) = (volume(), empty(VOLUME_BYTES * 3));
    stop_at_once(&larger(), &to);
    let offsets = [VOLUME_BYTES, LARGER_END - BLOCK, LARGER_END, VOLUME_BYTES * 3 - BLOCK];
    write_noise(&to, &offsets);
    begun_anew(&from, &to).unwrap();
    assert_eq!(zeros(&to, &offsets), [true, true, false, false]);
    assert!(view(&to) == view(&from));
}

#[test]
fn a_copy_that_begins_anew_on_a_larger_device_discards_no_more_than_the_volume_needs() {
    let (from, to) = (volume(), empty(VOLUME_BYTES * 2));
    stop_at_once(&from, &to);
    let offsets = [VOLUME_BYTES, VOLUME_BYTES * 2 - BLOCK];
    write_noise(&to, &offsets);
    begun_anew(&from, &to).unwrap();
    assert_eq!(zeros(&to, &offsets), [false, false]);
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn after_an_older_program_no_more_is_discarded_than_its_mark_says_was_copied() {
    let (from, to) = (volume(), empty(VOLUME_BYTES * 2));
    stop_at_once(&larger(), &to);
    let mark = read_copy_mark(&*to).unwrap().unwrap();
    assert_eq!(mark.end, LARGER_END);
    let done = VOLUME_BYTES + 5 * BLOCK;
    // What reads back from a mark without an end.
    write_copy_mark(&*to, &CopyMark { done, end: done, ..mark }).unwrap();
    let offsets = [VOLUME_BYTES, done - BLOCK, done, LARGER_END - BLOCK];
    write_noise(&to, &offsets);
    begun_anew(&from, &to).unwrap();
    assert_eq!(zeros(&to, &offsets), [true, true, false, false]);
}

#[test]
fn a_copy_that_was_cut_off_before_it_discarded_does_so_when_it_goes_on() {
    let (from, hooked) = (volume(), Arc::new(HookedDevice::new(empty(VOLUME_BYTES * 2))));
    let to: Arc<dyn BlockDevice> = hooked.clone();
    stop_at_once(&larger(), &to);
    let offsets = [VOLUME_BYTES - 2 * BLOCK, VOLUME_BYTES, LARGER_END - BLOCK];
    write_noise(&to, &offsets);
    hooked.fail_after(&[Op::Discard], 0);
    assert!(matches!(begun_anew(&from, &to), Err(CopyError::Target { .. })));
    hooked.heal();
    copied(&from, &to).unwrap();
    assert_eq!(zeros(&to, &offsets), [true, true, true]);
    assert!(view(&to) == view(&from) && is_clean(&to));
}

#[test]
fn a_volume_with_one_bad_superblock_is_copied_and_the_copy_is_clean() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let mut noise = AlignedBuf::zeroed(BLOCK_SIZE);
    noise.fill(7);
    from.write(1 << 20, &noise).unwrap();
    assert!(!is_clean(&from));
    copied(&from, &to).unwrap();
    assert!(view(&to) == view(&from) && is_clean(&to));
}

/// Ends at the n-th call, for each n: the work ends at once. Returns how many calls there are.
fn stopped_everywhere(mut work: impl FnMut(Tell<'_>) -> Result<(), CopyError>) -> usize {
    for n in 1.. {
        let mut calls = 0;
        let done = work(&mut |_| {
            calls += 1;
            if calls == n { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        match done {
            Ok(()) => return calls,
            Err(error) => {
                assert!(matches!(error, CopyError::Stopped) && calls == n, "{n}: {error}");
            }
        }
    }
    unreachable!("each n was tried")
}

#[test]
fn the_check_before_a_copy_ends_wherever_it_is_stopped() {
    let from = volume();
    let calls = stopped_everywhere(|tell| Checked::new(&from, &env(), tell).map(drop));
    // Its own three calls, and one for each part of the check.
    assert_eq!(calls, 7);
}

#[test]
fn the_check_of_a_copy_ends_wherever_it_is_stopped_and_the_copy_goes_on() {
    let (from, to) = (volume(), empty(VOLUME_BYTES));
    let checked = Checked::new(&from, &env(), &mut |_| ControlFlow::Continue(())).unwrap();
    copied(&from, &empty(VOLUME_BYTES)).unwrap();
    let stop_late = |told: Copying| match told.bytes < told.bytes_total {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    let stopped = copy_checked(&checked, &to, small(), &env(), &mut { stop_late });
    assert!(matches!(stopped, Err(CopyError::Stopped)));
    // Nothing is left but to check it.
    let calls = stopped_everywhere(|tell| {
        let stays_unfinished = matches!(read_superblock(&to), Err(VolumeError::Unfinished));
        assert!(stays_unfinished);
        copy_checked(&checked, &to, small(), &env(), tell).map(drop)
    });
    assert_eq!(calls, 6);
    assert!(view(&to) == view(&from) && is_clean(&to));
}
