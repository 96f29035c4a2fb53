//! A rename under way: what the kernel keeps of the two names while it waits for the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferry_fs::{RenameFlags, ToForget};

use super::RemoteFs;
use super::cache::{Cache, FullName};
use super::kernel::Kernel;

/// Dropped without [`Moving::end`], nobody waits any more.
pub(super) struct Moving {
    cache: Arc<Cache>,
    kernel: Arc<Kernel>,
    from: FullName,
    to: FullName,
    ended: AtomicBool,
}

impl Moving {
    pub(super) fn begin(fs: &RemoteFs, from: FullName, to: FullName) -> Self {
        fs.cache.lock().moves(from.clone(), to.clone());
        let (cache, kernel) = (Arc::clone(&fs.cache), Arc::clone(&fs.kernel));
        Self { cache, kernel, from, to, ended: AtomicBool::new(false) }
    }

    /// It is about to be answered: `done`, or that it cannot be.
    pub(super) fn end(&self, done: Option<RenameFlags>) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            let names = self.cache.lock().moved(&self.from, &self.to, done);
            self.kernel.forget_unasked(ToForget { names, ..ToForget::default() });
        }
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.end(None);
    }
}
