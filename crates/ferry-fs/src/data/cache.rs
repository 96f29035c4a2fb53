//! Memory for cached contents: one bound for all files, and the clock that decides what goes.
//!
//! A hit sets a flag on its folio and takes no shared lock. Folios and windows stand in the clock from the moment at which
//! they could go; dirty folios are not in it.

use crate::inode::Inode;
use parking_lot::Mutex;
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Something that eviction may take from a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Item {
    /// The folio with this number.
    Folio(u64),
    /// The window of the extent map with this number.
    Window(u64),
}

/// What eviction finds when it looks at an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is gone; nothing is left to remember.
    Gone,
    /// It was used since, or is busy: ask again later.
    Later,
}

/// What could be evicted, in the order in which it is looked at.
struct Clock {
    queue: VecDeque<(Weak<Inode>, Item)>,
    /// The length at which stale entries are looked for: twice what was left the last time.
    sweep_at: usize,
}

/// Memory of all files together.
pub struct Cache {
    limit: usize,
    used: AtomicUsize,
    dirty: AtomicUsize,
    clock: Mutex<Clock>,
    evicted: AtomicUsize,
}

impl Cache {
    /// An empty cache of at most `limit` bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicUsize::new(0),
            dirty: AtomicUsize::new(0),
            clock: Mutex::new(Clock { queue: VecDeque::new(), sweep_at: CLOCK_MIN }),
            evicted: AtomicUsize::new(0),
        })
    }

    /// Bytes of memory in use.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
    /// Dirty bytes.
    pub fn dirty(&self) -> usize {
        self.dirty.load(Ordering::Relaxed)
    }
    /// The bound in bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }
    /// Items evicted since the start.
    pub fn evicted(&self) -> usize {
        self.evicted.load(Ordering::Relaxed)
    }
    /// Entries of the clock.
    #[cfg(test)]
    pub fn entries(&self) -> usize {
        self.clock.lock().queue.len()
    }
    /// Counts memory.
    pub fn charge(&self, more: usize, less: usize) {
        change(&self.used, more, less);
    }
    /// Counts dirty bytes.
    pub fn charge_dirty(&self, more: usize, less: usize) {
        change(&self.dirty, more, less);
    }

    /// Puts `item` into the clock; the caller has noted in it that it is there.
    pub fn enter(&self, inode: &Arc<Inode>, item: Item) {
        let mut clock = self.clock.lock();
        clock.queue.push_back((Arc::downgrade(inode), item));
        // What went without eviction leaves entries behind; what came back then stands there twice.
        if clock.queue.len() > clock.sweep_at {
            let mut seen = HashSet::new();
            clock.queue.retain(|(inode, item)| {
                inode.upgrade().is_some_and(|i| i.file.may_evict(*item))
                    && seen.insert((inode.as_ptr(), *item))
            });
            clock.sweep_at = CLOCK_MIN.max(2 * clock.queue.len());
        }
    }

    /// Brings the cache below its bound, as far as what is clean allows.
    pub fn shrink(&self) {
        if self.used() <= self.limit {
            return;
        }
        let mut left = 2 * self.clock.lock().queue.len();
        while self.used() > self.limit && left > 0 {
            left -= 1;
            let Some((weak, item)) = self.clock.lock().queue.pop_front() else { return };
            let Some(inode) = weak.upgrade() else { continue };
            match inode.file.evict(item) {
                Verdict::Gone => {
                    self.evicted.fetch_add(1, Ordering::Relaxed);
                }
                Verdict::Later => self.clock.lock().queue.push_back((weak, item)),
            }
        }
    }
}

/// Entries among which nobody looks for stale ones.
const CLOCK_MIN: usize = 4096;

fn change(counter: &AtomicUsize, more: usize, less: usize) {
    if more > less {
        counter.fetch_add(more - less, Ordering::Relaxed);
    } else if less > more {
        counter.fetch_sub(less - more, Ordering::Relaxed);
    }
}
