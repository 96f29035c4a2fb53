//! A device's contents: blocks that share the buffers they were written from.

use ferry_device::{AlignedBuf, BLOCK_SIZE};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What survives of a torn write is decided for each range of this many bytes.
pub(super) const SECTOR_SIZE: usize = 512;
/// Sectors in a block.
pub(super) const SECTORS: usize = BLOCK_SIZE / SECTOR_SIZE;

/// One block of a shared buffer.
#[derive(Clone)]
struct Block {
    buf: Arc<AlignedBuf>,
    /// First byte within the buffer.
    at: usize,
}

impl Block {
    fn bytes(&self) -> &[u8] {
        &self.buf[self.at..self.at + BLOCK_SIZE]
    }
}

/// The contents; a block that is not there is zeros. Offsets and lengths are in blocks.
///
/// What copies of one image have in common is shared: a crash image costs what was written since
/// the trace began.
#[derive(Clone, Default)]
pub(super) struct Image {
    below: Arc<HashMap<u64, Block>>,
    /// Blocks written since; `None` are zeros again.
    above: HashMap<u64, Option<Block>>,
}

impl Image {
    pub fn read(&self, first: u64, buf: &mut [u8]) {
        for (block, bytes) in (first..).zip(buf.chunks_mut(BLOCK_SIZE)) {
            let found =
                self.above.get(&block).map_or_else(|| self.below.get(&block), Option::as_ref);
            match found {
                Some(found) => bytes.copy_from_slice(found.bytes()),
                None => bytes.fill(0),
            }
        }
    }

    pub fn write(&mut self, first: u64, buf: &Arc<AlignedBuf>) {
        for (block, at) in (first..).zip((0..buf.len()).step_by(BLOCK_SIZE)) {
            self.above.insert(block, Some(Block { buf: Arc::clone(buf), at }));
        }
    }

    pub fn discard(&mut self, blocks: Range<u64>) {
        blocks.for_each(|block| drop(self.above.insert(block, None)));
    }

    /// The same contents, all of them to be shared by copies.
    pub fn settled(&self) -> Self {
        let mut below = HashMap::clone(&self.below);
        for (block, change) in &self.above {
            match change {
                Some(found) => drop(below.insert(*block, found.clone())),
                None => drop(below.remove(block)),
            }
        }
        Self { below: Arc::new(below), above: HashMap::new() }
    }

    /// Writes only those sectors of one block whose bit is set in `sectors`; `None` writes zeros.
    pub fn write_torn(&mut self, block: u64, new: Option<&[u8]>, sectors: u8) {
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        self.read(block, &mut buf);
        for sector in (0..SECTORS).filter(|sector| sectors & (1 << sector) != 0) {
            let range = sector * SECTOR_SIZE..(sector + 1) * SECTOR_SIZE;
            match new {
                Some(new) => buf[range.clone()].copy_from_slice(&new[range]),
                None => buf[range].fill(0),
            }
        }
        self.above.insert(block, Some(Block { buf: Arc::new(buf), at: 0 }));
    }
}
