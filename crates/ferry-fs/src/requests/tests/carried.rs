//! Another process goes on with a mount: what programs have open, and what the kernel knows, is
//! as it was.

use super::*;
use crate::Carried;
use crate::inode::table::InodeSource;
use std::sync::atomic::Ordering;

/// The process ends in order, and the next one goes on with what it carries.
fn go_on(world: &mut World) {
    let carried = world.fs.carry();
    assert_eq!(Carried::decode(&carried.encode()).as_ref(), Some(&carried));
    world.fs.detach();
    world.fs.close().unwrap();
    let options = FsOptions { goes_on: true, ..world.options.clone() };
    world.fs = LocalFs::open(world.dev.clone(), options, Env::real()).unwrap();
    world.fs.take_over(&carried).unwrap();
}

fn lookups(world: &World, ino: Ino) -> u64 {
    let inode = world.fs.table.get(ino).unwrap().expect("it is there");
    inode.lookups.load(Ordering::Acquire)
}

#[test]
fn open_files_go_on_with_their_numbers_with_and_without_names() {
    for background in [false, true] {
        let options = FsOptions { background, cache_bytes: 8 << 20, ..FsOptions::default() };
        let mut world = World::with(options);
        let before = world.fs.counters.inodes();
        let (named, a) = world.create(ROOT, "named").unwrap();
        let (small, b) = world.create(ROOT, "small").unwrap();
        let (large, c) = world.create(ROOT, "large").unwrap();
        let (nobodys, d) = world.create(ROOT, "nobody's").unwrap();
        world.write(named, a, 0, b"named").unwrap();
        world.write(small, b, 0, b"a few bytes").unwrap();
        world.write(large, c, 0, &[7; 300_000]).unwrap();
        ["small", "large", "nobody's"].iter().for_each(|name| world.unlink(ROOT, name).unwrap());
        for round in 0..3 {
            go_on(&mut world);
            assert_eq!(world.read(named, a, 100).unwrap(), b"named");
            assert_eq!(world.read(small, b, 100).unwrap(), b"a few bytes");
            assert_eq!(world.read(large, c, 1 << 20).unwrap(), [7; 300_000]);
            assert_eq!((world.attr(small).nlink, world.attr(large).nlink), (0, 0));
            assert_eq!(lookups(&world, large), 1);
            // A file that is opened now gets a number of its own.
            let more = world.open(named).unwrap();
            assert!(![a, b, c, d].contains(&more));
            world.release(named, more);
            world.write(small, b, 11, format!("{round}").as_bytes()).unwrap();
            world.write(small, b, 11, b"").unwrap();
            world.set(small, SetAttr { size: Some(11), ..SetAttr::default() }).unwrap();
        }
        for (ino, fh) in [(small, b), (large, c), (nobodys, d)] {
            world.release(ino, fh);
            assert!(world.stored(ino), "the kernel knows it yet");
            world.fs.forget(ino, 1);
            while world.stored(ino) {
                assert!(background);
                std::thread::yield_now();
            }
        }
        world.release(named, a);
        assert_eq!(code(world.read(named, a, 1)), libc::EBADF);
        world.unlink(ROOT, "named").unwrap();
        world.fs.forget(named, 1);
        while world.stored(named) {
            assert!(background);
            std::thread::yield_now();
        }
        assert_eq!(world.fs.counters.inodes(), before);
        world.check();
    }
}

#[test]
fn inodes_that_only_the_kernel_knows_go_on() {
    let options = FsOptions { background: false, cache_bytes: 1 << 20, ..FsOptions::default() };
    let mut world = World::with(options);
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.lookup(ROOT, "dir").unwrap();
    let files: Vec<Ino> = (0..2000)
        .map(|n| {
            let (ino, fh) = world.create(ROOT, &format!("{n}")).unwrap();
            world.release(ino, fh);
            ino
        })
        .collect();
    world.rmdir(ROOT, "dir").unwrap();
    world.fs.table.trim(1 << 16);
    assert!(world.fs.table.counts().remembered > 0, "some are not in memory whole");
    go_on(&mut world);
    // A program works in the directory that was removed.
    assert_eq!(world.attr(dir).nlink, 0);
    world.fs.forget(dir, 1);
    assert!(!world.stored(dir));
    for (n, ino) in files.iter().enumerate() {
        assert_eq!(lookups(&world, *ino), 1);
        world.unlink(ROOT, &format!("{n}")).unwrap();
        assert!(world.stored(*ino), "a program may have it as its directory, or by O_PATH");
        world.fs.forget(*ino, 1);
        assert!(!world.stored(*ino));
    }
    world.check();
}

#[test]
fn a_file_that_was_made_without_a_name_can_get_one_after_the_change() {
    let mut world = World::with(FsOptions { background: false, ..FsOptions::default() });
    let made = world.me.call(|cx| world.fs.tmpfile(cx, ROOT, 0o600, libc::O_RDWR)).unwrap();
    let (ino, fh) = (made.0.attr.expect("it was made").ino, made.1.fh);
    world.write(ino, fh, 0, b"contents").unwrap();
    go_on(&mut world);
    world.link(ino, ROOT, "named").unwrap();
    assert_eq!(world.read(ino, fh, 100).unwrap(), b"contents");
    assert_eq!(world.ino(ROOT, "named"), ino);
    world.check();
}

#[test]
fn a_descriptor_is_told_of_an_error_that_came_before_the_change_once() {
    let mut world = World::with(FsOptions { background: false, ..FsOptions::default() });
    let (ino, told) = world.create(ROOT, "file").unwrap();
    let untold = world.open(ino).unwrap();
    let fsync = |world: &World, fh: u64| world.me.call(|cx| world.fs.fsync(cx, ino, fh, false));
    world.fs.table.peek(ino).unwrap().file.errors.add(Errno(libc::EIO));
    assert_eq!(code(fsync(&world, told)), libc::EIO);
    go_on(&mut world);
    fsync(&world, told).unwrap();
    assert_eq!(code(fsync(&world, untold)), libc::EIO);
    fsync(&world, untold).unwrap();
}

#[test]
fn what_is_not_whole_is_not_taken_over() {
    let world = World::with(FsOptions { background: false, ..FsOptions::default() });
    world.create(ROOT, "file").unwrap();
    let bytes = world.fs.carry().encode();
    assert!(Carried::decode(&bytes).is_some());
    for len in 0..bytes.len() {
        assert_eq!(Carried::decode(&bytes[..len]), None, "{len}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(Carried::decode(&longer), None);
    let mut many = bytes;
    many[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(Carried::decode(&many), None);
}
