//! Full volumes: what was set aside is there, and nobody else gets it.

use crate::requests::tests::*;

fn world(background: bool) -> World {
    World::with(FsOptions { background, cache_bytes: 8 << 20, ..FsOptions::default() })
}

fn available(world: &World) -> u64 {
    let statfs = world.me.call(|cx| world.fs.statfs(cx)).unwrap();
    statfs.blocks_available * u64::from(statfs.block_size)
}

/// Fills the volume for everybody: no contents and no name can be added.
fn fill(world: &World, name: &str) -> (Ino, u64) {
    let (ino, fh) = world.create(ROOT, name).unwrap();
    let (mut at, mut len) = (0, 1 << 20);
    while len > 0 {
        match world.write(ino, fh, at, &vec![9; len]) {
            Ok(_) => at += len as u64,
            Err(Errno(libc::ENOSPC)) => len /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    (ino, fh)
}

fn from(reserved: &dyn Reservation, ino: Option<Ino>) -> Option<EarlyAck> {
    Some(EarlyAck { at: Timestamp::new(1, 0), ino, seq: None, reservation: Some(reserved.id()) })
}

fn keeps_its_word(background: bool) {
    const FILES: u64 = 120;
    let mut world = world(background);
    let bytes = FILES * (write_cost(3000) + write_cost(70_000)) + FILES * target_cost(4095);
    let reserved = world.fs.reserve_space(bytes, 3 * FILES).unwrap();
    let numbers = world.fs.reserve_numbers(3 * FILES as u32).unwrap();
    let (big, fh) = fill(&world, "big");
    assert_eq!(code(world.write(big, fh, 1 << 40, &[1; 4096])), libc::ENOSPC);
    world.me.ack = from(&*reserved, None);
    let mut inos = numbers;
    for n in 0..FILES {
        world.me.ack = from(&*reserved, inos.next());
        let (small, small_fh) =
            world.create(ROOT, &format!("small {n}{}", "x".repeat(240))).unwrap();
        world.write(small, small_fh, 0, &[n as u8; 3000]).unwrap();
        world.me.ack = from(&*reserved, inos.next());
        let (large, large_fh) = world.create(ROOT, &format!("large {n}")).unwrap();
        // Over a hole, in the middle of blocks, and as long as it gets in two pieces.
        world.write(large, large_fh, 777, &vec![n as u8; 40_000]).unwrap();
        world.write(large, large_fh, 90_001, &vec![n as u8; 30_000]).unwrap();
        world.me.ack = from(&*reserved, inos.next());
        world.symlink(ROOT, &format!("link {n}"), &"t".repeat(4095)).unwrap();
        world.release(small, small_fh);
        world.release(large, large_fh);
    }
    let (left, inodes) = reserved.left();
    assert_eq!(inodes, 0, "each name took one");
    assert!(left < bytes && left > 0, "{left} of {bytes}");
    world.me.ack = None;
    world.fs.sync().unwrap();
    assert_eq!(world.fs.data.stats().no_room, 0);
    world.check();
    for n in 0..FILES {
        let ino = world.ino(ROOT, &format!("large {n}"));
        let fh = world.open(ino).unwrap();
        let data = world.read(ino, fh, 200_000).unwrap();
        let is = |range: std::ops::Range<usize>, byte: u8| data[range].iter().all(|b| *b == byte);
        assert_eq!(data.len(), 120_001);
        assert!(
            is(0..777, 0)
                && is(777..40_777, n as u8)
                && is(40_777..90_001, 0)
                && is(90_001..120_001, n as u8)
        );
        world.release(ino, fh);
    }
    world.release(big, fh);
    drop(reserved);
}

#[test]
fn promised_changes_find_the_space_that_was_set_aside_on_a_full_volume() {
    keeps_its_word(false);
}

#[test]
fn so_they_do_beside_the_background_threads() {
    keeps_its_word(true);
}

#[test]
fn what_is_set_aside_counts_as_used_and_comes_back() {
    let world = world(false);
    let before = available(&world);
    let reserved = world.fs.reserve_space(8 << 20, 100).unwrap();
    assert_eq!(reserved.left(), (8 << 20, 100));
    let less = before - available(&world);
    assert_eq!(less, (8 << 20) + 100 * keys::BLOCK);
    reserved.add(1 << 20, 0).unwrap();
    assert_eq!(reserved.left(), (9 << 20, 100));
    assert_eq!(before - available(&world), less + (1 << 20));
    // Half of what is left stays for the others.
    let most = available(&world) / 2;
    assert_eq!(reserved.add(most + (64 << 10), 0).map_err(|e| e.0), Err(libc::ENOSPC));
    assert_eq!(
        world.fs.reserve_space(most + (64 << 10), 0).map(|a| a.left()).map_err(|e| e.0),
        Err(libc::ENOSPC)
    );
    assert_eq!(
        world.fs.reserve_space(u64::MAX, u64::MAX).map(|a| a.left()).map_err(|e| e.0),
        Err(libc::ENOSPC)
    );
    assert_eq!(reserved.left(), (9 << 20, 100));
    drop(reserved);
    assert_eq!(available(&world), before);
    // Not even while nobody could have it.
    let (_, fh) = fill(&world, "big");
    assert_eq!(
        world.fs.reserve_space(4096, 1).map(|a| a.left()).map_err(|e| e.0),
        Err(libc::ENOSPC)
    );
    world.release(world.ino(ROOT, "big"), fh);
    world.check();
}

/// Space comes back once: from what was drawn when the file goes, from the rest when it is given
/// back.
#[test]
fn what_was_drawn_is_free_when_the_file_is_gone() {
    let mut world = world(false);
    let (first, fh) = world.create(ROOT, "first").unwrap();
    world.release(first, fh);
    world.fs.sync().unwrap();
    let before = available(&world);
    for round in 0..20 {
        let reserved = world.fs.reserve_space(4 << 20, 1).unwrap();
        world.me.ack = from(&*reserved, None);
        let (ino, fh) = world.create(ROOT, "file").unwrap();
        let mut want = write_cost(0);
        for at in [0, 1 << 20, 300] {
            world.write(ino, fh, at, &vec![1; 700_000]).unwrap();
            want += write_cost(700_000);
        }
        let set = SetAttr { size: Some(2_000_001), ..SetAttr::default() };
        world.set(ino, set).unwrap();
        let (left, inodes) = reserved.left();
        assert!(left >= (4 << 20) - want, "no more is drawn than is said");
        assert_eq!(inodes, 0);
        // More than there is left: from what everybody may take.
        world.write(ino, fh, 4 << 20, &vec![1; 3 << 20]).unwrap();
        world.me.ack = None;
        if round % 2 == 0 {
            world.fs.sync().unwrap();
        }
        world.release(ino, fh);
        world.unlink(ROOT, "file").unwrap();
        world.fs.forget(ino, 1);
        drop(reserved);
        world.fs.sync().unwrap();
        world.fs.data.admit(crate::store::data_store::Busy::Wait, None, 0).unwrap();
    }
    let lost = before.saturating_sub(available(&world));
    // The home store has grown, by no more than a few of its units.
    assert!(lost <= 4 << 20, "{lost} bytes are gone");
    world.check();
}

#[test]
fn nobody_draws_from_what_was_given_back() {
    let mut world = world(false);
    let gone = world.fs.reserve_space(1 << 20, 10).unwrap();
    let promise = from(&*gone, None);
    drop(gone);
    let other = world.fs.reserve_space(1 << 20, 10).unwrap();
    world.me.ack = promise;
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, &[1; 5000]).unwrap();
    assert_eq!(other.left(), (1 << 20, 10));
    world.release(ino, fh);
}
