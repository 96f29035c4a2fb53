//! The system calls, and FerryFS's ioctl.
#![expect(
    unsafe_code,
    reason = "ioctl(2) and sync_file_range(2) have no safe wrapper; fsync of a bare number"
)]

use rustix::fs::{AtFlags, FileType, StatxFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// The most files of one bulk sync.
pub const BULK_FILES_MAX: usize = 2000;
/// FerryFS's ioctl: `_IOWR('F', 16, struct ferry_sync_message)`.
pub const SYNC_FILES: u32 =
    3 << 30 | (size_of::<BulkMessage>() as u32) << 16 | (b'F' as u32) << 8 | 16;
/// In [`BulkMessage::flags`]: as fdatasync(2).
const DATA_ONLY: u32 = 1;
/// The assumed limit of open files if the process's limit cannot be read.
const OPEN_FILES_GUESS: usize = 1024;
/// The assumed limit if the process has none, and the most that is used of a larger one.
const OPEN_FILES_MAX: usize = 1 << 16;

/// The ioctl's message: inode numbers go in, and an errno returns in place of each.
#[repr(C)]
pub struct BulkMessage {
    pub count: u32,
    pub flags: u32,
    pub files: [u64; BULK_FILES_MAX],
}

const _: () = assert!(
    size_of::<BulkMessage>() == 16008,
    "the kernel carries 16383 bytes, and the number holds the size"
);

impl BulkMessage {
    pub fn new(data_only: bool) -> Box<Self> {
        Box::new(Self {
            count: 0,
            flags: if data_only { DATA_ONLY } else { 0 },
            files: [0; BULK_FILES_MAX],
        })
    }
}

/// Sends the message to the file system that `file` is on.
pub fn bulk_sync(file: BorrowedFd<'_>, message: &mut BulkMessage) -> io::Result<()> {
    let request = libc::c_ulong::from(SYNC_FILES);
    // SAFETY: the request's number says that the kernel reads and writes at most one `BulkMessage`,
    // which outlives the call; any bytes are a valid one.
    let result =
        unsafe { libc::ioctl(file.as_raw_fd(), request as libc::Ioctl, &raw mut *message) };
    check(result)
}

/// Makes the kernel write back the file's dirty pages to the file system, and waits for it. (Only
/// stores to mapped memory are still in the kernel: other writes have arrived.)
pub fn write_back(file: BorrowedFd<'_>) -> io::Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: carries no memory.
    check(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, all) })
}

/// fsync(2) or fdatasync(2) of a descriptor's number.
pub fn fsync(file: RawFd, data_only: bool) -> io::Result<()> {
    // SAFETY: carries no memory; the thread that waits for the answer keeps the descriptor open.
    check(unsafe { if data_only { libc::fdatasync(file) } else { libc::fsync(file) } })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The device number of a file system: major, minor.
pub type DeviceNumber = (u32, u32);

/// What decides how a file is synced.
pub struct FileIdentity {
    pub device: DeviceNumber,
    pub ino: u64,
    pub regular: bool,
}

/// Identifies a file without a request to the file system.
pub fn identify(file: BorrowedFd<'_>) -> io::Result<FileIdentity> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(file, c"", flags, StatxFlags::TYPE | StatxFlags::INO)?;
    Ok(FileIdentity {
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        ino: stat.stx_ino,
        regular: FileType::from_raw_mode(stat.stx_mode.into()) == FileType::RegularFile,
    })
}

/// Whether [`write_back`] really waits. Before Linux 6.16 FUSE copies a dirty page, marks it clean,
/// and sends the copy later; only fsync waits for that.
pub fn write_back_waits() -> bool {
    let name = rustix::system::uname();
    release_at_least(&name.release().to_string_lossy(), (6, 16))
}

/// Whether a release of Linux, as uname(2) names it, is this one or a newer one.
pub fn release_at_least(release: &str, (major, minor): (u32, u32)) -> bool {
    let mut parts =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (major, minor)
}

/// How many descriptors the process may have open.
pub fn open_files_limit() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit
        .map_or(OPEN_FILES_GUESS, |n| usize::try_from(n).unwrap_or(OPEN_FILES_MAX))
        .min(OPEN_FILES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_compared_by_number() {
        for (release, enough) in [
            ("6.16.0", true),
            ("6.9.12-1-amd64", false),
            ("6.18.44-fc", true),
            ("7.0-rc1", true),
            ("5.100", false),
            ("", false),
        ] {
            assert_eq!(release_at_least(release, (6, 16)), enough, "{release}");
        }
    }
}
