//! The extent maps of files: windows loaded and replaced, and the log space that a change of them
//! takes.

use crate::api::Ino;
use crate::cache::pages::Pages;
use crate::error::FsError;
use crate::extents::{Changes, Delta, Edit, WINDOW_BLOCKS, Window};
use crate::inode::incore::Inode;
use crate::keys::{self, BLOCK, Key};
use crate::store::data_store::{DataStore, RECORD_BYTES};
use ferry_journal::{Credits, Journal};
use std::ops::Range;
use std::sync::Arc;

/// What a segment's record costs a transaction.
const SEGMENT_BYTES: usize = 32;

/// Keys of a transaction beside extents and segments: the inode's record, the number of unwritten
/// blocks, an intent.
const SPARE_KEYS: usize = 4;

impl DataStore {
    /// Loads a window of the extent map.
    pub(crate) fn load_window(&self, inode: &Arc<Inode>, index: u64) -> Result<(), FsError> {
        loop {
            let version = inode.file.pages.read().map_version;
            let window = Window::load(&*self.journal()?, inode.ino, index)?;
            let mut pages = inode.file.pages.write();
            if pages.map_version == version {
                pages.attach(&self.cache, &inode.file.front);
                pages.set_window(inode, index, Arc::new(window));
                return Ok(());
            }
        }
    }

    /// Looks at blocks of a file. `look` returns what it finds, or the window to load first.
    pub(crate) fn look_loaded<T>(
        &self,
        inode: &Arc<Inode>,
        blocks: &Range<u64>,
        look: impl Fn(&Inode, &Range<u64>) -> Result<T, u64>,
    ) -> Result<T, FsError> {
        loop {
            match look(inode, blocks) {
                Ok(found) => return Ok(found),
                Err(window) => self.load_window(inode, window)?,
            }
        }
    }

    /// As [`DataStore::look_loaded`], at the blocks of one window after the other: all of them need
    /// not be in memory together. `each` gets what was found.
    pub(crate) fn look_by_window<T>(
        &self,
        inode: &Arc<Inode>,
        blocks: Range<u64>,
        look: impl Fn(&Inode, &Range<u64>) -> Result<T, u64>,
        mut each: impl FnMut(T),
    ) -> Result<(), FsError> {
        let mut at = blocks.start;
        while at < blocks.end {
            let chunk = at..blocks.end.min((at / WINDOW_BLOCKS + 1) * WINDOW_BLOCKS);
            at = chunk.end;
            each(self.look_loaded(inode, &chunk, &look)?);
        }
        Ok(())
    }

    /// A window of the extent map, loaded if need be.
    pub(crate) fn window(&self, inode: &Arc<Inode>, index: u64) -> Result<Arc<Window>, FsError> {
        loop {
            {
                let state = inode.state.share();
                let pages = inode.file.pages.read();
                if let Some(window) = pages.window(index) {
                    return Ok(Arc::clone(window));
                }
                if state.logged.blocks == 0 {
                    return Ok(Arc::default());
                }
            }
            self.load_window(inode, index)?;
        }
    }

    /// The edit of a window, started if need be. The caller holds the right to change extents.
    pub(crate) fn edit<'e>(
        &self,
        inode: &Arc<Inode>,
        index: u64,
        edits: &'e mut Vec<Edit>,
    ) -> Result<&'e mut Edit, FsError> {
        let at = match edits.iter().rposition(|e| e.index == index) {
            Some(at) => at,
            None => {
                edits.push(Edit::new(index, (*self.window(inode, index)?).clone()));
                edits.len() - 1
            }
        };
        Ok(&mut edits[at])
    }

    /// Makes edited windows the current ones.
    pub(crate) fn set_windows(&self, inode: &Arc<Inode>, pages: &mut Pages, edits: Vec<Edit>) {
        if !edits.is_empty() {
            pages.map_version += 1;
        }
        pages.attach(&self.cache, &inode.file.front);
        for edit in edits {
            pages.set_window(inode, edit.index, Arc::new(edit.window));
        }
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

    /// Log space for changed extents and the inode's record.
    pub(crate) fn credits(&self, changes: &Changes, delta: &Delta, urgent: bool) -> Credits {
        let segments = self.table.records(delta);
        let bytes: usize =
            changes.iter().map(|(k, v)| k.len() + v.as_ref().map_or(0, Vec::len)).sum();
        Credits {
            keys: (changes.len() + segments + SPARE_KEYS) as u32,
            bytes: (bytes + segments * SEGMENT_BYTES) as u32 + RECORD_BYTES,
            urgent,
        }
    }
}
