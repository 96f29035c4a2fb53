//! Where segments are, and which unit's block a place is.

use super::unit::unit_bytes;
use crate::Geometry;
use ferry_device::BLOCK_SIZE;

/// The segments of a volume.
#[derive(Clone, Copy)]
pub struct Segments {
    offset: u64,
    /// Bytes of one.
    pub len: u64,
    /// Bytes of the database's file in one.
    pub unit: u64,
}

impl Segments {
    pub fn new(geo: &Geometry) -> Self {
        Self { offset: geo.segments_offset, len: geo.segment_len, unit: unit_bytes(geo.segment_len) }
    }

    /// First byte of a segment on the device.
    pub fn place(&self, segment: u32) -> u64 {
        self.offset + u64::from(segment) * self.len
    }

    /// The segment, and the block within it, at a place on the device.
    pub fn block_at(&self, place: u64) -> (u32, u32) {
        let from = place - self.offset;
        ((from / self.len) as u32, (from % self.len / BLOCK_SIZE as u64) as u32)
    }
}
