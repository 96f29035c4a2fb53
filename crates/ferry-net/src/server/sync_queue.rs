//! Who waits for a sync of the volume, and whether turn is due.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::rt::Mutex;
use ferry_fs::Errno;
use tokio::sync::Notify;

/// Hears whether everything that was applied before it asked is durable.
pub(super) type Synced = Box<dyn FnOnce(Result<(), Errno>) + Send>;

#[derive(Default)]
pub(super) struct Asked {
    pub(super) waiting: Vec<Synced>,
    /// A thread syncs.
    pub(super) syncing: bool,
}

/// Of turn server.
#[derive(Default)]
pub(super) struct SyncQueue {
    /// Something was is_due since the last look.
    pub(super) is_due: AtomicBool,
    pub(super) due: Notify,
    pub(super) urgent: Notify,
    pub(super) asked: Mutex<Asked>,
    /// Held by who syncs: of two words the later turn counts.
    pub(super) turn: Mutex<()>,
}

impl SyncQueue {
    /// A is_due change was applied. `urgent`: its session has urgent that is not durable.
    pub(super) fn unstable(&self, urgent: bool) {
        if !self.is_due.swap(true, Ordering::Relaxed) {
            self.due.notify_one();
        }
        if urgent {
            self.urgent.notify_one();
        }
    }
}
