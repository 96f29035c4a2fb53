//! An inode in memory: what the namespace half and the data half of the file system share.

use crate::api::{Errno, Ino};
use crate::cache::eviction::{CachedFile, Claimed};
use crate::cache::file_data::FileData;
use crate::errseq::ErrorSequence;
use crate::inode::dir_cache::DirData;
use crate::inode::state::InodeState;
use crate::inode::state_lock::StateLock;
use crate::keys::InodeRecord;
use ferry_journal::JournalError;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An inode that somebody knows: the kernel, an open handle, the write-back queue, or only the
/// cache.
///
/// Lock order (`docs/locking.md`): a journal reservation is taken before any lock; then the rename
/// lock; then the `state` of every inode that the operation changes, by ascending inode number;
/// then what belongs to the data half.
pub struct Inode {
    /// Its number.
    pub ino: Ino,
    /// *The inode lock*, and what it protects.
    pub state: StateLock,
    /// A file's cached contents (the data half's own).
    pub file: FileData,
    /// A directory's cached entries (the namespace half's own).
    pub dir: DirData,
    /// Newest journal context that holds a change of this inode or of one of its names.
    pub last_seq: AtomicU64,
    /// Lookups that the kernel has not taken back.
    pub lookups: AtomicU64,
    /// Open handles.
    pub opens: AtomicU32,
    /// Those of them that write past the kernel's page cache.
    pub bypassing: AtomicU32,
    /// Writes of the kernel's own cache that failed (`requests/deferred_errors.rs`).
    pub kernel_write_errors: ErrorSequence,
    flags: AtomicU32,
}

impl Inode {
    /// Bytes that one takes in memory, with its places in the table and with what the allocator
    /// rounds up.
    pub const MEMORY: usize = size_of::<Self>() * 9 / 8 + 64;

    /// A request has named it since the table looked last.
    pub const USED: u32 = 1;
    /// It has no name and nobody knows it: the thread that sets this flag gives its space back.
    pub const RECLAIMING: u32 = 2;
    /// Made without a name: it may be given one.
    pub const LINKABLE: u32 = 4;
    /// Its entries are cached, and it is in the queue of such directories.
    pub const DIR_CACHED: u32 = 8;

    /// The kernel has read pages of it through a handle that bypasses its page cache: somebody has
    /// mapped it.
    pub const MAPPED: u32 = 16;
    /// It has lost its last name, or was made without one.
    pub const NAMELESS: u32 = 32;
    /// What outlives the process says that no context has all of its contents.
    pub const UNSAVED: u32 = 64;

    /// As the journal has it; nobody knows it yet.
    pub fn new(ino: Ino, rec: InodeRecord) -> Self {
        Self {
            ino,
            state: StateLock::new(ino, InodeState::from_record(rec)),
            file: FileData::of(ino),
            dir: DirData::default(),
            last_seq: AtomicU64::new(0),
            lookups: AtomicU64::new(0),
            opens: AtomicU32::new(0),
            bypassing: AtomicU32::new(0),
            kernel_write_errors: ErrorSequence::default(),
            flags: AtomicU32::new(0),
        }
    }

    /// Whether the kernel or a handle knows it.
    pub fn is_known(&self) -> bool {
        self.lookups.load(Ordering::Acquire) > 0 || self.opens.load(Ordering::Acquire) > 0
    }

    /// Whether a handle knows it.
    pub fn is_open(&self) -> bool {
        self.opens.load(Ordering::Acquire) > 0
    }

    /// Sets a flag; says whether it was set before.
    pub fn set_flag(&self, flag: u32) -> bool {
        self.flags.fetch_or(flag, Ordering::AcqRel) & flag != 0
    }

    /// All flags that are set.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Acquire)
    }

    /// Whether a flag is set.
    pub fn has_flag(&self, flag: u32) -> bool {
        self.flags() & flag != 0
    }

    /// Clears a flag; says whether it was set before.
    pub fn clear_flag(&self, flag: u32) -> bool {
        self.flags.fetch_and(!flag, Ordering::AcqRel) & flag != 0
    }
}

impl CachedFile for Inode {
    fn number(&self) -> u64 {
        self.ino
    }

    fn evict(&self, claimed: Claimed) {
        self.file.evict(claimed);
    }

    fn write_failed(&self, error: &JournalError) {
        tracing::error!(inode = self.ino, %error, "data could not be written");
        self.file.errors.add(Errno(libc::EIO));
    }
}
