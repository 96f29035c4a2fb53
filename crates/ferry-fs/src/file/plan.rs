//! What a change of cached contents needs, and the change itself.

use crate::cache::copy::{begin, fill_in, finish, parts};
use crate::cache::folio::{FOLIO_BLOCKS, mask};
use crate::cache::pages::{Known, Pages};
use crate::error::FsError;
use crate::extents::Mapping;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{BLOCK, INLINE_MAX};
use crate::space::free_blocks::{Claim, Want};
use crate::space::pool::Space;
use crate::store::data_store::{Busy, DataStore};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a change of cached contents needs before it can be made.
pub(crate) enum Needs {
    /// This window of the extent map must be loaded.
    Window(u64),
    /// This block of the file must be read.
    Block(u64),
    /// So much space must be found.
    Space(Want),
    /// The change cannot be made.
    Refused(FsError),
}

impl From<FsError> for Needs {
    fn from(error: FsError) -> Self {
        Self::Refused(error)
    }
}

impl DataStore {
    /// Changes cached contents. `attempt` makes the change, or says what the change needs and holds
    /// no lock then. This provides what is needed, and `attempt` is called again.
    pub(crate) fn change_contents<T>(
        &self,
        inode: &Arc<Inode>,
        busy: Busy,
        claim: &mut Claim<'_>,
        mut attempt: impl FnMut(&mut Claim<'_>) -> Result<T, Needs>,
    ) -> Result<T, FsError> {
        loop {
            match attempt(claim) {
                Ok(made) => return Ok(made),
                Err(Needs::Window(_) | Needs::Block(_)) if self.is_refused(busy) => {
                    return Err(FsError::WouldWait);
                }
                Err(Needs::Window(window)) => self.load_window(inode, window)?,
                Err(Needs::Block(block)) => self.fetch_block(inode, block)?,
                Err(Needs::Space(want)) => self.find_space_or_refuse(busy, want, claim)?,
                Err(Needs::Refused(error)) => return Err(error),
            }
        }
    }
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

impl Plan {
    /// It changes more than the blocks that it writes, or counts that the exclusive lock keeps.
    pub(crate) fn needs_exclusive(&self) -> bool {
        self.fills_hole || !self.extra.is_empty()
    }

    /// The space that it takes.
    pub fn wants(&self, space: &Space) -> Want {
        let overwrites = !self.needs_exclusive();
        if overwrites { space.overwriting(self.need) } else { Want::new(self.need) }
    }
}

/// Finds out what writing bytes `range` needs. An empty range at the new end is an extension.
pub(crate) fn prepare(state: &InodeState, pages: &Pages, range: Range<u64>) -> Result<Plan, Needs> {
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
            match pages.mapping(block, mapped) {
                Known::Load(window) => return Err(Needs::Window(window)),
                Known::Is(Mapping::Data(..) | Mapping::Lost) => return Err(Needs::Block(block)),
                Known::Is(_) => {}
            }
        }
    }
    let mut extra = Vec::new();
    // Behind the old end the last block may hold what a truncation cut off: it must become zeros on
    // the device too.
    let old_last = size / BLOCK;
    if range.end > size && !size.is_multiple_of(BLOCK) && !(first..last).contains(&old_last) {
        match pages.mapping(old_last, mapped) {
            Known::Load(window) => return Err(Needs::Window(window)),
            Known::Is(Mapping::Data(..)) if !pages.has(old_last) => {
                return Err(Needs::Block(old_last));
            }
            Known::Is(Mapping::Data(..)) if !pages.is_dirty(old_last) => extra.push(old_last),
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
        Ok(Needed { blocks, fills_hole }) => {
            Ok(Plan { offset: range.start, need: blocks + extra.len() as u64, fills_hole, extra })
        }
        Err(window) => Err(Needs::Window(window)),
    }
}

/// What dirtying blocks takes.
pub(crate) struct Needed {
    /// Blocks of space.
    blocks: u64,
    fills_hole: bool,
}

/// What dirtying `blocks` takes, or the window to load first.
pub(crate) fn needed(pages: &Pages, blocks: Range<u64>, mapped: u64) -> Result<Needed, u64> {
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
                match pages.mapping(block, mapped) {
                    Known::Load(window) => return Err(window),
                    Known::Is(Mapping::Unwritten) => {}
                    Known::Is(mapping) => {
                        need.blocks += 1;
                        need.fills_hole |= mapping == Mapping::Hole;
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
        pages.mark_dirty(block / FOLIO_BLOCKS, mask(bit, bit + 1), mapped);
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
