//! A checkpoint that takes as long as it likes: who reads is not held up by it, nor who changes
//! something while the log has room. Who has to wait for room leaves the transport's thread to
//! others.

use crate::local::jobs::BlockingChange;
use crate::local::pool::Work;
use crate::requests::tests::*;
use ferry_device::{HookedDevice, Op};
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const LOG: u64 = 1 << 20;
/// So many files are read: more than have their access times in memory before these are logged.
const FILES: usize = 4200;
/// A request that is not done by then waits for the device.
const PATIENCE: Duration = Duration::from_secs(120);

/// The number of a request, and what came of it.
pub(crate) type Answered = (usize, Result<Reply, Errno>);

/// A transport's thread, which must not wait, and the answers that come later.
pub(crate) struct Thread {
    later: Sender<Answered>,
    /// Of the request being made.
    number: usize,
    interrupts: Mutex<Vec<Interrupt>>,
}

impl Park for Thread {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        self.interrupts.lock().extend(interrupt);
        let (later, number) = (self.later.clone(), self.number);
        Box::new(move |answer| later.send((number, answer)).unwrap())
    }

    fn request(&self) -> Option<ferry_journal::RequestId> {
        None
    }
}

impl Thread {
    pub(crate) fn new() -> (Self, Receiver<Answered>) {
        let (later, answers) = channel();
        (Self { later, number: 0, interrupts: Mutex::default() }, answers)
    }

    pub(crate) fn cx(&self) -> Cx<'_> {
        Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: self }
    }
}

/// A volume with files that have been read by nobody; `large` is not in memory, `dirty` nowhere
/// else. The device stalls in a checkpoint: it completes no write behind the log.
fn in_a_checkpoint(test: impl FnOnce(&World, &HookedDevice) + Send) {
    let device = Arc::new(HookedDevice::new(Arc::new(MemDevice::new(128 << 20))));
    let dev: Arc<dyn BlockDevice> = device.clone();
    let made = MkfsOptions { log_size: Some(LOG), ..MkfsOptions::default() };
    mkfs(&dev, &made, &Env::real()).unwrap();
    let options = FsOptions {
        cache_bytes: 16 << 20,
        commit_interval: Duration::from_secs(3600),
        ..FsOptions::default()
    };
    let fs = LocalFs::open(dev.clone(), options.clone(), Env::real()).unwrap();
    let mut world = World { dev, fs, me: InProcess::default(), options };
    let dir = world.mkdir(ROOT, "dir").unwrap();
    for n in 0..FILES {
        world.file(dir, &format!("file {n}")).unwrap();
    }
    let (large, fh) = world.create(ROOT, "large").unwrap();
    world.write(large, fh, 0, &vec![7; 1 << 20]).unwrap();
    world.release(large, fh);
    world.reopen();
    let (dirty, fh) = world.create(ROOT, "dirty").unwrap();
    world.write(dirty, fh, 0, &[8; 5000]).unwrap();
    world.release(dirty, fh);
    let segments = world.fs.data.geometry().segments_offset;
    std::thread::scope(|scope| {
        device.hold(move |request| request.op == Op::Write && request.offset >= segments);
        let checkpoint = scope.spawn(|| world.fs.journal.checkpoint());
        device.wait_for_held();
        let (done, ended) = channel();
        let (world, device) = (&world, &device);
        let testing = scope.spawn(move || {
            test(world, device);
            done.send(()).unwrap();
        });
        let ended = ended.recv_timeout(PATIENCE);
        device.release_all();
        assert!(testing.join().is_ok() && ended.is_ok(), "somebody waits for the checkpoint");
        checkpoint.join().unwrap().unwrap();
    });
    // Another checkpoint may be under way.
    world.reopen();
    world.check();
}

/// Everything that only looks; on the thread itself, but for a read that needs the device.
fn look_at_everything(world: &World) {
    let (thread, answers) = Thread::new();
    let cx = &thread.cx();
    let lookup = |dir: Ino, name: &str| {
        let found = world.fs.lookup(cx, dir, name.as_bytes()).unwrap().attr.unwrap();
        world.fs.getattr(cx, found.ino, None).unwrap();
        found.ino
    };
    let read = |ino: Ino, len: usize| {
        let fh = world.fs.open(cx, ino, libc::O_RDONLY, false).unwrap().fh;
        let mut out = vec![0; len];
        let read = match world.fs.read(cx, ino, fh, 0, &mut out) {
            Err(Stop::Parked) => match answers.recv().unwrap().1.unwrap() {
                Reply::Data(bytes) => bytes,
                Reply::Shared(bytes) => bytes.to_vec(),
                _ => panic!("not what was asked for"),
            },
            read => out[..read.unwrap()].to_vec(),
        };
        world.fs.release(cx, ino, fh);
        world.fs.forget(ino, 1);
        read
    };
    let dir = lookup(ROOT, "dir");
    for n in 0..FILES {
        assert!(read(lookup(dir, &format!("file {n}")), 10).is_empty());
    }
    let mut listed = 0;
    let mut count = |_: &DirEntry| {
        listed += 1;
        true
    };
    world.fs.readdir(cx, dir, 0, 2, true, &mut count).unwrap();
    assert_eq!(listed, FILES);
    assert!(read(lookup(ROOT, "large"), 1 << 20) == vec![7; 1 << 20]);
    assert!(read(lookup(ROOT, "dirty"), 5000) == vec![8; 5000]);
    world.fs.statfs(cx).unwrap();
    world.fs.ioctl(cx, ROOT, ioctl::STATS, &[], ioctl::STATS_LEN as usize).unwrap();
    assert!(answers.try_recv().is_err(), "nothing else needed the device");
}

#[test]
fn reads_do_not_wait_for_a_checkpoint() {
    in_a_checkpoint(|world, _| look_at_everything(world));
}

/// Makes files on one thread until the log is full; how many were made.
fn fill_the_log(world: &World, thread: &mut Thread) -> usize {
    loop {
        thread.number += 1;
        let made = world.fs.create(
            &thread.cx(),
            ROOT,
            format!("{}", thread.number).as_bytes(),
            0o644,
            libc::O_RDWR,
        );
        match made {
            Err(Stop::Parked) => return thread.number - 1,
            made => {
                let (entry, opened) = made.unwrap();
                world.fs.release(&thread.cx(), entry.attr.unwrap().ino, opened.fh);
            }
        }
    }
}

#[test]
fn a_change_that_lacks_log_space_leaves_the_transport_thread() {
    in_a_checkpoint(|world, device| {
        let (mut thread, answers) = Thread::new();
        let made = fill_the_log(world, &mut thread);
        // An eighth is kept, a quarter is what the checkpoint has in hand.
        assert!(made > 500, "{made} files in a log of {LOG} bytes");
        look_at_everything(world);
        let dir = world.ino(ROOT, "dir");
        let fs = &world.fs;
        let (file, old) = (world.ino(dir, "file 0"), |n: usize| format!("file {n}").into_bytes());
        let some = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        let cut = SetAttr { size: Some(7), ..SetAttr::default() };
        let flags = XattrFlags::default();
        let parked = Cell::new(1);
        let mut ask = |change: &dyn Fn(&Cx) -> bool| {
            thread.number += 1;
            parked.set(parked.get() + usize::from(change(&thread.cx())));
        };
        fn later<T: std::fmt::Debug>(answer: Answer<T>) -> bool {
            assert!(matches!(answer, Err(Stop::Parked)) || answer.is_ok());
            answer.is_err()
        }
        ask(&|cx| later(fs.mkdir(cx, ROOT, b"new dir", 0o755)));
        ask(&|cx| later(fs.mknod(cx, ROOT, b"new node", libc::S_IFREG | 0o644, 0)));
        ask(&|cx| later(fs.symlink(cx, ROOT, b"new symlink", b"to")));
        ask(&|cx| later(fs.link(cx, file, ROOT, b"new link")));
        ask(&|cx| later(fs.rename(cx, dir, &old(1), ROOT, b"new name", RenameFlags::default())));
        ask(&|cx| later(fs.setattr(cx, file, None, &some)));
        ask(&|cx| later(fs.setattr(cx, file, None, &cut)));
        ask(&|cx| later(fs.setxattr(cx, file, b"user.x", b"value", flags)));
        ask(&|cx| later(fs.tmpfile(cx, ROOT, 0o600, libc::O_RDWR)));
        // What gives space back may use what is kept, until that is used up.
        for n in 10..FILES {
            ask(&|cx| later(fs.unlink(cx, dir, &old(n))));
            if parked.get() > 20 {
                break;
            }
        }
        assert_eq!(parked.get(), 21, "all of them park once nothing is left");
        look_only(world);
        assert!(answers.try_recv().is_err(), "nobody has room");
        device.release_all();
        for _ in 0..parked.get() {
            let (number, answer) = answers.recv().unwrap();
            assert!(answer.is_ok(), "request {number}: {answer:?}");
        }
        for name in ["new dir", "new node", "new symlink", "new link", "new name"] {
            assert!(world.exists(ROOT, name), "{name}");
        }
        assert_eq!(world.attr(file).size, 7);
        assert_eq!(world.getxattr(file, "user.x").unwrap(), b"value");
    });
}

/// One name is found.
fn look_only(world: &World) {
    let (thread, _answers) = Thread::new();
    let found = world.fs.lookup(&thread.cx(), ROOT, b"dirty").unwrap().attr.unwrap();
    world.fs.forget(found.ino, 1);
}

#[test]
fn a_killed_waiting_change_leaves_nothing_behind() {
    in_a_checkpoint(|world, device| {
        let (mut thread, answers) = Thread::new();
        let made = fill_the_log(world, &mut thread);
        let open = world.fs.handles.len();
        for _ in 0..2 * <BlockingChange<LocalFs> as Work<LocalFs>>::THREADS_MAX {
            thread.number += 1;
            let name = format!("{}", thread.number);
            let made = world.fs.create(&thread.cx(), ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
            assert!(matches!(made, Err(Stop::Parked)));
        }
        // All of them: some have begun, most have not.
        for interrupt in std::mem::take(&mut *thread.interrupts.lock()) {
            interrupt();
        }
        device.release_all();
        // The changes in the wait queue for log space are served, and so are those behind them.
        world.file(ROOT, "last").unwrap();
        while world.fs.handles.len() > open || world.fs.journal.stats().space.waiting > 0 {
            std::thread::yield_now();
        }
        world.fs.blocking_changes.stop();
        assert!(answers.try_iter().all(|(_, answer)| answer.is_err()), "nobody was given anything");
        let names = world.list(ROOT);
        let (most, there) = (
            made + <BlockingChange<LocalFs> as Work<LocalFs>>::THREADS_MAX,
            names.keys().filter(|name| name.parse::<usize>().is_ok()).count(),
        );
        assert!((made..=most).contains(&there), "{there} of {made} files and what had begun");
        for (name, ino) in
            names.iter().filter(|(name, _)| name.parse::<usize>().is_ok_and(|n| n > made))
        {
            let inode = world.fs.table.peek(*ino);
            assert!(inode.is_none_or(|inode| !inode.is_known()), "nobody knows {name}");
        }
    });
}

#[test]
fn access_times_that_wait_for_a_thread_are_logged_when_the_volume_is_closed() {
    let mut world = World::with(FsOptions::default());
    let dir = world.mkdir(ROOT, "dir").unwrap();
    let names: Vec<String> = (0..FILES).map(|n| format!("file {n}")).collect();
    for name in &names {
        world.file(dir, name).unwrap();
    }
    // From now on each of its threads' jobs is one that closing drops.
    world.fs.blocking_changes.stop();
    let read = |world: &World, name: &str| {
        let ino = world.ino(dir, name);
        let fh = world.open(ino).unwrap();
        world.read(ino, fh, 1).unwrap();
        world.release(ino, fh);
        world.attr(ino).atime
    };
    let times: Vec<Timestamp> = names.iter().map(|name| read(&world, name)).collect();
    world.reopen();
    for (name, time) in names.iter().zip(times) {
        let attr = world.attr(world.ino(dir, name));
        assert!(attr.atime == time && time > attr.mtime, "{name}");
    }
}
