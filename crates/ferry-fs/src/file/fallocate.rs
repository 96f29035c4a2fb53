//! Allocation, holes and zeros by fallocate(2), and where data and holes are by lseek(2).

use crate::api::Errno;
use crate::cache::folio::mask;
use crate::cache::pages::{Known, Pages};
use crate::error::FsError;
use crate::extents::{Changes, Delta, Edit, Mapping, WINDOW_BLOCKS, Window};
use crate::inode::extents_right::ExtentsGuard;
use crate::inode::incore::Inode;
use crate::keys::{BLOCK, InodeRecord};
use crate::space::free_blocks::{Claim, Want};
use crate::store::data_store::{AttrEdit, Busy, DataStore, Dirty};
use crate::store::drop::put_all;
use ferry_journal::Journal;
use std::ops::Range;
use std::sync::Arc;

/// Windows of unwritten extents that one transaction takes.
const WINDOWS_AT_ONCE: u64 = 64;

impl DataStore {
    /// Allocates, punches or zeroes, by the mode bits of fallocate(2); `EOPNOTSUPP` for those that
    /// are none of these.
    pub fn fallocate(
        &self,
        inode: &Arc<Inode>,
        mode: i32,
        offset: u64,
        len: u64,
        edit: &mut dyn FnMut(&mut InodeRecord),
    ) -> Result<(), FsError> {
        self.writable()?;
        let end =
            offset.checked_add(len).filter(|e| *e <= i64::MAX as u64).ok_or(Errno(libc::EFBIG))?;
        if len == 0 {
            return Err(Errno(libc::EINVAL).into());
        }
        let keep = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => self.allocate_unwritten(inode, offset..end, keep, edit),
            libc::FALLOC_FL_PUNCH_HOLE if keep => self.punch(inode, offset..end, edit),
            libc::FALLOC_FL_ZERO_RANGE => {
                self.punch(inode, offset..end, edit)?;
                self.allocate_unwritten(inode, offset..end, keep, edit)
            }
            _ => Err(Errno(libc::EOPNOTSUPP).into()),
        }
    }

    /// Makes a hole: whole blocks are dropped, parts of blocks become zeros.
    fn punch(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        edit: AttrEdit<'_>,
    ) -> Result<(), FsError> {
        let (from, to) = (range.start.div_ceil(BLOCK), range.end / BLOCK);
        if from > to {
            self.zero_bytes(inode, range.start, range.end)?; // inside one block
        } else {
            if !range.start.is_multiple_of(BLOCK) {
                self.zero_bytes(inode, range.start, from * BLOCK)?;
            }
            if !range.end.is_multiple_of(BLOCK) {
                self.zero_bytes(inode, to * BLOCK, range.end)?;
            }
        }
        let blocks = from..to.max(from);
        let guard = self.extents_right(inode, &*self.journal()?)?;
        self.drop_extents(&guard, blocks.clone(), None, &mut |step| {
            step.held = step.pages.cut_out(inode, blocks.start, blocks.end);
            inode.file.set_hint(step.pages.dirty_blocks);
            if blocks.contains(&0) {
                // A hole, as any other block's: the record may be about to grow beyond what it can
                // hold.
                step.state.logged.inline = None;
            }
            edit(&mut step.state.rec);
        })?;
        Ok(())
    }

    /// Fills all holes of a range with unwritten extents, and extends the file over it.
    fn allocate_unwritten(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        keep_size: bool,
        edit: AttrEdit<'_>,
    ) -> Result<(), FsError> {
        let journal = self.journal()?;
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let mut claim = self.space.claim();
        let guard = loop {
            self.leave_record(inode, &mut claim)?;
            let guard = self.extents_right(inode, &journal)?;
            if inode.state.share().logged.inline.as_ref().is_some_and(|i| !i.is_empty()) {
                continue; // written back into the record again meanwhile
            }
            let need = self.holes(&journal, inode, blocks.clone())?;
            if claim.take(Want::new(need)) {
                self.add_unwritten(&guard, &journal, blocks, need, edit)?;
                break guard;
            }
            drop(guard);
            self.find_space(Want::new(need), &mut claim)?;
        };
        // Nobody waits for space with a claim.
        drop((guard, claim));
        if !keep_size && range.end > inode.state.share().rec.size {
            self.grow(inode, range.end)?;
        }
        Ok(())
    }

    /// The contents of a small file move out of its record, so that it can have extents.
    fn leave_record(&self, inode: &Arc<Inode>, claim: &mut Claim<'_>) -> Result<(), FsError> {
        loop {
            let mut state = inode.state.write();
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file.front);
            pages.no_inline = true;
            let Some(inline) = state.logged.inline.clone().filter(|i| !i.is_empty()) else {
                return Ok(());
            };
            if !pages.is_dirty(0) {
                if !claim.take(Want::new(1)) {
                    drop((state, pages));
                    self.find_space(Want::new(1), claim)?;
                    continue;
                }
                if !pages.has(0) {
                    pages.with_folio(0, |f| {
                        f.put(0, &inline);
                        f.validate(1);
                    });
                }
                pages.mark_dirty(0, mask(0, 1), state.logged.blocks);
                self.dirtied(inode, &mut state, &pages);
            }
            drop((state, pages));
            self.write_back(Dirty::File(inode), Busy::Wait)?;
        }
    }

    /// Blocks of a range that are neither mapped nor dirty. The caller holds the right to change
    /// extents.
    fn holes(
        &self,
        journal: &Journal,
        inode: &Arc<Inode>,
        blocks: Range<u64>,
    ) -> Result<u64, FsError> {
        let mut taken = 0;
        let mut at = blocks.start;
        while let Some(next) = self.next_extent(journal, inode.ino, at)?.filter(|n| *n < blocks.end)
        {
            let index = next / WINDOW_BLOCKS;
            let base = index * WINDOW_BLOCKS;
            let window = self.window(inode, index)?;
            let inside = blocks.start.max(base)..blocks.end.min(base + WINDOW_BLOCKS);
            taken += inside.filter(|b| window.mapping(b - base) != Mapping::Hole).count() as u64;
            at = base + WINDOW_BLOCKS;
        }
        let pages = inode.file.pages.read();
        let mut at = blocks.start;
        let mut dirty = 0;
        while let Some(run) = pages.dirty_run(at, blocks.end) {
            dirty += run.clone().filter(|b| pages.is_over_hole(*b)).count() as u64;
            at = run.end;
        }
        Ok((blocks.end - blocks.start).saturating_sub(taken + dirty))
    }

    /// Puts unwritten extents into the extent map, some windows at a time; `held` blocks are
    /// reserved for them.
    fn add_unwritten(
        &self,
        guard: &ExtentsGuard,
        journal: &Journal,
        blocks: Range<u64>,
        held: u64,
        edit: AttrEdit<'_>,
    ) -> Result<(), FsError> {
        let mut held = held;
        let (mut at, mut step) = (blocks.start, WINDOWS_AT_ONCE);
        let mut result = Ok(());
        while at < blocks.end && result.is_ok() {
            let to = blocks.end.min((at / WINDOW_BLOCKS + step) * WINDOW_BLOCKS);
            match self.add_unwritten_windows(guard, journal, at..to, edit) {
                Ok(Some(added)) => {
                    held = held.saturating_sub(added);
                    at = to;
                }
                Ok(None) => step = (step / 2).max(1),
                Err(error) => result = Err(error),
            }
            self.cache.shrink();
        }
        self.space.release(held); // what was written meanwhile needs none
        result
    }

    /// The unwritten extents of some windows, in one transaction. Returns the number of blocks;
    /// `None`: that is too much for one transaction, or writes came between: again, with fewer.
    fn add_unwritten_windows(
        &self,
        guard: &ExtentsGuard,
        journal: &Journal,
        blocks: Range<u64>,
        edit: AttrEdit<'_>,
    ) -> Result<Option<u64>, FsError> {
        let inode = guard.inode();
        let indices = blocks.start / WINDOW_BLOCKS..blocks.end.div_ceil(WINDOW_BLOCKS);
        let windows = indices
            .map(|i| Ok((i, self.window(inode, i)?)))
            .collect::<Result<Vec<_>, FsError>>()?;
        let (_, changes, delta) =
            plan_unwritten(inode, &windows, &blocks, &inode.file.pages.read());
        let mut room = self.credits(&changes, &delta, false);
        // Blocks that become dirty before the commit split the unwritten extents further.
        room.keys += 64;
        room.bytes += 64 * 64;
        if windows.len() > 1 && u64::from(room.bytes) > journal.max_transaction_bytes() / 4 {
            return Ok(None);
        }
        let mut txn = journal.begin(room)?;
        let mut state = inode.state.write();
        let mut pages = inode.file.pages.write();
        let (edits, changes, delta) = plan_unwritten(inode, &windows, &blocks, &pages);
        if changes.len() as u32 + 16 > room.keys {
            return Ok(None);
        }
        put_all(&mut txn, &changes);
        let added = delta.unwritten.unsigned_abs();
        edit(&mut state.rec);
        state.logged.blocks += added;
        self.set_windows(inode, &mut pages, edits);
        state.count_blocks(&pages);
        self.put_record(&mut txn, inode, &state);
        let seq = self.table.commit(txn, &delta, added, None, &self.space);
        self.note_seq(Some(inode), seq);
        Ok(Some(added))
    }

    /// The first byte of data, or of a hole, at or behind `offset`: `SEEK_DATA` and `SEEK_HOLE`,
    /// dirty data included. `ENXIO` behind the end.
    pub fn seek(&self, inode: &Arc<Inode>, offset: u64, whence: i32) -> Result<u64, FsError> {
        let found = self.seek_from(inode, offset, whence);
        self.cache.shrink();
        found
    }

    fn seek_from(&self, inode: &Arc<Inode>, offset: u64, whence: i32) -> Result<u64, FsError> {
        let data = match whence {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return Err(Errno(libc::EINVAL).into()),
        };
        let mut block = offset / BLOCK;
        loop {
            let size = inode.state.share().rec.size;
            if offset >= size {
                return Err(Errno(libc::ENXIO).into());
            }
            match self.seek_step(inode, block, size.div_ceil(BLOCK), data)? {
                Step::Found(at) => return Ok((at * BLOCK).max(offset).min(size)),
                Step::From(next) => {
                    // The windows behind are done with: a large file has more than the cache may
                    // hold.
                    if next / WINDOW_BLOCKS > block / WINDOW_BLOCKS {
                        self.cache.shrink();
                    }
                    block = next;
                }
                Step::End if data => return Err(Errno(libc::ENXIO).into()),
                Step::End => return Ok(size),
            }
        }
    }

    /// Looks through the window of `block`.
    fn seek_step(
        &self,
        inode: &Arc<Inode>,
        block: u64,
        end: u64,
        data: bool,
    ) -> Result<Step, FsError> {
        if block >= end {
            return Ok(Step::End);
        }
        let window_end = end.min((block / WINDOW_BLOCKS + 1) * WINDOW_BLOCKS);
        let cached = {
            let state = inode.state.share();
            let pages = inode.file.pages.read();
            let mapped = state.logged.blocks;
            let mut at = block;
            loop {
                if at == window_end {
                    break pages.next_cached(at);
                }
                let is_data = match pages.mapping(at, mapped) {
                    _ if pages.has(at) => true,
                    _ if at == 0 && state.logged.inline.as_ref().is_some_and(|i| !i.is_empty()) => {
                        true
                    }
                    Known::Load(window) => {
                        drop((state, pages));
                        self.load_window(inode, window)?;
                        return Ok(Step::From(at));
                    }
                    Known::Is(mapping) => matches!(mapping, Mapping::Data(..) | Mapping::Lost),
                };
                if is_data == data {
                    return Ok(Step::Found(at));
                }
                at += 1;
            }
        };
        if !data {
            return Ok(Step::From(window_end));
        }
        // Nothing here: go on where something is cached or mapped next, however far that is.
        let mapped = self.next_extent(&*self.journal()?, inode.ino, window_end)?;
        let next = [cached, mapped].into_iter().flatten().filter(|b| *b >= window_end).min();
        Ok(next.map_or(Step::End, Step::From))
    }
}

/// What one look found.
enum Step {
    /// It is at this block.
    Found(u64),
    /// Look on from this block.
    From(u64),
    /// Nothing before the end of the file.
    End,
}

/// What filling the holes of `blocks` with unwritten extents changes, except where blocks are
/// dirty: those have space of their own.
fn plan_unwritten(
    inode: &Inode,
    windows: &[(u64, Arc<Window>)],
    blocks: &Range<u64>,
    pages: &Pages,
) -> (Vec<Edit>, Changes, Delta) {
    let (mut edits, mut changes, mut delta) = (Vec::new(), Changes::new(), Delta::default());
    for (index, window) in windows {
        let base = index * WINDOW_BLOCKS;
        let inside = blocks.start.max(base) - base..blocks.end.min(base + WINDOW_BLOCKS) - base;
        let mut edit = Edit::new(*index, (**window).clone());
        edit.add_unwritten(inside.start, inside.end, &|b| pages.is_dirty(base + b));
        edit.changes(inode.ino, &mut changes);
        delta.add(&edit.delta);
        edits.push(edit);
    }
    (edits, changes, delta)
}
