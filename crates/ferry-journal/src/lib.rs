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
mod home;
mod journal;
mod layers;
mod pipeline;
mod policy;
mod record;
mod recovery;
mod scan;
mod space;
mod stats;
mod sync;
mod wait;
mod work;

pub use journal::{Journal, Transaction};
pub use space::SpaceStats;
pub use stats::JournalStats;

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
    /// First byte of the log.
    pub log_offset: u64,
    /// Length of the log.
    pub log_len: u64,
    /// First byte of the first of the two home map slots; the second follows it directly.
    pub home_map_offset: u64,
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

/// What the policy of `force` and the background work depend on.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// A context is sealed at the latest so long after its first change.
    pub commit_interval: std::time::Duration,
    /// Bytes of memory that redb's cache may take.
    pub home_cache_bytes: usize,
    /// No changes are accepted, nothing is written: recovery happens in memory only.
    pub read_only: bool,
    /// `false`: no threads; every step runs on the caller's thread, inside `force`, `begin`, `tick` and `checkpoint`,
    /// so that a simulation is a function of its seed.
    pub background: bool,
}

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
    /// Newest context that is there now.
    pub last: Seq,
    /// Segments that the home store owns.
    pub home_segments: Vec<u32>,
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
    /// The home store failed in a way of its own.
    #[error("home store: {0}")]
    Home(Arc<str>),
    /// The journal was closed.
    #[error("the journal is closed")]
    Closed,
}
