//! What the data half keeps in each inode: cached folios, the windows of its extent map, write
//! errors, and the lock that makes changes of its extents one after the other.

use crate::cache::eviction::{Item, Verdict};
use crate::cache::fetching::Fetching;
use crate::cache::frame_table::Front;
use crate::cache::pages::Pages;
use crate::errseq::ErrorSequence;
use crate::order::{Guard, Rank};
use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// What the data half keeps for each inode.
#[derive(Default)]
pub struct FileData {
    /// Held by whoever changes the file's extents: write-back, truncation, allocation, the cleaner.
    /// Taken before a journal reservation and before the inode lock, never while holding either.
    pub(crate) extents: ExtentsLock,
    /// Taken inside the inode lock, for memory copies only.
    pub(crate) pages: PagesLock,
    /// Where readers find frames without any of these locks.
    pub(crate) front: Arc<Front>,
    /// The file's size, where it is known here: what lies before it may be read without the inode
    /// lock. Shrinks before contents go, and grows when they have come.
    pub(crate) readable: AtomicU64,
    /// Held by an append, all of it: before any other lock of the file, and over waits for space.
    pub(crate) tail: Mutex<()>,
    /// Place in the write-back queue; 0: not in it.
    pub(crate) ticket: AtomicU64,
    /// Dirty blocks, for guesses without a lock.
    pub(crate) dirty_hint: AtomicU32,
    /// Writes of this file's data that failed.
    pub errors: ErrorSequence,
    /// The last name and handle are gone: nothing is to be logged any more, but by reclaim.
    pub(crate) dead: AtomicBool,
    /// Where reading got, in bytes; whether it goes from front to back; up to which block it is
    /// being read ahead.
    pub(crate) read_end: AtomicU64,
    pub(crate) row: AtomicU32,
    pub(crate) ahead_to: AtomicU64,
    /// Blocks that are being read ahead now.
    pub(crate) fetching: Fetching,
}

/// *The page lock*, and what it protects.
#[derive(Default)]
pub(crate) struct PagesLock(RwLock<Pages>);

/// It, held with others.
pub(crate) type PagesShared<'l> = Guard<RwLockReadGuard<'l, Pages>>;
/// It, held alone.
pub(crate) type PagesExclusive<'l> = Guard<RwLockWriteGuard<'l, Pages>>;

impl PagesLock {
    /// Takes it shared.
    pub fn read(&self) -> PagesShared<'_> {
        Guard::wait(Rank::Pages, || self.0.read())
    }
    /// Takes it.
    pub fn write(&self) -> PagesExclusive<'_> {
        Guard::wait(Rank::Pages, || self.0.write())
    }
    fn try_read(&self) -> Option<PagesShared<'_>> {
        Some(Guard::tried(Rank::Pages, self.0.try_read()?))
    }
    fn try_write(&self) -> Option<PagesExclusive<'_>> {
        Some(Guard::tried(Rank::Pages, self.0.try_write()?))
    }
}

/// A mutex whose guard keeps the inode alive, so that write-back can hold many.
#[derive(Default)]
pub(crate) struct ExtentsLock {
    pub(crate) busy: Mutex<bool>,
    pub(crate) free: Condvar,
}

impl FileData {
    /// Notes the number of dirty blocks for those who only guess.
    pub(crate) fn set_hint(&self, dirty_blocks: u64) {
        self.dirty_hint.store(u32::try_from(dirty_blocks).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// `item` is there and has this place in the clock (or somebody is at it). Waits for nobody.
    pub(crate) fn may_evict(&self, item: Item, place: u64) -> bool {
        self.pages.try_read().is_none_or(|pages| pages.clock(item) == place)
    }

    /// Takes `item` away if it is clean and was not used since the clock last came by. Waits for
    /// nobody.
    pub(crate) fn evict(&self, item: Item, place: u64) -> Verdict {
        let Some(mut pages) = self.pages.try_write() else { return Verdict::Later };
        match item {
            _ if pages.clock(item) != place => Verdict::Gone,
            Item::Folio(index) => pages.evict_folio(index),
            Item::Window(index) => match self.extents.busy.try_lock() {
                Some(busy) if !*busy => pages.evict_window(index),
                _ => Verdict::Later,
            },
        }
    }
}
