//! The journal: a transactional, crash-consistent, ordered key-value view with a group-committed log.
//!
//! A transaction's changes become visible to every reader at [`Transaction::commit`] and durable, in order, as
//! part of a *context* (a sealed set of changes that recovery applies wholly or not at all). The crate knows
//! nothing of inodes or paths.

mod checkpoint;
mod context;
mod core;
mod disk;
pub mod format;
mod grow;
mod guard;
mod hold;
mod home;
pub mod inspect;
mod journal;
mod layers;
mod pipeline;
#[cfg(feature = "planted")]
pub mod planted;
mod policy;
mod rebuild;
mod record;
mod recovery;
mod salvage;
mod scan;
mod space;
mod stats;
mod sync;
mod times;
mod verify;
mod wait;
mod work;

pub use core::smallest_log;
pub use guard::panic_is_caught;
pub use journal::{Journal, Transaction};
pub use pipeline::IN_FLIGHT_MAX;
pub use policy::{Caller, FlushPolicy};
pub use rebuild::{FoundState, Rebuilt, read_damaged, rebuild_home};
pub use salvage::LostKeys;
pub use space::{SpaceStats, Wake};
pub use stats::{FlushStats, JournalStats, StageTimes};
pub use times::TimesStats;
pub use verify::{BadPlace, Step, bad_map_slot, mend_map_slot};

use ferry_device::AlignedBuf;
use std::sync::Arc;

/// Number of a commit context; contexts become durable in this order, without gaps. The first is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Seq(pub u64);

/// A key's value; cheap to clone.
pub type Value = Arc<[u8]>;

/// Called once when a context is durable, or can never be. It runs on the thread that found out and must not
/// block or call [`Journal::begin`].
pub type Completion = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

/// Where the log and the home store's map live on the device. All in bytes, multiples of 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Stamped into every log block.
    pub volume_id: [u8; 16],
    /// Secret: what it signs, only this volume's journal has written (SipHash).
    pub hash_key: [u8; 16],
    /// First byte of the log.
    pub log_offset: u64,
    /// Length of the log.
    pub log_len: u64,
    /// First bytes of the two home map slots.
    pub home_map_offsets: [u64; 2],
    /// Length of one slot: a header block and 4 bytes for every segment of the volume, in whole blocks.
    pub home_map_len: u64,
    /// First byte of segment 0.
    pub segments_offset: u64,
    /// Length of a segment. The home store is attached in units of it.
    pub segment_len: u64,
    /// Number of segments on the device.
    pub segment_count: u32,
}

/// What an open journal asks of, and tells, its owner.
pub trait JournalClient: Send + Sync {
    /// Every context up to `seq` is durable *and a durable log record says so*: what they freed may be reused.
    fn stamped(&self, seq: Seq);
    /// The log failed; the journal is read-only from now on. Called once.
    fn failed(&self, error: &JournalError);
    /// A free segment for the home store, or `None`. Must not call into the journal.
    fn take_home_segment(&self) -> Option<u32>;
    /// Segments that the home store gave back; the map that still named them is no longer durable anywhere.
    /// Must not call into the journal.
    fn release_home_segments(&self, segments: &[u32]);
}

/// The owner of a journal in which nothing is changed: it has no segments to give, and nothing to hear.
pub struct Bystander;

impl JournalClient for Bystander {
    fn stamped(&self, _seq: Seq) {}
    fn failed(&self, _error: &JournalError) {}
    fn take_home_segment(&self) -> Option<u32> {
        None
    }
    fn release_home_segments(&self, _segments: &[u32]) {}
}

/// What the policy of `force` and the background work depend on.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// A context is sealed at the latest so long after its first change.
    pub commit_interval: std::time::Duration,
    /// When a context that somebody waits for is sealed.
    pub flush: FlushPolicy,
    /// [`FlushPolicy::Delay`] does not wait where flushes take less than this on average.
    pub fast_flush: std::time::Duration,
    /// How the log is driven.
    pub log: LogOptions,
    /// Bytes of memory that redb's cache may take.
    pub home_cache_bytes: usize,
    /// All keys are going to be read in order, perhaps several times: pages of the home store are read ahead.
    pub reads_all: bool,
    /// No changes are accepted, nothing is written: recovery happens in memory only.
    pub read_only: bool,
    /// `false`: no threads; every step runs on the caller's thread, inside `force`, `begin`, `tick` and `checkpoint`,
    /// so that a simulation is a function of its seed. A hold ends at a `tick` (see [`Journal::next_due`]).
    pub background: bool,
    /// A log that is damaged before its durable end is taken to end there ([`Recovered::log_damage`] says what is lost).
    /// Without `read_only` the cut is permanent.
    pub accept_damage: bool,
}

impl JournalOptions {
    /// To look at all of a volume that nobody has mounted: nothing is written, there are no threads, damage is an error.
    pub fn offline(home_cache_bytes: usize) -> Self {
        Self {
            commit_interval: std::time::Duration::from_secs(1),
            flush: FlushPolicy::default(),
            log: LogOptions::default(),
            fast_flush: FAST_FLUSH,
            home_cache_bytes,
            reads_all: true,
            read_only: true,
            background: false,
            accept_damage: false,
        }
    }
}

/// How the log is driven. Only comparisons need anything but the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// How transactions that wait for log space are woken.
    pub wake: Wake,
    /// Records whose writes are under way at the same time, 1 to [`IN_FLIGHT_MAX`].
    pub buffers: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { wake: Wake::default(), buffers: IN_FLIGHT_MAX }
    }
}

/// Below this average time of a flush [`FlushPolicy::Delay`] does not wait, unless told otherwise.
pub const FAST_FLUSH: std::time::Duration = std::time::Duration::from_millis(2);

/// Log space that a transaction may use: an upper bound, checked at commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credits {
    /// Keys put or deleted.
    pub keys: u32,
    /// Bytes of all keys and values together.
    pub bytes: u32,
    /// The operation continues one that already holds uncommitted state (it goes before new ones), or gives
    /// space back (unlink, truncate): it may use what is kept back for that.
    pub urgent: bool,
}

/// Data on the device that a transaction's keys refer to. Recovery checks it.
pub struct DataExtent {
    /// Place on the device, in bytes.
    pub offset: u64,
    /// The bytes to be written there; also what a checksum error is told apart by.
    pub buf: Arc<AlignedBuf>,
    /// CRC32C over the little-endian CRC32Cs of the buffer's 4 KiB blocks.
    pub crc: u32,
}

/// What recovery did.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// Contexts read from the log and applied.
    pub contexts: u64,
    /// Bytes of log read.
    pub bytes: u64,
    /// The volume had not been closed cleanly.
    pub unclean: bool,
    /// Nothing was written to the home store since it was closed: what exists twice there is the same twice, but for damage.
    pub at_rest: bool,
    /// Newest context that is there now.
    pub last: Seq,
    /// Segments that the home store owns.
    pub home_segments: Vec<u32>,
    /// Where the log was cut off, if [`JournalOptions::accept_damage`] allowed it.
    pub log_damage: Option<LogDamage>,
}

/// The log was damaged before its durable end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogDamage {
    /// Where on the device, in bytes.
    pub offset: u64,
    /// What is wrong there.
    pub detail: String,
    /// Oldest context that is lost.
    pub lost_from: Seq,
    /// Newest context that is known to be lost; there may have been newer ones of which nothing is left.
    pub lost_to: Seq,
}

/// Bytes of keys and values that one segment holds for the home store: its blocks are kept twice, and checksums with them.
pub fn home_unit_bytes(segment_len: u64) -> u64 {
    home::unit_bytes(segment_len)
}

/// Why the journal could not do it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JournalError {
    /// The device failed.
    #[error("I/O error on {what}: {source}")]
    Io {
        /// Which part of the volume.
        what: &'static str,
        /// The device's own error.
        source: Arc<std::io::Error>,
    },
    /// What is on the device is not what was written.
    #[error("damaged {what} at byte {offset}: {detail}")]
    Damaged {
        /// Which part of the volume.
        what: &'static str,
        /// Where on the device.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
    /// An earlier failure made the journal read-only.
    #[error("the journal is read-only: {0}")]
    ReadOnly(Arc<str>),
    /// The transaction can never fit the log.
    #[error("a transaction of {asked} bytes exceeds this log's limit of {limit} bytes")]
    TooLarge {
        /// Bytes asked for.
        asked: u64,
        /// The most that one transaction may hold.
        limit: u64,
    },
    /// The home store could not grow.
    #[error("no space left for metadata")]
    NoSpace,
    /// A new home store does not fit the segments given for it.
    #[error("a new home store needs {segments} free segments")]
    HomeNeeds {
        /// So many suffice.
        segments: u32,
    },
    /// The home store failed in a way of its own.
    #[error("home store: {0}")]
    Home(Arc<str>),
    /// The journal was closed.
    #[error("the journal is closed")]
    Closed,
}
