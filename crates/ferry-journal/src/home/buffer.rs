//! Blocks of the home store on their way to the device.
//!
//! redb writes page by page, in no order. Collected and sorted, neighbours become one write, and all are under way at
//! the same time. Until the writes completed, readers find the blocks here.

use crate::JournalError;
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use parking_lot::RwLock;
use std::collections::BTreeMap;

/// Blocks collected before they are written.
const BLOCKS_MAX: usize = 2048;
/// Longest write, in blocks.
const RUN_MAX: usize = 256;

/// The blocks, by their place on the device in bytes. One thread at a time writes; any may read.
#[derive(Default)]
pub struct WriteBuffer {
    blocks: RwLock<BTreeMap<u64, Box<[u8]>>>,
}

impl WriteBuffer {
    /// Takes whole blocks. `true` when it is time to write them.
    pub fn put(&self, place: u64, bytes: &[u8]) -> bool {
        let mut blocks = self.blocks.write();
        for (at, block) in (place..).step_by(BLOCK_SIZE).zip(bytes.chunks_exact(BLOCK_SIZE)) {
            match blocks.get_mut(&at) {
                Some(there) => there.copy_from_slice(block),
                None => drop(blocks.insert(at, block.into())),
            }
        }
        blocks.len() >= BLOCKS_MAX
    }

    /// Reads whole blocks: those that are here from here, and, if that is not all, the rest by `read`.
    ///
    /// What is here is taken first: a block may reach the device, and leave here, while `read` is at it.
    pub fn read_through(
        &self,
        place: u64,
        out: &mut AlignedBuf,
        read: impl FnOnce(&mut AlignedBuf) -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        let here: Vec<(usize, Box<[u8]>)> = {
            let blocks = self.blocks.read();
            let range = blocks.range(place..place + out.len() as u64);
            range.map(|(at, block)| ((at - place) as usize, block.clone())).collect()
        };
        if here.len() * BLOCK_SIZE < out.len() {
            read(out)?;
        }
        for (from, block) in here {
            out[from..from + BLOCK_SIZE].copy_from_slice(&block);
        }
        Ok(())
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.blocks.write().clear();
    }

    /// The blocks as few long pieces.
    pub fn runs(&self) -> Vec<(u64, AlignedBuf)> {
        let blocks = self.blocks.read();
        let places: Vec<u64> = blocks.keys().copied().collect();
        let next_to = |a: &u64, b: &u64| a + BLOCK_SIZE as u64 == *b;
        let mut runs = Vec::new();
        for run in places.chunk_by(next_to).flat_map(|run| run.chunks(RUN_MAX)) {
            let mut buf = AlignedBuf::zeroed(run.len() * BLOCK_SIZE);
            for (block, into) in blocks.range(run[0]..).zip(buf.chunks_exact_mut(BLOCK_SIZE)) {
                into.copy_from_slice(block.1);
            }
            runs.push((run[0], buf));
        }
        runs
    }
}
