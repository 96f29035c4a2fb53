//! Models of inodes that leave memory and come back, under loom (`src/inode/residency.rs`, rules
//! RESIDENT-1 to RESIDENT-3).
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

/// What an inode number is.
mod api {
    pub type Ino = u64;
}

#[path = "../src/inode/residency.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod residency;

/// What `residency.rs` is compiled against here.
mod sync {
    pub use loom::sync::atomic::{Ordering, fence};
    pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }

    pub fn wait_for<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(guard).unwrap()
    }
}

use loom::sync::atomic::AtomicU64;
use loom::thread;
use residency::{Moved, Parting, Remembered, Shard, Store};
use std::convert::Infallible;
use sync::{Arc, Ordering};

const INO: u64 = 7;
/// What the journal has of an inode that was deleted.
const DELETED: u64 = u64::MAX;

/// An inode: its lookups, a value that the journal stores, and the context that has it.
struct Inode {
    lookups: AtomicU64,
    value: AtomicU64,
    changed: AtomicU64,
}

/// A journal with one inode.
struct Journal(AtomicU64);

impl Store for Journal {
    type Inode = Inode;
    type Error = Infallible;

    fn may_wait(&self) -> Result<(), Infallible> {
        Ok(())
    }
    fn load(&self, _ino: u64) -> Result<Option<Inode>, Infallible> {
        let value = self.0.load(Ordering::Acquire);
        if value == DELETED {
            return Ok(None);
        }
        Ok(Some(Inode {
            lookups: AtomicU64::new(0),
            value: AtomicU64::new(value),
            changed: AtomicU64::new(0),
        }))
    }
    fn part(&self, inode: &Inode) -> Parting {
        // The thread that changed it has let go of it, so what it says is what the journal has.
        assert_eq!(
            inode.value.load(Ordering::Relaxed),
            self.0.load(Ordering::Relaxed),
            "a change would be lost"
        );
        Parting::Leaves(Remembered::new(inode.lookups.load(Ordering::Relaxed), false).unwrap())
    }
    fn newest_change(&self, inode: &Inode) -> u64 {
        inode.changed.load(Ordering::Relaxed)
    }
    fn restore(&self, inode: &Inode, known: Remembered, newest_change: u64) {
        inode.lookups.store(known.lookups(), Ordering::Relaxed);
        inode.changed.store(newest_change, Ordering::Relaxed);
    }
    fn note_use(&self, _inode: &Inode) {}
    fn take_used(&self, _inode: &Inode) -> bool {
        false
    }
}

struct Model {
    shard: Shard<Inode>,
    journal: Journal,
}

impl Model {
    fn new() -> Arc<Self> {
        Arc::new(Self { shard: Shard::default(), journal: Journal(AtomicU64::new(0)) })
    }

    fn find(&self) -> Option<Arc<Inode>> {
        let mut moved = Moved::default();
        let Ok(found) = self.shard.get(&self.journal, INO, 0, &mut moved);
        found
    }

    fn get(&self) -> Arc<Inode> {
        self.find().unwrap()
    }

    /// Its last user deletes it.
    fn delete(&self) {
        let inode = self.get();
        self.journal.0.store(DELETED, Ordering::Release);
        inode.value.store(DELETED, Ordering::Relaxed);
        assert!(self.shard.remove(INO).is_some());
    }

    fn lookup(&self) {
        self.get().lookups.fetch_add(1, Ordering::AcqRel);
    }

    fn forget(&self, count: u64) {
        if let Some(inode) = self.shard.forget(INO, count) {
            inode.lookups.fetch_sub(count, Ordering::AcqRel);
        }
    }

    /// A change: in memory and in the journal, as under the inode lock.
    fn change(&self) {
        let inode = self.get();
        inode.value.fetch_add(1, Ordering::Relaxed);
        self.journal.0.fetch_add(1, Ordering::AcqRel);
        inode.changed.fetch_add(1, Ordering::Relaxed);
    }

    fn trim(&self) {
        let mut moved = Moved::default();
        self.shard.trim(&self.journal, 0, 1, &mut moved);
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn no_lookup_is_lost_or_counted_twice_while_the_inode_leaves_and_comes_back() {
    check(|| {
        let model = Model::new();
        model.lookup();
        model.lookup();
        let threads = [Model::lookup, |model: &Model| model.forget(1), Model::trim].map(|act| {
            let model = Arc::clone(&model);
            thread::spawn(move || act(&model))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        model.trim();
        assert_eq!(model.shard.counts().remembered, 1);
        assert_eq!(model.get().lookups.load(Ordering::Relaxed), 2);
        model.forget(2);
        model.trim();
        let counts = model.shard.counts();
        assert_eq!((counts.resident, counts.remembered), (0, 0), "a lookup is left over");
    });
}

#[test]
fn a_change_is_there_when_the_inode_comes_back() {
    check(|| {
        let model = Model::new();
        model.lookup();
        let threads = [Model::change, Model::trim, Model::trim].map(|act| {
            let model = Arc::clone(&model);
            thread::spawn(move || act(&model))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        model.trim();
        let inode = model.get();
        assert_eq!(inode.value.load(Ordering::Relaxed), 1);
        assert_eq!(inode.changed.load(Ordering::Relaxed), 1, "an fsync would force too little");
    });
}

#[test]
fn threads_that_want_the_same_inode_get_the_same_one() {
    check(|| {
        let model = Model::new();
        let other = Arc::clone(&model);
        let there = thread::spawn(move || other.get());
        let here = model.get();
        assert!(Arc::ptr_eq(&here, &there.join().unwrap()));
    });
}

#[test]
fn an_inode_that_was_deleted_does_not_come_back() {
    check(|| {
        let model = Model::new();
        let threads = [Model::delete, |model: &Model| drop(model.find())].map(|act| {
            let model = Arc::clone(&model);
            thread::spawn(move || act(&model))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(model.find().is_none());
        assert_eq!(model.shard.counts().resident, 0);
    });
}
