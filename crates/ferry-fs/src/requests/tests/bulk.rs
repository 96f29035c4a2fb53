//! Bulk sync: many open files, one commit, an answer for each.

use crate::requests::tests::durable::{contents, fail_writes, failing_world, fsync, kill};
use crate::requests::tests::*;

/// The bytes of a request.
fn message(inos: &[Ino], flags: u32) -> Vec<u8> {
    let mut bytes = (inos.len() as u32).to_ne_bytes().to_vec();
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(inos.iter().flat_map(|ino| ino.to_ne_bytes()));
    bytes.resize(bytes.len().max(ioctl::SYNC_FILES_LEN as usize), 0);
    bytes
}

fn ask(world: &World, me: InProcess, input: &[u8]) -> Done<Vec<u8>> {
    let len = ioctl::SYNC_FILES_LEN as usize;
    me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::SYNC_FILES, input, len))
}

/// The errno of each file.
fn sync_as(world: &World, me: InProcess, inos: &[Ino]) -> Vec<u64> {
    let out = ask(world, me, &message(inos, 0)).unwrap();
    assert_eq!(out[..8], [(inos.len() as u32).to_ne_bytes(), [0; 4]].concat());
    out[8..].chunks(8).map(|errno| u64::from_ne_bytes(errno.try_into().unwrap())).collect()
}

fn sync(world: &World, inos: &[Ino]) -> Vec<u64> {
    sync_as(world, world.me, inos)
}

/// Open files of `len` bytes, dirty; the first one is named 0.
fn files(world: &World, count: usize, len: usize) -> Vec<(Ino, u64)> {
    let make = |i: usize| {
        let (ino, fh) = world.create(ROOT, &i.to_string()).unwrap();
        world.write(ino, fh, 0, &vec![i as u8; len]).unwrap();
        (ino, fh)
    };
    (0..count).map(make).collect()
}

#[test]
fn many_files_are_one_commit_and_survive() {
    for len in [100, 4096, 9000] {
        let mut world = World::new();
        let count = if len == 9000 { 300 } else { ioctl::SYNC_FILES_MAX };
        let made = files(&world, count, len);
        let inos: Vec<Ino> = made.iter().map(|(ino, _)| *ino).collect();
        let before = (world.fs.journal.stats(), world.fs.data.stats());
        assert_eq!(sync(&world, &inos), vec![0; count]);
        let after = (world.fs.journal.stats(), world.fs.data.stats());
        assert_eq!(
            (after.0.contexts - before.0.contexts, after.0.forces - before.0.forces),
            (1, 1)
        );
        assert_eq!(after.0.flushes - before.0.flushes, 1);
        assert!(after.1.batches - before.1.batches <= 3, "files are written one by one");
        kill(&mut world);
        for i in [0, 1, count / 2, count - 1] {
            assert_eq!(contents(&world, ROOT, &i.to_string()), Some(vec![i as u8; len]));
        }
        assert_eq!(world.list(ROOT).len(), count);
        world.check();
    }
}

#[test]
fn what_is_durable_already_costs_no_commit() {
    let world = World::new();
    let inos: Vec<Ino> = files(&world, 3, 4096).iter().map(|(ino, _)| *ino).collect();
    assert_eq!(sync(&world, &inos), [0, 0, 0]);
    let before = world.fs.journal.stats();
    assert_eq!(sync(&world, &[inos[2], inos[0], inos[2]]), [0, 0, 0]);
    assert!(sync(&world, &[]).is_empty());
    assert_eq!(world.fs.journal.stats().forces, before.forces);
}

#[test]
fn a_file_named_twice_or_being_written_is_synced() {
    let mut world = World::new();
    let inos: Vec<Ino> = files(&world, 2, 5000).iter().map(|(ino, _)| *ino).collect();
    world.open(inos[0]).unwrap();
    assert_eq!(sync(&world, &[inos[0], inos[1], inos[0]]), [0, 0, 0]);
    kill(&mut world);
    assert_eq!(contents(&world, ROOT, "1"), Some(vec![1; 5000]));
}

#[test]
fn only_files_that_the_caller_has_open_are_answered_for() {
    let mut world = World::new();
    let made = files(&world, 3, 4096);
    let (mine, closed, unknown) = (made[0].0, made[1].0, 123_456);
    world.release(made[1].0, made[1].1);
    let refused = u64::from(libc::EBADF.unsigned_abs());
    assert_eq!(
        sync(&world, &[mine, closed, unknown, ROOT, 0]),
        [0, refused, refused, refused, refused]
    );

    let other = InProcess { uid: 7, ..world.me };
    assert_eq!(
        sync_as(&world, other, &[made[2].0]),
        [refused],
        "another user's file is as one that is not there"
    );
    other.call(|cx| world.fs.open(cx, made[2].0, libc::O_RDONLY, false)).unwrap();
    assert_eq!(sync_as(&world, other, &[made[2].0, mine]), [0, refused]);
    let (theirs, _) =
        other.call(|cx| world.fs.create(cx, ROOT, b"theirs", 0o600, libc::O_RDWR)).unwrap();
    assert_eq!(
        sync(&world, &[theirs.attr.unwrap().ino]),
        [0],
        "root may ask for what anybody has open"
    );
    kill(&mut world);
    assert_eq!(
        contents(&world, ROOT, "1").unwrap(),
        b"",
        "a file that was refused was not written"
    );
    assert_eq!(contents(&world, ROOT, "2"), Some(vec![2; 4096]));
}

#[test]
fn requests_that_cannot_be() {
    let world = World::new();
    let many = vec![1; ioctl::SYNC_FILES_MAX + 1];
    let whole = message(&[], 0);
    for input in
        [&[][..], &whole[..7], &message(&many, 0), &message(&[1], 2), &message(&[1, 2], 0)[..23]]
    {
        assert_eq!(code(ask(&world, world.me, input)), libc::EINVAL);
    }
    let short =
        world.me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::SYNC_FILES, &message(&[1, 2], 0), 23));
    assert_eq!(code(short), libc::EINVAL);
    assert!(ask(&world, world.me, &message(&[1], ioctl::SYNC_FILES_DATA)).is_ok());

    let options = FsOptions { cache: CacheMode::Writeback, ..world.options.clone() };
    let held_back = World::with(options);
    assert_eq!(
        code(ask(&held_back, held_back.me, &whole)),
        libc::EOPNOTSUPP,
        "the kernel has the data"
    );
}

#[test]
fn a_failed_write_fails_the_files_it_was_of() {
    let (dev, world) = failing_world();
    let made = files(&world, 3, 5000);
    let inos: Vec<Ino> = made.iter().map(|(ino, _)| *ino).collect();
    assert_eq!(sync(&world, &inos), [0, 0, 0]);
    world.write(made[0].0, made[0].1, 0, &[9; 5000]).unwrap();
    world.write(made[1].0, made[1].1, 0, &[9; 5000]).unwrap();
    fail_writes(&dev);
    let told = sync(&world, &inos[..2]);
    assert_eq!(told, [libc::EIO as u64; 2]);
    assert_eq!(sync(&world, &inos), [libc::EIO as u64, libc::EIO as u64, 0]);
    for (ino, fh) in &made[..2] {
        assert_eq!(code(fsync(&world, *ino, *fh)), libc::EIO);
    }
}

#[test]
fn a_write_error_is_told_until_fsync_has_told_the_descriptor() {
    let world = World::new();
    let (ino, first) = files(&world, 1, 4096)[0];
    let second = world.open(ino).unwrap();
    assert_eq!(sync(&world, &[ino]), [0]);
    world.fs.table.peek(ino).unwrap().file.errors.add(Errno(libc::ENOSPC));
    let untold = [libc::ENOSPC as u64];
    assert_eq!(sync(&world, &[ino]), untold);
    assert_eq!(code(fsync(&world, ino, first)), libc::ENOSPC);
    assert_eq!(sync(&world, &[ino]), untold, "the other descriptor has not been told");
    assert_eq!(code(fsync(&world, ino, second)), libc::ENOSPC);
    assert_eq!(sync(&world, &[ino]), [0]);
    fsync(&world, ino, first).unwrap();
}

#[test]
fn a_volume_that_can_no_longer_be_written_fails_each_dirty_file() {
    let (dev, world) = failing_world();
    let made = files(&world, 2, 5000);
    let (clean, fh) = world.create(ROOT, "clean").unwrap();
    world.write(clean, fh, 0, b"x").unwrap();
    fsync(&world, clean, fh).unwrap();
    fail_writes(&dev);
    assert_eq!(code(fsync(&world, made[0].0, made[0].1)), libc::EIO);
    let told = sync(&world, &[made[1].0, clean]);
    assert_eq!(told, [libc::EIO as u64, 0]);
}
