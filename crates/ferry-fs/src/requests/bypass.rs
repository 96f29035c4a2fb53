//! Files that are written past the kernel's page cache.
//!
//! A program that makes a file for writing only will hardly read it through that descriptor:
//! without the page cache, its writes are not split at page borders, and the kernel asks nothing
//! before the first one (`docs/decisions.md` has the figures). A program that opens a file with
//! `O_DIRECT` asks for it: past the cache, the kernel sends its asynchronous requests in parallel.
//! What such a writer changes must not be cached behind its back:
//!
//! * BYPASS-1: a handle that caches is never open together with a writer that bypasses. A writer
//!   bypasses only if nobody else has the file open yet. The kernel drops the pages of the file
//!   when it opens it so. A program that opens it while such a writer has it open bypasses the
//!   cache too.
//! * BYPASS-2: the kernel drops cached pages before a bypassing write, not after it, so a mapping
//!   could bring an old page back in between. A program that maps the file has the kernel read
//!   pages of it through a handle that bypasses, too. From then on writes past the cache are made
//!   beside the mapping: the transport sees to it that no page is older than a write that was
//!   answered. The same holds for all files where nothing goes through the cache (`cache=strict`).
//! * BYPASS-3: a direct write through a handle that caches (others had the file open, or `fcntl`
//!   has set `O_DIRECT` later) is made as beside a mapping.

use crate::api::Ino;
use crate::inode::incore::Inode;
use crate::local::local_fs::{CacheMode, LocalFs};
use std::sync::atomic::{Ordering, fence};

impl LocalFs {
    /// Whether a writer whose handle is counted already bypasses the cache because nobody else has
    /// the file open. If so it is counted as such. `maker`: it has made the file.
    pub(crate) fn bypass_alone(&self, inode: &Inode, flags: i32, maker: bool) -> bool {
        let bypasses = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => false,
            libc::O_WRONLY if maker => true,
            _ => flags & libc::O_DIRECT != 0,
        };
        if self.options.cache != CacheMode::Kernel || !bypasses {
            return false;
        }
        // An open counts its handle first and looks for us after that, we the other way
        // round: one sees the other.
        inode.bypassing.fetch_add(1, Ordering::SeqCst);
        let alone = inode.opens.load(Ordering::SeqCst) == 1;
        if !alone {
            inode.bypassing.fetch_sub(1, Ordering::SeqCst);
        }
        alone
    }

    /// Whether a handle that was just counted must bypass the cache; a writer is then counted among
    /// those that do.
    pub(crate) fn bypass_with_others(&self, inode: &Inode, writes: bool) -> bool {
        let joined = |n: u32| (n > 0).then(|| n + u32::from(writes));
        inode.bypassing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, joined).is_ok()
    }

    /// The kernel reads pages of a file through a handle that bypasses its cache.
    pub(crate) fn has_mapped(inode: &Inode) {
        if !inode.has_flag(Inode::MAPPED) {
            inode.set_flag(Inode::MAPPED);
        }
        // Either the read that follows sees a write, or the writer sees the flag.
        fence(Ordering::SeqCst);
    }

    /// Whether the kernel may have pages of a file that a direct write through this handle does not
    /// change.
    pub(crate) fn is_mapped_past(&self, ino: Ino, fh: u64) -> bool {
        self.handles.get(ino, fh).is_some_and(|handle| match self.options.cache {
            // Direct writes are synchronous, so the kernel drops its pages behind them, too.
            CacheMode::Writeback => false,
            CacheMode::Kernel | CacheMode::Strict => {
                !handle.direct || handle.inode.has_flag(Inode::MAPPED)
            }
        })
    }
}
