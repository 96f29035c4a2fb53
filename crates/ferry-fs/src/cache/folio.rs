//! A folio: up to 64 KiB of a file in memory, with a state for each block of 4 KiB.

use crate::cache::batch::Batch;
use crate::cache::frame::{FOLIO_BYTES, Frame};
use crate::cache::memory::{FrameMemory, Unsaved};
use crate::cache::node::Node;
use crate::keys::BLOCK;
use std::sync::Arc;

/// Blocks in a folio.
pub const FOLIO_BLOCKS: u64 = 16;
const _: () = assert!(FOLIO_BYTES == (FOLIO_BLOCKS * BLOCK) as usize);
/// Largest piece of a read or write that happens under one lock, in bytes.
pub const CHUNK_BYTES: usize = 1 << 20;
const BLOCK_BYTES: usize = BLOCK as usize;
/// What else an item takes: in the tree of its file, its node, and in the queues.
pub const OVERHEAD_BYTES: usize = 128;

/// The bits of blocks `[from, to)` of a folio.
pub fn mask(from: u64, to: u64) -> u16 {
    (((1_u32 << to) - 1) & !((1_u32 << from) - 1)) as u16
}

/// Dirty blocks that were cleaned or forgotten, by what they had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Undirtied {
    /// Blocks that held space of their own.
    pub held: u64,
    /// Blocks over holes.
    pub over_hole: u64,
}

/// Cached contents, with what is known of each block. The bytes are in a [`Frame`], as large as
/// what it holds; what lies outside is zeros where a block is valid, and what of it is in no valid
/// block is zeros too.
pub struct Folio {
    frame: Arc<Frame>,
    /// Blocks whose contents are here.
    valid: u16,
    /// Blocks that the journal does not have yet.
    pub dirty: u16,
    /// Dirty blocks over unwritten extents: they hold no space of their own.
    pub over_unwritten: u16,
    /// Dirty blocks over holes.
    pub over_hole: u16,
    /// Batches that are writing blocks of it.
    in_flight: Vec<Arc<Batch>>,
    /// Blocks that write-back has taken, and the newest context that maps some; 0: not all yet.
    taken: u16,
    context: u64,
    /// What was noted last.
    noted: Unsaved,
    /// Where its bytes are to be.
    memory: Option<Arc<FrameMemory>>,
}

impl Folio {
    /// Folio `index`, which holds nothing.
    #[cfg(test)]
    pub fn new(index: u64) -> Self {
        Self::held_in(None, index)
    }

    /// Folio `index`, which holds nothing. Its bytes will be in this memory.
    pub fn held_in(memory: Option<Arc<FrameMemory>>, index: u64) -> Self {
        Self {
            frame: Arc::new(Frame::new(index, 0, 0, Arc::default())),
            valid: 0,
            dirty: 0,
            over_unwritten: 0,
            over_hole: 0,
            in_flight: Vec::new(),
            taken: 0,
            context: 0,
            noted: Unsaved::default(),
            memory,
        }
    }

    /// Bytes of memory, roughly.
    pub fn memory(&self) -> usize {
        self.frame.memory() + size_of::<Self>() + OVERHEAD_BYTES
    }

    /// Its bytes.
    pub fn frame(&self) -> &Arc<Frame> {
        &self.frame
    }

    /// Blocks whose contents are here.
    pub fn valid(&self) -> u16 {
        self.valid
    }

    /// What eviction knows of it.
    pub fn node(&self) -> &Arc<Node> {
        self.frame.node()
    }

    /// The contents of these blocks are here, or will be before the frame is steady again.
    pub fn validate(&mut self, blocks: u16) {
        self.valid |= blocks;
        self.frame.set_valid(self.valid);
    }

    /// Puts `data` at byte `at` of the folio. What it skips becomes zeros. Nobody else changes the
    /// folio.
    pub fn put(&mut self, at: usize, data: &[u8]) {
        self.room(at, at + data.len());
        self.frame.begin();
        self.frame.copy_in(at, data);
        self.frame.end();
    }

    /// Sees to it that bytes `[at, end)` can be held: exactly these at first, then with room to
    /// grow. Nobody else changes the folio.
    pub fn room(&mut self, at: usize, end: usize) {
        let old = &self.frame;
        let (first, len) = (old.first, old.len());
        let block = at / BLOCK_BYTES * BLOCK_BYTES;
        let (first, len) = if len == 0 {
            (block, (end - block).next_multiple_of(512))
        } else if block < first {
            (block, (first + len).max(end) - block)
        } else if first + len < end {
            let grown = (end - first).max(2 * len).next_multiple_of(BLOCK_BYTES);
            (first, grown.min(FOLIO_BYTES - first))
        } else {
            return;
        };
        let (len, node) = (len.next_multiple_of(8), Arc::clone(old.node()));
        let held = self.memory.as_ref().and_then(|memory| memory.zeros(len / 8));
        let new = match held {
            Some(words) => Frame::of(old.index, first, words, node),
            None => Frame::new(old.index, first, len, node),
        };
        if old.len() > 0 {
            new.take_over(old);
        }
        new.set_valid(self.valid);
        if old.is_held() && !new.is_held() {
            // The note has gone with it.
            self.noted = Unsaved::default();
        }
        old.give_up();
        self.frame = Arc::new(new);
    }

    /// Zeroes bytes `[from, to)`. Nobody else changes the folio.
    pub fn zero(&mut self, from: usize, to: usize) {
        self.frame.begin();
        self.frame.zero(from, to);
        self.frame.end();
    }

    /// Copies from byte `at` on; zeros outside of what is held.
    pub fn get(&self, at: usize, out: &mut [u8]) {
        self.frame.copy_out(at, out);
    }

    /// Makes blocks clean.
    pub fn clean(&mut self, blocks: u16) -> Undirtied {
        let dirty = self.dirty & blocks;
        let (over_unwritten, over_hole) = (dirty & self.over_unwritten, dirty & self.over_hole);
        self.dirty &= !blocks;
        self.over_unwritten &= !blocks;
        self.over_hole &= !blocks;
        let count = |bits: u16| u64::from(bits.count_ones());
        Undirtied { held: count(dirty) - count(over_unwritten), over_hole: count(over_hole) }
    }

    /// Forgets blocks.
    pub fn forget(&mut self, blocks: u16) -> Undirtied {
        let cleaned = self.clean(blocks);
        self.taken &= !blocks;
        self.frame.begin();
        self.valid &= !blocks;
        self.frame.set_valid(self.valid);
        // They must read as zeros when they become valid again.
        for block in 0..FOLIO_BLOCKS as usize {
            if blocks & (1 << block) != 0 {
                self.frame.zero(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES);
            }
        }
        self.frame.end();
        cleaned
    }

    /// Write-back takes dirty blocks.
    pub fn take(&mut self, blocks: u16) -> Undirtied {
        (self.taken, self.context) = (self.taken | self.dirty & blocks, 0);
        self.clean(blocks)
    }

    /// The blocks that were taken are mapped, by contexts up to this one.
    pub fn mapped(&mut self, context: u64) {
        self.context = context;
    }

    /// Notes for the next process what of it the volume may not have.
    pub fn note(&mut self, ino: u64) {
        let unsaved = Unsaved { dirty: self.dirty, taken: self.taken, context: self.context };
        if unsaved == self.noted || self.memory.is_none() {
            return;
        }
        self.noted = unsaved;
        if let Some(block) = (unsaved.dirty | unsaved.taken).checked_ilog2()
            && !self.frame.is_held()
        {
            // It has no bytes: all of its blocks are zeros.
            if self.frame.len() == 0 {
                let at = block as usize * BLOCK_BYTES;
                self.room(at, at + 1);
            }
            if let (false, Some(memory)) = (self.frame.is_held(), &self.memory) {
                return memory.is_full();
            }
        }
        self.frame.note(ino, unsaved);
    }

    /// `batch` writes blocks of it.
    pub fn add_batch(&mut self, batch: &Arc<Batch>) {
        self.in_flight.retain(|b| !b.is_over());
        if !self.in_flight.iter().any(|b| Arc::ptr_eq(b, batch)) {
            self.in_flight.push(Arc::clone(batch));
        }
    }

    /// Nothing of it is dirty or being written.
    pub fn is_idle(&mut self) -> bool {
        self.in_flight.retain(|b| !b.is_over());
        if self.in_flight.is_empty() {
            self.taken = 0;
        }
        self.dirty == 0 && self.in_flight.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_not_put_are_zeros_and_small_folios_stay_small() {
        let mut folio = Folio::new(0);
        folio.put(100, b"abc");
        assert!(folio.memory() < 1024);
        let mut out = [9; 8];
        folio.get(98, &mut out);
        assert_eq!(&out, b"\0\0abc\0\0\0");
        folio.put(60_000, &[1; 5_536]);
        folio.get(65_530, &mut out[..6]);
        assert_eq!(out[..6], [1; 6]);
        assert!(folio.memory() < FOLIO_BYTES + 320);
    }

    #[test]
    fn a_folio_may_begin_anywhere_and_grow_downwards() {
        let mut folio = Folio::new(0);
        folio.put(9 * BLOCK_BYTES + 5, b"high");
        assert!(folio.memory() < 1024);
        folio.put(3 * BLOCK_BYTES + 4094, b"low");
        let mut out = vec![7; FOLIO_BYTES];
        folio.get(0, &mut out);
        let mut expected = vec![0; FOLIO_BYTES];
        expected[9 * BLOCK_BYTES + 5..][..4].copy_from_slice(b"high");
        expected[3 * BLOCK_BYTES + 4094..][..3].copy_from_slice(b"low");
        assert!(out == expected);
        folio.zero(0, 4 * BLOCK_BYTES);
        folio.get(4 * BLOCK_BYTES - 2, &mut out[..3]);
        assert_eq!(&out[..3], b"\0\0w");
        folio.validate(mask(3, 5) | mask(9, 10));
        folio.forget(mask(3, 5) | mask(9, 10));
        folio.get(0, &mut out);
        assert!(out.iter().all(|b| *b == 0));
    }

    #[test]
    fn what_was_forgotten_reads_as_zeros_later() {
        let mut folio = Folio::new(0);
        folio.put(0, &[7; 3 * BLOCK_BYTES]);
        folio.validate(mask(0, 3));
        folio.dirty = mask(1, 3);
        folio.over_hole = mask(1, 2);
        folio.over_unwritten = mask(2, 3);
        assert_eq!(folio.forget(mask(1, 2)), Undirtied { held: 1, over_hole: 1 });
        let mut out = [9; 2];
        folio.get(BLOCK_BYTES - 1, &mut out);
        assert_eq!(out, [7, 0]);
        assert_eq!(folio.forget(mask(2, 3)), Undirtied { held: 0, over_hole: 0 });
        folio.put(3 * BLOCK_BYTES, &[1]);
        folio.get(2 * BLOCK_BYTES, &mut out);
        assert_eq!(out, [0, 0]);
        assert_eq!((mask(0, 16), mask(3, 3), mask(15, 16)), (0xffff, 0, 0x8000));
    }
}
