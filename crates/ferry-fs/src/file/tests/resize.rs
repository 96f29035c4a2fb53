//! Truncation and removal that take many transactions; and what an interrupted one leaves.

use crate::file::tests::*;
use crate::space::pool::usable_blocks;

/// A file of which every extent is one block, on a volume with a small log.
fn scattered(volume: &Volume, blocks: u64) -> Arc<Inode> {
    let file = volume.create(5);
    for block in 0..blocks {
        volume.write(&file, block * 2 * BLOCK, &pattern(block, 4096));
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    file
}

#[test]
fn a_truncation_of_any_size_is_split_into_transactions() {
    let volume = Volume::new(100, 1 << 20, 32 << 20, false);
    let file = scattered(&volume, 12_000);
    volume
        .store
        .set_size(&file, 5 * BLOCK + 17, &mut |rec| rec.mode = libc::S_IFREG | 0o600)
        .unwrap();
    volume.check();
    assert_eq!(volume.store.table.used().0, 3);
    assert_eq!(volume.journal.get(&keys::intent(5)).unwrap(), None);
    volume.store.set_size(&file, 1 << 40, &mut |_| ()).unwrap();
    let mut expected = pattern(0, 4096);
    expected.resize(8192, 0);
    expected.extend(pattern(1, 4096));
    expected.resize(16_384, 0);
    expected.extend(pattern(2, 4096));
    expected.resize(100_000, 0);
    assert!(volume.read(&file, 0, 100_000) == expected);
    assert!(volume.read(&file, (1 << 40) - 10, 100) == [0; 10]);
    assert_eq!(file.state.read().rec.mode, libc::S_IFREG | 0o600);
}

#[test]
fn an_interrupted_truncation_is_finished_at_the_next_mount() {
    let mut volume = Volume::new(100, 1 << 20, 32 << 20, false);
    drop(scattered(&volume, 3000));
    // As the first transaction leaves it: the size is cut, the intent stands, extents remain.
    let mut rec =
        InodeRecord::decode(&volume.journal.get(&keys::inode(5)).unwrap().unwrap()).unwrap();
    rec.size = 100 * BLOCK;
    let mut txn = volume.journal.begin(Credits { keys: 2, bytes: 300, urgent: false }).unwrap();
    txn.put(&keys::inode(5), &rec.encode());
    txn.put(&keys::intent(5), &keys::Number(rec.size).encode());
    txn.commit();
    volume.reopen(false);
    volume.check();
    assert_eq!(volume.store.table.used().0, 50);
    assert_eq!(volume.journal.get(&keys::intent(5)).unwrap(), None);
}

#[test]
fn removing_a_large_file_frees_everything_and_calls_finish_once() {
    let volume = Volume::new(100, 1 << 20, 32 << 20, false);
    let file = scattered(&volume, 12_000);
    let (free, home) = (volume.store.totals().free, volume.store.space.counts().3);
    let mut finished = 0;
    let room = Credits { keys: 1, bytes: 16, urgent: true };
    volume
        .store
        .reclaim(&file, room, &mut |txn| {
            finished += 1;
            txn.delete(&keys::inode(5));
        })
        .unwrap();
    assert_eq!(finished, 1);
    assert_eq!(volume.store.table.used(), (0, 0));
    // It leaves room in the log: checkpoints on the way may have taken segments for the home store,
    // and keep more back for it.
    let segment = usable_blocks(&volume.geometry) as u64 * BLOCK;
    let taken = free + 12_000 * BLOCK - volume.store.totals().free;
    let grown = u64::from(volume.store.space.counts().3 - home);
    assert!(taken.is_multiple_of(segment) && taken / segment <= 2 * grown, "{taken} {grown}");
    volume.check();
}

/// A truncation that failed half-way goes on with the next change of the file, and nothing of
/// what is written meanwhile is lost or mistaken for what was there.
#[test]
fn a_truncation_that_an_error_interrupted_is_finished_by_the_next() {
    let mut volume = Volume::new(100, 1 << 20, 32 << 20, false);
    let file = scattered(&volume, 3000);
    let size = 100 * BLOCK;
    {
        // As the first step leaves it, when the second fails.
        let mut txn =
            volume.journal.begin(Credits { keys: 2, bytes: 4096, urgent: false }).unwrap();
        let mut state = file.state.write();
        (state.rec.size, state.logged.size) = (size, size);
        let mut pages = file.file.pages.write();
        let held = pages.forget(100, u64::MAX / BLOCK);
        assert_eq!(held, 0);
        pages.void = Some(100..crate::store::drop::BLOCKS_END);
        pages.intent = true;
        txn.put(&keys::inode(5), &state.record().encode());
        txn.put(&keys::intent(5), &keys::Number(size).encode());
        txn.commit();
    }
    volume.write(&file, 200 * BLOCK, b"new");
    assert!(volume.read(&file, 100 * BLOCK, 100 * 4096).iter().all(|b| *b == 0));
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    volume.evict();
    assert_eq!(volume.read(&file, 200 * BLOCK, 100), b"new");
    assert_eq!(volume.journal.get(&keys::intent(5)).unwrap(), None);
    assert_eq!(volume.store.table.used().0, 51);
    volume.check();
    drop(file);
    volume.reopen(true);
    let file = volume.inodes.inode(5).unwrap().unwrap();
    assert_eq!(volume.read(&file, 200 * BLOCK, 100), b"new");
}

#[test]
fn a_hole_over_contents_that_outgrow_the_record_is_logged_as_one() {
    let mut volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(1, 2048));
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    volume.write(&file, 74_918, &pattern(2, 116));
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    volume.store.fallocate(&file, punch, 0, 4096, &mut |_| ()).unwrap();
    drop(file);
    volume.reopen(true);
    let file = volume.inodes.inode(5).unwrap().unwrap();
    let mut expected = vec![0; 74_918];
    expected.extend(pattern(2, 116));
    assert!(volume.read(&file, 0, 100_000) == expected);
}

#[test]
fn contents_move_between_record_and_extents() {
    let mut volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let file = volume.create(5);
    let mut model = pattern(1, 1500);
    volume.write(&file, 0, &model);
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    assert!(file.state.read().logged.inline.is_some());
    // A gap behind it: the record's contents must come along.
    volume.write(&file, 9000, b"far");
    model.resize(9000, 0);
    model.extend_from_slice(b"far");
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    assert!(file.state.read().logged.inline.is_none());
    volume.check();
    drop(file);
    volume.reopen(true);
    let file = volume.inodes.inode(5).unwrap().unwrap();
    assert!(volume.read(&file, 0, 10_000) == model);
    // It would fit into the record again, and stays in the block that it has.
    volume.store.set_size(&file, 700, &mut |_| ()).unwrap();
    volume.write(&file, 10, b"new");
    model.truncate(700);
    model[10..13].copy_from_slice(b"new");
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    assert_eq!(volume.store.table.used().0, 1);
    volume.check();
    // Once it had no block, what is written goes into the record.
    volume.store.set_size(&file, 0, &mut |_| ()).unwrap();
    volume.write(&file, 0, &model);
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    assert_eq!(volume.store.table.used().0, 0);
    volume.check();
    // And extended without a write: from 700 bytes to 3000.
    volume.store.set_size(&file, 3000, &mut |_| ()).unwrap();
    model.resize(3000, 0);
    volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
    volume.evict();
    assert!(volume.read(&file, 0, 10_000) == model);
    volume.check();
}

/// A reserved block of a small file stays, whatever is written and however often the file is read
/// from the volume again.
#[test]
fn a_small_file_keeps_its_reserved_block() {
    type Prepare = fn(&Volume, &Arc<Inode>);
    let reserve = |volume: &Volume, file: &Arc<Inode>| {
        let (mode, len) = (libc::FALLOC_FL_KEEP_SIZE, BLOCK);
        volume.store.fallocate(file, mode, 0, len, &mut |_| ()).unwrap();
    };
    let before: [Prepare; 3] = [
        |_, _| (),
        // Contents that are still in memory.
        |volume, file| volume.write(file, 0, &pattern(1, 90)),
        // Contents in the record.
        |volume, file| {
            volume.write(file, 0, &pattern(2, 2048));
            volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
            assert!(file.state.read().logged.inline.is_some());
        },
    ];
    for (case, before) in before.into_iter().enumerate() {
        let mut volume = Volume::new(64, 256 << 10, 4 << 20, false);
        let file = volume.create(5);
        before(&volume, &file);
        reserve(&volume, &file);
        drop(file);
        for round in 0..3 {
            volume.reopen(true);
            let file = volume.inodes.inode(5).unwrap().unwrap();
            volume.write(&file, 0, &pattern(round, 100));
            volume.store.write_back(Dirty::File(&file), Busy::Wait).unwrap();
            let state = file.state.read();
            assert_eq!((state.logged.blocks, &state.logged.inline), (1, &None), "case {case}");
            drop(state);
            assert!(volume.read(&file, 0, 100) == pattern(round, 100), "case {case}");
            volume.check();
        }
    }
}

#[test]
fn fallocated_blocks_can_be_written_on_a_full_volume() {
    let volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let file = volume.create(5);
    volume.store.fallocate(&file, 0, 0, 4 << 20, &mut |_| ()).unwrap();
    assert_eq!(file.state.read().rec.blocks, 1024);
    let other = volume.create(6);
    let mut at = 0;
    while volume.store.write(&other, At::Offset(at), &[7; 4096], Touch::Nothing).is_ok() {
        at += BLOCK;
    }
    let too_much =
        volume.store.fallocate(&other, libc::FALLOC_FL_KEEP_SIZE, 0, 1 << 40, &mut |_| ());
    assert_eq!(too_much.unwrap_err().errno(), Errno(libc::ENOSPC));
    for i in 0..16 {
        volume.write(&file, i << 18, &pattern(i, 1 << 18));
        // Overwriting at once needs space of its own, which a full volume finds by writing back.
        volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    }
    volume.evict();
    for i in 0..16 {
        assert!(volume.read(&file, i << 18, 1 << 18) == pattern(i, 1 << 18), "chunk {i}");
    }
    assert_eq!((volume.store.table.used().1, volume.store.stats().no_room), (0, 0));
    volume.check();
}
