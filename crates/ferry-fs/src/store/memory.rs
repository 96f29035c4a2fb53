//! How the memory of a mount is shared.
//!
//! Inodes and names have bounds of their own, each a part of the whole (`inode/table.rs`). What
//! they take is looked at in each round of write-back, and contents have the rest. What the kernel
//! makes the table remember has no bound here: contents give way to it, down to a part of the
//! whole.

use crate::store::data_store::DataStore;
use std::sync::atomic::Ordering;

/// Contents may take this part of the memory, whatever else is in it: a mount with less would hold
/// every writer.
const CONTENTS_LEAST: usize = 4;

impl DataStore {
    /// Contents, inodes and names may take so many bytes from now on.
    pub fn set_memory(&self, most: usize) {
        self.memory_most.store(most, Ordering::Relaxed);
        self.share_memory();
    }

    /// What inodes and names do not take is for contents.
    pub(crate) fn share_memory(&self) {
        let Ok(source) = self.source() else { return }; // the volume is being closed
        let most = self.memory_most.load(Ordering::Relaxed);
        let taken = source.trim(most);
        self.cache.set_limit(most.saturating_sub(taken).max(most / CONTENTS_LEAST));
        self.cache.shrink_much();
    }
}
