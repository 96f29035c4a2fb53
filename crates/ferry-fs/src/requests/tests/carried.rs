//! Another process goes on with a mount: what programs have open, and what the kernel knows, is
//! as it was.

use super::*;
use crate::inode::table::InodeSource;
use crate::known::{LeftBehind, LeftWords, inode_flag};
use crate::store::data_store::{Busy, Dirty};
use crate::volume::VolumeError;
use crate::{Carried, RequestId};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

/// The process ends in order, and the next one goes on with what it carries.
fn go_on(world: &mut World) {
    go_on_behind(world, false).unwrap();
}

/// The same. `others`: they change the volume between the two.
fn go_on_behind(world: &mut World, others: bool) -> Result<(), VolumeError> {
    let carried = world.fs.carry();
    world.fs.detach();
    world.fs.close().unwrap();
    let carried = world.fs.closed(carried);
    assert_eq!(Carried::decode(&carried.encode()).as_ref(), Some(&carried));
    if others {
        let options = FsOptions { background: false, ..FsOptions::default() };
        let other = LocalFs::open(world.dev.clone(), options, Env::real()).unwrap();
        let mode = SetAttr { mode: Some(0o700), ..SetAttr::default() };
        world.me.call(|cx| other.setattr(cx, ROOT, None, &mode)).unwrap();
        other.close().unwrap();
    }
    let mut memory = tempfile::tempfile().unwrap();
    memory.write_all(&carried.encode()).unwrap();
    // The first process is killed before it serves, if it has no threads that would go on.
    for is_killed in [true, false] {
        if is_killed && world.options.background {
            continue;
        }
        let mut bytes = vec![0; carried.encode().len()];
        memory.read_exact_at(&mut bytes, 0).unwrap();
        let found = Carried::decode(&bytes).unwrap();
        let shared = memory.try_clone().unwrap();
        let in_order = Some(Arc::new(found.in_order(shared.into())));
        let options = FsOptions { goes_on: true, in_order, ..world.options.clone() };
        let next = LocalFs::open(world.dev.clone(), options, Env::real())?;
        if is_killed {
            std::mem::forget(next);
        } else {
            world.fs = next;
            world.fs.take_over(&found).unwrap();
        }
    }
    Ok(())
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

/// A world whose process can be killed, with what it has noted of the kernel.
pub(super) fn mortal(options: FsOptions) -> (World, std::os::fd::OwnedFd) {
    let known = Arc::new(crate::Known::new().unwrap());
    let file = known.file().unwrap();
    let options = FsOptions { background: false, known: Some(known), ..options };
    (World::with(options), file)
}

/// The process is killed, and the next one goes on from what it has noted and from what was
/// durable.
fn killed(world: &mut World, file: &mut std::os::fd::OwnedFd) {
    killed_and(world, file, LeftWords::durable_only);
}

/// The process is killed, and `left` is what the next one finds.
pub(super) fn killed_and(
    world: &mut World,
    file: &mut std::os::fd::OwnedFd,
    left: impl FnOnce(LeftWords) -> LeftWords,
) {
    // Nothing is closed: it is as if the power had failed.
    let known = Arc::new(crate::Known::new().unwrap());
    let next = known.file().unwrap();
    let words = LeftWords::of(std::mem::replace(file, next)).expect("the same form");
    let left = Some(LeftBehind { words: left(words), had_others: false });
    let options = FsOptions { goes_on: true, known: Some(known), left, ..world.options.clone() };
    let before = std::mem::replace(
        &mut world.fs,
        LocalFs::open(world.dev.clone(), options, Env::real()).unwrap(),
    );
    std::mem::forget(before);
    world.fs.take_over_left().unwrap().expect("all of it");
}

fn sync_all(world: &World) {
    world.fs.sync().unwrap();
}

fn fsync(world: &World, ino: Ino, fh: u64) -> Done {
    world.me.call(|cx| world.fs.fsync(cx, ino, fh, false))
}

#[test]
fn names_that_were_not_durable_survive_a_kill() {
    let (mut world, mut file) = mortal(FsOptions::default());
    sync_all(&world);
    let dir = world.mkdir(ROOT, "dir").unwrap();
    let (ino, fh) = world.create(dir, "file").unwrap();
    world.create(dir, "moved").unwrap();
    world.rename((dir, "moved"), (ROOT, "there")).unwrap();
    world.create(ROOT, "removed").unwrap();
    world.unlink(ROOT, "removed").unwrap();
    for _ in 0..3 {
        killed_and(&mut world, &mut file, |left| left);
        fsync(&world, ino, fh).unwrap();
        assert_eq!(world.lookup(dir, "file").unwrap().unwrap().ino, ino);
        assert!(world.lookup(ROOT, "there").unwrap().is_some());
        assert!(world.lookup(dir, "moved").unwrap().is_none());
        assert!(world.lookup(ROOT, "removed").unwrap().is_none());
        world.me.call(|cx| world.fs.fsyncdir(cx, dir, 0, false)).unwrap();
        world.check();
    }
}

/// Bytes that are not the same at any two blocks.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| ((at as u64 * 31 + at as u64 / 4096 * 7 + seed * 101) % 251) as u8).collect()
}

#[test]
fn contents_that_were_not_written_back_survive_a_kill() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let mut expected = Vec::new();
    let mut make = |world: &World, name: &str, durable: usize| {
        let (ino, fh) = world.create(ROOT, name).unwrap();
        let bytes = pattern(durable as u64, durable);
        world.write(ino, fh, 0, &bytes).unwrap();
        expected.push((name.to_owned(), ino, fh, bytes));
    };
    [("small", 100), ("large", 300_000), ("cut", 200_000), ("block", 4096)]
        .iter()
        .for_each(|(name, len)| make(&world, name, *len));
    sync_all(&world);
    [("new", 70), ("new and large", 250_000)]
        .iter()
        .for_each(|(name, len)| make(&world, name, *len));
    let write = |world: &World, at: &mut (String, Ino, u64, Vec<u8>), offset: usize, len: usize| {
        let bytes = pattern(offset as u64 + 3, len);
        world.write(at.1, at.2, offset as u64, &bytes).unwrap();
        let end = at.3.len().max(offset + len);
        at.3.resize(end, 0);
        at.3[offset..offset + len].copy_from_slice(&bytes);
    };
    let cut = |world: &World, at: &mut (String, Ino, u64, Vec<u8>), size: usize| {
        let inode = world.fs.table.need(at.1).unwrap();
        world.fs.data.set_size(&inode, size as u64, &mut |_| {}).unwrap();
        at.3.resize(size, 0);
    };
    write(&world, &mut expected[0], 50, 20);
    write(&world, &mut expected[1], 65_000, 10_000);
    write(&world, &mut expected[1], 290_001, 100_000);
    write(&world, &mut expected[2], 150_000, 100_000);
    cut(&world, &mut expected[2], 160_123);
    write(&world, &mut expected[2], 500_000, 10);
    write(&world, &mut expected[3], 4096, 1);
    write(&world, &mut expected[5], 1 << 20, 5);
    let (removed, open) = world.create(ROOT, "removed").unwrap();
    world.write(removed, open, 0, b"removed").unwrap();
    world.unlink(ROOT, "removed").unwrap();
    let changed = world.attr(expected[1].1).mtime;
    for turn in 0..4 {
        killed_and(&mut world, &mut file, |left| left);
        for (name, ino, fh, bytes) in &expected {
            assert_eq!(world.attr(*ino).size, bytes.len() as u64, "{name} {turn}");
            let found = world.read(*ino, *fh, bytes.len()).unwrap();
            assert!(found == *bytes, "{name} {turn}");
        }
        assert_eq!(world.attr(expected[1].1).mtime, changed, "{turn}");
        assert_eq!(world.read(removed, open, 100).unwrap(), b"removed");
        world.check();
        // Something is taken by write-back, and the context that maps it is not durable.
        if turn == 1 {
            let inode = world.fs.table.need(expected[1].1).unwrap();
            world.fs.data.write_back(Dirty::File(&inode), Busy::Wait).unwrap();
        }
        if turn == 2 {
            write(&world, &mut expected[1], 1000, 9000);
            let fresh = world.attr(expected[1].1).mtime;
            assert!(fresh >= changed);
            killed_and(&mut world, &mut file, |left| left);
            assert_eq!(world.attr(expected[1].1).mtime, fresh);
            break;
        }
    }
    for (name, ino, fh, bytes) in &expected {
        fsync(&world, *ino, *fh).unwrap();
        assert!(world.read(*ino, *fh, bytes.len()).unwrap() == *bytes, "{name}");
    }
    world.check();
}

#[test]
fn contents_of_files_that_were_removed_are_not_noted() {
    let (world, _file) = mortal(FsOptions::default());
    let known = world.options.known.clone().unwrap();
    let (ino, fh) = world.create(ROOT, "removed").unwrap();
    known.count(ino, 1);
    world.write(ino, fh, 0, b"contents").unwrap();
    assert_ne!(known.flags(ino) & inode_flag::UNSAVED, 0);
    world.unlink(ROOT, "removed").unwrap();
    world.release(ino, fh);
    world.fs.forget(ino, lookups(&world, ino));
    assert!(!world.stored(ino));
    assert_eq!(known.flags(ino) & inode_flag::UNSAVED, 0);
}

#[test]
fn what_was_durable_is_there_after_a_kill_and_what_was_not_is_stale() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (stays, a) = world.create(ROOT, "stays").unwrap();
    world.write(stays, a, 0, b"stays").unwrap();
    let (removed, b) = world.create(ROOT, "removed").unwrap();
    world.write(removed, b, 0, &[3; 100_000]).unwrap();
    world.unlink(ROOT, "removed").unwrap();
    sync_all(&world);
    let (lost, c) = world.create(ROOT, "lost").unwrap();
    for _ in 0..3 {
        killed(&mut world, &mut file);
        assert_eq!(world.read(stays, a, 100).unwrap(), b"stays");
        fsync(&world, stays, a).unwrap();
        assert_eq!(world.read(removed, b, 100_000).unwrap(), [3; 100_000]);
        assert_eq!(code(world.read(lost, c, 1)), libc::ESTALE);
        assert_eq!(code(fsync(&world, lost, c)), libc::ESTALE);
        assert!(world.lookup(ROOT, "lost").unwrap().is_none());
        // Its number and its handle are given to nobody.
        let (other, d) = world.create(ROOT, "other").unwrap();
        assert!(other > lost && ![a, b, c].contains(&d));
        world.release(lost, c);
        world.release(other, d);
        world.fs.forget(other, 1);
        world.unlink(ROOT, "other").unwrap();
        sync_all(&world);
    }
    world.fs.forget(lost, 1);
    world.release(removed, b);
    assert!(world.stored(removed), "the kernel knows it yet");
    world.fs.forget(removed, 1);
    assert!(!world.stored(removed));
    world.release(stays, a);
    world.check();
}

#[test]
fn an_open_file_is_told_once_that_it_has_lost_contents() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, &[1; 50_000]).unwrap();
    let (durable, other) = world.create(ROOT, "durable").unwrap();
    world.write(durable, other, 0, &[1; 50_000]).unwrap();
    fsync(&world, durable, other).unwrap();
    fsync(&world, ino, fh).unwrap();
    killed(&mut world, &mut file);
    fsync(&world, ino, fh).unwrap();
    fsync(&world, durable, other).unwrap();
    // Not written back; then written back, and in a context that is not durable.
    world.write(ino, fh, 0, &[2; 50_000]).unwrap();
    killed(&mut world, &mut file);
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    fsync(&world, ino, fh).unwrap();
    fsync(&world, durable, other).unwrap();
    assert_eq!(world.read(ino, fh, 50_000).unwrap(), [1; 50_000]);
    killed(&mut world, &mut file);
    fsync(&world, ino, fh).unwrap();
    world.release(durable, other);
    world.release(ino, fh);
    world.check();
}

#[test]
fn a_kill_of_a_process_that_has_just_gone_on_loses_no_error() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    fsync(&world, ino, fh).unwrap();
    world.write(ino, fh, 0, &[2; 50_000]).unwrap();
    killed(&mut world, &mut file);
    killed(&mut world, &mut file);
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    fsync(&world, ino, fh).unwrap();
}

#[test]
fn a_file_without_a_name_can_get_one_after_a_kill() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let made = world.me.call(|cx| world.fs.tmpfile(cx, ROOT, 0o600, libc::O_RDWR)).unwrap();
    let (ino, fh) = (made.0.attr.expect("it was made").ino, made.1.fh);
    world.write(ino, fh, 0, b"contents").unwrap();
    sync_all(&world);
    killed(&mut world, &mut file);
    world.link(ino, ROOT, "named").unwrap();
    // The name is lost, and it can have it again.
    killed(&mut world, &mut file);
    world.link(ino, ROOT, "named").unwrap();
    assert_eq!(world.read(ino, fh, 100).unwrap(), b"contents");
    world.release(ino, fh);
    world.check();
}

#[test]
fn a_directory_that_has_lost_names_says_so_to_each_program_that_was_there() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.lookup(ROOT, "dir").unwrap();
    world.me.caller = std::process::id();
    let fsyncdir = |world: &World, ino| world.me.call(|cx| world.fs.fsyncdir(cx, ino, 0, false));
    fsyncdir(&world, dir).unwrap();
    fsyncdir(&world, ROOT).unwrap();
    killed(&mut world, &mut file);
    fsyncdir(&world, dir).unwrap();
    fsyncdir(&world, ROOT).unwrap();
    world.create(dir, "lost").unwrap();
    world.create(ROOT, "lost").unwrap();
    killed(&mut world, &mut file);
    for ino in [dir, ROOT] {
        assert_eq!(code(fsyncdir(&world, ino)), libc::EIO);
        fsyncdir(&world, ino).unwrap();
    }
    assert!(world.lookup(ROOT, "lost").unwrap().is_none());
    world.check();
}

/// Each kind of change whose answer a replay would not get: what is there before, the change, and
/// the error of the same change once more.
type Change = (fn(&World) -> Done, i32);

fn create_exclusively(world: &World) -> Done {
    let flags = libc::O_RDWR | libc::O_EXCL;
    let (_, opened) =
        world.me.call(|cx| world.fs.create(cx, ROOT, b"created", libc::S_IFREG | 0o644, flags))?;
    world.release(0, opened.fh);
    Ok(())
}

fn make_anew(world: &World) -> Done {
    world.me.call(|cx| world.fs.setxattr(cx, world.ino(ROOT, "there"), b"user.new", b"value", NEW))
}

const NEW: XattrFlags = XattrFlags { create: true, replace: false, acl_kill_sgid: false };

fn remove_attribute(world: &World) -> Done {
    world.me.call(|cx| world.fs.removexattr(cx, world.ino(ROOT, "there"), b"user.old"))
}

const CHANGES: [Change; 10] = [
    (create_exclusively, libc::EEXIST),
    (|world| world.mkdir(ROOT, "dir").map(drop), libc::EEXIST),
    (|world| world.file(ROOT, "node").map(drop), libc::EEXIST),
    (|world| world.symlink(ROOT, "symlink", "target").map(drop), libc::EEXIST),
    (|world| world.link(world.ino(ROOT, "there"), ROOT, "linked"), libc::EEXIST),
    (|world| world.unlink(ROOT, "file"), libc::ENOENT),
    (|world| world.rmdir(ROOT, "empty"), libc::ENOENT),
    (|world| world.rename((ROOT, "from"), (ROOT, "to")), libc::ENOENT),
    (make_anew, libc::EEXIST),
    (remove_attribute, libc::ENODATA),
];

#[test]
fn a_change_that_was_durable_before_its_answer_was_noted_is_made_once() {
    for (number, (change, once_more)) in CHANGES.into_iter().enumerate() {
        for is_killed_at_once in [false, true] {
            let (mut world, mut file) = mortal(FsOptions::default());
            for name in ["there", "file", "from"] {
                world.file(ROOT, name).unwrap();
            }
            world.mkdir(ROOT, "empty").unwrap();
            world.setxattr(world.ino(ROOT, "there"), "user.old", b"value").unwrap();
            let request = |unique| Some(RequestId { slot: 5, unique });
            // It is lost with the process, and the replay makes it.
            sync_all(&world);
            world.me.request = request(8);
            change(&world).unwrap();
            killed(&mut world, &mut file);
            change(&world).unwrap();
            // It is there, and the replay gives its answer: in the next process, and in the one
            // after that if the next one was killed before it noted that answer.
            sync_all(&world);
            let (names, inodes) = (world.list(ROOT), world.fs.counters.inodes());
            for _ in 0..2 {
                killed(&mut world, &mut file);
                if is_killed_at_once {
                    continue;
                }
                change(&world).unwrap_or_else(|error| panic!("change {number}: {error:?}"));
            }
            change(&world).unwrap();
            assert_eq!((world.list(ROOT), world.fs.counters.inodes()), (names, inodes), "{number}");
            // Another request, in the same slot, is another change.
            world.me.request = request(10);
            assert_eq!(code(change(&world)), once_more, "change {number}");
            world.me.request = None;
            world.check();
        }
    }
}

/// What was written over is in no context before it is written back.
#[test]
fn contents_survive_a_kill_of_the_first_process_behind_an_orderly_close() {
    let (mut world, _) = mortal(FsOptions::default());
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, b"durable").unwrap();
    world.release(ino, fh);
    world.fs.close().unwrap();
    let known = Arc::new(crate::Known::new().unwrap());
    let mut file = known.file().unwrap();
    world.options.known = Some(known);
    world.fs = LocalFs::open(world.dev.clone(), world.options.clone(), Env::real()).unwrap();
    world.lookup(ROOT, "file").unwrap();
    let fh = world.open(ino).unwrap();
    world.write(ino, fh, 0, b"answers").unwrap();
    killed_and(&mut world, &mut file, |left| left);
    assert_eq!(world.read(ino, fh, 100).unwrap(), b"answers");
    fsync(&world, ino, fh).unwrap();
    world.check();
}

/// The request comes again, for its answer was not noted.
#[test]
fn a_loss_is_told_again_if_the_process_is_killed_before_the_answer_arrives() {
    let (mut world, mut file) = mortal(FsOptions::default());
    world.me.caller = std::process::id();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    sync_all(&world);
    world.write(ino, fh, 0, &[2; 50_000]).unwrap();
    killed(&mut world, &mut file);
    for _ in 0..2 {
        assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
        killed(&mut world, &mut file);
    }
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    // This one came behind the answer.
    fsync(&world, ino, fh).unwrap();
    killed(&mut world, &mut file);
    fsync(&world, ino, fh).unwrap();
    world.check();
}

/// Leaves no room for another name.
fn fill_metadata(world: &World) {
    let (ino, fh) = world.create(ROOT, "filler").unwrap();
    let mut at = 0;
    while let Ok(count) = world.write(ino, fh, at, &[7; 1 << 20]) {
        at += count;
    }
    world.release(ino, fh);
    let more = |number: &u32| world.mkdir(ROOT, &format!("filler-{number}")).is_err();
    (0..100_000).find(more).expect("the volume is full");
}

/// What had the last room is there: its replay needs none.
#[test]
fn a_change_that_took_the_last_room_is_answered_when_it_is_replayed() {
    let link = |world: &World| world.link(world.ino(ROOT, "there"), ROOT, "linked");
    let mkdir = |world: &World| world.mkdir(ROOT, "dir").map(drop);
    for change in [&link as &dyn Fn(&World) -> Done, &mkdir] {
        let (mut world, mut file) = mortal(FsOptions::default());
        world.file(ROOT, "there").unwrap();
        let request = |unique| Some(RequestId { slot: 5, unique });
        world.me.request = request(8);
        change(&world).unwrap();
        sync_all(&world);
        killed(&mut world, &mut file);
        world.me.request = None;
        fill_metadata(&world);
        world.me.request = request(8);
        change(&world).unwrap();
        world.me.request = request(10);
        assert_eq!(code(world.mkdir(ROOT, "another").map(drop)), libc::ENOSPC);
    }
}

fn drop_lookup(world: &World, ino: Ino) {
    world.fs.forget(ino, 1);
    world.fs.table.trim(1 << 12);
}

#[test]
fn what_the_kernel_has_forgotten_tells_of_its_losses_all_the_same() {
    let (mut world, mut file) = mortal(FsOptions::default());
    world.me.caller = std::process::id();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    world.lookup(ROOT, "dir").unwrap();
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, &[1; 50_000]).unwrap();
    sync_all(&world);
    // Closed and forgotten with contents that no context has; then opened and written again.
    world.write(ino, fh, 0, &[2; 50_000]).unwrap();
    world.release(ino, fh);
    world.fs.forget(ino, 1);
    world.lookup(ROOT, "file").unwrap();
    let fh = world.open(ino).unwrap();
    world.write(ino, fh, 0, &[3; 50_000]).unwrap();
    world.create(dir, "lost").unwrap();
    world.fs.forget(dir, 1);
    killed(&mut world, &mut file);
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    assert_eq!(code(world.me.call(|cx| world.fs.fsyncdir(cx, dir, 0, false))), libc::EIO);
    // One that is not open: who opens it first is told, also behind another kill.
    world.write(ino, fh, 0, &[4; 50_000]).unwrap();
    world.release(ino, fh);
    drop_lookup(&world, ino);
    for _ in 0..3 {
        killed(&mut world, &mut file);
        world.lookup(ROOT, "file").unwrap();
        drop_lookup(&world, ino);
    }
    world.lookup(ROOT, "file").unwrap();
    let fh = world.open(ino).unwrap();
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    fsync(&world, ino, fh).unwrap();
    world.release(ino, fh);
    killed(&mut world, &mut file);
    let fh = world.open(ino).unwrap();
    fsync(&world, ino, fh).unwrap();
    world.check();
}

#[test]
fn each_descriptor_is_told_of_a_loss_though_others_were_before_another_kill_or_change() {
    for kills_again in [true, false] {
        let (mut world, mut file) = mortal(FsOptions::default());
        world.me.caller = std::process::id();
        let (ino, first) = world.create(ROOT, "file").unwrap();
        let second = world.open(ino).unwrap();
        sync_all(&world);
        world.write(ino, first, 0, &[2; 50_000]).unwrap();
        world.create(ROOT, "lost").unwrap();
        killed(&mut world, &mut file);
        assert_eq!(code(fsync(&world, ino, first)), libc::EIO);
        if kills_again {
            killed(&mut world, &mut file);
        } else {
            go_on(&mut world);
        }
        assert_eq!(code(fsync(&world, ino, second)), libc::EIO);
        fsync(&world, ino, second).unwrap();
        assert_eq!(code(world.me.call(|cx| world.fs.fsyncdir(cx, ROOT, 0, false))), libc::EIO);
        world.check();
    }
}

#[test]
fn a_sync_of_the_volume_says_once_to_each_older_program_that_something_is_lost() {
    let (mut world, mut file) = mortal(FsOptions::default());
    world.me.caller = std::process::id();
    let sync = |world: &World| world.me.call(|cx| world.fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0));
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    sync(&world).unwrap();
    killed(&mut world, &mut file);
    sync(&world).unwrap();
    world.write(ino, fh, 0, b"lost").unwrap();
    killed(&mut world, &mut file);
    assert_eq!(code(sync(&world)), libc::EIO);
    sync(&world).unwrap();
}

#[test]
fn a_file_that_has_lost_contents_replaces_no_other_before_that_is_told() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (ino, fh) = world.create(ROOT, "new").unwrap();
    let (old, other) = world.create(ROOT, "old").unwrap();
    world.write(old, other, 0, b"durable").unwrap();
    sync_all(&world);
    world.write(ino, fh, 0, b"lost").unwrap();
    world.release(ino, fh);
    killed(&mut world, &mut file);
    assert_eq!(code(world.rename((ROOT, "new"), (ROOT, "old"))), libc::EIO);
    assert_eq!(world.read(old, other, 100).unwrap(), b"durable");
    world.rename((ROOT, "new"), (ROOT, "free")).unwrap();
    world.rename((ROOT, "free"), (ROOT, "old")).unwrap();
    world.check();
}

#[test]
fn what_is_appended_to_a_file_that_has_become_shorter_goes_to_its_end() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, b"durable").unwrap();
    sync_all(&world);
    world.write(ino, fh, 7, b"lost").unwrap();
    assert!(!world.fs.finds_end(ino));
    killed(&mut world, &mut file);
    assert!(world.fs.finds_end(ino), "the kernel takes it for 11 bytes long");
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    fsync(&world, ino, fh).unwrap();
    killed(&mut world, &mut file);
    fsync(&world, ino, fh).unwrap();
    assert!(world.fs.finds_end(ino), "so it does when that was told, and behind another kill");
    go_on(&mut world);
    assert!(world.fs.finds_end(ino));
    assert!(!world.fs.finds_end(ROOT + 1000));
}

#[test]
fn a_lost_move_of_a_directory_is_told_by_each_open_file() {
    let (mut world, mut file) = mortal(FsOptions::default());
    world.me.caller = std::process::id();
    let dir = world.mkdir(ROOT, "dir").unwrap();
    let (ino, fh) = world.create(dir, "file").unwrap();
    let (parent, other) = (world.mkdir(ROOT, "a").unwrap(), world.mkdir(ROOT, "b").unwrap());
    world.rename((ROOT, "dir"), (parent, "dir")).unwrap();
    sync_all(&world);
    killed(&mut world, &mut file);
    fsync(&world, ino, fh).unwrap();
    world.rename((parent, "dir"), (other, "dir")).unwrap();
    killed(&mut world, &mut file);
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    fsync(&world, ino, fh).unwrap();
    assert_eq!(code(world.me.call(|cx| world.fs.fsyncdir(cx, dir, 0, false))), libc::EIO);
    world.check();
}

#[test]
fn a_lost_move_of_a_directory_is_told_by_each_directory_behind_another_kill_too() {
    for is_in_order in [false, true] {
        let (mut world, mut file) = mortal(FsOptions::default());
        world.me.caller = std::process::id();
        let (dir, other) = (world.mkdir(ROOT, "dir").unwrap(), world.mkdir(ROOT, "other").unwrap());
        let (ino, fh) = world.create(dir, "file").unwrap();
        let unmoved = world.mkdir(ROOT, "unmoved").unwrap();
        sync_all(&world);
        world.rename((ROOT, "dir"), (other, "dir")).unwrap();
        killed(&mut world, &mut file);
        assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
        fsync(&world, ino, fh).unwrap();
        if is_in_order {
            let known = Arc::new(crate::Known::new().unwrap());
            file = known.file().unwrap();
            world.options.known = Some(known);
            go_on(&mut world);
        }
        for _ in 0..2 {
            killed(&mut world, &mut file);
            let synced = world.me.call(|cx| world.fs.fsyncdir(cx, unmoved, 0, false));
            assert_eq!(code(synced), libc::EIO);
            fsync(&world, ino, fh).unwrap();
            assert!(!world.fs.stale.lock().clone().unwrap().contains(&0), "no inode has it");
        }
        world.check();
    }
}

#[test]
fn a_process_that_is_killed_while_it_leaves_the_mount_in_order_loses_no_error() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (ino, first) = world.create(ROOT, "file").unwrap();
    let second = world.open(ino).unwrap();
    sync_all(&world);
    world.write(ino, first, 0, b"lost").unwrap();
    killed(&mut world, &mut file);
    assert_eq!(code(fsync(&world, ino, first)), libc::EIO);
    world.fs.carry();
    world.fs.detach();
    killed(&mut world, &mut file);
    assert_eq!(code(fsync(&world, ino, second)), libc::EIO);
    fsync(&world, ino, second).unwrap();
    world.check();
}

#[test]
fn a_wait_for_a_file_tells_of_its_loss_again_if_the_process_is_killed_before_the_answer() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let wait = |world: &World, ino: Ino| {
        world.me.call(|cx| world.fs.ioctl(cx, ino, ioctl::WAIT_FILE, &[], 0)).map(drop)
    };
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    sync_all(&world);
    world.write(ino, fh, 0, b"lost").unwrap();
    world.release(ino, fh);
    for _ in 0..2 {
        killed(&mut world, &mut file);
        assert_eq!(code(wait(&world, ino)), libc::EIO);
    }
    // This one comes behind the answer.
    wait(&world, ino).unwrap();
    killed(&mut world, &mut file);
    wait(&world, ino).unwrap();
    world.check();
}

/// The request that closes it may come again.
#[test]
fn a_file_that_was_closed_before_another_process_goes_on_in_order_has_a_number_of_its_own() {
    let mut world = World::with(FsOptions { background: false, ..FsOptions::default() });
    let (ino, closed) = world.create(ROOT, "file").unwrap();
    world.release(ino, closed);
    go_on(&mut world);
    let open = world.open(ino).unwrap();
    world.release(ino, closed);
    world.write(ino, open, 0, b"contents").unwrap();
    assert_eq!(world.read(ino, open, 100).unwrap(), b"contents");
    world.check();
}

/// The second process is killed before it has noted anything: the third one goes on from the
/// memory of the first.
#[test]
fn contents_are_not_restored_over_newer_ones_of_somebody_else_behind_two_kills() {
    let (mut world, file) = mortal(FsOptions::default());
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    sync_all(&world);
    world.write(ino, fh, 0, b"older").unwrap();
    for contents in [b"older", b"newer"] {
        let words = LeftWords::of(file.try_clone().unwrap()).expect("the same form");
        let left = Some(LeftBehind { words, had_others: false });
        let known = Some(Arc::new(crate::Known::new().unwrap()));
        let options = FsOptions { goes_on: true, known, left, ..world.options.clone() };
        let next = LocalFs::open(world.dev.clone(), options, Env::real()).unwrap();
        std::mem::forget(std::mem::replace(&mut world.fs, next));
        world.fs.take_over_left().unwrap().expect("all of it");
        assert_eq!(world.read(ino, fh, 100).unwrap(), contents);
        if contents == b"newer" {
            break;
        }
        let options = FsOptions { background: false, ..FsOptions::default() };
        let other = LocalFs::open(world.dev.clone(), options, Env::real()).unwrap();
        let mut killed = std::mem::replace(&mut world.fs, other);
        let open = world.open(ino).unwrap();
        world.write(ino, open, 0, b"newer").unwrap();
        world.fs.close().unwrap();
        std::mem::swap(&mut world.fs, &mut killed);
    }
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    world.check();
}

#[test]
fn only_the_volume_that_the_process_before_had_is_gone_on_with() {
    let (world, file) = mortal(FsOptions::default());
    let (other, _) = mortal(FsOptions::default());
    let known = Some(Arc::new(crate::Known::new().unwrap()));
    let words = LeftWords::of(file).unwrap();
    let left = Some(LeftBehind { words, had_others: false });
    let options = FsOptions { goes_on: true, known, left, ..world.options.clone() };
    let carried = world.fs.carry();
    let next = LocalFs::open(other.dev.clone(), options.clone(), Env::real()).unwrap();
    assert_ne!(next.sb.volume_id, world.fs.sb.volume_id);
    assert!(next.take_over_left().is_err(), "another volume");
    assert!(next.take_over(&carried).is_err());
}

#[test]
fn nobody_goes_on_with_a_volume_that_others_have_changed_since_it_was_closed() {
    let mut world = World::with(FsOptions { background: false, ..FsOptions::default() });
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    world.write(ino, fh, 0, b"contents").unwrap();
    go_on(&mut world);
    assert_eq!(world.read(ino, fh, 100).unwrap(), b"contents");
    let refused = go_on_behind(&mut world, true);
    assert!(matches!(refused, Err(VolumeError::Changed { .. })), "{refused:?}");
}

#[test]
fn what_is_only_read_is_forgotten_if_somebody_has_changed_it_meanwhile() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (ino, _) = world.create(ROOT, "file").unwrap();
    sync_all(&world);
    world.fs.close().unwrap();
    world.options.read_only = true;
    let read = LocalFs::open(world.dev.clone(), world.options.clone(), Env::real()).unwrap();
    world.fs = read;
    world.lookup(ROOT, "file").unwrap();
    killed(&mut world, &mut file);
    assert_eq!(world.fs.stale.lock().clone(), Some(Vec::new()));
    let options = FsOptions { background: false, ..FsOptions::default() };
    let other = LocalFs::open(world.dev.clone(), options, Env::real()).unwrap();
    let mut before = std::mem::replace(&mut world.fs, other);
    let fh = world.open(ino).unwrap();
    world.write(ino, fh, 0, b"newer").unwrap();
    world.fs.close().unwrap();
    std::mem::swap(&mut world.fs, &mut before);
    killed(&mut world, &mut file);
    assert!(world.fs.stale.lock().clone().unwrap().contains(&ino));
}

#[test]
fn what_was_changed_is_lost_if_somebody_else_has_had_the_volume_meanwhile() {
    let (mut world, mut file) = mortal(FsOptions::default());
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    let (other, unchanged) = world.create(ROOT, "other").unwrap();
    sync_all(&world);
    killed(&mut world, &mut file);
    world.write(ino, fh, 0, b"durable").unwrap();
    fsync(&world, ino, fh).unwrap();
    let options = FsOptions { background: false, ..FsOptions::default() };
    LocalFs::open(world.dev.clone(), options, Env::real()).unwrap().close().unwrap();
    killed(&mut world, &mut file);
    assert_eq!(code(fsync(&world, ino, fh)), libc::EIO);
    fsync(&world, ino, fh).unwrap();
    fsync(&world, other, unchanged).unwrap();
    world.check();
}
