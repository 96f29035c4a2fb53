//! A folio: up to 64 KiB of a file in memory, with a state for each block of 4 KiB.

use super::batch::Batch;
use crate::keys::BLOCK;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Blocks in a folio.
pub const FOLIO_BLOCKS: u64 = 16;
/// Bytes in a full folio.
pub const FOLIO_BYTES: usize = (FOLIO_BLOCKS * BLOCK) as usize;
const BLOCK_BYTES: usize = BLOCK as usize;

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

/// Cached contents. Memory grows with what it holds: what lies outside `bytes` is zeros where a block is valid.
#[derive(Default)]
pub struct Folio {
    bytes: Vec<u8>,
    /// Where `bytes` begins within the folio: at a block.
    first: usize,
    /// Blocks whose contents are here.
    pub valid: u16,
    /// Blocks that the journal does not have yet.
    pub dirty: u16,
    /// Dirty blocks over space that `fallocate` promised: they hold none of their own.
    pub promised: u16,
    /// Dirty blocks over holes.
    pub over_hole: u16,
    /// Used since the clock came by.
    referenced: AtomicBool,
    /// It stands in the clock.
    pub in_clock: bool,
    /// Batches that are writing blocks of it.
    flying: Vec<Arc<Batch>>,
}

impl Folio {
    /// Bytes of memory, roughly.
    pub fn memory(&self) -> usize {
        self.bytes.capacity() + size_of::<Self>() + 32
    }

    /// Notes a use.
    pub fn used(&self) {
        if !self.referenced.load(Ordering::Relaxed) {
            self.referenced.store(true, Ordering::Relaxed);
        }
    }
    /// Forgets that it was used; tells whether it was.
    pub fn second_chance(&self) -> bool {
        self.referenced.swap(false, Ordering::Relaxed)
    }

    /// Puts `data` at byte `at` of the folio. What it skips becomes zeros.
    pub fn put(&mut self, at: usize, data: &[u8]) {
        self.make_room(at, at + data.len());
        let at = at - self.first;
        if self.bytes.len() < at {
            self.bytes.resize(at, 0);
        }
        let inside = data.len().min(self.bytes.len() - at);
        self.bytes[at..at + inside].copy_from_slice(&data[..inside]);
        self.bytes.extend_from_slice(&data[inside..]);
    }

    /// Sees to it that bytes `[at, end)` can be held: exactly these at first, then with room to grow.
    fn make_room(&mut self, at: usize, end: usize) {
        let block = at / BLOCK_BYTES * BLOCK_BYTES;
        if self.bytes.is_empty() {
            self.first = block;
            self.bytes.reserve_exact((end - block).next_multiple_of(512));
        } else if block < self.first {
            let mut bytes = Vec::with_capacity((self.first - block + self.bytes.len()).max(end - block));
            bytes.resize(self.first - block, 0);
            bytes.append(&mut self.bytes);
            (self.bytes, self.first) = (bytes, block);
        }
        let need = end - self.first;
        if self.bytes.capacity() < need {
            let grown = need.max(2 * self.bytes.capacity()).next_multiple_of(BLOCK_BYTES);
            let room = grown.min(FOLIO_BYTES - self.first);
            self.bytes.reserve_exact(room - self.bytes.len());
        }
    }

    /// Zeroes bytes `[from, to)`.
    pub fn zero(&mut self, from: usize, to: usize) {
        let from = from.saturating_sub(self.first);
        let to = to.saturating_sub(self.first).min(self.bytes.len());
        if from < to {
            self.bytes[from..to].fill(0);
        }
    }

    /// Copies from byte `at` on; zeros outside of what is held.
    pub fn get(&self, at: usize, out: &mut [u8]) {
        let before = self.first.saturating_sub(at).min(out.len());
        let (zeros, out) = out.split_at_mut(before);
        zeros.fill(0);
        let from = (at + before).saturating_sub(self.first).min(self.bytes.len());
        let held = (self.bytes.len() - from).min(out.len());
        out[..held].copy_from_slice(&self.bytes[from..from + held]);
        out[held..].fill(0);
    }

    /// Makes blocks clean.
    pub fn clean(&mut self, blocks: u16) -> Undirtied {
        let dirty = self.dirty & blocks;
        let (promised, over_hole) = (dirty & self.promised, dirty & self.over_hole);
        self.dirty &= !blocks;
        self.promised &= !blocks;
        self.over_hole &= !blocks;
        let count = |bits: u16| u64::from(bits.count_ones());
        Undirtied { held: count(dirty) - count(promised), over_hole: count(over_hole) }
    }

    /// Forgets blocks.
    pub fn forget(&mut self, blocks: u16) -> Undirtied {
        let cleaned = self.clean(blocks);
        self.valid &= !blocks;
        // What lies behind the last valid block must read as zeros when it becomes valid again.
        let end = (16 - self.valid.leading_zeros() as usize) * BLOCK_BYTES;
        self.bytes.truncate(end.saturating_sub(self.first));
        for block in 0..FOLIO_BLOCKS as usize {
            if blocks & (1 << block) != 0 {
                self.zero(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES);
            }
        }
        cleaned
    }

    /// `batch` writes blocks of it.
    pub fn fly(&mut self, batch: &Arc<Batch>) {
        self.flying.retain(|b| !b.is_over());
        if !self.flying.iter().any(|b| Arc::ptr_eq(b, batch)) {
            self.flying.push(Arc::clone(batch));
        }
    }

    /// Nothing of it is dirty or being written.
    pub fn is_idle(&mut self) -> bool {
        self.flying.retain(|b| !b.is_over());
        self.dirty == 0 && self.flying.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_not_put_are_zeros_and_small_folios_stay_small() {
        let mut folio = Folio::default();
        folio.put(100, b"abc");
        assert!(folio.memory() < 1024);
        let mut out = [9; 8];
        folio.get(98, &mut out);
        assert_eq!(&out, b"\0\0abc\0\0\0");
        folio.put(60_000, &[1; 5_536]);
        folio.get(65_530, &mut out[..6]);
        assert_eq!(out[..6], [1; 6]);
        assert!(folio.memory() < FOLIO_BYTES + 256);
    }

    #[test]
    fn a_folio_may_begin_anywhere_and_grow_downwards() {
        let mut folio = Folio::default();
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
        folio.valid = mask(3, 4);
        folio.forget(mask(3, 4));
        folio.get(0, &mut out);
        assert!(out.iter().all(|b| *b == 0));
    }

    #[test]
    fn what_was_forgotten_reads_as_zeros_later() {
        let mut folio = Folio::default();
        folio.put(0, &[7; 3 * BLOCK_BYTES]);
        folio.valid = mask(0, 3);
        folio.dirty = mask(1, 3);
        folio.over_hole = mask(1, 2);
        folio.promised = mask(2, 3);
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
