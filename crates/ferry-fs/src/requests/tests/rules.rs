//! The errnos and small rules of each operation.

use crate::requests::tests::*;
use libc::{EEXIST, EISDIR, ENAMETOOLONG, ENOENT, ENOTDIR, ENOTEMPTY, EPERM};

#[test]
fn names_have_limits() {
    let world = World::new();
    let (longest, longer) = ("n".repeat(255), "n".repeat(256));
    world.file(ROOT, &longest).unwrap();
    assert_eq!(code(world.file(ROOT, &longer)), ENAMETOOLONG);
    assert_eq!(code(world.mkdir(ROOT, &longer)), ENAMETOOLONG);
    assert_eq!(code(world.lookup(ROOT, &longer)), ENAMETOOLONG);
    assert_eq!(code(world.unlink(ROOT, &longer)), ENAMETOOLONG);
    assert_eq!(code(world.rename((ROOT, &longest), (ROOT, &longer))), ENAMETOOLONG);
    assert_eq!(code(world.symlink(ROOT, "l", &"t".repeat(4096))), ENAMETOOLONG);
    assert_eq!(code(world.symlink(ROOT, "l", "")), ENOENT);
    let link = world.symlink(ROOT, "l", &"t".repeat(4095)).unwrap();
    assert_eq!(world.me.call(|cx| world.fs.readlink(cx, link)).unwrap().len(), 4095);
    world.check();
}

#[test]
fn every_kind_of_node_and_its_links() {
    let mut world = World::new();
    for (name, kind) in [("fifo", libc::S_IFIFO), ("sock", libc::S_IFSOCK), ("reg", libc::S_IFREG)]
    {
        let ino = world.mknod(ROOT, name, kind | 0o640).unwrap();
        assert_eq!(world.attr(ino).mode, kind | 0o640);
    }
    let entry =
        world.me.call(|cx| world.fs.mknod(cx, ROOT, b"dev", libc::S_IFCHR | 0o600, 0x103)).unwrap();
    let dev = world.forgotten(entry);
    assert_eq!(dev.rdev, 0x103);
    assert_eq!(code(world.mknod(ROOT, "d", libc::S_IFDIR | 0o755)), EPERM);
    assert_eq!(code(world.mknod(ROOT, "fifo", libc::S_IFIFO)), EEXIST);
    world.link(dev.ino, ROOT, "again").unwrap();
    assert_eq!(world.attr(dev.ino).nlink, 2);
    let dir = world.mkdir(ROOT, "dir").unwrap();
    assert_eq!(code(world.link(dir, ROOT, "dir2")), EPERM);
    assert_eq!(code(world.link(dev.ino, ROOT, "fifo")), EEXIST);
    assert_eq!(code(world.link(dev.ino, dev.ino, "x")), ENOTDIR);
    world.reopen();
    assert_eq!((world.ino(ROOT, "again"), world.attr(dev.ino).rdev), (dev.ino, 0x103));
    world.check();
}

#[test]
fn removing_the_wrong_kind_is_refused() {
    let world = World::new();
    world.file(ROOT, "file").unwrap();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.file(dir, "inside").unwrap();
    assert_eq!(code(world.unlink(ROOT, "dir")), EISDIR);
    assert_eq!(code(world.rmdir(ROOT, "file")), ENOTDIR);
    assert_eq!(code(world.rmdir(ROOT, "dir")), ENOTEMPTY);
    assert_eq!(code(world.rmdir(ROOT, "none")), ENOENT);
    assert_eq!(code(world.unlink(ROOT, "none")), ENOENT);
    assert_eq!(code(world.rmdir(dir, ".")), libc::EINVAL);
    assert_eq!(code(world.rmdir(dir, "..")), ENOTEMPTY);
    assert_eq!(code(world.unlink(world.ino(ROOT, "file"), "x")), ENOTDIR);
    assert_eq!(code(world.lookup(world.ino(ROOT, "file"), "x")), ENOTDIR);
    world.unlink(dir, "inside").unwrap();
    world.rmdir(ROOT, "dir").unwrap();
    assert!(!world.exists(ROOT, "dir"));
    assert_eq!(code(world.me.call(|cx| world.fs.getattr(cx, dir, None))), libc::ESTALE);
    world.check();
}

#[test]
fn nothing_is_made_in_a_removed_directory() {
    let world = World::new();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.lookup(ROOT, "dir").unwrap();
    world.rmdir(ROOT, "dir").unwrap();
    assert_eq!(world.attr(dir).nlink, 0);
    assert_eq!(code(world.file(dir, "x")), ENOENT);
    assert_eq!(code(world.mkdir(dir, "x")), ENOENT);
    world.file(ROOT, "file").unwrap();
    assert_eq!(code(world.rename((ROOT, "file"), (dir, "x"))), ENOENT);
    assert!(world.list(dir).is_empty());
    world.fs.forget(dir, 1);
    world.check();
}

#[test]
fn create_opens_what_is_there() {
    let world = World::new();
    let (ino, first) = world.create(ROOT, "file").unwrap();
    let (same, second) = world.create(ROOT, "file").unwrap();
    assert_eq!(ino, same);
    assert_ne!(first, second);
    let exclusive = world.me.call(|cx| world.fs.create(cx, ROOT, b"file", 0o644, libc::O_EXCL));
    assert_eq!(code(exclusive), EEXIST);
    world.mkdir(ROOT, "dir").unwrap();
    assert_eq!(code(world.create(ROOT, "dir")), EISDIR);
    world.release(ino, first);
    assert_eq!(code(world.read(ino, first, 1)), libc::EBADF);
    assert_eq!(world.read(ino, second, 1).unwrap(), b"");
    world.release(ino, second);
    world.fs.forget(ino, 2);
    world.check();
}

#[test]
fn owner_group_and_mode_of_what_is_made() {
    let mut world = World::new();
    world.me = InProcess { uid: 10, gid: 20, umask: 0o027, ..InProcess::default() };
    let dir = world.mkdir(ROOT, "dir").unwrap();
    let attr = world.attr(dir);
    assert_eq!((attr.uid, attr.gid, attr.mode), (10, 20, libc::S_IFDIR | 0o750));
    world.set(dir, SetAttr { mode: Some(0o2775), gid: Some(30), ..SetAttr::default() }).unwrap();
    let file = world.attr(world.mknod(dir, "file", libc::S_IFREG | 0o666).unwrap());
    assert_eq!(
        (file.gid, file.mode),
        (30, libc::S_IFREG | 0o640),
        "a set-group-id directory gives its group"
    );
    let sub = world.attr(world.mkdir(dir, "sub").unwrap());
    assert_eq!((sub.gid, sub.mode), (30, libc::S_IFDIR | 0o2750), "and its bit, to directories");
    world.check();
}

#[test]
fn chown_and_writes_take_set_id_bits() {
    let world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    let bits =
        |mode: u32| world.set(file, SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
    let chown = SetAttr { uid: Some(1), ..SetAttr::default() };
    bits(0o6755);
    assert_eq!(world.set(file, chown).unwrap().mode & 0o7777, 0o755);
    bits(0o6745);
    assert_eq!(
        world.set(file, chown).unwrap().mode & 0o7777,
        0o2745,
        "set-group-id without group execution stays"
    );
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.set(dir, SetAttr { mode: Some(0o6755), ..SetAttr::default() }).unwrap();
    assert_eq!(world.set(dir, chown).unwrap().mode & 0o7777, 0o6755, "a directory keeps its bits");
    bits(0o6755);
    let kill = SetAttr { size: Some(0), kill_suidgid: true, ..SetAttr::default() };
    assert_eq!(world.set(file, kill).unwrap().mode & 0o7777, 0o755);
    bits(0o4755);
    world.setxattr(file, "security.capability", b"x").unwrap();
    let fh = world.open(file).unwrap();
    world.me.call(|cx| world.fs.write(cx, file, fh, 0, b"data", false, true)).unwrap();
    assert_eq!(world.attr(file).mode & 0o7777, 0o755);
    assert_eq!(code(world.getxattr(file, "security.capability")), libc::ENODATA);
    world.release(file, fh);
    world.check();
}

#[test]
fn allocations_holes_and_copies_by_others_than_root_take_set_id_bits() {
    let world = World::new();
    let (file, from) = (world.file(ROOT, "file").unwrap(), world.file(ROOT, "from").unwrap());
    let (fh, source) = (world.open(file).unwrap(), world.open(from).unwrap());
    world.me.call(|cx| world.fs.write(cx, from, source, 0, b"data", false, false)).unwrap();
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    let modes = [0, keep, keep | libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE];
    for (uid, left) in [(0, 0o6777), (1000, 0o777)] {
        let set = || {
            let six = SetAttr { mode: Some(0o6777), ..SetAttr::default() };
            world.set(file, six).unwrap();
            world.setxattr(file, "security.capability", b"x").unwrap();
        };
        let check = |what: &str| {
            assert_eq!(world.attr(file).mode & 0o7777, left, "{what}");
            assert_eq!(world.getxattr(file, "security.capability").is_ok(), uid == 0, "{what}");
        };
        for mode in modes {
            set();
            world
                .me
                .call(|cx| world.fs.fallocate(&Cx { uid, ..*cx }, file, fh, mode, 0, 65536))
                .unwrap();
            check("fallocate");
        }
        set();
        world
            .me
            .call(|cx| {
                world.fs.copy_file_range(&Cx { uid, ..*cx }, from, source, 0, file, fh, 0, 4)
            })
            .unwrap();
        check("copy");
    }
    world.release(file, fh);
    world.release(from, source);
    world.check();
}

#[test]
fn lookup_answers_dot_and_dot_dot() {
    let world = World::new();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    assert_eq!(
        (world.ino(dir, "."), world.ino(dir, ".."), world.ino(ROOT, "..")),
        (dir, ROOT, ROOT)
    );
    assert_eq!(code(world.mkdir(dir, "..")), EEXIST);
}

#[test]
fn a_read_only_mount_changes_nothing() {
    let mut world = World::new();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, b"contents").unwrap();
    world.options.read_only = true;
    world.reopen();
    let refused = [
        world.file(ROOT, "x").map(drop),
        world.unlink(ROOT, "file"),
        world.rename((ROOT, "file"), (ROOT, "x")),
        world.link(ino, ROOT, "x"),
        world.set(ino, SetAttr { mode: Some(0), ..SetAttr::default() }).map(drop),
        world.setxattr(ino, "user.x", b""),
        world.open(ino).map(drop),
    ];
    assert!(refused.iter().all(|r| *r == Err(Errno(libc::EROFS))), "{refused:?}");
    let opened = world.me.call(|cx| world.fs.open(cx, ino, libc::O_RDONLY, false)).unwrap();
    assert_eq!(world.read(ino, opened.fh, 100).unwrap(), b"contents");
    world.release(ino, opened.fh);
}

#[test]
fn the_kernel_caches_as_the_mode_says() {
    for (cache, direct_io, no_flush) in [
        (CacheMode::Kernel, false, true),
        (CacheMode::Writeback, false, false),
        (CacheMode::Strict, true, false),
    ] {
        let world = World::with(FsOptions { cache, background: false, ..FsOptions::default() });
        let file = world.file(ROOT, "file").unwrap();
        let opened = world.me.call(|cx| world.fs.open(cx, file, libc::O_RDWR, false)).unwrap();
        assert_eq!((opened.direct_io, opened.no_flush), (direct_io, no_flush));
        assert_eq!((opened.keep_cache, opened.parallel_direct_writes), (!direct_io, direct_io));
        assert_eq!(world.fs.writeback_cache(), cache == CacheMode::Writeback);
        world.me.call(|cx| world.fs.flush(cx, file, opened.fh, 0)).unwrap();
        world.release(file, opened.fh);
    }
}

#[test]
fn only_ferryfs_ioctls_are_answered() {
    let world = World::new();
    world.file(ROOT, "file").unwrap();
    let ioctl = |cmd, max| world.me.call(|cx| world.fs.ioctl(cx, ROOT, cmd, &[], max));
    assert_eq!(ioctl(ioctl::SYNC, 0).unwrap(), b"");
    let mut text = ioctl(ioctl::STATS, ioctl::STATS_LEN as usize).unwrap();
    assert_eq!(text.pop(), Some(0));
    let stats: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(stats["inodes"]["used"], 2);
    assert_eq!(code(ioctl(ioctl::STATS, 10)), libc::ERANGE);
    assert_eq!(code(ioctl(0x1234, 0)), libc::ENOTTY);
    // This volume is no mirror, and not everybody may ask.
    let replace =
        |me: InProcess| me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::REPLACE, b"/old\0/new\0", 0));
    assert_eq!(code(replace(world.me)), libc::EOPNOTSUPP);
    assert_eq!(code(replace(InProcess { uid: 1000, ..world.me })), libc::EPERM);
    let statfs = world.me.call(|cx| world.fs.statfs(cx)).unwrap();
    assert_eq!(statfs.files - statfs.files_free, 2);
}

#[test]
fn a_warm_is_for_root_and_the_owner_and_for_a_volume_in_a_store() {
    let mut world = World::new();
    let warm = |world: &World, words: &[u64]| {
        let message: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        world.me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::WARM, &message, 24))
    };
    for words in [&[0, 0, 1, ROOT][..], &[ioctl::WARM_BEGINS, 0, 0], &[0, 0, 1, 1 << 40]] {
        assert_eq!(code(warm(&world, words)), libc::EOPNOTSUPP, "{words:?}");
    }
    for words in [&[2, 0, 1, ROOT][..], &[0, u64::MAX, 1, ROOT], &[0, 0]] {
        assert_eq!(code(warm(&world, words)), libc::EINVAL, "{words:?}");
    }
    world.me.uid = 1000;
    assert_eq!(code(warm(&world, &[0, 0, 1, ROOT])), libc::EPERM);
}

#[test]
fn snapshots_are_for_root_and_the_owner_and_for_a_volume_in_a_store() {
    let mut world = World::new();
    let ask = |world: &World, cmd, message: &[u8]| {
        let max = ioctl::STATS_LEN as usize;
        world.me.call(|cx| world.fs.ioctl(cx, ROOT, cmd, message, max))
    };
    let all = [ioctl::SNAPSHOT_CREATE, ioctl::SNAPSHOT_DELETE, ioctl::SNAPSHOT_LIST];
    for cmd in all {
        assert_eq!(code(ask(&world, cmd, b"a name\0\0")), libc::EOPNOTSUPP, "{cmd:x}");
    }
    assert_eq!(code(ask(&world, ioctl::SNAPSHOT_LIST, b"")), libc::EINVAL);
    world.me.uid = 1000;
    for cmd in all {
        assert_eq!(code(ask(&world, cmd, b"a name\0\0")), libc::EPERM, "{cmd:x}");
    }
}

#[test]
fn root_and_the_owner_tune_the_flush_policy() {
    let mut world = World::new();
    let tune = |world: &World, what: u32, policy: u32, nanos: u64| {
        let words = [&what.to_ne_bytes()[..], &policy.to_ne_bytes(), &nanos.to_ne_bytes()].concat();
        world.me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::TUNE, &words, 0))
    };
    let reported = |world: &World| {
        let flush = world.fs.stats()["flush"].clone();
        (flush["policy"].as_str().unwrap().to_owned(), flush["fast_flush_ns"].as_u64().unwrap())
    };
    assert_eq!(reported(&world), ("adaptive".into(), 2_000_000));
    tune(&world, ioctl::TUNE_FLUSH, 1, 5).unwrap();
    assert_eq!(reported(&world), ("delay".into(), 2_000_000), "only what was asked for changes");
    tune(&world, ioctl::TUNE_FAST_FLUSH | ioctl::TUNE_RESET_FLUSH_TIME, 0, 5).unwrap();
    assert_eq!(reported(&world), ("delay".into(), 5));
    assert_eq!(code(tune(&world, ioctl::TUNE_FLUSH, 4, 0)), libc::EINVAL);
    assert_eq!(code(tune(&world, 8, 0, 0)), libc::EINVAL);
    let short = world.me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::TUNE, &[0; 15], 0));
    assert_eq!(code(short), libc::EINVAL);
    world.me.uid = 1000;
    assert_eq!(code(tune(&world, ioctl::TUNE_FLUSH, 0, 0)), libc::EPERM);
    assert_eq!(reported(&world), ("delay".into(), 5));
}
