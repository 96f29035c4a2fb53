//! The types that every part of the journal shares.

use crate::JournalError;
use ferry_device::AlignedBuf;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of a commit context; contexts become durable in this order, without gaps. The first is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Seq(pub u64);

/// A key's value; cheap to clone.
pub type Value = Arc<[u8]>;

/// Called once when a context is durable, or can never be. It runs on the thread that found out and
/// must not block or call [`Journal::begin`].
pub type Completion = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

/// Where the log and the home store's map live on the device. All in bytes, multiples of 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Every log block has it.
    pub volume_id: [u8; 16],
    /// Secret: what it signs, only this volume's journal has written (SipHash).
    pub hash_key: [u8; 16],
    /// First byte of the log.
    pub log_offset: u64,
    /// Length of the log.
    pub log_len: u64,
    /// First bytes of the two home map slots.
    pub home_map_offsets: [u64; 2],
    /// Length of one slot: a header block and 4 bytes for every segment of the volume, in whole
    /// blocks.
    pub home_map_len: u64,
    /// First byte of segment 0.
    pub segments_offset: u64,
    /// Length of a segment. The home store is attached in units of it.
    pub segment_len: u64,
    /// Number of segments on the device.
    pub segment_count: u32,
}

/// A request that is replayed if its process is killed before its answer was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    /// A small number, of which no two requests that are under way have the same.
    pub slot: u32,
    /// The number of the request, which does not come again.
    pub unique: u64,
}

/// What an open journal asks of, and tells, its owner.
pub trait JournalClient: Send + Sync {
    /// Every context up to `seq` is durable *and a durable log record says so*: what they freed may
    /// be reused.
    fn durable_point(&self, seq: Seq);
    /// The log failed; the journal is read-only from now on. Called once.
    fn failed(&self, error: &JournalError);
    /// A free segment for the home store, or `None`. Must not call into the journal.
    fn take_home_segment(&self) -> Option<u32>;
    /// Segments that the home store gave back; the map that still named them is no longer durable
    /// anywhere. Must not call into the journal.
    fn release_home_segments(&self, segments: &[u32]);
    /// A transaction for this request joins the context `seq`, which is not durable before this
    /// returns. Must not call into the journal.
    fn joins(&self, _request: RequestId, _seq: Seq) {}
}

/// The owner of a journal in which nothing is changed: it has no segments to give, and nothing to
/// hear.
pub struct Bystander;

impl JournalClient for Bystander {
    fn durable_point(&self, _seq: Seq) {}
    fn failed(&self, _error: &JournalError) {}
    fn take_home_segment(&self) -> Option<u32> {
        None
    }
    fn release_home_segments(&self, _segments: &[u32]) {}
}

/// Log space that a transaction may use: an upper bound, checked at commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credits {
    /// Keys put or deleted.
    pub keys: u32,
    /// Bytes of all keys and values together.
    pub bytes: u32,
    /// The operation continues one that already holds uncommitted state (it goes before new ones),
    /// or gives space back (unlink, truncate): it may use what is kept back for that.
    pub urgent: bool,
}

/// Data on the device that a transaction's keys refer to. Recovery checks it.
pub struct DataExtent {
    /// Offset on the device, in bytes.
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
    /// Nothing was written to the home store since it was closed: what exists twice there is the
    /// same twice, but for damage.
    pub at_rest: bool,
    /// Newest context that is there now.
    pub last: Seq,
    /// Newest context that the log itself had: those behind it were taken from what a process had
    /// left that was killed ([`JournalOptions::left`](crate::JournalOptions::left)).
    pub logged: Seq,
    /// The log ends with a record of the process that has left the rest, so nobody else had the
    /// volume since.
    pub is_ours: bool,
    /// The requests of transactions that were taken.
    pub requests: Vec<RequestId>,
    /// Segments that the home store owns.
    pub home_segments: Vec<u32>,
    /// Where the log was cut off, if [`JournalOptions::accept_damage`] allowed it.
    pub log_damage: Option<LogDamage>,
}

/// The log was damaged before its durable end.
#[derive(Clone, Debug)]
pub struct LogDamage {
    /// Where on the device, in bytes.
    pub offset: u64,
    /// What is wrong there.
    pub detail: String,
    /// The device's error, where it cannot read what is there: that may be whole.
    pub unreadable: Option<Arc<std::io::Error>>,
    /// Oldest context that is lost.
    pub lost_from: Seq,
    /// Newest context that is known to be lost; there may have been newer ones of which nothing is
    /// left.
    pub lost_to: Seq,
}

/// A key, shared by the layers that it passes through.
pub type Key = Arc<[u8]>;
/// What happened to a key: a new value, or `None` for its removal.
pub type Change = Option<Value>;
/// Changes in the order of their keys.
pub type Changes = BTreeMap<Key, Change>;

/// A point in the log between two records, and what lies before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Point {
    /// Newest context before it.
    pub seq: Seq,
    /// Position of the block where the next record starts.
    pub position: u64,
    /// Id of the record before it.
    pub id: u64,
}

/// Called after each read with the bytes that it took; may wait. `false` ends the reading.
pub type Step<'s> = &'s mut dyn FnMut(u64) -> bool;

/// A range of the device that cannot be read, or does not hold what was written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRange {
    /// Which part of the volume.
    pub what: &'static str,
    /// First byte on the device.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// What is wrong.
    pub detail: String,
}

impl BadRange {
    pub(crate) fn unreadable(
        what: &'static str,
        offset: u64,
        len: u64,
        error: &std::io::Error,
    ) -> Self {
        Self { what, offset, len, detail: format!("the device cannot read it: {error}") }
    }
}
