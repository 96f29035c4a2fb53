//! Data that the device does not give back as it was written.

use crate::cache::batch::Batch;
use crate::file::tests::*;
use ferry_device::AlignedBuf;

/// A file of 40 blocks of which block 17 is spoiled on the device.
fn spoiled() -> (Volume, Arc<Inode>) {
    let volume = Volume::new(64, 256 << 10, 8 << 20, false);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(1, 40 * 4096));
    volume.store.write_back_all().unwrap();
    let place = volume.store.window(&file, 0).unwrap().place(17);
    let crate::extents::Place::Data(dev, _) = place else {
        panic!("block 17 is not mapped: {place:?}")
    };
    let mut block = AlignedBuf::zeroed(4096);
    volume.dev.read(dev * BLOCK, &mut block).unwrap();
    block[99] ^= 4;
    volume.dev.write(dev * BLOCK, &block).unwrap();
    volume.evict();
    (volume, file)
}

/// Only reads that touch the block fail.
fn check(volume: &Volume, file: &Arc<Inode>) {
    let good = pattern(1, 40 * 4096);
    let mut out = vec![0; 4096];
    for block in 0..40 {
        volume.evict();
        let read = volume.store.read(file, block * BLOCK, &mut out);
        if block == 17 {
            let error = read.unwrap_err();
            assert_eq!(error.errno(), Errno(libc::EIO));
            assert!(matches!(error, FsError::Data { ino: 5, offset, .. } if offset == 17 * BLOCK));
        } else {
            assert_eq!(read.unwrap(), 4096);
            assert!(out == good[block as usize * 4096..][..4096], "block {block}");
        }
    }
    assert!(volume.store.read(file, 16 * BLOCK, &mut vec![0; 3 * 4096]).is_err());
}

#[test]
fn a_damaged_block_is_an_error_there_and_nowhere_else() {
    let (volume, file) = spoiled();
    check(&volume, &file);
    assert!(volume.store.stats().damaged_blocks > 0);
    // A write over part of it needs the rest; over all of it does not, and mends it.
    let part = volume.store.write(&file, At::Offset(17 * BLOCK + 5), b"part", Touch::Nothing);
    assert_eq!(part.unwrap_err().errno(), Errno(libc::EIO));
    volume.write(&file, 17 * BLOCK, &pattern(1, 40 * 4096)[17 * 4096..18 * 4096]);
    volume.store.write_back(&file).unwrap();
    volume.evict();
    assert!(volume.read(&file, 0, 40 * 4096) == pattern(1, 40 * 4096));
}

#[test]
fn the_cleaner_moves_a_damaged_block_and_it_stays_damaged() {
    let (volume, file) = spoiled();
    let before = volume.store.window(&file, 0).unwrap().place(17);
    for segment in volume.store.table.open_segments() {
        volume.store.table.close_segment(segment);
    }
    volume.store.clean_once().unwrap();
    assert_ne!(volume.store.window(&file, 0).unwrap().place(17), before);
    check(&volume, &file);
    volume.check();
}

#[test]
fn a_failed_write_is_told_to_each_handle_once() {
    let volume = Volume::new(64, 256 << 10, 8 << 20, false);
    let file = volume.create(5);
    let (a, b) = (file.file.errors.sample(), file.file.errors.sample());
    assert_eq!(file.file.errors.tell(&a), None);
    let batch = Batch::start(7..8, &Arc::default());
    batch.add_file(file.clone());
    batch.land(Err(JournalError::Closed));
    batch.set_logged();
    assert!(!batch.is_over(), "what the device does not have stays in memory");
    assert_eq!(file.file.errors.tell(&a), Some(Errno(libc::EIO)));
    assert_eq!(file.file.errors.tell(&a), None);
    assert_eq!(file.file.errors.tell(&b), Some(Errno(libc::EIO)));
    let later = file.file.errors.sample();
    assert_eq!(file.file.errors.tell(&later), None);
    // An error that nobody has been told yet is told to who opens the file next.
    file.file.errors.add(Errno(libc::ENOSPC));
    let next = file.file.errors.sample();
    assert_eq!(file.file.errors.tell(&next), Some(Errno(libc::ENOSPC)));
    assert_eq!(file.file.errors.tell(&next), None);
    assert_eq!(file.file.errors.tell(&later), Some(Errno(libc::ENOSPC)));
}

#[test]
fn an_extent_where_no_volume_has_data_is_damage() {
    let volume = Volume::new(64, 256 << 10, 8 << 20, false);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(1, 3 * 4096));
    volume.store.write_back_all().unwrap();
    for block in [0, u64::MAX, u64::MAX - 1, 1 << 60] {
        volume.evict();
        let journal = volume.store.journal().unwrap();
        let mut txn = journal.begin(Credits { keys: 1, bytes: 256, urgent: false }).unwrap();
        let extent = keys::Extent::Data { block, crcs: vec![1; 3] };
        txn.put(&keys::extent(5, 0), &extent.encode());
        txn.commit();
        let error = volume.store.read(&file, 0, &mut vec![0; 4096]).unwrap_err();
        assert_eq!(error.errno(), Errno(libc::EIO), "block {block:#x}");
    }
}
