//! Reads and writes that exclude only who touches the same bytes.
//!
//! A read of what is in memory takes no lock at all: it copies from frames and looks whether they
//! were steady meanwhile. A write inside the file's size shares the inode lock; the page lock it
//! holds only while it looks up and marks, not while it copies. Whatever does not fit (holes,
//! contents in the record, growth) is left to the exclusive path, which also helps who comes to
//! nothing here.

use crate::cache::file_data::{FileData, Pages, folios};
use crate::cache::folio::{FOLIO_BLOCKS, FOLIO_BYTES, mask};
use crate::cache::frame::{Frame, copied};
use crate::error::FsError;
use crate::file::write::{Plan, Ready, dirty_blocks, prepare};
use crate::inode::incore::Inode;
use crate::keys::{BLOCK, INLINE_MAX};
use crate::space::free_blocks::{Claim, Purse, Want};
use crate::space::pool::Space;
use crate::store::data_store::{DataStore, PIECE, Touch};
use crate::writeback::write_back::Busy;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most folios that a piece covers.
const FOLIOS_MAX: usize = PIECE / FOLIO_BYTES + 1;
/// How often a read tries without a lock.
const READ_TRIES: u32 = 3;
/// How often a read or write waits for a folio before it takes the inode lock exclusively.
pub(crate) const WAITS_MAX: u32 = 4;

/// A part of a range that lies in one folio.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// Number of the folio.
    pub index: u64,
    /// Where it begins within the folio.
    pub at: usize,
    /// Where it begins within the range.
    pub from: usize,
    /// Its bytes.
    pub len: usize,
}

impl Part {
    /// The blocks of the folio that it touches.
    pub fn blocks(&self) -> u16 {
        mask(self.at as u64 / BLOCK, ((self.at + self.len) as u64).div_ceil(BLOCK))
    }
}

/// Cuts `len` bytes at `offset` into parts of folios, in ascending order.
pub(crate) fn parts(offset: u64, len: usize) -> impl Iterator<Item = Part> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let pos = offset + from as u64;
        let at = (pos % FOLIO_BYTES as u64) as usize;
        let part = Part {
            index: pos / FOLIO_BYTES as u64,
            at,
            from,
            len: (len - from).min(FOLIO_BYTES - at),
        };
        from += part.len;
        (part.len > 0).then_some(part)
    })
}

/// What a try to write under the shared lock came to.
enum Try {
    /// All is written.
    Done,
    /// Somebody copies into this frame.
    Busy(Arc<Frame>),
    /// A window of the extent map is not loaded.
    Load(u64),
    /// A block of the file must be read first.
    Fetch(u64),
    /// So much space is lacking.
    Space(Want),
    /// It needs the exclusive lock.
    Exclusive,
}

impl DataStore {
    /// Reads from memory without a lock; `false`: something is not in memory, not known, or does
    /// not come to rest.
    pub(crate) fn read_free(&self, inode: &Arc<Inode>, offset: u64, out: &mut [u8]) -> bool {
        #[cfg(feature = "compare")]
        if !self.options.locking.reads_free() {
            return false;
        }
        if out.is_empty() {
            return false;
        }
        let last = (offset + out.len() as u64 - 1) / FOLIO_BYTES as u64;
        match last - offset / FOLIO_BYTES as u64 + 1 {
            1 => copy_free::<1>(&inode.file, offset, out),
            2 => copy_free::<2>(&inode.file, offset, out),
            _ => copy_free::<FOLIOS_MAX>(&inode.file, offset, out),
        }
    }

    /// Writes up to 1 MiB at `offset` under the shared inode lock; `false`: this takes the
    /// exclusive one.
    pub(crate) fn write_shared(
        &self,
        busy: Busy,
        purse: &Option<Arc<Purse>>,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[u8],
        touch: &Touch<'_>,
    ) -> Result<bool, FsError> {
        #[cfg(feature = "compare")]
        if !self.options.locking.shares(parts(offset, data.len()).count()) {
            return Ok(false);
        }
        let (mut waits, mut claim) = (0, self.space.claim_from(purse.clone()));
        while waits < WAITS_MAX {
            match self.try_shared(inode, offset, data, touch, &mut claim) {
                Try::Done => return Ok(true),
                Try::Exclusive => return Ok(false),
                Try::Load(window) => self.load_window(inode, window)?,
                Try::Fetch(block) => self.fetch_block(inode, block)?,
                Try::Space(want) => self.find_space_or_refuse(busy, want, &mut claim)?,
                Try::Busy(frame) => {
                    waits += 1;
                    frame.wait();
                }
            }
        }
        Ok(false)
    }

    fn try_shared(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[u8],
        touch: &Touch<'_>,
        claim: &mut Claim<'_>,
    ) -> Try {
        let state = inode.state.share();
        let end = offset + data.len() as u64;
        let plain = state.rec.size > INLINE_MAX as u64 && state.logged.inline.is_none();
        if end > state.rec.size || !plain || inode.file.dead.load(Ordering::Acquire) {
            return Try::Exclusive;
        }
        let mut pages = inode.file.pages.write();
        pages.attach(&self.cache, &inode.file);
        let plan = match prepare(&state, &pages, offset..end) {
            Ready::Yes(plan) => plan,
            Ready::Load(window) => return Try::Load(window),
            Ready::Fetch(block) => return Try::Fetch(block),
        };
        if pages.inline_taken || plan.needs_exclusive() {
            return Try::Exclusive;
        }
        let frames = match make_room(&mut pages, inode, offset, data.len()) {
            Ok(frames) => frames,
            Err(frame) => return Try::Busy(frame),
        };
        let reserved: Vec<_> = frames.iter().map_while(|frame| frame.reserve()).collect();
        if let Some(busy) = frames.get(reserved.len()) {
            settle(&mut pages, inode, offset, data.len());
            return Try::Busy(Arc::clone(busy));
        }
        let want = plan.wants(&self.space);
        if !claim.take(want) {
            settle(&mut pages, inode, offset, data.len());
            return Try::Space(want);
        }
        begin(&mut pages, state.logged.blocks, offset, data.len());
        inode.file.set_hint(pages.dirty_blocks);
        drop(pages);
        fill_in(&frames, offset, data);
        finish(&frames);
        match touch {
            Touch::Times(now) => inode.state.note_write(*now),
            Touch::Exactly(now) => inode.state.note_write_exactly(*now),
            Touch::Nothing | Touch::Edit(_) => {}
        }
        self.mark_dirty(inode);
        Try::Done
    }
}

/// Makes room in all folios of a range; the frame that somebody copies into, if there is one.
fn make_room(
    pages: &mut Pages,
    inode: &Arc<Inode>,
    offset: u64,
    len: usize,
) -> Result<Vec<Arc<Frame>>, Arc<Frame>> {
    let mut frames = Vec::with_capacity(len / FOLIO_BYTES + 2);
    for part in parts(offset, len) {
        let frame = pages.with_folio(part.index, |folio| {
            if folio.frame().is_changing() {
                return Err(Arc::clone(folio.frame()));
            }
            folio.room(part.at, part.at + part.len);
            Ok(Arc::clone(folio.frame()))
        });
        match frame {
            Ok(frame) => frames.push(frame),
            Err(busy) => {
                settle(pages, inode, offset, part.from);
                return Err(busy);
            }
        }
    }
    Ok(frames)
}

/// Room was made for nothing: what stays clean may be evicted.
fn settle(pages: &mut Pages, inode: &Arc<Inode>, offset: u64, len: usize) {
    parts(offset, len).for_each(|part| pages.settle(inode, part.index));
}

/// A write to a range begins: the blocks are valid and dirty from now on, and no reader takes them
/// before [`finish`]. Room is there, and nobody else changes these folios.
pub(crate) fn begin(pages: &mut Pages, mapped: u64, offset: u64, len: usize) {
    for part in parts(offset, len) {
        pages.with_folio(part.index, |folio| {
            folio.frame().begin();
            folio.validate(part.blocks());
        });
        dirty_blocks(pages, part.index, part.blocks(), mapped);
    }
}

/// Copies the bytes of a write that has begun.
pub(crate) fn fill_in(frames: &[Arc<Frame>], offset: u64, data: &[u8]) {
    for (part, frame) in parts(offset, data.len()).zip(frames) {
        frame.copy_in(part.at, &data[part.from..part.from + part.len]);
    }
}

/// All bytes of a write are there.
pub(crate) fn finish(frames: &[Arc<Frame>]) {
    frames.iter().for_each(|frame| frame.end());
}

/// Reads from at most `N` frames that are steady; all or nothing.
fn copy_free<const N: usize>(file: &FileData, offset: u64, out: &mut [u8]) -> bool {
    let end = offset + out.len() as u64;
    let size = file.readable.load(Ordering::Acquire);
    if end > size {
        return false;
    }
    for _ in 0..READ_TRIES {
        let mut sampled = [const { None }; N];
        let mut steady = true;
        for (part, slot) in parts(offset, out.len()).zip(&mut sampled) {
            let Some(frame) = file.front.get(part.index, folios(size)) else { return false };
            let Some(seq) = frame.sample() else {
                steady = false;
                break;
            };
            if frame.valid() & part.blocks() != part.blocks() {
                return false;
            }
            *slot = Some((frame, seq));
        }
        if !steady {
            std::hint::spin_loop();
            continue;
        }
        for (part, (frame, _)) in parts(offset, out.len()).zip(sampled.iter().flatten()) {
            frame.copy_out(part.at, &mut out[part.from..part.from + part.len]);
            frame.note_use();
        }
        copied();
        // While the frames are still: the bytes were the file's at this moment only if they lay
        // inside its size.
        let inside = end <= file.readable.load(Ordering::Relaxed);
        let still = sampled.iter().flatten().all(|(frame, seq)| frame.is_still(*seq));
        #[cfg(feature = "planted")]
        let still = still || ferry_journal::planted::is(ferry_journal::planted::Bug::UncheckedRead);
        if still {
            return inside;
        }
    }
    false
}

impl Plan {
    /// It changes more than the blocks that it writes, or counts that the exclusive lock keeps.
    fn needs_exclusive(&self) -> bool {
        self.fills_hole || !self.extra.is_empty()
    }

    /// The space that it takes.
    pub fn wants(&self, space: &Space) -> Want {
        let overwrites = !self.needs_exclusive();
        if overwrites { space.overwriting(self.need) } else { Want::new(self.need) }
    }
}

/// The frame of this block, if somebody copies into it.
pub(crate) fn busy_frame(pages: &Pages, block: u64) -> Option<Arc<Frame>> {
    let frame = pages.folio(block / FOLIO_BLOCKS)?.frame();
    frame.is_changing().then(|| Arc::clone(frame))
}
