//! Truncation, extension, and giving back all of a file. What is too large for one transaction goes
//! in pieces: the first makes the change visible and, with an intent key, certain; the rest
//! follows, after a crash at the next mount.

use crate::api::{Errno, ReservationId};
use crate::cache::pages::zero_tail;
use crate::error::FsError;
use crate::file::plan::{apply, prepare};
use crate::inode::extents_right::ExtentsGuard;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{BLOCK, InodeRecord};
use crate::space::free_blocks::{Claim, Want};
use crate::store::data_store::{AttrEdit, Busy, DataStore, Dirty, RECORD_BYTES};
use crate::store::drop::BLOCKS_END;
use ferry_journal::{Credits, Seq};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl DataStore {
    /// Truncates or extends, together with other changes of attributes.
    pub fn set_size(
        &self,
        inode: &Arc<Inode>,
        size: u64,
        edit: &mut dyn FnMut(&mut InodeRecord),
    ) -> Result<Seq, FsError> {
        self.set_size_from(None, inode, size, edit)
    }

    /// The same; its space is taken from a reservation, if that has enough.
    pub fn set_size_from(
        &self,
        reservation: Option<ReservationId>,
        inode: &Arc<Inode>,
        size: u64,
        edit: &mut dyn FnMut(&mut InodeRecord),
    ) -> Result<Seq, FsError> {
        self.writable()?;
        if size > i64::MAX as u64 {
            return Err(Errno(libc::EFBIG).into());
        }
        self.resize(
            self.space.claim_from(self.reserved_space(reservation)),
            inode,
            size,
            true,
            edit,
        )
    }

    /// Extends the file to `size`; one that is as long already stays as it is.
    pub(crate) fn grow(&self, inode: &Arc<Inode>, size: u64) -> Result<Seq, FsError> {
        self.resize(self.space.claim(), inode, size, false, &mut |_| {})
    }

    fn resize(
        &self,
        mut claim: Claim<'_>,
        inode: &Arc<Inode>,
        size: u64,
        may_cut: bool,
        edit: AttrEdit<'_>,
    ) -> Result<Seq, FsError> {
        loop {
            let guard = self.extents_right(inode, &*self.journal()?)?;
            if may_cut && size < inode.state.share().rec.size {
                return self.truncate(&guard, size, edit);
            }
            match self.extend_to(&guard, size, edit, &mut claim)? {
                Extended::Logged(seq) => return Ok(seq),
                Extended::Dirty => {
                    drop(guard);
                    return self.write_back(Dirty::File(inode), Busy::Wait);
                }
                Extended::NoSpace(blocks) => {
                    drop(guard);
                    self.find_space(Want::new(blocks), &mut claim)?;
                }
            }
        }
    }

    fn extend_to(
        &self,
        guard: &ExtentsGuard,
        size: u64,
        edit: AttrEdit<'_>,
        claim: &mut Claim<'_>,
    ) -> Result<Extended, FsError> {
        let (inode, journal) = (guard.inode(), self.journal()?);
        self.change_contents(inode, Busy::Wait, claim, |claim| {
            let credits = Credits { keys: 1, bytes: RECORD_BYTES, urgent: false };
            let mut txn = journal.begin(credits).map_err(FsError::from)?;
            let mut state = inode.state.write();
            let size = size.max(state.rec.size);
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file.front);
            let plan = prepare(&state, &pages, size..size)?;
            if !claim.take(Want::new(plan.need)) {
                // Nobody waits for space with the right to change extents.
                return Ok(Extended::NoSpace(plan.need));
            }
            apply(inode, &state, &mut pages, &plan, &[], size);
            state.rec.size = size;
            edit(&mut state.rec);
            if pages.dirty_blocks > 0 {
                self.dirtied(inode, &mut state, &pages);
                return Ok(Extended::Dirty);
            }
            state.logged.size = size;
            if let Some(inline) = state.logged.inline.take().filter(|i| !i.is_empty()) {
                let mut contents = inline.into_vec();
                contents.resize(size as usize, 0);
                state.logged.inline = Some(contents.into_boxed_slice());
            }
            state.times_dirty = false;
            state.count_blocks(&pages);
            self.put_record(&mut txn, inode, &state);
            let seq = txn.commit();
            self.note_seq(Some(inode), seq);
            self.leave_if_clean(inode, &state, &pages);
            Ok(Extended::Logged(seq))
        })
    }

    fn truncate(
        &self,
        guard: &ExtentsGuard,
        size: u64,
        edit: AttrEdit<'_>,
    ) -> Result<Seq, FsError> {
        let inode = guard.inode();
        let from = size.div_ceil(BLOCK);
        self.drop_extents(guard, from..BLOCKS_END, Some(size), &mut |step| {
            inode.file.readable.store(size, Ordering::Release);
            step.held = step.pages.cut_out(inode, from, BLOCKS_END);
            zero_tail(step.pages, size);
            inode.file.set_hint(step.pages.dirty_blocks);
            cut(step.state, size);
            edit(&mut step.state.rec);
        })
    }
}

/// How an extension ended.
enum Extended {
    /// It is in this context.
    Logged(Seq),
    /// It waits for write-back, with data.
    Dirty,
    /// So many blocks of space are lacking.
    NoSpace(u64),
}

/// Cuts the contents that are known to the journal and to programs.
fn cut(state: &mut InodeState, size: u64) {
    state.rec.size = size;
    state.logged.size = state.logged.size.min(size);
    if let Some(inline) = &state.logged.inline
        && inline.len() as u64 > size
    {
        let rest = &inline[..size as usize];
        state.logged.inline = (!rest.is_empty()).then(|| rest.into());
    }
}
