//! Files that their maker writes past the kernel's page cache.
//!
//! Who makes a file for writing only will hardly read it through that descriptor: without the page cache, its writes are not split at
//! page borders, and the kernel asks nothing before the first one (`docs/decisions.md` has the figures). What such a
//! writer changes must not be cached behind its back:
//!
//! * B1: a handle that caches is never open together with a writer that bypasses. The maker bypasses only if nobody else has the
//!   file open yet; whoever opens it while such a writer has it open bypasses the cache too.
//! * B2: the kernel drops cached pages before a bypassing write, not after it, so a mapping could bring an old page back in between.
//!   After a write to a file that others have open, the kernel is told to drop the range once more.

use super::handles::Handle;
use super::{CacheMode, LocalFs};
use crate::inode::Inode;
use std::sync::atomic::Ordering;

impl LocalFs {
    /// Whether the file's maker, whose handle is counted already, bypasses the cache. If so it is counted as such.
    pub(super) fn bypass_by_maker(&self, inode: &Inode, flags: i32) -> bool {
        if self.options.cache != CacheMode::Kernel || flags & libc::O_ACCMODE != libc::O_WRONLY {
            return false;
        }
        // Who opens the file counts its handle first and looks for us after that, we the other way round: one sees the other.
        inode.bypassing.fetch_add(1, Ordering::SeqCst);
        let alone = inode.opens.load(Ordering::SeqCst) == 1;
        if !alone {
            inode.bypassing.fetch_sub(1, Ordering::SeqCst);
        }
        alone
    }

    /// Whether a handle that was just counted must bypass the cache; a writer is then counted among those who do.
    pub(super) fn bypass_with_others(&self, inode: &Inode, writes: bool) -> bool {
        let joined = |n: u32| (n > 0).then(|| n + u32::from(writes));
        inode.bypassing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, joined).is_ok()
    }

    /// A bypassing writer's write to `[offset, offset + len)` is done.
    pub(super) fn written_past_cache(&self, handle: &Handle, offset: u64, len: u64) {
        if handle.bypassing && handle.inode.opens.load(Ordering::Acquire) > 1 {
            let host = self.host.read().clone();
            if let Some(host) = host {
                host.invalidate_inode(handle.inode.ino, offset, len);
            }
        }
    }
}
