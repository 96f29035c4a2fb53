//! What eviction knows of a cached item (a folio or a window): how recently and how often it was
//! used, and where it stands in the queues.
//!
//! Time is counted in *epochs*, which pass as items are used for the first time (`eviction.rs`). A
//! use counts if the last one that did is two epochs ago. So a program that reads a folio from
//! front to back, in however many reads, has used it once.
//!
//! Readers note uses without a lock. Two that do so at once may lose one use, which is harmless: a
//! node says what is worth keeping, never what may be removed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Uses are counted up to this number.
const USES_MAX: u32 = 3;
/// Bits of the number of uses.
const USES_BITS: u32 = 2;
/// Eviction has found it unused once, and nobody has used it since.
const PASSED: u32 = 1;

/// No slot of a queue.
pub const NO_SLOT: u32 = u32::MAX;

/// What eviction is to do with an item that it looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// It was used again, a while after the first time.
    UsedAgain,
    /// It was brought in for somebody who did not come yet.
    Awaited,
    /// It may go.
    Unused,
}

/// What eviction knows of an item.
pub struct Node {
    /// The epoch of the last use that counted, and the number of those behind the first one. Epoch
    /// 0: it was not used yet.
    uses: AtomicU32,
    /// It has been used again, and stands in the main queue whenever it stands in one.
    hot: AtomicBool,
    /// Its slot in the queues of its shard, under whose lock it changes.
    slot: AtomicU32,
    /// By which it is known when it has been evicted; 0: it has not been in a queue yet.
    key: AtomicU64,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            uses: AtomicU32::new(0),
            hot: AtomicBool::new(false),
            slot: AtomicU32::new(NO_SLOT),
            key: AtomicU64::new(0),
        }
    }
}

impl Node {
    /// Notes a use. Tells whether it is the first one.
    pub fn note_use(&self, epoch: u32) -> bool {
        let seen = self.uses.load(Ordering::Relaxed);
        let (last, uses) = (seen >> USES_BITS, seen & USES_MAX);
        if last == 0 {
            self.uses.store(epoch << USES_BITS, Ordering::Relaxed);
        } else if epoch.wrapping_sub(last) >= 2 {
            let uses = (uses + 1).min(USES_MAX);
            self.uses.store((epoch << USES_BITS) | uses, Ordering::Relaxed);
        }
        last == 0
    }

    /// Eviction looks at it in the small queue. Having been used again counts once.
    pub fn look_at_small(&self) -> Look {
        let seen = self.uses.load(Ordering::Relaxed);
        if seen == 0 {
            self.uses.store(PASSED, Ordering::Relaxed);
            return Look::Awaited;
        }
        if seen >> USES_BITS == 0 || seen & USES_MAX == 0 {
            return Look::Unused;
        }
        self.uses.store(seen & !USES_MAX, Ordering::Relaxed);
        Look::UsedAgain
    }

    /// The same in the main queue: each look takes one use back.
    pub fn look_at_main(&self) -> Look {
        let seen = self.uses.load(Ordering::Relaxed);
        if seen & USES_MAX == 0 {
            return Look::Unused;
        }
        self.uses.store(seen - 1, Ordering::Relaxed);
        Look::UsedAgain
    }

    /// Whether it belongs in the main queue.
    pub fn is_hot(&self) -> bool {
        self.hot.load(Ordering::Relaxed)
    }

    /// It belongs in the main queue from now on.
    pub fn set_hot(&self) {
        self.hot.store(true, Ordering::Relaxed);
    }

    /// Its slot in the queues.
    pub fn slot(&self) -> Option<u32> {
        let slot = self.slot.load(Ordering::Relaxed);
        (slot != NO_SLOT).then_some(slot)
    }

    /// Called under the lock of its shard.
    pub fn set_slot(&self, slot: u32) {
        self.slot.store(slot, Ordering::Relaxed);
    }

    /// By which it is known when it has been evicted.
    pub fn key(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }

    /// Called before it is put into a queue.
    pub fn set_key(&self, key: u64) {
        self.key.store(key, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_shortly_behind_each_other_count_once() {
        let node = Node::default();
        assert!(node.note_use(5));
        assert!(!node.note_use(5) && !node.note_use(6));
        assert_eq!(node.look_at_small(), Look::Unused);
        node.note_use(7);
        assert_eq!(node.look_at_small(), Look::UsedAgain);
        assert_eq!(node.look_at_main(), Look::Unused);
    }

    #[test]
    fn what_nobody_used_yet_is_passed_over_once() {
        let node = Node::default();
        assert_eq!((node.look_at_small(), node.look_at_small()), (Look::Awaited, Look::Unused));
        node.note_use(7);
        assert_eq!(node.look_at_small(), Look::Unused, "the first use is not one again");
    }

    #[test]
    fn each_look_in_the_main_queue_takes_a_use_back() {
        let node = Node::default();
        for epoch in 1..19 {
            node.note_use(epoch);
        }
        for _ in 0..USES_MAX {
            assert_eq!(node.look_at_main(), Look::UsedAgain);
        }
        assert_eq!(node.look_at_main(), Look::Unused);
    }
}
