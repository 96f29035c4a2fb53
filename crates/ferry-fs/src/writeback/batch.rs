//! A write batch while it is filled: room on the device, the data, and what each file gives to it.

use crate::api::Ino;
use crate::cache::batch::Batch;
use crate::inode::extents_right::ExtentsGuard;
use crate::space::segments::Chunk;
use crate::store::data_store::Busy;
use ferry_device::AlignedBuf;
use std::sync::Arc;

/// Most blocks of one batch.
pub(crate) const BATCH_BLOCKS: u32 = 1024;

/// Room on the device and in memory for a batch.
pub(crate) struct OpenBatch {
    pub(crate) chunk: Option<Chunk>,
    pub(crate) buf: Option<Arc<AlignedBuf>>,
    pub(crate) batch: Arc<Batch>,
    /// Whether the thread that sends it may wait for log space.
    pub(crate) busy: Busy,
    /// Blocks of data in it.
    pub(crate) used: u32,
    pub(crate) entries: Vec<(Ino, u64, u32)>,
}

impl OpenBatch {
    /// Blocks that still fit.
    pub fn left(&self) -> u32 {
        self.chunk.as_ref().map_or(0, |c| c.len) - self.used
    }
    /// Blocks in it.
    pub fn position(&self) -> u32 {
        self.used
    }
}

/// Blocks of a file in the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// First block of the file.
    pub block: u64,
    /// First block of the batch.
    pub at: u32,
    /// Number of blocks.
    pub len: u32,
    /// If they are moved, the first device block of where they are.
    pub from: Option<u64>,
}

/// What becomes of a small file's contents.
#[derive(Debug)]
pub(crate) enum Contents {
    /// They stay as they are logged, beside what was taken.
    Extents,
    /// They go into the record.
    Inline(Box<[u8]>),
}

/// What one inode gives to a batch.
pub(crate) struct Work {
    pub guard: ExtentsGuard,
    pub runs: Vec<Taken>,
    pub contents: Contents,
    /// Blocks of space that were reserved for it.
    pub held: u64,
    /// Blocks taken over holes.
    pub over_hole: u64,
    /// Size to log; `None` leaves it.
    pub size: Option<u64>,
    /// First block that was not looked at, where dirty ones remain.
    pub next: Option<u64>,
    /// Checksums to log instead of the data's own: of blocks that were damaged before they were
    /// moved.
    pub retained_crcs: Vec<(u32, u32)>,
}
