//! Cutting off many extents is in nobody's way.

use crate::requests::tests::*;
use crate::volume::LOG_MIN;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

const BLOCK: u64 = keys::BLOCK;

fn world(log: u64) -> World {
    let made = MkfsOptions { log_size: Some(log), ..MkfsOptions::default() };
    World::made(256 << 20, &made, FsOptions { cache_bytes: 8 << 20, ..FsOptions::default() })
}

/// A transport's thread: it must not wait.
struct Request(Sender<Result<Reply, Errno>>);

impl Park for Request {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let answers = self.0.clone();
        Box::new(move |answer| answers.send(answer).unwrap())
    }

    fn request(&self) -> Option<ferry_journal::RequestId> {
        None
    }
}

#[test]
fn a_drop_of_many_extents_leaves_the_transport_thread() {
    let world = world(4 << 20);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    let (sender, answers) = channel();
    let request = Request(sender);
    let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &request };
    let reserve = |blocks: u64| {
        world.me.call(|cx| world.fs.fallocate(cx, ino, fh, 0, 0, blocks * BLOCK)).unwrap()
    };
    let cut = |size: u64| {
        world.fs.setattr(&cx, ino, None, &SetAttr { size: Some(size), ..SetAttr::default() })
    };
    reserve(100);
    assert_eq!(cut(50 * BLOCK).unwrap().0.size, 50 * BLOCK);
    reserve(20_000);
    assert!(matches!(cut(17_000 * BLOCK), Err(Stop::Parked)));
    let Reply::Attr(attr, _) = answers.recv().unwrap().unwrap() else {
        panic!("not what was asked for")
    };
    assert_eq!(attr.size, 17_000 * BLOCK);
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    assert!(matches!(world.fs.fallocate(&cx, ino, fh, hole, 0, 5000 * BLOCK), Err(Stop::Parked)));
    assert!(matches!(answers.recv().unwrap().unwrap(), Reply::Empty));
    assert_eq!(world.attr(ino).blocks, 12_000 * BLOCK / 512);
    // So are errors.
    reserve(20_000);
    assert!(matches!(
        world.fs.fallocate(&cx, ino, fh, hole, u64::MAX - BLOCK, BLOCK),
        Err(Stop::Parked)
    ));
    assert_eq!(answers.recv().unwrap().unwrap_err(), Errno(libc::EFBIG));
    // Who only makes a file longer waits for nobody who cuts.
    assert_eq!(cut(50_000 * BLOCK).unwrap().0.size, 50_000 * BLOCK);
    assert!(matches!(cut(u64::MAX), Err(Stop::Errno(Errno(libc::EFBIG)))));
    world.release(ino, fh);
    world.check();
}

/// How often the log's tail moves during `change`, and the least of the log that is free meanwhile,
/// in bytes.
fn least_free(world: &World, change: impl FnOnce()) -> (u64, u64) {
    let done = AtomicBool::new(false);
    let before = world.fs.journal.stats().tail_moves;
    let least = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut least = u64::MAX;
            while !done.load(Ordering::Relaxed) {
                least = least.min(world.fs.journal.stats().log_free_bytes);
            }
            least
        });
        change();
        done.store(true, Ordering::Relaxed);
        watching.join().unwrap()
    });
    (world.fs.journal.stats().tail_moves - before, least)
}

#[test]
fn a_long_truncation_leaves_room_in_the_log() {
    const LOG: u64 = LOG_MIN;
    let world = world(LOG);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    for n in 0..20_000 {
        world.me.call(|cx| world.fs.fallocate(cx, ino, fh, 0, 2 * n * BLOCK, BLOCK)).unwrap();
    }
    world.fs.sync().unwrap();
    world.fs.journal.checkpoint().unwrap();
    let (moves, least) = least_free(&world, || {
        world.set(ino, SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
    });
    assert!(moves > 0, "it took more than the log has room for");
    assert!(least >= LOG / 8, "{least} bytes were free for others");
    world.release(ino, fh);
    world.check();
}

/// With the smallest log a file of 16,383 extents would keep a transport's thread for a tenth of a
/// second: it waits for checkpoints.
#[test]
fn a_drop_that_exceeds_a_small_log_goes_to_the_blocking_pool() {
    let world = world(LOG_MIN);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    let (sender, answers) = channel();
    let request = Request(sender);
    let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &request };
    let reserve = |blocks: u64| {
        world.me.call(|cx| world.fs.fallocate(cx, ino, fh, 0, 0, blocks * BLOCK)).unwrap()
    };
    let empty =
        || world.fs.setattr(&cx, ino, None, &SetAttr { size: Some(0), ..SetAttr::default() });
    reserve(500);
    assert_eq!(empty().unwrap().0.size, 0);
    reserve(2000);
    assert!(matches!(empty(), Err(Stop::Parked)));
    let Reply::Attr(attr, _) = answers.recv().unwrap().unwrap() else {
        panic!("not what was asked for")
    };
    assert_eq!((attr.size, attr.blocks), (0, 0));
    world.release(ino, fh);
    world.check();
}

/// A file that nobody knows any more is dropped in as many transactions.
#[test]
fn reclaim_leaves_room_in_the_log() {
    let made = MkfsOptions { log_size: Some(LOG_MIN), ..MkfsOptions::default() };
    let options = FsOptions { background: false, cache_bytes: 8 << 20, ..FsOptions::default() };
    let world = World::made(256 << 20, &made, options);
    let (ino, fh) = world.create(ROOT, "file").unwrap();
    for n in 0..20_000 {
        world.me.call(|cx| world.fs.fallocate(cx, ino, fh, 0, 2 * n * BLOCK, BLOCK)).unwrap();
    }
    world.fs.sync().unwrap();
    world.fs.journal.checkpoint().unwrap();
    world.unlink(ROOT, "file").unwrap();
    world.release(ino, fh);
    let (moves, least) = least_free(&world, || world.fs.forget(ino, 1));
    assert!(
        moves > 0 && least >= LOG_MIN / 8,
        "{moves} moves of the tail, {least} bytes were free for others"
    );
    world.check();
}
