//! Cached contents of one file: its folios, and the loaded windows of its extent map.

use crate::cache::eviction::{Cache, CachedFile, Claimed};
use crate::cache::folio::{FOLIO_BLOCKS, Folio, OVERHEAD_BYTES, mask};
use crate::cache::frame::FOLIO_BYTES;
use crate::cache::frame::Frame;
use crate::cache::frame_table::Front;
use crate::cache::node::Node;
use crate::cache::queues::Item;
use crate::extents::{Mapping, WINDOW_BLOCKS, Window};
use crate::keys::BLOCK;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Cached contents and extents of one file.
#[derive(Default)]
pub struct Pages {
    folios: BTreeMap<u64, Box<Folio>>,
    /// Folios with dirty blocks.
    dirty: BTreeSet<u64>,
    /// Dirty blocks.
    pub dirty_blocks: u64,
    /// Those of them that lie over holes.
    pub delayed: u64,
    /// Blocks over holes that write-back has taken and not yet mapped.
    pub in_flight: u64,
    /// Loaded windows, by number.
    windows: Vec<(u64, LoadedWindow)>,
    /// Counts changes of the extent map, so that a window read meanwhile is not taken for the
    /// newest.
    pub map_version: u64,
    /// Blocks whose extents are being dropped, step by step: they read as holes already. Where that
    /// was interrupted by an error, the next thread with the right to change extents goes on.
    pub void: Option<Range<u64>>,
    /// The journal has an intent for it.
    pub intent: bool,
    /// Write-back has taken contents that are on their way into the record.
    pub inline_taken: bool,
    /// The contents are to move out of the record, whatever their size.
    pub no_inline: bool,
    /// The number of the file.
    pub ino: u64,
    /// Where memory is counted, once there is something to count; and where readers find frames.
    owner: Option<(Arc<Cache>, Arc<Front>)>,
}

struct LoadedWindow {
    window: Arc<Window>,
    node: Arc<Node>,
}

impl LoadedWindow {
    /// Bytes of memory.
    fn memory(&self) -> usize {
        self.window.memory() + OVERHEAD_BYTES
    }
}

/// A file of which more is cached leaves memory only after most of that has been evicted: dropping
/// it takes a short time.
const LEAVING_FOLIOS_MAX: usize = 16;

/// What is known of a block's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// This.
    Is(Mapping),
    /// The window with this number must be loaded first.
    Load(u64),
}

impl Pages {
    /// Counts this file's memory in `cache` from now on.
    pub fn attach(&mut self, cache: &Arc<Cache>, front: &Arc<Front>) {
        if self.owner.is_none() {
            self.owner = Some((Arc::clone(cache), Arc::clone(front)));
        }
    }

    fn charge(&self, more: usize, less: usize) {
        if let Some((cache, _)) = &self.owner {
            cache.charge(more, less);
        }
    }

    /// Lets readers find the frame of a folio without a lock, in a file of `size` bytes.
    pub fn show(&self, folio: &Folio, size: u64) {
        if let Some((cache, front)) = &self.owner {
            cache.charge(front.put(folio.frame(), folios(size), &cache.tables), 0);
        }
    }

    /// Readers must look for folio `index` anew.
    fn hide(&self, index: u64) {
        if let Some((_, front)) = &self.owner {
            front.forget(index);
        }
    }

    /// An item is gone.
    fn left(&self, node: &Node, memory: usize) {
        if let Some((cache, _)) = &self.owner {
            cache.leave(node);
            cache.charge(0, memory);
        }
    }

    /// Notes a use of a folio.
    pub fn note_use_of(&self, folio: &Folio) {
        if let Some((cache, _)) = &self.owner {
            cache.note_use(folio.node());
        }
    }

    /// Notes a use of folio `index`.
    pub fn note_use(&self, index: u64) {
        if let Some(folio) = self.folio(index) {
            self.note_use_of(folio);
        }
    }

    /// The journal has all of it, and it is little.
    pub(crate) fn is_at_rest(&mut self) -> bool {
        self.dirty_blocks + self.delayed + self.in_flight == 0
            && self.void.is_none()
            && !(self.intent || self.inline_taken)
            && self.folios.len() <= LEAVING_FOLIOS_MAX
            && self.windows.len() <= LEAVING_FOLIOS_MAX
            && self.folios.values_mut().all(|folio| folio.is_idle())
    }

    /// Takes a folio away.
    fn remove(&mut self, index: u64) {
        if let Some(folio) = self.folios.remove(&index) {
            folio.frame().give_up();
            self.hide(index);
            self.left(folio.node(), folio.memory());
        }
        // An empty tree keeps a node: 300 bytes in both, for each small file that the kernel
        // remembers.
        if self.folios.is_empty() {
            (self.folios, self.dirty) = Default::default();
        }
    }

    /// Where `block` is. `mapped` is the number of blocks that the file maps at all: without any,
    /// there is nothing to load.
    pub fn mapping(&self, block: u64, mapped: u64) -> Known {
        if mapped == 0 || self.void.as_ref().is_some_and(|v| v.contains(&block)) {
            return Known::Is(Mapping::Hole);
        }
        match self.window(block / WINDOW_BLOCKS) {
            Some(window) => Known::Is(window.mapping(block % WINDOW_BLOCKS)),
            None => Known::Load(block / WINDOW_BLOCKS),
        }
    }

    /// A loaded window.
    pub fn window(&self, index: u64) -> Option<&Arc<Window>> {
        let at = self.windows.binary_search_by_key(&index, |w| w.0).ok()?;
        let loaded = &self.windows[at].1;
        if let Some((cache, _)) = &self.owner {
            cache.note_use(&loaded.node);
        }
        Some(&loaded.window)
    }

    /// Sets a window, which can be evicted from now on.
    pub fn set_window(&mut self, file: &Arc<impl CachedFile>, index: u64, window: Arc<Window>) {
        let at = self.windows.binary_search_by_key(&index, |w| w.0);
        let at = at.unwrap_or_else(|at| {
            let loaded = LoadedWindow { window: Arc::default(), node: Arc::default() };
            self.charge(loaded.memory(), 0);
            self.windows.insert(at, (index, loaded));
            at
        });
        let loaded = &mut self.windows[at].1;
        let before = loaded.memory();
        loaded.window = window;
        let (node, memory) = (&loaded.node, loaded.memory());
        if let Some((cache, _)) = &self.owner {
            cache.charge(memory, before);
            cache.note_use(node);
            cache.resize(node, memory);
            cache.enter(file, Item::Window(index), node, memory);
        }
    }

    /// Takes a window away that was claimed, if it is there still.
    pub(crate) fn evict_window(&mut self, index: u64, claimed: &Claimed) {
        if let Some(at) = self.claimed_window(index, claimed) {
            let (_, evicted) = self.windows.remove(at);
            self.left(&evicted.node, evicted.memory());
            self.count_evicted();
        }
    }

    /// The same window stays.
    pub(crate) fn keep_window(&self, index: u64, claimed: &Claimed) {
        if let (Some(at), Some((cache, _))) = (self.claimed_window(index, claimed), &self.owner) {
            cache.again(claimed, self.windows[at].1.memory());
        }
    }

    fn claimed_window(&self, index: u64, claimed: &Claimed) -> Option<usize> {
        let at = self.windows.binary_search_by_key(&index, |w| w.0).ok()?;
        Arc::ptr_eq(&self.windows[at].1.node, &claimed.entry.node).then_some(at)
    }

    /// Takes a folio away that was claimed, if it is there still, clean and idle.
    pub(crate) fn evict_folio(&mut self, index: u64, claimed: &Claimed) {
        let Some(folio) = self.folios.get_mut(&index) else { return };
        // A dirty one comes back when it is clean.
        if !Arc::ptr_eq(folio.node(), &claimed.entry.node) || folio.dirty != 0 {
            return;
        }
        if folio.is_idle() {
            self.remove(index);
            self.count_evicted();
        } else if let Some((cache, _)) = &self.owner {
            cache.again(claimed, folio.memory());
        }
    }

    fn count_evicted(&self) {
        if let Some((cache, _)) = &self.owner {
            cache.count_evicted();
        }
    }

    /// Blocks of space that dirty blocks hold.
    #[cfg(test)]
    pub fn held(&self) -> u64 {
        self.folios.values().map(|f| u64::from((f.dirty & !f.over_unwritten).count_ones())).sum()
    }

    /// Evicts all that is clean.
    #[cfg(test)]
    pub fn evict_all(&mut self) {
        for index in self.folios.keys().copied().collect::<Vec<_>>() {
            if self.folios.get_mut(&index).is_some_and(|folio| folio.is_idle()) {
                self.remove(index);
            }
        }
        self.drop_windows(0, u64::MAX);
    }

    /// The block is in memory.
    pub fn has(&self, block: u64) -> bool {
        self.folios
            .get(&(block / FOLIO_BLOCKS))
            .is_some_and(|f| f.valid() >> (block % FOLIO_BLOCKS) & 1 == 1)
    }

    /// The block is in memory and not in the journal.
    pub fn is_dirty(&self, block: u64) -> bool {
        self.folios
            .get(&(block / FOLIO_BLOCKS))
            .is_some_and(|f| f.dirty >> (block % FOLIO_BLOCKS) & 1 == 1)
    }

    /// A dirty block lies over an unwritten extent.
    pub fn is_over_unwritten(&self, block: u64) -> bool {
        self.folios
            .get(&(block / FOLIO_BLOCKS))
            .is_some_and(|f| f.over_unwritten >> (block % FOLIO_BLOCKS) & 1 == 1)
    }

    /// A dirty block lies over a hole.
    pub fn is_over_hole(&self, block: u64) -> bool {
        self.folios
            .get(&(block / FOLIO_BLOCKS))
            .is_some_and(|f| f.over_hole >> (block % FOLIO_BLOCKS) & 1 == 1)
    }

    /// Blocks `range` are mapped to data now: those that have been dirtied again lie over data.
    /// Returns how many of them lay over unwritten extents.
    pub fn now_mapped(&mut self, range: Range<u64>) -> i64 {
        let mut over_unwritten = 0;
        let mut at = range.start;
        while at < range.end {
            let base = at / FOLIO_BLOCKS * FOLIO_BLOCKS;
            let to = range.end.min(base + FOLIO_BLOCKS);
            let blocks = mask(at - base, to - base);
            if let Some(folio) = self.folios.get_mut(&(at / FOLIO_BLOCKS)) {
                over_unwritten += i64::from((folio.over_unwritten & blocks).count_ones());
                self.delayed -= u64::from((folio.over_hole & blocks).count_ones());
                folio.over_unwritten &= !blocks;
                folio.over_hole &= !blocks;
            }
            at = to;
        }
        over_unwritten
    }

    /// A cached folio.
    pub fn folio(&self, index: u64) -> Option<&Folio> {
        self.folios.get(&index).map(|f| &**f)
    }

    /// Changes one folio (made if absent) and keeps the counts right. Returns what `change`
    /// returns.
    pub fn with_folio<R>(&mut self, index: u64, change: impl FnOnce(&mut Folio) -> R) -> R {
        let mut new = false;
        let memory = self.owner.as_ref().and_then(|(cache, _)| cache.memory.as_ref());
        let folio = self.folios.entry(index).or_insert_with(|| {
            new = true;
            Box::new(Folio::held_in(memory.cloned(), index))
        });
        let (memory, dirty) = (if new { 0 } else { folio.memory() }, folio.dirty);
        let frame = Arc::as_ptr(folio.frame());
        let result = change(folio);
        folio.note(self.ino);
        let (memory_now, dirty_now) = (folio.memory(), folio.dirty);
        let moved = !new && frame != Arc::as_ptr(folio.frame());
        if dirty != dirty_now {
            self.count_dirty(index, dirty, dirty_now);
        }
        self.charge(memory_now, memory);
        if moved {
            if let (Some((cache, _)), Some(folio)) = (&self.owner, self.folios.get(&index)) {
                cache.resize(folio.node(), memory_now);
            }
            self.hide(index);
        }
        result
    }

    fn count_dirty(&mut self, index: u64, before: u16, after: u16) {
        if before == 0 {
            self.dirty.insert(index);
        } else if after == 0 {
            self.dirty.remove(&index);
        }
        let (before, after) = (before.count_ones() as usize, after.count_ones() as usize);
        self.dirty_blocks = self.dirty_blocks + after as u64 - before as u64;
        if let Some((cache, _)) = &self.owner {
            cache.charge_dirty(after * BLOCK as usize, before * BLOCK as usize);
        }
    }

    /// The blocks of a folio that write-back has taken are mapped, by contexts up to this one.
    pub fn mapped(&mut self, index: u64, context: u64) {
        if let Some(folio) = self.folios.get_mut(&index) {
            folio.mapped(context);
            folio.note(self.ino);
        }
    }

    /// A folio that is clean can be evicted from now on.
    pub fn settle(&mut self, file: &Arc<impl CachedFile>, index: u64) {
        if let (Some(folio), Some((cache, _))) = (self.folios.get(&index), &self.owner)
            && folio.dirty == 0
        {
            cache.enter(file, Item::Folio(index), folio.node(), folio.memory());
        }
    }

    /// The frame of this block, if a thread copies into it.
    pub fn busy_frame(&self, block: u64) -> Option<Arc<Frame>> {
        let frame = self.folio(block / FOLIO_BLOCKS)?.frame();
        frame.is_changing().then(|| Arc::clone(frame))
    }

    /// Marks valid blocks of a folio dirty and notes what they lie over.
    pub fn mark_dirty(&mut self, index: u64, blocks: u16, mapped: u64) {
        let new = blocks & !self.folio(index).map_or(0, |f| f.dirty);
        if new == 0 {
            return;
        }
        let (mut over_hole, mut over_unwritten) = (0_u16, 0_u16);
        if mapped == 0 {
            over_hole = new;
        } else {
            for bit in (0..FOLIO_BLOCKS).filter(|b| new >> b & 1 == 1) {
                match self.mapping(index * FOLIO_BLOCKS + bit, mapped) {
                    Known::Is(Mapping::Hole) => over_hole |= 1 << bit,
                    Known::Is(Mapping::Unwritten) => over_unwritten |= 1 << bit,
                    Known::Is(Mapping::Data(..) | Mapping::Lost) | Known::Load(_) => {}
                }
            }
        }
        self.delayed += u64::from(over_hole.count_ones());
        self.with_folio(index, |f| {
            f.dirty |= new;
            f.over_hole |= over_hole;
            f.over_unwritten |= over_unwritten;
        });
    }

    /// The first run of dirty blocks at or behind `from` and before `to`, within one folio.
    pub fn dirty_run(&self, from: u64, to: u64) -> Option<Range<u64>> {
        for &index in self.dirty.range(from / FOLIO_BLOCKS..) {
            let base = index * FOLIO_BLOCKS;
            if base >= to {
                return None;
            }
            let skip = from.saturating_sub(base).min(FOLIO_BLOCKS);
            let bits = u32::from(self.folios[&index].dirty & mask(skip, FOLIO_BLOCKS));
            if bits != 0 {
                let first = bits.trailing_zeros();
                let len = (!(bits >> first)).trailing_zeros();
                let run = base + u64::from(first)..base + u64::from(first + len);
                return (run.start < to).then(|| run.start..run.end.min(to));
            }
        }
        None
    }

    /// Cached or dirty blocks at or behind `from`: the next one.
    pub fn next_cached(&self, from: u64) -> Option<u64> {
        self.folios.range(from / FOLIO_BLOCKS..).find_map(|(&index, folio)| {
            let base = index * FOLIO_BLOCKS;
            let bits =
                folio.valid() & mask(from.saturating_sub(base).min(FOLIO_BLOCKS), FOLIO_BLOCKS);
            (bits != 0).then(|| base + u64::from(bits.trailing_zeros()))
        })
    }

    /// Forgets blocks `[from, to)`. Returns how many dirty ones there were that held space of their
    /// own.
    pub fn forget(&mut self, from: u64, to: u64) -> u64 {
        let mut held = 0;
        let indices: Vec<u64> = self
            .folios
            .range(from / FOLIO_BLOCKS..to.div_ceil(FOLIO_BLOCKS))
            .map(|(&i, _)| i)
            .collect();
        for index in indices {
            let base = index * FOLIO_BLOCKS;
            let blocks = mask(from.saturating_sub(base), (to - base).min(FOLIO_BLOCKS));
            let cleaned = self.with_folio(index, |f| f.forget(blocks));
            held += cleaned.held;
            self.delayed -= cleaned.over_hole;
            if self.folios.get(&index).is_some_and(|f| f.valid() == 0) {
                self.remove(index);
            }
        }
        held
    }

    /// The same, of a file that lives on. A folio at either end may have lost all of its dirty
    /// blocks, and can be evicted then.
    pub fn cut_out(&mut self, file: &Arc<impl CachedFile>, from: u64, to: u64) -> u64 {
        let held = self.forget(from, to);
        for end in [from, to] {
            self.settle(file, end / FOLIO_BLOCKS);
        }
        held
    }

    /// Drops the windows `[from, to)`, which a change has made wrong.
    pub fn drop_windows(&mut self, from: u64, to: u64) {
        let (dropped, left) = std::mem::take(&mut self.windows)
            .into_iter()
            .partition(|(index, _)| (from..to).contains(index));
        self.windows = left;
        let dropped: Vec<(u64, LoadedWindow)> = dropped;
        dropped.iter().for_each(|(_, loaded)| self.left(&loaded.node, loaded.memory()));
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let folios = self.folios.values().map(|folio| (folio.node(), folio.memory()));
        let windows = self.windows.iter().map(|(_, loaded)| (&loaded.node, loaded.memory()));
        folios.chain(windows).for_each(|(node, memory)| self.left(node, memory));
        if let Some((cache, front)) = &self.owner {
            cache.charge(0, front.memory());
            cache.tables.give_back(front);
            cache.charge_dirty(0, self.dirty_blocks as usize * BLOCK as usize);
        }
    }
}

/// Folios of a file of `size` bytes.
pub fn folios(size: u64) -> u64 {
    size.div_ceil(FOLIO_BYTES as u64)
}

/// Zeroes what a cached last block holds behind byte `size`.
pub fn zero_tail(pages: &mut Pages, size: u64) {
    let (block, at) = (size / BLOCK, size % BLOCK);
    if at != 0 && pages.has(block) {
        let from = (size as usize) % FOLIO_BYTES;
        pages.with_folio(block / FOLIO_BLOCKS, |f| {
            f.zero(from, from.next_multiple_of(BLOCK as usize))
        });
    }
}
