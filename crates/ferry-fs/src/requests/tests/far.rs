//! A device that is far away and does not answer: a transport's thread waits for nothing of it.

use crate::inprocess::FromReply;
use crate::requests::durable::Until;
use crate::requests::tests::acls;
use crate::requests::tests::pressure::{Answered, Thread};
use crate::requests::tests::*;
use crate::session_store::{Needed, SessionStore};
use ferry_device::{HookedDevice, Op};
use ferry_journal::Caller;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const FILES: usize = 4000;
/// A request that is not done by then waits for the device.
const PATIENCE: Duration = Duration::from_secs(120);
/// Contents of a file: some blocks, and a part of one.
const DATA: usize = 3 * 4096 + 100;
/// Extents of the file without a name: no more than a thread of a transport reclaims itself on a
/// device that is near.
const REMOVED_EXTENTS: u64 = 4000;
/// Large attributes on each side of the small ones of a file.
const FAR_APART: usize = 20;

/// While it is shut, reads wait.
#[derive(Default)]
struct Valve {
    reads: Mutex<Reads>,
    changed: Condvar,
}

#[derive(Default)]
struct Reads {
    are_shut_out: bool,
    /// So many wait.
    held: usize,
}

impl Valve {
    fn shut(&self) {
        self.reads.lock().are_shut_out = true;
    }

    fn open(&self) {
        self.reads.lock().are_shut_out = false;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut reads = self.reads.lock();
        reads.held += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut reads, |reads| reads.are_shut_out);
        reads.held -= 1;
    }

    /// Returns when so many reads wait.
    fn wait_for_reads(&self, count: usize) {
        let mut reads = self.reads.lock();
        let waited = self.changed.wait_while_for(&mut reads, |reads| reads.held < count, PATIENCE);
        assert!(!waited.timed_out(), "{} reads wait, and not {count}", reads.held);
    }
}

/// What is on a volume of which hardly anything is in memory.
struct Cold {
    dir: Ino,
    files: Vec<Ino>,
    link: Ino,
    /// A file that is open, with [`DATA`] bytes of contents.
    open: (Ino, u64),
    /// Another one. The first block is dirty, and its extents are not in memory.
    dirty: (Ino, u64),
    /// A file with contents that the kernel knows, without a name.
    removed: Ino,
    /// A directory of which all is in memory. The dirty file has the name `new` there, and an empty
    /// one has the name `old`.
    near: Ino,
    /// A directory whose default ACL is not in memory.
    inherits: Ino,
}

/// Runs `test` while the device answers no read, on a thread that must not wait; then `then`, with
/// what the requests that parked were answered.
fn far_away(
    test: impl FnOnce(&World, &Cold, &mut Asker<'_>) + Send,
    then: impl FnOnce(&World, &Cold, Vec<Answered>),
) {
    let inner = Arc::new(MemDevice::new(256 << 20));
    let device = Arc::new(HookedDevice::new(inner).far_away(4 << 20));
    let reads = Arc::new(Valve::default());
    let for_reads = Arc::clone(&reads);
    device.set_hook(move |request, serve| {
        if request.op == Op::Read {
            for_reads.pass();
        }
        serve()
    });
    // Only who asks for it has anything written back.
    let options = FsOptions { commit_interval: Duration::from_secs(3600), ..FsOptions::default() };
    let mut world = World::on(device, &MkfsOptions::default(), options);
    let cold = make_cold(&mut world);
    reads.shut();
    let answers = std::thread::scope(|scope| {
        let (world, cold, reads) = (&world, &cold, &reads);
        let (done, ended) = channel();
        let testing = scope.spawn(move || {
            let (thread, answers) = Thread::new();
            let mut asker = Asker { thread, answers, parked: 0, reads };
            test(world, cold, &mut asker);
            done.send((asker.parked, asker.answers)).unwrap();
        });
        let ended = ended.recv_timeout(PATIENCE);
        reads.open();
        assert!(testing.join().is_ok(), "the test failed");
        let (parked, answers) = ended.expect("a transport's thread waited for the device");
        (0..parked).map(|_| answers.recv_timeout(PATIENCE).unwrap()).collect()
    });
    then(&world, &cold, answers);
    world.check();
}

fn make_cold(world: &mut World) -> Cold {
    let dir = world.mkdir(ROOT, "cold").unwrap();
    let files: Vec<_> =
        (0..FILES).map(|n| world.file(dir, &format!("file {n}")).unwrap()).collect();
    world.setxattr(files[0], "user.x", b"value").unwrap();
    let link = world.symlink(dir, "link", "to").unwrap();
    world.mkdir(dir, "empty").unwrap();
    for name in ["data", "dirty", "removed"] {
        let (ino, fh) = world.create(dir, name).unwrap();
        world.write(ino, fh, 0, &[7; DATA]).unwrap();
        world.setxattr(ino, "user.x", b"value").unwrap();
        if name == "removed" {
            // So many extents that the device has read few of them with those of other files.
            for n in 1..=REMOVED_EXTENTS {
                world.write(ino, fh, n * 8192, &[7; 4096]).unwrap();
            }
        }
        world.release(ino, fh);
        if name == "data" {
            world.setxattr(ino, acls::ACCESS, &acls::named(7, 6, 4, 5, 1)).unwrap();
            surround_attributes(world, ino);
        }
    }
    let inherits = world.mkdir(ROOT, "inherits").unwrap();
    world.setxattr(inherits, acls::DEFAULT, &acls::named(7, 6, 4, 5, 1)).unwrap();
    surround_attributes(world, inherits);
    world.fs.detach();
    world.reopen();
    assert_eq!(world.ino(ROOT, "cold"), dir);
    let data = world.ino(dir, "data");
    let open = (data, world.open(data).unwrap());
    let removed = world.me.call(|cx| world.fs.lookup(cx, dir, b"removed")).unwrap();
    world.unlink(dir, "removed").unwrap();
    let dirty = world.ino(dir, "dirty");
    let dirty = (dirty, world.open(dirty).unwrap());
    world.write(dirty.0, dirty.1, 0, &[9; 4096]).unwrap();
    let near = world.mkdir(ROOT, "near").unwrap();
    world.link(dirty.0, near, "new").unwrap();
    world.file(near, "old").unwrap();
    let inode = world.fs.table.get(dirty.0).unwrap().unwrap();
    inode.file.pages.write().drop_windows(0, u64::MAX);
    assert!(!world.exists(inherits, "new"));
    Cold { dir, files, link, open, dirty, removed: removed.attr.unwrap().ino, near, inherits }
}

/// Gives an inode so many bytes of attributes around those of a test that the device has not read
/// these with other records.
fn surround_attributes(world: &mut World, ino: Ino) {
    for n in 0..FAR_APART {
        world.setxattr(ino, &format!("security.{n}"), &[7; 60_000]).unwrap();
        world.setxattr(ino, &format!("user.z{n}"), &[7; 60_000]).unwrap();
    }
}

/// A transport's thread that makes requests.
struct Asker<'v> {
    thread: Thread,
    answers: Receiver<Answered>,
    /// Requests that are answered later.
    parked: usize,
    /// What the device does with reads.
    reads: &'v Valve,
}

impl Asker<'_> {
    /// Makes a request that is answered when the device answers.
    fn later<T: std::fmt::Debug>(&mut self, request: impl FnOnce(&Cx) -> Answer<T>) {
        let answer = request(&self.thread.cx());
        assert!(matches!(answer, Err(Stop::Parked)), "{answer:?}");
        self.parked += 1;
    }

    /// Makes a request that needs nothing of the device. If a thread that does not run just now has
    /// a lock of it, another one answers: those that need the device are not answered meanwhile.
    fn now<T: FromReply>(&self, request: impl FnOnce(&Cx) -> Answer<T>) -> T {
        match request(&self.thread.cx()) {
            Err(Stop::Parked) => {
                let (_, reply) = self.answers.recv_timeout(PATIENCE).expect("no device is needed");
                T::from_reply(reply.unwrap()).unwrap()
            }
            answer => answer.unwrap(),
        }
    }
}

#[test]
fn requests_for_what_only_the_device_has_leave_the_transport_thread() {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let (fs, dir) = (&world.fs, cold.dir);
        let file = |n: usize| cold.files[n];
        let name = |n: usize| format!("file {n}").into_bytes();
        let (flags, mut list) = (XattrFlags::default(), |_: &DirEntry| true);
        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        asker.later(|cx| fs.lookup(cx, dir, &name(1)));
        asker.later(|cx| fs.getattr(cx, file(2), None));
        asker.later(|cx| fs.statx(cx, file(3)));
        asker.later(|cx| fs.setattr(cx, file(4), None, &mode));
        let empty = SetAttr { size: Some(0), ..SetAttr::default() };
        asker.later(|cx| fs.setattr(cx, file(10), None, &empty));
        asker.later(|cx| fs.fsyncdir(cx, file(11), 0, false));
        asker.later(|cx| fs.readlink(cx, cold.link));
        asker.later(|cx| fs.mknod(cx, dir, b"new node", libc::S_IFREG | 0o644, 0));
        asker.later(|cx| fs.mkdir(cx, dir, b"new dir", 0o755));
        asker.later(|cx| fs.symlink(cx, dir, b"new symlink", b"to"));
        asker.later(|cx| fs.link(cx, file(5), dir, b"new link"));
        asker.later(|cx| fs.unlink(cx, dir, &name(6)));
        asker.later(|cx| fs.rmdir(cx, dir, b"empty"));
        asker.later(|cx| fs.rename(cx, dir, &name(7), ROOT, b"moved", RenameFlags::default()));
        asker.later(|cx| fs.open(cx, file(8), libc::O_RDONLY, false));
        asker.later(|cx| fs.create(cx, dir, b"new file", 0o644, libc::O_RDWR));
        asker.later(|cx| fs.opendir(cx, file(9)));
        asker.later(|cx| fs.readdir(cx, dir, 0, 2, true, &mut list));
        asker.later(|cx| fs.setxattr(cx, file(0), b"user.y", b"value", flags));
        asker.later(|cx| fs.getxattr(cx, file(0), b"user.x"));
        asker.later(|cx| fs.listxattr(cx, file(0)));
    };
    far_away(test, |world, cold, answers| {
        for (number, answer) in answers {
            match answer {
                Err(Errno(libc::ENOTDIR)) => {}
                answer => assert!(answer.is_ok(), "request {number}: {answer:?}"),
            }
        }
        for name in ["new node", "new dir", "new symlink", "new link", "new file"] {
            assert!(world.exists(cold.dir, name), "{name}");
        }
        assert!(world.exists(ROOT, "moved"));
        for name in ["file 6", "file 7", "empty"] {
            assert!(!world.exists(cold.dir, name), "{name}");
        }
        assert_eq!(world.attr(cold.files[4]).mode & 0o777, 0o600);
        assert_eq!(world.getxattr(cold.files[0], "user.y").unwrap(), b"value");
    });
}

#[test]
fn changes_of_contents_that_only_the_device_has_leave_the_transport_thread() {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let (fs, (ino, fh)) = (&world.fs, cold.open);
        let cut = SetAttr { size: Some(DATA as u64 - 1), ..SetAttr::default() };
        // A thread that reads an attribute holds no lock that a write takes.
        asker.later(|cx| fs.getxattr(cx, ino, b"user.x"));
        asker.later(|cx| fs.lseek(cx, ino, fh, 0, libc::SEEK_HOLE));
        asker.later(|cx| fs.write(cx, ino, fh, 5, &[8; 10], false, false));
        asker.later(|cx| fs.write(cx, ino, fh, 4096, &[9; 4096], false, false));
        asker.later(|cx| fs.write(cx, ino, fh, 4096, &[9; 4096], false, true));
        asker.later(|cx| fs.setattr(cx, ino, None, &cut));
        asker.later(|cx| fs.copy_file_range(cx, ino, fh, 0, ino, fh, 1 << 20, 10));
    };
    far_away(test, |world, cold, answers| {
        for (number, answer) in answers {
            assert!(answer.is_ok(), "request {number}: {answer:?}");
        }
        let bytes = world.read(cold.open.0, cold.open.1, DATA).unwrap();
        assert!(bytes[..5] == [7; 5] && bytes[4096..8192] == [9; 4096] && bytes[8192] == 7);
        world.release(cold.open.0, cold.open.1);
    });
}

/// What is in memory behind this needs no read: while the device answers none, changes by a thread
/// that may wait come to their end.
#[test]
fn changes_that_were_read_ahead_read_nothing_when_their_turn_comes() {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let (fs, dir, (ino, fh)) = (&world.fs, cold.dir, cold.open);
        let needed = [
            Needed::Inode(cold.files[1000]),
            Needed::Name(dir, b"file 2000".to_vec()),
            Needed::Name(dir, b"file 3000".to_vec()),
            Needed::Name(dir, b"no such".to_vec()),
            Needed::Overwritten(ino, 5..15),
        ];
        fs.read_ahead(needed.to_vec());
        // Several are read at the same time.
        asker.reads.wait_for_reads(2);
        asker.reads.open();
        let begun = Instant::now();
        while !fs.reads_ahead.is_idle() {
            assert!(begun.elapsed() < PATIENCE, "it is not read");
            std::thread::yield_now();
        }
        asker.reads.shut();
        let thread = InProcess::default();
        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        thread.call(|cx| fs.setattr(cx, cold.files[1000], None, &mode)).unwrap();
        thread.call(|cx| fs.unlink(cx, dir, b"file 2000")).unwrap();
        let flags = RenameFlags::default();
        thread.call(|cx| fs.rename(cx, dir, b"file 3000", dir, b"no such", flags)).unwrap();
        thread.call(|cx| fs.write(cx, ino, fh, 5, &[8; 10], false, false)).unwrap();
    };
    far_away(test, |world, cold, _| {
        assert_eq!(world.attr(cold.files[1000]).mode & 0o777, 0o600);
        assert!(!world.exists(cold.dir, "file 2000") && world.exists(cold.dir, "no such"));
        assert_eq!(world.read(cold.open.0, cold.open.1, 20).unwrap()[3..7], [7, 7, 8, 8]);
    });
}

#[test]
fn requests_for_what_is_in_memory_are_answered_while_others_wait_for_the_device() {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let fs = &world.fs;
        for ino in &cold.files[..1000] {
            asker.later(|cx| fs.getattr(cx, *ino, None));
        }
        let made = asker.now(|cx| fs.mkdir(cx, ROOT, b"warm", 0o755)).attr.unwrap().ino;
        for n in 0..1000 {
            let name = format!("{n}").into_bytes();
            let (entry, opened) = asker.now(|cx| fs.create(cx, made, &name, 0o644, libc::O_RDWR));
            let ino = entry.attr.unwrap().ino;
            asker.now(|cx| fs.write(cx, ino, opened.fh, 0, b"contents", false, false));
            asker.now(|cx| fs.getattr(cx, ino, None));
            fs.release(&asker.thread.cx(), ino, opened.fh);
            assert_eq!(asker.now(|cx| fs.lookup(cx, made, &name)).attr.unwrap().ino, ino);
            fs.forget(ino, 2);
        }
        // Of a number that another thread is reading, too.
        cold.files[..1000].iter().for_each(|ino| fs.forget(*ino, 0));
    };
    far_away(test, |_, _, answers| assert!(answers.iter().all(|(_, answer)| answer.is_ok())));
}

#[test]
fn files_without_a_name_are_forgotten_at_once_and_reclaimed_when_the_device_answers() {
    let test = |world: &World, cold: &Cold, _: &mut Asker<'_>| world.fs.forget(cold.removed, 1);
    far_away(test, |world, cold, _| {
        let orphan = || world.fs.journal.get(&keys::orphan(cold.removed)).unwrap();
        let begun = Instant::now();
        while orphan().is_some() {
            assert!(begun.elapsed() < PATIENCE, "the file is not reclaimed");
            std::thread::yield_now();
        }
    });
}

#[test]
fn files_are_forgotten_while_another_thread_has_their_locks() {
    let test = |world: &World, cold: &Cold, _: &mut Asker<'_>| {
        let inode = world.fs.table.get(cold.open.0).unwrap().unwrap();
        let lock = inode.state.write();
        let (done, ended) = channel();
        std::thread::scope(|scope| {
            let forget = || {
                world.fs.do_release(cold.open.1);
                world.fs.forget(cold.open.0, inode.lookups.load(Ordering::Acquire));
                done.send(()).unwrap();
            };
            scope.spawn(forget);
            let ended = ended.recv_timeout(PATIENCE);
            drop(lock);
            ended.expect("to forget a file waited for its lock");
        });
    };
    far_away(test, |_, _, _| {});
}

#[test]
fn writing_back_that_has_to_read_extents_leaves_the_transport_thread() {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let (fs, (ino, fh)) = (&world.fs, cold.dirty);
        asker.later(|cx| fs.fsync(cx, ino, fh, false));
        asker.later(|cx| fs.do_sync(cx, Until::Forced(Caller(0))));
    };
    far_away(test, |world, cold, answers| {
        assert!(answers.iter().all(|(_, answer)| answer.is_ok()), "{answers:?}");
        let bytes = world.read(cold.dirty.0, cold.dirty.1, DATA).unwrap();
        assert!(bytes[..4096] == [9; 4096] && bytes[4096] == 7);
    });
}

#[test]
fn a_rename_over_a_file_that_has_to_read_extents_leaves_the_transport_thread() {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let (near, flags) = (cold.near, RenameFlags::default());
        asker.later(|cx| world.fs.rename(cx, near, b"new", near, b"old", flags));
    };
    far_away(test, |world, cold, answers| {
        assert!(answers.iter().all(|(_, answer)| answer.is_ok()), "{answers:?}");
        assert_eq!(world.ino(cold.near, "old"), cold.dirty.0);
        assert!(!world.exists(cold.near, "new"));
    });
}

/// Makes a change that has to read attributes of a file, and looks at the file meanwhile.
fn change_attributes_of<T: std::fmt::Debug>(
    change: impl FnOnce(&LocalFs, &Cx, Ino) -> Answer<T> + Send,
) {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let (fs, ino) = (&world.fs, cold.open.0);
        asker.later(|cx| change(fs, cx, ino));
        asker.reads.wait_for_reads(1);
        asker.now(|cx| fs.getattr(cx, ino, None));
    };
    far_away(test, |_, _, answers| {
        assert!(answers.iter().all(|(_, answer)| answer.is_ok()), "{answers:?}");
    });
}

#[test]
fn a_file_is_used_while_its_attributes_are_read_to_set_one() {
    change_attributes_of(|fs, cx, ino| {
        fs.setxattr(cx, ino, b"user.y", b"value", XattrFlags::default())
    });
}

#[test]
fn a_file_is_used_while_its_attributes_are_read_to_remove_one() {
    change_attributes_of(|fs, cx, ino| fs.removexattr(cx, ino, b"user.x"));
}

#[test]
fn a_file_is_used_while_its_acl_is_read_for_another_mode() {
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    change_attributes_of(|fs, cx, ino| fs.setattr(cx, ino, None, &mode));
}

/// Makes a file that inherits an ACL which has to be read, and changes the directory meanwhile.
fn inherit<T: std::fmt::Debug>(make: impl FnOnce(&LocalFs, &Cx, Ino) -> Answer<T> + Send) {
    let test = |world: &World, cold: &Cold, asker: &mut Asker<'_>| {
        let (fs, dir) = (&world.fs, cold.inherits);
        asker.later(|cx| make(fs, cx, dir));
        asker.reads.wait_for_reads(1);
        let times = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
        asker.now(|cx| fs.setattr(cx, dir, None, &times));
    };
    far_away(test, |_, _, answers| {
        assert!(answers.iter().all(|(_, answer)| answer.is_ok()), "{answers:?}");
    });
}

#[test]
fn a_directory_is_used_while_its_default_acl_is_read_for_a_new_file() {
    inherit(|fs, cx, dir| fs.create(cx, dir, b"new", 0o666, libc::O_RDWR));
}

#[test]
fn a_directory_is_used_while_its_default_acl_is_read_for_a_file_without_a_name() {
    inherit(|fs, cx, dir| fs.tmpfile(cx, dir, 0o666, libc::O_RDWR));
}
