//! What the volume knows of a session that holds file locks: so the next server knows who may
//! reclaim.

use std::sync::atomic::Ordering;

use ferry_fs::SessionStore;

use super::state::Session;

impl Session {
    /// It may have held file locks at the server before. `same`: under the same number.
    pub(in crate::server) fn set_had_locks(&self, same: bool) {
        self.had_locks.store(true, Ordering::SeqCst);
        *self.lock_record.lock() = same;
    }

    /// Whether it may have held file locks at the server before.
    pub(in crate::server) fn had_locks(&self) -> bool {
        self.had_locks.load(Ordering::SeqCst)
    }

    /// It is about to take a file lock: the next server has to know. Waits for the device, once.
    /// Where that cannot be noted, it reclaims nothing from the next one.
    pub(in crate::server) fn record_lock_holder(&self, fs: &dyn SessionStore) {
        let mut entered = self.lock_record.lock();
        if !*entered && !self.is_over() {
            *entered = fs.add_lock_holder(self.id).is_ok();
        }
    }

    /// It has ended, and reclaims nothing: that is durable before others get its locks.
    pub(in crate::server) fn unrecord_lock_holder(&self, fs: &dyn SessionStore) {
        let mut entered = self.lock_record.lock();
        if *entered {
            *entered = fs.remove_lock_holders(&[self.id]).is_err();
        }
    }

    /// Whether it is entered as one that may hold locks.
    pub(in crate::server) fn is_lock_holder(&self) -> bool {
        *self.lock_record.lock()
    }
}
