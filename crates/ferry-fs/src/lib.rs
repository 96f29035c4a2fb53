//! The file system itself: inodes, dentries, extents, segments, page cache, locks.
//!
//! [`Filesystem`] is what a transport (FUSE, later the server) calls; [`LocalFs`] implements it on
//! a volume.

/// Asserts what costs too much where it is used: in debug builds and in this crate's own tests.
macro_rules! checked {
    ($($what:tt)*) => {
        if cfg!(any(test, debug_assertions)) {
            assert!($($what)*);
        }
    };
}

/// Asserts, in this crate's own tests, what is so on a volume that is not damaged. Elsewhere a
/// volume may say anything.
macro_rules! sound {
    ($($what:tt)*) => {
        if cfg!(test) {
            assert!($($what)*);
        }
    };
}

pub mod api;
mod cache;
#[cfg(feature = "compare")]
mod compare;
pub mod error;
pub mod errseq;
pub mod extents;
mod file;
pub mod inode;
pub mod inprocess;
pub mod keys;
mod local;
mod namespace;
mod order;
pub mod posix;
mod requests;
pub mod scrub;
pub mod session_store;
pub mod space;
pub mod store;
mod sync;
pub mod volume;
mod writeback;

pub use api::*;
#[cfg(feature = "compare")]
pub use compare::locking::Locking;
pub use errseq::{ErrorCursor, ErrorSequence};
pub use ferry_journal::{FlushPolicy, LogOptions, Wake};
pub use inprocess::InProcess;
pub use local::local_fs::{AccessTimes, CacheMode, FsOptions, LocalFs};
pub use requests::contents::OpenFile;
pub use scrub::{ScrubOptions, scrub};
pub use session_store::{Reservation, SessionStore};
pub use space::reservation::{target_cost, write_cost};
pub use store::data_store::At;
pub use volume::{MkfsOptions, Superblock, VolumeError, mkfs};
