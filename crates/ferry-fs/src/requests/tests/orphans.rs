//! Files without names: while they are open, and after a mount that ended without closing them.

use crate::requests::tests::*;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn an_open_file_outlives_its_name() {
    let world = World::new();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, b"contents").unwrap();
    world.unlink(ROOT, "file").unwrap();
    assert_eq!(world.attr(ino).nlink, 0);
    assert_eq!(world.read(ino, fh, 100).unwrap(), b"contents");
    world.write(ino, fh, 8, b" more").unwrap();
    assert_eq!(
        code(world.link(ino, ROOT, "again")),
        libc::ENOENT,
        "what was removed stays removed"
    );
    world.check();
    world.release(ino, fh);
    assert!(world.stored(ino), "the kernel still knows it");
    world.fs.forget(ino, 1);
    assert!(!world.stored(ino));
    world.check();
}

#[test]
fn nameless_inodes_are_not_damage() {
    let world = World::new();
    let target = "t".repeat(130);
    let symlink = |name: &str| {
        let entry = world
            .me
            .call(|cx| world.fs.symlink(cx, ROOT, name.as_bytes(), target.as_bytes()))
            .unwrap();
        entry.attr.unwrap().ino
    };
    let (link, replaced) = (symlink("link"), symlink("replaced"));
    for (name, mode) in [("fifo", libc::S_IFIFO), ("socket", libc::S_IFSOCK)] {
        world.mknod(ROOT, name, mode | 0o600).unwrap();
        world.unlink(ROOT, name).unwrap();
    }
    world.file(ROOT, "over").unwrap();
    world.unlink(ROOT, "link").unwrap();
    world.rename((ROOT, "over"), (ROOT, "replaced")).unwrap();
    assert!(world.stored(link) && world.stored(replaced), "the kernel still knows them");
    world.check();
    assert_eq!(world.me.call(|cx| world.fs.readlink(cx, link)).unwrap(), target.as_bytes());
    for ino in [link, replaced] {
        world.fs.forget(ino, 1);
        assert!(!world.stored(ino));
    }
    world.check();
}

#[test]
fn an_inode_forgotten_first_is_reclaimed_with_its_last_handle() {
    let world = World::new();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    let second = world.open(ino).unwrap();
    world.fs.forget(ino, 1);
    world.unlink(ROOT, "file").unwrap();
    world.release(ino, fh);
    assert!(world.stored(ino));
    world.release(ino, second);
    assert!(!world.stored(ino));
    world.check();
}

#[test]
fn a_file_without_a_name_may_get_one() {
    let mut world = World::new();
    let tmpfile = |flags| {
        let (entry, opened) = world.me.call(|cx| world.fs.tmpfile(cx, ROOT, 0o600, flags)).unwrap();
        (entry.attr.unwrap().ino, opened.fh)
    };
    let (ino, fh) = tmpfile(libc::O_RDWR);
    assert_eq!(world.attr(ino).nlink, 0);
    world.write(ino, fh, 0, b"kept").unwrap();
    world.check();
    world.link(ino, ROOT, "named").unwrap();
    assert_eq!(world.attr(ino).nlink, 1);
    let (exclusive, second) = tmpfile(libc::O_RDWR | libc::O_EXCL);
    assert_eq!(code(world.link(exclusive, ROOT, "never")), libc::ENOENT);
    for (ino, fh) in [(ino, fh), (exclusive, second)] {
        world.release(ino, fh);
        world.fs.forget(ino, 1);
    }
    assert!(world.stored(ino) && !world.stored(exclusive));
    world.check();
    world.reopen();
    let named = world.ino(ROOT, "named");
    let fh = world.open(named).unwrap();
    assert_eq!(world.read(named, fh, 10).unwrap(), b"kept");
    world.release(named, fh);
}

/// The volume as it is on the device when the process dies: nothing is told to the file system.
fn die(world: &mut World) {
    world.fs.sync().unwrap();
    let old = std::mem::replace(
        &mut world.fs,
        LocalFs::open(world.dev.clone(), world.options.clone(), Env::real()).unwrap(),
    );
    drop(old);
}

#[test]
fn orphans_of_a_dead_mount_are_reclaimed_by_the_next() {
    let mut world = World::new();
    let before = world.fs.counters.inodes();
    let (file, fh) = world.create(ROOT, "file").unwrap();
    world.write(file, fh, 0, &[7; 2000]).unwrap();
    world.setxattr(file, "user.x", b"y").unwrap();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.lookup(ROOT, "dir").unwrap();
    let temp =
        world.me.call(|cx| world.fs.tmpfile(cx, ROOT, 0o600, 0)).unwrap().0.attr.unwrap().ino;
    world.unlink(ROOT, "file").unwrap();
    world.rmdir(ROOT, "dir").unwrap();
    assert!([file, dir, temp].iter().all(|ino| world.stored(*ino)));
    die(&mut world);
    assert!(![file, dir, temp].iter().any(|ino| world.stored(*ino)));
    assert_eq!(world.fs.counters.inodes(), before);
    world.check();
}

/// Programs on other machines have it open when the server dies, and when it stops.
#[test]
fn open_files_without_names_outlive_a_mount_that_keeps_them() {
    // A mount that dies here must have no threads: they would go on writing.
    for (crashes, background) in [(true, false), (false, false), (false, true)] {
        let options = FsOptions {
            background,
            keeps_removed: true,
            cache_bytes: 8 << 20,
            ..FsOptions::default()
        };
        let mut world = World::with(options);
        let before = world.fs.counters.inodes();
        let (small, a) = world.create(ROOT, "small").unwrap();
        let (large, b) = world.create(ROOT, "large").unwrap();
        let (nobodys, _) = world.create(ROOT, "nobody's").unwrap();
        world.write(small, a, 0, b"a few bytes").unwrap();
        world.write(large, b, 0, &[7; 300_000]).unwrap();
        ["small", "large", "nobody's"].iter().for_each(|name| world.unlink(ROOT, name).unwrap());
        // Again: nobody has come yet.
        for _ in 0..2 {
            if crashes {
                die(&mut world);
            } else {
                world.fs.keep_removed();
                world.reopen();
            }
        }
        for ino in [small, large] {
            assert_eq!(world.lookup(ino, ".").unwrap().map(|attr| attr.nlink), Some(0));
        }
        let (a, b) = (world.open(small).unwrap(), world.open(large).unwrap());
        world.fs.reclaim_removed();
        while world.stored(nobodys) {
            assert!(background);
            std::thread::yield_now();
        }
        assert_eq!(world.lookup(nobodys, "."), Err(Errno(libc::ESTALE)));
        assert_eq!(world.read(small, a, 100).unwrap(), b"a few bytes");
        assert_eq!(world.read(large, b, 1 << 20).unwrap(), [7; 300_000]);
        for (ino, fh) in [(small, a), (large, b)] {
            world.release(ino, fh);
            world.fs.forget(ino, 1);
            assert!(!world.stored(ino));
        }
        assert_eq!(world.fs.counters.inodes(), before);
        world.check();
    }
}

/// Of two clients that are not back yet, one comes first, and removes what the other has open.
#[test]
fn files_removed_during_the_grace_period_wait_for_its_end() {
    let mut world = World::with(FsOptions {
        background: false,
        keeps_removed: true,
        cache_bytes: 8 << 20,
        ..FsOptions::default()
    });
    let (open, fh) = world.create(ROOT, "open").unwrap();
    world.write(open, fh, 0, b"contents").unwrap();
    let nobodys = world.file(ROOT, "nobody's").unwrap();
    world.fs.keep_removed();
    world.reopen();
    world.unlink(ROOT, "open").unwrap();
    world.unlink(ROOT, "nobody's").unwrap();
    assert_eq!(world.lookup(open, ".").unwrap().map(|attr| attr.nlink), Some(0));
    let fh = world.open(open).unwrap();
    assert_eq!(world.read(open, fh, 100).unwrap(), b"contents");
    world.fs.reclaim_removed();
    assert!(world.stored(open) && !world.stored(nobodys));
    world.release(open, fh);
    world.fs.forget(open, 1);
    assert!(!world.stored(open));
    let later = world.file(ROOT, "later").unwrap();
    world.unlink(ROOT, "later").unwrap();
    assert!(!world.stored(later), "nobody is missing any more");
    world.check();
}

#[test]
fn a_file_that_was_made_in_the_grace_period_gives_its_space_back_at_once() {
    let mut world = World::with(FsOptions {
        background: false,
        keeps_removed: true,
        cache_bytes: 8 << 20,
        ..FsOptions::default()
    });
    let old = world.file(ROOT, "old").unwrap();
    world.fs.keep_removed();
    world.reopen();
    let (new, fh) = world.create(ROOT, "new").unwrap();
    world.write(new, fh, 0, &[7; 300_000]).unwrap();
    ["old", "new"].iter().for_each(|name| world.unlink(ROOT, name).unwrap());
    world.release(new, fh);
    world.fs.forget(new, 1);
    assert!(world.stored(old), "a client that is not back yet may have it open");
    assert!(!world.stored(new), "only clients that are here have known it");
    world.fs.reclaim_removed();
    assert!(!world.stored(old));
    world.check();
}

/// A client that is back asks for a file that it has open, while others remove it.
#[test]
fn a_file_being_removed_is_found_by_its_number() {
    const FILES: usize = 10_000;
    let options = FsOptions { background: false, keeps_removed: true, ..FsOptions::default() };
    let mut world = World::with(options);
    let inos: Vec<Ino> = (0..FILES).map(|n| world.file(ROOT, &format!("{n}")).unwrap()).collect();
    world.fs.keep_removed();
    world.reopen();
    let (asked, mut missing) = (AtomicUsize::new(0), Vec::<Ino>::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..FILES {
                while asked.load(Ordering::Acquire) < n {
                    std::hint::spin_loop();
                }
                world.unlink(ROOT, &format!("{n}")).unwrap();
            }
        });
        for (n, ino) in inos.iter().enumerate() {
            asked.store(n, Ordering::Release);
            // Now here, now there in what the other does meanwhile.
            (0..n % 97 * 20).for_each(|_| std::hint::spin_loop());
            match world.lookup(*ino, ".") {
                Ok(_) => world.fs.forget(*ino, 1),
                Err(_) => missing.push(*ino),
            }
        }
    });
    assert!(missing.is_empty(), "{missing:?} are not found");
    world.fs.reclaim_removed();
    assert!(!inos.iter().any(|ino| world.stored(*ino)));
    world.check();
}

#[test]
fn detach_forgets_all_lookups_and_handles() {
    let world = World::new();
    let (file, _) = world.create(ROOT, "file").unwrap();
    let (retained, _) = world.create(ROOT, "kept").unwrap();
    world.unlink(ROOT, "file").unwrap();
    world.fs.detach();
    assert!(!world.stored(file) && world.stored(retained));
    assert_eq!(world.fs.handles.len(), 0);
    world.check();
}

#[test]
fn many_attributes_go_with_their_file() {
    let world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    for i in 0..100 {
        world.setxattr(file, &format!("user.attribute-{i}"), &[1; 300]).unwrap();
    }
    world.unlink(ROOT, "file").unwrap();
    assert!(!world.stored(file));
    world.check();
}
