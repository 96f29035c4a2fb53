//! What a scrub reads, how fast it may be, and how it is followed.

use crate::volume::Superblock;
use ferry_device::BlockDevice;
use ferry_journal::{Geometry, Journal};
use std::time::Duration;

/// How a scrub goes about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Most bytes that are read in a second; `None`: as many as the device gives.
    pub rate: Option<u64>,
}

/// How far a scrub has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    /// Bytes verified.
    pub done_bytes: u64,
    /// Bytes to verify, as far as is known: files come and go meanwhile.
    pub total_bytes: u64,
    /// Damaged blocks found so far.
    pub damaged_blocks: u64,
}

/// The caller that follows a scrub.
pub trait Watch {
    /// Told after each read. `false` ends the scrub.
    fn progress(&mut self, at: &ScrubProgress) -> bool;
    /// Waits so long: the scrub would be too fast. `false` ends it.
    fn wait(&mut self, time: Duration) -> bool;
}

/// Each copy's place on the device, and what is there.
pub(crate) type SuperblockCopies = Vec<(u64, Result<Superblock, String>)>;

/// What a scrub reads.
pub(crate) struct Source<'s> {
    pub(crate) device: &'s dyn BlockDevice,
    pub(crate) geometry: Geometry,
    /// As they were when the geometry was this one: a longer log or another
    /// size moves both.
    pub(crate) superblocks: SuperblockCopies,
    /// Number of segments now: the volume may have got another size since.
    pub(crate) segments: &'s dyn Fn() -> u32,
    pub(crate) journal: &'s Journal,
    /// Waits while somebody writes this device block.
    pub(crate) settled: &'s dyn Fn(u64),
    /// Bytes that extents refer to, if that is known.
    pub(crate) live_bytes: u64,
}
