//! `keep_back`, the reserve of urgent takers, and `grow`, which changes it.

use crate::space::Wake;
use crate::{check, new_space, wait_until};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;

/// New takers never have more than all but the reserve. So an urgent taker that wants no more than
/// that never waits, however many new ones come.
#[test]
fn new_takers_leave_the_reserve_to_urgent_ones() {
    check(|wake| {
        const TOTAL: u64 = 10;
        const RESERVE: u64 = 4;
        let space = new_space(TOTAL, RESERVE, wake);
        let out = Arc::new(AtomicU64::new(0));
        let takers: Vec<_> = [3, 6, 2]
            .into_iter()
            .map(|bytes| {
                let (space, out) = (space.clone(), out.clone());
                thread::spawn(move || {
                    for _ in 0..2 {
                        space.take(bytes, false, || ()).unwrap();
                        let all = out.fetch_add(bytes, Ordering::SeqCst) + bytes;
                        assert!(all <= TOTAL - RESERVE, "{all} bytes for new takers");
                        assert!(space.room(false) <= TOTAL - RESERVE - bytes);
                        out.fetch_sub(bytes, Ordering::SeqCst);
                        space.end(bytes);
                    }
                })
            })
            .collect();
        for _ in 0..2 {
            // In two parts, as an operation that goes on with another transaction.
            assert!(space.try_take(1, true) && space.try_take(RESERVE - 1, true));
            space.end(1);
            space.end(RESERVE - 1);
        }
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        assert_eq!((space.free(), space.has_waiters()), (TOTAL, false));
        assert_eq!((space.room(false), space.room(true)), (TOTAL - RESERVE, TOTAL));
    });
}

/// The log grows, and with it the reserve. A new taker that looked at the reserve before must not
/// take from it after: neither if the word changes under it, nor if another taker brings the word
/// back to what it was.
#[test]
fn a_taker_beside_a_growing_log_leaves_the_reserve() {
    static TAKEN: [std::sync::atomic::AtomicU64; 2] =
        [const { std::sync::atomic::AtomicU64::new(0) }; 2];
    check(|wake| {
        let space = new_space(4, 0, wake);
        let take = || {
            let there = space.clone();
            thread::spawn(move || {
                let taken = there.try_take(4, false);
                if taken {
                    // Its bytes stay in the log.
                    there.end(0);
                }
                taken
            })
        };
        let takers = [take(), take()];
        space.grow(4, 4);
        let taken = takers.into_iter().map(|taker| taker.join().unwrap());
        let taken = taken.filter(|taken| *taken).count();
        assert!(taken <= 1, "the second one took the reserve");
        assert_eq!(space.free(), 8 - 4 * taken as u64);
        assert!(space.try_take(4, true), "an urgent taker has the reserve");
        TAKEN[taken].fetch_add(1, Ordering::Relaxed);
    });
    assert!(TAKEN[1].load(Ordering::Relaxed) > 0);
}

/// Waiters of both kinds, releases and growth at any moment: nobody misses the space that growth
/// brings, nothing is overrun, and the new reserve counts.
#[test]
fn growth_serves_waiters_and_loses_no_bytes() {
    check(|wake| {
        const TOTAL: u64 = 4;
        const GROWN: u64 = 12;
        const RESERVE: u64 = 3;
        let space = new_space(TOTAL, 1, wake);
        let out = Arc::new(AtomicU64::new(0));
        // Some want more than there is before the log grows.
        let takers: Vec<_> = [(3, false), (9, false), (2, true), (10, true)]
            .into_iter()
            .map(|(bytes, urgent)| {
                let (space, out) = (space.clone(), out.clone());
                thread::spawn(move || {
                    space.take(bytes, urgent, || ()).unwrap();
                    let all = out.fetch_add(bytes, Ordering::SeqCst) + bytes;
                    assert!(all <= GROWN, "overrun: {all} bytes");
                    out.fetch_sub(bytes, Ordering::SeqCst);
                    space.release(1);
                    space.end(bytes - 1);
                })
            })
            .collect();
        space.grow(3, 2);
        space.grow(GROWN - TOTAL - 3, RESERVE);
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        assert_eq!((space.free(), space.has_waiters()), (GROWN, false));
        assert_eq!(space.room(false), GROWN - RESERVE);
        let stats = space.stats();
        assert_eq!((stats.waits, stats.waiting), (stats.grants, 0), "each waiter has one grant");
        assert!(!wake.grants() || stats.wakes == stats.grants, "one wake-up for each grant");
    });
}

/// A waiter that the log's growth brings no space to needs more than before, by what the reserve
/// has grown. A release that is not enough for that serves nobody.
#[test]
fn a_waiter_leaves_the_reserve_of_the_log_that_has_grown() {
    check(|wake| {
        let space = new_space(4, 0, wake);
        space.take(4, false, || ()).unwrap();
        space.end(0);
        let there = space.clone();
        let waiter = thread::spawn(move || there.take(3, false, || ()).unwrap());
        wait_until(|| space.has_waiters());
        space.grow(1, 2);
        assert!(space.is_short());
        space.release(3);
        assert_eq!((space.free(), space.stats().grants), (4, 0), "2 are kept back");
        assert!(space.is_short());
        space.release(1);
        waiter.join().unwrap();
        assert_eq!((space.free(), space.stats().grants, space.is_short()), (2, 1, false));
    });
}

/// The word counts growths and takers side by side: however often the log grows, nothing else in
/// the word changes.
#[test]
fn each_growth_leaves_waiters_barges_and_operations_as_they_are() {
    shuttle::check_random(
        || {
            let space = new_space(4, 0, Wake::Barging);
            space.take(1, false, || ()).unwrap();
            space.take(1, false, || ()).unwrap();
            let there = space.clone();
            let waiter = thread::spawn(move || there.take(100, false, || ()).unwrap());
            wait_until(|| space.has_waiters());
            for n in 1..=9 {
                space.grow(1, 0);
                assert_eq!((space.free(), space.has_waiters()), (2 + n, true));
            }
            let barges = (0..10).filter(|_| space.try_take(0, false)).count() as u64;
            assert_eq!(barges, crate::BARGES_MAX);
            (0..barges).for_each(|_| space.end(0));
            space.grow(89, 0);
            waiter.join().unwrap();
            assert_eq!(space.free(), 0);
            // As many operations end as began.
            (0..3).for_each(|_| space.end(0));
        },
        100,
    );
}
