//! Mapping: from blocks in a batch to edits of windows and changed keys.

use crate::error::FsError;
use crate::extents::{Changes, Delta, Edit, WINDOW_BLOCKS};
use crate::inode::incore::Inode;
use crate::space::segments::Chunk;
use crate::store::data_store::DataStore;
use crate::writeback::batch::{Taken, Work};
use std::sync::Arc;

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
            for run in &entry.work.runs {
                let Some(chunk) = chunk else { break };
                self.map_run(
                    &inode,
                    run,
                    chunk,
                    crcs,
                    &entry.work.retained_crcs,
                    &mut entry.edits,
                )?;
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
        retained: &[(u32, u32)],
        edits: &mut Vec<Edit>,
    ) -> Result<(), FsError> {
        let dev = self.table.first_block(chunk.segment) + u64::from(chunk.at + run.at);
        let mut crcs = crcs[run.at as usize..(run.at + run.len) as usize].to_vec();
        for &(at, crc) in retained {
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
}
