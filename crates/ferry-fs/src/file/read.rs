//! Reading: from folios, holes and the device. No lock is held while the device reads.
//!
//! Each block is checked against its CRC32C when it comes from the device. A block that does not
//! match may still be on its way there (the cleaner's blocks are in no folio): that is waited for,
//! and it is read again. If it does not match then, it is looked up again, since it may have been
//! moved and its segment reused meanwhile. Only if it is still mapped there, it is damaged. What
//! was moved and did not arrive is read from where it was (`moved.rs`).

use crate::cache::file_data::{Known, Pages, PagesShared};
use crate::cache::folio::{FOLIO_BLOCKS, FOLIO_BYTES, mask};
use crate::cache::frame::Frame;
use crate::error::FsError;
use crate::extents::{Place, WINDOW_BLOCKS, Window};
use crate::file::ahead::missing;
use crate::file::share::{WAITS_MAX as WAITS_FOR_FRAMES, busy_frame};
use crate::inode::incore::{Inode, InodeState};
use crate::inode::state_lock::Shared;
use crate::keys::BLOCK;
use crate::store::data_store::{DataStore, PIECE, count};
use ferry_device::AlignedBuf;
use parking_lot::RwLockWriteGuard;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_BYTES: usize = BLOCK as usize;
/// Reads of at least so many blocks that miss the cache do not fill it.
pub(crate) const DIRECT_BLOCKS: u64 = 64;
/// What is said of a block that is not what was written.
pub(crate) const MISMATCH: &str = "its checksum does not match";
/// How often a read waits for others' reads of the same blocks before it reads for itself.
const WAITS_MAX: u32 = 4;
/// A block is looked for in so many of its old places, from one to the next.
const MOVES_MAX: u32 = 16;
/// What is said of a block that repair had to give up.
const LOST: &str = "its contents were lost to damage that was repaired";

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
    run: Run,
    buf: Arc<AlignedBuf>,
    /// Blocks that may not be used: unreadable, or not what they should be.
    bad: Vec<u64>,
}

impl Fetched {
    /// The block, if it was read from `dev` and is what should be there *now*: the place may have
    /// been used anew meanwhile.
    fn get(&self, block: u64, dev: u64, crc: u32) -> Option<&[u8]> {
        let at = block.checked_sub(self.run.block)?;
        let same = self.run.crcs.get(at as usize) == Some(&crc) && self.run.dev + at == dev;
        (same && !self.bad.contains(&block))
            .then(|| &self.buf[at as usize * BLOCK_BYTES..(at as usize + 1) * BLOCK_BYTES])
    }
}

/// What a copy out of memory lacks.
enum Lack {
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
        #[cfg(feature = "compare")]
        let _compared = self.inode_locks.read(inode.ino);
        let mut done = 0;
        while done < out.len() {
            let want = (out.len() - done).min(PIECE);
            let (pos, piece) = (offset + done as u64, &mut out[done..done + want]);
            let got = if self.read_free(inode, pos, piece) {
                self.read_on(inode, pos, want, inode.file.readable.load(Ordering::Relaxed), false);
                want
            } else {
                self.read_piece(inode, pos, piece)?
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
        if out.len() <= PIECE && self.read_free(inode, offset, out) {
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
            if len > PIECE {
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
        let whole = offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK_BYTES) && len <= PIECE;
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

    fn read_piece(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        out: &mut [u8],
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
                    if wanted.end - wanted.start < DIRECT_BLOCKS {
                        self.fill(inode, &new);
                    }
                    fetched.extend(new);
                }
            }
        }
    }

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
            let mut buf = self.reads.buffer(run.crcs.len() * BLOCK_BYTES, PIECE);
            let bytes = Arc::get_mut(&mut buf).expect("just made or idle: ours alone");
            let mut bad = Vec::new();
            for (i, detail) in self.read_checked(run.dev, &run.crcs, bytes) {
                let (block, dev, crc) = (run.block + i as u64, run.dev + i as u64, run.crcs[i]);
                bad.push(block);
                if wanted.contains(&block) && self.still_there(inode, block, dev, crc)? {
                    return Err(self.damaged(inode, block, dev, detail));
                }
            }
            self.reads.keep(&buf, PIECE);
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
    /// Whoever has a right to extents, or a batch that is not sent, asks only for what is mapped:
    /// the data of a mapped block is on its way already, and waits for nobody. Of any other place
    /// it might be their own batch, or one that waits for that right.
    fn read_again(&self, dev: u64, crc: u32, out: &mut [u8]) -> Result<(), String> {
        self.traffic.wait_for(dev..dev + 1);
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
        let mut place = dev;
        for _ in 0..MOVES_MAX {
            let Some(old) = self.moves.old_place(place) else { break };
            if self.dev.read(old * BLOCK, &mut one).is_ok() && crc32c::crc32c(&one) == crc {
                out.copy_from_slice(&one);
                return Ok(());
            }
            place = old;
        }
        Err(what)
    }

    fn still_there(
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
                pages.place(block, state.logged.blocks)
            };
            match known {
                Known::Load(window) => self.load_window(inode, window)?,
                Known::Is(place) => return Ok(place == Place::Data(dev, crc)),
            }
        }
    }

    /// Reports a block that repair had to give up.
    fn lost(&self, inode: &Inode, block: u64) -> FsError {
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
    fn fill_idle(&self, inode: &Arc<Inode>, fetched: &[Fetched]) -> Option<Arc<Frame>> {
        let state = inode.state.share();
        let mut pages = inode.file.pages.write();
        pages.attach(&self.cache, &inode.file);
        let mapped = state.logged.blocks;
        for f in fetched {
            for block in f.run.block..f.run.block + f.run.crcs.len() as u64 {
                let (index, bit) = (block / FOLIO_BLOCKS, block % FOLIO_BLOCKS);
                let Known::Is(Place::Data(dev, crc)) = pages.place(block, mapped) else { continue };
                let Some(data) = f.get(block, dev, crc).filter(|_| !pages.has(block)) else {
                    continue;
                };
                if let Some(busy) = busy_frame(&pages, block) {
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
        let place = {
            let state = inode.state.share();
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
            Known::Is(Place::Lost) => Err(self.lost(inode, block)),
            Known::Is(Place::Hole | Place::Reserved) => Ok(()),
        }
    }

    /// Loads a window of the extent map.
    pub(crate) fn load_window(&self, inode: &Arc<Inode>, index: u64) -> Result<(), FsError> {
        loop {
            let version = inode.file.pages.read().map_version;
            let window = Window::load(&*self.journal()?, inode.ino, index)?;
            let mut pages = inode.file.pages.write();
            if pages.map_version == version {
                pages.attach(&self.cache, &inode.file);
                pages.set_window(inode, index, Arc::new(window));
                return Ok(());
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
fn steady(inode: &Inode, waits: u32) -> (Shared<'_>, PagesShared<'_>) {
    if waits < WAITS_FOR_FRAMES {
        return (inode.state.share(), inode.file.pages.read());
    }
    let state = inode.state.write();
    let pages = inode.file.pages.read();
    (state.map(RwLockWriteGuard::downgrade), pages)
}

/// Fills `out` from memory and from what was fetched, or says what it lacks. Under both locks no
/// write begins; the frame of one that has begun is waited for. So what it copies is the file of
/// one moment.
fn copy_out(
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
        let piece = &mut out[at..at + len];
        at += len;
        let blocks = mask(inside as u64 / BLOCK, ((inside + len) as u64).div_ceil(BLOCK));
        if let Some(folio) = pages.folio(index) {
            folio.used();
            if folio.frame().is_changing() {
                return Some(Lack::Busy(Arc::clone(folio.frame())));
            }
            if folio.valid() & blocks == blocks {
                folio.get(inside, piece);
                pages.show(folio, state.rec.size);
                continue;
            }
        }
        if let Err(lack) = copy_blocks(state, pages, pos, piece, fetched, &mut missing) {
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
            Known::Load(window) => return Err(Lack::Window(window)),
            Known::Is(Place::Lost) => return Err(Lack::Lost(block)),
            Known::Is(Place::Hole | Place::Reserved) => piece.fill(0),
            Known::Is(Place::Data(dev, crc)) => {
                match fetched.iter().find_map(|f| f.get(block, dev, crc)) {
                    Some(data) => piece.copy_from_slice(&data[inside..inside + len]),
                    None => lacks(missing, block, dev, crc),
                }
            }
        }
    }
    Ok(())
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
