//! What only a failure at one moment of redb's shows.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::file::{HomeFile, Opening};
use super::tree::PageSource;
use crate::Geometry;
use crate::disk::Disk;
use ferry_device::{BlockDevice, HookedDevice, MemDevice, Op};
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

const PAGES: u64 = 200;
/// Large segments, so that windows of neighbours are whole.
const LARGE: u64 = 1 << 20;

/// A home store of pages that nothing in memory knows, and the device below it.
fn cold() -> (Arc<HomeFile>, Arc<HookedDevice>) {
    let geo = Geometry { segments_offset: LARGE, segment_len: LARGE, ..geometry() };
    let dev = Arc::new(HookedDevice::new(Arc::new(MemDevice::new(9 * LARGE))));
    let disk = || Arc::new(Disk::new(dev.clone() as Arc<dyn BlockDevice>));
    let file = HomeFile::format(&disk(), &geo, &[0, 1, 2, 3]).unwrap();
    file.user().set_len(PAGES * 4096).unwrap();
    (0..PAGES).for_each(|n| file.user().write(n * 4096, &page(n as u8)).unwrap());
    file.settle().unwrap();
    let file = HomeFile::open(&disk(), &geo, Opening { read_only: false, in_order: false });
    (file.unwrap(), dev)
}

fn read(file: &Arc<HomeFile>, n: u64) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    file.user().read(n * 4096, &mut bytes).unwrap();
    bytes
}

/// Page 0 is the header. The others are read in the order of a directory's inodes: nearly
/// ascending.
fn nearly_ascending() -> impl Iterator<Item = u64> {
    (1..PAGES).map(|n| n ^ 1).filter(|n| (1..PAGES).contains(n))
}

#[test]
fn neighbours_of_blocks_that_are_read_are_read_with_them() {
    let (file, dev) = cold();
    let before = dev.asked(Op::Read);
    for n in nearly_ascending() {
        assert!(read(&file, n) == page(n as u8), "page {n}");
    }
    let asked = dev.asked(Op::Read).requests - before.requests;
    assert!((4..40).contains(&asked), "{asked} reads of the device");
}

#[test]
fn a_lone_block_is_read_by_itself() {
    let (file, dev) = cold();
    read(&file, 5);
    let before = dev.asked(Op::Read);
    read(&file, 60);
    let asked = dev.asked(Op::Read);
    assert_eq!((asked.requests - before.requests, asked.bytes - before.bytes), (1, 4096));
}

#[test]
fn a_block_that_was_written_behind_the_read_of_its_neighbour_is_read_anew() {
    let (file, _dev) = cold();
    (40..44).for_each(|n| assert!(read(&file, n) == page(n as u8)));
    file.user().write(46 * 4096, &page(99)).unwrap();
    file.settle().unwrap();
    assert!(read(&file, 46) == page(99));
    assert!(read(&file, 47) == page(47));
}

#[test]
fn a_block_that_cannot_be_read_costs_its_neighbours_nothing() {
    let (file, dev) = cold();
    let bad = PageSource::device_offset(&*file, 50 * 4096);
    dev.add_unreadable(bad);
    for n in nearly_ascending() {
        assert!(read(&file, n) == page(n as u8), "page {n}");
    }
    assert!(file.bad_copies().contains(&bad));
}
