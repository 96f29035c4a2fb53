//! Dropping extents: of a range, and of a whole file. What is too large for one transaction goes in
//! steps: the first makes the change visible and, with an intent key, certain; the rest follows,
//! after a crash at the next mount.

use crate::api::Ino;
use crate::cache::pages::Pages;
use crate::error::FsError;
use crate::extents::{Changes, Delta, Edit, WINDOW_BLOCKS, Window};
use crate::inode::extents_right::ExtentsGuard;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{self, BLOCK, Key, Number};
use crate::store::data_store::DataStore;
use ferry_journal::{Credits, Journal, Seq, Transaction};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The end of all files, in blocks.
pub(crate) const BLOCKS_END: u64 = (i64::MAX as u64).div_ceil(BLOCK);

/// Extents to be dropped by one transaction.
pub(crate) struct DropPlan {
    pub(crate) edits: Vec<Edit>,
    pub(crate) changes: Changes,
    pub(crate) delta: Delta,
    /// Where the next step starts; `None`: this is the last.
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
    /// The right to change a file's extents, when what an error interrupted there has been
    /// finished. A thread that takes the right to read extents only, or to drop all of them, need
    /// not do that.
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
        let plan = self.plan_drop(&journal, inode, range.clone())?;
        let mut txn = journal.begin(self.credits(&plan.changes, &plan.delta, true))?;
        put_all(&mut txn, &plan.changes);
        let seq = {
            let mut state = inode.state.write();
            let mut pages = inode.file.pages.write();
            let mut step = First { state: &mut state, pages: &mut pages, held: 0 };
            first(&mut step);
            let held = step.held;
            if let (Some(size), true) = (cut, plan.next.is_some()) {
                txn.put(&keys::intent(inode.ino), &Number(size).encode());
                pages.intent = true;
            }
            self.log_dropped(inode, (&mut state, &mut pages), txn, plan, range.end, held)
        };
        Ok(self.finish_drop(guard, &journal)?.unwrap_or(seq))
    }

    /// Drops what is left of a range that was begun; the context of the last step, if there was
    /// one.
    pub(crate) fn finish_drop(
        &self,
        guard: &ExtentsGuard,
        journal: &Journal,
    ) -> Result<Option<Seq>, FsError> {
        let inode = guard.inode();
        let mut last = None;
        loop {
            // What is being removed, or was, goes as a whole.
            let void = inode.file.pages.read().void.clone();
            let Some(range) = void.filter(|_| !inode.file.dead.load(Ordering::Acquire)) else {
                return Ok(last);
            };
            journal.give_way()?;
            let plan = self.plan_drop(journal, inode, range.clone())?;
            let mut txn = journal.begin(self.credits(&plan.changes, &plan.delta, true))?;
            put_all(&mut txn, &plan.changes);
            let mut state = inode.state.write();
            let mut pages = inode.file.pages.write();
            if plan.next.is_none() && std::mem::take(&mut pages.intent) {
                txn.delete(&keys::intent(inode.ino));
            }
            last = Some(self.log_dropped(inode, (&mut state, &mut pages), txn, plan, range.end, 0));
        }
    }

    /// Logs one step: the extents that are gone, and the record.
    pub(crate) fn log_dropped(
        &self,
        inode: &Arc<Inode>,
        (state, pages): (&mut InodeState, &mut Pages),
        mut txn: Transaction<'_>,
        plan: DropPlan,
        end: u64,
        held: u64,
    ) -> Seq {
        self.swap_dropped(inode, state, pages, plan.edits, &plan.delta);
        pages.void = plan.next.map(|next| next..end);
        state.count_blocks(pages);
        state.times_dirty = false;
        self.put_record(&mut txn, inode, state);
        let seq = self.table.commit(txn, &plan.delta, held, None, &self.space);
        self.note_seq(Some(inode), seq);
        self.leave_if_clean(inode, state, pages);
        seq
    }

    /// The edited windows become current: those that are empty now are forgotten instead.
    pub(crate) fn swap_dropped(
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

    /// The next step of what has to be dropped, as large as one transaction may be.
    pub(crate) fn plan_drop(
        &self,
        journal: &Journal,
        inode: &Arc<Inode>,
        range: Range<u64>,
    ) -> Result<DropPlan, FsError> {
        let mut plan = DropPlan {
            edits: Vec::new(),
            changes: Vec::new(),
            delta: Delta::default(),
            next: None,
        };
        let mut left = (journal.max_transaction_bytes() / 2) as usize;
        let mut at = range.start;
        if inode.state.share().logged.blocks == 0 {
            return Ok(plan);
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
                if !plan.edits.is_empty() {
                    plan.next = Some(from.max(mapped));
                    return Ok(plan);
                }
                // Not even one window fits: a part of it.
                to = from + (to - from) / 2;
            };
            left = left.saturating_sub(cost);
            plan.changes.extend(changes);
            plan.delta.add(&edit.delta);
            plan.edits.push(edit);
            if to < window_end.min(range.end) {
                plan.next = Some(to);
                return Ok(plan);
            }
            at = window_end;
        }
        Ok(plan)
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
            let plan = self.plan_drop(&journal, inode, from..BLOCKS_END)?;
            let mut credits = self.credits(&plan.changes, &plan.delta, true);
            credits.keys += room.keys;
            credits.bytes += room.bytes;
            let mut txn = journal.begin(credits)?;
            put_all(&mut txn, &plan.changes);
            {
                // Nobody else has the inode any more: it may be changed before the commit.
                let mut state = inode.state.write();
                let mut pages = inode.file.pages.write();
                self.swap_dropped(inode, &mut state, &mut pages, plan.edits, &plan.delta);
                if plan.next.is_some() {
                    self.put_record(&mut txn, inode, &state);
                } else if std::mem::take(&mut pages.intent) {
                    txn.delete(&keys::intent(inode.ino)); // of a truncation that an error interrupted
                }
            }
            if plan.next.is_none() {
                finish(&mut txn);
            }
            let seq = self.table.commit(txn, &plan.delta, 0, None, &self.space);
            self.note_seq(Some(inode), seq);
            match plan.next {
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

    /// Forgets what is cached, dirty data too: the last name and handle are gone. Nothing of the
    /// inode is logged after this but by [`DataStore::reclaim`], which keeps the right to its
    /// extents until they are dropped: so a thread that finds a dead file waits for that by taking
    /// the right.
    pub(crate) fn drop_cache(&self, guard: &ExtentsGuard) {
        let inode = guard.inode();
        let mut state = inode.state.write();
        inode.file.dead.store(true, Ordering::Release);
        inode.file.readable.store(0, Ordering::Release);
        let mut pages = inode.file.pages.write();
        self.space.release(pages.forget(0, u64::MAX / BLOCK));
        inode.file.dirty_hint.store(0, Ordering::Relaxed);
        state.times_dirty = false;
        state.count_blocks(&pages);
        drop(pages);
        self.queue.leave(inode);
        self.note_saved(inode);
    }
}

/// What dropping `range` of a window changes, and how many bytes that may cost a transaction.
pub(crate) fn drop_in(
    window: &Window,
    ino: Ino,
    index: u64,
    range: Range<u64>,
) -> (Edit, Changes, usize) {
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

pub(crate) fn put_all(txn: &mut Transaction<'_>, changes: &Changes) {
    for (key, value) in changes {
        match value {
            Some(value) => txn.put(key, value),
            None => txn.delete(key),
        }
    }
}
