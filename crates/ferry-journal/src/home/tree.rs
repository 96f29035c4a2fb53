//! redb's trees, read without redb: each page is held against the checksum that the page above it,
//! or the header, has of it.
//!
//! The checksums of `unit.rs` say that a block is what somebody wrote there. That it is the page
//! which belongs there, redb's own checksums say; redb looks at them only when it must. A page that
//! fails them may be an old one, another tree's, or nobody's. Its branches may still lead to pages
//! that are whole, and its entries may still be right: what to believe, the reader decides.

use super::shape::{
    BRANCH, BRANCH_HEADER, CHECKSUM as SUM, CHILD, KEY_WIDTHS, LEAF, LEAF_HEADER, NUMBER, page_at,
};
use crate::JournalError;
use crate::bytes::{u16_at, u32_at, u64_at};
use ferry_device::BLOCK_SIZE;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use twox_hash::XxHash3_128;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes of where a tree begins: its page's number and checksum, and the number of entries.
const ROOT: usize = CHILD + 8;
/// The header: which slot counts, and the two slots.
const GOD_BYTE: usize = 9;
const SLOTS: [usize; 2] = [64, 192];
/// A slot: two bytes that say which trees there are, where they begin, the number of the commit,
/// its checksum.
const PRESENT: [usize; 2] = [1, 2];
const ROOTS: [usize; 2] = [8, 8 + ROOT];
const COMMIT: usize = 104;
const SLOT_SUM: usize = 112;
/// The slot that counts; one of redb's flags beside it must be known.
const PRIMARY: u8 = 1;
const FLAGS: u8 = 7;
/// What a page is that a page has led to before.
const TWICE: &str = "two pages lead to it";
/// What a page is that does not match the checksum which the page above it has of it.
pub const NOT_THE_ONE: &str = "it is not the page that belongs there";
/// A page has at most 2^12 blocks: the longest value of ours, or of the allocator's state, takes
/// far fewer.
const ORDER_MAX: u32 = 12;
/// Levels on the way to the first key below a page.
pub const DEPTH_MAX: usize = 32;

/// Where a page is, and what it should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    pub number: u64,
    pub sum: u128,
}

impl Link {
    fn decode(bytes: &[u8]) -> Self {
        let (low, high) = (u64_at(bytes, NUMBER), u64_at(bytes, NUMBER + 8));
        Self { number: u64_at(bytes, 0), sum: u128::from(high) << 64 | u128::from(low) }
    }

    /// Its bytes in the file: some bits of a number mean nothing.
    pub fn range(self) -> (u64, u64) {
        let Range { start, end } = page_at(self.number);
        (start, end)
    }

    /// The page's first block in the file, and its checksum.
    fn known(self) -> Option<(u64, u128)> {
        Some((location(self.number)?.0 / BLOCK, self.sum))
    }
}

/// The lengths of all keys and of all values of a tree, where they do not vary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Widths {
    pub key: Option<usize>,
    pub value: Option<usize>,
}

/// A tree of redb's.
#[derive(Clone, Debug)]
pub struct Tree {
    /// The table that it is of.
    pub name: Box<[u8]>,
    /// `None`: it is empty.
    pub root: Option<Link>,
    pub widths: Widths,
}

impl Tree {
    /// As a table of tables describes one: its kind, the number of its entries, its root, the
    /// widths.
    pub fn decode(name: &[u8], value: &[u8]) -> Option<Self> {
        const KIND: u8 = 3;
        const AT: usize = 9;
        let width = |at: usize| (value[at] != 0).then(|| u32_at(value, at + 1) as usize);
        let after = AT + 1 + ROOT;
        if value.len() < after + 10 || value[0] != KIND {
            return None;
        }
        let root = (value[AT] != 0).then(|| Link::decode(&value[AT + 1..after]));
        Some(Self {
            name: name.into(),
            root,
            widths: Widths { key: width(after), value: width(after + 5) },
        })
    }

    /// Its first page, by that page's first block in the file.
    pub fn link(&self) -> Option<(u64, u128)> {
        self.root.and_then(Link::known)
    }
}

/// The database's header.
pub struct Header {
    /// The trees of our tables, and of redb's own.
    roots: [Option<Link>; 2],
    /// The number of the commit that it leads to.
    commit: u64,
    /// What is wrong with it, if it can be used none the less.
    pub problem: Option<&'static str>,
}

impl Header {
    /// Reads the file's first block; `None`: there is no way from it to a tree.
    pub fn decode(block: &[u8]) -> Option<Self> {
        let whole = SLOTS.map(|at| {
            let slot = &block[at..at + SLOT_SUM + SUM];
            XxHash3_128::oneshot(&slot[..SLOT_SUM]).to_le_bytes() == slot[SLOT_SUM..]
        });
        let primary = usize::from(block[GOD_BYTE] & PRIMARY);
        let (used, problem) = match (whole[primary], whole[1 - primary], block[GOD_BYTE] & !FLAGS) {
            (true, _, 0) => (primary, None),
            (true, ..) => (primary, Some("the database's header has flags that nobody knows")),
            (false, true, _) => {
                (1 - primary, Some("the newest of the database's two roots is damaged"))
            }
            (false, false, _) => return None,
        };
        let slot = &block[SLOTS[used]..];
        let root = |n: usize| (slot[PRESENT[n]] != 0).then(|| Link::decode(&slot[ROOTS[n]..]));
        Some(Self { roots: [root(0), root(1)], commit: u64_at(slot, COMMIT), problem })
    }

    /// Of a file whose trees are found without one.
    pub fn none() -> Self {
        Self { roots: [None; 2], commit: 0, problem: None }
    }

    /// The number of the commit that it leads to, if the first pages of its trees are there.
    pub fn commit(&self, file: &impl PageSource) -> Option<u64> {
        let is_there = |link: &Link| {
            let mut bytes = Vec::new();
            let read = location(link.number)
                .is_some_and(|(offset, len)| file.page(offset, len, &mut bytes).is_ok());
            read && Node { bytes: &bytes, widths: Widths::default() }.matches(link.sum)
        };
        self.roots.iter().flatten().all(is_there).then_some(self.commit)
    }

    /// The pages that it leads to, by their first blocks in the file.
    pub fn links(&self) -> Vec<(u64, u128)> {
        self.roots.into_iter().flatten().filter_map(Link::known).collect()
    }
}

/// The pages below `page`, by their first blocks in the file, if it matches its checksum as a page
/// of any tree.
pub fn judge(page: &[u8], sum: u128) -> Option<Vec<(u64, u128)>> {
    let node = |key| Node { bytes: page, widths: Widths { key, value: None } };
    let mut nodes = std::iter::once(None).chain(KEY_WIDTHS.map(Some)).map(node);
    let node = nodes.find(|node| node.matches(sum))?;
    Some(node.children().into_iter().filter_map(Link::known).collect())
}

/// Where a page begins in the file, and its length, in bytes; `None`: no page of ours is so large.
pub fn location(number: u64) -> Option<(u64, usize)> {
    let Range { start, end } = page_at(number);
    (end - start <= BLOCK << ORDER_MAX).then_some((start, (end - start) as usize))
}

/// A page that was read, or could not be.
pub struct Page {
    /// Blocks of the file.
    pub blocks: Range<u64>,
    /// Where it is on the device, in bytes.
    pub device_offset: u64,
    /// Why it is not the page that belongs there.
    pub problem: Option<String>,
    /// It, or a page above it, is not the one that belongs there.
    pub doubtful: bool,
    /// Its keys are greater than the first and not greater than the second.
    bounds: [Option<Arc<[u8]>>; 2],
    /// Empty if it cannot be read.
    bytes: Vec<u8>,
    pub widths: Widths,
}

/// The bytes of a page, of a tree of these widths.
#[derive(Clone, Copy)]
pub struct Node<'p> {
    pub bytes: &'p [u8],
    pub widths: Widths,
}

impl Node<'_> {
    fn u32_in(&self, at: usize) -> Option<usize> {
        self.bytes.get(at..at + 4).map(|bytes| u32_at(bytes, 0) as usize)
    }

    pub fn count(&self) -> usize {
        if self.bytes.len() < BLOCK_SIZE { 0 } else { usize::from(u16_at(self.bytes, 2)) }
    }

    pub fn is(&self, kind: u8) -> bool {
        self.bytes.first() == Some(&kind)
    }

    /// Where the `n`th of the parts of one kind lies: parts of `width` bytes stand side by side
    /// from `from` on, or each ends where a list at `ends` says.
    fn part(
        &self,
        n: usize,
        width: Option<usize>,
        from: usize,
        ends: usize,
    ) -> Option<Range<usize>> {
        let end = |n: usize| match width {
            Some(width) => Some(from + (n + 1) * width),
            None => self.u32_in(ends + 4 * n),
        };
        let start = if n == 0 { from } else { end(n - 1)? };
        let range = start..end(n)?;
        self.bytes.get(range.clone()).map(|_| range)
    }

    fn branch_key(&self, n: usize) -> Option<Range<usize>> {
        let ends = BRANCH_HEADER + (self.count() + 1) * CHILD;
        let from = if self.widths.key.is_none() { ends + 4 * self.count() } else { ends };
        self.part(n, self.widths.key, from, ends)
    }

    pub fn entry(&self, n: usize) -> Option<(Range<usize>, Range<usize>)> {
        let list = |width: Option<usize>| if width.is_none() { 4 * self.count() } else { 0 };
        let (keys_at, values_at) = (LEAF_HEADER, LEAF_HEADER + list(self.widths.key));
        let from = values_at + list(self.widths.value);
        let key = |n| self.part(n, self.widths.key, from, keys_at);
        let values_from = key(self.count().checked_sub(1)?)?.end;
        Some((key(n)?, self.part(n, self.widths.value, values_from, values_at)?))
    }

    /// All of it that is used, if it makes sense.
    pub fn used(&self) -> Option<&[u8]> {
        let last = self.count().checked_sub(1)?;
        let end = match self.bytes[0] {
            LEAF => self.entry(last)?.1.end,
            BRANCH => self.branch_key(last)?.end,
            _ => return None,
        };
        self.bytes.get(..end)
    }

    /// It matches this checksum, which covers all of it that is used.
    pub fn matches(&self, sum: u128) -> bool {
        self.used().is_some_and(|used| XxHash3_128::oneshot(used) == sum)
    }

    pub fn children(&self) -> Vec<Link> {
        if !self.is(BRANCH) {
            return Vec::new();
        }
        let count = self.count() + 1;
        let link = |n: usize| {
            let sum = self.bytes.get(BRANCH_HEADER + n * SUM..)?.get(..SUM)?;
            let number =
                self.bytes.get(BRANCH_HEADER + count * SUM + n * NUMBER..)?.get(..NUMBER)?;
            Some(Link::decode(&[number, sum].concat()))
        };
        (0..count).filter_map(link).collect()
    }
}

impl Page {
    fn node(&self) -> Node<'_> {
        Node { bytes: &self.bytes, widths: self.widths }
    }

    /// The entries of a leaf that can be where they are, in the order of their keys.
    pub fn entries(&self) -> Vec<(&[u8], &[u8])> {
        let node = self.node();
        let count = if node.is(LEAF) { node.count() } else { 0 };
        let [low, high] = &self.bounds;
        let inside = |key: &[u8]| {
            low.as_ref().is_none_or(|low| key > &**low)
                && high.as_ref().is_none_or(|high| key <= &**high)
        };
        let found =
            (0..count).filter_map(|n| node.entry(n)).map(|(k, v)| (&self.bytes[k], &self.bytes[v]));
        let mut entries: Vec<_> = found.filter(|(key, _)| inside(key)).collect();
        if self.doubtful {
            entries.sort_by_key(|(key, _)| *key);
        }
        entries
    }
}

/// A page to be read.
struct Step {
    link: Link,
    /// It was met before.
    twice: bool,
    bounds: [Option<Arc<[u8]>>; 2],
    doubtful: bool,
}

/// A file of redb's that pages are read from.
pub trait PageSource {
    /// Reads a page of the database's.
    fn page(&self, offset: u64, len: usize, out: &mut Vec<u8>) -> Result<(), JournalError>;
    /// Where a byte of the file is on the device; 0: nowhere.
    fn device_offset(&self, offset: u64) -> u64;
}

/// All pages of a tree, those of greater keys later.
pub struct Walk<F> {
    file: Arc<F>,
    pub widths: Widths,
    todo: Vec<Step>,
    /// Pages that a whole page led to, by their bytes in the file. Somebody may have made a tree
    /// that leads to the same pages again and again, and would never end: no tree of redb's does.
    met: HashSet<(u64, u64)>,
    /// Pages that a doubtful page led to: each counts once, or they could lead in a circle.
    strays: HashSet<(u64, u64)>,
}

impl<F: PageSource> Walk<F> {
    pub fn new(file: &Arc<F>, tree: &Tree) -> Self {
        Self::after(HashSet::new(), file, tree)
    }

    /// After walks over other trees of the same state, which have met these.
    fn after(mut met: HashSet<(u64, u64)>, file: &Arc<F>, tree: &Tree) -> Self {
        let first = tree.root.map(|link| {
            let twice = !met.insert(link.range());
            Step { link, twice, bounds: [None, None], doubtful: false }
        });
        let todo = first.into_iter().collect();
        Self { file: file.clone(), widths: tree.widths, todo, met, strays: HashSet::new() }
    }

    /// All pages of these trees of one state; `false`: `visit` ended it.
    pub fn over(file: &Arc<F>, trees: &[Tree], visit: &mut dyn FnMut(&Page) -> bool) -> bool {
        let mut met = HashSet::new();
        for tree in trees {
            let mut walk = Self::after(met, file, tree);
            if !walk.all(|page| visit(&page)) {
                return false;
            }
            met = walk.met;
        }
        true
    }

    /// The trees of our tables, or of redb's own, and to `seen` the pages that say so.
    pub fn tables(
        file: &Arc<F>,
        header: &Header,
        own: bool,
        seen: &mut dyn FnMut(&Page),
    ) -> Vec<Tree> {
        let root = header.roots[usize::from(own)];
        let table = Tree { name: Box::default(), root, widths: Widths::default() };
        let mut trees = Vec::new();
        for page in Self::new(file, &table) {
            seen(&page);
            trees.extend(
                page.entries().iter().filter_map(|(name, value)| Tree::decode(name, value)),
            );
        }
        trees
    }

    fn read(&self, step: Step) -> Page {
        let Step { link, twice, bounds, doubtful } = step;
        let (offset, len) = location(link.number).unwrap_or((u64::MAX, BLOCK_SIZE));
        let blocks = offset / BLOCK..(offset / BLOCK).saturating_add(len as u64 / BLOCK);
        let mut bytes = Vec::new();
        let read = if twice { Ok(()) } else { self.file.page(offset, len, &mut bytes) };
        let problem = match read {
            Err(JournalError::Damaged { offset, detail, .. }) => Some((offset, detail)),
            Err(error) => Some((0, error.to_string())),
            Ok(()) => None,
        };
        let (unreadable, problem) = match problem {
            Some((device_offset, detail)) => (Some(device_offset), Some(detail)),
            None => (None, None),
        };
        let device_offset = unreadable.unwrap_or_else(|| self.file.device_offset(offset));
        let mut page =
            Page { blocks, device_offset, problem, doubtful, bounds, bytes, widths: self.widths };
        if page.problem.is_none() && (twice || !page.node().matches(link.sum)) {
            page.problem = Some(if twice { TWICE } else { NOT_THE_ONE }.to_owned());
        }
        page.doubtful |= page.problem.is_some();
        page
    }

    /// What the page leads to. What a doubtful page says of the keys below it is not believed.
    fn descend(&mut self, page: &Page) {
        let mut links = page.node().children();
        if page.doubtful {
            links.retain(|link| self.strays.insert(link.range()));
            self.in_order(&mut links);
        }
        let key = |n: usize| page.node().branch_key(n).map(|range| Arc::from(&page.bytes[range]));
        let last = links.len().saturating_sub(1);
        let steps: Vec<Step> = (0..)
            .zip(links)
            .map(|(n, link)| {
                let mut bounds = page.bounds.clone();
                if !page.doubtful {
                    bounds[0] = if n == 0 { bounds[0].take() } else { key(n - 1) };
                    bounds[1] = if n == last { bounds[1].take() } else { key(n) };
                }
                let twice = !page.doubtful && !self.met.insert(link.range());
                Step { link, twice, bounds, doubtful: page.doubtful }
            })
            .collect();
        self.todo.extend(steps.into_iter().rev());
    }

    /// Puts the children of a doubtful page in the order of the first keys below them; one that
    /// cannot be read stays behind the one before it.
    fn in_order(&self, links: &mut Vec<Link>) {
        let mut before = None;
        let mut keyed: Vec<_> = Vec::new();
        for link in links.drain(..) {
            before = self.first_key(link).or(before);
            keyed.push((before.clone(), link));
        }
        keyed.sort_by(|(a, _), (b, _)| a.cmp(b));
        links.extend(keyed.into_iter().map(|(_, link)| link));
    }

    fn first_key(&self, mut link: Link) -> Option<Vec<u8>> {
        for _ in 0..DEPTH_MAX {
            let page = self.read(Step { link, twice: false, bounds: [None, None], doubtful: true });
            match page.node().children().first() {
                Some(first) => link = *first,
                None => return page.entries().first().map(|(key, _)| key.to_vec()),
            }
        }
        None
    }
}

impl<F: PageSource> Iterator for Walk<F> {
    type Item = Page;

    fn next(&mut self) -> Option<Page> {
        let step = self.todo.pop()?;
        let page = self.read(step);
        self.descend(&page);
        Some(page)
    }
}
