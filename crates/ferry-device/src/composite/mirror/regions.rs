//! A mirror's regions: which may differ between the sides, which writers are in each, and keeping
//! writers out for a moment.
//!
//! One word for each region, so that writers of different regions never meet. A writer enters every
//! region that it writes to and leaves when all sides have completed it. It may enter where the
//! region is durably marked dirty and nobody keeps it out; otherwise the mirror's worker lets it
//! in.
//!
//! A mirror that becomes longer may get longer regions ([`Regions::reshape`]). A writer that found
//! its regions by the old length must not be inside then, for it would have entered others. So the
//! worker keeps writers out of all regions, waits for those inside, sets the length, and only then
//! lets writers in; and a writer looks at the length once more when it has entered. If it entered
//! before it was kept out, the worker waits for it. If it entered afterwards, it sees the new
//! length, goes out again, and asks the worker. While it is inside, the length stays.

use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use ferry_env::planted::{Bug, is_planted};
use std::ops::Range;

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
    /// Bytes of each. It never becomes less.
    len: AtomicU64,
    count: AtomicUsize,
    /// With room for as many as there may be: the rest is clean.
    all: Vec<Region>,
}

impl Regions {
    /// The regions of a mirror, none of them dirty.
    pub fn new(capacity: u64, len: u64) -> Self {
        Self::with_room(capacity, len, REGIONS_MAX as usize)
    }

    fn with_room(capacity: u64, len: u64, room: usize) -> Self {
        let region = || Region { word: AtomicU32::new(0), last: AtomicU64::new(0) };
        let count = capacity.div_ceil(len) as usize;
        Self {
            len: AtomicU64::new(len),
            count: AtomicUsize::new(count),
            all: (0..room.max(count)).map(|_| region()).collect(),
        }
    }

    /// Bytes of a region.
    pub fn region_len(&self) -> u64 {
        self.len.load(Ordering::SeqCst)
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// All that there are or may be.
    pub fn all(&self) -> Range<usize> {
        0..self.all.len()
    }

    /// Those that hold any of `bytes` at `offset`: for a writer inside, and for the worker.
    pub fn range(&self, offset: u64, bytes: u64) -> Range<usize> {
        range(self.region_len(), offset, bytes)
    }

    /// A writer enters all regions of `bytes` at `offset`, or none; `Err(true)`: none, and the
    /// worker must be woken.
    pub fn enter(&self, offset: u64, bytes: u64) -> Result<Range<usize>, bool> {
        let len = self.region_len();
        let range = range(len, offset, bytes);
        for i in range.clone() {
            // SeqCst: a writer that enters after a freeze ended sees which sides are written since,
            // and which length the regions have.
            let before = self.all[i].word.fetch_add(1, Ordering::SeqCst);
            if before & (DIRTY | FROZEN) != DIRTY {
                return Err(self.go_all(range.start..i + 1));
            }
        }
        if self.region_len() != len && !is_planted(Bug::OldRegions) {
            return Err(self.go_all(range));
        }
        Ok(range)
    }

    fn go_all(&self, range: Range<usize>) -> bool {
        range.fold(false, |wakes, i| self.go(i) | wakes)
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

    /// Of the present regions those that hold what region `i` will hold when regions are `len`
    /// bytes long: a multiple of what they are now.
    fn parts(&self, i: usize, len: u64) -> Range<usize> {
        let (each, count) = ((len / self.region_len()) as usize, self.count());
        (i * each).min(count)..((i + 1) * each).min(count)
    }

    /// Which regions are dirty when they have another length, or are more or fewer.
    pub fn reshaped(&self, capacity: u64, len: u64) -> Vec<bool> {
        let is_dirty = |i| self.parts(i, len).any(|part| self.is_dirty(part));
        (0..capacity.div_ceil(len) as usize).map(is_dirty).collect()
    }

    /// The regions of a mirror of `capacity` bytes are `len` bytes long from now on. All are
    /// frozen, nobody is inside, and the map on every side says [`Regions::reshaped`].
    pub fn reshape(&self, capacity: u64, len: u64) {
        let count = capacity.div_ceil(len) as usize;
        debug_assert!(count <= self.all.len(), "the length was chosen so that there is room");
        // In place: the parts of those that follow lie behind.
        for (i, region) in self.all.iter().enumerate() {
            let parts = if i < count { self.parts(i, len) } else { 0..0 };
            let last = parts.clone().map(|part| self.last_write(part)).max().unwrap_or_default();
            // A writer that looks in and goes out again counts meanwhile.
            match parts.clone().any(|part| self.is_dirty(part)) {
                true => region.word.fetch_or(DIRTY, Ordering::SeqCst),
                false => region.word.fetch_and(!DIRTY, Ordering::SeqCst),
            };
            region.last.store(last, Ordering::SeqCst);
        }
        self.count.store(count, Ordering::SeqCst);
        self.len.store(len, Ordering::SeqCst);
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

/// The regions of this length that hold any of `bytes` at `offset`.
fn range(len: u64, offset: u64, bytes: u64) -> Range<usize> {
    (offset / len) as usize..(offset + bytes).div_ceil(len) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferry_env::planted::plant_here;
    use shuttle::thread;
    use std::sync::Arc;

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

    /// A run of one thread. The atomics are those of the model checker.
    fn alone(test: impl Fn() + Send + Sync + 'static) {
        shuttle::check_random(test, 1);
    }

    #[test]
    fn writers_enter_all_or_none() {
        alone(|| {
            let regions = Regions::new(32 << 20, REGION);
            (0..3).for_each(|i| regions.set_dirty(i));
            let (offset, len) = (REGION - 4096, 8192);
            assert_eq!(regions.enter(offset, len), Ok(0..2));
            assert_eq!(regions.enter(2 * REGION, 2 * REGION), Err(false), "region 3 is clean");
            regions.freeze(1..2);
            assert_eq!(regions.enter(offset, len), Err(false), "somebody else is still inside");
            assert!(!regions.is_idle(0..2));
            assert!(regions.leave(0..2, 1), "the last one out of a frozen region wakes");
            assert!(regions.is_idle(0..8));
            regions.unfreeze(1..2);
            assert_eq!(regions.enter(offset, len), Ok(0..2));
        });
    }

    #[test]
    fn a_region_becomes_clean_when_all_in_it_is_flushed() {
        alone(|| {
            let regions = Regions::new(2 * REGION, REGION);
            regions.set_dirty(0);
            regions.enter(0, 1).expect("dirty");
            assert!(!regions.clear_if_settled(0, 9), "somebody writes");
            regions.leave(0..1, 5);
            assert!(!regions.clear_if_settled(0, 4), "not flushed");
            assert!(regions.is_dirty(0));
            assert!(regions.clear_if_settled(0, 5));
            assert!(!regions.is_dirty(0));
            assert!(!regions.clear_if_settled(0, 5), "it is clean");
            regions.set_dirty(1);
            regions.enter(REGION, 1).expect("dirty");
            regions.leave(1..2, u64::MAX);
            assert!(!regions.clear_if_settled(1, 1 << 60), "a failed write keeps it dirty");
        });
    }

    #[test]
    fn regions_of_another_length_are_as_dirty_as_their_parts() {
        alone(|| {
            let regions = Regions::new(7 * REGION, REGION);
            for (i, last) in [(0, 3), (3, 9), (6, u64::MAX)] {
                regions.set_dirty(i);
                regions.enter(i as u64 * REGION, 1).expect("dirty");
                regions.leave(i..i + 1, last);
            }
            let state = |regions: &Regions| -> Vec<(bool, u64)> {
                (0..regions.count()).map(|i| (regions.is_dirty(i), regions.last_write(i))).collect()
            };
            let clean = (false, 0);
            let check = |capacity, len, wanted: &[(bool, u64)]| {
                let before = regions.reshaped(capacity, len);
                regions.reshape(capacity, len);
                assert_eq!(state(&regions), wanted);
                assert!(before.iter().eq(wanted.iter().map(|(dirty, _)| dirty)));
                assert_eq!(regions.region_len(), len);
            };
            let failed = (true, u64::MAX);
            // Longer.
            let longer = [(true, 3), clean, clean, (true, 9), clean, clean, failed, clean, clean];
            check(9 * REGION, REGION, &longer);
            // Shorter, and then longer again: what is cut off comes back clean.
            check(4 * REGION, REGION, &longer[..4]);
            check(5 * REGION, REGION, &[(true, 3), clean, clean, (true, 9), clean]);
            check(9 * REGION, 2 * REGION, &[(true, 3), (true, 9), clean, clean, clean]);
            check(40 * REGION, 8 * REGION, &[(true, 9), clean, clean, clean, clean]);
            assert!(regions.all().skip(1).all(|i| !regions.is_dirty(i)));
        });
    }

    /// Bytes of a region of the model.
    const REGION: u64 = 4 << 20;

    /// While regions become twice as long, writers write. Whatever they do, the worker finds nobody
    /// in a region that it keeps them out of (MIRROR-5), and a writer is where the map says so
    /// (MIRROR-2).
    fn reshape_beside_writers() {
        let regions = Arc::new(Regions::with_room(4 * REGION, REGION, 4));
        (0..4).for_each(|i| regions.set_dirty(i));
        // Writers in each part that is as long as a region was at first.
        let inside: Arc<[AtomicU64; 4]> = Arc::default();
        // Whether the map says that the part is dirty.
        let mapped: Arc<[AtomicU64; 4]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(1)));
        let write = |part: usize| {
            let (regions, inside, mapped) = (regions.clone(), inside.clone(), mapped.clone());
            thread::spawn(move || {
                for count in 0..3 {
                    let Ok(range) = regions.enter(part as u64 * REGION, 4096) else { continue };
                    inside[part].fetch_add(1, Ordering::SeqCst);
                    assert_eq!(mapped[part].load(Ordering::SeqCst), 1, "MIRROR-2");
                    thread::yield_now();
                    inside[part].fetch_sub(1, Ordering::SeqCst);
                    regions.leave(range, count);
                }
            })
        };
        let writers = [write(0), write(1), write(3)];
        let keep_out = |range: Range<usize>| {
            regions.freeze(range.clone());
            while !regions.is_idle(range.clone()) {
                thread::yield_now();
            }
        };
        keep_out(regions.all());
        regions.reshape(8 * REGION, 2 * REGION);
        regions.unfreeze(regions.all());
        for region in 0..2 {
            keep_out(region..region + 1);
            for part in [2 * region, 2 * region + 1] {
                assert_eq!(inside[part].load(Ordering::SeqCst), 0, "MIRROR-5");
            }
            regions.unfreeze(region..region + 1);
            if regions.clear_if_settled(region, u64::MAX - 1) {
                mapped[2 * region..][..2].iter().for_each(|part| part.store(0, Ordering::SeqCst));
            }
        }
        writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
        assert!(regions.is_idle(regions.all()));
    }

    /// Few changes of threads at any place find more here than many: a writer has to wait for long.
    fn check() {
        shuttle::check_pct(reshape_beside_writers, 20_000, 3);
    }

    #[test]
    fn regions_become_longer_while_writers_write() {
        check();
    }

    #[test]
    #[should_panic(expected = "MIRROR-")]
    fn planted_old_regions_are_caught() {
        let _planted = plant_here(Bug::OldRegions);
        check();
    }
}
