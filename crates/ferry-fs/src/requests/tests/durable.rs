//! What a sync guarantees: the process dies (nothing is closed, memory is lost) and the volume is
//! opened again.

use crate::requests::tests::*;
use ferry_device::{HookedDevice, Op};

/// The process dies: what is on the device is all that is left.
pub(crate) fn kill(world: &mut World) {
    let next = LocalFs::open(world.dev.clone(), world.options.clone(), Env::real()).unwrap();
    drop(std::mem::replace(&mut world.fs, next));
}

pub(crate) fn fsync(world: &World, ino: Ino, fh: u64) -> Done {
    world.me.call(|cx| world.fs.fsync(cx, ino, fh, false))
}

fn fsyncdir(world: &World, ino: Ino) -> Done {
    world.me.call(|cx| world.fs.fsyncdir(cx, ino, 0, false))
}

/// The contents of a name, if it is there.
pub(crate) fn contents(world: &World, dir: Ino, name: &str) -> Option<Vec<u8>> {
    let attr = world.lookup(dir, name).unwrap()?;
    world.fs.forget(attr.ino, 1);
    let fh = world.open(attr.ino).unwrap();
    let data = world.read(attr.ino, fh, 1 << 20).unwrap();
    assert_eq!(data.len() as u64, attr.size);
    world.release(attr.ino, fh);
    Some(data)
}

#[test]
fn after_fsync_the_data_the_name_and_every_directory_above_survive() {
    for len in [10, 3000, 200_000] {
        let mut world = World::new();
        let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let a = world.mkdir(ROOT, "a").unwrap();
        let b = world.mkdir(a, "b").unwrap();
        world.file(a, "made before").unwrap();
        let (ino, fh) = world.create(b, "file").unwrap();
        world.write(ino, fh, 0, &data).unwrap();
        fsync(&world, ino, fh).unwrap();
        let unsynced = world.create(ROOT, "unsynced").unwrap();
        world.write(unsynced.0, unsynced.1, 0, &data).unwrap();
        kill(&mut world);
        let b = world.ino(world.ino(ROOT, "a"), "b");
        assert_eq!(contents(&world, b, "file"), Some(data));
        assert!(world.exists(a, "made before"), "operations survive in order");
        assert!(
            !world.exists(ROOT, "unsynced"),
            "nobody asked for it, and nothing made it durable"
        );
        world.check();
    }
}

#[test]
fn fsync_makes_the_new_names_of_directories_above_durable() {
    for exchange in [false, true] {
        let mut world = World::new();
        let top = world.mkdir(ROOT, "old").unwrap();
        let sub = world.mkdir(top, "sub").unwrap();
        world.mkdir(ROOT, "other").unwrap();
        let (ino, fh) = world.create(sub, "file").unwrap();
        world.write(ino, fh, 0, b"x").unwrap();
        fsync(&world, ino, fh).unwrap();
        let to = if exchange { "other" } else { "new" };
        world
            .rename_with(
                (ROOT, "old"),
                (ROOT, to),
                RenameFlags { exchange, no_replace: false, whiteout: false },
            )
            .unwrap();
        fsync(&world, ino, fh).unwrap();
        kill(&mut world);
        assert_eq!(contents(&world, world.ino(world.ino(ROOT, to), "sub"), "file").unwrap(), b"x");
    }
}

/// The same volume, on a clock of its own.
fn on_a_clock(world: &mut World) -> Arc<times::Ticking> {
    world.fs.close().unwrap();
    let clock = Arc::new(times::Ticking::new());
    let env = Env { clock: clock.clone(), entropy: Env::real().entropy };
    world.fs = LocalFs::open(world.dev.clone(), world.options.clone(), env).unwrap();
    clock
}

#[test]
fn write_back_waits_as_long_as_the_commit_interval() {
    let mut world = World::new();
    world.options.commit_interval = std::time::Duration::from_secs(3600);
    let clock = on_a_clock(&mut world);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, &[5; 10_000]).unwrap();
    for (seconds, waiting) in [(60, 1), (3600, 0)] {
        clock.pass(seconds);
        world.fs.tick().unwrap();
        assert_eq!(world.fs.stats()["data"]["waiting_inodes"], waiting, "after {seconds} s");
    }
}

#[test]
fn ticks_replace_the_background_threads() {
    let mut world = World::new();
    let clock = on_a_clock(&mut world);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, &[5; 10_000]).unwrap();
    for _ in 0..3 {
        clock.pass(60);
        world.fs.tick().unwrap();
    }
    kill(&mut world);
    assert_eq!(contents(&world, ROOT, "file").unwrap(), [5; 10_000]);
}

#[test]
fn after_fsync_of_a_directory_its_entries_survive() {
    let mut world = World::new();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    let (ino, fh) = world.create(dir, "file").unwrap();
    world.write(ino, fh, 0, b"not synced").unwrap();
    world.file(dir, "removed").unwrap();
    world.unlink(dir, "removed").unwrap();
    world.file(dir, "old name").unwrap();
    world.rename((dir, "old name"), (dir, "new name")).unwrap();
    fsyncdir(&world, dir).unwrap();
    kill(&mut world);
    assert_eq!(world.list(dir).into_keys().collect::<Vec<_>>(), ["file", "new name"]);
    assert_eq!(contents(&world, dir, "file").unwrap(), b"", "no size without data");
    world.check();
}

#[test]
fn a_replaced_file_is_old_or_new_and_never_empty() {
    for synced in [false, true] {
        let mut world = World::new();
        let (ino, fh) = world.create(ROOT, "config").unwrap();
        world.write(ino, fh, 0, b"old").unwrap();
        fsync(&world, ino, fh).unwrap();
        let (ino, fh) = world.create(ROOT, "config.new").unwrap();
        world.write(ino, fh, 0, &[b'n'; 100_000]).unwrap();
        world.rename((ROOT, "config.new"), (ROOT, "config")).unwrap();
        if synced {
            fsyncdir(&world, ROOT).unwrap();
        }
        kill(&mut world);
        let want = if synced { vec![b'n'; 100_000] } else { b"old".to_vec() };
        assert_eq!(contents(&world, ROOT, "config"), Some(want));
        world.check();
    }
}

#[test]
fn attributes_and_lists_survive_an_fsync() {
    let mut world = World::new();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.setxattr(ino, "user.x", b"value").unwrap();
    world.set(ino, SetAttr { mode: Some(0o604), uid: Some(5), ..SetAttr::default() }).unwrap();
    world.link(ino, ROOT, "second").unwrap();
    let before = world.attr(ino);
    fsync(&world, ino, fh).unwrap();
    kill(&mut world);
    assert_eq!(world.attr(ino), before);
    assert_eq!(world.getxattr(ino, "user.x").unwrap(), b"value");
    assert_eq!(world.ino(ROOT, "second"), ino);
}

#[test]
fn a_sync_of_the_volume_covers_everything() {
    let mut world = World::new();
    for i in 0..50 {
        let (ino, fh) = world.create(ROOT, &format!("f{i}")).unwrap();
        world.write(ino, fh, 0, &vec![i as u8; 10_000]).unwrap();
    }
    world.me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).unwrap();
    kill(&mut world);
    for i in 0..50 {
        assert_eq!(contents(&world, ROOT, &format!("f{i}")), Some(vec![i as u8; 10_000]));
    }
    world.check();
}

#[test]
fn numbers_and_counts_are_right_after_a_crash() {
    let mut world = World::new();
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..5 {
        for i in 0..100 {
            assert!(
                seen.insert(world.file(ROOT, &format!("{round}-{i}")).unwrap()),
                "a number is never used twice"
            );
        }
        if round % 2 == 0 {
            fsyncdir(&world, ROOT).unwrap();
        }
        kill(&mut world);
        world.check();
        assert_eq!(world.fs.counters.inodes(), 1 + world.list(ROOT).len() as u64);
    }
    assert_eq!(world.list(ROOT).len(), 300);
}

/// However few of the operations between them the log has.
#[test]
fn a_number_is_handed_out_only_below_a_durable_limit() {
    let mut world = World::new();
    world.fs.counters.skip_to_last(10);
    let newest = (0..100).map(|n| world.file(ROOT, &format!("file {n}")).unwrap()).max().unwrap();
    kill(&mut world);
    let next = world.file(ROOT, "file").unwrap();
    assert!(next > newest, "{next} was handed out before the crash, as was {newest}");
    world.check();
}

/// Nobody may park here.
struct NoPark;

impl Park for NoPark {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        panic!("parked although everything was durable")
    }

    fn request(&self) -> Option<ferry_journal::RequestId> {
        None
    }
}

#[test]
fn fsync_of_a_durable_file_returns_at_once() {
    let world = World::new();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, b"x").unwrap();
    fsync(&world, ino, fh).unwrap();
    fsyncdir(&world, ROOT).unwrap();
    let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &NoPark };
    assert!(world.fs.fsync(&cx, ino, fh, false).is_ok());
    assert!(world.fs.fsyncdir(&cx, ROOT, 0, false).is_ok());
}

/// A small volume without threads, on a device that fails writes and flushes after [`fail_writes`].
pub(crate) fn failing_world() -> (Arc<HookedDevice>, std::mem::ManuallyDrop<World>) {
    let dev = Arc::new(HookedDevice::new(Arc::new(MemDevice::new(64 << 20))));
    let as_device: Arc<dyn BlockDevice> = dev.clone();
    mkfs(&as_device, &MkfsOptions::default(), &Env::real()).unwrap();
    let options = FsOptions { background: false, ..FsOptions::default() };
    let fs = LocalFs::open(as_device.clone(), options.clone(), Env::real()).unwrap();
    (
        dev,
        std::mem::ManuallyDrop::new(World {
            dev: as_device,
            fs,
            me: InProcess::default(),
            options,
        }),
    )
}

/// From now on, until it is healed, the device fails every write and every flush.
pub(crate) fn fail_writes(dev: &HookedDevice) {
    dev.fail_after(&[Op::Write, Op::Flush], 0);
}

#[test]
fn a_failed_write_is_told_to_every_descriptor_and_the_volume_is_read_only() {
    let (dev, world) = failing_world();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    let second = world.open(ino).unwrap();
    world.write(ino, fh, 0, b"kept").unwrap();
    fsync(&world, ino, fh).unwrap();
    assert!(world.fs.stats()["volume"]["failed"].is_null());

    fail_writes(&dev);
    world.write(ino, fh, 0, &[1; 100_000]).unwrap();
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    assert_eq!(code(fsync(&world, ino, second)), libc::EIO);
    dev.heal();
    assert_eq!(
        code(world.file(ROOT, "another")),
        libc::EROFS,
        "a device that failed once is not trusted again"
    );
    assert_eq!(code(world.unlink(ROOT, "file")), libc::EROFS);
    assert!(world.exists(ROOT, "file"), "reading goes on");
    assert!(world.fs.stats()["volume"]["failed"].is_string(), "and the statistics say it");
}

#[test]
fn each_descriptor_is_told_of_a_write_error_once() {
    for errno in [libc::EIO, libc::ENOSPC] {
        let world = World::new();
        let (ino, first) = world.create(ROOT, "file").unwrap();
        let second = world.open(ino).unwrap();
        world.write(ino, first, 0, b"x").unwrap();
        world.fs.table.peek(ino).unwrap().file.errors.add(Errno(errno));
        // Nobody has been told yet: it is the business of who opens now, too.
        let third = world.open(ino).unwrap();
        for fh in [first, second, third] {
            assert_eq!(code(fsync(&world, ino, fh)), errno);
            fsync(&world, ino, fh).unwrap();
        }
        let later = world.open(ino).unwrap();
        fsync(&world, ino, later).unwrap();
    }
}

#[test]
fn unwritten_data_is_never_reported_durable() {
    let (dev, world) = failing_world();
    let (ino, first) = world.create(ROOT, "file").unwrap();
    let second = world.open(ino).unwrap();
    world.write(ino, first, 0, &[1; 100_000]).unwrap();
    fail_writes(&dev);
    assert_eq!(code(fsync(&world, ino, first)), libc::EIO);
    dev.heal();
    let third = world.open(ino).unwrap();
    for fh in [first, second, third, first, second] {
        assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    }
}
