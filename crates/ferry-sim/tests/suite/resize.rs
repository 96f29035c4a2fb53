//! A volume in use gets another size: at every moment a crash leaves either the old size or the new
//! one, and with either everything that was made durable.

use crate::grow_support::{
    FILE, Files, ME, ask, assert_clean, contents, fill, format, grow, holds, large, make, open,
    resize, sync,
};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, HookedDevice};
use ferry_fs::ioctl::ResizeAnswer;
use ferry_fs::volume::{
    LOG_MIN, SUPERBLOCK_OFFSETS, Superblock, read_superblock, read_superblock_copies,
};
use ferry_fs::{Filesystem, FsOptions, LocalFs, ROOT, Statfs};
use ferry_journal::inspect::home_map;
use ferry_sim::device::{Fault, Op, SimDevice, SimRng, sim_env};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SMALL: u64 = 24 << 20;
/// A volume of [`MEDIUM`] bytes becomes so short.
const SHORT: u64 = 32 << 20;
const MEDIUM: u64 = 64 << 20;
/// More segments than the slots of a volume of [`MEDIUM`] bytes have room for.
const LARGE: u64 = 1 << 30;

fn as_device(device: &Arc<SimDevice>) -> Arc<dyn BlockDevice> {
    device.clone()
}

fn volume(bytes: u64) -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new(bytes));
    format(&as_device(&device), LOG_MIN);
    device
}

fn superblock(device: &Arc<SimDevice>) -> Superblock {
    read_superblock(&as_device(device)).unwrap()
}

#[track_caller]
fn assert_copies_agree(device: &SimDevice) {
    let copies = read_superblock_copies(device);
    let whole: Vec<_> = copies.iter().filter_map(|(_, copy)| copy.as_ref().ok()).collect();
    assert!(whole.len() == 3 && whole.windows(2).all(|two| two[0] == two[1]), "{copies:?}");
}

fn statfs(fs: &LocalFs) -> Statfs {
    ME.call(|cx| fs.statfs(cx)).unwrap()
}

/// How a volume is prepared, and the size that it gets.
struct Case {
    name: &'static str,
    from: u64,
    to: u64,
    log: Option<u64>,
    files: u32,
}

const CASES: [Case; 5] = [
    Case { name: "longer", from: SMALL, to: MEDIUM, log: None, files: 20 },
    Case { name: "longer slots", from: SMALL, to: LARGE, log: None, files: 20 },
    Case { name: "longer, log behind", from: SMALL, to: MEDIUM, log: Some(1 << 20), files: 20 },
    Case { name: "shorter", from: MEDIUM, to: SHORT, log: None, files: 130 },
    Case { name: "shorter, log behind", from: MEDIUM, to: SHORT, log: Some(1 << 20), files: 130 },
];

#[test]
fn a_crash_while_a_volume_is_resized_leaves_the_old_size_or_the_new_one() {
    for case in &CASES {
        let device = volume(case.from);
        let fs = open(device.clone(), false);
        let (mut files, mut rng) = (Files::new(), SimRng::new(7));
        if let Some(log) = case.log {
            grow(&fs, log).unwrap();
        }
        fill(&fs, &mut files, case.files);
        device.restart_trace();
        make(&fs, &mut files.clone(), "not synced".into(), contents(1));
        assert_eq!(resize(&fs, case.to), Ok(ResizeAnswer::Done(case.to)), "{}", case.name);
        let resized_at = device.trace_len();
        let mut after = files.clone();
        for n in 0..10 {
            make(&fs, &mut after, format!("after {n}"), large(n));
        }
        sync(&fs);
        let synced_at = device.trace_len();
        // Each moment at which the switch may be half done, and others.
        let mut points = device.flush_points();
        points.extend(resized_at.saturating_sub(60)..=resized_at);
        points.extend((0..40).map(|_| rng.index(synced_at + 1)));
        points.push(synced_at);
        let mut sizes = [0; 2];
        for point in points {
            let what = format!("{}: after a crash at {point}", case.name);
            let image = Arc::new(device.crash_image(point, &mut rng));
            assert_clean(&as_device(&image));
            let size = superblock(&image).size;
            assert!([case.from, case.to].contains(&size), "{what}: {size}");
            sizes[usize::from(size == case.to)] += 1;
            assert!(point < resized_at || size == case.to, "{what}: it was said to be resized");
            let fs = open(image.clone(), false);
            holds(&fs, if point >= synced_at { &after } else { &files }, &what);
            // It is used again, and gets the size again.
            assert_eq!(resize(&fs, case.to), Ok(ResizeAnswer::Done(case.to)), "{what}");
            let mut more = Files::new();
            for n in 0..5 {
                make(&fs, &mut more, format!("more {n}"), large(n));
            }
            sync(&fs);
            assert_copies_agree(&image);
            drop(fs);
            let image = Arc::new(image.crash_image(image.trace_len(), &mut rng));
            let fs = open(image.clone(), false);
            holds(&fs, &files, &what);
            holds(&fs, &more, &what);
            fs.close().unwrap();
            drop(fs);
            assert_clean(&as_device(&image));
            assert_eq!(image.capacity(), case.to, "{what}");
        }
        assert!(sizes.iter().all(|n| *n > 0), "{}: both sides of the change: {sizes:?}", case.name);
    }
}

/// What release 0.1.0 made: no last copy of the superblock, so many blocks behind everything.
fn as_of_0_1_0(device: &Arc<SimDevice>, spare_blocks: u64) {
    let sb = superblock(device);
    let end = (sb.segments_offset + u64::from(sb.segment_count) * sb.segment_len)
        .max(sb.log_offset + sb.log_len);
    let size = end + spare_blocks * BLOCK_SIZE as u64;
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    device.read(0, &mut block).unwrap();
    block[16..24].fill(0);
    block[64..72].copy_from_slice(&size.to_le_bytes());
    let crc = crc32c::crc32c(&block[..BLOCK_SIZE - 4]);
    block[BLOCK_SIZE - 4..].copy_from_slice(&crc.to_le_bytes());
    for offset in SUPERBLOCK_OFFSETS {
        device.write(offset, &block).unwrap();
    }
    device.write(sb.size - BLOCK_SIZE as u64, &AlignedBuf::zeroed(BLOCK_SIZE)).unwrap();
    device.flush().unwrap();
    device.resize(size).unwrap();
}

#[test]
fn a_crash_in_an_upgrade_leaves_the_old_superblocks_or_the_new_ones() {
    for (spare, log) in [(0, None), (0, Some(1 << 20)), (1, None), (3, Some(1 << 20))] {
        let device = volume(SMALL);
        let fs = open(device.clone(), false);
        let mut files = Files::new();
        if let Some(log) = log {
            grow(&fs, log).unwrap();
        }
        fill(&fs, &mut files, 20);
        fs.close().unwrap();
        drop(fs);
        as_of_0_1_0(&device, spare);
        let old = superblock(&device);
        assert!(!old.is_newest());
        assert_clean(&as_device(&device));
        device.restart_trace();
        let fs = open(device.clone(), false);
        assert!(matches!(fs.upgrade(), Ok(ResizeAnswer::Done(_))));
        let upgraded_at = device.trace_len();
        assert_eq!(fs.upgrade(), Ok(ResizeAnswer::Done(superblock(&device).size)));
        assert_eq!(device.trace_len(), upgraded_at, "there is nothing to do");
        drop(fs);
        let (mut rng, mut seen) = (SimRng::new(5), [0; 2]);
        for point in 0..=upgraded_at {
            let what = format!("{spare} blocks, {log:?}: after a crash at {point}");
            let image = Arc::new(device.crash_image(point, &mut rng));
            assert_clean(&as_device(&image));
            let found = superblock(&image);
            assert!(point < upgraded_at || found.is_newest(), "{what}: it was said to be done");
            assert_eq!(found.segment_count, old.segment_count, "{what}");
            seen[usize::from(found.is_newest())] += 1;
            let fs = open(image.clone(), false);
            assert!(matches!(fs.upgrade(), Ok(ResizeAnswer::Done(_))), "{what}");
            holds(&fs, &files, &what);
            fs.close().unwrap();
            drop(fs);
            assert_clean(&as_device(&image));
            assert_copies_agree(&image);
        }
        assert!(seen.iter().all(|n| *n > 0), "both sides of the change: {seen:?}");
    }
}

#[test]
fn each_request_of_a_resize_may_fail() {
    for case in &CASES {
        let device = volume(case.from);
        let fs = open(device.clone(), false);
        let mut files = Files::new();
        if let Some(log) = case.log {
            grow(&fs, log).unwrap();
        }
        fill(&fs, &mut files, case.files);
        fs.close().unwrap();
        drop(fs);
        let faults = [
            (Op::Write, libc::EIO, 5),
            (Op::Flush, libc::EIO, 1),
            (Op::Allocate, libc::ENOSPC, 1),
            (Op::Resize, libc::EFBIG, 1),
        ];
        for (op, errno, step) in faults {
            let mut after = 0;
            loop {
                let what = format!("{}: {op:?} {after} fails", case.name);
                let device = Arc::new(device.copy());
                let fs = open(device.clone(), false);
                device.inject(Fault { op, after, errno, sticky: false });
                let resized = resize(&fs, case.to);
                let struck = device.struck() > 0;
                assert!(
                    struck || resized == Ok(ResizeAnswer::Done(case.to)),
                    "{what}: {resized:?}"
                );
                device.heal();
                // As if the daemon were killed.
                drop(fs);
                assert_clean(&as_device(&device));
                let fs = open(device.clone(), false);
                holds(&fs, &files, &what);
                assert_eq!(resize(&fs, case.to), Ok(ResizeAnswer::Done(case.to)), "{what}");
                fs.close().unwrap();
                drop(fs);
                assert_clean(&as_device(&device));
                if !struck {
                    break;
                }
                after += step;
            }
        }
    }
}

#[test]
fn a_volume_is_resized_while_programs_write() {
    let device = volume(MEDIUM);
    let fs = open(device.clone(), true);
    let mut files = Files::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|worker| {
                let (fs, stop) = (&fs, &stop);
                scope.spawn(move || {
                    let mut mine = Files::new();
                    let mut n = 0;
                    while !stop.load(Ordering::SeqCst) {
                        // The same names again and again: old contents die everywhere.
                        make_anew(fs, &mut mine, format!("{worker} {}", n % 12), large(n));
                        if n % 10 == 0 {
                            sync(fs);
                        }
                        n += 1;
                    }
                    mine
                })
            })
            .collect();
        for size in [LARGE, SMALL + (8 << 20), 2 * MEDIUM, MEDIUM] {
            assert_eq!(resize(&fs, size), Ok(ResizeAnswer::Done(size)));
            assert_eq!(fs.stats()["volume"]["size"], size);
        }
        stop.store(true, Ordering::SeqCst);
        workers.into_iter().for_each(|worker| files.extend(worker.join().unwrap()));
    });
    holds(&fs, &files, "at the end");
    fs.close().unwrap();
    drop(fs);
    assert_clean(&as_device(&device));
    let fs = open(device.clone(), true);
    holds(&fs, &files, "when opened again");
    fs.close().unwrap();
}

/// Overwrites the file, if it is there.
fn make_anew(fs: &LocalFs, files: &mut Files, name: String, data: Vec<u8>) {
    if !files.contains_key(&name) {
        return make(fs, files, name, data);
    }
    let written = ME.call(|cx| {
        let ino = fs.lookup(cx, ROOT, name.as_bytes())?.attr.unwrap().ino;
        let fh = fs.open(cx, ino, libc::O_RDWR, false)?.fh;
        fs.write(cx, ino, fh, 0, &data, false, false)?;
        fs.release(cx, ino, fh);
        Ok(())
    });
    written.unwrap_or_else(|e| panic!("{name}: {e}"));
    files.insert(name, data);
}

#[test]
fn a_size_that_cannot_be_is_refused_and_nothing_has_changed() {
    let device = volume(MEDIUM);
    let fs = open(device.clone(), true);
    let mut files = Files::new();
    for n in 0..100 {
        make(&fs, &mut files, format!("{n}"), large(n));
    }
    sync(&fs);
    let before = statfs(&fs);
    let ResizeAnswer::TooSmall(smallest) = resize(&fs, SMALL).unwrap() else {
        panic!("it does not fit")
    };
    assert!(smallest > 100 * FILE as u64 && smallest < MEDIUM, "{smallest}");
    for bytes in [1 << 20, smallest / 4, smallest - BLOCK_SIZE as u64] {
        assert_eq!(resize(&fs, bytes), Ok(ResizeAnswer::TooSmall(smallest)), "{bytes}");
    }
    assert_eq!(statfs(&fs), before);
    assert_eq!(superblock(&device).size, MEDIUM);
    assert_eq!(resize(&fs, MEDIUM), Ok(ResizeAnswer::Done(MEDIUM)));
    // The smallest size is one.
    assert_eq!(resize(&fs, smallest), Ok(ResizeAnswer::Done(smallest)));
    holds(&fs, &files, "on the smallest volume");
    // What the log has behind the segments is in the way of a small step.
    assert_eq!(resize(&fs, MEDIUM), Ok(ResizeAnswer::Done(MEDIUM)));
    grow(&fs, 4 << 20).unwrap();
    let ResizeAnswer::AtLeast(more) = resize(&fs, MEDIUM + (1 << 20)).unwrap() else {
        panic!("the log would lie over itself")
    };
    assert_eq!(resize(&fs, more), Ok(ResizeAnswer::Done(more)));
    let ResizeAnswer::AtMost(less) = resize(&fs, more - (1 << 20)).unwrap() else {
        panic!("the log would lie over itself")
    };
    assert_eq!(resize(&fs, less), Ok(ResizeAnswer::Done(less)));
    holds(&fs, &files, "after small steps");
    fs.close().unwrap();
    drop(fs);
    assert_clean(&as_device(&device));
}

/// Nothing is left of turns whose caller does not come back: programs have all space again.
#[test]
fn a_resize_that_is_given_up_leaves_all_space_to_programs() {
    let device = volume(MEDIUM);
    let (env, clock) = sim_env(1);
    let hooked = HookedDevice::new(as_device(&device));
    let options = FsOptions { background: false, cache_bytes: 8 << 20, ..FsOptions::default() };
    let hooked = Arc::new(hooked);
    let fs = LocalFs::open(hooked.clone(), options, env).unwrap();
    let mut files = Files::new();
    fill(&fs, &mut files, 130);
    let before = statfs(&fs);
    // Each request of the device takes long: a turn empties little.
    hooked.set_hook(move |_, serve| {
        clock.advance(Duration::from_millis(100));
        serve()
    });
    let ResizeAnswer::Left(first) = ask(&fs, SHORT).unwrap() else { panic!("it takes long") };
    let emptied = (0..100).find(|_| match ask(&fs, SHORT).unwrap() {
        ResizeAnswer::Left(left) => left < first,
        answer => panic!("it takes long: {answer:?}"),
    });
    assert!(emptied.is_some(), "turns empty some: {first}");
    let after = statfs(&fs);
    assert_eq!(after.blocks, before.blocks);
    let lost = before.blocks_available.saturating_sub(after.blocks_available);
    assert!(lost <= 4 * 64, "{before:?} {after:?}");
    assert_eq!(superblock(&device).size, MEDIUM);
    holds(&fs, &files, "after some turns");
    // What is written now may lie anywhere again.
    for n in 0..30 {
        make(&fs, &mut files, format!("again {n}"), large(n));
    }
    sync(&fs);
    holds(&fs, &files, "after more writes");
    fs.close().unwrap();
    drop(fs);
    assert_clean(&as_device(&device));
}

#[test]
fn data_that_cannot_be_read_keeps_the_volume_its_size() {
    let device = volume(MEDIUM);
    let fs = open(device.clone(), false);
    let mut files = Files::new();
    fill(&fs, &mut files, 130);
    fs.close().unwrap();
    drop(fs);
    let sb = superblock(&device);
    // A block of the last file's, behind the new end.
    let mut block = AlignedBuf::zeroed(4096);
    let damaged = (SHORT..sb.segments_offset + u64::from(sb.segment_count) * sb.segment_len)
        .step_by(4096)
        .find(|at| {
            device.read(*at, &mut block).unwrap();
            block.iter().all(|byte| *byte == 128)
        });
    let hooked = Arc::new(HookedDevice::new(as_device(&device)));
    hooked.set_unreadable(damaged);
    assert!(damaged.is_some(), "data lies behind the new end");
    let fs = open(hooked.clone(), false);
    assert!(matches!(resize(&fs, SHORT), Ok(ResizeAnswer::Stuck(_))));
    assert_eq!(superblock(&device).size, MEDIUM);
    hooked.set_unreadable([]);
    holds(&fs, &files, "after it was refused");
    assert_eq!(resize(&fs, SHORT), Ok(ResizeAnswer::Done(SHORT)));
    holds(&fs, &files, "when it could be read");
    fs.close().unwrap();
    drop(fs);
    assert_clean(&as_device(&device));
}

/// The home store lies where the volume is to end, and moves with everything in it.
#[test]
fn the_home_store_moves_out_of_the_way() {
    let device = volume(MEDIUM);
    let fs = open(device.clone(), false);
    let (mut ballast, mut files) = (Files::new(), Files::new());
    for n in 0..110 {
        make(&fs, &mut ballast, format!("ballast {n}"), large(n));
    }
    sync(&fs);
    for n in 0..1500 {
        make(&fs, &mut files, format!("small {n} {}", "x".repeat(100)), contents(n - n % 3 + 1));
        if n % 100 == 0 {
            sync(&fs);
        }
    }
    fs.close().unwrap();
    drop(fs);
    let fs = open(device.clone(), false);
    for name in ballast.keys() {
        let ino = ME.call(|cx| fs.lookup(cx, ROOT, name.as_bytes())).unwrap().attr.unwrap().ino;
        ME.call(|cx| fs.unlink(cx, ROOT, name.as_bytes())).unwrap();
        fs.forget(ino, 1);
    }
    sync(&fs);
    let sb = superblock(&device);
    let end = ((SHORT - sb.segments_offset) / sb.segment_len) as u32;
    let behind = |sb: &Superblock| {
        let [first, _] = home_map(&as_device(&device), &sb.geometry());
        let map = first.unwrap();
        map.units.into_iter().flatten().chain(map.spare).filter(|s| *s >= end).count()
    };
    assert!(behind(&sb) > 0, "the home store lies behind the new end");
    device.restart_trace();
    assert_eq!(resize(&fs, SHORT), Ok(ResizeAnswer::Done(SHORT)));
    let (len, mut rng) = (device.trace_len(), SimRng::new(3));
    let mut points = device.flush_points();
    points.extend((0..20).map(|_| rng.index(len + 1)));
    for point in points {
        let image = Arc::new(device.crash_image(point, &mut rng));
        assert_clean(&as_device(&image));
        let fs = open(image.clone(), false);
        holds(&fs, &files, &format!("after a crash at {point}"));
        assert_eq!(resize(&fs, SHORT), Ok(ResizeAnswer::Done(SHORT)));
        fs.close().unwrap();
        drop(fs);
        assert_clean(&as_device(&image));
    }
    assert_eq!(behind(&superblock(&device)), 0);
    fs.close().unwrap();
    drop(fs);
    assert_clean(&as_device(&device));
}
