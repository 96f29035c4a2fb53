//! Where segments are, and which unit's block an offset is.

use crate::Geometry;
use ferry_device::BLOCK_SIZE;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Checksums in a block.
pub const SUMS: usize = BLOCK_SIZE / 4;
const _: () = assert!(SUMS == 1024);

/// Blocks of a unit: those that hold pages, and those that hold their checksums.
pub fn unit_blocks(segment_len: u64) -> (u64, u64) {
    let half = segment_len / BLOCK / 2;
    let sums = half.div_ceil(SUMS as u64 + 1);
    let pages = half - sums;
    (pages, pages.div_ceil(SUMS as u64))
}

/// Bytes of the database's file (and so of keys and values) that one segment holds: its blocks are
/// kept twice, and checksums with them.
pub fn unit_bytes(segment_len: u64) -> u64 {
    unit_blocks(segment_len).0 * BLOCK
}

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
        Self {
            offset: geo.segments_offset,
            len: geo.segment_len,
            unit: unit_bytes(geo.segment_len),
        }
    }

    /// First byte of a segment on the device.
    pub fn offset(&self, segment: u32) -> u64 {
        self.offset + u64::from(segment) * self.len
    }

    /// The segment, and the block within it, at an offset on the device.
    pub fn block_at(&self, offset: u64) -> (u32, u32) {
        let from = offset - self.offset;
        ((from / self.len) as u32, (from % self.len / BLOCK_SIZE as u64) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_takes_as_much_of_its_segment_as_it_can() {
        for of_segment in 4..5000_u64 {
            let (pages, sums) = unit_blocks(of_segment * BLOCK);
            let fits = |p: u64| 2 * p + 2 * p.div_ceil(SUMS as u64) <= of_segment;
            assert!(
                fits(pages) && !fits(pages + 1) && sums == pages.div_ceil(SUMS as u64),
                "{of_segment}"
            );
        }
        assert_eq!(unit_blocks(8 << 20), (1023, 1));
    }
}
