//! What waits for a sync of the volume, and whether one is due.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::rt::Mutex;
use ferry_fs::Errno;
use tokio::sync::Notify;

/// Called with the result of the sync that covers everything applied before.
pub(super) type Synced = Box<dyn FnOnce(Result<(), Errno>) + Send>;

#[derive(Default)]
pub(super) struct Asked {
    pub(super) waiting: Vec<Synced>,
    /// A thread syncs.
    pub(super) syncing: bool,
}

/// The waiters of one server.
#[derive(Default)]
pub(super) struct SyncQueue {
    /// A change was applied since the last look that has to become durable.
    pub(super) is_due: AtomicBool,
    pub(super) due: Notify,
    pub(super) urgent: Notify,
    pub(super) asked: Mutex<Asked>,
    /// Held by the thread that syncs: of two watermarks the later one must win.
    pub(super) turn: Mutex<()>,
}

impl SyncQueue {
    /// A change was applied that has to become durable soon. `urgent`: its session has many of
    /// those.
    pub(super) fn unstable(&self, urgent: bool) {
        if !self.is_due.swap(true, Ordering::Relaxed) {
            self.due.notify_one();
        }
        if urgent {
            self.urgent.notify_one();
        }
    }
}
