//! Model of the log's space under shuttle: every interleaving it can find of takers, releases, and
//! the end.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

#[path = "space_model/growth.rs"]
mod growth;
#[path = "space_model/overdue.rs"]
mod overdue;
#[path = "../src/log/space/mod.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod space;

/// What `log/space` is compiled against here.
mod sync {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering};
    pub use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
}

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use space::{BARGES_MAX, NoGrant, Space, Wake};

const SCHEDULES: usize = 3000;

/// So many operations that run keep the processors of the model busy.
const CROWD: u64 = 2;

fn new_space(free: u64, keep_back: u64, wake: Wake) -> Arc<Space> {
    Arc::new(Space::new(free, keep_back, CROWD).with(wake))
}

/// Runs `model` with each way to serve waiters.
fn check(model: impl Fn(Wake) + Send + Sync + Copy + 'static) {
    check_ways(&Wake::WAYS, model);
}

/// Runs `model` with each way that lets nobody pass a waiter.
fn check_strict(model: impl Fn(Wake) + Send + Sync + Copy + 'static) {
    let strict: Vec<_> = Wake::WAYS.into_iter().filter(|wake| wake.is_strict()).collect();
    assert_eq!(strict.len(), 3);
    check_ways(&strict, model);
}

fn check_ways(ways: &[Wake], model: impl Fn(Wake) + Send + Sync + Copy + 'static) {
    for wake in ways.iter().copied() {
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
    static WOKEN_FOR_NOTHING: [std::sync::atomic::AtomicU64; 4] =
        [const { std::sync::atomic::AtomicU64::new(0) }; 4];
    check(|wake| {
        const TOTAL: u64 = 10;
        let space = new_space(TOTAL, 2, wake);
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
                        space.end(bytes - 1);
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
    assert_eq!(for_nothing[..2], [0, 0], "one wake-up for each grant");
    assert!(for_nothing[2] > 0 && for_nothing[3] > for_nothing[2], "{for_nothing:?}");
}

/// A large request is not passed by small ones that come later, an urgent one passes both.
#[test]
fn space_is_given_in_order_of_arrival_except_to_urgent_takers() {
    check(|wake| {
        let space = new_space(10, 0, wake);
        space.take(10, false, || ()).unwrap();
        space.end(0);
        let order = Arc::new(shuttle::sync::Mutex::new(Vec::new()));
        let mut takers = Vec::new();
        for (n, (bytes, urgent)) in [(8, false), (1, false), (2, true)].into_iter().enumerate() {
            let (there, order) = (space.clone(), order.clone());
            takers.push(thread::spawn(move || {
                there.take(bytes, urgent, || ()).unwrap();
                order.lock().unwrap().push(bytes);
                there.end(bytes);
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
    check_strict(|wake| {
        let space = new_space(10, 0, wake);
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
        let space = new_space(LOG, 0, wake);
        space.take(LOG, false, || ()).unwrap();
        space.end(0);
        let served = Arc::new(shuttle::sync::Mutex::new(Vec::new()));
        let wants: Vec<u64> = (0..48).map(|n| if n % 11 == 5 { LOG } else { 1 + n % 4 }).collect();
        let mut takers = Vec::new();
        for (n, bytes) in wants.iter().copied().enumerate() {
            let (there, served) = (space.clone(), served.clone());
            takers.push(thread::spawn(move || {
                there.take(bytes, false, || ()).unwrap();
                served.lock().unwrap().push(n);
                there.end(0);
            }));
            wait_until(|| space.stats().waits == n as u64 + 1);
        }
        for (n, bytes) in wants.iter().copied().enumerate() {
            // The space of the taker before comes back bit by bit.
            for _ in 1..bytes {
                space.release(1);
                assert!(
                    !wake.is_strict() || !space.try_take(1, false),
                    "nobody passes the queue by"
                );
                assert_eq!(space.stats().grants, n as u64, "not before its turn");
            }
            space.release(1);
            wait_until(|| served.lock().unwrap().len() > n);
            assert_eq!(served.lock().unwrap()[n], n, "in turn");
        }
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        let stats = space.stats();
        assert_eq!((stats.waits, stats.grants, space.free()), (48, 48, 0));
        assert!(!wake.grants() || stats.wakes == 48, "one wake-up for each grant");
    };
    for wake in Wake::WAYS {
        shuttle::check_random(move || model(wake), 100);
    }
}

/// The end of the log's life wakes all waiters, and later takers do not wait at all.
#[test]
fn shutdown_wakes_everyone() {
    check(|wake| {
        let space = new_space(4, 0, wake);
        space.take(4, false, || ()).unwrap();
        let takers: Vec<_> = [(1, false), (2, true), (4, false)]
            .into_iter()
            .map(|(bytes, urgent)| {
                let space = space.clone();
                thread::spawn(move || {
                    let result = space.take(bytes, urgent, || ());
                    if result.is_ok() {
                        space.end(bytes);
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
        let space = new_space(4, 0, wake);
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
        let space = new_space(8, 0, wake);
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
        let space = new_space(8, 4, wake);
        let (logged, running) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(3)));
        let rolling: Vec<_> = (0..3)
            .map(|_| {
                let (space, logged, running) = (space.clone(), logged.clone(), running.clone());
                thread::spawn(move || {
                    let commits = || {
                        logged.fetch_add(2, Ordering::SeqCst);
                        space.end(0);
                    };
                    let result = space.take(2, false, || ()).and_then(|()| {
                        commits();
                        space.take(2, true, || ()).map(|()| commits())
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
        assert!(!wake.grants() || stats.wakes == stats.grants, "one wake-up for each grant");
        assert!(stats.grants <= stats.waits);
    });
}

/// A waiter and takers that keep coming, while a crowd runs: as many as may pass the waiter do, and
/// no more, although there always is room for them. Then freed space gathers for it.
#[test]
fn a_waiter_is_passed_a_bounded_number_of_times() {
    static MOST: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    shuttle::check_random(
        || {
            const LOG: u64 = 10;
            let space = new_space(LOG, 0, Wake::Barging);
            // The crowd runs all the time.
            for _ in 0..CROWD {
                space.take(1, false, || ()).unwrap();
            }
            space.take(4, false, || ()).unwrap();
            let there = space.clone();
            // All but what the crowd has.
            let waiter = thread::spawn(move || {
                there.take(LOG - CROWD, false, || ()).unwrap();
                there.end(LOG - CROWD);
            });
            wait_until(|| space.has_waiters());
            let passed = Arc::new(AtomicU64::new(0));
            let takers: Vec<_> = (0..3)
                .map(|_| {
                    let (space, passed) = (space.clone(), passed.clone());
                    thread::spawn(move || {
                        while space.has_waiters() {
                            if space.try_take(1, false) {
                                // It is waiting still, so it was waiting then.
                                passed.fetch_add(space.has_waiters().into(), Ordering::SeqCst);
                                space.end(1);
                            }
                            thread::yield_now();
                        }
                    })
                })
                .collect();
            space.end(4);
            waiter.join().unwrap();
            takers.into_iter().for_each(|taker| taker.join().unwrap());
            let passed = passed.load(Ordering::SeqCst);
            assert!(passed <= BARGES_MAX, "passed {passed} times");
            MOST.fetch_max(passed, Ordering::Relaxed);
            let stats = space.stats();
            assert_eq!((stats.waits, stats.grants, stats.wakes), (1, 1, 1));
            assert!(passed <= stats.barges && stats.barges <= BARGES_MAX);
        },
        SCHEDULES,
    );
    assert_eq!(MOST.load(Ordering::Relaxed), BARGES_MAX, "the model meets the bound");
}

/// A waiter further back is passed by more, but not without a bound.
#[test]
fn each_waiter_is_passed_at_most_once_for_each_barge_before_it() {
    shuttle::check_random(
        || {
            let space = new_space(4, 0, Wake::Barging);
            for _ in 0..CROWD {
                space.take(1, false, || ()).unwrap();
            }
            space.take(2, false, || ()).unwrap();
            let waiters: Vec<_> = (0..3)
                .map(|n| {
                    let there = space.clone();
                    let waiter = thread::spawn(move || {
                        there.take(2, false, || ()).unwrap();
                        there.end(2);
                    });
                    wait_until(|| space.stats().waits == n + 1);
                    waiter
                })
                .collect();
            let passed: Vec<_> = (0..3).map(|_| AtomicU64::new(0)).collect();
            let passed = Arc::new(passed);
            let takers: Vec<_> = (0..2)
                .map(|_| {
                    let (space, passed) = (space.clone(), passed.clone());
                    thread::spawn(move || {
                        while space.has_waiters() {
                            if space.try_take(1, false) {
                                let served = space.stats().grants as usize;
                                for waiter in passed.iter().skip(served) {
                                    waiter.fetch_add(1, Ordering::SeqCst);
                                }
                                space.end(1);
                            }
                            thread::yield_now();
                        }
                    })
                })
                .collect();
            space.end(2);
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
            takers.into_iter().for_each(|taker| taker.join().unwrap());
            for (n, passed) in passed.iter().enumerate() {
                let (passed, before) = (passed.load(Ordering::SeqCst), n as u64 + 1);
                assert!(passed <= before * BARGES_MAX, "number {n} was passed {passed} times");
            }
            let stats = space.stats();
            assert_eq!((stats.waits, stats.grants, stats.wakes), (3, 3, 3));
        },
        SCHEDULES,
    );
}

/// Space is left to running threads only while a crowd runs: an operation that ends and leaves
/// fewer hands over, and so does a release while fewer run.
#[test]
fn nobody_sleeps_beside_free_space_unless_a_crowd_runs() {
    shuttle::check_random(
        || {
            let space = new_space(10, 0, Wake::Barging);
            for _ in 0..=CROWD {
                space.take(2, false, || ()).unwrap();
            }
            space.take(4, false, || ()).unwrap();
            let takers: Vec<_> = (0..2)
                .map(|n| {
                    let there = space.clone();
                    let taker = thread::spawn(move || there.take(1, false, || ()).unwrap());
                    wait_until(|| space.stats().waits == n + 1);
                    taker
                })
                .collect();
            space.end(4);
            space.end(2);
            assert_eq!((space.free(), space.stats().grants), (6, 0), "a crowd runs");
            space.end(2);
            assert_eq!((space.free(), space.stats().grants), (7, 1), "a crowd runs again");
            space.release(0);
            assert_eq!(space.stats().grants, 1);
            // The first taker ends, then the rest of the crowd.
            space.end(0);
            assert_eq!(space.stats().grants, 2, "the second one makes up the crowd");
            takers.into_iter().for_each(|taker| taker.join().unwrap());
            assert!(!space.has_waiters());
        },
        SCHEDULES,
    );
}

/// An urgent taker that waits is passed by nobody, whatever runs; nor does the log itself pass it.
#[test]
fn nobody_passes_an_urgent_waiter() {
    check(|wake| {
        let space = new_space(10, 0, wake);
        for _ in 0..CROWD {
            space.take(2, false, || ()).unwrap();
        }
        let there = space.clone();
        let taker = thread::spawn(move || there.take(8, true, || ()).unwrap());
        wait_until(|| space.has_waiters());
        assert!(!space.try_take(1, false) && !space.try_take(1, true));
        assert!(!space.try_take_for_log(1));
        space.release(2);
        taker.join().unwrap();
        assert_eq!((space.free(), space.stats().barges), (0, 0));
    });
}

/// The word has room for a number of operations. More of them wait, and nothing is overrun.
#[test]
fn more_operations_than_the_word_counts_wait() {
    const OPERATIONS: u64 = (1 << 16) - 1;
    let mut config = shuttle::Config::default();
    config.max_steps = shuttle::MaxSteps::None;
    let scheduler = shuttle::scheduler::RandomScheduler::new(1);
    shuttle::Runner::new(scheduler, config).run(|| {
        let space = new_space(10, 0, Wake::Barging);
        for _ in 0..OPERATIONS {
            assert!(space.try_take(0, false));
        }
        assert!(!space.try_take(0, false) && !space.try_take(0, true));
        assert_eq!(space.free(), 10);
        space.end(0);
        assert!(space.try_take(3, false));
        assert_eq!(space.free(), 7);
    });
}
