//! A rename in flight: what the kernel keeps of the two names while it waits for the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferry_fs::{Attr, Ino, RenameFlags, ToForget};

use super::answers::is_dir;
use super::cache::{Cache, FullName};
use super::kernel::Kernel;
use super::remote::RemoteFs;

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

impl RemoteFs {
    /// The kernel is told of an inode by this name. A directory that it knows by another one was
    /// moved by another client, and it takes both for the same; but not within a rename, which has
    /// locked what it would need for that (`ESTALE`), for as long as it knows the old one.
    pub(super) fn is_found(&self, attr: &Attr, parent: Ino, name: &[u8]) {
        let old = {
            let mut tables = self.tables.lock();
            let old = tables.name(attr.ino, parent, name).filter(|_| is_dir(attr));
            // Somebody may be at work in what has that name now.
            old.filter(|old| !tables.has_name(old))
        };
        if let Some((dir, name)) = old {
            self.kernel.forget_unasked(ToForget {
                removed: vec![(dir, name.into())],
                ..ToForget::default()
            });
        }
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.end(None);
    }
}
