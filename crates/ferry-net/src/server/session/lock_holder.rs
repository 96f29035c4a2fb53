//! What the volume knows of a session that holds file locks: it tells the next server which
//! sessions may reclaim.

use std::sync::atomic::Ordering;

use ferry_fs::SessionStore;

use super::state::Session;

impl Session {
    /// The session may have held file locks at the previous server. `same`: under the same number.
    pub(in crate::server) fn set_had_locks(&self, same: bool) {
        self.had_locks.store(true, Ordering::SeqCst);
        *self.lock_record.lock() = same;
    }

    /// Whether it may have held file locks at the previous server.
    pub(in crate::server) fn had_locks(&self) -> bool {
        self.had_locks.load(Ordering::SeqCst)
    }

    /// The session is about to take a file lock, and the next server has to know. Waits for the
    /// device, once. If that cannot be recorded, the session reclaims nothing from the next server.
    pub(in crate::server) fn record_lock_holder(&self, fs: &dyn SessionStore) {
        let mut entered = self.lock_record.lock();
        if !*entered && !self.is_over() {
            *entered = fs.add_lock_holder(self.id).is_ok();
        }
    }

    /// The session has ended and reclaims nothing. That is durable before others get its locks.
    pub(in crate::server) fn unrecord_lock_holder(&self, fs: &dyn SessionStore) {
        let mut entered = self.lock_record.lock();
        if *entered {
            *entered = fs.remove_lock_holders(&[self.id]).is_err();
        }
    }

    /// Whether it is recorded as one that may hold locks.
    pub(in crate::server) fn is_lock_holder(&self) -> bool {
        *self.lock_record.lock()
    }
}
