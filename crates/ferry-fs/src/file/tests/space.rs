//! Full volumes: reserved space is there, more is refused at the write, and removing always
//! works.

use crate::file::tests::*;
use crate::space::segments::Stream;

fn fill(volume: &Volume, ino: Ino) -> u64 {
    let file = volume.create(ino);
    let mut written = 0;
    loop {
        match volume.store.write(&file, At::End, &pattern(ino ^ written, 50_000), Touch::Nothing) {
            Ok(end) => written = end,
            Err(error) => {
                assert_eq!(error.errno(), Errno(libc::ENOSPC));
                return file.state.read().rec.size;
            }
        }
    }
}

#[test]
fn a_full_volume_keeps_what_it_took_and_can_be_filled_again_and_again() {
    let volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let mut sizes = Vec::new();
    for round in 0..100 {
        let ino = 10 + round;
        let size = fill(&volume, ino);
        sizes.push(size);
        volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
        assert_eq!(volume.store.stats().no_room, 0);
        let file = volume.inodes.inode(ino).unwrap().unwrap();
        let mut at = 0;
        while at + 50_000 <= size {
            assert!(
                volume.read(&file, at, 50_000) == pattern(ino ^ at, 50_000),
                "round {round}, byte {at}"
            );
            at += 50_000;
        }
        volume.remove(ino);
        volume.check();
    }
    assert!(sizes[0] > 9 << 20, "most of the 16 MiB can be used: {}", sizes[0]);
    let least = *sizes.iter().min().unwrap();
    assert!(
        least + 8 * (256 << 10) >= sizes[0],
        "only the home store grows from round to round: {sizes:?}"
    );
    assert_eq!(volume.store.table.used(), (0, 0));
}

/// A file that has `percent` of what fits on the volume, and its blocks.
fn file_of(volume: &Volume, percent: u64) -> (Arc<Inode>, u64) {
    let size = fill(volume, 10);
    volume.remove(10);
    let blocks = size / BLOCK * percent / 100;
    let file = volume.create(11);
    volume.write(&file, 0, &pattern(11, (blocks * BLOCK) as usize));
    (file, blocks)
}

/// What is overwritten becomes free; so there is always room for the next write, even if others
/// want some.
#[test]
fn overwrites_on_a_full_volume_are_never_refused() {
    // More may be dirty than there is room for.
    let volume = Volume::new(128, 256 << 10, 64 << 20, true);
    // The map of the extents takes room, too: each block has an extent of its own at last.
    let (file, blocks) = file_of(&volume, 70);
    std::thread::scope(|scope| {
        for me in 0..8 {
            let (volume, file) = (&volume, &file);
            scope.spawn(move || {
                let mut x = me + 1_u64;
                for _ in 0..1000 {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let block = (x >> 33) % (blocks - 3);
                    // Some need more than others, and must not come last for that.
                    let len = [4096, 12_288][(x >> 63) as usize];
                    volume.write(file, block * BLOCK, &pattern(block, len));
                }
            });
        }
    });
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    assert_eq!(volume.store.stats().no_room, 0);
    // The cleaner moves blocks between the looks that a check takes.
    volume.store.close().unwrap();
    volume.check();
}

/// Overwrites each of the first `blocks` once, in an order that leaves something live in every
/// segment.
fn overwrite_all(volume: &Volume, file: &Arc<Inode>, blocks: u64) {
    for i in 0..blocks {
        let block = i * 7919 % blocks;
        volume.write(file, block * BLOCK, &pattern(block, 4096));
        if i % 64 == 63 {
            volume.store.write_back(Dirty::File(file), Busy::Wait).unwrap();
        }
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
}

/// Each fourth of them again, a fifth of all; it stays in memory.
fn overwrite_some(volume: &Volume, file: &Arc<Inode>, blocks: u64) {
    for block in 0..blocks / 5 {
        volume.write(file, block * 4 * BLOCK, &pattern(block, 4096));
    }
}

/// Home segments that a full volume is made to give, as when the map of its extents grows.
fn grow_home(volume: &Volume, segments: usize) -> Vec<u32> {
    (0..segments)
        .map(|_| volume.store.take_home_segment().expect("the reserve is there for it"))
        .collect()
}

/// A write that was accepted has its space, whatever the home store takes of its own.
#[test]
fn reserved_data_finds_space_though_metadata_took_the_reserve() {
    let volume = Volume::new(128, 256 << 10, 64 << 20, false);
    let (file, blocks) = file_of(&volume, 80);
    overwrite_all(&volume, &file, blocks);
    overwrite_some(&volume, &file, blocks);
    let taken = grow_home(&volume, 9);
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    assert_eq!(volume.store.stats().no_room, 0);
    volume.evict();
    for block in 0..blocks / 5 {
        assert!(
            volume.read(&file, block * 4 * BLOCK, 4096) == pattern(block, 4096),
            "block {block}"
        );
    }
    volume.check();
    volume.store.release_home_segments(&taken);
    volume.check();
}

/// The map of the extents grows by each block that is overwritten alone; what is overwritten gives
/// back as much as it takes.
#[test]
fn a_filled_volume_can_be_overwritten_though_metadata_grows() {
    let volume = Volume::new(128, 256 << 10, 64 << 20, false);
    let (file, blocks) = file_of(&volume, 90);
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    let taken = grow_home(&volume, 5);
    assert!(volume.store.space.audit().0 > 0);
    overwrite_all(&volume, &file, blocks);
    assert!(volume.store.space.audit().0 < 0, "less than nothing is free");
    let more =
        volume.store.write(&volume.create(12), At::End, &pattern(12, 1 << 20), Touch::Nothing);
    assert_eq!(more.unwrap_err().errno(), Errno(libc::ENOSPC), "there is no room for anything new");
    assert_eq!(volume.store.stats().no_room, 0);
    volume.evict();
    for block in 0..blocks {
        assert!(volume.read(&file, block * BLOCK, 4096) == pattern(block, 4096), "block {block}");
    }
    volume.check();
    volume.store.release_home_segments(&taken);
}

/// A checkpoint takes all segments that it may need, and gives back at its end what it did not
/// need: who finds none meanwhile waits for that.
#[test]
fn write_back_waits_for_a_checkpoint_that_has_taken_all_that_was_free() {
    let volume = Volume::new(128, 256 << 10, 64 << 20, false);
    let (file, blocks) = file_of(&volume, 80);
    overwrite_all(&volume, &file, blocks);
    overwrite_some(&volume, &file, blocks);
    let hoard: Vec<u32> = std::iter::from_fn(|| volume.store.take_home_segment()).collect();
    assert!(!hoard.is_empty());
    *volume.client.hoard.lock() = hoard;
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    assert_eq!(volume.store.stats().no_room, 0);
    volume.check();
}

/// Who had a whole segment and wrote nothing to it gives it back, though others have closed it
/// meanwhile.
#[test]
fn a_segment_that_was_closed_before_anything_was_written_to_it_is_free_again() {
    let volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let (table, space) = (&volume.store.table, &volume.store.space);
    let free = |volume: &Volume| {
        volume.store.make_room().unwrap();
        volume.journal.force_durable_point().unwrap();
        space.reap_now().0
    };
    let before = free(&volume);
    for _ in 0..20 {
        let first = table.allocate(Stream::New, 1000, space).unwrap();
        let second = table.allocate(Stream::New, 1000, space).unwrap();
        assert_ne!(first.segment, second.segment);
        table.done(&first, true);
        table.done(&second, true);
        volume.store.tidy().unwrap();
    }
    assert!(free(&volume) + 2 >= before, "{} of {before} segments are free", free(&volume));
    fill(&volume, 10);
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    assert_eq!(volume.store.stats().no_room, 0);
    volume.check();
}

/// Who makes room waits for those who have taken it and may not need it.
#[test]
fn write_back_waits_for_unneeded_chunks_of_others() {
    let volume = Volume::new(64, 256 << 10, 64 << 20, false);
    let (table, space) = (&volume.store.table, &volume.store.space);
    fill(&volume, 10);
    let taken: Vec<_> = std::iter::from_fn(|| table.allocate(Stream::New, 1000, space)).collect();
    assert!(!taken.is_empty());
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| volume.store.write_back(Dirty::All, Busy::Wait));
        for chunk in &taken {
            while table.waiting() == 0 && !writing.is_finished() {
                std::thread::yield_now();
            }
            table.done(chunk, true);
        }
        writing.join().unwrap().unwrap();
    });
    assert_eq!(volume.store.stats().no_room, 0);
    volume.check();
}

/// Small files that reserved a block, were written, and written again after they had been read from
/// the volume: on a volume that others have filled meanwhile they still have it.
#[test]
fn small_files_can_grow_into_their_reserved_blocks_on_a_full_volume() {
    const FILES: u64 = 64;
    let mut volume = Volume::new(64, 256 << 10, 4 << 20, false);
    for ino in 100..100 + FILES {
        let file = volume.create(ino);
        volume.store.fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, BLOCK, &mut |_| ()).unwrap();
        volume.write(&file, 0, &pattern(ino, 100));
    }
    volume.reopen(true);
    let files: Vec<_> =
        (100..100 + FILES).map(|ino| volume.inodes.inode(ino).unwrap().unwrap()).collect();
    for file in &files {
        volume.write(file, 50, &pattern(file.ino, 100));
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    let other = volume.create(6);
    let mut end = 0;
    while volume.store.write(&other, At::Offset(end), &[7; 4096], Touch::Nothing).is_ok() {
        end += BLOCK;
    }
    for file in &files {
        volume.write(file, 0, &pattern(file.ino + 1, 4096));
    }
    volume.store.write_back(Dirty::All, Busy::Wait).unwrap();
    volume.evict();
    for file in &files {
        assert!(volume.read(file, 0, 5000) == pattern(file.ino + 1, 4096), "file {}", file.ino);
    }
    assert_eq!(volume.store.stats().no_room, 0);
    volume.check();
}
