//! A larger log in another place, while the journal is used.
//!
//! The new ring is written with zeros and flushed. Then no context is sealed until what is under way is durable and a checkpoint has
//! taken it home: at that moment the old ring holds nothing that anyone needs, and the new one nothing at all. The owner says durably
//! which of them counts; whichever that is after a crash, it is empty, and the home store has everything that was durable.
//! Transactions begin and commit meanwhile; who would overfill the context being collected waits.

use crate::JournalError;
use crate::checkpoint::Checkpoint;
use crate::core::{Core, payload_max};
use crate::disk::{Disk, io_error};
use crate::format::LOG_BLOCK;
use crate::record::LogArea;
use crate::wait::Wait;
use ferry_device::AlignedBuf;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of the log written at a time when it is laid out.
const ZERO_PIECE: u64 = 1 << 20;

/// Whether the log is being exchanged.
#[derive(Default)]
pub struct Growth {
    going: Mutex<bool>,
    over: Condvar,
}

impl Growth {
    /// Waits while contexts cannot be sealed.
    pub fn wait_over(&self) {
        let mut going = self.going.lock();
        self.over.wait_while(&mut going, |going| *going);
    }
}

/// Writes zeros over a whole ring, so that the host never has to find space for it later and nothing in it looks like a record.
pub fn lay_out(disk: &Disk, offset: u64, len: u64) -> Result<(), JournalError> {
    let mut zeros = AlignedBuf::zeroed(ZERO_PIECE.min(len) as usize);
    let mut at = 0;
    while at < len {
        if len - at < zeros.len() as u64 {
            zeros = AlignedBuf::zeroed((len - at) as usize);
        }
        disk.write(offset + at, &zeros).map_err(io_error("log"))?;
        at += zeros.len() as u64;
    }
    Ok(())
}

/// While it lives, no context is sealed.
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
    /// Goes on in a ring of `len` bytes at `offset`, which nobody else uses. `persist` makes that durable; if it fails, nobody knows
    /// which ring counts, and nothing is written any more.
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
            // What others wrote before may be lost with it.
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
        self.payload_max.store(payload_max(area.blocks), Ordering::Release);
        let bytes = |blocks: u64| blocks * LOG_BLOCK as u64;
        self.space.grow(bytes(area.blocks - old.blocks), bytes(area.blocks) / 8);
        Ok(())
    }

    /// Why the log cannot be exchanged now, if so.
    pub fn refuses_growth(&self) -> Option<JournalError> {
        if self.options.read_only {
            return Some(JournalError::ReadOnly("opened read-only".into()));
        }
        self.failure().map(|error| JournalError::ReadOnly(error.to_string().into()))
    }
}
