//! Who waits for a sync of the volume, and whether one is due.

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

/// Of one server.
#[derive(Default)]
pub(super) struct Durability {
    /// Something was promised since the last look.
    pub(super) promised: AtomicBool,
    pub(super) news: Notify,
    pub(super) much: Notify,
    pub(super) asked: Mutex<Asked>,
    /// Held by who syncs: of two words the later one counts.
    pub(super) one: Mutex<()>,
}

impl Durability {
    /// A promised change was applied. `much`: its session has much that is not durable.
    pub(super) fn promised(&self, much: bool) {
        if !self.promised.swap(true, Ordering::Relaxed) {
            self.news.notify_one();
        }
        if much {
            self.much.notify_one();
        }
    }
}
