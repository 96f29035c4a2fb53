//! Who owns a volume: one writer or several readers, and the pid of whoever is in the way.
//!
//! The lock belongs to the open file description, so it lasts as long as any process has it open (through fork and
//! exec too), and another handle in the same process is refused like a stranger. Such locks do not tell their holder's
//! pid (`F_OFD_GETLK` answers -1), a classic POSIX lock is dropped when the process closes *any* descriptor of the
//! file, and a pid written into the volume can be stale. So the range itself says it: every holder locks `pid` bytes
//! that start at [`LOCK_START`]. All ranges share the first byte, so they exclude each other as one lock would, and
//! whoever is refused reads the pid off the length of the lock in the way. Lock and pid are one and cannot disagree.

use super::sys::{self, RangeLock};
use std::fs::File;
use std::io;

/// First byte of the lock, beyond any byte of a volume.
const LOCK_START: i64 = 1 << 62;
/// How often to try again when the lock was in the way but its holder had left when we asked who it is.
const ATTEMPTS: u32 = 100;

/// The process in the way.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Holder {
    /// As the holder itself saw it.
    pub pid: u32,
    /// It holds the lock exclusively.
    pub writing: bool,
}

/// Takes the lock for this process, exclusively or shared. The inner error is the holder.
pub(super) fn acquire(file: &File, exclusive: bool) -> io::Result<Result<(), Holder>> {
    let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    let lock = RangeLock { kind, start: LOCK_START, len: i64::from(std::process::id()) };
    for _ in 0..ATTEMPTS {
        if sys::try_lock(file, lock)? {
            return Ok(Ok(()));
        }
        if let Some(other) = sys::conflicting_lock(file, lock)? {
            let writing = other.kind == libc::F_WRLCK;
            // Anyone else may lock what he likes: a range that cannot be a pid is still in the way.
            let pid = u32::try_from(other.len).unwrap_or_default();
            return Ok(Err(Holder { pid, writing }));
        }
    }
    Err(io::Error::from_raw_os_error(libc::EAGAIN))
}

/// Gives up the lock now, even if the open file lives on.
pub(super) fn release(file: &File) -> io::Result<()> {
    sys::try_lock(file, RangeLock { kind: libc::F_UNLCK, start: LOCK_START, len: 0 }).map(|_| ())
}
