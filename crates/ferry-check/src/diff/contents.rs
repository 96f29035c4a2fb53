//! Compares the contents of two files, one of each side, and reads as little of them as it can.
//!
//! An extent has the checksum of each of its blocks. Checksums that differ prove that the blocks
//! differ. Equal ones prove nothing alone: they have 32 bits, and a program can choose bytes that
//! fit. They are believed where both sides name the same block of the device, and where the file
//! was not changed in between. All other blocks with equal checksums are read: those that were
//! written anew with the same bytes.

use super::rows::Rows;
use crate::inspect::Inspector;
use crate::reader::{READ_BLOCKS, Reader};
use ferry_device::BlockDevice;
use ferry_fs::api::Ino;
use ferry_fs::error::FsError;
use ferry_fs::keys::{self, BLOCK, Extent, INODE_INLINE, InodeRecord, Key};
use std::sync::Arc;

const BLOCK_BYTES: usize = BLOCK as usize;

/// A file, or a symbolic link, of one side.
pub(super) struct File<'f> {
    pub(super) volume: &'f Inspector,
    pub(super) ino: Ino,
    pub(super) record: &'f InodeRecord,
}

/// What a file has from some block on.
enum Run<'e> {
    /// It reads as zeros: a hole, or space that nobody has written to.
    Zeros,
    /// It was lost to damage.
    Lost,
    /// Blocks of the device, one behind the other, and their checksums.
    Data { block: u64, crcs: &'e [u32] },
}

/// What the checksums say of two blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    Same,
    Differ,
    /// They must be read.
    Open,
}

/// Compares contents.
pub(super) struct Contents {
    readers: [Reader; 2],
    crc_of_zeros: u32,
}

impl Contents {
    pub(super) fn new(old: &Arc<dyn BlockDevice>, new: &Arc<dyn BlockDevice>) -> Self {
        let readers = [old, new].map(|device| Reader::new(device, false));
        Self { readers, crc_of_zeros: crc32c::crc32c(&[0; BLOCK_BYTES]) }
    }

    /// Whether a read of both files finds the same bytes. `untouched`: it is one file, and no
    /// program has changed it in between.
    pub(super) fn same(
        &mut self,
        old: &File<'_>,
        new: &File<'_>,
        untouched: bool,
    ) -> Result<bool, FsError> {
        let size = old.record.size;
        if size != new.record.size {
            return Ok(false);
        }
        let files = [old, new];
        if files.iter().any(|file| file.record.flags & INODE_INLINE != 0) {
            let [old, new] = [self.inline(0, old)?, self.inline(1, new)?];
            return Ok(old == new);
        }
        let mut maps = files.map(Map::new);
        let mut at = 0;
        while at < size.div_ceil(BLOCK) {
            let [old_map, new_map] = &mut maps;
            let ((a, a_len), (b, b_len)) = (old_map.run(at)?, new_map.run(at)?);
            // The last block counts as far as the file goes.
            let (whole, left) = (size / BLOCK, size.div_ceil(BLOCK) - at);
            let blocks = a_len.min(b_len).min(left);
            let both = Both { files, at, blocks, whole, size, runs: [a, b], untouched };
            if !self.same_runs(&both)? {
                return Ok(false);
            }
            at += blocks;
        }
        Ok(true)
    }

    /// The contents of a file that is no longer than an inode record may hold; `None`: they are
    /// lost.
    fn inline(&mut self, side: usize, file: &File<'_>) -> Result<Option<Vec<u8>>, FsError> {
        if file.record.flags & INODE_INLINE != 0 {
            return Ok(Some(file.record.inline.clone()));
        }
        let mut map = Map::new(file);
        let (run, _) = map.run(0)?;
        let mut bytes = match run {
            Run::Lost => return Ok(None),
            run => self.read(side, file, &run, 0, 0, 1)?,
        };
        bytes.truncate(usize::try_from(file.record.size).unwrap_or(BLOCK_BYTES));
        Ok(Some(bytes))
    }

    fn same_runs(&mut self, both: &Both<'_>) -> Result<bool, FsError> {
        match both.runs {
            [Run::Zeros, Run::Zeros] | [Run::Lost, Run::Lost] => return Ok(true),
            [Run::Lost, _] | [_, Run::Lost] => return Ok(false),
            _ => {}
        }
        let mut next = 0;
        while next < both.blocks {
            let known = both.known(next, self.crc_of_zeros);
            if known == Known::Differ {
                return Ok(false);
            }
            let more = next + 1..both.blocks.min(next + READ_BLOCKS);
            let alike = more.take_while(|at| both.known(*at, self.crc_of_zeros) == known).count();
            let count = 1 + alike as u64;
            if known == Known::Open {
                let [a, b] = [0, 1].map(|side| {
                    self.read(side, both.files[side], &both.runs[side], both.at, next, count)
                });
                let visible = both.size - (both.at + next) * BLOCK;
                let visible = usize::try_from(visible.min(count * BLOCK)).unwrap_or(usize::MAX);
                if a?[..visible] != b?[..visible] {
                    return Ok(false);
                }
            }
            next += count;
        }
        Ok(true)
    }

    /// Reads `count` blocks of a run, from its block `skip` on. The run begins at block `at` of the
    /// file.
    fn read(
        &mut self,
        side: usize,
        file: &File<'_>,
        run: &Run<'_>,
        at: u64,
        skip: u64,
        count: u64,
    ) -> Result<Vec<u8>, FsError> {
        let Run::Data { block, crcs } = run else {
            return Ok(vec![0; count as usize * BLOCK_BYTES]);
        };
        let crcs = &crcs[skip as usize..(skip + count) as usize];
        self.readers[side].verified(block.saturating_add(skip), crcs).map_err(|bad| FsError::Data {
            ino: file.ino,
            offset: (at + skip + bad.block) * BLOCK,
            detail: bad.what,
        })
    }
}

/// The same range of both files, in which each of them has one run.
struct Both<'r> {
    files: [&'r File<'r>; 2],
    /// Its first block, and how many there are.
    at: u64,
    blocks: u64,
    /// Blocks of the file of which all bytes count.
    whole: u64,
    /// Bytes of the file.
    size: u64,
    runs: [Run<'r>; 2],
    untouched: bool,
}

impl Both<'_> {
    /// What is known of block `next` of the range without reading it.
    fn known(&self, next: u64, crc_of_zeros: u32) -> Known {
        let whole = self.at + next < self.whole;
        let cell = |run: &Run<'_>| match run {
            Run::Data { block, crcs } => (Some(block.saturating_add(next)), crcs[next as usize]),
            Run::Zeros | Run::Lost => (None, crc_of_zeros),
        };
        let [(old, old_crc), (new, new_crc)] = [cell(&self.runs[0]), cell(&self.runs[1])];
        match old_crc == new_crc {
            true if old == new || self.untouched => Known::Same,
            false if whole => Known::Differ,
            _ => Known::Open,
        }
    }
}

/// The extents of a file, in order.
struct Map<'v> {
    rows: Rows<'v>,
    /// The last one that was read, and its first block.
    extent: Option<(u64, Extent)>,
}

impl<'v> Map<'v> {
    fn new(file: &File<'v>) -> Self {
        let (from, end) = (keys::extent(file.ino, 0), keys::extent_end(file.ino));
        Self { rows: Rows::new(file.volume, from, end), extent: None }
    }

    /// What the file has at block `at`, and for how many blocks. Each call asks for a later block.
    fn run(&mut self, at: u64) -> Result<(Run<'_>, u64), FsError> {
        while self
            .extent
            .as_ref()
            .is_none_or(|(first, extent)| first.saturating_add(extent.blocks()) <= at)
        {
            let Some((key, value)) = self.rows.next()? else { return Ok((Run::Zeros, u64::MAX)) };
            if let Some(Key::Extent(_, offset)) = keys::parse(&key) {
                self.extent = Some((offset / BLOCK, Extent::decode(&value)?));
            }
        }
        Ok(match &self.extent {
            None => (Run::Zeros, u64::MAX),
            Some((first, _)) if *first > at => (Run::Zeros, first - at),
            Some((first, extent)) => {
                let inside = at - first;
                let run = match extent {
                    Extent::Data { block, crcs } => Run::Data {
                        block: block.saturating_add(inside),
                        crcs: &crcs[inside as usize..],
                    },
                    Extent::Unwritten { .. } => Run::Zeros,
                    Extent::Lost { .. } => Run::Lost,
                };
                (run, extent.blocks() - inside)
            }
        })
    }
}
