//! An inode in memory: what the namespace half and the data half of the file system share.

use crate::api::{Attr, Ino};
use crate::cache::file_data::FileData;
use crate::errseq::ErrorSequence;
use crate::inode::dir_cache::DirData;
use crate::inode::state_lock::StateLock;
use crate::keys::{BLOCK, INODE_INLINE, InodeRecord};
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
    pub failed_behind: ErrorSequence,
    flags: AtomicU32,
}

/// A file has no more blocks than this.
const BLOCKS_MAX: u64 = i64::MAX as u64 / BLOCK;

impl Inode {
    /// It is in the queue of those that nobody knows.
    pub const COLD: u32 = 1;
    /// It has no name and nobody knows it: whoever sets this flag gives its space back.
    pub const GONE: u32 = 2;
    /// Made without a name: it may be given one.
    pub const LINKABLE: u32 = 4;
    /// Its entries are cached, and it is in the queue of such directories.
    pub const DIR_CACHED: u32 = 8;

    /// The kernel has read pages of it through a handle that bypasses its page cache: somebody has
    /// mapped it.
    pub const MAPPED: u32 = 16;
    /// It has lost its last name, or was made without one.
    pub const NAMELESS: u32 = 32;

    /// As the journal has it; nobody knows it yet.
    pub fn new(ino: Ino, rec: InodeRecord) -> Self {
        Self {
            ino,
            state: StateLock::new(ino, InodeState::from_record(rec)),
            file: FileData::default(),
            dir: DirData::default(),
            last_seq: AtomicU64::new(0),
            lookups: AtomicU64::new(0),
            opens: AtomicU32::new(0),
            bypassing: AtomicU32::new(0),
            failed_behind: ErrorSequence::default(),
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

    /// Whether a flag is set.
    pub fn has_flag(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Acquire) & flag != 0
    }

    /// Clears a flag; says whether it was set before.
    pub fn clear_flag(&self, flag: u32) -> bool {
        self.flags.fetch_and(!flag, Ordering::AcqRel) & flag != 0
    }
}

/// What the inode lock protects.
pub struct InodeState {
    /// What programs see; its `blocks` count what waits for write-back too; its `inline` and
    /// [`INODE_INLINE`] are unused, see `logged`.
    pub rec: InodeRecord,
    /// What the journal says of the contents.
    pub logged: LoggedContents,
    /// Times in `rec` that the journal does not have yet.
    pub times_dirty: bool,
}

/// The contents as the journal has them: behind `rec` while data waits for write-back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoggedContents {
    /// Size in bytes.
    pub size: u64,
    /// Blocks mapped by extents; `rec.blocks` also counts those that wait for write-back.
    pub blocks: u64,
    /// The contents of a small file, a symlink's target.
    pub inline: Option<Box<[u8]>>,
}

impl InodeState {
    /// From the journal's record.
    pub fn from_record(mut rec: InodeRecord) -> Self {
        // A damaged volume may say anything; this much can be counted with.
        rec.blocks = rec.blocks.min(BLOCKS_MAX);
        rec.size = rec.size.min(i64::MAX as u64);
        let inline = (rec.flags & INODE_INLINE != 0)
            .then(|| std::mem::take(&mut rec.inline).into_boxed_slice());
        rec.flags &= !INODE_INLINE;
        let logged = LoggedContents { size: rec.size, blocks: rec.blocks, inline };
        if rec.mode & libc::S_IFMT == libc::S_IFREG
            && logged.inline.as_ref().is_some_and(|i| !i.is_empty())
        {
            rec.blocks += 1; // a file with contents but without blocks would be taken for a hole by archivers
        }
        Self { rec, logged, times_dirty: false }
    }

    /// The record to put into a transaction: everything that programs see, except that the contents
    /// are those that the journal already has (or that the caller has just set in `logged`).
    pub fn record(&self) -> InodeRecord {
        let mut rec = InodeRecord { inline: Vec::new(), ..self.rec.clone() };
        rec.size = self.logged.size;
        rec.blocks = self.logged.blocks;
        if let Some(inline) = &self.logged.inline {
            rec.flags |= INODE_INLINE;
            rec.inline = inline.to_vec();
        }
        rec
    }

    /// As programs see it.
    pub fn attr(&self, ino: Ino) -> Attr {
        let rec = &self.rec;
        Attr {
            ino,
            mode: rec.mode,
            nlink: rec.nlink,
            uid: rec.uid,
            gid: rec.gid,
            rdev: rec.rdev,
            size: rec.size,
            blocks: rec.blocks * 8,
            atime: rec.atime,
            mtime: rec.mtime,
            ctime: rec.ctime,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_record_can_be_counted_with() {
        let inode = Inode::new(
            7,
            InodeRecord { blocks: u64::MAX, size: u64::MAX, ..InodeRecord::default() },
        );
        let state = inode.state.read();
        assert_eq!((state.attr(7).blocks, state.attr(7).size), (BLOCKS_MAX * 8, i64::MAX as u64));
        assert_eq!(state.logged.blocks, BLOCKS_MAX);
    }
}
