//! Reading: from folios, holes and the device. No lock is held while the device reads.

use crate::cache::copy::WAITS_MAX as WAITS_FOR_FRAMES;
use crate::cache::file_data::PagesShared;
use crate::cache::folio::{CHUNK_BYTES, FOLIO_BLOCKS, mask};
use crate::cache::frame::FOLIO_BYTES;
use crate::cache::frame::Frame;
use crate::cache::pages::{Known, Pages};
use crate::error::FsError;
use crate::extents::Mapping;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::inode::state_lock::Shared;
use crate::keys::BLOCK;
use crate::store::data_store::DataStore;
use crate::store::fetch::{DIRECT_BLOCKS, Fetched, Run, lacks, missing};
use ferry_device::AlignedBuf;
use parking_lot::RwLockWriteGuard;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_BYTES: usize = BLOCK as usize;
/// How often a read waits for others' reads of the same blocks before it reads for itself.
const WAITS_MAX: u32 = 4;

/// What becomes of blocks that a read brings from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misses {
    /// They are cached, if the read is not a large one.
    Cached,
    /// The reader has a cache of its own (`O_DIRECT`): they are not. It is answered from the cache
    /// where others have filled it, or dirtied it.
    Uncached,
}

/// What a copy out of memory lacks.
pub(super) enum Lack {
    Window(u64),
    /// Somebody copies into this frame.
    Busy(Arc<Frame>),
    Runs(Vec<Run>),
    /// This block can never be had.
    Lost(u64),
}

impl DataStore {
    /// Reads at `offset`; fewer bytes than asked only at the end of the file.
    pub fn read(&self, inode: &Arc<Inode>, offset: u64, out: &mut [u8]) -> Result<usize, FsError> {
        self.read_as(inode, offset, out, Misses::Cached)
    }

    /// The same, and what becomes of blocks that are not in memory.
    pub fn read_as(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        out: &mut [u8],
        misses: Misses,
    ) -> Result<usize, FsError> {
        #[cfg(feature = "compare")]
        let _compared = self.inode_locks.read(inode.ino);
        let mut done = 0;
        while done < out.len() {
            let want = (out.len() - done).min(CHUNK_BYTES);
            let (pos, chunk) = (offset + done as u64, &mut out[done..done + want]);
            let got = if self.read_free(inode, pos, chunk) {
                self.read_on(inode, pos, want, inode.file.readable.load(Ordering::Relaxed), false);
                want
            } else {
                self.read_chunk(inode, pos, chunk, misses)?
            };
            done += got;
            if got < want {
                break;
            }
        }
        // Only now: what was just read must not go before it was used.
        self.cache.shrink();
        Ok(done)
    }

    /// The same if all of it is in memory; otherwise `None`, and nothing was asked of the device.
    pub fn read_cached(&self, inode: &Arc<Inode>, offset: u64, out: &mut [u8]) -> Option<usize> {
        #[cfg(feature = "compare")]
        let _compared = self.inode_locks.read(inode.ino);
        if out.len() <= CHUNK_BYTES && self.read_free(inode, offset, out) {
            self.read_on(
                inode,
                offset,
                out.len(),
                inode.file.readable.load(Ordering::Relaxed),
                false,
            );
            return Some(out.len());
        }
        for waits in 0.. {
            let (state, pages) = steady(inode, waits);
            let size = state.rec.size;
            let len =
                out.len().min(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX));
            if len > CHUNK_BYTES {
                return None;
            }
            match copy_out(inode, &state, &pages, offset, &mut out[..len], &[]) {
                None => {
                    drop((state, pages));
                    self.read_on(inode, offset, len, size, false);
                    return Some(len);
                }
                Some(Lack::Busy(frame)) => {
                    drop((state, pages));
                    frame.wait();
                }
                Some(_) => return None,
            }
        }
        None
    }

    /// Reads whole blocks that stand together on the device and are in no memory, without a copy;
    /// `None`: the range is not of this kind.
    pub fn read_shared(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        len: usize,
    ) -> Result<Option<Arc<AlignedBuf>>, FsError> {
        let wanted = offset / BLOCK..(offset + len as u64) / BLOCK;
        let whole =
            offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK_BYTES) && len <= CHUNK_BYTES;
        if !whole
            || wanted.end - wanted.start < DIRECT_BLOCKS
            || inode.file.fetching.wait(wanted.start)
        {
            return Ok(None);
        }
        let Some(run) = single_run(inode, &wanted) else { return Ok(None) };
        let (dev, crcs) = (run.dev, run.crcs.clone());
        let mut fetched = self.fetch(inode, vec![run], &wanted)?;
        // Only if it is still what the file has there.
        let unchanged =
            single_run(inode, &wanted).is_some_and(|run| run.dev == dev && run.crcs == crcs);
        Ok(fetched.pop().filter(|f| unchanged && f.bad.is_empty()).map(|f| f.buf))
    }

    fn read_chunk(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        out: &mut [u8],
        misses: Misses,
    ) -> Result<usize, FsError> {
        let wanted = offset / BLOCK..(offset + out.len() as u64).div_ceil(BLOCK);
        let mut fetched: Vec<Fetched> = Vec::new();
        let (mut missed, mut waits, mut frame_waits) = (false, 0, 0);
        loop {
            let lack = {
                let (state, pages) = steady(inode, frame_waits);
                let size = state.rec.size;
                let len = out
                    .len()
                    .min(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX));
                match copy_out(inode, &state, &pages, offset, &mut out[..len], &fetched) {
                    None => {
                        drop((state, pages));
                        self.read_on(inode, offset, len, size, missed);
                        return Ok(len);
                    }
                    Some(lack) => lack,
                }
            };
            match lack {
                Lack::Window(window) => self.load_window(inode, window)?,
                Lack::Busy(frame) => {
                    frame_waits += 1;
                    frame.wait();
                }
                Lack::Lost(block) => return Err(self.lost(inode, block)),
                Lack::Runs(runs) => {
                    missed = true;
                    if waits < WAITS_MAX
                        && runs.first().is_some_and(|r| inode.file.fetching.wait(r.block))
                    {
                        waits += 1;
                        continue;
                    }
                    let new = self.fetch(inode, runs, &wanted)?;
                    if misses == Misses::Cached && wanted.end - wanted.start < DIRECT_BLOCKS {
                        self.fill(inode, &new);
                    }
                    fetched.extend(new);
                }
            }
        }
    }
}

/// The one run that makes up `blocks`, all inside the file, if there is one and nothing of it is in
/// memory.
fn single_run(inode: &Inode, blocks: &Range<u64>) -> Option<Run> {
    let mut runs = missing(inode, blocks).ok()?;
    let run = runs.pop().filter(|_| runs.is_empty())?;
    let all = run.block == blocks.start && run.crcs.len() as u64 == blocks.end - blocks.start;
    (all && blocks.end * BLOCK <= inode.state.share().rec.size).then_some(run)
}

/// The locks under which no write to the file begins. After waiting for `waits` frames in vain it
/// waits until no write is under way.
pub(super) fn steady(inode: &Inode, waits: u32) -> (Shared<'_>, PagesShared<'_>) {
    if waits < WAITS_FOR_FRAMES {
        return (inode.state.share(), inode.file.pages.read());
    }
    let state = inode.state.write();
    let pages = inode.file.pages.read();
    (state.map(RwLockWriteGuard::downgrade), pages)
}

/// Fills `out` from memory and from what was fetched, or says what it lacks. Under both locks no
/// write begins; the frame of one that has begun is waited for. So what it copies is the file as
/// it was at one time.
pub(super) fn copy_out(
    inode: &Inode,
    state: &InodeState,
    pages: &Pages,
    offset: u64,
    out: &mut [u8],
    fetched: &[Fetched],
) -> Option<Lack> {
    let readable = &inode.file.readable;
    if readable.load(Ordering::Relaxed) != state.rec.size
        && !inode.file.dead.load(Ordering::Acquire)
    {
        readable.store(state.rec.size, Ordering::Release);
    }
    let mut missing: Vec<Run> = Vec::new();
    let mut at = 0;
    while at < out.len() {
        let pos = offset + at as u64;
        let (index, inside) = (pos / FOLIO_BYTES as u64, (pos % FOLIO_BYTES as u64) as usize);
        let len = (out.len() - at).min(FOLIO_BYTES - inside);
        let chunk = &mut out[at..at + len];
        at += len;
        let blocks = mask(inside as u64 / BLOCK, ((inside + len) as u64).div_ceil(BLOCK));
        if let Some(folio) = pages.folio(index) {
            pages.note_use_of(folio);
            if folio.frame().is_changing() {
                return Some(Lack::Busy(Arc::clone(folio.frame())));
            }
            if folio.valid() & blocks == blocks {
                folio.get(inside, chunk);
                pages.show(folio, state.rec.size);
                continue;
            }
        }
        if let Err(lack) = copy_blocks(state, pages, pos, chunk, fetched, &mut missing) {
            return Some(lack);
        }
    }
    (!missing.is_empty()).then_some(Lack::Runs(missing))
}

/// The same, block by block, within one folio. Fails with the window that must be loaded, or a
/// block that is lost.
fn copy_blocks(
    state: &InodeState,
    pages: &Pages,
    pos: u64,
    out: &mut [u8],
    fetched: &[Fetched],
    missing: &mut Vec<Run>,
) -> Result<(), Lack> {
    let mut at = 0;
    while at < out.len() {
        let (block, inside) = ((pos + at as u64) / BLOCK, ((pos + at as u64) % BLOCK) as usize);
        let len = (out.len() - at).min(BLOCK_BYTES - inside);
        let chunk = &mut out[at..at + len];
        at += len;
        if pages.has(block) {
            if let Some(folio) = pages.folio(block / FOLIO_BLOCKS) {
                folio.get((block % FOLIO_BLOCKS) as usize * BLOCK_BYTES + inside, chunk);
            }
            continue;
        }
        if let Some(inline) = state.logged.inline.as_ref().filter(|_| block == 0) {
            let (held, behind) = chunk.split_at_mut(inline.len().saturating_sub(inside).min(len));
            if !held.is_empty() {
                held.copy_from_slice(&inline[inside..inside + held.len()]);
            }
            behind.fill(0);
            continue;
        }
        match pages.mapping(block, state.logged.blocks) {
            Known::Load(window) => return Err(Lack::Window(window)),
            Known::Is(Mapping::Lost) => return Err(Lack::Lost(block)),
            Known::Is(Mapping::Hole | Mapping::Unwritten) => chunk.fill(0),
            Known::Is(Mapping::Data(dev, crc)) => {
                match fetched.iter().find_map(|f| f.get(block, dev, crc)) {
                    Some(data) => chunk.copy_from_slice(&data[inside..inside + len]),
                    None => lacks(missing, block, dev, crc),
                }
            }
        }
    }
    Ok(())
}
