//! How a unit of the database's file lies in its segment.
//!
//! ```text
//!  0            P               P+C           2P+C            2P+2C ≤ blocks of the segment
//!  ├─ P blocks ──┼─ C checksums ──┼─ the same ──┼─ the same ─────┤
//! ```
//! No range of damage shorter than P blocks has both copies of anything. A checksum block holds 4
//! bytes for each of 1024 blocks: 0 if it was never written, else its CRC32C, where 1 also stands
//! for 0. Committed pages are never written in place, so neither are their checksums' values: a
//! write of a checksum block that is torn, or is lost, harms only what no committed page needs. So
//! these blocks have no checksum of their own, and the two copies may differ after a crash. A block
//! is good if either copy of it matches either copy of its checksum.

use super::segments::{SUMS, Segments, unit_blocks};
use crate::BadRange;
use crate::bytes::u32_at;
use crate::disk::Disk;
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use std::collections::{BTreeSet, HashMap};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Of a block that was never written.
pub const NEVER: u32 = 0;

/// The checksum of a block as it is stored.
pub fn sum_of(block: &[u8]) -> u32 {
    match crc32c::crc32c(block) {
        NEVER => 1,
        sum => sum,
    }
}

/// The checksums of one unit, as memory has them.
pub struct Sums {
    /// First byte of the segment on the device.
    base: u64,
    /// Blocks of pages, of checksums.
    pages: u64,
    sums: u64,
    /// What the first copy says of each block.
    first: Box<[u32]>,
    /// Where the second copy says something else.
    second: HashMap<u32, u32>,
    /// Checksum blocks that differ from the device's.
    dirty: BTreeSet<u32>,
    /// Copies of checksum blocks that the device could not read, by their offsets.
    unreadable: Vec<u64>,
}

impl Sums {
    fn empty(segments: &Segments, segment: u32) -> Self {
        let (pages, sums) = unit_blocks(segments.len);
        let first = vec![NEVER; pages as usize].into_boxed_slice();
        let base = segments.offset(segment);
        let (second, dirty, unreadable) = (HashMap::new(), BTreeSet::new(), Vec::new());
        Self { base, pages, sums, first, second, dirty, unreadable }
    }

    /// Of a segment whose unit begins now: whatever lies there is worth nothing.
    pub fn fresh(segments: &Segments, segment: u32) -> Self {
        let mut sums = Self::empty(segments, segment);
        sums.dirty = (0..sums.sums as u32).collect();
        sums
    }

    /// Reads them. A block that can be read from one copy only is to be written again; where
    /// neither can be read, no page is good.
    pub fn load(disk: &Disk, segments: &Segments, segment: u32) -> Self {
        let mut sums = Self::empty(segments, segment);
        for index in 0..sums.sums as u32 {
            let [a, b] = [0, 1].map(|copy| {
                let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
                disk.read(sums.sum_offset(index, copy), &mut buf).ok().map(|()| buf)
            });
            for copy in [&a, &b]
                .into_iter()
                .zip(0..)
                .filter(|(read, _)| read.is_none())
                .map(|(_, copy)| copy)
            {
                sums.dirty.insert(index);
                sums.unreadable.push(sums.sum_offset(index, copy));
            }
            for block in sums.covered(index) {
                let at = (block as usize % SUMS) * 4;
                let [one, two] = [&a, &b].map(|buf| buf.as_ref().map(|buf| u32_at(buf, at)));
                // 1 matches no page but one in four thousand million.
                let first = one.or(two).unwrap_or(1);
                sums.first[block as usize] = first;
                if let Some(second) = two.filter(|second| *second != first) {
                    sums.second.insert(block, second);
                }
            }
        }
        sums
    }

    /// Blocks whose checksums are in one checksum block.
    pub fn covered(&self, index: u32) -> std::ops::Range<u32> {
        let from = index * SUMS as u32;
        from..(from + SUMS as u32).min(self.pages as u32)
    }

    /// The checksum block that has this block's.
    pub fn index_of(block: u32) -> u32 {
        block / SUMS as u32
    }

    /// Holds both copies of the checksum blocks that are not waiting to be written against memory.
    pub fn verify(&self, disk: &Disk, found: &mut dyn FnMut(BadRange)) -> u64 {
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        let mut read = 0;
        for index in (0..self.sums as u32).filter(|index| !self.dirty.contains(index)) {
            for copy in 0..2 {
                let offset = self.sum_offset(index, copy);
                read += BLOCK;
                let detail = match disk.read(offset, &mut buf) {
                    Err(error) => format!("the device cannot read checksums: {error}"),
                    Ok(()) if self.is_copy(index, copy as usize, &buf) => continue,
                    Ok(()) => "checksums are not what they were".to_owned(),
                };
                found(BadRange { what: "home store", offset, len: BLOCK, detail });
            }
        }
        read
    }

    /// Whether a checksum block is what memory says of this copy of it.
    fn is_copy(&self, index: u32, copy: usize, buf: &[u8]) -> bool {
        self.covered(index)
            .all(|block| self.of(block)[copy] == u32_at(buf, block as usize % SUMS * 4))
    }

    /// Device offset of a copy of a checksum block.
    pub fn sum_offset(&self, index: u32, copy: u64) -> u64 {
        self.base + copy * self.distance() + (self.pages + u64::from(index)) * BLOCK
    }

    /// Device offset of a block's copy.
    pub fn page_offset(&self, block: u32, copy: u64) -> u64 {
        self.base + copy * self.distance() + u64::from(block) * BLOCK
    }

    /// Bytes between the two copies of a block, or of a checksum.
    pub fn distance(&self) -> u64 {
        (self.pages + self.sums) * BLOCK
    }

    /// What both copies say of a block.
    pub fn of(&self, block: u32) -> [u32; 2] {
        let first = self.first[block as usize];
        [first, self.second.get(&block).copied().unwrap_or(first)]
    }

    /// Whether both copies say the same of these blocks, and what.
    pub fn agreed(&self, from: u32, blocks: usize) -> Option<&[u32]> {
        let range = from as usize..from as usize + blocks;
        let agreed =
            self.second.is_empty() || range.clone().all(|b| !self.second.contains_key(&(b as u32)));
        agreed.then(|| &self.first[range])
    }

    /// Notes what a block is about to hold.
    pub fn set(&mut self, block: u32, sum: u32) {
        if self.of(block) != [sum; 2] {
            self.first[block as usize] = sum;
            self.second.remove(&block);
            self.dirty.insert(Self::index_of(block));
        }
    }

    /// Copies of checksum blocks that the device could not read, and that were not written since,
    /// by their offsets.
    pub fn unreadable(&self) -> &[u64] {
        &self.unreadable
    }

    /// What [`Sums::take_dirty`] gave for `offset` did not get there.
    pub fn not_written(&mut self, offset: u64) {
        let at = (offset - self.base) % self.distance() / BLOCK - self.pages;
        self.dirty.insert(at as u32);
    }

    /// The checksum blocks to be written, both copies of each; from now on they count as written.
    pub fn take_dirty(&mut self) -> Vec<(u64, AlignedBuf)> {
        let dirty = std::mem::take(&mut self.dirty);
        self.unreadable.clear();
        let mut out = Vec::with_capacity(2 * dirty.len());
        for index in dirty {
            for copy in [0, 1] {
                let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
                for (block, entry) in self.covered(index).zip(buf.chunks_exact_mut(4)) {
                    entry.copy_from_slice(&self.of(block)[copy as usize].to_le_bytes());
                }
                out.push((self.sum_offset(index, copy), buf));
            }
        }
        out
    }
}

/// The first block of the file is written in place: redb's header, which relies on a sector never
/// being half written. Its checksum is in the same sector, behind the bytes that redb uses.
pub mod header {
    use crate::bytes::u32_at;

    /// Pages of a full region: 4 GiB, in every file that we made. Nothing stands between regions.
    pub const REGION_PAGES: u64 = 1 << 20;
    /// Bytes that redb uses.
    pub const USED: usize = 320;
    const SECTOR: usize = 512;
    const SUM: usize = SECTOR - 4;
    const _: () = assert!(USED <= SUM);

    /// Puts the checksum in.
    pub fn seal(block: &mut [u8]) {
        let sum = crc32c::crc32c(&block[..SUM]);
        block[SUM..SECTOR].copy_from_slice(&sum.to_le_bytes());
    }

    /// Whether it is whole; takes the checksum out.
    pub fn unseal(block: &mut [u8]) -> bool {
        let whole = u32_at(block, SUM) == crc32c::crc32c(&block[..SUM]);
        block[USED..].fill(0);
        whole
    }

    /// What is wrong with the layout that it describes, for a file of `len` bytes. redb makes
    /// tables in memory from it before it looks at anything else.
    pub fn senseless(block: &[u8], len: u64) -> Option<&'static str> {
        let [page, header, max, full, trailing] =
            [12, 16, 20, 24, 28].map(|at| u64::from(u32_at(block, at)));
        let pages = full.saturating_mul(max).saturating_add(trailing);
        match () {
            () if block[..4] != *b"redb" => Some("it is no header of redb's"),
            () if page != 4096 => Some("its pages are not blocks"),
            () if max != REGION_PAGES || header != 0 => {
                Some("its regions are not of the usual length")
            }
            () if pages.saturating_mul(page) > len => {
                Some("it describes more pages than the file has")
            }
            () => None,
        }
    }
}
