//! A mirror's regions: which may differ between the sides, which writers are in each, and keeping
//! writers out for a moment.
//!
//! One word for each region, so that writers of different regions never meet. A writer enters every
//! region that it writes to and leaves when all sides have completed it. It may enter where the
//! region is durably marked dirty and nobody keeps it out; otherwise the mirror's worker lets it
//! in.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The region's bit in the write-intent map is set, durably, on every side.
const DIRTY: u32 = 1 << 31;
/// Writers are kept out.
const FROZEN: u32 = 1 << 30;
/// The rest counts the writers inside.
const WRITERS: u32 = FROZEN - 1;

/// Most regions: their bits fit one block with its fields.
pub const REGIONS_MAX: u64 = 16_384;
const REGION_LEN_MIN: u64 = 4 << 20;
/// Larger regions save flushes when much is written to new places, smaller ones time after a crash.
const REGION_LEN_GOOD: u64 = 64 << 20;

/// What length of region suits a mirror of so many bytes.
pub fn region_len(capacity: u64) -> u64 {
    let good = (capacity / 256).next_power_of_two().clamp(REGION_LEN_MIN, REGION_LEN_GOOD);
    good.max(capacity.div_ceil(REGIONS_MAX).next_power_of_two())
}

struct Region {
    word: AtomicU32,
    /// The mirror's count of writes when the last one to this region ended; `u64::MAX` when one
    /// failed, which leaves the sides different until they are compared.
    last: AtomicU64,
}

/// All regions of a mirror.
pub struct Regions {
    len: u64,
    all: Vec<Region>,
}

impl Regions {
    /// The regions of a mirror, none of them dirty.
    pub fn new(capacity: u64, len: u64) -> Self {
        let region = || Region { word: AtomicU32::new(0), last: AtomicU64::new(0) };
        Self { len, all: (0..capacity.div_ceil(len)).map(|_| region()).collect() }
    }

    /// Bytes of a region.
    pub fn region_len(&self) -> u64 {
        self.len
    }

    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Those that hold any of `len` bytes at `offset`.
    pub fn range(&self, offset: u64, len: u64) -> Range<usize> {
        (offset / self.len) as usize..(offset + len).div_ceil(self.len) as usize
    }

    /// A writer enters all of them, or none; `Err(true)`: none, and the worker must be woken.
    pub fn enter(&self, range: Range<usize>) -> Result<(), bool> {
        for i in range.clone() {
            // SeqCst: a writer that enters after a freeze ended sees which sides are written since.
            let before = self.all[i].word.fetch_add(1, Ordering::SeqCst);
            if before & (DIRTY | FROZEN) != DIRTY {
                let wakes =
                    (range.start..=i).fold(false, |wakes, entered| self.go(entered) | wakes);
                return Err(wakes);
            }
        }
        Ok(())
    }

    /// A write ended well on every side, as the mirror's `count`th. `true`: the worker waits for
    /// that.
    pub fn leave(&self, range: Range<usize>, count: u64) -> bool {
        range.fold(false, |wakes, i| {
            self.all[i].last.fetch_max(count, Ordering::SeqCst);
            self.go(i) | wakes
        })
    }

    fn go(&self, i: usize) -> bool {
        let before = self.all[i].word.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before & WRITERS > 0, "a writer enters before it leaves");
        before & FROZEN != 0 && before & WRITERS == 1
    }

    /// Keeps writers out from now on.
    pub fn freeze(&self, range: Range<usize>) {
        for i in range {
            self.all[i].word.fetch_or(FROZEN, Ordering::SeqCst);
        }
    }

    pub fn unfreeze(&self, range: Range<usize>) {
        for i in range {
            self.all[i].word.fetch_and(!FROZEN, Ordering::SeqCst);
        }
    }

    /// Whether no writer is inside any of them.
    pub fn is_idle(&self, mut range: Range<usize>) -> bool {
        range.all(|i| self.all[i].word.load(Ordering::SeqCst) & WRITERS == 0)
    }

    pub fn is_dirty(&self, i: usize) -> bool {
        self.all[i].word.load(Ordering::SeqCst) & DIRTY != 0
    }

    /// The map on every side says so.
    pub fn set_dirty(&self, i: usize) {
        self.all[i].word.fetch_or(DIRTY, Ordering::SeqCst);
    }

    pub fn last_write(&self, i: usize) -> u64 {
        self.all[i].last.load(Ordering::SeqCst)
    }

    /// Makes it clean if nobody writes there and all that was written is among the first `flushed`
    /// writes.
    pub fn clear_if_settled(&self, i: usize, flushed: u64) -> bool {
        let region = &self.all[i];
        let keep = region.word.load(Ordering::SeqCst) & FROZEN;
        let cleared = region
            .word
            .compare_exchange(DIRTY | keep, keep, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        // Somebody may have written since. Nobody can have entered since it became clean, so this
        // look is the last word.
        if cleared && self.last_write(i) > flushed {
            self.set_dirty(i);
            return false;
        }
        cleared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_one_block_for_any_size() {
        for capacity in [16 << 20, 64 << 30, 1 << 40, 1 << 50, (1 << 62) - 4096] {
            let len = region_len(capacity);
            assert!(
                len.is_power_of_two() && capacity.div_ceil(len) <= REGIONS_MAX,
                "{capacity}: {len}"
            );
        }
        assert_eq!(region_len(64 << 30), 64 << 20);
        assert_eq!(region_len(256 << 20), 4 << 20);
    }

    #[test]
    fn writers_enter_all_or_none() {
        let regions = Regions::new(32 << 20, 4 << 20);
        (0..3).for_each(|i| regions.set_dirty(i));
        let range = regions.range((4 << 20) - 4096, 8192);
        assert_eq!(range, 0..2);
        assert_eq!(regions.enter(range.clone()), Ok(()));
        assert_eq!(regions.enter(2..4), Err(false), "region 3 is clean");
        regions.freeze(1..2);
        assert_eq!(regions.enter(0..2), Err(false), "somebody else is still inside");
        assert!(!regions.is_idle(0..2));
        assert!(regions.leave(range, 1), "the last one out of a frozen region wakes");
        assert!(regions.is_idle(0..8));
        regions.unfreeze(1..2);
        assert_eq!(regions.enter(0..2), Ok(()));
    }

    #[test]
    fn a_region_becomes_clean_when_all_in_it_is_flushed() {
        let regions = Regions::new(8 << 20, 4 << 20);
        regions.set_dirty(0);
        regions.enter(0..1).expect("dirty");
        assert!(!regions.clear_if_settled(0, 9), "somebody writes");
        regions.leave(0..1, 5);
        assert!(!regions.clear_if_settled(0, 4), "not flushed");
        assert!(regions.is_dirty(0));
        assert!(regions.clear_if_settled(0, 5));
        assert!(!regions.is_dirty(0));
        assert!(!regions.clear_if_settled(0, 5), "it is clean");
        regions.set_dirty(1);
        regions.enter(1..2).expect("dirty");
        regions.leave(1..2, u64::MAX);
        assert!(!regions.clear_if_settled(1, 1 << 60), "a failed write keeps it dirty");
    }
}
