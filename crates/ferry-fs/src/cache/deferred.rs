//! Work under a lock, which is left to the thread that has the lock.
//!
//! A thread that wants something done under a lock, and does not want to wait for it, adds the work
//! here and calls [`Deferred::run`]. So does every thread that has just given the lock up. If the
//! lock is taken, its holder will come by: nothing that was added stays undone while nobody has the
//! lock (the idea of *flat combining*: D. Hendler and others, SPAA 2010).
//!
//! Why none is missed: the adder notes the work before it tries the lock, the holder gives the lock
//! up before it looks for work, and both have a full fence in between. So either the adder finds
//! the lock free or the holder finds the work.

use crate::sync::{AtomicBool, Mutex, Ordering, fence, lock};

/// Work that waits for the holder of a lock. Each inode has one: it is small while it is empty.
pub struct Deferred<T> {
    any: AtomicBool,
    newest: Mutex<Option<Box<Item<T>>>>,
}

struct Item<T> {
    item: T,
    next: Option<Box<Item<T>>>,
}

impl<T> Default for Deferred<T> {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), newest: Mutex::new(None) }
    }
}

impl<T> Deferred<T> {
    /// Adds work. [`Deferred::run`] must follow.
    pub fn add(&self, item: T) {
        let mut newest = lock(&self.newest);
        let next = newest.take();
        *newest = Some(Box::new(Item { item, next }));
        self.any.store(true, Ordering::Relaxed);
    }

    /// Does all the work if nobody has the lock, which the caller does not have (any more).
    pub fn run<G>(&self, try_lock: impl Fn() -> Option<G>, mut work: impl FnMut(&mut G, T)) {
        loop {
            fence(Ordering::SeqCst);
            if !self.any.load(Ordering::Relaxed) {
                return;
            }
            let Some(mut guard) = try_lock() else { return };
            while let Some(item) = self.next() {
                work(&mut guard, item);
            }
        }
    }

    fn next(&self) -> Option<T> {
        let mut newest = lock(&self.newest);
        let Item { item, next } = *newest.take()?;
        *newest = next;
        if newest.is_none() {
            self.any.store(false, Ordering::Relaxed);
        }
        Some(item)
    }
}
