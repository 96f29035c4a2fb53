//! Writes that fail behind a program's back.
//!
//! With `cache=writeback` the kernel takes a write at once and hands it over later; if that fails, it says so at the next fsync or close. A
//! program that does nothing but write would go on for ever on a full volume, and lose all of it. But before each write the
//! kernel looks at the file's attributes, and asks for them, on behalf of that descriptor, if they are not valid: so a failure makes them
//! invalid, and the next such question is answered with the error, once for each descriptor that writes. Nobody else asks so:
//! stat(2) and fstat(2) name no descriptor, and a read needs no attributes that became invalid.

use super::{CacheMode, LocalFs};
use crate::api::{Errno, Ino};
use std::sync::atomic::Ordering;

impl LocalFs {
    /// A write by this handle failed, perhaps one of the kernel's own.
    pub(super) fn failed_behind(&self, ino: Ino, fh: u64, error: Errno) {
        if self.options.cache != CacheMode::Writeback {
            return;
        }
        let Some(handle) = self.handles.get(ino, fh) else { return };
        let next =
            |before: u64| Some((before >> 32).wrapping_add(1) << 32 | u64::from(error.0.unsigned_abs()));
        // The closure always gives a value.
        let _ = handle.inode.failed_behind.fetch_update(Ordering::AcqRel, Ordering::Relaxed, next);
        // Not under a lock: the queue of such notices is bounded.
        let host = self.host.read().clone();
        if let Some(host) = host {
            host.invalidate_attributes(ino);
        }
    }

    /// The error of a failure that this handle was not told yet.
    pub(super) fn tell_of_failure_behind(&self, ino: Ino, fh: u64) -> Result<(), Errno> {
        let Some(handle) = self.handles.get(ino, fh).filter(|handle| handle.writes) else { return Ok(()) };
        let now = handle.inode.failed_behind.load(Ordering::Acquire);
        if handle.failed_behind.swap(now, Ordering::AcqRel) == now {
            return Ok(());
        }
        Err(Errno((now & u64::from(u32::MAX)) as i32))
    }
}
