//! The contents of files: segments, space, extents, the page cache and write-back.
//!
//! A write copies into folios and reserves space, nothing more. Write-back gathers dirty blocks of
//! many files into one device write and maps them with transactions; the cleaner moves what is live
//! out of segments that are mostly dead. `docs/locking.md` states the order of locks,
//! `docs/format.md` what is on the device.

use crate::api::{Errno, Timestamp};
use crate::cache::batch::Transfers;
use crate::cache::eviction::Cache;
use crate::cache::pages::Pages;
#[cfg(feature = "compare")]
use crate::compare::locking::{InodeLocks, Locking};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
pub(crate) use crate::inode::table::InodeSource;
use crate::keys::{self, BLOCK, InodeRecord};
use crate::known::{Known, inode_flag};
use crate::space::free_blocks::Want;
use crate::space::pool::Space;
use crate::space::segments::Table;
use crate::store::dirty_queue::Queue;
use crate::store::moves::Moves;
use crate::store::read_shares::ReadShares;
use crate::store::removed::Removed;
use crate::store::signal::Signal;
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_journal::{Geometry, Journal, JournalClient, JournalError, RequestId, Seq, Transaction};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// How the data half behaves.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Memory for cached contents, in bytes.
    pub cache_bytes: usize,
    /// Dirty data is written back at this age.
    pub writeback_age: Duration,
    /// `false`: no threads; everything happens on the caller's thread.
    pub background: bool,
    /// Nothing is ever written.
    pub read_only: bool,
    /// Where what the kernel knows is noted.
    pub known: Option<Arc<Known>>,
    /// Which readers and writers of one file exclude each other.
    #[cfg(feature = "compare")]
    pub locking: Locking,
}

/// The patience of a thread: what it does where a change would have to wait for another thread that
/// changes the file's extents, for the device with much in flight, or for log space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Busy {
    /// Leave out files whose extents another thread is changing: that thread writes them back, or
    /// the next round does. Wait for the device and for log space.
    Skip,
    /// Wait for all of these.
    Wait,
    /// Stop, with [`FsError::WouldWait`]: what is not in a context yet stays dirty.
    Refuse,
}

/// What is to be written back.
pub enum Dirty<'i> {
    /// One file.
    File(&'i Arc<Inode>),
    /// These files, gathered into large batches. An error of one file is left with that file: its
    /// handles are told.
    Files(Vec<Arc<Inode>>),
    /// Every file that has waited since then, or longer.
    Since(Duration),
    /// Every file.
    All,
}

/// What a write changes beside contents and size.
pub enum Touch<'a> {
    /// Nothing.
    Nothing,
    /// The times of the last change.
    Times(Timestamp),
    /// The same, to the nanosecond: a client has reported them to a program.
    Exactly(Timestamp),
    /// Whatever this does, under the inode lock; for writes of more than 1 MiB more than once.
    Edit(&'a mut dyn FnMut(&mut InodeRecord)),
}

impl Touch<'_> {
    pub(crate) fn apply(&mut self, rec: &mut InodeRecord) {
        match self {
            Touch::Nothing => {}
            Touch::Times(now) | Touch::Exactly(now) => (rec.mtime, rec.ctime) = (*now, *now),
            Touch::Edit(edit) => edit(rec),
        }
    }
}

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// At this byte.
    Offset(u64),
    /// At the end of the file, as of the write. Appends are never interleaved.
    End,
}

/// Space in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceTotals {
    /// All.
    pub total: u64,
    /// Free.
    pub free: u64,
    /// Free for users: the smaller of the volume's and the host's, without what is kept back.
    pub available: u64,
    /// Bytes that extents refer to.
    pub live: u64,
    /// What data has: bytes in extents (unwritten ones too), dirty bytes, and what is reserved;
    /// without what is on its way back.
    pub used: u64,
}

/// What the cleaner remembers from one time to the next.
#[derive(Default)]
pub(crate) struct Progress {
    /// Segments that could not be emptied, in that life of theirs: something in them cannot be
    /// read.
    pub(crate) stuck: BTreeSet<(u32, u64)>,
}

/// Counters for `stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct DataStats {
    /// Memory of cached contents and extents, in bytes.
    pub cache_bytes: u64,
    /// Its bound.
    pub cache_limit_bytes: u64,
    /// Dirty bytes.
    pub dirty_bytes: u64,
    /// Bytes on their way to the device.
    pub in_flight_bytes: u64,
    /// Folios and windows evicted.
    pub evicted: u64,
    /// Inodes that wait for write-back.
    pub waiting_inodes: u64,
    /// Bytes that extents refer to.
    pub live_bytes: u64,
    /// Bytes in unwritten extents.
    pub unwritten_bytes: u64,
    /// Free segments with space of the host.
    pub segments_free: u64,
    /// Free segments for which the host would be asked first.
    pub segments_bare: u64,
    /// Segments that wait for the durable point.
    pub segments_pending: u64,
    /// Segments of the home store.
    pub segments_home: u64,
    /// Bytes of data written, summaries among them.
    pub written_bytes: u64,
    /// Device writes that carried them.
    pub batches: u64,
    /// Bytes read from the device.
    pub read_bytes: u64,
    /// Blocks found damaged.
    pub damaged_blocks: u64,
    /// Times that a writer was held because too much was dirty.
    pub throttled: u64,
    /// Times that write-back found no room although space was reserved: always 0, unless
    /// something is wrong.
    pub no_room: u64,
    /// Segments cleaned.
    pub cleaned_segments: u64,
    /// Bytes that the cleaner moved.
    pub moved_bytes: u64,
}

/// What is counted as it happens.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) written_bytes: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) damaged_blocks: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) no_room: AtomicU64,
    pub(crate) cleaned_segments: AtomicU64,
    pub(crate) moved_bytes: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// The contents of all files of a volume.
pub struct DataStore {
    pub(crate) dev: Arc<dyn BlockDevice>,
    pub(crate) options: DataOptions,
    pub(crate) env: Env,
    pub(crate) cache: Arc<Cache>,
    pub(crate) space: Space,
    pub(crate) table: Table,
    pub(crate) queue: Queue,
    pub(crate) removed: Removed,
    /// Data being written, and its buffers.
    pub(crate) writes: Arc<Transfers>,
    pub(crate) moves: Moves,
    /// Buffers of reads.
    pub(crate) reads: Transfers,
    pub(crate) read_shares: ReadShares,
    /// The journal owns us, so we must not own it.
    pub(crate) journal: OnceLock<Weak<Journal>>,
    pub(crate) inodes: OnceLock<Weak<dyn InodeSource>>,
    /// Bytes that contents, inodes and names may take together.
    pub(crate) memory_most: AtomicUsize,
    /// Newest context that holds a change of ours.
    pub(crate) last_seq: AtomicU64,
    /// The journal takes no more changes.
    pub(crate) failed: AtomicBool,
    /// Held by the thread that makes room: outermost lock.
    pub(crate) room: Mutex<Progress>,
    pub(crate) signal: Arc<Signal>,
    pub(crate) ahead: Arc<crate::store::ahead_jobs::Jobs>,
    pub(crate) counters: Counters,
    #[cfg(feature = "compare")]
    pub(crate) inode_locks: InodeLocks,
}

/// Memory of frames that were given up has one part in so many of the cache, beside it.
const SPARE_SHARE: usize = 16;

impl DataStore {
    /// Makes the store; it answers the journal's questions already, but knows nothing before
    /// [`DataStore::start`].
    pub fn new(
        dev: Arc<dyn BlockDevice>,
        geometry: Geometry,
        options: DataOptions,
        env: Env,
    ) -> Arc<Self> {
        let known = options.known.as_ref().filter(|_| !options.read_only);
        Arc::new(Self {
            cache: Cache::held_in(
                known.map(|known| known.frames(options.cache_bytes / SPARE_SHARE)),
                options.cache_bytes,
            ),
            space: Space::new(Arc::clone(&dev), geometry),
            table: Table::new(geometry),
            queue: Queue::default(),
            removed: Removed::default(),
            writes: Arc::new(Transfers::held_in(known.and_then(|known| known.buffers()))),
            moves: Moves::default(),
            reads: Transfers::default(),
            read_shares: ReadShares::default(),
            journal: OnceLock::new(),
            inodes: OnceLock::new(),
            memory_most: AtomicUsize::new(options.cache_bytes),
            last_seq: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            room: Mutex::default(),
            signal: Arc::default(),
            ahead: Arc::default(),
            counters: Counters::default(),
            #[cfg(feature = "compare")]
            inode_locks: InodeLocks::new(options.locking),
            dev,
            options,
            env,
        })
    }

    pub(crate) fn journal(&self) -> Result<Arc<Journal>, FsError> {
        let journal = self.journal.get().and_then(Weak::upgrade);
        journal.ok_or(FsError::Journal(JournalError::Closed))
    }

    pub(crate) fn source(&self) -> Result<Arc<dyn InodeSource>, FsError> {
        let source = self.inodes.get().and_then(Weak::upgrade);
        source.ok_or(FsError::Journal(JournalError::Closed))
    }

    /// A read of the device may be a request over a network.
    pub(crate) fn is_far(&self) -> bool {
        self.dev.read_ahead_bytes() > 0
    }

    /// The caller must not wait for a read of the device.
    pub(crate) fn is_refused(&self, busy: Busy) -> bool {
        busy == Busy::Refuse && self.is_far()
    }

    /// `EROFS` when nothing can be changed (any more).
    pub(crate) fn writable(&self) -> Result<(), FsError> {
        if self.options.read_only || self.failed.load(Ordering::Relaxed) {
            return Err(Errno(libc::EROFS).into());
        }
        Ok(())
    }

    pub(crate) fn note_seq(&self, inode: Option<&Inode>, seq: Seq) {
        self.last_seq.fetch_max(seq.0, Ordering::AcqRel);
        if let Some(inode) = inode {
            inode.last_seq.fetch_max(seq.0, Ordering::AcqRel);
            if let Some(known) = &self.options.known {
                known.logged(inode.ino, seq.0);
            }
        }
    }

    /// `times_dirty` was set (or another attribute waits to be logged): write-back is to come by.
    /// Called with the inode lock held.
    pub fn mark_dirty(&self, inode: &Arc<Inode>) {
        self.queue.enter(inode, || self.env.clock.monotonic());
    }

    /// Notes that contents or size are ahead of the journal.
    pub(crate) fn dirtied(&self, inode: &Arc<Inode>, state: &mut InodeState, pages: &Pages) {
        state.times_dirty = true;
        state.count_blocks(pages);
        inode.file.set_hint(pages.dirty_blocks);
        self.mark_dirty(inode);
        self.note_unsaved(inode, state.rec.size, state.rec.mtime);
    }

    /// Takes the inode off the queue if the journal has all of it.
    pub(crate) fn leave_if_clean(&self, inode: &Arc<Inode>, state: &InodeState, pages: &Pages) {
        if pages.dirty_blocks == 0 && !state.times_dirty && state.logged.size == state.rec.size {
            self.queue.leave(inode);
            self.note_saved(inode);
        }
    }

    /// No contents of the inode are ahead of the journal, or nobody wants them any more. The inode
    /// lock is held exclusively.
    pub(crate) fn note_saved(&self, inode: &Inode) {
        if let Some(known) = &self.options.known
            && inode.clear_flag(Inode::UNSAVED)
        {
            known.change_flags(inode.ino, inode_flag::UNSAVED, 0);
        }
    }

    /// The inode's record goes along with the transaction.
    pub(crate) fn put_record(&self, txn: &mut Transaction<'_>, inode: &Inode, state: &InodeState) {
        self.note_ahead(inode, state);
        txn.put(&keys::inode(inode.ino), &state.record().encode());
    }

    /// A transaction is about to change the inode. If contents are ahead of the journal, what is
    /// noted of them must not be older than the transaction: the next process would undo it.
    pub(crate) fn note_ahead(&self, inode: &Inode, state: &InodeState) {
        if inode.has_flag(Inode::UNSAVED)
            && let Some(known) = &self.options.known
        {
            known.note_contents(inode.ino, state.rec.size, state.rec.mtime);
        }
    }

    /// Notes that contents are ahead of the journal. The inode lock is held, perhaps shared.
    pub(crate) fn note_unsaved(&self, inode: &Inode, size: u64, changed: Timestamp) {
        let Some(known) = &self.options.known else { return };
        known.note_contents(inode.ino, size, changed);
        if !inode.has_flag(Inode::UNSAVED) {
            // In this order: another writer that sees the flag may be answered at once.
            known.change_flags(inode.ino, 0, inode_flag::UNSAVED);
            inode.set_flag(Inode::UNSAVED);
        }
    }

    /// There is something that the journal does not have yet: the inode must stay in memory.
    pub fn is_dirty(&self, inode: &Inode) -> bool {
        inode.file.queue_position.load(Ordering::Acquire) != 0
    }

    /// Files without a name whose space is on its way back.
    pub(crate) fn removed(&self) -> &Removed {
        &self.removed
    }

    /// What the host would have to give if the volume became full, and what it has; both in bytes.
    /// `None`: it need not be asked.
    pub fn host_needs(&self) -> Option<(u64, u64)> {
        self.space.host_needs()
    }

    /// Less than `bytes` can be written anew without waiting for space.
    pub fn is_short_of(&self, bytes: u64) -> bool {
        !self.space.has(Want::new(bytes.div_ceil(BLOCK).saturating_add(SHORT_BLOCKS)))
    }

    /// The device below all caches.
    pub(crate) fn device(&self) -> &dyn BlockDevice {
        &*self.dev
    }

    /// The places of the volume.
    pub(crate) fn geometry(&self) -> Geometry {
        self.space.geometry()
    }

    /// Takes segments from the end of the volume for the log, which is then where `new` says;
    /// `false`: they are in use, or needed.
    pub(crate) fn take_last_segments(&self, count: u32, new: &Geometry) -> bool {
        self.space.take_last(count, new)
    }

    /// The log stays where it was when the places were these.
    pub(crate) fn give_last_segments_back(&self, before: &Geometry) {
        self.space.give_last_back(before);
    }

    /// The volume has become longer.
    pub(crate) fn extend(&self, new: &Geometry) {
        self.table.set_count(new.segment_count);
        self.space.extend(new);
    }

    /// The volume has become shorter, as [`Space::cut`].
    ///
    /// [`Space::cut`]: crate::space::pool::Space::cut
    pub(crate) fn cut(&self, new: &Geometry) {
        self.table.set_count(new.segment_count);
        self.space.cut(new);
    }

    /// Waits while device block `block` is being written.
    pub(crate) fn wait_written(&self, block: u64) {
        self.writes.wait_for(block..block + 1);
    }

    /// Totals for statfs.
    pub fn totals(&self) -> SpaceTotals {
        let (journal, blocks) = (self.journal(), self.removed.blocks());
        let home = journal.map_or(u32::MAX, |journal| {
            let less = self.removed.metadata_since(journal.home_seq());
            journal.home_segments_wanted(less)
        });
        let (total, free, available, used) = self.space.totals(blocks, home);
        SpaceTotals { total, free, available, live: self.table.used().0 * BLOCK, used }
    }

    /// Counters.
    pub fn stats(&self) -> DataStats {
        let (live, unwritten) = self.table.used();
        let (free, bare, pending, home) = self.space.counts();
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let c = &self.counters;
        DataStats {
            cache_bytes: self.cache.used() as u64,
            cache_limit_bytes: self.cache.limit() as u64,
            dirty_bytes: self.cache.dirty() as u64,
            in_flight_bytes: self.writes.in_flight() as u64,
            evicted: self.cache.evicted() as u64,
            waiting_inodes: self.queue.len() as u64,
            live_bytes: live * BLOCK,
            unwritten_bytes: unwritten * BLOCK,
            segments_free: free.into(),
            segments_bare: bare.into(),
            segments_pending: pending.into(),
            segments_home: home.into(),
            written_bytes: get(&c.written_bytes),
            batches: get(&c.batches),
            read_bytes: get(&c.read_bytes),
            damaged_blocks: get(&c.damaged_blocks),
            throttled: get(&c.throttled),
            no_room: get(&c.no_room),
            cleaned_segments: get(&c.cleaned_segments),
            moved_bytes: get(&c.moved_bytes),
        }
    }
}

impl Drop for DataStore {
    fn drop(&mut self) {
        self.signal.abandon();
        self.ahead.abandon();
    }
}

impl JournalClient for DataStore {
    fn durable_point(&self, seq: Seq) {
        self.moves.note_durable_point(seq);
        self.space.note_durable_point(seq);
    }

    fn failed(&self, error: &JournalError) {
        tracing::error!(%error, "the journal failed: nothing can be changed any more");
        self.failed.store(true, Ordering::Release);
        self.signal.wake();
    }

    fn take_home_segment(&self) -> Option<u32> {
        self.space.take(crate::space::pool::Need::Home)
    }

    fn release_home_segments(&self, segments: &[u32]) {
        self.space.release_home(segments);
    }

    fn joins(&self, request: RequestId, seq: Seq) {
        if let Some(known) = &self.options.known {
            known.joins(request, seq.0);
        }
    }
}

/// A transaction's bytes for keys and record beside its extents, at most.
pub(crate) const RECORD_BYTES: u32 = 256 + crate::keys::INLINE_MAX as u32;
/// A change may take so many blocks beside those that it says: of what it cuts, and of what leaves
/// the record.
const SHORT_BLOCKS: u64 = 4;

/// Changes attributes under the inode lock.
pub(crate) type AttrEdit<'a> = &'a mut dyn FnMut(&mut InodeRecord);
