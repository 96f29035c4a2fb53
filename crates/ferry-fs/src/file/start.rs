//! The beginning and the end of a mount, for the contents of files.

use crate::error::FsError;
use ferry_journal::{Journal, JournalClient, Recovered};
use std::sync::Arc;

use crate::store::data_store::InodeSource;

use crate::store::data_store::DataStore;

impl DataStore {
    /// Loads the segment table, finishes interrupted truncations and starts the background thread.
    /// Neither `journal` nor `inodes` is kept alive.
    pub fn start(
        self: &Arc<Self>,
        journal: Arc<Journal>,
        recovered: &Recovered,
        inodes: Arc<dyn InodeSource>,
    ) -> Result<(), FsError> {
        let (used, blocks) = self.table.load(&journal)?;
        self.space.stamped(journal.durable_point());
        self.space.start(&used, &recovered.home_segments, blocks, self.options.read_only);
        let once = self.journal.set(Arc::downgrade(&journal)).is_ok()
            && self.inodes.set(Arc::downgrade(&inodes)).is_ok();
        assert!(once, "a data store is started once");
        if self.options.background {
            crate::file::ahead::start(self);
        }
        if self.options.read_only {
            return Ok(());
        }
        for segment in self.table.open_segments() {
            if !self.space.back_again(segment) {
                tracing::warn!(
                    segment,
                    "the host has no space for the rest of a segment; it is not filled on"
                );
                self.table.close_segment(segment);
            }
        }
        self.finish_truncations(&journal)?;
        if self.options.background {
            crate::writeback::flusher::start(self);
        }
        Ok(())
    }

    /// Writes everything back and stops the background thread. The journal is still open.
    pub fn close(&self) -> Result<(), FsError> {
        self.signal.stop();
        self.ahead.stop();
        if self.writable().is_err() {
            return Ok(());
        }
        self.write_back_all()?;
        self.name_everything()?;
        self.give_back_at_unmount()
    }
}
