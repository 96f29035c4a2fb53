//! What the data half keeps in each inode: cached folios, the windows of its extent map, write
//! errors, and the lock that makes changes of its extents one after the other.

use crate::cache::deferred::Deferred;
use crate::cache::eviction::Claimed;
use crate::cache::fetching::Fetching;
use crate::cache::frame_table::Front;
use crate::cache::pages::Pages;
use crate::cache::queues::Item;
use crate::errseq::ErrorSequence;
use crate::order::{Guard, Rank};
use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// What the data half keeps for each inode.
#[derive(Default)]
pub struct FileData {
    /// Held by the thread that changes the file's extents: write-back, truncation, allocation, the
    /// cleaner. Taken before a journal reservation and before the inode lock, never while holding
    /// either.
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
    /// Position in the write-back queue; 0: not in it.
    pub(crate) queue_position: AtomicU64,
    /// Dirty blocks, for guesses without a lock.
    pub(crate) dirty_hint: AtomicU32,
    /// Writes of this file's data that failed.
    pub errors: ErrorSequence,
    /// The last name and handle are gone: nothing is to be logged any more, but by reclaim.
    pub(crate) dead: AtomicBool,
    /// Where reading got, in bytes; whether it goes from front to back; up to which block it is
    /// being read ahead.
    pub(crate) read_end: AtomicU64,
    pub(crate) sequential: AtomicU32,
    pub(crate) ahead_to: AtomicU64,
    /// Blocks that are being read ahead now.
    pub(crate) fetching: Fetching,
}

impl FileData {
    /// For the file with this number.
    pub(crate) fn of(ino: u64) -> Self {
        let mut data = Self::default();
        data.pages.pages.get_mut().ino = ino;
        data
    }
}

/// *The page lock*, and what it protects. What is to be evicted while it is held is removed by its
/// holder, who has just given it up.
#[derive(Default)]
pub(crate) struct PagesLock {
    pages: RwLock<Pages>,
    claimed: Deferred<Claimed>,
}

/// It, held with others.
pub(crate) type PagesShared<'l> = PagesHeld<'l, RwLockReadGuard<'l, Pages>>;
/// It, held alone.
pub(crate) type PagesExclusive<'l> = PagesHeld<'l, RwLockWriteGuard<'l, Pages>>;

/// The lock, held. Fields are dropped in this order.
pub(crate) struct PagesHeld<'l, G> {
    guard: Guard<G>,
    _behind: Behind<'l>,
}

/// What comes when the lock has been given up.
struct Behind<'l>(&'l PagesLock);

impl Drop for Behind<'_> {
    fn drop(&mut self) {
        // A window goes only while nobody has the right to the file's extents. That is not known
        // here, so it goes another time.
        self.0.evict_claimed(|pages, claimed| match claimed.entry.item {
            Item::Folio(index) => pages.evict_folio(index, &claimed),
            Item::Window(index) => pages.keep_window(index, &claimed),
        });
    }
}

impl<G: Deref> Deref for PagesHeld<'_, G> {
    type Target = G::Target;

    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for PagesHeld<'_, G> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.guard
    }
}

impl PagesExclusive<'_> {
    /// Gives it up, to those that have waited longest.
    pub fn hand_over(self) {
        let Self { guard, _behind } = self;
        guard.map(RwLockWriteGuard::unlock_fair);
    }
}

impl PagesLock {
    /// Takes it shared.
    pub fn read(&self) -> PagesShared<'_> {
        let guard = Guard::wait(Rank::Pages, || self.pages.read());
        PagesHeld { guard, _behind: Behind(self) }
    }

    /// Takes it shared if nobody has it alone.
    pub fn try_read(&self) -> Option<PagesShared<'_>> {
        let guard = Guard::tried(Rank::Pages, self.pages.try_read()?);
        Some(PagesHeld { guard, _behind: Behind(self) })
    }

    /// Takes it.
    pub fn write(&self) -> PagesExclusive<'_> {
        let guard = Guard::wait(Rank::Pages, || self.pages.write());
        PagesHeld { guard, _behind: Behind(self) }
    }

    /// Takes it if nobody has it.
    fn try_write(&self) -> Option<PagesExclusive<'_>> {
        let guard = Guard::tried(Rank::Pages, self.pages.try_write()?);
        Some(PagesHeld { guard, _behind: Behind(self) })
    }

    /// Evicts what was claimed, if nobody has the lock.
    fn evict_claimed(&self, evict: impl Fn(&mut Pages, Claimed)) {
        let try_write = || Some(Guard::tried(Rank::Pages, self.pages.try_write()?));
        self.claimed.run(try_write, |pages, claimed| evict(pages, claimed));
    }
}

/// A mutex whose guard keeps the inode alive, so that write-back can hold many.
#[derive(Default)]
pub(crate) struct ExtentsLock {
    pub(crate) busy: Mutex<bool>,
    pub(crate) free: Condvar,
}

impl FileData {
    /// Notes the number of dirty blocks for guesses without a lock.
    pub(crate) fn set_hint(&self, dirty_blocks: u64) {
        self.dirty_hint.store(u32::try_from(dirty_blocks).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// The journal has all of the contents, no thread is about to change their extents, and not
    /// much of them is cached: they may be dropped, if nobody has the file open. What the device
    /// could not write stays, and so does an error that nobody was told of. Waits for nobody.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.queue_position.load(Ordering::Acquire) == 0
            && self.errors.is_told()
            && self.extents.busy.try_lock().is_some_and(|busy| !*busy)
            && self.pages.try_write().is_some_and(|mut pages| pages.is_at_rest())
    }

    /// Removes what was claimed if it is still there, clean and idle; or the thread does so that
    /// has the page lock. Waits for nobody.
    pub(crate) fn evict(&self, claimed: Claimed) {
        self.pages.claimed.add(claimed);
        self.pages.evict_claimed(|pages, claimed| match claimed.entry.item {
            Item::Folio(index) => pages.evict_folio(index, &claimed),
            Item::Window(index) => match self.extents.busy.try_lock() {
                Some(busy) if !*busy => pages.evict_window(index, &claimed),
                _ => pages.keep_window(index, &claimed),
            },
        });
    }
}
