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

#[test]
fn blocks_that_nothing_needs_and_that_cannot_be_read_are_zeros_in_the_copy() {
    let from = volume();
    let sb = read_superblock(&from).unwrap();
    let geometry = sb.geometry();
    let end = log_end(&from, &geometry, &log_start(&from, &geometry).unwrap()).unwrap();
    // In the log behind where it ends.
    let unused = geometry.log_offset
        + (end.offset - geometry.log_offset + geometry.log_len / 2) % geometry.log_len;
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

#[test]
fn a_copy_that_begins_anew_leaves_nothing_of_a_larger_one() {
    let (from, to) = (volume(), empty(VOLUME_BYTES * 2));
    let stopped = copy(&from, &to, small(), &env(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(CopyError::Stopped)));
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    block.fill(7);
    for offset in [VOLUME_BYTES, VOLUME_BYTES * 2 - BLOCK] {
        to.write(offset, &block).unwrap();
    }
    let options = CopyOptions { restart: true, ..small() };
    copy(&from, &to, options, &env(), &mut |_| ControlFlow::Continue(())).unwrap();
    for offset in [VOLUME_BYTES, VOLUME_BYTES * 2 - BLOCK] {
        to.read(offset, &mut block).unwrap();
        assert!(block.iter().all(|byte| *byte == 0));
    }
    assert!(view(&to) == view(&from));
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

#[test]
fn a_check_is_stopped_before_there_is_a_target() {
    let stopped = Checked::new(&volume(), &env(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(CopyError::Stopped)));
}
