//! Truncation, extension, and giving back all of a file. What is too large for one transaction goes
//! in pieces: the first makes the change visible and, with an intent key, certain; the rest
//! follows, after a crash at the next mount.

use crate::api::{Errno, Ino, ReservationId};
use crate::cache::file_data::{ExtentsGuard, Pages, show_blocks, zero_tail};
use crate::error::FsError;
use crate::extents::{Changes, Delta, Edit, WINDOW_BLOCKS, Window};
use crate::file::write::{Ready, apply, prepare};
use crate::inode::incore::{Inode, InodeState};
use crate::keys::{self, BLOCK, InodeRecord, Key, Number};
use crate::space::free_blocks::{Claim, Want};
use crate::store::data_store::{AttrEdit, DataStore, RECORD_BYTES};
use ferry_journal::{Credits, Journal, Seq, Transaction};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The end of all files, in blocks.
pub(crate) const BLOCKS_END: u64 = (i64::MAX as u64).div_ceil(BLOCK);

/// Extents to be dropped by one transaction.
pub(crate) struct Piece {
    edits: Vec<Edit>,
    changes: Changes,
    delta: Delta,
    /// Where the next piece starts; `None`: this is the last.
    pub next: Option<u64>,
}

/// The first step of [`DataStore::drop_extents`], for the caller to add to.
pub(crate) struct First<'s> {
    pub state: &'s mut InodeState,
    pub pages: &'s mut Pages,
    /// Blocks of space that were held by what the step forgets.
    pub held: u64,
}

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
        self.resize(self.space.claim_from(self.purse(reservation)), inode, size, true, edit)
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
                    return self.write_back(inode);
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
        loop {
            let mut txn = journal.begin(Credits { keys: 1, bytes: RECORD_BYTES, urgent: false })?;
            let mut state = inode.state.write();
            let size = size.max(state.rec.size);
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file);
            let plan = match prepare(&state, &pages, size..size) {
                Ready::Yes(plan) => plan,
                Ready::Load(window) => {
                    drop((state, pages, txn));
                    self.load_window(inode, window)?;
                    continue;
                }
                Ready::Fetch(block) => {
                    drop((state, pages, txn));
                    self.fetch_block(inode, block)?;
                    continue;
                }
            };
            if !claim.take(Want::new(plan.need)) {
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
            show_blocks(&mut state, &pages);
            txn.put(&keys::inode(inode.ino), &state.record().encode());
            let seq = txn.commit();
            self.note_seq(Some(inode), seq);
            self.leave_if_clean(inode, &state, &pages);
            return Ok(Extended::Logged(seq));
        }
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
            step.held = step.pages.forget(from, BLOCKS_END);
            zero_tail(step.pages, size);
            inode.file.set_hint(step.pages.dirty_blocks);
            cut(step.state, size);
            edit(&mut step.state.rec);
        })
    }

    /// The right to change a file's extents, when what an error interrupted there has been
    /// finished. Whoever takes the right to read extents only, or to drop all of them, need not do
    /// that.
    pub(crate) fn extents_right(
        &self,
        inode: &Arc<Inode>,
        journal: &Journal,
    ) -> Result<ExtentsGuard, FsError> {
        let guard = ExtentsGuard::lock(inode);
        self.finish_drop(&guard, journal)?;
        Ok(guard)
    }

    /// Drops the extents of blocks `range`, in as many transactions as it takes; at least one.
    /// `first` adds to the first step, under the inode lock. With a size to `cut` to there is an
    /// intent for what is left after that.
    pub(crate) fn drop_extents(
        &self,
        guard: &ExtentsGuard,
        range: Range<u64>,
        cut: Option<u64>,
        first: &mut dyn FnMut(&mut First<'_>),
    ) -> Result<Seq, FsError> {
        let (inode, journal) = (guard.inode(), self.journal()?);
        let piece = self.plan_drop(&journal, inode, range.clone())?;
        let mut txn = journal.begin(self.credits(&piece.changes, &piece.delta, true))?;
        put_all(&mut txn, &piece.changes);
        let seq = {
            let mut state = inode.state.write();
            let mut pages = inode.file.pages.write();
            let mut step = First { state: &mut state, pages: &mut pages, held: 0 };
            first(&mut step);
            let held = step.held;
            if let (Some(size), true) = (cut, piece.next.is_some()) {
                txn.put(&keys::intent(inode.ino), &Number(size).encode());
                pages.intent = true;
            }
            self.log_dropped(inode, (&mut state, &mut pages), txn, piece, range.end, held)
        };
        Ok(self.finish_drop(guard, &journal)?.unwrap_or(seq))
    }

    /// Drops what is left of a range that was begun; the context of the last step, if there was
    /// one.
    fn finish_drop(&self, guard: &ExtentsGuard, journal: &Journal) -> Result<Option<Seq>, FsError> {
        let inode = guard.inode();
        let mut last = None;
        loop {
            // What is being removed, or was, goes as a whole.
            let void = inode.file.pages.read().void.clone();
            let Some(range) = void.filter(|_| !inode.file.dead.load(Ordering::Acquire)) else {
                return Ok(last);
            };
            journal.give_way()?;
            let piece = self.plan_drop(journal, inode, range.clone())?;
            let mut txn = journal.begin(self.credits(&piece.changes, &piece.delta, true))?;
            put_all(&mut txn, &piece.changes);
            let mut state = inode.state.write();
            let mut pages = inode.file.pages.write();
            if piece.next.is_none() && std::mem::take(&mut pages.intent) {
                txn.delete(&keys::intent(inode.ino));
            }
            last =
                Some(self.log_dropped(inode, (&mut state, &mut pages), txn, piece, range.end, 0));
        }
    }

    /// Logs one step: the extents that are gone, and the record.
    fn log_dropped(
        &self,
        inode: &Arc<Inode>,
        (state, pages): (&mut InodeState, &mut Pages),
        mut txn: Transaction<'_>,
        piece: Piece,
        end: u64,
        held: u64,
    ) -> Seq {
        self.swap_dropped(inode, state, pages, piece.edits, &piece.delta);
        pages.void = piece.next.map(|next| next..end);
        show_blocks(state, pages);
        state.times_dirty = false;
        txn.put(&keys::inode(inode.ino), &state.record().encode());
        let seq = self.table.commit(txn, &piece.delta, held, None, &self.space);
        self.note_seq(Some(inode), seq);
        self.leave_if_clean(inode, state, pages);
        seq
    }

    /// The edited windows become current: those that are empty now are forgotten instead.
    fn swap_dropped(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        pages: &mut Pages,
        edits: Vec<Edit>,
        delta: &Delta,
    ) {
        state.logged.blocks = state.logged.blocks.saturating_add_signed(delta.counted());
        pages.map_version += 1;
        let (empty, rest): (Vec<_>, Vec<_>) =
            edits.into_iter().partition(|e| e.window.next_mapped(0).is_none());
        for edit in empty {
            pages.drop_windows(edit.index, edit.index + 1);
        }
        self.set_windows(inode, pages, rest);
    }

    /// The next piece of what has to be dropped, as large as one transaction may be.
    fn plan_drop(
        &self,
        journal: &Journal,
        inode: &Arc<Inode>,
        range: Range<u64>,
    ) -> Result<Piece, FsError> {
        let mut piece =
            Piece { edits: Vec::new(), changes: Vec::new(), delta: Delta::default(), next: None };
        let mut left = (journal.max_transaction_bytes() / 2) as usize;
        let mut at = range.start;
        if inode.state.share().logged.blocks == 0 {
            return Ok(piece);
        }
        while let Some(mapped) =
            self.next_extent(journal, inode.ino, at)?.filter(|b| *b < range.end)
        {
            let index = mapped / WINDOW_BLOCKS;
            let window_end = (index + 1) * WINDOW_BLOCKS;
            let from = at.max(index * WINDOW_BLOCKS);
            let mut to = window_end.min(range.end);
            let window = self.window(inode, index)?;
            let (edit, changes, cost) = loop {
                let dropped = drop_in(&window, inode.ino, index, from..to);
                if dropped.2 <= left || to - from == 1 {
                    break dropped;
                }
                if !piece.edits.is_empty() {
                    piece.next = Some(from.max(mapped));
                    return Ok(piece);
                }
                // Not even one window fits: a part of it.
                to = from + (to - from) / 2;
            };
            left = left.saturating_sub(cost);
            piece.changes.extend(changes);
            piece.delta.add(&edit.delta);
            piece.edits.push(edit);
            if to < window_end.min(range.end) {
                piece.next = Some(to);
                return Ok(piece);
            }
            at = window_end;
        }
        Ok(piece)
    }

    /// The first block at or behind `from` (or in its window) that an extent maps.
    pub(crate) fn next_extent(
        &self,
        journal: &Journal,
        ino: Ino,
        from: u64,
    ) -> Result<Option<u64>, FsError> {
        let base = from / WINDOW_BLOCKS * WINDOW_BLOCKS;
        let mut found = None;
        journal.scan(&keys::extent(ino, base * BLOCK), &keys::extent_end(ino), &mut |key, _| {
            if let Some(Key::Extent(_, offset)) = keys::parse(key) {
                found = Some(offset / BLOCK);
            }
            false
        })?;
        Ok(found)
    }

    /// Gives back everything that `inode` occupies. `finish` adds at most `room` to the last
    /// transaction; it is called without an inode lock, and may keep the counters' lock until this
    /// returns.
    pub fn reclaim(
        &self,
        inode: &Arc<Inode>,
        room: Credits,
        finish: &mut dyn FnMut(&mut Transaction<'_>),
    ) -> Result<Seq, FsError> {
        self.writable()?;
        let guard = ExtentsGuard::lock(inode);
        self.drop_cache(&guard);
        let journal = self.journal()?;
        let mut from = 0;
        loop {
            let piece = self.plan_drop(&journal, inode, from..BLOCKS_END)?;
            let mut credits = self.credits(&piece.changes, &piece.delta, true);
            credits.keys += room.keys;
            credits.bytes += room.bytes;
            let mut txn = journal.begin(credits)?;
            put_all(&mut txn, &piece.changes);
            {
                // Nobody else has the inode any more: it may be changed before the commit.
                let mut state = inode.state.write();
                let mut pages = inode.file.pages.write();
                self.swap_dropped(inode, &mut state, &mut pages, piece.edits, &piece.delta);
                if piece.next.is_some() {
                    txn.put(&keys::inode(inode.ino), &state.record().encode());
                } else if std::mem::take(&mut pages.intent) {
                    txn.delete(&keys::intent(inode.ino)); // of a truncation that an error interrupted
                }
            }
            if piece.next.is_none() {
                finish(&mut txn);
            }
            let seq = self.table.commit(txn, &piece.delta, 0, None, &self.space);
            self.note_seq(Some(inode), seq);
            match piece.next {
                Some(next) => {
                    from = next;
                    journal.give_way()?;
                }
                None => {
                    drop(guard);
                    return Ok(seq);
                }
            }
        }
    }

    /// Finishes truncations that a crash interrupted.
    pub(crate) fn finish_truncations(&self, journal: &Journal) -> Result<(), FsError> {
        let mut begun = Vec::new();
        journal.scan(&keys::intent(0), &keys::intent_end(), &mut |key, value| {
            if let (Some(Key::Intent(ino)), Ok(Number(size))) =
                (keys::parse(key), Number::decode(value))
            {
                begun.push((ino, size));
            }
            true
        })?;
        for (ino, size) in begun {
            match self.source()?.inode(ino)? {
                Some(inode) => {
                    tracing::info!(inode = ino, size, "finishing an interrupted truncation");
                    let guard = ExtentsGuard::lock(&inode);
                    {
                        let mut pages = inode.file.pages.write();
                        pages.void = Some(size.div_ceil(BLOCK)..BLOCKS_END);
                        pages.intent = true;
                    }
                    self.finish_drop(&guard, journal)?;
                }
                None => {
                    let mut txn = journal.begin(Credits { keys: 1, bytes: 16, urgent: true })?;
                    txn.delete(&keys::intent(ino));
                    self.note_seq(None, txn.commit());
                }
            }
        }
        Ok(())
    }
}

/// What dropping `range` of a window changes, and how many bytes that may cost a transaction.
fn drop_in(window: &Window, ino: Ino, index: u64, range: Range<u64>) -> (Edit, Changes, usize) {
    let base = index * WINDOW_BLOCKS;
    let mut edit = Edit::new(index, window.clone());
    edit.drop_range(range.start - base, range.end - base);
    let mut changes = Changes::new();
    edit.changes(ino, &mut changes);
    // The records of segments come on top of the extents' keys; log space also covers each key's
    // own overhead.
    let keys =
        changes.iter().map(|(k, v)| k.len() + v.as_ref().map_or(0, Vec::len) + 64).sum::<usize>();
    let cost = keys + 64 * edit.delta.live.len();
    (edit, changes, cost)
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

pub(crate) fn put_all(txn: &mut Transaction<'_>, changes: &Changes) {
    for (key, value) in changes {
        match value {
            Some(value) => txn.put(key, value),
            None => txn.delete(key),
        }
    }
}

/// Cuts the contents that are known to the journal and to programs.
fn cut(state: &mut InodeState, size: u64) {
    state.rec.size = size;
    state.logged.size = state.logged.size.min(size);
    if let Some(inline) = &state.logged.inline
        && inline.len() as u64 > size
    {
        let kept = &inline[..size as usize];
        state.logged.inline = (!kept.is_empty()).then(|| kept.into());
    }
}
