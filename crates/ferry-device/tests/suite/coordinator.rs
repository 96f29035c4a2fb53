//! The flush coordinator over a device whose flushes end when the test says so, and over a real
//! file.

use ferry_device::{
    AlignedBuf, BLOCK_SIZE, FileDevice, FlushCoordinator, FlushStats, HookedDevice, IoDone,
    MemDevice, Op,
};
use ferry_env::Env;
use std::io;
use std::sync::{Arc, mpsc};

/// A device whose flushes wait until the test ends them.
fn held_device() -> Arc<HookedDevice> {
    let held = HookedDevice::new(Arc::new(MemDevice::new(1 << 20)));
    held.hold(|request| request.op == Op::Flush);
    Arc::new(held)
}

/// Ends the flush in flight.
fn end_flush(held: &HookedDevice, result: io::Result<()>) {
    assert_eq!(held.held(), 1, "one flush is in flight");
    held.release(result);
}

/// A `done` that reports to a channel under a name.
fn report<T: Send + 'static>(tx: &mpsc::Sender<(T, Option<i32>)>, name: T) -> IoDone {
    let tx = tx.clone();
    Box::new(move |result| tx.send((name, result.err().and_then(|e| e.raw_os_error()))).unwrap())
}

#[test]
fn callers_share_the_flush_that_covers_them_or_wait_for_the_next() {
    let held = held_device();
    let shared = FlushCoordinator::new(held.clone());
    let (tx, rx) = mpsc::channel();

    let early = shared.write_completed();
    let also_early = shared.write_completed();
    shared.flush(early, report(&tx, 1));
    shared.flush(also_early, report(&tx, 2));
    for name in 10..20 {
        let late = shared.write_completed();
        shared.flush(late, report(&tx, name));
    }
    assert!(rx.try_recv().is_err(), "told before any flush ended");

    end_flush(&held, Ok(()));
    let mut completed: Vec<_> = rx.try_iter().collect();
    completed.sort_unstable();
    assert_eq!(completed, [(1, None), (2, None)]);
    // Meanwhile the next flush is in flight, and covers what was reported when it began.
    shared.flush(also_early, report(&tx, 3));
    assert_eq!(rx.try_recv(), Ok((3, None)));

    end_flush(&held, Ok(()));
    let mut completed: Vec<_> = rx.try_iter().collect();
    completed.sort_unstable();
    assert_eq!(completed, (10..20).map(|name| (name, None)).collect::<Vec<_>>());
    assert_eq!(shared.stats(), FlushStats { flushes: 2, shared: 10, at_once: 1 });
    assert_eq!(held.held(), 0, "a third flush that nobody asked for");
}

#[test]
fn a_failed_flush_fails_its_callers_and_those_that_wait_for_the_next() {
    let held = held_device();
    let shared = FlushCoordinator::new(held.clone());
    let (tx, rx) = mpsc::channel();

    let durable = shared.write_completed();
    shared.flush(durable, report(&tx, 0));
    end_flush(&held, Ok(()));
    assert_eq!(rx.try_recv(), Ok((0, None)));

    let lost = shared.write_completed();
    shared.flush(lost, report(&tx, 1));
    shared.flush(lost, report(&tx, 2));
    let after = shared.write_completed();
    shared.flush(after, report(&tx, 3));
    end_flush(&held, Err(io::Error::from_raw_os_error(libc::ENOSPC)));
    let mut completed: Vec<_> = rx.try_iter().collect();
    completed.sort_unstable();
    assert_eq!(completed, [1, 2, 3].map(|name| (name, Some(libc::ENOSPC))));

    // No later flush can declare durable what that one lost; what was durable stays so.
    assert_eq!(shared.flush_wait(lost).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(
        shared.flush_wait(shared.write_completed()).unwrap_err().raw_os_error(),
        Some(libc::ENOSPC)
    );
    shared.flush_wait(durable).unwrap();
    assert_eq!(held.held(), 0);
}

#[test]
fn threads_that_arrive_during_a_flush_share_the_next() {
    const THREADS: u64 = 16;
    let held = held_device();
    let shared = FlushCoordinator::new(held.clone());
    let (tx, rx) = mpsc::channel();
    shared.flush(shared.write_completed(), report(&tx, 0));
    held.wait_for_held();
    std::thread::scope(|scope| {
        let boarded = Arc::new(std::sync::Barrier::new(THREADS as usize + 1));
        for _ in 0..THREADS {
            let (shared, boarded) = (Arc::clone(&shared), Arc::clone(&boarded));
            scope.spawn(move || {
                let target = shared.write_completed();
                boarded.wait();
                shared.flush_wait(target).unwrap();
            });
        }
        // All targets are taken: one more flush covers them, in whatever order they ask for it.
        boarded.wait();
        end_flush(&held, Ok(()));
        held.wait_for_held();
        end_flush(&held, Ok(()));
    });
    assert_eq!(rx.try_recv(), Ok((0, None)));
    let stats = shared.stats();
    assert_eq!(stats.flushes, 2);
    assert_eq!(stats.shared + stats.at_once, THREADS - 1);
}

#[test]
fn over_a_real_file_every_caller_is_answered() {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 50;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = Arc::new(
        FileDevice::create(&dir.path().join("volume"), 1 << 20, false, &Env::real()).unwrap(),
    );
    let shared = FlushCoordinator::new(device);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let shared = Arc::clone(&shared);
            scope.spawn(move || {
                let (tx, rx) = mpsc::channel();
                let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
                for round in 0..ROUNDS {
                    buf.fill(round as u8);
                    shared.device().write(thread * BLOCK_SIZE as u64, &buf).unwrap();
                    let target = shared.write_completed();
                    if (thread + round).is_multiple_of(2) {
                        shared.flush_wait(target).unwrap();
                    } else {
                        shared.flush(target, report(&tx, round));
                        assert_eq!(rx.recv().unwrap(), (round, None));
                    }
                }
            });
        }
    });
    let stats = shared.stats();
    assert_eq!(stats.flushes + stats.shared + stats.at_once, THREADS * ROUNDS);
    assert!(stats.flushes < THREADS * ROUNDS, "nobody shared a flush: {stats:?}");
    assert_eq!(u64::from(shared.device().flush_timing().samples), stats.flushes.min(256));
}
