//! Memory: the cache keeps its bound, small files cost little, writers wait when too much is dirty.

use crate::file::tests::*;

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
    volume.store.write_back(&file).unwrap();
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
    volume.store.write_back_all().unwrap();
    volume.inodes.known.lock().clear();
    assert_eq!(volume.store.cache.used(), 0, "forgotten inodes leave nothing behind");
    assert_eq!(volume.store.cache.dirty(), 0);
    // Files up to 2 KiB are in their records: nothing is cached beside these.
    let file = volume.create(5000);
    volume.write(&file, 0, &pattern(1, 2048));
    volume.store.write_back_all().unwrap();
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
    volume.store.write_back(&file).unwrap();
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
    volume.store.write_back(&file).unwrap();
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
        volume.store.write_back(&file).unwrap();
        volume.store.set_size(&file, 0, &mut |_| ()).unwrap();
    }
    assert!(volume.store.cache.entries() <= 4200, "{} entries", volume.store.cache.entries());
    volume.check();
}
