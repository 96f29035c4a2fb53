//! How much may be dirty, and which writers are held while more is.

use crate::error::FsError;
use crate::store::data_store::{Busy, DataStore, Dirty, count};

/// Write-back begins, whatever the age of what is dirty, when this part of the cache is dirty: of
/// the default cache 64 MiB.
const DIRTY_SHARE: usize = 8;
/// Writers are held when this part is dirty.
const HELD_SHARE: usize = 2;

impl DataStore {
    /// Holds the writer while too much is dirty, or so much that the rest of the cache cannot make
    /// up for it.
    pub(crate) fn throttle(&self) -> Result<(), FsError> {
        if self.cache.dirty() > self.dirty_threshold() {
            self.signal.wake();
        }
        if !self.too_much() {
            return Ok(());
        }
        count(&self.counters.throttled, 1);
        let served = self.options.background
            && self.signal.wait_while(|| self.too_much() && self.writable().is_ok());
        self.writable()?;
        if !served {
            self.write_back(Dirty::All, Busy::Wait)?;
            self.cache.shrink();
        }
        Ok(())
    }

    /// A thread that writes now is held, or has to wait for space.
    pub fn holds_writers(&self) -> bool {
        self.too_much() || self.space.is_wanted()
    }

    /// More is dirty than may be, or memory is short because of it.
    pub(crate) fn too_much(&self) -> bool {
        let (limit, dirty) = (self.cache.limit(), self.cache.dirty());
        if self.cache.used() > limit {
            self.cache.shrink();
        }
        dirty > limit / HELD_SHARE || (dirty > 0 && self.cache.used() > limit + limit / 8)
    }

    /// Dirty bytes at which write-back begins without waiting for their age.
    pub(crate) fn dirty_threshold(&self) -> usize {
        self.cache.limit() / DIRTY_SHARE
    }
}
