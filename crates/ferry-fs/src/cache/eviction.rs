//! Memory for cached contents: one bound for all files, and what is evicted to keep it.
//!
//! Folios and windows stand in the queues of a shard (`queues.rs`) from when they can be evicted
//! until they are gone; dirty folios are in none. A hit notes a use in the item's node and takes no
//! shared lock.
//!
//! A thread that has brought something in calls [`Cache::shrink`], which evicts about as much: it
//! looks at a bounded number of items and waits for nobody. An item that it takes out of its queue
//! is *claimed*. If its file's page lock is held, the holder removes the item (`deferred.rs`).
//! Claimed bytes count as free already, so that others do not evict for the same need.

use crate::cache::frame_table::TableBudget;
use crate::cache::memory::FrameMemory;
use crate::cache::node::Node;
use crate::cache::queues::{self, Item};
use ferry_journal::JournalError;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// An item that may be evicted, and the queues of one shard.
type Entry = queues::Entry<dyn CachedFile>;
type Queues = queues::Queues<dyn CachedFile>;

/// A file as the cache sees it: the inode in memory whose contents are cached.
pub(crate) trait CachedFile: Send + Sync + 'static {
    /// Its number, by which its items are known when they have been evicted.
    fn number(&self) -> u64;
    /// Removes what was claimed if it is still there, clean and idle. Waits for nobody.
    fn evict(&self, claimed: Claimed);
    /// The device could not write data of the file.
    fn write_failed(&self, error: &JournalError);
}

/// An item that was taken out of its queue for eviction.
pub(crate) struct Claimed {
    pub entry: Entry,
    bytes: usize,
    cache: Arc<Cache>,
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.cache.claimed.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A shard has no less memory than this.
const SHARD_BYTES_MIN: usize = 16 << 20;
/// Shards, at most: so many threads bring something in or evict at the same time.
const SHARDS_MAX: usize = 16;
/// Items that one request looks at, at most.
const LOOKS_MAX: u32 = 64;
/// The same in [`Cache::shrink_much`].
const LOOKS_MUCH: u32 = 4096;
/// An epoch lasts until one item for so many that can be evicted has been used for the first time:
/// about a quarter of the small queue.
const EPOCH_SHARE: usize = 40;
/// But no fewer items than this.
const EPOCH_MIN: usize = 16;

/// Memory of all files together.
pub(crate) struct Cache {
    limit: AtomicUsize,
    /// Where frames outlive the process.
    pub memory: Option<Arc<FrameMemory>>,
    used: AtomicUsize,
    /// Bytes of what is claimed and not gone yet.
    claimed: AtomicUsize,
    dirty: AtomicUsize,
    evicted: AtomicUsize,
    shards: Box<[Mutex<Queues>]>,
    /// Memory for the tables by which readers find frames; counted in `used`, too.
    pub tables: TableBudget,
    /// The shard that is the next to give something up.
    turn: AtomicUsize,
    /// Items in the queues.
    items: AtomicUsize,
    /// Items used for the first time since the start, and the number at which the epoch ends.
    first_uses: AtomicUsize,
    epoch_end: AtomicUsize,
    epoch: AtomicU32,
}

impl Cache {
    /// An empty cache of at most `limit` bytes.
    #[cfg(test)]
    pub fn new(limit: usize) -> Arc<Self> {
        Self::held_in(None, limit)
    }

    /// An empty cache of at most `limit` bytes, with frames in this memory.
    pub fn held_in(memory: Option<Arc<FrameMemory>>, limit: usize) -> Arc<Self> {
        let shards = (limit / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX);
        Arc::new(Self {
            limit: AtomicUsize::new(limit),
            memory,
            used: AtomicUsize::new(0),
            claimed: AtomicUsize::new(0),
            dirty: AtomicUsize::new(0),
            evicted: AtomicUsize::new(0),
            shards: (0..shards).map(|_| Mutex::new(Queues::new(limit / shards))).collect(),
            tables: TableBudget::new(limit),
            turn: AtomicUsize::new(0),
            items: AtomicUsize::new(0),
            first_uses: AtomicUsize::new(0),
            epoch_end: AtomicUsize::new(EPOCH_MIN),
            epoch: AtomicU32::new(1),
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
        self.limit.load(Ordering::Relaxed)
    }
    /// The bound from now on: no more than at first.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }
    /// Items evicted since the start.
    pub fn evicted(&self) -> usize {
        self.evicted.load(Ordering::Relaxed)
    }
    /// Notes a use of an item.
    pub fn note_use(&self, node: &Node) {
        if node.note_use(self.epoch.load(Ordering::Relaxed)) {
            let uses = self.first_uses.fetch_add(1, Ordering::Relaxed);
            if uses >= self.epoch_end.load(Ordering::Relaxed) {
                let items = self.items.load(Ordering::Relaxed) / EPOCH_SHARE;
                self.epoch_end.store(uses + items.max(EPOCH_MIN), Ordering::Relaxed);
                self.epoch.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    /// Items in the queues.
    #[cfg(test)]
    pub fn entries(&self) -> usize {
        self.items.load(Ordering::Relaxed)
    }
    /// Counts memory.
    pub fn charge(&self, more: usize, less: usize) {
        change(&self.used, more, less);
    }
    /// Counts dirty bytes.
    pub fn charge_dirty(&self, more: usize, less: usize) {
        change(&self.dirty, more, less);
    }
    /// An item was evicted.
    pub fn count_evicted(&self) {
        self.evicted.fetch_add(1, Ordering::Relaxed);
    }

    /// `item`, whose node this is, has `bytes` and can be evicted from now on. The caller holds the
    /// file's page lock, as for all changes of where a node stands.
    pub fn enter(&self, file: &Arc<impl CachedFile>, item: Item, node: &Arc<Node>, bytes: usize) {
        if node.slot().is_some() {
            return;
        }
        if node.key() == 0 {
            node.set_key(key(file.number(), item));
        }
        let file = Arc::downgrade(file);
        let entry = Entry { file, item, node: Arc::clone(node) };
        self.add(node, |queues| queues.enter(entry, bytes));
    }

    /// What was claimed stays.
    pub fn again(&self, claimed: &Claimed, bytes: usize) {
        let entry = claimed.entry.clone();
        self.add(&claimed.entry.node, |queues| queues.again(entry, bytes));
    }

    /// Counts before it adds: an item that is in a queue may be taken out at once.
    fn add(&self, node: &Node, add: impl FnOnce(&mut Queues) -> bool) {
        self.items.fetch_add(1, Ordering::Relaxed);
        if !add(&mut self.shard(node).lock()) {
            self.items.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// An item is gone, or cannot be evicted for now.
    pub fn leave(&self, node: &Node) {
        if node.slot().is_some() {
            let left = self.shard(node).lock().leave(node);
            self.items.fetch_sub(usize::from(left.is_some()), Ordering::Relaxed);
        }
    }

    /// An item has another size now.
    pub fn resize(&self, node: &Node, bytes: usize) {
        if node.slot().is_some() {
            self.shard(node).lock().resize(node, bytes);
        }
    }

    /// Evicts until the cache is below its bound, or it has looked at enough for one request.
    pub fn shrink(self: &Arc<Self>) {
        self.shrink_with(LOOKS_MAX);
    }

    /// The same, where more may have to go than one request brings in: behind a batch of
    /// write-back, which may have loaded a window for each of its blocks, and when the bound has
    /// changed.
    pub fn shrink_much(self: &Arc<Self>) {
        self.shrink_with(LOOKS_MUCH);
    }

    fn shrink_with(self: &Arc<Self>, mut looks: u32) {
        while looks > 0 && self.is_over() {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.shards.len();
            let share = self.limit() / self.shards.len();
            let next = self.shards[turn].lock().next(&mut looks, share);
            let Some((entry, bytes)) = next else {
                looks = looks.saturating_sub(1);
                continue;
            };
            self.items.fetch_sub(1, Ordering::Relaxed);
            self.claimed.fetch_add(bytes, Ordering::Relaxed);
            let claimed = Claimed { entry, bytes, cache: Arc::clone(self) };
            if let Some(file) = claimed.entry.file.upgrade() {
                file.evict(claimed);
            }
        }
    }

    fn is_over(&self) -> bool {
        self.used().saturating_sub(self.claimed.load(Ordering::Relaxed)) > self.limit()
    }

    fn shard(&self, node: &Node) -> &Mutex<Queues> {
        &self.shards[(node.key() >> 24) as usize % self.shards.len()]
    }
}

/// A number for an item, in which all bits depend on all (the finalizer of *splitmix64*); not 0.
fn key(file: u64, item: Item) -> u64 {
    let (kind, index) = match item {
        Item::Folio(index) => (1, index),
        Item::Window(index) => (2, index),
    };
    let mut key = file.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (index << 2 | kind);
    key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (key ^ (key >> 31)) | 1
}

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
    use std::collections::BTreeMap;

    const KIB: usize = 1 << 10;

    /// A file whose items are nodes and nothing else.
    #[derive(Default)]
    struct File {
        nodes: Mutex<BTreeMap<u64, Arc<Node>>>,
        /// Its items cannot be evicted, as if all were on their way to the device.
        busy: std::sync::atomic::AtomicBool,
        asked: AtomicUsize,
    }

    impl CachedFile for File {
        fn number(&self) -> u64 {
            7
        }
        fn evict(&self, claimed: Claimed) {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let Item::Folio(index) = claimed.entry.item else { panic!("there are no windows") };
            if self.busy.load(Ordering::Relaxed) {
                return claimed.cache.again(&claimed, 64 * KIB);
            }
            assert!(self.nodes.lock().remove(&index).is_some());
            claimed.cache.charge(0, 64 * KIB);
            claimed.cache.count_evicted();
        }
        fn write_failed(&self, _error: &JournalError) {}
    }

    /// Uses folio `index` of 64 KiB; tells whether it had to be brought in.
    fn touch(cache: &Arc<Cache>, file: &Arc<File>, index: u64) -> bool {
        let known = file.nodes.lock().get(&index).cloned();
        let node = known.clone().unwrap_or_default();
        cache.note_use(&node);
        if known.is_none() {
            file.nodes.lock().insert(index, Arc::clone(&node));
            cache.charge(64 * KIB, 0);
            cache.enter(file, Item::Folio(index), &node, 64 * KIB);
            cache.shrink();
        }
        known.is_none()
    }

    fn touch_all(cache: &Arc<Cache>, file: &Arc<File>, indices: std::ops::Range<u64>) {
        for index in indices {
            touch(cache, file, index);
        }
    }

    #[test]
    fn a_hot_set_survives_a_scan() {
        let (cache, file) = (Cache::new(64 << 20), Arc::new(File::default()));
        let hot = 0..512;
        for _ in 0..3 {
            touch_all(&cache, &file, hot.clone());
            // Something else goes on in between.
            touch_all(&cache, &file, 5000..5100);
        }
        // Four times the cache, each folio read in 16 parts.
        for index in 10_000..14_096 {
            (0..16).for_each(|_| touch_all(&cache, &file, index..index + 1));
        }
        let missed = hot.filter(|index| touch(&cache, &file, *index)).count();
        assert!(missed <= 26, "{missed} of 512 hot folios were evicted by a scan");
        assert!(cache.used() <= 64 << 20);
    }

    #[test]
    fn what_comes_back_soon_after_its_eviction_is_hot() {
        let (cache, file) = (Cache::new(64 << 20), Arc::new(File::default()));
        touch_all(&cache, &file, 0..900);
        touch_all(&cache, &file, 1000..1900);
        assert!((0..100).all(|index| touch(&cache, &file, index)), "evicted once");
        touch_all(&cache, &file, 2000..5000);
        let missed = (0..100).filter(|index| touch(&cache, &file, *index)).count();
        assert!(missed <= 5, "{missed} of 100");
    }

    #[test]
    fn a_call_looks_at_a_bounded_number_of_items_and_gives_up_when_all_are_busy() {
        let (cache, file) = (Cache::new(1 << 20), Arc::new(File::default()));
        file.busy.store(true, Ordering::Relaxed);
        for index in 0..5000 {
            let before = file.asked.load(Ordering::Relaxed);
            touch(&cache, &file, index);
            assert!(file.asked.load(Ordering::Relaxed) - before <= LOOKS_MAX as usize);
        }
        assert_eq!((cache.entries(), cache.evicted()), (5000, 0));
        file.busy.store(false, Ordering::Relaxed);
        (0..200).for_each(|_| cache.shrink());
        assert!(cache.used() <= 1 << 20);
        assert_eq!(cache.claimed.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_left_is_not_looked_at() {
        let (cache, file) = (Cache::new(64 << 20), Arc::new(File::default()));
        touch_all(&cache, &file, 0..1000);
        for (_, node) in std::mem::take(&mut *file.nodes.lock()) {
            cache.leave(&node);
        }
        assert_eq!(cache.entries(), 0);
        cache.charge(1 << 20, 0);
        cache.shrink();
        assert_eq!(file.asked.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn claimed_bytes_are_not_claimed_again_for_the_same_need() {
        /// Keeps what is to be evicted, as one does whose page lock is held.
        #[derive(Default)]
        struct Locked(Mutex<Vec<Claimed>>);
        impl CachedFile for Locked {
            fn number(&self) -> u64 {
                7
            }
            fn evict(&self, claimed: Claimed) {
                self.0.lock().push(claimed);
            }
            fn write_failed(&self, _error: &JournalError) {}
        }
        let (cache, file) = (Cache::new(1 << 20), Arc::new(Locked::default()));
        for index in 0..20 {
            let node = Arc::default();
            cache.charge(64 * KIB, 0);
            cache.enter(&file, Item::Folio(index), &node, 64 * KIB);
        }
        (0..9).for_each(|_| cache.shrink());
        assert_eq!(file.0.lock().len(), 4);
    }
}
