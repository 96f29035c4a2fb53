//! `serve_overdue`: waiters that a crowd of running operations does not hand over to.

use crate::space::{Space, Wake};
use crate::{CROWD, SCHEDULES, check, new_space, wait_until};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::thread;

/// A crowd may run for long and end nothing. A waiter that is first at two looks has its space at
/// the second one, if it fits; and one that has become first meanwhile at the next.
#[test]
fn an_overdue_waiter_is_served_whatever_runs() {
    shuttle::check_random(
        || {
            let space = new_space(8, 0, Wake::Barging);
            for _ in 0..CROWD {
                space.take(1, false, || ()).unwrap();
            }
            space.take(6, false, || ()).unwrap();
            let taker = |bytes, waits| {
                let there = space.clone();
                let taker = thread::spawn(move || there.take(bytes, false, || ()).unwrap());
                wait_until(|| space.stats().waits == waits);
                taker
            };
            let first = taker(2, 1);
            let second = taker(5, 2);
            space.serve_overdue();
            assert_eq!(space.stats().grants, 0);
            space.serve_overdue();
            assert_eq!(space.stats().grants, 0, "there is no space");
            space.end(6);
            assert_eq!(space.stats().grants, 0, "a crowd runs");
            space.serve_overdue();
            assert_eq!(space.stats().grants, 1, "the second one does not fit");
            first.join().unwrap();
            space.release(1);
            assert_eq!(space.stats().grants, 1, "a crowd runs");
            space.serve_overdue();
            assert_eq!(space.stats().grants, 2);
            second.join().unwrap();
            space.serve_overdue();
        },
        SCHEDULES,
    );
}

/// A thread that looks again and again, from now until nobody waits. Each look that begins after
/// `freed` is set is counted.
fn look_on(
    space: &Arc<Space>,
    freed: &Arc<AtomicBool>,
    looks: &Arc<AtomicU64>,
) -> thread::JoinHandle<()> {
    let (space, freed, looks) = (space.clone(), freed.clone(), looks.clone());
    thread::spawn(move || {
        while space.has_waiters() {
            looks.fetch_add(freed.load(Ordering::SeqCst).into(), Ordering::SeqCst);
            space.serve_overdue();
            thread::yield_now();
        }
    })
}

/// Looks at any moment, beside takers that barge and a release: waiters that fit have their space
/// after two looks at the latest, in turn, with one wake-up each.
#[test]
fn two_looks_are_enough_whatever_runs_beside_them() {
    static MOST: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    shuttle::check_random(
        || {
            const LOG: u64 = 9;
            let space = new_space(LOG, 0, Wake::Barging);
            for _ in 0..CROWD {
                space.take(1, false, || ()).unwrap();
            }
            space.take(LOG - CROWD, false, || ()).unwrap();
            let served = Arc::new(AtomicU64::new(0));
            let waiters: Vec<_> = [2, 3]
                .into_iter()
                .zip(1..)
                .map(|(bytes, waits)| {
                    let (there, served) = (space.clone(), served.clone());
                    let waiter = thread::spawn(move || {
                        there.take(bytes, false, || ()).unwrap();
                        served.fetch_add(bytes, Ordering::SeqCst);
                    });
                    wait_until(|| space.stats().waits == waits);
                    waiter
                })
                .collect();
            let (freed, looks) = (Arc::default(), Arc::default());
            let looker = look_on(&space, &freed, &looks);
            let there = space.clone();
            let taker = thread::spawn(move || {
                for _ in 0..3 {
                    if there.try_take(1, false) {
                        there.end(1);
                    }
                }
            });
            // Enough for both waiters and for the taker. The crowd ends nothing.
            space.end(LOG - CROWD);
            freed.store(true, Ordering::SeqCst);
            looker.join().unwrap();
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
            taker.join().unwrap();
            let looks = looks.load(Ordering::SeqCst);
            assert!(looks <= 2, "{looks} looks");
            MOST.fetch_max(looks, std::sync::atomic::Ordering::Relaxed);
            let stats = space.stats();
            assert_eq!((stats.waits, stats.grants, stats.wakes, space.free()), (2, 2, 2, 2));
            assert_eq!(served.load(Ordering::SeqCst), 5);
        },
        SCHEDULES,
    );
    assert_eq!(MOST.load(std::sync::atomic::Ordering::Relaxed), 2, "the model meets the bound");
}

/// Takers of both kinds, releases, looks and the end of the log's life, at any moment: never more
/// is out than there is, and nobody sleeps for ever.
#[test]
fn looks_overrun_nothing_and_leave_nobody_asleep() {
    check(|wake| {
        const TOTAL: u64 = 8;
        const RESERVE: u64 = 2;
        let space = new_space(TOTAL, RESERVE, wake);
        let (out, running) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(4)));
        let takers: Vec<_> = [(6, false), (2, false), (4, false), (8, true)]
            .into_iter()
            .map(|(bytes, urgent)| {
                let (space, out, running) = (space.clone(), out.clone(), running.clone());
                thread::spawn(move || {
                    let result = space.take(bytes, urgent, || ());
                    if result.is_ok() {
                        let most = if urgent { TOTAL } else { TOTAL - RESERVE };
                        assert!(out.fetch_add(bytes, Ordering::SeqCst) + bytes <= most, "overrun");
                        out.fetch_sub(bytes, Ordering::SeqCst);
                        space.end(bytes);
                    }
                    running.fetch_sub(1, Ordering::SeqCst);
                    result
                })
            })
            .collect();
        let looker = {
            let (space, running) = (space.clone(), running.clone());
            thread::spawn(move || {
                while running.load(Ordering::SeqCst) > 0 {
                    space.serve_overdue();
                    thread::yield_now();
                }
            })
        };
        let stopped = shuttle::rand::Rng::gen_bool(&mut shuttle::rand::thread_rng(), 0.3);
        if stopped {
            space.stop();
        }
        for result in takers.into_iter().map(|taker| taker.join().unwrap()) {
            assert!(result.is_ok() || stopped);
        }
        looker.join().unwrap();
        assert_eq!((space.free(), space.has_waiters()), (TOTAL, false));
        let stats = space.stats();
        assert!(!wake.grants() || stats.wakes == stats.grants, "one wake-up for each grant");
    });
}
