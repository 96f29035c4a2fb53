//! Files that their maker writes past the kernel's page cache.
//!
//! Who makes a file for writing only will hardly read it through that descriptor: without the page
//! cache, its writes are not split at page borders, and the kernel asks nothing before the first
//! one (`docs/decisions.md` has the figures). What such a writer changes must not be cached behind
//! its back:
//!
//! * BYPASS-1: a handle that caches is never open together with a writer that bypasses. The maker
//!   bypasses only if nobody else has the file open yet; whoever opens it while such a writer has
//!   it open bypasses the cache too.
//! * BYPASS-2: the kernel drops cached pages before a bypassing write, not after it, so a mapping
//!   could bring an old page back in between. Whoever maps the file has the kernel read pages of it
//!   through a handle that bypasses, too. From then on writes past the cache are made beside the
//!   mapping: the transport sees to it that no page is older than a write that was answered. The
//!   same holds for all files where nothing goes through the cache (`cache=strict`).

use crate::api::Ino;
use crate::inode::incore::Inode;
use crate::local::local_fs::{CacheMode, LocalFs};
use std::sync::atomic::{Ordering, fence};

impl LocalFs {
    /// Whether the file's maker, whose handle is counted already, bypasses the cache. If so it is
    /// counted as such.
    pub(crate) fn bypass_by_maker(&self, inode: &Inode, flags: i32) -> bool {
        if self.options.cache != CacheMode::Kernel || flags & libc::O_ACCMODE != libc::O_WRONLY {
            return false;
        }
        // Who opens the file counts its handle first and looks for us after that, we the other way
        // round: one sees the other.
        inode.bypassing.fetch_add(1, Ordering::SeqCst);
        let alone = inode.opens.load(Ordering::SeqCst) == 1;
        if !alone {
            inode.bypassing.fetch_sub(1, Ordering::SeqCst);
        }
        alone
    }

    /// Whether a handle that was just counted must bypass the cache; a writer is then counted among
    /// those who do.
    pub(crate) fn bypass_with_others(&self, inode: &Inode, writes: bool) -> bool {
        let joined = |n: u32| (n > 0).then(|| n + u32::from(writes));
        inode.bypassing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, joined).is_ok()
    }

    /// The kernel reads pages of a file through a handle that bypasses its cache.
    pub(crate) fn has_mapped(&self, inode: &Inode) {
        if !inode.has_flag(Inode::MAPPED) {
            self.some_mapped.store(true, Ordering::SeqCst);
            inode.set_flag(Inode::MAPPED);
        }
        // Either the read that follows sees a write, or who has written sees the flag.
        fence(Ordering::SeqCst);
    }

    /// Whether the kernel may have pages of a file behind the back of this handle, which bypasses
    /// its cache.
    pub(crate) fn is_mapped_past(&self, ino: Ino, fh: u64) -> bool {
        if !self.some_mapped.load(Ordering::SeqCst) {
            return false;
        }
        self.handles.get(ino, fh).is_some_and(|h| h.direct && h.inode.has_flag(Inode::MAPPED))
    }
}
