//! The file system itself: inodes, dentries, extents, segments, page cache, locks.
//!
//! [`Filesystem`] is what a transport (FUSE, later the server) calls; [`LocalFs`] implements it on a volume.

/// Asserts what costs too much where it is used: in debug builds and in this crate's own tests.
macro_rules! checked {
    ($($what:tt)*) => {
        if cfg!(any(test, debug_assertions)) {
            assert!($($what)*);
        }
    };
}

pub mod api;
pub mod data;
pub mod dir;
pub mod error;
pub mod fsck;
pub mod inode;
pub mod inprocess;
pub mod inspect;
pub mod keys;
pub mod local;
pub mod order;
pub mod scrub;
pub mod statelock;
pub mod volume;

pub use api::*;
pub use data::{At, Locking};
pub use ferry_journal::{FlushPolicy, LogOptions, Wake};
pub use fsck::{Code, FsckOptions, Report, fsck, repair};
pub use inprocess::InProcess;
pub use local::{CacheMode, FsOptions, LocalFs, OpenFile};
pub use scrub::{ScrubOptions, scrub};
pub use volume::{MkfsOptions, Superblock, VolumeError, mkfs};
