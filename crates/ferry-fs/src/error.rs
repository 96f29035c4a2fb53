//! What can go wrong inside the file system, and the errno that a program sees.

use crate::api::{Errno, Stop};
use crate::keys::BadRecord;
use ferry_journal::JournalError;

/// A failed operation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FsError {
    /// What a program is told.
    #[error("{0}")]
    Errno(Errno),
    /// It would have to wait, and its caller must not. No program is told: the request is done
    /// by a thread that may wait.
    #[error("it would have to wait")]
    WouldWait,
    /// The journal could not do it.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A record that this version cannot read.
    #[error("{0}: run `ferry fsck` on the volume")]
    Record(#[from] BadRecord),
    /// Data that is not what was written, or could not be read.
    #[error("inode {ino}, byte {offset}: {detail}")]
    Data {
        /// The file.
        ino: u64,
        /// Where in the file.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
}

impl From<Errno> for FsError {
    fn from(e: Errno) -> Self {
        FsError::Errno(e)
    }
}

impl FsError {
    /// One file's own data or records are damaged; it says nothing of the others.
    pub fn is_of_one_file(&self) -> bool {
        // A failed checkpoint is damage too, but for a change it is a journal that is
        // read-only.
        matches!(
            self,
            FsError::Data { .. }
                | FsError::Record(_)
                | FsError::Journal(JournalError::Damaged { .. })
        )
    }
    /// The one place where errors become errnos.
    pub fn errno(&self) -> Errno {
        match self {
            FsError::Errno(e) => *e,
            FsError::WouldWait => Errno(libc::EAGAIN),
            FsError::Journal(JournalError::ReadOnly(_)) => Errno(libc::EROFS),
            FsError::Journal(JournalError::NoSpace) => Errno(libc::ENOSPC),
            FsError::Journal(JournalError::TooLarge { .. }) => Errno(libc::EFBIG),
            FsError::Journal(_) | FsError::Record(_) | FsError::Data { .. } => Errno(libc::EIO),
        }
    }
}

impl From<FsError> for Stop {
    fn from(e: FsError) -> Self {
        Stop::Errno(e.errno())
    }
}
