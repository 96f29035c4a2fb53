//! Trees whose beginning is lost: found by looking at every page of the file.
//!
//! A page is named by its location and its checksum. So of any two pages it can be told whether one
//! belongs below the other, and a tree whose pages all match is one that redb wrote, as of some
//! commit. Pages of old commits stay where they are until redb needs the room: those of the last
//! but one are all there.

use super::file::HomeFile;
use super::shape::{BRANCH, LEAF};
use super::state::HomeState;
use super::tables::{KEYS, META, META_POINT};
use super::tree::{DEPTH_MAX, Link, Node, PageSource, Tree, Widths, location};
use super::unit::header::REGION_PAGES;
use crate::types::Point;
use ferry_device::BLOCK_SIZE;
use redb::TableHandle;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use twox_hash::XxHash3_128;

/// Of the states of the store that are found, so many of the newest are looked at.
const STATES_MAX: usize = 16;
const BLOCK: u64 = BLOCK_SIZE as u64;
const VARYING: Widths = Widths { key: None, value: None };
const META_WIDTHS: Widths = Widths { key: Some(1), value: None };

/// What is left of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weight {
    /// Entries that can be read.
    pub entries: u64,
    /// Pages that cannot, or are not those which belong there; what they led to is not counted.
    pub damaged: u64,
}

/// What a page of varying widths is.
#[derive(Clone, Copy)]
struct Known {
    sum: u128,
    entries: u64,
    branch: bool,
    /// Bytes of it that are used.
    len: usize,
}

/// All pages of a file.
pub struct Search<'f> {
    file: &'f Arc<HomeFile>,
    /// By number, of pages of one block.
    pages: HashMap<u64, Known>,
    weights: HashMap<u64, Weight>,
    /// Leaves of more than one block, by their bytes in the file; `None`: there is none.
    long: HashMap<(u64, u64), Option<Known>>,
    /// The tables of keys as tables of tables name them, and what the store says of itself there;
    /// the newest first.
    pub states: Vec<(Tree, HomeState)>,
    /// First pages of the tables of keys of which that is not known.
    parts: HashSet<u64>,
    /// The newest context that any page says is in the store.
    pub newest: u64,
}

/// The blocks of the file that a page takes behind its first, as far as it uses them.
fn inner_blocks(link: Link, len: usize) -> Range<u64> {
    let first = location(link.number).map_or(0, |(offset, _)| offset / BLOCK);
    first + 1..first + (len as u64).div_ceil(BLOCK).max(1)
}

/// The number of a page of one block.
fn number_of(block: u64) -> u64 {
    let (region, index) = ((block - 1) / REGION_PAGES, (block - 1) % REGION_PAGES);
    region << 20 | index
}

impl<'f> Search<'f> {
    /// Looks at every page.
    pub fn new(file: &'f Arc<HomeFile>) -> Self {
        let mut search = Self {
            file,
            pages: HashMap::new(),
            weights: HashMap::new(),
            long: HashMap::new(),
            states: Vec::new(),
            parts: HashSet::new(),
            newest: 0,
        };
        let (mut tables, mut bytes) = (Vec::new(), Vec::new());
        for block in file.blocks().into_iter().flatten().filter(|block| *block > 0) {
            if file.page(block * BLOCK, BLOCK_SIZE, &mut bytes).is_ok() {
                tables.extend(search.note(number_of(block), &bytes));
            }
        }
        for [keys, meta] in tables {
            let state = meta.root.and_then(|link| search.state_at(link));
            // Without a position in the log it is a part of a copy that was being made.
            let state = state.filter(|state| state.point != Point::default());
            if state.is_none() {
                search.parts.extend(keys.root.map(|link| link.number));
            }
            search.states.extend(state.map(|state| (keys, state)));
        }
        search.states.sort_by_key(|(_, state)| std::cmp::Reverse(state.point.seq));
        search.states.truncate(STATES_MAX);
        search
    }

    /// Notes a page; returns the trees that it names, if it is a table of tables.
    fn note(&mut self, number: u64, bytes: &[u8]) -> Option<[Tree; 2]> {
        if let Some(state) = self.state_in(bytes) {
            self.newest = self.newest.max(state.point.seq.0);
        }
        let node = Node { bytes, widths: VARYING };
        let used = node.used()?;
        let (sum, len) = (XxHash3_128::oneshot(used), used.len());
        let tables = tables_in(node);
        if tables.is_none() {
            let branch = node.is(BRANCH);
            let entries = if branch { 0 } else { node.count() as u64 };
            self.pages.insert(number, Known { sum, entries, branch, len });
        }
        tables
    }

    /// What a page says of the store, if it is one that does.
    fn state_in(&self, bytes: &[u8]) -> Option<HomeState> {
        let node = Node { bytes, widths: META_WIDTHS };
        let (key, value) = (node.is(LEAF) && node.count() == 1).then(|| node.entry(0)).flatten()?;
        (bytes[key] == [META_POINT])
            .then(|| HomeState::decode(&bytes[value], &self.file.hash_key()))
            .flatten()
    }

    fn state_at(&self, link: Link) -> Option<HomeState> {
        let (offset, len) = location(link.number)?;
        let mut bytes = Vec::new();
        self.file.page(offset, len, &mut bytes).ok()?;
        (Node { bytes: &bytes, widths: META_WIDTHS })
            .matches(link.sum)
            .then(|| self.state_in(&bytes))
            .flatten()
    }

    /// How much of a tree of keys is there.
    pub fn weigh(&mut self, tree: &Tree) -> Weight {
        tree.root.map_or_else(Weight::default, |link| self.below(link, 0))
    }

    /// Its first page is the one that belongs there.
    pub fn has_root(&mut self, tree: &Tree) -> bool {
        tree.root.is_none_or(|link| self.known(link).is_some())
    }

    /// What a page is, if it is the one that is meant.
    fn known(&mut self, link: Link) -> Option<Known> {
        let known = match self.pages.get(&link.number) {
            Some(known) => Some(*known),
            None => match self.long.get(&link.range()) {
                Some(known) => *known,
                None => {
                    let known = self.long_leaf(link);
                    self.long.insert(link.range(), known);
                    known
                }
            },
        };
        known.filter(|known| known.sum == link.sum)
    }

    fn long_leaf(&self, link: Link) -> Option<Known> {
        let (offset, len) = location(link.number).filter(|(_, len)| *len > BLOCK_SIZE)?;
        let mut bytes = Vec::new();
        self.file.page(offset, len, &mut bytes).ok()?;
        let node = Node { bytes: &bytes, widths: VARYING };
        let used = node.used().filter(|_| node.is(LEAF))?;
        let (sum, entries) = (XxHash3_128::oneshot(used), node.count() as u64);
        Some(Known { sum, entries, branch: false, len: used.len() })
    }

    fn below(&mut self, link: Link, depth: usize) -> Weight {
        let Some(known) = self.known(link).filter(|_| depth < DEPTH_MAX) else {
            return Weight { entries: 0, damaged: 1 };
        };
        if !known.branch {
            return Weight { entries: known.entries, damaged: 0 };
        }
        if let Some(weight) = self.weights.get(&link.number) {
            return *weight;
        }
        // Pages that led in a circle would find this.
        self.weights.insert(link.number, Weight { entries: 0, damaged: 1 });
        let mut all = Weight::default();
        for child in self.children(link.number) {
            let weight = self.below(child, depth + 1);
            // The same page may count again and again, in a tree that somebody made.
            all.entries = all.entries.saturating_add(weight.entries);
            all.damaged = all.damaged.saturating_add(weight.damaged);
        }
        self.weights.insert(link.number, all);
        all
    }

    fn children(&self, number: u64) -> Vec<Link> {
        let mut bytes = Vec::new();
        let read = location(number)
            .is_some_and(|(offset, len)| self.file.page(offset, len, &mut bytes).is_ok());
        if read { Node { bytes: &bytes, widths: VARYING }.children() } else { Vec::new() }
    }

    /// The best of the trees that no page names: of those that are whole, and of which no older
    /// state of the store knows, the one with most entries.
    pub fn best_root(&mut self) -> Option<(Tree, Weight)> {
        let branches: Vec<u64> = self
            .pages
            .iter()
            .filter(|(_, known)| known.branch)
            .map(|(number, _)| *number)
            .collect();
        // Named by a page, or a part of a large value that is: whatever a user writes there is no
        // page.
        let mut named = HashSet::new();
        for number in &branches {
            for child in self.children(*number) {
                if let Some(known) = self.known(child) {
                    named.insert(child.number);
                    named.extend(inner_blocks(child, known.len).map(number_of));
                }
            }
        }
        let mut roots: Vec<u64> =
            branches.into_iter().filter(|number| !named.contains(number)).collect();
        if roots.is_empty() {
            roots.extend(self.pages.keys().filter(|number| !named.contains(number)));
        }
        roots.sort_unstable();
        let states = self.states.iter().filter_map(|(tree, _)| tree.root).map(|link| link.number);
        let old: HashSet<u64> = states.chain(self.parts.iter().copied()).collect();
        let weighed = roots.into_iter().map(|number| {
            let link = Link { number, sum: self.pages[&number].sum };
            (link, self.below(link, 0))
        });
        let best = weighed.max_by_key(|(link, weight)| {
            (weight.damaged == 0, !old.contains(&link.number), weight.entries)
        });
        let (link, weight) = best.filter(|(_, weight)| weight.entries > 0)?;
        Some((
            Tree { name: KEYS.name().as_bytes().into(), root: Some(link), widths: VARYING },
            weight,
        ))
    }
}

/// The table of keys and what the store says of itself, as a table of tables names them.
fn tables_in(node: Node<'_>) -> Option<[Tree; 2]> {
    if !node.is(LEAF) || node.count() != 2 {
        return None;
    }
    let tree = |n: usize| {
        let (name, value) = node.entry(n)?;
        Tree::decode(&node.bytes[name], &node.bytes[value])
    };
    let [keys, meta] = [tree(0)?, tree(1)?];
    let named = |tree: &Tree, name: &str| *tree.name == *name.as_bytes();
    (named(&keys, KEYS.name()) && named(&meta, META.name())).then_some([keys, meta])
}
