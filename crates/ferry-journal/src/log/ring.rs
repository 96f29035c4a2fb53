//! Where the log is on the device: a ring of blocks.

use super::format::LOG_BLOCK;
use crate::disk::{Disk, io_error};
use crate::types::Point;
use crate::{Geometry, JournalError};
use ferry_device::AlignedBuf;
use std::ops::Range;

/// Bytes of the log written at a time when it is laid out.
const ZERO_CHUNK: u64 = 1 << 20;

/// Where the log is on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogArea {
    pub volume_id: [u8; 16],
    pub offset: u64,
    pub blocks: u64,
}

impl LogArea {
    pub fn new(geo: &Geometry) -> Self {
        Self {
            volume_id: geo.volume_id,
            offset: geo.log_offset,
            blocks: geo.log_len / LOG_BLOCK as u64,
        }
    }

    /// Offset of a block on the device, in bytes.
    pub fn offset(&self, position: u64) -> u64 {
        self.offset + position % self.blocks * LOG_BLOCK as u64
    }

    /// Where blocks at these positions lie: offsets and lengths in bytes.
    pub fn ranges(&self, positions: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let mut from = positions.start;
        std::iter::from_fn(move || {
            let blocks = self.run(from).min(positions.end.saturating_sub(from));
            let range = (self.offset(from), blocks * LOG_BLOCK as u64);
            from += blocks;
            (blocks > 0).then_some(range)
        })
    }

    /// Blocks from `position` on that lie next to each other on the device.
    pub fn run(&self, position: u64) -> u64 {
        self.blocks - position % self.blocks
    }
}

/// Writes zeros over a whole ring, so that the host never has to find space for it later and
/// nothing in it looks like a record.
pub fn lay_out(disk: &Disk, offset: u64, len: u64) -> Result<(), JournalError> {
    let mut zeros = AlignedBuf::zeroed(ZERO_CHUNK.min(len) as usize);
    let mut at = 0;
    while at < len {
        if len - at < zeros.len() as u64 {
            zeros = AlignedBuf::zeroed((len - at) as usize);
        }
        disk.write(offset + at, &zeros).map_err(io_error("log"))?;
        at += zeros.len() as u64;
    }
    Ok(())
}

/// Makes records behind a cut unreadable: they refer to contexts that are no longer there.
pub fn erase_behind(
    disk: &Disk,
    area: &LogArea,
    start: Point,
    end: Point,
) -> Result<(), JournalError> {
    let zeros = AlignedBuf::zeroed(LOG_BLOCK);
    for position in end.position..start.position + area.blocks {
        disk.write(area.offset(position), &zeros).map_err(io_error("log"))?;
    }
    Ok(())
}
