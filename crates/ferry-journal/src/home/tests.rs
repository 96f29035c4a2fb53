//! What only a failure at one moment of redb's shows.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::file::HomeFile;
use crate::Geometry;
use crate::disk::Disk;
use ferry_device::MemDevice;
use redb::StorageBackend;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SEGMENT: u64 = 64 * 1024;

fn geometry() -> Geometry {
    Geometry {
        volume_id: [1; 16],
        hash_key: [7; 16],
        log_offset: 0,
        log_len: 0,
        home_map_offsets: [0, 8192],
        home_map_len: 8192,
        segments_offset: SEGMENT,
        segment_len: SEGMENT,
        segment_count: 8,
    }
}

/// A page as the database's are: one key, one value.
fn page(content: u8) -> [u8; 4096] {
    let mut page = [content; 4096];
    page[..12].copy_from_slice(&[1, 0, 1, 0, 20, 0, 0, 0, 0, 16, 0, 0]);
    page
}

/// A database that failed had cut the file off, and no map that says so is on the device.
#[test]
fn segments_in_the_reloaded_map_are_not_released() {
    let geo = geometry();
    let disk = Arc::new(Disk::new(Arc::new(MemDevice::new(9 * SEGMENT))));
    let file = HomeFile::format(&disk, &geo, &[0, 1, 2, 3]).unwrap();
    let unit = file.unit_bytes();
    let user = file.user();
    user.set_len(3 * unit).unwrap();
    for n in 0..3 {
        user.write(n * unit, &page(n as u8 + 1)).unwrap();
    }
    file.settle().unwrap();
    user.set_len(unit).unwrap();
    file.detach_users();
    file.reload(false).unwrap();
    file.settle().unwrap();
    assert!(file.take_dropped().is_empty());
    let mut bytes = [0; 4096];
    file.user().read(2 * unit, &mut bytes).unwrap();
    assert_eq!(bytes, page(3));
    assert_eq!(file.segments().len(), 4);
}

/// redb makes room in its cache while threads read: they write, beside a checkpoint and its syncs.
#[test]
fn threads_that_write_beside_syncs_lose_nothing() {
    const PAGES: u64 = 6;
    let geo = geometry();
    let disk = Arc::new(Disk::new(Arc::new(MemDevice::new(9 * SEGMENT))));
    let file = HomeFile::format(&disk, &geo, &[0, 1, 2, 3, 4, 5]).unwrap();
    file.user().set_len(4 * PAGES * 4096).unwrap();
    let written = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| {
            while !written.load(Ordering::Acquire) {
                file.user().sync_data().unwrap();
            }
        });
        let write = |thread: u64, round: u64| {
            for n in 0..PAGES {
                let (at, content) =
                    ((thread * PAGES + n) * 4096, page((thread * 7 + n + round) as u8));
                file.user().write(at, &content).unwrap();
                let mut bytes = [0; 4096];
                file.user().read(at, &mut bytes).unwrap();
                assert!(bytes == content, "round {round}, thread {thread}, page {n}");
            }
        };
        let writing: Vec<_> = (1..4)
            .map(|t| scope.spawn(move || (0..2000).for_each(|round| write(t, round))))
            .collect();
        let ended: Vec<_> = writing.into_iter().map(|thread| thread.join()).collect();
        written.store(true, Ordering::Release);
        syncing.join().unwrap();
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    for n in PAGES..4 * PAGES {
        let mut bytes = [0; 4096];
        file.user().read(n * 4096, &mut bytes).unwrap();
        assert!(bytes == page((n / PAGES * 7 + n % PAGES + 1999) as u8), "page {n}");
    }
}
