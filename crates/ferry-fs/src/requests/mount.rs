//! Opening a volume: recovery, the threads, and what an earlier mount has left over.

use crate::api::{Ino, ROOT};
use crate::error::FsError;
use crate::inode::table::{InodeSource, InodeTable};
use crate::keys::{self, Counters};
use crate::local::counters::VolumeCounters;
use crate::local::handles::Handles;
use crate::local::local_fs::{FsOptions, LocalFs, WRITEBACK_AGE};
use crate::local::lost_names::LostNames;
use crate::local::name_hash::NameHash;
use crate::requests::session_records::was_handed_over;
use crate::scrub::live::Scrubs;
use crate::store::data_store::{DataOptions, DataStore};
use crate::volume::{VolumeError, read_superblock, settle_copies};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_journal::{Credits, Journal, JournalError, JournalOptions, Recovered};
use parking_lot::{Mutex, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock, Weak};

/// The home store's cache takes a quarter of the memory, and no more than this. It has its size
/// from when the volume is opened.
const HOME_CACHE_MAX: usize = 64 << 20;

/// Bytes of the home store's cache.
pub(crate) fn home_cache_bytes(options: &FsOptions) -> usize {
    (options.cache_bytes / 4).clamp(1 << 20, HOME_CACHE_MAX)
}

/// Bytes for contents, inodes and names, of a memory of so many.
pub(crate) fn other_bytes(options: &FsOptions, memory: usize) -> usize {
    memory.saturating_sub(home_cache_bytes(options)).max(1 << 20)
}

/// What the options of the volume mean for its contents and for the journal.
fn layer_options(options: &FsOptions) -> (DataOptions, JournalOptions) {
    let home_cache_bytes = home_cache_bytes(options);
    let commit_interval = options.commit_interval.max(options.flush_interval_min);
    let data = DataOptions {
        cache_bytes: other_bytes(options, options.cache_bytes),
        writeback_age: commit_interval.max(WRITEBACK_AGE),
        background: options.background,
        read_only: options.read_only,
        known: options.known.clone(),
        #[cfg(feature = "compare")]
        locking: options.locking,
    };
    // What is only read is not recovered. What others have had meanwhile is not written over.
    let changed = !options.read_only;
    let known = options.known.as_ref().filter(|_| changed);
    let left = options.left.as_ref().filter(|left| changed && !left.had_others);
    let journal = JournalOptions {
        commit_interval,
        flush: options.flush,
        fast_flush: options.fast_flush,
        flush_interval_min: options.flush_interval_min,
        log: options.log,
        home_cache_bytes,
        reads_all: false,
        read_only: options.read_only,
        background: options.background,
        accept_damage: options.read_only,
        tail: known.map(|known| known.tail()),
        left: left.map(|left| left.words.log()),
    };
    (data, journal)
}

/// Logs that the volume was recovered, and that its log is damaged. What is only read stays as it
/// is.
fn report_recovery(volume: &str, recovered: &Recovered, read_only: bool) {
    if recovered.unclean && !read_only {
        tracing::info!(
            volume,
            contexts = recovered.contexts,
            bytes = recovered.bytes,
            "recovered from the log"
        );
    }
    if let Some(damage) = &recovered.log_damage {
        tracing::warn!(
            volume,
            offset = damage.offset,
            from = damage.lost_from.0,
            to = damage.lost_to.0,
            "the log is damaged: what was changed last is missing here; run `ferry fsck --repair`"
        );
    }
}

impl LocalFs {
    /// Opens the volume on `dev`: recovers it, and begins to reclaim what was removed before.
    pub fn open(
        dev: Arc<dyn BlockDevice>,
        mut options: FsOptions,
        env: Env,
    ) -> Result<Arc<Self>, VolumeError> {
        let sb = read_superblock(&dev)?;
        if !options.read_only {
            settle_copies(&dev)?;
        }
        let name = sb.name();
        let (data_options, journal_options) = layer_options(&options);
        let data = DataStore::new(dev.clone(), sb.geometry(), data_options, env.clone());
        let opened =
            Journal::open(dev.clone(), sb.geometry(), journal_options, env.clone(), data.clone());
        let (journal, recovered) = opened.map_err(|error| match error {
            JournalError::Damaged { .. } => VolumeError::NeedsRepair(error),
            JournalError::Unreadable { .. } => VolumeError::Unreadable(error),
            other => VolumeError::Journal(other),
        })?;
        options.in_order.iter().try_for_each(|left| left.must_be_as_it_was(recovered.last))?;
        report_recovery(&name, &recovered, options.read_only);
        let journal = Arc::new(journal);
        let table =
            Arc::new(InodeTable::new(journal.clone(), other_bytes(&options, options.cache_bytes)));
        data.start(journal.clone(), &recovered, table.clone() as Arc<dyn InodeSource>)?;
        let stored = journal.get(&keys::counters()).map_err(FsError::from)?;
        let missing =
            || VolumeError::Damaged { detail: "the counters are missing: run `ferry fsck`".into() };
        let stored = Counters::decode(&stored.ok_or_else(missing)?).map_err(FsError::from)?;
        let next_ino = stored.next_ino;
        let was_handed_over = was_handed_over(&journal, next_ino);
        let fs = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            hash: NameHash::new(&sb.hash_key),
            size: AtomicU64::new(sb.size),
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
            memory_limit: AtomicUsize::new(options.cache_bytes),
            lent_bytes: AtomicUsize::new(0),
            reclaimer: Arc::default(),
            keeping_removed: AtomicBool::new(false),
            read_pool: Arc::default(),
            scrubs: Scrubs::default(),
            marking: Mutex::default(),
            growing: Arc::default(),
            blocking_fsyncs: Arc::default(),
            blocking_drops: Arc::default(),
            blocking_changes: Arc::default(),
            metadata_reads: Arc::default(),
            reads_ahead: Arc::default(),
            snapshot_changes: Arc::default(),
            host: RwLock::new(None),
            lost_names: LostNames::default(),
            has_losses: AtomicBool::new(false),
            stale: Mutex::new(None),
            left: Mutex::new(options.left.take()),
            made_before: OnceLock::new(),
            closed: Mutex::new(false),
            options,
        });
        if let Some(known) = &fs.options.known {
            known.set_volume(fs.sb.number(), fs.recovered.last.0);
            // The kernel knows it as long as there is a mount.
            known.count(ROOT, 1);
        }
        if !fs.options.read_only {
            fs.check_limit(next_ino)?;
            let credits = Credits { keys: 1, bytes: 64, urgent: true };
            let seq = fs.counters.commit_limit(fs.journal.begin(credits)?);
            fs.force(seq)?;
        }
        fs.read_pool.serve(&fs);
        fs.blocking_fsyncs.serve(&fs);
        fs.blocking_drops.serve(&fs);
        fs.blocking_changes.serve(&fs);
        fs.metadata_reads.serve(&fs);
        fs.reads_ahead.serve(&fs);
        fs.snapshot_changes.serve(&fs);
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
}
