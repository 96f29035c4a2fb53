//! Mapping: from blocks in a batch to edits of windows and changed keys.

use crate::error::FsError;
use crate::extents::{Changes, Delta, Edit, WINDOW_BLOCKS, Window};
use crate::inode::incore::Inode;
use crate::space::segments::Chunk;
use crate::store::data_store::{DataStore, RECORD_BYTES};
use crate::writeback::send::{Contents, Taken, Work};
use ferry_journal::Credits;
use std::sync::Arc;

/// What a segment's record costs a transaction.
const SEGMENT_BYTES: usize = 32;
/// Keys of a transaction beside extents and segments: the inode's record, the number of promised
/// blocks, an intent.
const SPARE_KEYS: usize = 4;

/// One inode's share of a batch, ready to be logged.
pub(crate) struct Entry {
    pub work: Work,
    pub edits: Vec<Edit>,
    pub changes: Changes,
    pub delta: Delta,
}

impl DataStore {
    /// What mapping a share changes.
    pub(crate) fn edits(
        &self,
        work: Work,
        chunk: Option<&Chunk>,
        crcs: &[u32],
    ) -> Result<Entry, Box<(Work, FsError)>> {
        let mut entry =
            Entry { work, edits: Vec::new(), changes: Vec::new(), delta: Delta::default() };
        let inode = Arc::clone(entry.work.guard.inode());
        let mut done = || -> Result<(), FsError> {
            if matches!(entry.work.contents, Contents::Inline(_))
                && inode.state.share().logged.blocks > 0
            {
                self.edit(&inode, 0, &mut entry.edits)?.drop_range(0, WINDOW_BLOCKS);
            }
            for run in &entry.work.runs {
                let Some(chunk) = chunk else { break };
                self.map_run(&inode, run, chunk, crcs, &entry.work.kept_crcs, &mut entry.edits)?;
            }
            Ok(())
        };
        if let Err(error) = done() {
            return Err(Box::new((entry.work, error)));
        }
        for edit in &mut entry.edits {
            edit.changes(inode.ino, &mut entry.changes);
            entry.delta.add(&edit.delta);
        }
        Ok(entry)
    }

    fn map_run(
        &self,
        inode: &Arc<Inode>,
        run: &Taken,
        chunk: &Chunk,
        crcs: &[u32],
        kept: &[(u32, u32)],
        edits: &mut Vec<Edit>,
    ) -> Result<(), FsError> {
        let dev = self.table.first_block(chunk.segment) + u64::from(chunk.at + run.at);
        let mut crcs = crcs[run.at as usize..(run.at + run.len) as usize].to_vec();
        for &(at, crc) in kept {
            if let Some(slot) = at.checked_sub(run.at).and_then(|i| crcs.get_mut(i as usize)) {
                *slot = crc;
            }
        }
        let mut done = 0;
        while done < crcs.len() {
            let block = run.block + done as u64;
            let inside = block % WINDOW_BLOCKS;
            let here = (crcs.len() - done).min((WINDOW_BLOCKS - inside) as usize);
            let edit = self.edit(inode, block / WINDOW_BLOCKS, edits)?;
            edit.map(inside, dev + done as u64, &crcs[done..done + here]);
            done += here;
        }
        Ok(())
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
