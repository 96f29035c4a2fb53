//! The right to change a file's extents: one thread at a time has it.

use crate::inode::incore::Inode;
use crate::order::{Held, Rank};
use ferry_env::activity::{self, Layer};
use std::sync::Arc;

/// The right to change a file's extents.
pub struct ExtentsGuard {
    inode: Arc<Inode>,
    _held: Held,
}

impl ExtentsGuard {
    /// Waits for the right.
    pub fn lock(inode: &Arc<Inode>) -> Self {
        let held = Held::wait(Rank::Extents);
        let lock = &inode.file.extents;
        let mut busy = lock.busy.lock();
        while *busy {
            let _waiting = activity::enter(Layer::Lock);
            lock.free.wait(&mut busy);
        }
        *busy = true;
        Self { inode: Arc::clone(inode), _held: held }
    }
    /// Takes it if nobody has it.
    pub fn try_lock(inode: &Arc<Inode>) -> Option<Self> {
        let mut busy = inode.file.extents.busy.try_lock()?;
        if std::mem::replace(&mut *busy, true) {
            return None;
        }
        Some(Self { inode: Arc::clone(inode), _held: Held::tried(Rank::Extents) })
    }
    /// The file.
    pub fn inode(&self) -> &Arc<Inode> {
        &self.inode
    }
}

impl Drop for ExtentsGuard {
    fn drop(&mut self) {
        let lock = &self.inode.file.extents;
        *lock.busy.lock() = false;
        lock.free.notify_one();
    }
}
