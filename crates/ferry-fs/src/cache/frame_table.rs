//! How readers find frames without a lock that they all share: a table of frames by folio, each
//! slot with a lock of its own.
//!
//! It is a cache of what `Pages` says and nothing more. Readers that had to look there put frames
//! in; a slot may be taken by another folio of the same remainder. A frame that its folio has given
//! up is found out by its number, wherever it still stands.
//!
//! A file has tables of its own, as large as the file wants and the cache allows
//! ([`TableBudget`]): a table that is too small makes readers meet writers at the locks.

use crate::cache::frame::{FOLIO_BYTES, Frame};
use crate::sync::{AtomicUsize, Mutex, Ordering, lock};
use std::sync::{Arc, OnceLock};

pub(crate) type Slot = Mutex<Option<Arc<Frame>>>;

/// Slots of the tables; a file uses the first that has one for each of its folios, or the last.
const SLOTS: [usize; 6] = [1, 64, 2048, 16_384, 131_072, 1 << 20];
/// Tables of so many slots are small: every file may have them.
pub(crate) const SMALL_SLOTS: usize = 64;
/// All larger tables together have one part in so many of the cache.
pub(crate) const SHARE: usize = 64;
/// A table has slots for so many times the folios that fit into the cache. The cache may hold a
/// part of a larger file, whose folios do not spread evenly.
pub(crate) const SPREAD: usize = 2;

/// What the tables of all files may take of the cache.
pub(crate) struct TableBudget {
    slots_max: usize,
    bytes_max: usize,
    /// Bytes of all tables that are not small.
    bytes: AtomicUsize,
}

impl TableBudget {
    /// For a cache of `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            slots_max: (limit / FOLIO_BYTES * SPREAD).max(SMALL_SLOTS),
            bytes_max: limit / SHARE,
            bytes: AtomicUsize::new(0),
        }
    }

    /// The table that a file of `folios` should use.
    fn level(&self, folios: u64) -> usize {
        let wanted = folios.min(self.slots_max as u64);
        SLOTS.iter().position(|slots| *slots as u64 >= wanted).unwrap_or(SLOTS.len() - 1)
    }

    fn slots(&self, level: usize) -> usize {
        SLOTS[level].min(self.slots_max)
    }

    /// Takes memory for a table of so many slots.
    fn take(&self, slots: usize) -> bool {
        let bytes = budgeted(slots);
        let taken = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if bytes > 0 && taken > self.bytes_max {
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// Gives back what `front`, which nobody uses any more, has taken.
    pub fn give_back(&self, front: &Front) {
        let bytes = front.all().map(|table| budgeted(table.len())).sum();
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes that are taken.
    #[cfg(test)]
    pub fn taken(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// What a table of so many slots takes of the budget.
fn budgeted(slots: usize) -> usize {
    if slots <= SMALL_SLOTS { 0 } else { slots * size_of::<Slot>() }
}

/// Frames of one file.
#[derive(Default)]
pub struct Front {
    tables: [OnceLock<Box<[Slot]>>; SLOTS.len()],
}

impl Front {
    /// The frame of folio `index` of a file of `folios`, if it stands here.
    pub(crate) fn get(&self, index: u64, folios: u64, budget: &TableBudget) -> Option<Arc<Frame>> {
        // The file may have a smaller table only: it has grown, or the budget refused more.
        let smaller = &self.tables[..=budget.level(folios)];
        let table = smaller.iter().rev().find_map(OnceLock::get)?;
        let slot = lock(slot(table, index));
        slot.as_ref().filter(|frame| frame.index == index).cloned()
    }

    /// Puts `frame` in, for a file of `folios`. Nobody gives it up meanwhile. Returns the bytes of
    /// memory that this took.
    pub(crate) fn put(&self, frame: &Arc<Frame>, folios: u64, budget: &TableBudget) -> usize {
        let mut took = 0;
        let levels = 0..=budget.level(folios);
        let table = levels.rev().find_map(|level| self.table(level, budget, &mut took));
        let table = table.expect("nobody is refused a small table");
        let old = lock(slot(table, frame.index)).replace(Arc::clone(frame));
        drop(old);
        took
    }

    /// The table of this level, made if the budget has room for it. Adds to `took` what that took.
    fn table(&self, level: usize, budget: &TableBudget, took: &mut usize) -> Option<&[Slot]> {
        if let Some(table) = self.tables[level].get() {
            return Some(table);
        }
        let slots = budget.slots(level);
        if !budget.take(slots) {
            return None;
        }
        let mut made = false;
        let table = self.tables[level].get_or_init(|| {
            made = true;
            (0..slots).map(|_| Slot::default()).collect()
        });
        if made {
            *took += slots * size_of::<Slot>();
        } else {
            // Another thread was faster.
            budget.bytes.fetch_sub(budgeted(slots), Ordering::Relaxed);
        }
        Some(table)
    }

    /// Folio `index` has another frame now, or none.
    pub fn forget(&self, index: u64) {
        for table in self.all() {
            let mut slot = lock(slot(table, index));
            let old = slot.take_if(|frame| frame.index == index);
            drop((slot, old));
        }
    }

    /// Bytes of memory.
    pub fn memory(&self) -> usize {
        self.all().map(size_of_val).sum()
    }

    fn all(&self) -> impl Iterator<Item = &[Slot]> {
        self.tables.iter().filter_map(OnceLock::get).map(|table| &**table)
    }
}

fn slot(table: &[Slot], index: u64) -> &Slot {
    &table[(index % table.len() as u64) as usize]
}
