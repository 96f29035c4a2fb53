//! A device's contents: blocks that share the buffers they were written from.

use ferry_device::{AlignedBuf, BLOCK_SIZE};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What survives of a torn write is decided for each piece of this many bytes.
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
#[derive(Clone, Default)]
pub(super) struct Image(HashMap<u64, Block>);

impl Image {
    pub fn read(&self, first: u64, buf: &mut [u8]) {
        for (block, bytes) in (first..).zip(buf.chunks_mut(BLOCK_SIZE)) {
            match self.0.get(&block) {
                Some(found) => bytes.copy_from_slice(found.bytes()),
                None => bytes.fill(0),
            }
        }
    }

    pub fn write(&mut self, first: u64, buf: &Arc<AlignedBuf>) {
        for (block, at) in (first..).zip((0..buf.len()).step_by(BLOCK_SIZE)) {
            self.0.insert(block, Block { buf: Arc::clone(buf), at });
        }
    }

    pub fn discard(&mut self, blocks: Range<u64>) {
        blocks.for_each(|block| drop(self.0.remove(&block)));
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
        self.0.insert(block, Block { buf: Arc::new(buf), at: 0 });
    }
}
