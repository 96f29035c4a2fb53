//! Model of the log's space under shuttle: every interleaving it can find of takers, releases, and
//! the end.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

#[path = "../src/log/space.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod space;

/// What `space.rs` is compiled against here.
mod sync {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering};
    pub use shuttle::sync::{Arc, Condvar, Mutex};
}

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use space::{NoGrant, Space, Wake};

const SCHEDULES: usize = 3000;

/// Runs `model` with each way of waking.
fn check(model: impl Fn(Wake) + Send + Sync + Copy + 'static) {
    for wake in Wake::WAYS {
        shuttle::check_random(move || model(wake), SCHEDULES);
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::yield_now();
    }
}

/// Takers of any size, urgent or not, who give back what they took: never more is out than there
/// is, and all come through. Handing over wakes each once; the other ways do meet waiters that are
/// woken for nothing.
#[test]
fn space_is_never_overrun_and_nobody_sleeps_for_ever() {
    static WOKEN_FOR_NOTHING: [std::sync::atomic::AtomicU64; 3] =
        [const { std::sync::atomic::AtomicU64::new(0) }; 3];
    check(|wake| {
        const TOTAL: u64 = 10;
        let space = Arc::new(Space::new(TOTAL, 2, wake));
        let out = Arc::new(AtomicU64::new(0));
        let takers: Vec<_> = [(3, false), (8, false), (9, true), (5, true)]
            .into_iter()
            .map(|(bytes, urgent)| {
                let (space, out) = (space.clone(), out.clone());
                thread::spawn(move || {
                    for _ in 0..2 {
                        space.take(bytes, urgent, || ()).unwrap();
                        assert!(out.fetch_add(bytes, Ordering::SeqCst) + bytes <= TOTAL, "overrun");
                        thread::yield_now();
                        out.fetch_sub(bytes, Ordering::SeqCst);
                        // In two parts, as contexts give back what they did not need.
                        space.release(1);
                        space.release(bytes - 1);
                    }
                })
            })
            .collect();
        takers.into_iter().for_each(|t| t.join().unwrap());
        let stats = space.stats();
        assert_eq!((space.free(), space.has_waiters()), (TOTAL, false));
        assert_eq!((stats.waits, stats.waiting), (stats.grants, 0), "each waiter has one grant");
        WOKEN_FOR_NOTHING[wake as usize].fetch_add(stats.wakes - stats.grants, Ordering::Relaxed);
    });
    let for_nothing =
        Wake::WAYS.map(|wake| WOKEN_FOR_NOTHING[wake as usize].load(Ordering::Relaxed));
    assert_eq!(for_nothing[0], 0, "one wake-up for each grant");
    assert!(for_nothing[1] > 0 && for_nothing[2] > for_nothing[1], "{for_nothing:?}");
}

/// A large request is not passed by small ones that come later, an urgent one passes both.
#[test]
fn space_is_given_in_order_of_arrival_except_to_urgent_takers() {
    check(|wake| {
        let space = Arc::new(Space::new(10, 0, wake));
        space.take(10, false, || ()).unwrap();
        let order = Arc::new(shuttle::sync::Mutex::new(Vec::new()));
        let mut takers = Vec::new();
        for (n, (bytes, urgent)) in [(8, false), (1, false), (2, true)].into_iter().enumerate() {
            let (there, order) = (space.clone(), order.clone());
            takers.push(thread::spawn(move || {
                there.take(bytes, urgent, || ()).unwrap();
                order.lock().unwrap().push(bytes);
                there.release(bytes);
            }));
            wait_until(|| space.stats().waits == n as u64 + 1);
        }
        // Enough for the taker of 1 byte, which is last in the queue.
        space.release(1);
        assert_eq!(space.stats().grants, 0);
        // Enough for the urgent one; what it gives back is not enough for the first in the other
        // queue.
        space.release(1);
        wait_until(|| order.lock().unwrap().len() == 1);
        assert_eq!(*order.lock().unwrap(), [2]);
        space.release(8);
        takers.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(space.free(), 10);
        assert_eq!(space.stats().grants, 3);
    });
}

/// A new taker does not slip past those who wait, although there is room for it.
#[test]
fn a_newcomer_never_overtakes_the_wait_queue() {
    check(|wake| {
        let space = Arc::new(Space::new(10, 0, wake));
        space.take(5, false, || ()).unwrap();
        let there = space.clone();
        let large = thread::spawn(move || there.take(10, false, || ()).unwrap());
        wait_until(|| space.has_waiters());
        assert!(!space.try_take(1, false), "5 are free, and somebody waits for them");
        assert!(space.try_take(1, true), "the urgent do not stand in that queue");
        space.release(1);
        space.release(5);
        large.join().unwrap();
    });
}

/// 48 takers wait, some of them for all of the log, while others that want little keep asking: each
/// is granted its space when as much has come back as those before it and itself need, not later,
/// and nobody before its turn.
#[test]
fn each_taker_gets_space_in_turn_however_much_it_wants() {
    const LOG: u64 = 64;
    let model = |wake| {
        let space = Arc::new(Space::new(LOG, 0, wake));
        space.take(LOG, false, || ()).unwrap();
        let served = Arc::new(shuttle::sync::Mutex::new(Vec::new()));
        let wants: Vec<u64> = (0..48).map(|n| if n % 11 == 5 { LOG } else { 1 + n % 4 }).collect();
        let mut takers = Vec::new();
        for (n, bytes) in wants.iter().copied().enumerate() {
            let (there, served) = (space.clone(), served.clone());
            takers.push(thread::spawn(move || {
                there.take(bytes, false, || ()).unwrap();
                served.lock().unwrap().push(n);
            }));
            wait_until(|| space.stats().waits == n as u64 + 1);
        }
        for (n, bytes) in wants.iter().copied().enumerate() {
            // The space of the taker before comes back bit by bit.
            for _ in 1..bytes {
                space.release(1);
                assert!(!space.try_take(1, false), "nobody passes the queue by");
                assert_eq!(space.stats().grants, n as u64, "not before its turn");
            }
            space.release(1);
            wait_until(|| served.lock().unwrap().len() > n);
            assert_eq!(served.lock().unwrap()[n], n, "in turn");
        }
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        let stats = space.stats();
        assert_eq!((stats.waits, stats.grants, space.free()), (48, 48, 0));
        assert!(wake != Wake::Handoff || stats.wakes == 48, "one wake-up for each grant");
    };
    for wake in Wake::WAYS {
        shuttle::check_random(move || model(wake), 100);
    }
}

/// The end of the log's life wakes all waiters, and later takers do not wait at all.
#[test]
fn shutdown_wakes_everyone() {
    check(|wake| {
        let space = Arc::new(Space::new(4, 0, wake));
        space.take(4, false, || ()).unwrap();
        let takers: Vec<_> = [(1, false), (2, true), (4, false)]
            .into_iter()
            .map(|(bytes, urgent)| {
                let space = space.clone();
                thread::spawn(move || {
                    let result = space.take(bytes, urgent, || ());
                    if result.is_ok() {
                        space.release(bytes);
                    }
                    result
                })
            })
            .collect();
        let there = space.clone();
        let releaser = thread::spawn(move || there.release(1));
        space.stop();
        for result in takers.into_iter().map(|t| t.join().unwrap()) {
            assert!(matches!(result, Ok(()) | Err(NoGrant::Stopped)));
        }
        releaser.join().unwrap();
        assert_eq!(space.free(), 1, "nothing was lost");
        assert!(!space.has_waiters());
    });
}

/// Being turned away ends the wait, not the log.
#[test]
fn a_refused_taker_may_try_again() {
    check(|wake| {
        let space = Arc::new(Space::new(4, 0, wake));
        space.take(4, false, || ()).unwrap();
        let there = space.clone();
        let taker = thread::spawn(move || {
            let first = there.take(2, false, || ());
            let second = if first.is_err() { there.take(2, false, || ()) } else { Ok(()) };
            (first, second)
        });
        wait_until(|| space.has_waiters());
        space.fail_waiters();
        space.release(4);
        let (first, second) = taker.join().unwrap();
        assert_eq!((first, second), (Err(NoGrant::Full), Ok(())));
    });
}

/// While the first waiter would not fit, a release looks at one number and takes no lock.
#[test]
fn a_release_that_serves_no_waiter_takes_no_lock() {
    check(|wake| {
        let space = Arc::new(Space::new(8, 0, wake));
        space.take(8, false, || ()).unwrap();
        let there = space.clone();
        let taker = thread::spawn(move || there.take(6, false, || ()).unwrap());
        wait_until(|| space.has_waiters());
        // The taker may still be on its way out of the queue's lock.
        let passes = 1;
        for _ in 0..5 {
            space.release(1);
            assert_eq!(space.stats().passes, passes);
        }
        space.release(1);
        taker.join().unwrap();
        assert_eq!(space.stats().passes, passes + 1);
    });
}

/// Operations of several transactions: each takes space while the ones before it hold theirs, and
/// only a checkpoint gives it back. What is kept back for the urgent lets one that has begun go on,
/// however many want to begin; the end of the log's life, at any moment, leaves nobody asleep.
#[test]
fn operations_of_two_transactions_end_and_none_waits_for_ever() {
    check(|wake| {
        // Each transaction takes 2; at most two operations run at a time, with 4 kept back for
        // their second transactions.
        let space = Arc::new(Space::new(8, 4, wake));
        let (logged, running) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(3)));
        let rolling: Vec<_> = (0..3)
            .map(|_| {
                let (space, logged, running) = (space.clone(), logged.clone(), running.clone());
                thread::spawn(move || {
                    let result = space.take(2, false, || ()).and_then(|()| {
                        logged.fetch_add(2, Ordering::SeqCst);
                        space.take(2, true, || ()).map(|()| logged.fetch_add(2, Ordering::SeqCst))
                    });
                    running.fetch_sub(1, Ordering::SeqCst);
                    result.map(drop)
                })
            })
            .collect();
        let checkpoints = {
            let (space, logged, running) = (space.clone(), logged.clone(), running.clone());
            thread::spawn(move || {
                while running.load(Ordering::SeqCst) > 0 {
                    let bytes = logged.swap(0, Ordering::SeqCst);
                    if bytes > 0 {
                        space.release(bytes);
                    }
                    thread::yield_now();
                }
            })
        };
        let stopped = shuttle::rand::Rng::gen_bool(&mut shuttle::rand::thread_rng(), 0.3);
        if stopped {
            space.stop();
        }
        for result in rolling.into_iter().map(|t| t.join().unwrap()) {
            assert!(result.is_ok() || stopped && result == Err(NoGrant::Stopped));
        }
        checkpoints.join().unwrap();
        assert_eq!((space.free() + logged.load(Ordering::SeqCst), space.has_waiters()), (8, false));
        let stats = space.stats();
        assert!(wake != Wake::Handoff || stats.wakes == stats.grants, "one wake-up for each grant");
        assert!(stats.grants <= stats.waits);
    });
}
