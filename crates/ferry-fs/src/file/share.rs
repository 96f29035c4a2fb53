//! Reads and writes that exclude only those of the same bytes.
//!
//! A read of what is in memory takes no lock at all: it copies from frames and looks whether they
//! were steady meanwhile. A write inside the file's size shares the inode lock; the page lock it
//! holds only while it looks up and marks, not while it copies. Whatever does not fit (holes,
//! contents in the record, growth) is left to the exclusive path, which also serves an attempt
//! that fails here.

#[cfg(feature = "compare")]
use crate::cache::copy::parts;
use crate::cache::copy::{
    FOLIOS_MAX, WAITS_MAX, begin, copy_free, fill_in, finish, make_room, settle,
};
use crate::cache::frame::FOLIO_BYTES;
use crate::cache::frame::Frame;
use crate::error::FsError;
use crate::file::plan::{Needs, prepare};
use crate::inode::incore::Inode;
use crate::keys::INLINE_MAX;
use crate::space::free_blocks::{Claim, ReservedSpace};
use crate::store::data_store::{Busy, DataStore, Touch};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How an attempt to write under the shared lock ended.
enum Attempt {
    /// All is written.
    Done,
    /// A thread copies into this frame.
    Busy(Arc<Frame>),
    /// The write needs the exclusive lock.
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
            1 => copy_free::<1>(&inode.file, &self.cache, offset, out),
            2 => copy_free::<2>(&inode.file, &self.cache, offset, out),
            _ => copy_free::<FOLIOS_MAX>(&inode.file, &self.cache, offset, out),
        }
    }

    /// Writes up to 1 MiB at `offset` under the shared inode lock; `false`: this takes the
    /// exclusive one.
    pub(crate) fn write_shared(
        &self,
        busy: Busy,
        reserved_space: &Option<Arc<ReservedSpace>>,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[u8],
        touch: &Touch<'_>,
    ) -> Result<bool, FsError> {
        #[cfg(feature = "compare")]
        if !self.options.locking.shares(parts(offset, data.len()).count()) {
            return Ok(false);
        }
        let (mut waits, mut claim) = (0, self.space.claim_from(reserved_space.clone()));
        while waits < WAITS_MAX {
            let attempt = self.change_contents(inode, busy, &mut claim, |claim| {
                self.try_shared(inode, offset, data, touch, claim)
            })?;
            match attempt {
                Attempt::Done => return Ok(true),
                Attempt::Exclusive => return Ok(false),
                Attempt::Busy(frame) => {
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
    ) -> Result<Attempt, Needs> {
        let state = inode.state.share();
        let end = offset + data.len() as u64;
        let plain = state.rec.size > INLINE_MAX as u64 && state.logged.inline.is_none();
        if end > state.rec.size || !plain || inode.file.dead.load(Ordering::Acquire) {
            return Ok(Attempt::Exclusive);
        }
        let mut pages = inode.file.pages.write();
        pages.attach(&self.cache, &inode.file.front);
        let plan = prepare(&state, &pages, offset..end)?;
        if pages.inline_taken || plan.needs_exclusive() {
            return Ok(Attempt::Exclusive);
        }
        let frames = match make_room(&mut pages, inode, offset, data.len()) {
            Ok(frames) => frames,
            Err(frame) => return Ok(Attempt::Busy(frame)),
        };
        let reserved: Vec<_> = frames.iter().map_while(|frame| frame.reserve()).collect();
        if let Some(busy) = frames.get(reserved.len()) {
            settle(&mut pages, inode, offset, data.len());
            return Ok(Attempt::Busy(Arc::clone(busy)));
        }
        let want = plan.wants(&self.space);
        if !claim.take(want) {
            settle(&mut pages, inode, offset, data.len());
            return Err(Needs::Space(want));
        }
        begin(&mut pages, state.logged.blocks, offset, data.len());
        inode.file.set_hint(pages.dirty_blocks);
        drop(pages);
        fill_in(&frames, offset, data);
        finish(&frames);
        let changed = match touch {
            Touch::Times(now) => inode.state.note_write(*now),
            Touch::Exactly(now) => {
                inode.state.note_write_exactly(*now);
                *now
            }
            Touch::Nothing | Touch::Edit(_) => {
                inode.state.newest_write().unwrap_or(state.rec.mtime)
            }
        };
        self.mark_dirty(inode);
        self.note_unsaved(inode, state.rec.size, changed);
        Ok(Attempt::Done)
    }
}
