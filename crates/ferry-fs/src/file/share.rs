//! Reads and writes that exclude only who touches the same bytes.
//!
//! A read of what is in memory takes no lock at all: it copies from frames and looks whether they
//! were steady meanwhile. A write inside the file's size shares the inode lock; the page lock it
//! holds only while it looks up and marks, not while it copies. Whatever does not fit (holes,
//! contents in the record, growth) is left to the exclusive path, which also helps who comes to
//! nothing here.

use crate::cache::copy::{
    FOLIOS_MAX, WAITS_MAX, begin, copy_free, fill_in, finish, make_room, parts, settle,
};
use crate::cache::folio::FOLIO_BYTES;
use crate::cache::frame::Frame;
use crate::error::FsError;
use crate::file::plan::{Ready, prepare};
use crate::inode::incore::Inode;
use crate::keys::INLINE_MAX;
use crate::space::free_blocks::{Claim, Purse, Want};
use crate::store::data_store::{Busy, DataStore, Touch};
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
        pages.attach(&self.cache, &inode.file.front);
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
