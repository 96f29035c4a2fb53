//! Replaces the log by a larger one elsewhere on the device, while the journal is used.
//!
//! The new ring is filled with zeros and flushed. Then no context is sealed until the records in
//! flight are durable and a checkpoint has written them to the home store. At that moment recovery
//! needs nothing of the old ring, and the new one is empty. The owner records durably which ring
//! counts. After a crash that ring is empty, whichever it is, and the home store has all that was
//! durable. Meanwhile transactions begin and commit; a transaction that would overfill the open
//! context waits.

use super::checkpoint::Checkpoint;
use super::core::{Core, payload_max};
use crate::JournalError;
use crate::completion::Wait;
use crate::disk::io_error;
use crate::log::format::LOG_BLOCK;
use crate::log::ring::{LogArea, lay_out};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// While this lives, no context is sealed.
struct Frozen<'a>(&'a Arc<Core>);

impl<'a> Frozen<'a> {
    fn new(core: &'a Arc<Core>) -> Self {
        *core.growth.going.lock() = true;
        core.pipe.lock().frozen = true;
        Self(core)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.pipe.lock().frozen = false;
        *self.0.growth.going.lock() = false;
        self.0.growth.over.notify_all();
        self.0.drive();
        self.0.signal.kick();
    }
}

impl Core {
    /// Continues in a ring of `len` bytes at `offset`, which nothing else uses. `persist` makes the
    /// choice durable. If it fails, it is unknown which ring counts, and nothing is written any
    /// more.
    pub fn grow(
        self: &Arc<Self>,
        offset: u64,
        len: u64,
        persist: &mut dyn FnMut() -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        let old = self.area();
        let area = LogArea { offset, blocks: len / LOG_BLOCK as u64, ..old };
        assert!(area.blocks > old.blocks, "a log does not shrink");
        lay_out(&self.disk, offset, len)?;
        if let Err(error) = self.disk.flush_wait().map_err(io_error("log")) {
            // Earlier writes of others may be lost with this flush.
            self.fail(error.clone());
            return Err(error);
        }
        let _frozen = Frozen::new(self);
        Wait::until(|done| self.when_idle(done))?;
        self.checkpoint(Checkpoint::Log)?;
        if let Err(error) = persist() {
            self.fail(error.clone());
            return Err(error);
        }
        debug_assert_eq!(self.pipe.lock().used_blocks(), 0, "nothing was sealed meanwhile");
        *self.area.write() = area;
        self.disk.note_ring(offset, len);
        self.payload_max.store(payload_max(area.blocks), Ordering::Release);
        let bytes = |blocks: u64| blocks * LOG_BLOCK as u64;
        self.space.grow(bytes(area.blocks - old.blocks), bytes(area.blocks) / 8);
        Ok(())
    }

    /// Why the log cannot be replaced now, if so.
    pub fn refuses_growth(&self) -> Option<JournalError> {
        if self.options.read_only {
            return Some(JournalError::ReadOnly("opened read-only".into()));
        }
        self.failure().map(|error| JournalError::ReadOnly(error.to_string().into()))
    }
}
