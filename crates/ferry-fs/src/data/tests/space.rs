//! Full volumes: what was promised is kept, the rest is refused at the write, and removing always works.

use super::*;

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
        volume.store.write_back_all().unwrap();
        assert_eq!(volume.store.stats().no_room, 0);
        let file = volume.inodes.inode(ino).unwrap().unwrap();
        let mut at = 0;
        while at + 50_000 <= size {
            assert!(volume.read(&file, at, 50_000) == pattern(ino ^ at, 50_000), "round {round}, byte {at}");
            at += 50_000;
        }
        volume.remove(ino);
        volume.check();
    }
    assert!(sizes[0] > 9 << 20, "most of the 16 MiB can be used: {}", sizes[0]);
    let least = *sizes.iter().min().unwrap();
    assert!(least + 8 * (256 << 10) >= sizes[0], "only the home store grows from round to round: {sizes:?}");
    assert_eq!(volume.store.table.used(), (0, 0));
}

/// What is overwritten becomes free; so there is always room for the next write, whoever else wants some.
#[test]
fn who_overwrites_on_a_full_volume_is_never_refused() {
    // More may be dirty than there is room for.
    let volume = Volume::new(128, 256 << 10, 64 << 20, true);
    let size = fill(&volume, 10);
    volume.remove(10);
    // The map of the extents takes room, too: each block has an extent of its own at last.
    let blocks = size / BLOCK * 70 / 100;
    let file = volume.create(11);
    volume.write(&file, 0, &pattern(11, (blocks * BLOCK) as usize));
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
    volume.store.write_back_all().unwrap();
    assert_eq!(volume.store.stats().no_room, 0);
    volume.check();
}
