//! Blocks of the home store on their way to the device.
//!
//! redb writes page by page, in no order. Collected and sorted, neighbours become one write, and
//! all are under way at the same time. Until the writes completed, readers find the blocks here.
//!
//! Not only checkpoints write: while a thread reads, redb may make room in its cache by writing
//! what the last commit, or the one under way, has put there. So blocks may come while others are
//! under way to the device, also newer ones of the same offset.

use crate::JournalError;
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Blocks collected before they are written.
const BLOCKS_MAX: usize = 2048;
/// Longest write, in blocks.
const RUN_MAX: usize = 256;

/// The blocks, by their offset on the device in bytes. A block never changes: a newer one replaces
/// it.
type Blocks = BTreeMap<u64, Arc<[u8]>>;

/// What any thread may write and read.
#[derive(Default)]
pub struct WriteBuffer {
    blocks: RwLock<Blocks>,
    /// Held while blocks are under way: an older one must not come to the device after a newer one.
    draining: Mutex<()>,
}

impl WriteBuffer {
    /// Takes whole blocks. `true` when it is time to write them.
    pub fn put(&self, offset: u64, bytes: &[u8]) -> bool {
        let mut blocks = self.blocks.write();
        for (at, block) in (offset..).step_by(BLOCK_SIZE).zip(bytes.chunks_exact(BLOCK_SIZE)) {
            blocks.insert(at, block.into());
        }
        blocks.len() >= BLOCKS_MAX
    }

    /// Reads whole blocks: those that are here from here, and, if that is not all, the rest by
    /// `read`.
    ///
    /// What is here is taken first: a block may reach the device, and leave here, while `read` is
    /// at it.
    pub fn read_through(
        &self,
        offset: u64,
        out: &mut AlignedBuf,
        read: impl FnOnce(&mut AlignedBuf) -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        let here: Vec<(usize, Arc<[u8]>)> = {
            let blocks = self.blocks.read();
            let range = blocks.range(offset..offset + out.len() as u64);
            range.map(|(at, block)| ((at - offset) as usize, block.clone())).collect()
        };
        if here.len() * BLOCK_SIZE < out.len() {
            read(out)?;
        }
        for (from, block) in here {
            out[from..from + BLOCK_SIZE].copy_from_slice(&block);
        }
        Ok(())
    }

    /// Forgets all blocks: they are not written any more.
    pub fn clear(&self) {
        self.blocks.write().clear();
    }

    /// Hands the blocks to `write`, as few long chunks. When it has written them, they are not here
    /// any more, but those that came meanwhile.
    pub fn drain<E>(
        &self,
        write: impl FnOnce(Vec<(u64, AlignedBuf)>) -> Result<(), E>,
    ) -> Result<(), E> {
        let _one_at_a_time = self.draining.lock();
        let taken = self.blocks.read().clone();
        write(runs(&taken))?;
        let mut blocks = self.blocks.write();
        for (offset, written) in taken {
            if blocks.get(&offset).is_some_and(|there| Arc::ptr_eq(there, &written)) {
                blocks.remove(&offset);
            }
        }
        Ok(())
    }
}

/// The blocks as few long chunks.
fn runs(blocks: &Blocks) -> Vec<(u64, AlignedBuf)> {
    let offsets: Vec<u64> = blocks.keys().copied().collect();
    let next_to = |a: &u64, b: &u64| a + BLOCK_SIZE as u64 == *b;
    let mut runs = Vec::new();
    for run in offsets.chunk_by(next_to).flat_map(|run| run.chunks(RUN_MAX)) {
        let mut buf = AlignedBuf::zeroed(run.len() * BLOCK_SIZE);
        for (block, into) in blocks.range(run[0]..).zip(buf.chunks_exact_mut(BLOCK_SIZE)) {
            into.copy_from_slice(block.1);
        }
        runs.push((run[0], buf));
    }
    runs
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;

    fn at(buffer: &WriteBuffer, offset: u64) -> u8 {
        let mut out = AlignedBuf::zeroed(BLOCK_SIZE);
        buffer.read_through(offset, &mut out, |_| Ok(())).unwrap();
        out[0]
    }

    #[test]
    fn blocks_added_during_a_drain_stay_buffered() {
        const BLOCK: u64 = BLOCK_SIZE as u64;
        let buffer = WriteBuffer::default();
        buffer.put(0, &[1; 2 * BLOCK_SIZE]);
        let written = buffer.drain(|runs| {
            assert_eq!(runs.len(), 1);
            buffer.put(BLOCK, &[2; BLOCK_SIZE]);
            buffer.put(7 * BLOCK, &[3; BLOCK_SIZE]);
            Ok::<_, ()>(())
        });
        written.unwrap();
        assert_eq!([0, 1, 7].map(|block| at(&buffer, block * BLOCK)), [0, 2, 3]);
        buffer.drain(|_| Err(())).unwrap_err();
        let written = buffer.drain(|runs| {
            assert_eq!(runs.iter().map(|(offset, _)| offset / BLOCK).collect::<Vec<_>>(), [1, 7]);
            Ok::<_, ()>(())
        });
        written.unwrap();
        assert_eq!([1, 7].map(|block| at(&buffer, block * BLOCK)), [0, 0]);
    }
}
