//! Copies between the buffers of programs and frames.
//!
//! A range is cut into parts, one for each folio. A write makes room in all folios, begins, copies,
//! and finishes; a read without locks copies from frames that were steady meanwhile.

use crate::cache::eviction::{Cache, CachedFile};
use crate::cache::file_data::FileData;
use crate::cache::folio::{CHUNK_BYTES, mask};
use crate::cache::frame::{FOLIO_BYTES, Frame, copied};
use crate::cache::pages::{Pages, folios};
use crate::keys::BLOCK;
use ferry_env::planted::{Bug, is_planted};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most folios that a piece covers.
pub(crate) const FOLIOS_MAX: usize = CHUNK_BYTES / FOLIO_BYTES + 1;

/// How often a read tries without a lock.
pub(crate) const READ_TRIES: u32 = 3;

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

/// Makes room in all folios of a range; the frame that somebody copies into, if there is one.
pub(crate) fn make_room(
    pages: &mut Pages,
    file: &Arc<impl CachedFile>,
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
                settle(pages, file, offset, part.from);
                return Err(busy);
            }
        }
    }
    Ok(frames)
}

/// Room was made for nothing: what stays clean may be evicted.
pub(crate) fn settle(pages: &mut Pages, file: &Arc<impl CachedFile>, offset: u64, len: usize) {
    parts(offset, len).for_each(|part| pages.settle(file, part.index));
}

/// A write to a range begins: the blocks are valid and dirty from now on, and no reader takes them
/// before [`finish`]. Room is there, and nobody else changes these folios.
pub(crate) fn begin(pages: &mut Pages, mapped: u64, offset: u64, len: usize) {
    for part in parts(offset, len) {
        pages.with_folio(part.index, |folio| {
            folio.frame().begin();
            folio.validate(part.blocks());
        });
        pages.note_use(part.index);
        pages.mark_dirty(part.index, part.blocks(), mapped);
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
pub(crate) fn copy_free<const N: usize>(
    file: &FileData,
    cache: &Cache,
    offset: u64,
    out: &mut [u8],
) -> bool {
    let end = offset + out.len() as u64;
    let size = file.readable.load(Ordering::Acquire);
    if end > size {
        return false;
    }
    for _ in 0..READ_TRIES {
        let mut sampled = [const { None }; N];
        let mut steady = true;
        for (part, slot) in parts(offset, out.len()).zip(&mut sampled) {
            let frame = file.front.get(part.index, folios(size), &cache.tables);
            let Some(frame) = frame else { return false };
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
            cache.note_use(frame.node());
        }
        copied();
        // While the frames are still: the bytes are the file's only if they lay
        // inside its size.
        let inside = end <= file.readable.load(Ordering::Relaxed);
        let still = sampled.iter().flatten().all(|(frame, seq)| frame.is_still(*seq));
        if still || is_planted(Bug::UncheckedRead) {
            return inside;
        }
    }
    false
}
