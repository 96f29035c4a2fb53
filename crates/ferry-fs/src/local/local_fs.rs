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
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::inode::table::InodeTable;
use crate::keys::{self, Counters};
use crate::local::change::Change;
use crate::local::counters::VolumeCounters;
use crate::local::handles::Handles;
use crate::local::late::Late;
use crate::local::long::Long;
use crate::local::pool::Pool;
use crate::local::readers::Wanted;
use crate::namespace::names::NameHash;
use crate::namespace::orphans::Reclaimer;
use crate::posix;
use crate::scrub::live::Scrubs;
use crate::store::data_store::{DataOptions, DataStore, InodeSource};
use crate::volume::{Superblock, VolumeError, read_superblock, settle_copies};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_journal::{
    Credits, FAST_FLUSH, FlushPolicy, Journal, JournalError, JournalOptions, LogOptions, Recovered,
    Seq, Transaction,
};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The kernel itself makes every change to a local mount: what it cached stays right.
pub(crate) const VALID: Duration = Duration::from_secs(24 * 60 * 60);
/// Dirty data is written back at this age, or that of the commit interval where that is longer.
const WRITEBACK_AGE: Duration = Duration::from_secs(5);

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
    /// Memory for contents and metadata, in bytes.
    pub cache_bytes: usize,
    /// Changes become durable after this time at the latest.
    pub commit_interval: Duration,
    /// When a context that somebody waits for is sealed.
    pub flush: FlushPolicy,
    /// The policy `delay` does not wait where flushes take less than this on average.
    pub fast_flush: Duration,
    /// How the log is driven.
    pub log: LogOptions,
    /// `false`: no threads; everything happens on the caller's thread.
    pub background: bool,
    /// Who excludes whom on one file.
    #[cfg(feature = "compare")]
    pub locking: Locking,
    /// Who has mounted it: may do beside root what concerns the volume as a whole.
    pub owner: u32,
    /// Programs outlive the mount: what was removed while they had it open stays, with its
    /// contents, until [`SessionStore::reclaim_removed`](crate::SessionStore::reclaim_removed) is
    /// called on the next mount.
    pub keeps_removed: bool,
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
            log: LogOptions::default(),
            background: true,
            #[cfg(feature = "compare")]
            locking: Locking::Range,
            owner: 0,
            keeps_removed: false,
        }
    }
}

/// A mounted volume.
pub struct LocalFs {
    pub(crate) sb: Superblock,
    /// What messages call the volume.
    pub(crate) name: String,
    pub(crate) options: FsOptions,
    pub(crate) env: Env,
    pub(crate) dev: Arc<dyn BlockDevice>,
    recovered: Recovered,
    pub(crate) was_handed_over: bool,
    pub(crate) journal: Arc<Journal>,
    pub(crate) data: Arc<DataStore>,
    pub(crate) table: Arc<InodeTable>,
    pub(crate) counters: VolumeCounters,
    pub(crate) handles: Handles,
    pub(crate) hash: NameHash,
    /// Taken by whoever moves a directory to another one, before any inode lock.
    pub(crate) rename_lock: Mutex<()>,
    /// Newest context that holds a change made here.
    pub(crate) newest: AtomicU64,
    /// Newest context in which a directory got another name: it changed the path of all that is
    /// below.
    pub(crate) newest_dir_move: AtomicU64,
    /// Inodes whose access time the journal does not have.
    pub(crate) lazy_times: Mutex<Vec<Arc<Inode>>>,
    /// Some inode is [`Inode::MAPPED`].
    pub(crate) some_mapped: AtomicBool,
    pub(crate) reclaimer: Arc<Reclaimer>,
    /// The mount ends: what has no name stays for the next one.
    pub(crate) keeping_removed: AtomicBool,
    pub(crate) readers: Arc<Pool<Wanted>>,
    pub(crate) scrubs: Scrubs,
    /// Held while marks of sessions are removed, or what is said beside them, behind the
    /// reservation.
    pub(crate) marking: Mutex<()>,
    /// Held while the log grows.
    pub(crate) growing: Arc<Mutex<()>>,
    pub(crate) late: Arc<Pool<Late>>,
    pub(crate) long: Arc<Pool<Long>>,
    pub(crate) changes: Arc<Pool<Change>>,
    pub(crate) host: RwLock<Option<Arc<dyn Host>>>,
    pub(crate) closed: Mutex<bool>,
}

impl LocalFs {
    /// Opens the volume on `dev`: recovers it, and begins to reclaim what was removed before.
    pub fn open(
        dev: Arc<dyn BlockDevice>,
        options: FsOptions,
        env: Env,
    ) -> Result<Arc<Self>, VolumeError> {
        let sb = read_superblock(&dev)?;
        if !options.read_only {
            settle_copies(&dev)?;
        }
        let name = sb.name();
        // A quarter of the memory goes to the home store, the rest to contents.
        let home_cache_bytes = (options.cache_bytes / 4).clamp(1 << 20, 64 << 20);
        let data_options = DataOptions {
            cache_bytes: options.cache_bytes.saturating_sub(home_cache_bytes).max(1 << 20),
            writeback_age: options.commit_interval.max(WRITEBACK_AGE),
            background: options.background,
            read_only: options.read_only,
            #[cfg(feature = "compare")]
            locking: options.locking,
        };
        let journal_options = JournalOptions {
            commit_interval: options.commit_interval,
            flush: options.flush,
            fast_flush: options.fast_flush,
            log: options.log,
            home_cache_bytes,
            reads_all: false,
            read_only: options.read_only,
            background: options.background,
            accept_damage: options.read_only,
        };
        let data = DataStore::new(dev.clone(), sb.geometry(), data_options, env.clone());
        let opened =
            Journal::open(dev.clone(), sb.geometry(), journal_options, env.clone(), data.clone());
        let (journal, recovered) = opened.map_err(|error| match error {
            JournalError::Damaged { .. } => VolumeError::NeedsRepair(error),
            JournalError::Unreadable { .. } => VolumeError::Unreadable(error),
            other => VolumeError::Journal(other),
        })?;
        if recovered.unclean {
            tracing::info!(
                volume = name,
                contexts = recovered.contexts,
                bytes = recovered.bytes,
                "recovered from the log"
            );
        }
        if let Some(damage) = &recovered.log_damage {
            tracing::warn!(
                volume = name,
                offset = damage.offset,
                from = damage.lost_from.0,
                to = damage.lost_to.0,
                "the log is damaged: what was changed last is missing here; run `ferry fsck --repair`"
            );
        }
        let journal = Arc::new(journal);
        let table = Arc::new(InodeTable::new(journal.clone()));
        data.start(journal.clone(), &recovered, table.clone() as Arc<dyn InodeSource>)?;
        let stored = journal.get(&keys::counters()).map_err(FsError::from)?;
        let missing =
            || VolumeError::Damaged { detail: "the counters are missing: run `ferry fsck`".into() };
        let stored = Counters::decode(&stored.ok_or_else(missing)?).map_err(FsError::from)?;
        let next_ino = stored.next_ino;
        let was_handed_over = crate::requests::session_records::was_handed_over(&journal, next_ino);
        let fs = Arc::new(Self {
            hash: NameHash::new(&sb.hash_key),
            sb,
            name,
            env,
            dev,
            recovered,
            was_handed_over,
            journal,
            data,
            table,
            counters: VolumeCounters::new(stored),
            handles: Handles::default(),
            rename_lock: Mutex::new(()),
            newest: AtomicU64::new(0),
            newest_dir_move: AtomicU64::new(0),
            lazy_times: Mutex::default(),
            some_mapped: AtomicBool::new(false),
            reclaimer: Arc::default(),
            keeping_removed: AtomicBool::new(false),
            readers: Arc::default(),
            scrubs: Scrubs::default(),
            marking: Mutex::default(),
            growing: Arc::default(),
            late: Arc::default(),
            long: Arc::default(),
            changes: Arc::default(),
            host: RwLock::new(None),
            closed: Mutex::new(false),
            options,
        });
        if !fs.options.read_only {
            fs.check_limit(next_ino)?;
            let credits = Credits { keys: 1, bytes: 64, urgent: true };
            let seq = fs.counters.commit_limit(fs.journal.begin(credits)?);
            fs.force(seq)?;
        }
        fs.readers.serve(&fs);
        fs.late.serve(&fs);
        fs.long.serve(&fs);
        fs.changes.serve(&fs);
        fs.start_reclaimer()?;
        Ok(fs)
    }

    /// Numbers are handed out from this one on, so nothing may have one of them.
    fn check_limit(&self, next_ino: Ino) -> Result<(), VolumeError> {
        let mut taken = false;
        let looked =
            self.journal.scan(&keys::inode(next_ino), &keys::inode_end(u64::MAX), &mut |_, _| {
                taken = true;
                false
            });
        if let Err(error) = looked {
            // What is damaged there costs what lies there, and not the mount.
            tracing::warn!(%error, "the newest inodes cannot be read");
        }
        if !taken && next_ino < keys::INO_END {
            return Ok(());
        }
        let detail = "inode numbers in use would be handed out again: run `ferry fsck --repair`, or mount with `-o ro`";
        Err(VolumeError::Damaged { detail: detail.into() })
    }

    /// Reads the superblock of the volume on `dev`.
    pub fn read_superblock(dev: &Arc<dyn BlockDevice>) -> Result<Superblock, VolumeError> {
        read_superblock(dev)
    }

    /// The volume's superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.sb
    }

    /// What recovery found when the volume was opened.
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
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

    /// After a commit: who was changed by it.
    pub(crate) fn committed(&self, seq: Seq, inodes: &[&Inode]) {
        for inode in inodes {
            inode.last_seq.fetch_max(seq.0, Ordering::AcqRel);
        }
        self.newest.fetch_max(seq.0, Ordering::AcqRel);
    }

    /// What the program is told; what happened besides goes to the log.
    pub(crate) fn report(&self, what: &'static str, ino: Ino, error: FsError) -> Errno {
        let told = error.errno();
        if !matches!(error, FsError::Errno(_))
            && told != Errno(libc::EROFS)
            && told != Errno(libc::ENOSPC)
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
