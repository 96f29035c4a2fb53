//! The file system on a local volume.
//!
//! One file per subject: `names` finds entries, `make`, `remove`, `rename` and `link` change them,
//! `attributes`, `contents`, `listing`, `xattr` and `acl` are what they say, `orphans` gives the
//! space of removed files back, `durable` and `bulk` force; `requests` is the [`crate::Filesystem`]
//! implementation. Every change goes the same way: reserve log space, lock the inodes by number,
//! look again, change memory and transaction, commit (which cannot fail), unlock.

use crate::api::{Attr, Entry, Errno, Host, Ino, Opened, Timestamp};
#[cfg(feature = "compare")]
use crate::compare::locking::Locking;
use crate::error::FsError;
use crate::in_order::LeftInOrder;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::inode::table::InodeTable;
use crate::keys::{self};
use crate::known::{Known, LeftBehind};
use crate::local::counters::VolumeCounters;
use crate::local::handles::Handles;
use crate::local::jobs::{
    BlockingChange, BlockingDrop, BlockingFsync, MetadataRead, PooledRead, ReadAhead,
    SnapshotChange,
};
use crate::local::lost_names::LostNames;
use crate::local::name_hash::NameHash;
use crate::local::pool::Pool;
use crate::local::reclaimer::Reclaimer;
use crate::posix;
use crate::scrub::live::Scrubs;
use crate::store::data_store::DataStore;
use crate::volume::{Superblock, VolumeError, read_superblock};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_journal::{FAST_FLUSH, FlushPolicy, Journal, LogOptions, Recovered, Seq, Transaction};
use parking_lot::{Mutex, RwLock};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// The kernel itself makes every change to a local mount: what it cached stays right.
pub(crate) const VALID: Duration = Duration::from_secs(24 * 60 * 60);
/// Dirty data is written back at this age, or that of the commit interval where that is longer.
pub(crate) const WRITEBACK_AGE: Duration = Duration::from_secs(5);

/// When a read moves the access time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessTimes {
    /// Never.
    Never,
    /// Where it is not newer than the last change, or a day old.
    Relative,
    /// Each time.
    Always,
}

/// What the kernel caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Contents, writing through: space is reserved, and errors seen, at the write.
    #[default]
    Kernel,
    /// Contents and writes: errors may come as late as close.
    Writeback,
    /// No contents: every read and write comes here.
    Strict,
}

impl CacheMode {
    /// The word that users write.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Writeback => "writeback",
            Self::Strict => "strict",
        }
    }
}

/// How to open a volume.
#[derive(Clone, Debug)]
pub struct FsOptions {
    /// Nothing is written, not even to recover.
    pub read_only: bool,
    /// What the kernel caches.
    pub cache: CacheMode,
    /// When reads move access times.
    pub access_times: AccessTimes,
    /// Listings move those of directories.
    pub directory_access_times: bool,
    /// Memory for contents, inodes, names and the home store's cache, in bytes.
    pub cache_bytes: usize,
    /// Changes become durable after this time at the latest.
    pub commit_interval: Duration,
    /// When a context that somebody waits for is sealed.
    pub flush: FlushPolicy,
    /// The policy `delay` does not wait where flushes take less than this on average.
    pub fast_flush: Duration,
    /// Callers that force something wait until the flush before theirs is so long ago, and share
    /// the next one; zero: they do not. Changes then become durable after this time at the latest,
    /// if it is longer than `commit_interval`.
    pub flush_interval_min: Duration,
    /// How the log is driven.
    pub log: LogOptions,
    /// `false`: no threads; everything happens on the caller's thread.
    pub background: bool,
    /// Which readers and writers of one file exclude each other.
    #[cfg(feature = "compare")]
    pub locking: Locking,
    /// The user that has mounted it: may act, as root may, on the volume as a whole.
    pub owner: u32,
    /// Programs outlive the mount: what was removed while they had it open stays, with its
    /// contents, until [`SessionStore::reclaim_removed`](crate::SessionStore::reclaim_removed) is
    /// called on the next mount.
    pub keeps_removed: bool,
    /// This process goes on with a mount: what was removed while programs had it open stays until
    /// [`LocalFs::take_over`] says what they have open.
    pub goes_on: bool,
    /// Where what the kernel knows is noted, for a process that goes on if this one is killed.
    pub known: Option<Arc<Known>>,
    /// What a process has left that was killed: this one goes on.
    pub left: Option<LeftBehind>,
    /// What a process has left in order: this one goes on.
    pub in_order: Option<Arc<LeftInOrder>>,
}

impl Default for FsOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            cache: CacheMode::Kernel,
            access_times: AccessTimes::Relative,
            directory_access_times: true,
            cache_bytes: 512 << 20,
            commit_interval: Duration::from_secs(1),
            flush: FlushPolicy::default(),
            fast_flush: FAST_FLUSH,
            flush_interval_min: Duration::ZERO,
            log: LogOptions::default(),
            background: true,
            #[cfg(feature = "compare")]
            locking: Locking::Range,
            owner: 0,
            keeps_removed: false,
            goes_on: false,
            known: None,
            left: None,
            in_order: None,
        }
    }
}

/// A mounted volume.
pub struct LocalFs {
    /// As it was when the volume was opened.
    pub(crate) sb: Superblock,
    /// Bytes of the volume now.
    pub(crate) size: AtomicU64,
    /// What messages call the volume.
    pub(crate) name: String,
    pub(crate) options: FsOptions,
    pub(crate) env: Env,
    pub(crate) dev: Arc<dyn BlockDevice>,
    pub(crate) recovered: Recovered,
    pub(crate) was_handed_over: bool,
    pub(crate) journal: Arc<Journal>,
    pub(crate) data: Arc<DataStore>,
    pub(crate) table: Arc<InodeTable>,
    pub(crate) counters: VolumeCounters,
    pub(crate) handles: Handles,
    pub(crate) hash: NameHash,
    /// Taken by the thread that moves a directory to another one, before any inode lock.
    pub(crate) rename_lock: Mutex<()>,
    /// Newest context that holds a change made here.
    pub(crate) newest: AtomicU64,
    /// Newest context in which a directory got another name: it changed the path of all that is
    /// below.
    pub(crate) newest_dir_move: AtomicU64,
    /// Bytes of memory that may be used now: [`FsOptions::cache_bytes`], or less if memory is
    /// short.
    pub(crate) memory_limit: AtomicUsize,
    /// How much of it snapshots have that are open beside the volume.
    pub(crate) lent_bytes: AtomicUsize,
    pub(crate) reclaimer: Arc<Reclaimer>,
    /// The mount ends: what has no name stays for the next one.
    pub(crate) keeping_removed: AtomicBool,
    /// For what goes on after the call that began it.
    pub(crate) me: Weak<LocalFs>,
    pub(crate) read_pool: Arc<Pool<LocalFs, PooledRead>>,
    pub(crate) scrubs: Scrubs,
    /// Held while marks of sessions are removed, or what is said beside them, behind the
    /// reservation.
    pub(crate) marking: Mutex<()>,
    /// Held while the log grows, or the volume gets another size.
    pub(crate) growing: Arc<Mutex<()>>,
    pub(crate) blocking_fsyncs: Arc<Pool<LocalFs, BlockingFsync<LocalFs>>>,
    pub(crate) blocking_drops: Arc<Pool<LocalFs, BlockingDrop<LocalFs>>>,
    pub(crate) blocking_changes: Arc<Pool<LocalFs, BlockingChange<LocalFs>>>,
    pub(crate) metadata_reads: Arc<Pool<LocalFs, MetadataRead<LocalFs>>>,
    pub(crate) reads_ahead: Arc<Pool<LocalFs, ReadAhead<LocalFs>>>,
    pub(crate) snapshot_changes: Arc<Pool<LocalFs, SnapshotChange<LocalFs>>>,
    pub(crate) host: RwLock<Option<Arc<dyn Host>>>,
    pub(crate) lost_names: LostNames,
    /// A process before has lost changes because it was killed.
    pub(crate) has_losses: AtomicBool,
    /// What the kernel must forget when it can be told, because a process before was killed.
    pub(crate) stale: Mutex<Option<Vec<Ino>>>,
    /// What a process has left that was killed, until that is taken over.
    pub(crate) left: Mutex<Option<LeftBehind>>,
    /// Requests whose changes a process before has made that was killed: they are replayed.
    pub(crate) made_before: OnceLock<HashSet<u64>>,
    pub(crate) closed: Mutex<bool>,
}

impl LocalFs {
    /// Reads the superblock of the volume on `dev`.
    pub fn read_superblock(dev: &Arc<dyn BlockDevice>) -> Result<Superblock, VolumeError> {
        read_superblock(dev)
    }

    /// The volume's superblock, as it was when the volume was opened.
    pub fn superblock(&self) -> &Superblock {
        &self.sb
    }

    /// What recovery found when the volume was opened.
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// The kernel gets a lookup of an inode.
    pub(crate) fn count_lookup(&self, inode: &Inode) {
        if let Some(known) = &self.options.known {
            known.count(inode.ino, 1);
        }
        inode.lookups.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp(i128::try_from(self.env.clock.wall().as_nanos()).unwrap_or(i128::MAX))
    }

    /// Refuses changes where none are possible.
    pub(crate) fn writable(&self) -> Result<(), FsError> {
        if self.options.read_only { Err(errno(libc::EROFS)) } else { Ok(()) }
    }

    pub(crate) fn entry(&self, attr: Attr) -> Entry {
        Entry { attr: Some(attr), entry_valid: VALID, attr_valid: VALID }
    }

    /// The flags of an opened file.
    pub(crate) fn opened(&self, fh: u64, direct_io: bool) -> Opened {
        Opened {
            fh,
            direct_io,
            parallel_direct_writes: self.options.cache == CacheMode::Strict,
            keep_cache: !direct_io,
            // Only the write-back cache hands data over at close.
            no_flush: self.options.cache == CacheMode::Kernel,
            cache_dir: false,
        }
    }

    /// Notes a commit, and the inodes that it changed.
    pub(crate) fn committed(&self, seq: Seq, inodes: &[&Inode]) {
        for inode in inodes {
            inode.last_seq.fetch_max(seq.0, Ordering::AcqRel);
            if let Some(known) = &self.options.known {
                known.logged(inode.ino, seq.0);
            }
        }
        self.newest.fetch_max(seq.0, Ordering::AcqRel);
    }

    /// What the program is told; what happened besides goes to the log.
    pub(crate) fn report(&self, what: &'static str, ino: Ino, error: FsError) -> Errno {
        let told = error.errno();
        // Of a volume that another owner has by now, it was said once.
        if !matches!(error, FsError::Errno(_))
            && told != Errno(libc::EROFS)
            && told != Errno(libc::ENOSPC)
            && (self.data.writable().is_ok() || self.dev.is_surely_ours())
        {
            tracing::error!(volume = self.name, inode = ino, errno = told.0, %error, "{what} failed");
        }
        told
    }
}

pub(crate) fn errno(code: i32) -> FsError {
    FsError::Errno(Errno(code))
}

/// Puts the inode's record, with all that it says, into the transaction.
pub(crate) fn put_inode(txn: &mut Transaction<'_>, ino: Ino, state: &mut InodeState) {
    txn.put(&keys::inode(ino), &state.record().encode());
    state.times_dirty = false;
}

/// A directory has so many entries and subdirectories more.
pub(crate) fn change_entries(
    dir: &mut InodeState,
    entries: i64,
    subdirectories: i32,
    now: Timestamp,
) {
    posix::count_entries(&mut dir.rec, entries, subdirectories, now);
    dir.logged.size = dir.rec.size;
}
