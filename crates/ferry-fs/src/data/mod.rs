//! The contents of files: segments, space, extents, the page cache and write-back.

use crate::api::{Errno, Ino};
use crate::error::FsError;
use crate::inode::Inode;
use crate::keys::InodeRecord;
use ferry_device::{BlockDevice, Env};
use ferry_journal::{Credits, Geometry, Journal, JournalClient, JournalError, Recovered, Seq, Transaction};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// What the data half keeps for each inode.
#[derive(Default)]
pub struct FileData {}

/// How the data half finds inodes that it knows only by number.
pub trait InodeSource: Send + Sync {
    /// The inode, loaded if nobody has it; `None`: it does not exist.
    fn inode(&self, ino: Ino) -> Result<Option<Arc<Inode>>, FsError>;
    /// A path or a name, for log messages.
    fn name_hint(&self, ino: Ino) -> String;
}

/// How the data half behaves.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Memory for cached contents, in bytes.
    pub cache_bytes: usize,
    /// Dirty data is written back at this age.
    pub writeback_age: Duration,
    /// `false`: no threads; everything happens on the caller's thread.
    pub background: bool,
    /// Nothing is ever written.
    pub read_only: bool,
}

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// At this byte.
    Offset(u64),
    /// At the end of the file, as of the moment of the write.
    End,
}

/// What an operation is about to add, for [`DataStore::admit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Names, records, attributes.
    Metadata,
}

/// Space in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceTotals {
    /// All.
    pub total: u64,
    /// Free.
    pub free: u64,
    /// Free for users: the smaller of the volume's and the host's, without what is kept back.
    pub available: u64,
    /// Bytes that extents refer to.
    pub live: u64,
}

/// Counters for `stats`.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct DataStats {}

/// The contents of all files of a volume.
pub struct DataStore {}

impl DataStore {
    /// Makes the store; it answers the journal's questions already, but knows nothing before [`DataStore::start`].
    pub fn new(_dev: Arc<dyn BlockDevice>, _geometry: Geometry, _options: DataOptions, _env: Env) -> Arc<Self> {
        Arc::new(Self {})
    }
    /// Loads the segment table, finishes interrupted truncations and starts the background thread.
    pub fn start(
        self: &Arc<Self>,
        _journal: Arc<Journal>,
        _recovered: &Recovered,
        _inodes: Arc<dyn InodeSource>,
    ) -> Result<(), FsError> {
        Ok(())
    }
    /// Reads at `offset`; fewer bytes than asked only at the end of the file.
    pub fn read(&self, _inode: &Arc<Inode>, _offset: u64, _out: &mut [u8]) -> Result<usize, FsError> {
        Err(unsupported())
    }
    /// Writes all of `data` into memory, with its space reserved; `edit` changes other attributes under the inode lock.
    /// Returns the offset behind the last byte.
    pub fn write(
        &self,
        _inode: &Arc<Inode>,
        _at: At,
        _data: &[u8],
        _edit: &mut dyn FnMut(&mut InodeRecord),
    ) -> Result<u64, FsError> {
        Err(unsupported())
    }
    /// Truncates or extends, together with other changes of attributes.
    pub fn set_size(
        &self,
        _inode: &Arc<Inode>,
        _size: u64,
        _edit: &mut dyn FnMut(&mut InodeRecord),
    ) -> Result<Seq, FsError> {
        Err(unsupported())
    }
    /// Allocates, punches or zeroes, by the mode bits of fallocate(2).
    pub fn fallocate(
        &self,
        _inode: &Arc<Inode>,
        _mode: i32,
        _offset: u64,
        _len: u64,
        _edit: &mut dyn FnMut(&mut InodeRecord),
    ) -> Result<(), FsError> {
        Err(unsupported())
    }
    /// `SEEK_DATA` or `SEEK_HOLE`.
    pub fn seek(&self, _inode: &Arc<Inode>, _offset: u64, _whence: i32) -> Result<u64, FsError> {
        Err(unsupported())
    }
    /// Puts all that is dirty of `inode` into contexts up to the returned one; the caller forces it.
    pub fn write_back(&self, _inode: &Arc<Inode>) -> Result<Seq, FsError> {
        Err(unsupported())
    }
    /// The same for all inodes.
    pub fn write_back_all(&self) -> Result<Seq, FsError> {
        Err(unsupported())
    }
    /// Forgets what is cached, dirty data too: the last name and handle are gone.
    pub fn drop_cache(&self, _inode: &Arc<Inode>) {}
    /// Gives back everything that `inode` occupies. `finish` adds at most `room` to the last transaction; it is called
    /// without an inode lock, and may keep the counters' lock until this returns. Takes no inode lock over a wait.
    pub fn reclaim(
        &self,
        _inode: &Arc<Inode>,
        _room: Credits,
        _finish: &mut dyn FnMut(&mut Transaction<'_>),
    ) -> Result<Seq, FsError> {
        Err(unsupported())
    }
    /// `ENOSPC` when there is no room for what an operation adds.
    pub fn admit(&self, _growth: Growth) -> Result<(), FsError> {
        Ok(())
    }
    /// Totals for statfs.
    pub fn totals(&self) -> SpaceTotals {
        SpaceTotals::default()
    }
    /// `times_dirty` was set (or another attribute waits to be logged): write-back is to come by.
    pub fn mark_dirty(&self, _inode: &Arc<Inode>) {}
    /// There is something that the journal does not have yet: the inode must stay in memory.
    pub fn is_dirty(&self, _inode: &Inode) -> bool {
        false
    }
    /// What a new handle's error cursor starts from.
    pub fn error_cursor(&self, _inode: &Inode) -> u64 {
        0
    }
    /// A write-back error that the handle with this cursor has not been told.
    pub fn error_since(&self, _inode: &Inode, _cursor: &AtomicU64) -> Option<Errno> {
        None
    }
    /// Counters.
    pub fn stats(&self) -> DataStats {
        DataStats::default()
    }
    /// Writes everything back and stops the background thread. The journal is still open.
    pub fn close(&self) -> Result<(), FsError> {
        Ok(())
    }
}

fn unsupported() -> FsError {
    FsError::Errno(Errno(libc::EOPNOTSUPP))
}

impl JournalClient for DataStore {
    fn stamped(&self, _seq: Seq) {}
    fn failed(&self, _error: &JournalError) {}
    fn take_home_segment(&self) -> Option<u32> {
        None
    }
    fn release_home_segments(&self, _segments: &[u32]) {}
}
