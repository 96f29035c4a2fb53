//! The system calls that neither std nor rustix wraps.
#![expect(unsafe_code, reason = "locks of byte ranges and BLKDISCARD have no safe wrapper")]

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// A byte-range lock as `fcntl` describes it. `kind` is `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangeLock {
    pub kind: i32,
    pub start: i64,
    pub len: i64,
}

impl RangeLock {
    fn to_flock(self) -> libc::flock {
        libc::flock {
            l_type: self.kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: self.start,
            l_len: self.len,
            l_pid: 0, // required of locks that belong to the open file description
        }
    }
}

/// Turns the convention of `-1` and `errno` into a `Result`, trying again after a signal.
fn retry(mut call: impl FnMut() -> libc::c_int) -> io::Result<libc::c_int> {
    loop {
        let result = call();
        if result >= 0 {
            return Ok(result);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Takes a lock that belongs to the open file description; `false` when another one conflicts.
pub(super) fn try_lock(file: &File, lock: RangeLock) -> io::Result<bool> {
    let flock = lock.to_flock();
    // SAFETY: `flock` is a valid structure that outlives the call; the kernel only reads it.
    match retry(|| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const flock) }) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// The lock of another open file description that `lock` would conflict with, if any.
pub(super) fn conflicting_lock(file: &File, lock: RangeLock) -> io::Result<Option<RangeLock>> {
    let mut flock = lock.to_flock();
    // SAFETY: `flock` is a valid structure that outlives the call; the kernel overwrites it with
    // another valid one.
    retry(|| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut flock) })?;
    let kind = i32::from(flock.l_type);
    Ok((kind != libc::F_UNLCK).then_some(RangeLock {
        kind,
        start: flock.l_start,
        len: flock.l_len,
    }))
}

/// Opens an open file once more, to read it.
pub(super) fn open_again(file: &File, direct: bool) -> io::Result<File> {
    let again = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    set_direct(&again, direct)?;
    Ok(again)
}

/// Makes transfers of this open file bypass the page cache, or not.
pub(super) fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    Ok(fcntl_setfl(file, flags)?)
}

/// Tells a block device that a range is no longer needed.
pub(super) fn block_discard(file: &File, offset: u64, len: u64) -> io::Result<()> {
    /// `_IO(0x12, 119)` of `linux/fs.h`.
    const BLKDISCARD: libc::Ioctl = 0x1277;
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64 from the pointer, which `range` provides and outlives.
    retry(|| unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) })?;
    Ok(())
}
