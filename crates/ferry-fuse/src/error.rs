//! Errors around a mount. (Inside a mount an error is an errno for the calling program.)

use std::io;
use std::path::PathBuf;

/// An error of mounting, serving or unmounting.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device is missing or may not be opened.
    #[error("cannot open /dev/fuse: {0}")]
    Device(#[source] io::Error),
    /// mount(2) refused to mount.
    #[error("cannot mount on {}: {error}", mountpoint.display())]
    Mount {
        /// The mount point.
        mountpoint: PathBuf,
        /// The kernel's answer.
        #[source]
        error: io::Error,
    },
    /// The helper that mounts for users who are not root failed, or is not installed.
    #[error("fusermount3: {0}")]
    Helper(String),
    /// umount2(2) refused; `EBUSY`: files are open.
    #[error("cannot unmount {}: {error}", mountpoint.display())]
    Unmount {
        /// The mount point.
        mountpoint: PathBuf,
        /// The kernel's answer.
        #[source]
        error: io::Error,
    },
    /// Nothing of type FUSE is mounted there.
    #[error("{} is not a FUSE mount", .0.display())]
    NotMounted(PathBuf),
    /// The kernel uses another version of the protocol.
    #[error("the kernel speaks FUSE {major}.{minor}; 7.28 or newer is needed")]
    Version {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },
    /// The kernel's first message was not what the protocol says.
    #[error("the kernel's first FUSE message is malformed")]
    Handshake,
    /// The transport could not be set up.
    #[error("cannot start the FUSE transport: {0}")]
    Transport(#[source] io::Error),
}
