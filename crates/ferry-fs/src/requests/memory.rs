//! How much memory the mount may use, and what uses it.

use crate::local::local_fs::LocalFs;
use crate::requests::mount::{home_cache_bytes, other_bytes};
use serde::Serialize;
use std::sync::atomic::Ordering;

/// Counters of the memory, in bytes.
#[derive(Serialize)]
pub(crate) struct Memory {
    /// What the mount was given.
    cache_size_bytes: usize,
    /// What it may use now: less, if memory is short.
    limit_bytes: usize,
    /// The sum of what follows.
    used_bytes: usize,
    /// Folios, and windows of extent maps.
    contents_bytes: usize,
    /// Inodes in memory.
    inodes_bytes: usize,
    /// What is remembered of the others that the kernel knows.
    remembered_bytes: usize,
    /// Names of cached directories.
    names_bytes: usize,
    /// The home store's cache, when it is full.
    home_cache_bytes: usize,
    /// What snapshots that are open below `.snapshots` may use.
    lent_bytes: usize,
}

impl LocalFs {
    /// From now on `bytes` of memory may be used, no more than the volume was opened with. What is
    /// beyond that is given up in the background.
    pub fn set_memory_limit(&self, bytes: usize) {
        let limit = bytes.min(self.options.cache_bytes);
        self.memory_limit.store(limit, Ordering::Relaxed);
        self.bound_memory();
    }

    /// So many bytes of the memory are for snapshots that are open beside the volume.
    pub(crate) fn lend(&self, bytes: usize) {
        self.lent_bytes.store(bytes, Ordering::Relaxed);
        self.bound_memory();
    }

    fn bound_memory(&self) {
        let lent = self.lent_bytes.load(Ordering::Relaxed);
        let own = self.memory_limit.load(Ordering::Relaxed).saturating_sub(lent);
        self.data.set_memory(other_bytes(&self.options, own));
    }

    pub(crate) fn memory(&self) -> Memory {
        let (table, home_cache_bytes) = (self.table.memory(), home_cache_bytes(&self.options));
        let contents_bytes = self.data.stats().cache_bytes as usize;
        let lent_bytes = self.lent_bytes.load(Ordering::Relaxed);
        Memory {
            cache_size_bytes: self.options.cache_bytes,
            limit_bytes: self.memory_limit.load(Ordering::Relaxed),
            used_bytes: contents_bytes + table.total() + home_cache_bytes + lent_bytes,
            contents_bytes,
            inodes_bytes: table.inodes,
            remembered_bytes: table.remembered,
            names_bytes: table.names,
            home_cache_bytes,
            lent_bytes,
        }
    }
}
