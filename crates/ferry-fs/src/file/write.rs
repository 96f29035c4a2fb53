//! Writing into memory: space is reserved, bytes are copied into folios, and that is all.

use crate::api::{Errno, ReservationId};
use crate::cache::file_data::{Known, Pages, show_blocks};
use crate::cache::folio::{FOLIO_BLOCKS, mask};
use crate::error::FsError;
use crate::extents::Place;
use crate::file::share::{begin, fill_in, finish, parts};
use crate::inode::incore::{Inode, InodeState};
use crate::keys::{BLOCK, INLINE_MAX};
use crate::order::{Guard, Held, Rank};
use crate::space::free_blocks::{Claim, Purse, Want};
use crate::store::data_store::{At, DataStore, PIECE, Touch, count};
use crate::writeback::write_back::Busy;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Dirty bytes at which write-back begins whatever their age, at most: more would only make the
/// sync at the end longer.
const DIRTY_MAX: usize = 64 << 20;

/// What a change of cached contents must wait for, or what it will do.
pub(crate) enum Ready {
    /// Everything needed is in memory.
    Yes(Plan),
    /// A window of the extent map is not loaded.
    Load(u64),
    /// A block of the file must be read first.
    Fetch(u64),
}

/// A change of cached contents that can be made now.
pub(crate) struct Plan {
    /// Where it starts, in bytes.
    offset: u64,
    /// Blocks beside the written ones that become dirty with them.
    pub extra: Vec<u64>,
    /// Blocks of space to reserve.
    pub need: u64,
    /// It makes data of a hole.
    pub fills_hole: bool,
}

impl DataStore {
    /// Writes all of `data` into memory, with its space reserved. Returns the offset behind the
    /// last byte. Of more than 1 MiB a part may have been written when it fails.
    pub fn write(
        &self,
        inode: &Arc<Inode>,
        at: At,
        data: &[u8],
        touch: Touch<'_>,
    ) -> Result<u64, FsError> {
        self.write_from(Busy::Wait, None, inode, at, data, touch)
    }

    /// The same; its space is taken from a reservation, if that has enough. Who refuses to wait for
    /// space gets [`FsError::WouldWait`]; then nothing was written.
    pub fn write_from(
        &self,
        busy: Busy,
        reservation: Option<ReservationId>,
        inode: &Arc<Inode>,
        at: At,
        data: &[u8],
        touch: Touch<'_>,
    ) -> Result<u64, FsError> {
        self.writable()?;
        #[cfg(feature = "compare")]
        let _compared = self.inode_locks.write(inode.ino);
        let (purse, mut touch) = (self.purse(reservation), touch);
        // One append at a time, of whatever length: what the next one writes begins behind all of
        // it.
        let appends = (at == At::End).then(|| Guard::wait(Rank::Tail, || inode.file.tail.lock()));
        let mut at = at;
        let mut end = match at {
            At::Offset(offset) => offset,
            At::End => inode.state.share().rec.size,
        };
        let mut busy = busy;
        for piece in data.chunks(PIECE) {
            self.throttle()?;
            end = self.write_piece(busy, &purse, inode, at, piece, &mut touch)?;
            // A part of it is there: it cannot be made again by somebody else.
            busy = Busy::Wait;
            at = At::Offset(end);
        }
        drop(appends);
        self.cache.shrink();
        Ok(end)
    }

    /// Holds the writer while too much is dirty, or so much that the rest of the cache cannot make
    /// up for it.
    fn throttle(&self) -> Result<(), FsError> {
        if self.cache.dirty() > self.dirty_threshold() {
            self.signal.wake();
        }
        if !self.too_much() {
            return Ok(());
        }
        count(&self.counters.throttled, 1);
        let served = self.options.background
            && self.signal.wait_while(|| self.too_much() && self.writable().is_ok());
        self.writable()?;
        if !served {
            self.write_back_all()?;
            self.cache.shrink();
        }
        Ok(())
    }

    /// Whoever writes now is held, or has to wait for space.
    pub fn holds_writers(&self) -> bool {
        self.too_much() || self.space.is_wanted()
    }

    /// More is dirty than may be, or memory is short because of it.
    pub(crate) fn too_much(&self) -> bool {
        let (limit, dirty) = (self.cache.limit(), self.cache.dirty());
        if self.cache.used() > limit {
            self.cache.shrink();
        }
        dirty > limit / 2 || (dirty > 0 && self.cache.used() > limit + limit / 8)
    }

    /// Dirty bytes at which write-back begins without waiting for their age.
    pub(crate) fn dirty_threshold(&self) -> usize {
        (self.cache.limit() / 8).min(DIRTY_MAX)
    }

    fn write_piece(
        &self,
        busy: Busy,
        purse: &Option<Arc<Purse>>,
        inode: &Arc<Inode>,
        at: At,
        data: &[u8],
        touch: &mut Touch<'_>,
    ) -> Result<u64, FsError> {
        if let (At::Offset(offset), Touch::Nothing | Touch::Times(_) | Touch::Exactly(_)) =
            (at, &touch)
            && let Some(end) = offset.checked_add(data.len() as u64)
            && self.write_shared(busy, purse, inode, offset, data, touch)?
        {
            return Ok(end);
        }
        let mut claim = self.space.claim_from(purse.clone());
        loop {
            let mut state = inode.state.write();
            let offset = match at {
                At::Offset(offset) => offset,
                At::End => state.rec.size,
            };
            let end = offset.checked_add(data.len() as u64).filter(|e| *e <= i64::MAX as u64);
            let end = end.ok_or(Errno(libc::EFBIG))?;
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file);
            let plan = match prepare(&state, &pages, offset..end) {
                Ready::Yes(plan) => plan,
                Ready::Load(window) => {
                    drop((state, pages));
                    self.load_window(inode, window)?;
                    continue;
                }
                Ready::Fetch(block) => {
                    drop((state, pages));
                    self.fetch_block(inode, block)?;
                    continue;
                }
            };
            let want = plan.wants(&self.space);
            if !claim.take(want) {
                drop((state, pages));
                self.find_space_or_refuse(busy, want, &mut claim)?;
                continue;
            }
            let size = state.rec.size.max(end);
            apply(inode, &state, &mut pages, &plan, data, size);
            state.rec.size = size;
            touch.apply(&mut state.rec);
            self.dirtied(inode, &mut state, &pages);
            return Ok(end);
        }
    }

    /// Notes that contents or size are ahead of the journal.
    pub(crate) fn dirtied(&self, inode: &Arc<Inode>, state: &mut InodeState, pages: &Pages) {
        state.times_dirty = true;
        show_blocks(state, pages);
        inode.file.set_hint(pages.dirty_blocks);
        self.mark_dirty(inode);
    }

    /// Stands in the row for space: asks the host, then has everything written back (what is
    /// overwritten becomes free) and takes back what the home store does not need; `ENOSPC` if that
    /// came to nothing. Called without any lock but a file's `tail`.
    pub(crate) fn find_space(&self, want: Want, claim: &mut Claim<'_>) -> Result<(), FsError> {
        let _row = Held::wait(Rank::Row);
        let some = || if self.space.grow_for(want) { Ok(()) } else { self.await_space(want) };
        if claim.wait(want, some, || self.free_all(want))? {
            return Ok(());
        }
        Err(Errno(libc::ENOSPC).into())
    }

    /// The same, for a caller that may not be able to wait.
    pub(crate) fn find_space_or_refuse(
        &self,
        busy: Busy,
        want: Want,
        claim: &mut Claim<'_>,
    ) -> Result<(), FsError> {
        if busy == Busy::Refuse { Err(FsError::WouldWait) } else { self.find_space(want, claim) }
    }

    /// Waits while the background thread writes back, until there is so much or it has come to its
    /// end.
    fn await_space(&self, want: Want) -> Result<(), FsError> {
        // The round under way may have passed by what is dirty.
        let rounds = self.signal.rounds() + 2;
        let held = || {
            let waits = !self.space.has(want) && self.cache.dirty() > 0;
            waits && self.signal.rounds() < rounds && self.writable().is_ok()
        };
        if self.options.background {
            self.signal.wait_while(held);
        }
        self.writable()
    }

    /// Waits for the space of removed files, until there is so much.
    pub(crate) fn await_removed(&self, want: Want) {
        if self.options.background {
            let lacking = || !self.space.has(want) && self.writable().is_ok();
            self.removed.wait_while(&*self.env.clock, lacking);
        }
    }

    /// Makes everything free that can be.
    fn free_all(&self, want: Want) -> Result<(), FsError> {
        self.await_removed(want);
        self.write_back_all()?;
        if let Some(journal) = self.space.has_pending().then(|| self.journal()).transpose()? {
            self.force_stamped(&journal)?;
            self.space.reap_now();
        }
        if !self.space.grow_for(want) {
            self.shrink_home()?;
            // What it gave back may have gone on to the host.
            self.space.grow_for(want);
        }
        Ok(())
    }

    /// Makes bytes `[from, to)` zeros by writing them, where they are not zeros already. Both lie
    /// in one block.
    pub(crate) fn zero_bytes(&self, inode: &Arc<Inode>, from: u64, to: u64) -> Result<(), FsError> {
        let block = from / BLOCK;
        let mut claim = self.space.claim();
        loop {
            let mut state = inode.state.write();
            let to = to.min(state.rec.size);
            if from >= to {
                return Ok(());
            }
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file);
            let inline = block == 0 && state.logged.inline.is_some();
            if !pages.has(block) && !inline {
                match pages.place(block, state.logged.blocks) {
                    Known::Is(Place::Data(..)) => {}
                    Known::Is(_) => return Ok(()),
                    Known::Load(window) => {
                        drop((state, pages));
                        self.load_window(inode, window)?;
                        continue;
                    }
                }
            }
            let plan = match prepare(&state, &pages, from..to) {
                Ready::Yes(plan) => plan,
                Ready::Load(window) => {
                    drop((state, pages));
                    self.load_window(inode, window)?;
                    continue;
                }
                Ready::Fetch(block) => {
                    drop((state, pages));
                    self.fetch_block(inode, block)?;
                    continue;
                }
            };
            let want = plan.wants(&self.space);
            if !claim.take(want) {
                drop((state, pages));
                self.find_space(want, &mut claim)?;
                continue;
            }
            let size = state.rec.size;
            apply(
                inode,
                &state,
                &mut pages,
                &plan,
                &[0; BLOCK as usize][..(to - from) as usize],
                size,
            );
            self.dirtied(inode, &mut state, &pages);
            return Ok(());
        }
    }
}

/// Finds out what writing bytes `range` needs. An empty range at the new end is an extension.
pub(crate) fn prepare(state: &InodeState, pages: &Pages, range: Range<u64>) -> Ready {
    let (size, mapped) = (state.rec.size, state.logged.blocks);
    let first = range.start / BLOCK;
    let last = if range.is_empty() { first } else { range.end.div_ceil(BLOCK) };
    let inline = state.logged.inline.as_ref().is_some_and(|i| !i.is_empty());
    // The blocks that are written in part, and have contents that must stay.
    let head = (!range.start.is_multiple_of(BLOCK) && first < last).then_some(first);
    let tail =
        (!range.end.is_multiple_of(BLOCK) && range.end < size && first < last).then(|| last - 1);
    for block in [head, tail].into_iter().flatten() {
        let in_memory = pages.has(block) || (block == 0 && inline);
        if !in_memory && block * BLOCK < size {
            match pages.place(block, mapped) {
                Known::Load(window) => return Ready::Load(window),
                Known::Is(Place::Data(..) | Place::Lost) => return Ready::Fetch(block),
                Known::Is(_) => {}
            }
        }
    }
    let mut extra = Vec::new();
    // Behind the old end the last block may hold what a truncation cut off: it must become zeros on
    // the device too.
    let old_last = size / BLOCK;
    if range.end > size && !size.is_multiple_of(BLOCK) && !(first..last).contains(&old_last) {
        match pages.place(old_last, mapped) {
            Known::Load(window) => return Ready::Load(window),
            Known::Is(Place::Data(..)) if !pages.has(old_last) => return Ready::Fetch(old_last),
            Known::Is(Place::Data(..)) if !pages.is_dirty(old_last) => extra.push(old_last),
            Known::Is(_) => {}
        }
    }
    // A file that outgrows its record takes its contents with it, also those that are just on their
    // way there.
    let outgrown = range.end.max(size) > INLINE_MAX as u64 && (inline || pages.inline_taken);
    if outgrown && !(first..last).contains(&0) && !pages.is_dirty(0) {
        extra.push(0);
    }
    match needed(pages, first..last, mapped) {
        Ok(Needed { blocks, fills_hole }) => Ready::Yes(Plan {
            offset: range.start,
            need: blocks + extra.len() as u64,
            fills_hole,
            extra,
        }),
        Err(window) => Ready::Load(window),
    }
}

/// What dirtying blocks takes.
struct Needed {
    /// Blocks of space.
    blocks: u64,
    fills_hole: bool,
}

/// What dirtying `blocks` takes, or the window to load first.
fn needed(pages: &Pages, blocks: Range<u64>, mapped: u64) -> Result<Needed, u64> {
    let mut need = Needed { blocks: 0, fills_hole: false };
    let mut at = blocks.start;
    while at < blocks.end {
        let base = at / FOLIO_BLOCKS * FOLIO_BLOCKS;
        let to = blocks.end.min(base + FOLIO_BLOCKS);
        let dirty = pages.folio(at / FOLIO_BLOCKS).map_or(0, |f| f.dirty);
        let clean = mask(at - base, to - base) & !dirty;
        if mapped == 0 {
            need.blocks += u64::from(clean.count_ones());
            need.fills_hole |= clean != 0;
        } else {
            for block in (at..to).filter(|b| clean >> (b - base) & 1 == 1) {
                match pages.place(block, mapped) {
                    Known::Load(window) => return Err(window),
                    Known::Is(Place::Reserved) => {}
                    Known::Is(place) => {
                        need.blocks += 1;
                        need.fills_hole |= place == Place::Hole;
                    }
                }
            }
        }
        at = to;
    }
    Ok(need)
}

/// Makes the change that was prepared, under the exclusive inode lock: copies `data`, marks blocks
/// dirty. `size` is the file's then.
pub(crate) fn apply(
    inode: &Inode,
    state: &InodeState,
    pages: &mut Pages,
    plan: &Plan,
    data: &[u8],
    size: u64,
) {
    let mapped = state.logged.blocks;
    if let Some(inline) = &state.logged.inline
        && !pages.has(0)
        && (plan.extra.contains(&0) || (plan.offset < BLOCK && !data.is_empty()))
    {
        pages.with_folio(0, |f| {
            f.put(0, inline);
            f.validate(1);
        });
    }
    for &block in &plan.extra {
        let bit = block % FOLIO_BLOCKS;
        dirty_blocks(pages, block / FOLIO_BLOCKS, mask(bit, bit + 1), mapped);
    }
    let frames: Vec<_> = parts(plan.offset, data.len())
        .map(|part| {
            pages.with_folio(part.index, |folio| {
                folio.room(part.at, part.at + part.len);
                Arc::clone(folio.frame())
            })
        })
        .collect();
    begin(pages, mapped, plan.offset, data.len());
    fill_in(&frames, plan.offset, data);
    inode.file.readable.store(size, Ordering::Release);
    finish(&frames);
}

/// Marks valid blocks of a folio dirty and notes what they lie over.
pub(crate) fn dirty_blocks(pages: &mut Pages, index: u64, blocks: u16, mapped: u64) {
    let new = blocks & !pages.folio(index).map_or(0, |f| f.dirty);
    if new == 0 {
        return;
    }
    let (mut over_hole, mut promised) = (0_u16, 0_u16);
    if mapped == 0 {
        over_hole = new;
    } else {
        for bit in (0..FOLIO_BLOCKS).filter(|b| new >> b & 1 == 1) {
            match pages.place(index * FOLIO_BLOCKS + bit, mapped) {
                Known::Is(Place::Hole) => over_hole |= 1 << bit,
                Known::Is(Place::Reserved) => promised |= 1 << bit,
                Known::Is(Place::Data(..) | Place::Lost) | Known::Load(_) => {}
            }
        }
    }
    pages.delayed += u64::from(over_hole.count_ones());
    pages.with_folio(index, |f| {
        f.dirty |= new;
        f.over_hole |= over_hole;
        f.promised |= promised;
    });
}
