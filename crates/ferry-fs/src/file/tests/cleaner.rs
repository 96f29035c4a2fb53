//! The cleaner: blocks that it moves keep their contents, and reserved space can always be had.

use crate::file::tests::*;
use crate::inode::extents_right::ExtentsGuard;
use crate::space::pool::Need;
use crate::space::segments::Stream;
use crate::writeback::cleaner::Live;
use ferry_device::{AlignedBuf, HookedDevice, Op};
use std::io;
use std::sync::mpsc;

/// A file that fills half of the volume (a third of one so small is kept for metadata and the
/// cleaner) is overwritten at random, block by block, five times over.
#[test]
fn random_overwrites_on_a_filling_volume_lose_nothing_and_never_lack_space() {
    let volume = Volume::new(64, 256 << 10, 1 << 20, false);
    let blocks = 50 * 64 * 64 / 100_u64;
    let file = volume.create(5);
    let mut version = vec![0_u64; blocks as usize];
    let block_of = |block: u64, version: u64| pattern(block << 20 | version, 4096);
    for block in 0..blocks {
        volume.write(&file, block * BLOCK, &block_of(block, 0));
    }
    let mut x = 88_172_645_463_325_252_u64;
    for i in 0..5 * blocks {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let block = x % blocks;
        version[block as usize] += 1;
        volume.write(&file, block * BLOCK, &block_of(block, version[block as usize]));
        if i % 64 == 0 {
            volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
        }
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    volume.evict();
    for block in 0..blocks {
        let read = volume.read(&file, block * BLOCK, 4096);
        assert!(read == block_of(block, version[block as usize]), "block {block}");
    }
    let stats = volume.store.stats();
    assert!(stats.cleaned_segments > 0 && stats.no_room == 0, "{stats:?}");
    volume.check();
}

#[test]
fn small_files_of_a_segment_move_together_and_dead_ones_do_not() {
    let volume = Volume::new(64, 256 << 10, 8 << 20, false);
    for ino in 10..90 {
        let file = volume.create(ino);
        volume.write(&file, 0, &pattern(ino, 9000));
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    for ino in (10..90).filter(|i| i % 3 != 0) {
        volume.remove(ino);
    }
    let before = volume.store.stats();
    for _ in 0..20 {
        volume.store.clean_once().unwrap();
    }
    let moved = (volume.store.stats().moved_bytes - before.moved_bytes) / BLOCK;
    assert!(moved > 0);
    volume.evict();
    for ino in (10..90).filter(|i| i % 3 == 0) {
        let file = volume.inodes.inode(ino).unwrap().unwrap();
        assert!(volume.read(&file, 0, 9000) == pattern(ino, 9000), "file {ino}");
    }
    volume.check();
}

#[test]
fn a_segment_without_its_summaries_is_cleaned_all_the_same() {
    let mut volume = Volume::new(64, 256 << 10, 8 << 20, false);
    for ino in 10..60 {
        let file = volume.create(ino);
        volume.write(&file, 0, &pattern(ino, 9000));
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    // What is not yet named by a summary is forgotten here, as in a crash.
    volume.reopen(false);
    for ino in (10..60).filter(|i| i % 2 == 0) {
        volume.remove(ino);
    }
    let (used, live) = (volume.store.table.used().0, volume.store.table.open_segments());
    for segment in live {
        volume.store.table.close_segment(segment);
    }
    for _ in 0..10 {
        volume.store.clean_once().unwrap();
    }
    assert_eq!(volume.store.table.used().0, used);
    assert!(volume.store.stats().moved_bytes >= used * BLOCK);
    volume.evict();
    for ino in (10..60).filter(|i| i % 2 == 1) {
        let file = volume.inodes.inode(ino).unwrap().unwrap();
        assert!(volume.read(&file, 0, 9000) == pattern(ino, 9000), "file {ino}");
    }
    volume.check();
}

#[test]
fn emptied_segments_go_back_to_the_host() {
    let volume = Volume::new(300, 1 << 20, 8 << 20, false);
    let file = volume.create(5);
    for i in 0..200 {
        volume.write(&file, i << 20, &pattern(i, 1 << 20));
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    let full = volume.dev.resident();
    volume.remove(5);
    volume.store.make_room().unwrap();
    volume.journal.force_durable_point().unwrap();
    volume.store.space.reap_now();
    assert!(
        volume.dev.resident() + (120 << 20) < full,
        "{} of {full} bytes remain",
        volume.dev.resident()
    );
    assert_eq!(volume.store.totals().live, 0);
}

/// Its blocks stay where they are, and the cleaner goes on.
#[test]
fn a_file_whose_record_is_damaged_does_not_stop_the_cleaner() {
    let volume = Volume::new(20, 256 << 10, 8 << 20, false);
    let inos = 10..150;
    for ino in inos.clone() {
        let file = volume.create(ino);
        volume.write(&file, 0, &pattern(ino, 9000));
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    for ino in inos.clone().filter(|i| i % 3 != 0) {
        volume.remove(ino);
    }
    let bad = 12;
    let whole = volume.journal.get(&keys::inode(bad)).unwrap().unwrap();
    let put = |value: &[u8]| {
        let mut txn = volume.journal.begin(Credits { keys: 1, bytes: 400, urgent: false }).unwrap();
        txn.put(&keys::inode(bad), value);
        txn.commit();
        volume.inodes.known.lock().remove(&bad);
    };
    put(b"no record");
    volume.journal.force_durable_point().unwrap();
    for segment in volume.store.table.open_segments() {
        volume.store.table.close_segment(segment);
    }
    let before = volume.store.stats().cleaned_segments;
    for _ in 0..4 {
        volume.store.tidy().unwrap();
        volume.journal.force_durable_point().unwrap();
    }
    assert!(volume.store.stats().cleaned_segments > before + 1);
    put(&whole);
    volume.evict();
    for ino in inos.filter(|i| i % 3 == 0) {
        let file = volume.inodes.inode(ino).unwrap().unwrap();
        assert!(volume.read(&file, 0, 9000) == pattern(ino, 9000), "file {ino}");
    }
    volume.check();
}

/// What write-back took is still known where it cannot be mapped, so that it becomes dirty again.
#[test]
fn data_that_cannot_be_mapped_becomes_dirty_again() {
    use crate::writeback::batch::Contents;
    use crate::writeback::batch::Taken;
    use crate::writeback::batch::Work;
    let volume = Volume::new(64, 256 << 10, 8 << 20, false);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(5, 9000));
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    let mut txn = volume.journal.begin(Credits { keys: 1, bytes: 400, urgent: false }).unwrap();
    txn.put(&keys::extent(5, 0), b"no extent");
    txn.commit();
    volume.evict();
    let work = Work {
        guard: crate::inode::extents_right::ExtentsGuard::lock(&file),
        runs: vec![Taken { block: 1, at: 0, len: 2, from: None }],
        contents: Contents::Extents,
        held: 0,
        over_hole: 0,
        size: None,
        next: None,
        retained_crcs: Vec::new(),
    };
    let chunk =
        volume.store.table.allocate(crate::space::segments::Stream::New, 2, &volume.store.space);
    let failed =
        volume.store.edits(work, chunk.as_ref(), &[1, 2]).err().expect("the extents are damaged");
    assert_eq!(failed.0.runs.len(), 1, "{}", failed.1);
}

/// Two chunks of one segment, of which the one that ends it is written first.
#[test]
fn entries_too_late_for_a_summary_are_kept_in_memory() {
    let volume = Volume::new(64, 256 << 10, 8 << 20, false);
    let (table, space) = (&volume.store.table, &volume.store.space);
    let first = table.allocate(Stream::New, 40, space).unwrap();
    let last = table.allocate(Stream::New, 64, space).unwrap();
    assert_eq!(
        (first.segment, first.at + first.len),
        (last.segment, last.at),
        "they lie in one segment"
    );
    let mut buf = AlignedBuf::zeroed(128 * BLOCK as usize);
    table.seal(&last, &[(8, 0, last.len)], &mut buf);
    table.seal(&first, &[(7, 0, first.len)], &mut buf);
    let next = table.allocate(Stream::New, 1, space).unwrap();
    assert_ne!(next.segment, first.segment);
    let entries: Vec<_> =
        table.unsummarized_entries(first.segment).iter().map(|e| (e.ino, e.at, e.len)).collect();
    assert_eq!(entries, [(7, first.at, first.len)]);
}

/// Between two batches of a file the cleaner holds nothing. If the file is cut off then, its
/// segment becomes free, and the next batch may go there: what was live is not there any more, and
/// to wait for it would be to wait for oneself.
#[test]
fn the_cleaner_does_not_wait_for_its_own_batch_after_a_truncation() {
    let volume = Volume::new(64, 256 << 10, 8 << 20, false);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(1, 20 * 4096));
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    let segment = volume.store.table.open_segments()[0];
    volume.store.table.close_segment(segment);
    let live = vec![Live { ino: 5, block: 0, at: 0, len: 20 }];
    while volume.store.space.take(Need::Clean).is_some() {}
    volume.store.set_size(&file, 0, &mut |_| ()).unwrap();
    volume.store.force_durable_point(&volume.journal).unwrap();
    let (tell, told) = mpsc::channel();
    let (store, journal) = (Arc::clone(&volume.store), Arc::clone(&volume.journal));
    std::thread::spawn(move || {
        let mut live = live;
        while !live.is_empty() {
            store.move_some(ExtentsGuard::lock(&file), segment, &mut live, &journal).unwrap();
        }
        tell.send(store.stats().moved_bytes).unwrap();
    });
    let moved = told.recv_timeout(Duration::from_secs(20)).expect("the cleaner waits for nothing");
    assert_eq!(moved, 0);
    assert_eq!(volume.store.stats().in_flight_bytes, 0);
}

/// A device that, when it is told to fail flushes, loses at a flush what no flush before has
/// covered.
struct Failing {
    dev: Arc<HookedDevice>,
    flushes: Arc<AtomicBool>,
}

impl Failing {
    fn volume() -> (Volume, Self) {
        let mut failing = None;
        let volume = Volume::on(64, 256 << 10, 8 << 20, false, |inner| {
            let made = Self::around(inner);
            let dev = made.dev.clone();
            failing = Some(made);
            dev
        });
        (volume, failing.expect("made just now"))
    }

    fn around(inner: Arc<MemDevice>) -> Self {
        let dev = Arc::new(HookedDevice::new(inner.clone()));
        let flushes = Arc::new(AtomicBool::new(false));
        let fails = Arc::clone(&flushes);
        // What was there before each write since the last flush.
        let unflushed = Mutex::new(Vec::new());
        dev.set_hook(move |request, serve| {
            match request.op {
                Op::Write => {
                    let mut before = AlignedBuf::zeroed(request.len as usize);
                    inner.read(request.offset, &mut before)?;
                    serve()?;
                    unflushed.lock().push((request.offset, before));
                    return Ok(());
                }
                Op::Flush => {
                    let unflushed = std::mem::take(&mut *unflushed.lock());
                    if fails.load(Ordering::Relaxed) {
                        for (offset, before) in unflushed.iter().rev() {
                            inner.write(*offset, before)?;
                        }
                        return Err(io::Error::from_raw_os_error(libc::EIO));
                    }
                }
                _ => {}
            }
            serve()
        });
        Self { dev, flushes }
    }
}

/// A volume with a durable file of 40 blocks, in no memory and in a segment that the cleaner may
/// take.
fn resting() -> (Volume, Failing, Arc<Inode>) {
    let (volume, failing) = Failing::volume();
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(1, 40 * 4096));
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    volume.journal.force_durable_point().unwrap();
    for segment in volume.store.table.open_segments() {
        volume.store.table.close_segment(segment);
    }
    volume.evict();
    (volume, failing, file)
}

#[test]
fn blocks_moved_by_a_failed_write_stay_readable() {
    let (volume, failing, file) = resting();
    failing.dev.fail_after(&[Op::Write], 0);
    volume.store.clean_once().unwrap();
    assert!(volume.store.stats().moved_bytes > 0);
    assert!(volume.read(&file, 0, 40 * 4096) == pattern(1, 40 * 4096));
    assert!(volume.journal.force_durable_point().is_err());
    for block in 0..40 {
        volume.evict();
        let read = volume.read(&file, block * BLOCK, 4096);
        assert!(read == pattern(1, 40 * 4096)[block as usize * 4096..][..4096], "block {block}");
    }
    assert_eq!(volume.store.stats().damaged_blocks, 0);
}

/// Moved twice, of which neither is durable.
#[test]
fn blocks_moved_before_a_failed_flush_stay_readable() {
    let (volume, failing, file) = resting();
    failing.flushes.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        volume.store.clean_once().unwrap();
        for segment in volume.store.table.open_segments() {
            volume.store.table.close_segment(segment);
        }
    }
    assert_eq!(volume.store.stats().moved_bytes, 2 * 40 * BLOCK);
    assert!(volume.journal.force_durable_point().is_err());
    volume.evict();
    assert!(volume.read(&file, 0, 40 * 4096) == pattern(1, 40 * 4096));
    assert_eq!(volume.store.stats().damaged_blocks, 0);
}

#[test]
fn old_locations_are_forgotten_when_the_new_ones_are_durable() {
    let (volume, _, _) = resting();
    volume.store.clean_once().unwrap();
    assert_eq!(volume.store.moves.len(), 1);
    volume.journal.force_durable_point().unwrap();
    assert_eq!(volume.store.moves.len(), 0);
}

/// What is under way is waited for, so nothing that comes to nothing may count as that.
#[test]
fn an_unused_batch_of_the_cleaner_is_given_back() {
    let (volume, _, file) = resting();
    let mut txn = volume.journal.begin(Credits { keys: 1, bytes: 400, urgent: false }).unwrap();
    txn.put(&keys::extent(5, 0), b"no extent");
    txn.commit();
    volume.evict();
    let mut live = vec![Live { ino: 5, block: 0, at: 0, len: 20 }];
    let guard = ExtentsGuard::lock(&file);
    volume.store.move_some(guard, 0, &mut live, &volume.journal).unwrap_err();
    assert_eq!(volume.store.stats().in_flight_bytes, 0);
    assert!(!volume.store.table.wait_for_chunk(), "nobody has one");
}
