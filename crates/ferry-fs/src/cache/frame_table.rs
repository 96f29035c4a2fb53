//! How readers find frames without a lock that they all share: a table of frames by folio, each
//! slot with a lock of its own.
//!
//! It is a cache of what `Pages` says and nothing more. Readers who had to look there put frames
//! in; a slot may be taken by another folio of the same remainder. A frame that its folio has given
//! up is found out by its number, wherever it still stands.

use crate::cache::frame::Frame;
use crate::sync::{Mutex, lock};
use std::sync::{Arc, OnceLock};

type Slot = Mutex<Option<Arc<Frame>>>;

/// Slots of the tables; a file uses the first that has one for each of its folios, or the last.
const SLOTS: [usize; 4] = [1, 64, 2048, 16_384];

/// Frames of one file.
#[derive(Default)]
pub struct Front {
    tables: [OnceLock<Box<[Slot]>>; SLOTS.len()],
}

impl Front {
    fn level(folios: u64) -> usize {
        SLOTS.iter().position(|slots| *slots as u64 >= folios).unwrap_or(SLOTS.len() - 1)
    }

    /// The frame of folio `index` of a file of `folios`, if it stands here.
    pub fn get(&self, index: u64, folios: u64) -> Option<Arc<Frame>> {
        let table = self.tables[Self::level(folios)].get()?;
        let slot = lock(&table[(index % table.len() as u64) as usize]);
        slot.as_ref().filter(|frame| frame.index == index).cloned()
    }

    /// Puts `frame` in, for a file of `folios`. Nobody gives it up meanwhile. Returns the bytes of
    /// memory that this took.
    pub fn put(&self, frame: &Arc<Frame>, folios: u64) -> usize {
        let level = Self::level(folios);
        let mut took = 0;
        let table = self.tables[level].get_or_init(|| {
            took = SLOTS[level] * size_of::<Slot>();
            (0..SLOTS[level]).map(|_| Slot::default()).collect()
        });
        let old =
            lock(&table[(frame.index % table.len() as u64) as usize]).replace(Arc::clone(frame));
        drop(old);
        took
    }

    /// Folio `index` has another frame now, or none.
    pub fn forget(&self, index: u64) {
        for table in self.tables.iter().filter_map(OnceLock::get) {
            let mut slot = lock(&table[(index % table.len() as u64) as usize]);
            let old = slot.take_if(|frame| frame.index == index);
            drop((slot, old));
        }
    }

    /// Bytes of memory.
    pub fn memory(&self) -> usize {
        self.tables.iter().filter_map(OnceLock::get).map(|t| t.len() * size_of::<Slot>()).sum()
    }
}
