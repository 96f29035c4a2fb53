//! rename(2), as a matrix.

use crate::requests::tests::*;

const NO_REPLACE: RenameFlags = RenameFlags { no_replace: true, exchange: false, whiteout: false };
const EXCHANGE: RenameFlags = RenameFlags { no_replace: false, exchange: true, whiteout: false };

/// A root with a file, an empty and a full directory, and a target to move to.
fn furnished() -> (World, Ino) {
    let world = World::new();
    let target = world.mkdir(ROOT, "target").unwrap();
    for dir in [ROOT, target] {
        world.file(dir, "file").unwrap();
        world.mkdir(dir, "empty").unwrap();
        let full = world.mkdir(dir, "full").unwrap();
        world.file(full, "inside").unwrap();
    }
    (world, target)
}

#[test]
fn rename_replaces_only_the_same_kind() {
    use libc::{EISDIR, ENOTDIR, ENOTEMPTY};
    let cases = [
        ("file", "file", 0),
        ("file", "empty", EISDIR),
        ("file", "full", EISDIR),
        ("empty", "file", ENOTDIR),
        ("empty", "empty", 0),
        ("empty", "full", ENOTEMPTY),
        ("full", "file", ENOTDIR),
        ("full", "empty", 0),
        ("full", "full", ENOTEMPTY),
    ];
    for (from, to, want) in cases {
        let (world, target) = furnished();
        let moved = world.ino(ROOT, from);
        let got = world.rename((ROOT, from), (target, to)).map_or_else(|e| e.0, |()| 0);
        assert_eq!(got, want, "{from} over {to}");
        assert_eq!(world.exists(ROOT, from), want != 0);
        assert_eq!(world.ino(target, to) == moved, want == 0);
        world.check();
    }
}

#[test]
fn rename_works_within_a_directory_and_over_itself() {
    let (world, _) = furnished();
    let file = world.ino(ROOT, "file");
    world.rename((ROOT, "file"), (ROOT, "file")).unwrap();
    world.rename((ROOT, "file"), (ROOT, "renamed")).unwrap();
    assert_eq!((world.ino(ROOT, "renamed"), world.exists(ROOT, "file")), (file, false));
    world.rename((ROOT, "full"), (ROOT, "empty")).unwrap();
    world.check();
    world.link(file, ROOT, "second").unwrap();
    world.rename((ROOT, "renamed"), (ROOT, "second")).unwrap();
    assert!(world.exists(ROOT, "renamed"), "two names of one inode: nothing happens");
    assert_eq!(code(world.rename((ROOT, "none"), (ROOT, "x"))), libc::ENOENT);
    world.check();
}

#[test]
fn a_directory_does_not_move_below_itself() {
    let world = World::new();
    let a = world.mkdir(ROOT, "a").unwrap();
    let b = world.mkdir(a, "b").unwrap();
    let c = world.mkdir(b, "c").unwrap();
    for target in [a, b, c] {
        assert_eq!(code(world.rename((ROOT, "a"), (target, "x"))), libc::EINVAL);
    }
    assert_eq!(code(world.rename((b, "c"), (ROOT, "a"))), libc::ENOTEMPTY);
    assert_eq!(code(world.rename_with((ROOT, "a"), (b, "c"), EXCHANGE)), libc::EINVAL);
    assert_eq!(code(world.rename_with((b, "c"), (ROOT, "a"), EXCHANGE)), libc::EINVAL);
    world.rename((b, "c"), (ROOT, "c")).unwrap();
    world.rename((ROOT, "a"), (c, "a")).unwrap();
    assert_eq!(world.ino(a, ".."), c);
    world.check();
}

#[test]
fn rename_keeps_no_replace_and_exchange() {
    let (world, target) = furnished();
    for to in ["file", "empty", "full"] {
        assert_eq!(code(world.rename_with((ROOT, "file"), (target, to), NO_REPLACE)), libc::EEXIST);
    }
    world.rename_with((ROOT, "file"), (target, "new"), NO_REPLACE).unwrap();
    assert_eq!(code(world.rename_with((ROOT, "none"), (target, "new"), EXCHANGE)), libc::ENOENT);
    assert_eq!(code(world.rename_with((target, "new"), (ROOT, "none"), EXCHANGE)), libc::ENOENT);
    let (new, full) = (world.ino(target, "new"), world.ino(ROOT, "full"));
    world.rename_with((target, "new"), (ROOT, "full"), EXCHANGE).unwrap();
    assert_eq!((world.ino(ROOT, "full"), world.ino(target, "new")), (new, full));
    assert_eq!(world.ino(full, ".."), target);
    world.check();
    world.rename_with((ROOT, "empty"), (target, "empty"), EXCHANGE).unwrap();
    world.rename_with((ROOT, "empty"), (ROOT, "full"), EXCHANGE).unwrap();
    world.check();
    let both = RenameFlags { no_replace: true, exchange: true, whiteout: false };
    assert_eq!(code(world.rename_with((ROOT, "empty"), (ROOT, "full"), both)), libc::EINVAL);
}

#[test]
fn a_replaced_file_lives_while_it_is_open() {
    let world = World::new();
    let (victim, fh) = world.create(ROOT, "victim").unwrap();
    world.file(ROOT, "file").unwrap();
    world.rename((ROOT, "file"), (ROOT, "victim")).unwrap();
    assert_eq!(world.attr(victim).nlink, 0);
    world.check();
    world.release(victim, fh);
    world.fs.forget(victim, 1);
    assert!(!world.stored(victim));
    world.check();
}

#[test]
fn a_whiteout_is_left_at_the_old_name() {
    let world = World::new();
    let white = RenameFlags { whiteout: true, ..RenameFlags::default() };
    let (one, two) = (world.mkdir(ROOT, "one").unwrap(), world.mkdir(ROOT, "two").unwrap());
    let is_white = |dir: Ino, name: &str| {
        let attr = world.attr(world.list(dir)[name]);
        (attr.mode, attr.rdev, attr.nlink) == (libc::S_IFCHR, 0, 1)
    };
    let file = world.file(one, "file").unwrap();
    world.rename_with((one, "file"), (two, "new"), white).unwrap();
    assert!(is_white(one, "file"));
    assert_eq!(world.list(two)["new"], file);
    let over = world.file(one, "over").unwrap();
    world.rename_with((one, "over"), (two, "new"), white).unwrap();
    assert!(is_white(one, "over"));
    assert_eq!(world.list(two), [("new".to_owned(), over)].into());
    let dir = world.mkdir(one, "dir").unwrap();
    world.rename_with((one, "dir"), (two, "dir"), white).unwrap();
    assert!(is_white(one, "dir"));
    assert_eq!(world.list(two)["dir"], dir);
    assert_eq!((world.attr(one).nlink, world.attr(two).nlink), (2, 3));
    assert_eq!(world.attr(one).size, 3);
    // Back over a whiteout, as an overlay does.
    world.rename_with((two, "dir"), (one, "back"), white).unwrap();
    world.unlink(one, "file").unwrap();
    let none = RenameFlags { no_replace: true, whiteout: true, ..RenameFlags::default() };
    assert_eq!(code(world.rename_with((one, "back"), (one, "dir"), none)), libc::EEXIST);
    let swap = RenameFlags { exchange: true, whiteout: true, ..RenameFlags::default() };
    assert_eq!(code(world.rename_with((one, "back"), (one, "dir"), swap)), libc::EINVAL);
    world.check();
}
