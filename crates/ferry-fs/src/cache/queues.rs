//! The queues of one shard of the cache: which items are evicted, and in which order.
//!
//! The policy is S3-FIFO (J. Yang and others, "FIFO queues are all you need for cache eviction",
//! SOSP 2023). What is new enters a *small* queue, which has a tenth of the memory. If it was used
//! again when its turn comes, it moves to the *main* queue; otherwise it is evicted and remembered
//! for a while as a *ghost*. A ghost that is cached again enters the main queue at once. The main
//! queue goes round as long as its items are used. So what is read once, however much it is, passes
//! through the small queue and displaces nothing else.
//!
//! A use here is one that counts in [`Node`].

use crate::cache::node::{Look, NO_SLOT, Node};
use std::sync::{Arc, Weak};

/// The small queue has this part of the memory.
const SMALL_SHARE: usize = 10;
/// Evicted bytes are counted in this unit, so that the count wraps late.
const GHOST_UNIT: usize = 4096;
/// One ghost can be remembered for so many bytes of the cache, so the table takes 0.05 % of it.
const GHOST_BYTES: usize = 16 << 10;
/// A ghost has so many slots to be in.
const GHOST_WAYS: usize = 4;

/// Something that eviction may take from a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Item {
    /// The folio with this number.
    Folio(u64),
    /// The window of the extent map with this number.
    Window(u64),
}

/// An item that may be evicted, of a file.
pub(crate) struct Entry<F: ?Sized> {
    pub file: Weak<F>,
    pub item: Item,
    pub node: Arc<Node>,
}

impl<F: ?Sized> Clone for Entry<F> {
    fn clone(&self) -> Self {
        Self { file: Weak::clone(&self.file), item: self.item, node: Arc::clone(&self.node) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Small,
    Main,
}

/// One item in a queue.
struct Slot<F: ?Sized> {
    /// `None`: the slot is free.
    entry: Option<Entry<F>>,
    queue: Queue,
    bytes: usize,
    /// The neighbour that entered before it; of a free slot, the next free one.
    older: u32,
    /// The neighbour that entered after it.
    newer: u32,
}

struct List {
    oldest: u32,
    newest: u32,
    bytes: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { oldest: NO_SLOT, newest: NO_SLOT, bytes: 0 }
    }
}

/// What was evicted lately: a table of fingerprints, in which a new one overwrites the oldest of
/// [`GHOST_WAYS`].
struct Ghosts {
    /// Fingerprint, and when it was evicted.
    slots: Box<[[(u32, u32); GHOST_WAYS]]>,
    /// Bytes evicted since the start, in [`GHOST_UNIT`].
    now: u32,
    /// While so much is evicted behind it, a ghost is remembered.
    reach: u32,
}

impl Ghosts {
    fn ways(&mut self, key: u64) -> &mut [(u32, u32); GHOST_WAYS] {
        let at = (key >> 32) as usize % self.slots.len();
        &mut self.slots[at]
    }

    fn add(&mut self, key: u64, bytes: usize) {
        self.now = self.now.wrapping_add(bytes.div_ceil(GHOST_UNIT) as u32);
        let now = self.now;
        let oldest = self.ways(key).iter_mut().max_by_key(|(_, when)| now.wrapping_sub(*when));
        *oldest.expect("there are some") = (key as u32, now);
    }

    /// Takes a ghost out, if it is remembered.
    fn take(&mut self, key: u64) -> bool {
        let (now, reach) = (self.now, self.reach);
        let known = |(fingerprint, when): &&mut (u32, u32)| {
            *fingerprint == key as u32 && now.wrapping_sub(*when) <= reach
        };
        let ghost = self.ways(key).iter_mut().find(known);
        if let Some((_, when)) = ghost {
            *when = now.wrapping_sub(reach).wrapping_sub(1);
            return true;
        }
        false
    }
}

/// The queues of one shard.
pub(crate) struct Queues<F: ?Sized> {
    slots: Vec<Slot<F>>,
    /// The first free slot.
    free: u32,
    small: List,
    main: List,
    ghosts: Ghosts,
}

impl<F: ?Sized> Queues<F> {
    /// Those of a shard of at most `bytes`.
    pub fn new(bytes: usize) -> Self {
        let buckets = bytes / (GHOST_BYTES * GHOST_WAYS);
        Self {
            slots: Vec::new(),
            free: NO_SLOT,
            small: List::default(),
            main: List::default(),
            ghosts: Ghosts {
                slots: vec![[(0, 0); GHOST_WAYS]; buckets.max(1)].into(),
                now: u32::MAX / 2,
                reach: 0,
            },
        }
    }

    /// Adds an item of `bytes`. `false`: it is in a queue already.
    pub fn enter(&mut self, entry: Entry<F>, bytes: usize) -> bool {
        if entry.node.slot().is_none() && self.ghosts.take(entry.node.key()) {
            entry.node.set_hot();
        }
        self.again(entry, bytes)
    }

    /// Adds an item that was taken out for eviction and stays. `false`: it is in a queue already.
    pub fn again(&mut self, entry: Entry<F>, bytes: usize) -> bool {
        if entry.node.slot().is_some() {
            return false;
        }
        let queue = if entry.node.is_hot() { Queue::Main } else { Queue::Small };
        let node = Arc::clone(&entry.node);
        let new = Slot { entry: Some(entry), queue, bytes, older: NO_SLOT, newer: NO_SLOT };
        let at = if self.free == NO_SLOT {
            self.slots.push(new);
            self.slots.len() as u32 - 1
        } else {
            let at = self.free;
            self.free = self.slots[at as usize].older;
            self.slots[at as usize] = new;
            at
        };
        node.set_slot(at);
        self.link(at);
        true
    }

    /// Takes an item out.
    pub fn leave(&mut self, node: &Node) -> Option<Entry<F>> {
        Some(self.take_out(node.slot()?))
    }

    /// An item has another size now.
    pub fn resize(&mut self, node: &Node, bytes: usize) {
        if let Some(at) = node.slot() {
            let slot = &mut self.slots[at as usize];
            let (queue, before) = (slot.queue, std::mem::replace(&mut slot.bytes, bytes));
            let list = self.list(queue);
            list.bytes = list.bytes - before + bytes;
        }
    }

    /// Takes the next item out that is to be evicted, and its size. Looks at no more than `looks`.
    /// The shard may have `share` bytes now.
    pub fn next(&mut self, looks: &mut u32, share: usize) -> Option<(Entry<F>, usize)> {
        let small_max = share / SMALL_SHARE;
        self.ghosts.reach = ((share - small_max) / GHOST_UNIT) as u32;
        while *looks > 0 {
            let from_small = self.small.bytes > small_max || self.main.oldest == NO_SLOT;
            let at = if from_small { self.small.oldest } else { self.main.oldest };
            if at == NO_SLOT {
                return None;
            }
            *looks -= 1;
            let slot = &self.slots[at as usize];
            let (entry, bytes) = (slot.entry.as_ref().expect("a linked slot has one"), slot.bytes);
            let look =
                if from_small { entry.node.look_at_small() } else { entry.node.look_at_main() };
            if look == Look::Unused {
                if from_small {
                    self.ghosts.add(entry.node.key(), bytes);
                }
                return Some((self.take_out(at), bytes));
            }
            if look == Look::UsedAgain {
                entry.node.set_hot();
            }
            self.unlink(at);
            if look == Look::UsedAgain {
                self.slots[at as usize].queue = Queue::Main;
            }
            self.link(at);
        }
        None
    }

    fn list(&mut self, queue: Queue) -> &mut List {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// Makes a slot the newest of its queue.
    fn link(&mut self, at: u32) {
        let (queue, bytes) = (self.slots[at as usize].queue, self.slots[at as usize].bytes);
        let list = self.list(queue);
        list.bytes += bytes;
        let older = std::mem::replace(&mut list.newest, at);
        if older == NO_SLOT {
            list.oldest = at;
        } else {
            self.slots[older as usize].newer = at;
        }
        let slot = &mut self.slots[at as usize];
        (slot.older, slot.newer) = (older, NO_SLOT);
    }

    fn unlink(&mut self, at: u32) {
        let slot = &self.slots[at as usize];
        let (queue, bytes, older, newer) = (slot.queue, slot.bytes, slot.older, slot.newer);
        let list = self.list(queue);
        list.bytes -= bytes;
        if older == NO_SLOT {
            list.oldest = newer;
        }
        if newer == NO_SLOT {
            list.newest = older;
        }
        if older != NO_SLOT {
            self.slots[older as usize].newer = newer;
        }
        if newer != NO_SLOT {
            self.slots[newer as usize].older = older;
        }
    }

    /// Takes a slot's item out and makes the slot free.
    fn take_out(&mut self, at: u32) -> Entry<F> {
        self.unlink(at);
        let slot = &mut self.slots[at as usize];
        let entry = slot.entry.take().expect("a linked slot has one");
        slot.older = std::mem::replace(&mut self.free, at);
        entry.node.set_slot(NO_SLOT);
        entry
    }
}
