//! What lies between taking dirty data, logging it, and its landing on the device.

use crate::file::tests::*;
use crate::inode::extents_right::ExtentsGuard;

#[test]
fn small_contents_stay_in_memory_until_they_are_logged() {
    let volume = Volume::new(16, 1 << 20, 1 << 20, false);
    let file = volume.create(10);
    volume.write(&file, 0, b"hello");
    let mut cargo = volume.store.cargo(None, Busy::Wait);
    let guard = ExtentsGuard::lock(&file);
    let work = volume
        .store
        .take(guard, 0..u64::MAX / BLOCK, &mut cargo, &volume.journal)
        .unwrap()
        .unwrap();
    volume.evict();
    assert_eq!(volume.read(&file, 0, 5), b"hello");
    volume.store.send(vec![work], cargo, &volume.journal).unwrap();
    volume.evict();
    assert_eq!(volume.read(&file, 0, 5), b"hello");
}

#[test]
fn a_file_that_outgrows_its_record_while_that_is_logged_leaves_it() {
    let volume = Volume::new(16, 1 << 20, 1 << 20, false);
    let file = volume.create(10);
    volume.write(&file, 0, b"hello");
    let mut cargo = volume.store.cargo(None, Busy::Wait);
    let guard = ExtentsGuard::lock(&file);
    let work = volume
        .store
        .take(guard, 0..u64::MAX / BLOCK, &mut cargo, &volume.journal)
        .unwrap()
        .unwrap();
    volume.write(&file, 10_000, b"far");
    volume.store.send(vec![work], cargo, &volume.journal).unwrap();
    volume.store.write_back(&file).unwrap();
    assert_eq!(volume.read(&file, 0, 5), b"hello");
    let state = file.state.read();
    assert!(state.logged.inline.is_none() && state.logged.blocks == 2, "{:?}", state.logged);
    drop(state);
    volume.check();
}

#[test]
fn data_that_has_landed_stays_in_memory_until_it_is_logged() {
    let volume = Volume::new(16, 1 << 20, 8 << 20, false);
    let (first, second) = (volume.create(10), volume.create(11));
    for file in [&first, &second] {
        volume.write(file, 0, &pattern(file.ino, 8192));
    }
    std::thread::scope(|scope| {
        // Both are in one batch, which lands with the first one's transaction; the second one's
        // waits for this lock.
        let state = second.state.read();
        let done = scope.spawn(|| volume.store.write_back_all());
        while volume.store.is_dirty(&first) {
            std::thread::yield_now();
        }
        volume.evict();
        let there = second.file.pages.read().has(0);
        drop(state);
        done.join().unwrap().unwrap();
        assert!(there, "evicted before it was mapped");
    });
    volume.evict();
    assert!(volume.read(&second, 0, 8192) == pattern(11, 8192));
}
