//! Moves what lies in fixed places, the log and the slots of the home map, and changes the number
//! of segments, while the journal is used.
//!
//! If the log moves, its new ring is filled with zeros and flushed. Then no context is sealed until
//! the records in flight are durable and a checkpoint has written them to the home store. At that
//! moment recovery needs nothing of the old ring, and the new one is empty. The slots of the home
//! map are written so that the old places and the new ones both name what the home store is. The
//! owner records durably which places count. After a crash the ring that counts is empty, and the
//! home store has all that was durable. Meanwhile transactions begin and commit; a transaction that
//! would overfill the open context waits.

use super::checkpoint::Checkpoint;
use super::core::{Core, payload_max};
use crate::completion::Wait;
use crate::disk::io_error;
use crate::log::format::LOG_BLOCK;
use crate::log::ring::{LogArea, lay_out};
use crate::{Geometry, JournalError};
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
    /// Continues where `to` says, which nothing else uses. `persist` makes the choice durable. If
    /// it fails, it is unknown which places count, and nothing is written any more.
    pub fn relocate(
        self: &Arc<Self>,
        to: &Geometry,
        persist: &mut dyn FnMut() -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        let (old, area) = (self.area(), LogArea::new(to));
        assert!(area.blocks >= old.blocks, "a log does not shrink");
        if area != old {
            lay_out(&self.disk, to.log_offset, to.log_len)?;
            if let Err(error) = self.disk.flush_wait().map_err(io_error("log")) {
                // Earlier writes of others may be lost with this flush.
                self.fail(error.clone());
                return Err(error);
            }
        }
        let _frozen = Frozen::new(self);
        Wait::until(|done| self.when_idle(done))?;
        self.checkpoint(Checkpoint::Log)?;
        // The home map stays as it is from here on.
        let _no_checkpoint = self.checkpointing.lock();
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let home = self.home.file();
        if let Err(error) = home.prepare(to).and_then(|()| persist()) {
            self.fail(error.clone());
            return Err(error);
        }
        home.adopt(to);
        if area == old {
            return Ok(());
        }
        debug_assert_eq!(self.pipe.lock().used_blocks(), 0, "nothing was sealed meanwhile");
        *self.area.write() = area;
        self.disk.note_ring(to.log_offset, to.log_len);
        self.payload_max.store(payload_max(area.blocks), Ordering::Release);
        let bytes = |blocks: u64| blocks * LOG_BLOCK as u64;
        self.space.grow(bytes(area.blocks - old.blocks), bytes(area.blocks) / 8);
        Ok(())
    }

    /// Why nothing can be moved now, if so.
    pub fn refuses_relocation(&self) -> Option<JournalError> {
        if self.options.read_only {
            return Some(JournalError::ReadOnly("opened read-only".into()));
        }
        self.failure().map(|error| JournalError::ReadOnly(error.to_string().into()))
    }
}
