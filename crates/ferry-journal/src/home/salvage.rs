//! Reading past damage: the trees are walked page by page (`tree.rs`), and redb has no part in it.
//!
//! What is in a page that is not the one which belongs there is kept where it can be right: keys
//! that the pages above it allow there, in their order. The rest is a gap.

use super::file::HomeFile;
use super::state::HomeState;
use super::tables::{KEYS, META, META_POINT};
use super::tree::{Header, Page, PageSource, Tree, Walk};
use crate::types::Key;
use crate::{BadRange, JournalError, Step, Value};
use ferry_device::BLOCK_SIZE;
use redb::TableHandle;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// What comes next in the order of the keys.
pub enum Found {
    /// A key and its value.
    Key {
        key: Key,
        value: Value,
        /// A page on the way to it is damaged.
        doubtful: bool,
    },
    /// A page that is damaged; keys may be missing here.
    Damage {
        /// On the device, in bytes.
        offset: u64,
        /// What is wrong with it.
        detail: String,
    },
}

/// A walk over all that is readable.
pub struct Salvage {
    /// The tree that it is over.
    pub keys: Tree,
    walk: Walk<HomeFile>,
    ready: VecDeque<Found>,
    newest: Option<Key>,
    /// What the store says of itself.
    pub state: Result<HomeState, JournalError>,
    header: Header,
    copy: Arc<HomeFile>,
    /// Its segments are not used for anything else meanwhile.
    _original: Arc<HomeFile>,
}

fn damaged(offset: u64, detail: impl Into<String>) -> JournalError {
    JournalError::Damaged { what: "home store", offset, detail: detail.into() }
}

impl Salvage {
    pub fn open(file: &Arc<HomeFile>) -> Result<Self, JournalError> {
        let copy = file.salvage();
        let Some(header) = copy.header()? else { return Err(damaged(0, "there is no database")) };
        let Some(header) = Header::decode(&header) else {
            return Err(damaged(copy.device_offset(0), "both of the database's roots are damaged"));
        };
        let mut problem = None;
        let tables = Walk::tables(&copy, &header, false, &mut |page| {
            if let (None, Some(detail)) = (&problem, &page.problem) {
                problem = Some(damaged(page.device_offset, detail.clone()));
            }
        });
        let tree = |name: &str| tables.iter().find(|tree| *tree.name == *name.as_bytes());
        let missing =
            || problem.clone().unwrap_or_else(|| damaged(0, "the table of tables lacks one"));
        let keys = tree(KEYS.name()).ok_or_else(missing)?.clone();
        let state = tree(META.name()).ok_or_else(missing).and_then(|tree| state(&copy, tree));
        Ok(Self::of(file, copy, keys, state, header))
    }

    /// The same from a tree that was found.
    pub fn found(file: &Arc<HomeFile>, keys: Tree, state: Result<HomeState, JournalError>) -> Self {
        Self::of(file, file.salvage(), keys, state, Header::none())
    }

    fn of(
        file: &Arc<HomeFile>,
        copy: Arc<HomeFile>,
        keys: Tree,
        state: Result<HomeState, JournalError>,
        header: Header,
    ) -> Self {
        let walk = Walk::new(&copy, &keys);
        let (ready, newest) = (VecDeque::new(), None);
        Self { keys, walk, ready, newest, state, header, copy, _original: file.clone() }
    }

    /// All pages with keys are those that belong where they are, and the newest root leads there.
    pub fn is_whole(&self) -> bool {
        self.header.problem.is_none()
            && Walk::new(&self.copy, &self.keys).all(|page| page.problem.is_none())
    }

    /// The next key, which is greater than all before it, or damage.
    pub fn next(&mut self) -> Option<Found> {
        loop {
            match self.ready.pop_front() {
                Some(Found::Key { key, .. })
                    if self.newest.as_ref().is_some_and(|newest| *newest >= key) => {}
                Some(Found::Key { key, value, doubtful }) => {
                    self.newest = Some(key.clone());
                    return Some(Found::Key { key, value, doubtful });
                }
                Some(damage) => return Some(damage),
                None => {
                    let page = self.walk.next()?;
                    let doubtful = page.doubtful;
                    if let Some(detail) = &page.problem {
                        self.ready.push_back(Found::Damage {
                            offset: page.device_offset,
                            detail: detail.clone(),
                        });
                    }
                    let entry = |(key, value): (&[u8], &[u8])| (Key::from(key), Value::from(value));
                    self.ready.extend(page.entries().into_iter().map(|found| {
                        let (key, value) = entry(found);
                        Found::Key { key, value, doubtful }
                    }));
                }
            }
        }
    }

    /// Every page of our tables, or of the database's own. `false`: `visit` ended it.
    fn pages(&self, own: bool, visit: &mut dyn FnMut(&Page) -> bool) -> bool {
        let mut go_on = true;
        let trees = Walk::tables(&self.copy, &self.header, own, &mut |page| go_on &= visit(page));
        go_on && Walk::over(&self.copy, &trees, visit)
    }

    /// Pages that are not those which belong where they are. `step` may end it.
    pub fn verify(&self, found: &mut dyn FnMut(BadRange), step: Step<'_>) {
        let mut bad = |offset, detail| {
            found(BadRange { what: "home store", offset, len: BLOCK_SIZE as u64, detail });
        };
        if let Some(problem) = self.header.problem {
            bad(self.copy.device_offset(0), problem.to_owned());
        }
        let mut visit = |page: &Page| {
            if let Some(detail) = &page.problem {
                bad(page.device_offset, detail.clone());
            }
            step((page.blocks.end - page.blocks.start) * BLOCK_SIZE as u64)
        };
        let _ = self.pages(true, &mut visit) && self.pages(false, &mut visit);
    }

    /// Blocks of the file with pages of what the database keeps for itself. It gives them away with
    /// its next commit.
    pub fn own_blocks(&self) -> HashSet<u64> {
        let mut used = HashSet::from([0]);
        self.pages(true, &mut |page| {
            used.extend(page.blocks.clone());
            true
        });
        used
    }

    /// Blocks of the file with pages of our tables; below a page that cannot be read, none are
    /// known. `None`: `step` ended it.
    pub fn blocks(&self, step: Step<'_>) -> Option<HashSet<u64>> {
        let mut used = HashSet::new();
        let go_on = self.pages(false, &mut |page| {
            used.extend(page.blocks.clone());
            step((page.blocks.end - page.blocks.start) * BLOCK_SIZE as u64)
        });
        go_on.then_some(used)
    }
}

fn state(file: &Arc<HomeFile>, tree: &Tree) -> Result<HomeState, JournalError> {
    let mut problem = None;
    for page in Walk::new(file, tree) {
        let entries = page.entries();
        let found = entries.iter().find(|(key, _)| **key == [META_POINT]);
        if let Some(state) = found.and_then(|(_, value)| HomeState::decode(value, &file.hash_key()))
        {
            return Ok(state);
        }
        problem = problem.or(page.problem.map(|detail| damaged(page.device_offset, detail)));
    }
    Err(problem.unwrap_or_else(|| damaged(0, "it does not say where the log goes on")))
}
