//! Which blocks of which segments extents refer to: one bit for each block of a segment that is in
//! use.

use ferry_fs::keys::BLOCK;
use ferry_journal::Geometry;
use std::collections::HashMap;

/// The blocks in use, by segment. Takes 1/32768 of the data's size in memory.
pub(super) struct Space {
    first_block: u64,
    segment_blocks: u64,
    segment_count: u32,
    used: HashMap<u32, Used>,
}

/// What extents say of one segment.
pub(super) struct Used {
    bits: Box<[u64]>,
    /// Blocks that extents refer to.
    pub(super) live: u32,
    /// One behind the last of them.
    pub(super) end: u32,
}

/// Why an extent cannot be where it says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Misplaced {
    /// Not, or not wholly, inside one segment.
    Outside,
    /// Another extent refers to so many of its blocks, this device block first.
    Shared { first: u64, blocks: u64 },
}

impl Space {
    pub(super) fn new(geometry: &Geometry) -> Self {
        Self {
            first_block: geometry.segments_offset / BLOCK,
            segment_blocks: geometry.segment_len / BLOCK,
            segment_count: geometry.segment_count,
            used: HashMap::new(),
        }
    }

    pub(super) fn segment_blocks(&self) -> u64 {
        self.segment_blocks
    }

    pub(super) fn segment_count(&self) -> u32 {
        self.segment_count
    }

    /// First byte of a segment on the device.
    pub(super) fn segment_offset(&self, index: u32) -> u64 {
        (self.first_block + u64::from(index) * self.segment_blocks) * BLOCK
    }

    /// Notes that an extent of `blocks` blocks (at least one) starts at device block `block`.
    pub(super) fn claim(&mut self, block: u64, blocks: u64) -> Result<(), Misplaced> {
        let relative = block.checked_sub(self.first_block).ok_or(Misplaced::Outside)?;
        let start = relative % self.segment_blocks;
        let index =
            u32::try_from(relative / self.segment_blocks).map_err(|_| Misplaced::Outside)?;
        if index >= self.segment_count || start + blocks > self.segment_blocks {
            return Err(Misplaced::Outside);
        }
        let words = self.segment_blocks.div_ceil(64) as usize;
        let used = self.used.entry(index).or_insert_with(|| Used {
            bits: vec![0; words].into_boxed_slice(),
            live: 0,
            end: 0,
        });
        let mut shared = None;
        for i in start..start + blocks {
            let (word, bit) = ((i / 64) as usize, 1_u64 << (i % 64));
            if used.bits[word] & bit != 0 {
                shared.get_or_insert((block + i - start, 0)).1 += 1;
            } else {
                used.bits[word] |= bit;
                used.live += 1;
            }
        }
        used.end = used.end.max((start + blocks) as u32);
        match shared {
            Some((first, blocks)) => Err(Misplaced::Shared { first, blocks }),
            None => Ok(()),
        }
    }

    /// What extents say of this segment, once.
    pub(super) fn take(&mut self, index: u32) -> Option<Used> {
        self.used.remove(&index)
    }

    /// The segments that nobody took, ascending.
    pub(super) fn rest(&mut self) -> Vec<(u32, Used)> {
        let mut rest: Vec<_> = self.used.drain().collect();
        rest.sort_unstable_by_key(|(index, _)| *index);
        rest
    }
}
