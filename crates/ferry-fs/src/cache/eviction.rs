//! Memory for cached contents: one bound for all files, and the clock that decides what goes.
//!
//! A hit sets a flag on its folio and takes no shared lock. Folios and windows stand in the clock
//! from the moment at which they could go; dirty folios are not in it.

use ferry_journal::JournalError;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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

/// A file as the cache sees it: the inode in memory whose contents are cached.
pub trait CachedFile: Send + Sync + 'static {
    /// The file has `item`, and `item` has this position in the clock (or a thread uses it just
    /// now). Waits for nobody.
    fn may_evict(&self, item: Item, position: u64) -> bool;
    /// Removes `item` if it is clean and was not used since the clock looked at it last. Waits for
    /// nobody.
    fn evict(&self, item: Item, position: u64) -> Verdict;
    /// The device could not write data of the file.
    fn write_failed(&self, error: &JournalError);
}

/// An item in the clock and its position there. An item that was evicted and is cached again has a
/// new position.
type Entry = (Weak<dyn CachedFile>, Item, u64);

/// What could be evicted, in the order in which it is looked at.
struct Clock {
    /// The oldest entries, where stale ones are being looked for: those that are not. They come
    /// before `queue`.
    swept: VecDeque<Entry>,
    queue: VecDeque<Entry>,
    /// The length at which stale entries are looked for: twice what was left the last time.
    sweep_at: usize,
    /// The newest place.
    last: u64,
}

impl Clock {
    fn len(&self) -> usize {
        self.swept.len() + self.queue.len()
    }

    fn pop(&mut self) -> Option<Entry> {
        self.swept.pop_front().or_else(|| self.queue.pop_front())
    }

    /// Goes on looking for entries that what went without eviction has left behind; `false`: it has
    /// come to its end.
    fn sweep(&mut self, most: usize) -> bool {
        for _ in 0..most {
            let Some(entry) = self.queue.pop_front() else {
                std::mem::swap(&mut self.queue, &mut self.swept);
                self.sweep_at = CLOCK_MIN.max(2 * self.queue.len());
                return false;
            };
            let (inode, item, place) = &entry;
            if inode.upgrade().is_some_and(|inode| inode.may_evict(*item, *place)) {
                self.swept.push_back(entry);
            }
        }
        true
    }
}

/// Memory of all files together.
pub struct Cache {
    limit: usize,
    used: AtomicUsize,
    dirty: AtomicUsize,
    clock: Mutex<Clock>,
    /// Stale entries are being looked for.
    sweeping: AtomicBool,
    evicted: AtomicUsize,
}

impl Cache {
    /// An empty cache of at most `limit` bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicUsize::new(0),
            dirty: AtomicUsize::new(0),
            clock: Mutex::new(Clock {
                swept: VecDeque::new(),
                queue: VecDeque::new(),
                sweep_at: CLOCK_MIN,
                last: 0,
            }),
            sweeping: AtomicBool::new(false),
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
        self.clock.lock().len()
    }
    /// Counts memory.
    pub fn charge(&self, more: usize, less: usize) {
        change(&self.used, more, less);
    }
    /// Counts dirty bytes.
    pub fn charge_dirty(&self, more: usize, less: usize) {
        change(&self.dirty, more, less);
    }

    /// Puts `item` into the clock; its place there, which the caller notes in it.
    pub fn enter(&self, file: &Arc<impl CachedFile>, item: Item) -> u64 {
        let mut clock = self.clock.lock();
        clock.last += 1;
        let place = clock.last;
        let file: Weak<dyn CachedFile> = Arc::downgrade(file) as _;
        clock.queue.push_back((file, item, place));
        if clock.len() > clock.sweep_at {
            self.sweeping.store(true, Ordering::Relaxed);
        }
        place
    }

    /// Looks for stale entries, if there may be many. Called without any lock of a file.
    fn sweep(&self, most: usize) {
        if self.sweeping.load(Ordering::Relaxed) && !self.clock.lock().sweep(most) {
            self.sweeping.store(false, Ordering::Relaxed);
        }
    }

    /// The same, to the end, by a thread that has the time.
    pub fn tidy(&self) {
        while self.sweeping.load(Ordering::Relaxed) {
            self.sweep(SWEEP_LONG);
        }
    }

    /// Brings the cache below its bound, as far as what is clean allows.
    pub fn shrink(&self) {
        self.sweep(SWEEP_STEP);
        if self.used() <= self.limit {
            return;
        }
        let mut left = 2 * self.clock.lock().len();
        while self.used() > self.limit && left > 0 {
            left -= 1;
            let Some((weak, item, place)) = self.clock.lock().pop() else { return };
            let Some(inode) = weak.upgrade() else { continue };
            match inode.evict(item, place) {
                Verdict::Gone => {
                    self.evicted.fetch_add(1, Ordering::Relaxed);
                }
                Verdict::Later => self.clock.lock().queue.push_back((weak, item, place)),
            }
        }
    }
}

/// Entries among which nobody looks for stale ones.
const CLOCK_MIN: usize = 4096;
/// Entries looked at in passing: there may be a million, and everybody waits meanwhile.
const SWEEP_STEP: usize = 16;
/// The same, where the thread has nothing else to do.
const SWEEP_LONG: usize = 512;

fn change(counter: &AtomicUsize, more: usize, less: usize) {
    if more > less {
        counter.fetch_add(more - less, Ordering::Relaxed);
    } else if less > more {
        counter.fetch_sub(less - more, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct File;

    impl CachedFile for File {
        fn may_evict(&self, _item: Item, _position: u64) -> bool {
            false
        }
        fn evict(&self, _item: Item, _position: u64) -> Verdict {
            Verdict::Gone
        }
        fn write_failed(&self, _error: &JournalError) {}
    }

    /// However many entries lead nowhere, nobody waits while all of them are looked at.
    #[test]
    fn what_leads_nowhere_goes_a_few_at_a_time() {
        let cache = Cache::new(1 << 20);
        let inode = Arc::new(File);
        let mut most = 0;
        for index in 0..5 * CLOCK_MIN as u64 {
            cache.enter(&inode, Item::Folio(index));
            let before = cache.entries();
            most = most.max(before);
            cache.shrink();
            assert!(before - cache.entries() <= SWEEP_STEP);
        }
        assert!(most <= CLOCK_MIN + 2, "{most} entries");
        for index in 0..2 * CLOCK_MIN as u64 {
            cache.enter(&inode, Item::Folio(index));
        }
        cache.tidy();
        assert_eq!(cache.entries(), 0);
    }
}
