//! Tests of `residency.rs`, which model checkers compile without them.

use crate::api::Ino;
use crate::inode::residency::{Moved, Parting, Remembered, STEPS, Shard, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Default)]
struct Inode {
    lookups: AtomicU64,
    used: AtomicBool,
    stays: AtomicBool,
}

/// Every inode exists, and counts as busy if it says so.
struct All;

impl Store for All {
    type Inode = Inode;
    type Error = ();
    fn may_wait(&self) -> Result<(), ()> {
        Ok(())
    }
    fn load(&self, _ino: Ino) -> Result<Option<Inode>, ()> {
        Ok(Some(Inode::default()))
    }
    fn part(&self, inode: &Inode) -> Parting {
        if inode.stays.load(Ordering::Relaxed) {
            return Parting::Stays;
        }
        let known = Remembered::new(inode.lookups.load(Ordering::Relaxed), false);
        known.map_or(Parting::Stays, Parting::Leaves)
    }
    fn newest_change(&self, _inode: &Inode) -> u64 {
        0
    }
    fn restore(&self, inode: &Inode, known: Remembered, _newest_change: u64) {
        inode.lookups.store(known.lookups(), Ordering::Relaxed);
    }
    fn note_use(&self, inode: &Inode) {
        inode.used.store(true, Ordering::Relaxed);
    }
    fn take_used(&self, inode: &Inode) -> bool {
        inode.used.swap(false, Ordering::Relaxed)
    }
}

fn get(shard: &Shard<Inode>, ino: Ino, most: usize) -> (Arc<Inode>, usize) {
    let mut moved = Moved::default();
    let found = shard.get(&All, ino, most, &mut moved).expect("no errors here");
    (found.expect("all exist"), moved.left.len())
}

#[test]
fn a_known_inode_takes_at_most_32_bytes() {
    let shard = Shard::default();
    for ino in 1..=100_000_u64 {
        get(&shard, ino << 8, 8).0.lookups.store(1, Ordering::Relaxed);
        let counts = shard.counts();
        if counts.remembered > 64 {
            assert!(counts.remembered_bytes <= 32 * counts.remembered, "{counts:?}");
        }
    }
    // Two passes: those that were just added are used.
    let counts = shard.counts();
    assert!(counts.resident <= 8 + STEPS && counts.remembered >= 100_000 - 16, "{counts:?}");
    (1..=99_000_u64).for_each(|ino| drop(shard.forget(ino << 8, 1)));
    let counts = shard.counts();
    assert!(counts.remembered_bytes <= 5 * 32 * counts.remembered, "{counts:?}: it shrinks");
}

#[test]
fn more_lookups_than_can_be_remembered_are_refused() {
    for mapped in [false, true] {
        for lookups in [0, 1, (1 << 31) - 1] {
            let known = Remembered::new(lookups, mapped).expect("it fits");
            assert_eq!((known.lookups(), known.is_mapped()), (lookups, mapped));
        }
        assert_eq!(Remembered::new(1 << 31, mapped), None);
        assert_eq!(Remembered::new(1 << 32 | 5, mapped), None);
    }
}

#[test]
fn the_lookups_of_a_remembered_inode_are_taken_back_and_come_back() {
    let shard = Shard::default();
    get(&shard, 1, 8).0.lookups.store(5, Ordering::Relaxed);
    shard.trim(&All, 0, STEPS, &mut Moved::default());
    assert!(shard.peek(1).is_none());
    assert!(shard.forget(1, 2).is_none());
    assert_eq!(get(&shard, 1, 8).0.lookups.load(Ordering::Relaxed), 3);
    assert!(shard.forget(1, 1).is_some(), "it is resident: the caller counts");
    shard.trim(&All, 0, STEPS, &mut Moved::default());
    assert!(shard.forget(1, 9).is_none());
    assert_eq!(shard.counts().remembered, 0, "nobody knows it any more");
}

/// However many may not leave, no request looks at more than a few.
#[test]
fn the_work_of_a_request_is_bounded() {
    let shard = Shard::default();
    for ino in 0..1000 {
        get(&shard, ino, 0).0.stays.store(true, Ordering::Relaxed);
    }
    assert_eq!(shard.counts().resident, 1000);
    shard.residents().iter().for_each(|inode| inode.stays.store(false, Ordering::Relaxed));
    for ino in 1000..3000 {
        let (_, left) = get(&shard, ino, 0);
        assert!(left <= STEPS);
    }
    assert!(shard.counts().resident <= STEPS, "those that were busy have left");
}

#[test]
fn what_is_used_stays_beside_a_walk_over_all() {
    let shard = Shard::default();
    get(&shard, 1, 100);
    for ino in 2..10_000 {
        get(&shard, ino, 100);
        get(&shard, 1, 100);
        assert!(shard.peek(1).is_some());
    }
}

#[test]
fn the_queue_does_not_grow_with_inodes_that_were_removed() {
    let shard = Shard::<Inode>::default();
    for ino in 0..10_000 {
        shard.insert(&All, ino, &Arc::default(), 100, &mut Moved::default());
        if ino >= 50 {
            assert!(shard.remove(ino).is_some());
        }
    }
    assert_eq!(shard.counts().resident, 50, "below the bound nothing leaves");
    assert!(shard.counts().queued <= 101);
}
