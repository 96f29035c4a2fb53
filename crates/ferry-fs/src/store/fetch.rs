//! Reading blocks from the device, with their checksums, and putting them into the cache.
//!
//! Each block is checked against its CRC32C when it comes from the device. A block that does not
//! match may still be on its way there (the cleaner's blocks are in no folio): that is waited for,
//! and it is read again. If it does not match then, it is looked up again, since it may have been
//! moved and its segment reused meanwhile. Only if it is still mapped there, it is damaged. What
//! was moved and did not arrive is read from where it was (`moves.rs`).

use crate::cache::folio::{CHUNK_BYTES, FOLIO_BLOCKS, mask};
use crate::cache::frame::Frame;
use crate::cache::pages::Known;
use crate::error::FsError;
use crate::extents::{Mapping, WINDOW_BLOCKS};
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::store::data_store::{DataStore, count};
use ferry_device::AlignedBuf;
use std::ops::Range;
use std::sync::Arc;

const BLOCK_BYTES: usize = BLOCK as usize;
/// Reads of at least so many blocks that miss the cache do not fill it.
pub(crate) const DIRECT_BLOCKS: u64 = 64;

/// What is said of a block that is not what was written.
pub(crate) const MISMATCH: &str = "its checksum does not match";

/// A block is looked for in so many of its old places, from one to the next.
pub(crate) const MOVES_MAX: u32 = 16;

/// What is said of a block that repair had to give up.
pub(crate) const LOST: &str = "its contents were lost to damage that was repaired";

/// Blocks that stand together in the file and on the device.
#[derive(Debug)]
pub(crate) struct Run {
    /// First block of the file.
    pub block: u64,
    /// First block on the device.
    pub dev: u64,
    /// What each must be.
    pub crcs: Vec<u32>,
}

/// A run that was read.
pub(crate) struct Fetched {
    pub(crate) run: Run,
    pub(crate) buf: Arc<AlignedBuf>,
    /// Blocks that may not be used: unreadable, or not what they should be.
    pub(crate) bad: Vec<u64>,
}

impl Fetched {
    /// Every block is what it should be.
    pub(crate) fn is_sound(&self) -> bool {
        let mut blocks = self.buf.chunks_exact(BLOCK_BYTES).zip(&self.run.crcs);
        self.bad.is_empty() && blocks.all(|(block, crc)| crc32c::crc32c(block) == *crc)
    }

    /// The block, if it was read from `dev` and is what should be there *now*: the place may have
    /// been used anew meanwhile.
    pub(crate) fn get(&self, block: u64, dev: u64, crc: u32) -> Option<&[u8]> {
        let at = block.checked_sub(self.run.block)?;
        let same = self.run.crcs.get(at as usize) == Some(&crc) && self.run.dev + at == dev;
        (same && !self.bad.contains(&block))
            .then(|| &self.buf[at as usize * BLOCK_BYTES..(at as usize + 1) * BLOCK_BYTES])
    }
}

impl DataStore {
    /// Reads runs from the device and checks them. Damage in `wanted` is an error; elsewhere the
    /// block is left out.
    pub(crate) fn fetch(
        &self,
        inode: &Arc<Inode>,
        runs: Vec<Run>,
        wanted: &Range<u64>,
    ) -> Result<Vec<Fetched>, FsError> {
        let mut all = Vec::with_capacity(runs.len());
        for run in runs {
            let mut buf = self.reads.buffer(run.crcs.len() * BLOCK_BYTES, CHUNK_BYTES);
            let bytes = Arc::get_mut(&mut buf).expect("just made or idle: ours alone");
            let mut bad = Vec::new();
            for (i, detail) in self.read_checked(run.dev, &run.crcs, bytes) {
                let (block, dev, crc) = (run.block + i as u64, run.dev + i as u64, run.crcs[i]);
                bad.push(block);
                if wanted.contains(&block) && self.still_there(inode, block, dev, crc)? {
                    return Err(self.damaged(inode, block, dev, detail));
                }
            }
            self.reads.keep(&buf, CHUNK_BYTES);
            all.push(Fetched { run, buf, bad });
        }
        Ok(all)
    }

    /// Reads blocks and checks them. Returns those that cannot be had, by position, with what is
    /// wrong.
    pub(crate) fn read_checked(
        &self,
        dev: u64,
        crcs: &[u32],
        buf: &mut AlignedBuf,
    ) -> Vec<(usize, String)> {
        count(&self.counters.read_bytes, buf.len() as u64);
        let whole = self.dev.read(dev * BLOCK, buf).is_ok();
        let mut bad = Vec::new();
        for (i, (out, &crc)) in buf.chunks_exact_mut(BLOCK_BYTES).zip(crcs).enumerate() {
            if !(whole && crc32c::crc32c(out) == crc)
                && let Err(detail) = self.read_again(dev + i as u64, crc, out)
            {
                bad.push((i, detail));
            }
        }
        bad
    }

    /// Reads one block again, alone, when nobody writes it any more; where it was before it was
    /// moved, too, as long as that counts. On a mismatch `out` is what the device has at `dev`.
    ///
    /// A thread that has a right to extents, or a batch that is not sent, asks only for what is
    /// mapped: the data of a mapped block is on its way already, and waits for nobody. Of any other
    /// place it might be their own batch, or one that waits for that right.
    pub(crate) fn read_again(&self, dev: u64, crc: u32, out: &mut [u8]) -> Result<(), String> {
        self.writes.wait_for(dev..dev + 1);
        let mut one = AlignedBuf::zeroed(BLOCK_BYTES);
        let what = match self.dev.read(dev * BLOCK, &mut one) {
            Ok(()) => {
                out.copy_from_slice(&one);
                if crc32c::crc32c(out) == crc {
                    return Ok(());
                }
                MISMATCH.to_owned()
            }
            Err(error) => format!("the device cannot read it: {error}"),
        };
        if self.dev.read_matching(dev * BLOCK, &mut one, &|bytes| crc32c::crc32c(bytes) == crc) {
            out.copy_from_slice(&one);
            return Ok(());
        }
        let mut location = dev;
        for _ in 0..MOVES_MAX {
            let Some(old) = self.moves.old_location(location) else { break };
            if self.dev.read(old * BLOCK, &mut one).is_ok() && crc32c::crc32c(&one) == crc {
                out.copy_from_slice(&one);
                return Ok(());
            }
            location = old;
        }
        Err(what)
    }

    pub(crate) fn still_there(
        &self,
        inode: &Arc<Inode>,
        block: u64,
        dev: u64,
        crc: u32,
    ) -> Result<bool, FsError> {
        loop {
            let known = {
                let state = inode.state.share();
                let pages = inode.file.pages.read();
                pages.mapping(block, state.logged.blocks)
            };
            match known {
                Known::Load(window) => self.load_window(inode, window)?,
                Known::Is(mapping) => return Ok(mapping == Mapping::Data(dev, crc)),
            }
        }
    }

    /// Reports a block that repair had to give up.
    pub(crate) fn lost(&self, inode: &Inode, block: u64) -> FsError {
        count(&self.counters.damaged_blocks, 1);
        let (ino, offset) = (inode.ino, block * BLOCK);
        let name = self.source().map(|s| s.name_hint(ino)).unwrap_or_default();
        tracing::warn!(inode = ino, name, offset, "{LOST}");
        FsError::Data { ino, offset, detail: LOST.to_owned() }
    }

    /// Reports a damaged block.
    pub(crate) fn damaged(&self, inode: &Inode, block: u64, dev: u64, detail: String) -> FsError {
        count(&self.counters.damaged_blocks, 1);
        let (ino, offset) = (inode.ino, block * BLOCK);
        let name = self.source().map(|s| s.name_hint(ino)).unwrap_or_default();
        tracing::error!(
            inode = ino,
            name,
            offset,
            device_offset = dev * BLOCK,
            "data is damaged: {detail}"
        );
        FsError::Data { ino, offset, detail }
    }

    /// Puts what was read into the cache, where it is still what the file has.
    pub(crate) fn fill(&self, inode: &Arc<Inode>, fetched: &[Fetched]) {
        while let Some(busy) = self.fill_idle(inode, fetched) {
            busy.wait();
        }
    }

    /// The same up to a frame that somebody copies into.
    pub(crate) fn fill_idle(&self, inode: &Arc<Inode>, fetched: &[Fetched]) -> Option<Arc<Frame>> {
        let state = inode.state.share();
        let mut pages = inode.file.pages.write();
        pages.attach(&self.cache, &inode.file.front);
        let mapped = state.logged.blocks;
        for f in fetched {
            for block in f.run.block..f.run.block + f.run.crcs.len() as u64 {
                let (index, bit) = (block / FOLIO_BLOCKS, block % FOLIO_BLOCKS);
                let Known::Is(Mapping::Data(dev, crc)) = pages.mapping(block, mapped) else {
                    continue;
                };
                let Some(data) = f.get(block, dev, crc).filter(|_| !pages.has(block)) else {
                    continue;
                };
                if let Some(busy) = pages.busy_frame(block) {
                    return Some(busy);
                }
                // Behind the end there are zeros, whatever the device has there.
                let inside = state.rec.size.saturating_sub(block * BLOCK).min(BLOCK) as usize;
                let (at, to) = (bit as usize * BLOCK_BYTES, bit as usize * BLOCK_BYTES + inside);
                pages.with_folio(index, |folio| {
                    folio.room(at, to.max(at + 1));
                    folio.put(at, &data[..inside]);
                    folio.validate(mask(bit, bit + 1));
                });
                pages.settle(inode, index);
            }
        }
        None
    }

    /// Brings one block into the cache. The caller shrinks the cache when it is done with the
    /// block.
    pub(crate) fn fetch_block(&self, inode: &Arc<Inode>, block: u64) -> Result<(), FsError> {
        let mapping = {
            let state = inode.state.share();
            let pages = inode.file.pages.read();
            pages.mapping(block, state.logged.blocks)
        };
        match mapping {
            Known::Load(window) => self.load_window(inode, window),
            Known::Is(Mapping::Data(dev, crc)) => {
                let run = Run { block, dev, crcs: vec![crc] };
                let fetched = self.fetch(inode, vec![run], &(block..block + 1))?;
                self.fill(inode, &fetched);
                Ok(())
            }
            Known::Is(Mapping::Lost) => Err(self.lost(inode, block)),
            Known::Is(Mapping::Hole | Mapping::Unwritten) => Ok(()),
        }
    }
}

/// Adds a block to the runs that must be read.
pub(crate) fn lacks(missing: &mut Vec<Run>, block: u64, dev: u64, crc: u32) {
    match missing.last_mut() {
        Some(run)
            if run.block + run.crcs.len() as u64 == block
                && run.dev + run.crcs.len() as u64 == dev
                && run.crcs.len() < WINDOW_BLOCKS as usize =>
        {
            run.crcs.push(crc);
        }
        _ => missing.push(Run { block, dev, crcs: vec![crc] }),
    }
}

/// Blocks of `chunk` that have data and are not in memory, or the window to load first.
pub(crate) fn missing(inode: &Inode, chunk: &Range<u64>) -> Result<Vec<Run>, u64> {
    let state = inode.state.share();
    let pages = inode.file.pages.read();
    let mut runs = Vec::new();
    for block in chunk.clone().filter(|b| !pages.has(*b)) {
        match pages.mapping(block, state.logged.blocks) {
            Known::Load(window) => return Err(window),
            Known::Is(Mapping::Data(dev, crc)) => lacks(&mut runs, block, dev, crc),
            Known::Is(_) => {}
        }
    }
    Ok(runs)
}
