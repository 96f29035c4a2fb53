//! Reading: from folios, holes and the device. No lock is held while the device reads.
//!
//! Each block is checked against its CRC32C when it comes from the device. A block that does not match is looked up again: it
//! may have been moved and its segment reused meanwhile. Only if it is still mapped there, it is damaged.

use super::extents::{Place, WINDOW_BLOCKS, Window};
use super::file::{Known, Pages, zero_tail};
use super::folio::{FOLIO_BLOCKS, FOLIO_BYTES, mask};
use super::{DataStore, PIECE, cache::Item, count};
use crate::error::FsError;
use crate::inode::{Inode, InodeState};
use crate::keys::BLOCK;
use ferry_device::AlignedBuf;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_BYTES: usize = BLOCK as usize;
/// Reads of at least so many blocks that miss the cache do not fill it.
const DIRECT_BLOCKS: u64 = 64;
/// Furthest that a sequential reader is read ahead, in blocks.
const READ_AHEAD_MAX: u32 = 128;

/// Blocks that stand together in the file and on the device.
#[derive(Debug)]
pub(super) struct Run {
    /// First block of the file.
    pub block: u64,
    /// First block on the device.
    pub dev: u64,
    /// What each must be.
    pub crcs: Vec<u32>,
}

/// A run that was read.
struct Fetched {
    run: Run,
    buf: Arc<AlignedBuf>,
    /// Blocks that may not be used: unreadable, or not what they should be.
    bad: Vec<u64>,
}

impl Fetched {
    fn get(&self, block: u64, dev: u64) -> Option<&[u8]> {
        let at = block.checked_sub(self.run.block)?;
        let here = at < self.run.crcs.len() as u64 && self.run.dev + at == dev && !self.bad.contains(&block);
        here.then(|| &self.buf[at as usize * BLOCK_BYTES..(at as usize + 1) * BLOCK_BYTES])
    }
}

/// What a copy out of memory lacks.
enum Lack {
    Window(u64),
    Runs(Vec<Run>),
}

impl DataStore {
    /// Reads at `offset`; fewer bytes than asked only at the end of the file.
    pub fn read(&self, inode: &Arc<Inode>, offset: u64, out: &mut [u8]) -> Result<usize, FsError> {
        let mut done = 0;
        while done < out.len() {
            let want = (out.len() - done).min(PIECE);
            let got = self.read_piece(inode, offset + done as u64, &mut out[done..done + want])?;
            done += got;
            if got < want {
                break;
            }
        }
        // Only now: what was just read must not go before it was used.
        self.cache.shrink();
        Ok(done)
    }

    fn read_piece(&self, inode: &Arc<Inode>, offset: u64, out: &mut [u8]) -> Result<usize, FsError> {
        let mut fetched: Vec<Fetched> = Vec::new();
        loop {
            let lack = {
                let state = inode.state.read();
                let len = out
                    .len()
                    .min(usize::try_from(state.rec.size.saturating_sub(offset)).unwrap_or(usize::MAX));
                let pages = inode.file.pages.read();
                match copy_out(&state, &pages, offset, &mut out[..len], &fetched) {
                    None => {
                        inode.file.read_end.store(offset + len as u64, Ordering::Relaxed);
                        return Ok(len);
                    }
                    Some(Lack::Runs(mut runs)) => {
                        let wanted = offset / BLOCK..(offset + len as u64).div_ceil(BLOCK);
                        self.extend(inode, &state, &pages, &wanted, offset, &mut runs);
                        Lack::Runs(runs)
                    }
                    Some(lack) => lack,
                }
            };
            match lack {
                Lack::Window(window) => self.load_window(inode, window)?,
                Lack::Runs(runs) => {
                    let wanted = offset / BLOCK..(offset + out.len() as u64).div_ceil(BLOCK);
                    let new = self.fetch(inode, runs, &wanted)?;
                    if wanted.end - wanted.start < DIRECT_BLOCKS {
                        self.fill(inode, &new);
                    }
                    fetched.extend(new);
                }
            }
        }
    }

    /// Reads further than asked for, when the file is read from front to back in small steps.
    fn extend(
        &self,
        inode: &Inode,
        state: &InodeState,
        pages: &Pages,
        wanted: &Range<u64>,
        offset: u64,
        runs: &mut [Run],
    ) {
        let (len, file) = (wanted.end - wanted.start, &inode.file);
        if len >= DIRECT_BLOCKS || file.read_end.load(Ordering::Relaxed) != offset {
            file.read_ahead.store(0, Ordering::Relaxed);
            return;
        }
        let ahead = (file.read_ahead.load(Ordering::Relaxed) * 2).clamp(8, READ_AHEAD_MAX);
        file.read_ahead.store(ahead, Ordering::Relaxed);
        let Some(run) = runs.last_mut() else { return };
        let end = state.rec.size.div_ceil(BLOCK).min(wanted.end + u64::from(ahead));
        for block in run.block + run.crcs.len() as u64..end {
            match pages.place(block, state.logged.blocks) {
                Known::Is(Place::Data(dev, crc))
                    if dev == run.dev + run.crcs.len() as u64 && !pages.has(block) =>
                {
                    run.crcs.push(crc);
                }
                _ => return,
            }
        }
    }

    /// Reads runs from the device and checks them. Damage in `wanted` is an error; elsewhere the block is left out.
    fn fetch(
        &self,
        inode: &Arc<Inode>,
        runs: Vec<Run>,
        wanted: &Range<u64>,
    ) -> Result<Vec<Fetched>, FsError> {
        let mut all = Vec::with_capacity(runs.len());
        for run in runs {
            let mut buf = self.reads.buffer(run.crcs.len() * BLOCK_BYTES, PIECE);
            let bytes = Arc::get_mut(&mut buf).expect("just made or idle: ours alone");
            let failed = self.read_blocks(run.dev, bytes);
            count(&self.counters.read_bytes, bytes.len() as u64);
            let mut bad = Vec::new();
            for (i, (&crc, data)) in run.crcs.iter().zip(bytes.chunks_exact(BLOCK_BYTES)).enumerate() {
                let block = run.block + i as u64;
                let detail = match failed.iter().find(|(at, _)| *at == i) {
                    Some((_, error)) => format!("the device cannot read it: {error}"),
                    None if crc32c::crc32c(data) == crc => continue,
                    None => "its checksum does not match".to_owned(),
                };
                bad.push(block);
                if wanted.contains(&block) && self.still_there(inode, block, run.dev + i as u64)? {
                    return Err(self.damaged(inode, block, run.dev + i as u64, detail));
                }
            }
            self.reads.keep(&buf, PIECE);
            all.push(Fetched { run, buf, bad });
        }
        Ok(all)
    }

    /// Reads blocks; if that fails, one by one. Returns those that failed, by position.
    pub(super) fn read_blocks(&self, dev: u64, buf: &mut AlignedBuf) -> Vec<(usize, std::io::Error)> {
        match self.dev.read(dev * BLOCK, buf) {
            Ok(()) => Vec::new(),
            Err(error) if buf.len() == BLOCK_BYTES => vec![(0, error)],
            Err(_) => {
                let mut one = AlignedBuf::zeroed(BLOCK_BYTES);
                let blocks = buf.chunks_exact_mut(BLOCK_BYTES).enumerate();
                let read =
                    |(i, out): (usize, &mut [u8])| match self.dev.read((dev + i as u64) * BLOCK, &mut one) {
                        Ok(()) => {
                            out.copy_from_slice(&one);
                            None
                        }
                        Err(error) => Some((i, error)),
                    };
                blocks.filter_map(read).collect()
            }
        }
    }

    fn still_there(&self, inode: &Arc<Inode>, block: u64, dev: u64) -> Result<bool, FsError> {
        loop {
            let known = {
                let state = inode.state.read();
                let pages = inode.file.pages.read();
                pages.place(block, state.logged.blocks)
            };
            match known {
                Known::Load(window) => self.load_window(inode, window)?,
                Known::Is(place) => return Ok(matches!(place, Place::Data(d, _) if d == dev)),
            }
        }
    }

    /// Reports a damaged block.
    pub(super) fn damaged(&self, inode: &Inode, block: u64, dev: u64, detail: String) -> FsError {
        count(&self.counters.damaged_blocks, 1);
        let (ino, offset) = (inode.ino, block * BLOCK);
        let name = self.source().map(|s| s.name_hint(ino)).unwrap_or_default();
        tracing::error!(inode = ino, name, offset, device_offset = dev * BLOCK, "data is damaged: {detail}");
        FsError::Data { ino, offset, detail }
    }

    /// Puts what was read into the cache, where it is still what the file has.
    fn fill(&self, inode: &Arc<Inode>, fetched: &[Fetched]) {
        let state = inode.state.read();
        let mut pages = inode.file.pages.write();
        pages.attach(&self.cache);
        let mapped = state.logged.blocks;
        for f in fetched {
            for block in f.run.block..f.run.block + f.run.crcs.len() as u64 {
                let (index, bit) = (block / FOLIO_BLOCKS, block % FOLIO_BLOCKS);
                let Known::Is(Place::Data(dev, _)) = pages.place(block, mapped) else { continue };
                let Some(data) = f.get(block, dev).filter(|_| !pages.has(block)) else { continue };
                pages.with_folio(index, |folio| {
                    folio.put(bit as usize * BLOCK_BYTES, data);
                    folio.valid |= mask(bit, bit + 1);
                });
                pages.settle(inode, index);
            }
        }
        zero_tail(&mut pages, state.rec.size);
    }

    /// Brings one block into the cache. The caller shrinks the cache when it is done with the block.
    pub(super) fn fetch_block(&self, inode: &Arc<Inode>, block: u64) -> Result<(), FsError> {
        let place = {
            let state = inode.state.read();
            let pages = inode.file.pages.read();
            pages.place(block, state.logged.blocks)
        };
        match place {
            Known::Load(window) => self.load_window(inode, window),
            Known::Is(Place::Data(dev, crc)) => {
                let run = Run { block, dev, crcs: vec![crc] };
                let fetched = self.fetch(inode, vec![run], &(block..block + 1))?;
                self.fill(inode, &fetched);
                Ok(())
            }
            Known::Is(_) => Ok(()),
        }
    }

    /// Loads a window of the extent map.
    pub(super) fn load_window(&self, inode: &Arc<Inode>, index: u64) -> Result<(), FsError> {
        loop {
            let version = inode.file.pages.read().map_version;
            let window = Window::load(&*self.journal()?, inode.ino, index)?;
            let mut pages = inode.file.pages.write();
            if pages.map_version == version {
                pages.attach(&self.cache);
                if pages.set_window(index, Arc::new(window)) {
                    self.cache.enter(inode, Item::Window(index));
                }
                return Ok(());
            }
        }
    }
}

/// Fills `out` from memory and from what was fetched, or says what it lacks.
fn copy_out(
    state: &InodeState,
    pages: &Pages,
    offset: u64,
    out: &mut [u8],
    fetched: &[Fetched],
) -> Option<Lack> {
    let mut missing: Vec<Run> = Vec::new();
    let mut at = 0;
    while at < out.len() {
        let pos = offset + at as u64;
        let (index, inside) = (pos / FOLIO_BYTES as u64, (pos % FOLIO_BYTES as u64) as usize);
        let len = (out.len() - at).min(FOLIO_BYTES - inside);
        let piece = &mut out[at..at + len];
        at += len;
        let blocks = mask(inside as u64 / BLOCK, ((inside + len) as u64).div_ceil(BLOCK));
        if let Some(folio) = pages.folio(index) {
            folio.used();
            if folio.valid & blocks == blocks {
                folio.get(inside, piece);
                continue;
            }
        }
        if let Err(window) = copy_blocks(state, pages, pos, piece, fetched, &mut missing) {
            return Some(Lack::Window(window));
        }
    }
    (!missing.is_empty()).then_some(Lack::Runs(missing))
}

/// The same, block by block, within one folio. Fails with the window that must be loaded.
fn copy_blocks(
    state: &InodeState,
    pages: &Pages,
    pos: u64,
    out: &mut [u8],
    fetched: &[Fetched],
    missing: &mut Vec<Run>,
) -> Result<(), u64> {
    let mut at = 0;
    while at < out.len() {
        let (block, inside) = ((pos + at as u64) / BLOCK, ((pos + at as u64) % BLOCK) as usize);
        let len = (out.len() - at).min(BLOCK_BYTES - inside);
        let piece = &mut out[at..at + len];
        at += len;
        if pages.has(block) {
            if let Some(folio) = pages.folio(block / FOLIO_BLOCKS) {
                folio.get((block % FOLIO_BLOCKS) as usize * BLOCK_BYTES + inside, piece);
            }
            continue;
        }
        if let Some(inline) = state.logged.inline.as_ref().filter(|_| block == 0) {
            let (held, behind) = piece.split_at_mut(inline.len().saturating_sub(inside).min(len));
            if !held.is_empty() {
                held.copy_from_slice(&inline[inside..inside + held.len()]);
            }
            behind.fill(0);
            continue;
        }
        match pages.place(block, state.logged.blocks) {
            Known::Load(window) => return Err(window),
            Known::Is(Place::Hole | Place::Reserved) => piece.fill(0),
            Known::Is(Place::Data(dev, crc)) => match fetched.iter().find_map(|f| f.get(block, dev)) {
                Some(data) => piece.copy_from_slice(&data[inside..inside + len]),
                None => lacks(missing, block, dev, crc),
            },
        }
    }
    Ok(())
}

/// Adds a block to the runs that must be read.
fn lacks(missing: &mut Vec<Run>, block: u64, dev: u64, crc: u32) {
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
