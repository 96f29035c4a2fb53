//! Memory: the cache keeps its bound, small files cost little, writers wait when too much is dirty.

use crate::file::read::Misses;
use crate::file::tests::*;
use std::sync::mpsc;

#[test]
fn a_sparse_file_written_at_random_stays_inside_the_cache() {
    let volume = Volume::new(200, 1 << 20, 4 << 20, false);
    let file = volume.create(5);
    let mut x = 1_u64;
    for i in 0..6000_u64 {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let block = (x >> 20) % (100 << 18);
        volume.write(&file, block * BLOCK, &i.to_le_bytes());
        let used = volume.store.cache.used();
        assert!(used < 6 << 20, "{used} bytes after {i} writes");
    }
    assert!(volume.store.stats().evicted > 1000);
}

/// The extent map of a file is loaded window by window, and one search may pass them all.
#[test]
fn a_search_for_holes_stays_inside_the_cache() {
    const WINDOW: u64 = 4 << 20;
    let volume = Volume::new(200, 1 << 20, 1 << 20, false);
    let file = volume.create(5);
    for window in 0..400 {
        volume.write(&file, (window + 1) * WINDOW - BLOCK, &[7; BLOCK as usize]);
    }
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    let (mut at, mut found) = (0, 0);
    while let Ok(data) = volume.store.seek(&file, at, libc::SEEK_DATA) {
        at = volume.store.seek(&file, data, libc::SEEK_HOLE).unwrap();
        found += 1;
        let used = volume.store.cache.used();
        assert!(used < 2 << 20, "{used} bytes after {found} windows");
    }
    assert_eq!((at, found), (400 * WINDOW, 400));
}

#[test]
fn small_files_take_little_and_give_it_back() {
    let volume = Volume::new(200, 1 << 20, 32 << 20, false);
    for ino in 10..1010 {
        let file = volume.create(ino);
        volume.write(&file, 0, &pattern(ino, 3000));
    }
    let used = volume.store.cache.used();
    assert!(used < 1000 * 3500, "{used} bytes for 1000 files of 3000");
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    volume.inodes.known.lock().clear();
    assert_eq!(volume.store.cache.used(), 0, "forgotten inodes leave nothing behind");
    assert_eq!(volume.store.cache.dirty(), 0);
    // Files up to 2 KiB are in their records: nothing is cached beside these.
    let file = volume.create(5000);
    volume.write(&file, 0, &pattern(1, 2048));
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    assert_eq!(volume.store.cache.used(), 0);
    let blocks = {
        let state = file.state.read();
        (state.rec.blocks, state.logged.blocks)
    };
    assert_eq!(blocks, (1, 0));
    assert!(volume.read(&file, 0, 5000) == pattern(1, 2048));
}

#[test]
fn a_writer_that_is_too_fast_is_held() {
    let volume = Volume::new(200, 1 << 20, 8 << 20, true);
    let file = volume.create(5);
    let data = pattern(3, 1 << 20);
    for i in 0..100 {
        volume.write(&file, i << 20, &data);
        assert!(volume.store.cache.dirty() <= 6 << 20);
    }
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    for i in (0..100).rev() {
        assert!(volume.read(&file, i << 20, 1 << 20) == data);
    }
    assert!(volume.store.cache.used() < 12 << 20);
    volume.store.close().unwrap();
    volume.check();
}

#[test]
fn a_sequential_reader_is_read_ahead() {
    let volume = Volume::new(64, 1 << 20, 8 << 20, false);
    let file = volume.create(5);
    let data = pattern(3, 4 << 20);
    volume.write(&file, 0, &data);
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    volume.evict();
    let mut reads = 0;
    let mut seen = volume.store.stats().read_bytes;
    for i in 0..1024 {
        assert!(volume.read(&file, i << 12, 4096) == data[i as usize * 4096..][..4096]);
        let now = volume.store.stats().read_bytes;
        reads += u32::from(now != seen);
        seen = now;
    }
    assert!(reads < 30, "{reads} device reads for 1024 blocks");
    assert_eq!(seen, 4 << 20, "each block comes once");
}

#[test]
fn a_file_that_is_cut_and_written_again_leaves_no_trail() {
    let volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let file = volume.create(5);
    for _ in 0..6000 {
        volume.write(&file, 0, &[1; 5000]);
        volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
        volume.store.set_size(&file, 0, &mut |_| ()).unwrap();
    }
    assert!(volume.store.cache.entries() <= 4, "{} entries", volume.store.cache.entries());
    volume.check();
}

#[test]
fn what_is_left_of_a_folio_whose_dirty_block_was_cut_off_is_evicted() {
    let volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(3, 64 << 10));
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    let is_cached = || file.file.pages.read().folio(0).is_some();
    let drive_out = || {
        volume.store.cache.set_limit(1);
        (0..4).for_each(|_| volume.store.cache.shrink_much());
    };
    volume.write(&file, 3 * BLOCK, &[1; BLOCK as usize]);
    drive_out();
    assert!(is_cached(), "a dirty folio stays");
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    volume.store.fallocate(&file, punch, 3 * BLOCK, BLOCK, &mut |_| ()).unwrap();
    drive_out();
    assert!(!is_cached(), "it is clean, and nothing else will bring it back");
}

/// A file of `len` bytes, on the device and not in memory.
fn cold_file(volume: &Volume, ino: Ino, len: usize) -> (Arc<Inode>, Vec<u8>) {
    let (file, data) = (volume.create(ino), pattern(ino, len));
    for (i, chunk) in data.chunks(1 << 20).enumerate() {
        volume.write(&file, (i as u64) << 20, chunk);
    }
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    volume.evict();
    (file, data)
}

/// Reads all of a file `step` bytes at a time.
fn read_through(volume: &Volume, file: &Arc<Inode>, data: &[u8], step: usize) {
    for (i, chunk) in data.chunks(step).enumerate() {
        assert!(volume.read(file, (i * step) as u64, step) == chunk);
    }
}

#[test]
fn a_hot_file_stays_in_memory_while_four_times_the_cache_are_read_once() {
    const MIB: usize = 1 << 20;
    let volume = Volume::new(140, 1 << 20, 16 * MIB, false);
    let (hot, hot_data) = cold_file(&volume, 5, 8 * MIB);
    let (other, other_data) = cold_file(&volume, 6, 2 * MIB);
    let (scanned, scanned_data) = cold_file(&volume, 7, 64 * MIB);
    for _ in 0..2 {
        read_through(&volume, &hot, &hot_data, 16 << 10);
        read_through(&volume, &other, &other_data, 16 << 10);
    }
    read_through(&volume, &scanned, &scanned_data, 4 << 10);
    assert!(volume.store.cache.used() <= 17 * MIB);
    let before = volume.store.stats().read_bytes;
    read_through(&volume, &hot, &hot_data, 16 << 10);
    let missed = volume.store.stats().read_bytes - before;
    assert!(missed <= MIB as u64, "{missed} bytes of 8 MiB were evicted by a scan");
}

#[test]
fn what_is_read_uncached_stays_out_of_the_cache_and_is_what_was_written_last() {
    let volume = Volume::new(64, 1 << 20, 8 << 20, false);
    let (file, mut data) = cold_file(&volume, 5, 16 << 20);
    let windows = || (0..4).for_each(|i| drop(volume.store.window(&file, i).unwrap()));
    windows();
    let (used, evicted) = (volume.store.cache.used(), volume.store.stats().evicted);
    let mut x = 1_u64;
    let mut read_one = |data: &[u8], at: Option<usize>| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = at.unwrap_or((x >> 33) as usize % 4096 * 4096);
        let mut out = vec![0; 4096];
        let got = volume.store.read_as(&file, at as u64, &mut out, Misses::Uncached).unwrap();
        assert!(got == 4096 && out == data[at..at + 4096]);
    };
    (0..500).for_each(|_| read_one(&data, None));
    // Two reads in a row may be near each other, and count as a sequence.
    assert!(volume.store.cache.used() < used + (2 << 20), "{}", volume.store.cache.used());
    assert_eq!(volume.store.stats().evicted, evicted);
    // A block in part dirty, one that was written back meanwhile, and one that somebody cached.
    for at in [5000, 900_000, 9_000_000] {
        volume.write(&file, at as u64, b"newer");
        data[at..at + 5].copy_from_slice(b"newer");
        read_one(&data, Some(at / 4096 * 4096));
        volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
        read_one(&data, Some(at / 4096 * 4096));
        volume.evict();
        windows();
        read_one(&data, Some(at / 4096 * 4096));
    }
}

/// Eviction does not wait for the page lock, and does not give up either: its holder does it.
#[test]
fn what_is_evicted_beside_a_reader_of_its_file_is_gone_when_the_reader_is() {
    let volume = Volume::new(64, 1 << 20, 4 << 20, false);
    let (read, _) = cold_file(&volume, 5, 3 << 20);
    let (other, _) = cold_file(&volume, 6, 3 << 20);
    for block in 0..768 {
        volume.store.fetch_block(&read, block).unwrap();
    }
    let evicted = || volume.store.stats().evicted;
    let before = evicted();
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let (done, wait) = mpsc::channel::<()>();
        let reader = Arc::clone(&read);
        scope.spawn(move || {
            let _pages = reader.file.pages.read();
            tell.send(()).unwrap();
            wait.recv().unwrap();
        });
        told.recv().unwrap();
        for block in 0..768 {
            volume.store.fetch_block(&other, block).unwrap();
            volume.store.cache.shrink();
        }
        let own = evicted() - before;
        assert!(own < 10, "{own} folios were evicted, and the oldest are those of the other file");
        assert!(volume.store.cache.used() > 5 << 20);
        done.send(()).unwrap();
    });
    assert!(evicted() > before + 20);
    assert!(volume.store.cache.used() <= 4 << 20, "{}", volume.store.cache.used());
}

/// Write-back gives the page lock up again and again while it copies. The size that it logs is that
/// of the data it has.
#[test]
fn a_file_that_grows_while_it_is_written_back_has_all_of_its_logged_size() {
    let mut volume = Volume::new(140, 1 << 20, 32 << 20, false);
    let data = pattern(5, 40 << 20);
    volume.create(5);
    for round in 1..9 {
        let file = volume.inodes.inode(5).unwrap().unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (volume, file, data, stop) = (&volume, &file, &data, &stop);
            scope.spawn(move || {
                let mut at = file.state.share().rec.size as usize;
                while !stop.load(Ordering::Acquire) && at + 3000 < data.len() {
                    let chunk = &data[at..at + 3000];
                    at = volume.store.write(file, At::End, chunk, Touch::Nothing).unwrap() as usize;
                }
            });
            while file.state.share().rec.size < round * (3 << 20) {
                std::thread::yield_now();
            }
            volume.store.write_back(Dirty::File(file), Busy::Wait).unwrap();
            stop.store(true, Ordering::Release);
        });
        drop(file);
        volume.journal.force_durable_point().unwrap();
        volume.reopen(false);
        let file = volume.inodes.inode(5).unwrap().unwrap();
        let size = file.state.share().rec.size as usize;
        assert!(size >= (round as usize) * (3 << 20));
        read_through(&volume, &file, &data[..size], 1 << 20);
    }
}
