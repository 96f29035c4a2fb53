//! Why a device could not be opened or made. What goes wrong later is a plain [`std::io::Error`],
//! with its errno.

use std::io;
use std::path::PathBuf;

/// Why a device could not be opened or made.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Another process (or this one, through another handle) uses it in a way that excludes this
    /// use.
    #[error("{} is in use by process {pid}{}", path.display(), if *writing { "" } else { " (reading)" })]
    InUse {
        /// What was asked for.
        path: PathBuf,
        /// The holder, as numbered in the holder's own pid namespace.
        pid: u32,
        /// The holder may write; otherwise it only reads.
        writing: bool,
    },
    /// A block device that the kernel itself uses: mounted, swap, or part of another device.
    #[error("{} is in use by the kernel (mounted, or part of another device)", .0.display())]
    Busy(PathBuf),
    /// It is there already, and overwriting was not asked for.
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    /// Neither a regular file nor a block device.
    #[error("{} is neither a regular file nor a block device", .0.display())]
    WrongKind(PathBuf),
    /// A size that cannot be: zero, not whole blocks, or more than the block device has.
    #[error("{}: {size} bytes is not a possible size (at most {limit}, in units of 4096)", path.display())]
    Size {
        /// What was asked for.
        path: PathBuf,
        /// The size that the caller asked for, in bytes.
        size: u64,
        /// The largest size possible, in bytes.
        limit: u64,
    },
    /// A call to the host failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was attempted, as an infinitive.
        what: &'static str,
        /// The file or device that it concerns.
        path: PathBuf,
        /// The error that the host returned.
        source: io::Error,
    },
}
