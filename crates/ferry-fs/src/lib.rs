//! The file system itself: a volume's inodes, names, contents, space and locks.
//!
//! [`Filesystem`] is what a transport calls (FUSE, or the server of `ferry-net`). [`SessionStore`]
//! is what the server asks beyond that. [`LocalFs`] implements both on a volume.
//!
//! Each module is a layer: it uses what stands below it, and nothing above.
//!
//! ```text
//! snapdir      a volume with its snapshots; replica: a volume that another process changes
//! reader       a file system that never changes, below one of these
//! requests     the traits implemented: open, read, write, fsync, scrub, tune, statistics
//! namespace    lookup, create, remove, rename, link, listing, attributes, xattrs, ACLs, orphans
//! local        LocalFs: options, inode numbers, open files, transactions, threads
//! scrub        reading and verifying all of a volume
//! file         contents: read, write, truncate, fallocate
//! writeback    write batches, the cleaner, finding space, the background thread
//! store        DataStore: the extent maps, fetching and dropping blocks, what waits for write-back
//! inode        the inode in memory, its locks, the inode table, cached directory entries
//! space        free blocks and their wait queue, reservations, segments, summaries
//! cache        folios, frames (sequence locks), eviction, what is in flight to the device
//! extents      the extent map of a file
//! volume       superblock, mkfs
//! keys         what is stored: records of inodes, names, extents, segments, sessions
//! api posix    the requests; the rules of POSIX as pure functions
//! ```
//!
//! Beside them stand `error`, `errseq` (deferred errors), `order` (the order of locks, asserted),
//! `credits` (log space), `known` (what outlives a process that is killed), `inprocess` (calls
//! without a transport), `session_store` (the trait), `sync` (what model checkers replace), and
//! `compare` (locks that only benchmarks use).

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
mod credits;
pub mod error;
pub mod errseq;
pub mod extents;
mod file;
mod in_order;
pub mod inode;
pub mod inprocess;
pub mod keys;
pub mod known;
mod local;
mod namespace;
mod order;
mod patience;
pub mod posix;
mod reader;
mod replica;
mod requests;
pub mod scrub;
pub mod session_store;
mod snapdir;
pub mod space;
pub mod store;
mod sync;
pub mod volume;
mod writeback;

pub use api::*;
#[cfg(feature = "compare")]
pub use compare::locking::Locking;
pub use errseq::{ErrorCursor, ErrorSequence};
pub use ferry_journal::{FlushPolicy, LogOptions, RequestId};
pub use in_order::LeftInOrder;
pub use inprocess::InProcess;
pub use known::{Known, LeftBehind, LeftWords};
pub use local::carried::Carried;
pub use local::local_fs::{AccessTimes, CacheMode, FsOptions, LocalFs};
pub use replica::{CarriedReplica, Lag, Replica, ReplicaOptions, Version, Versions};
pub use requests::contents::OpenFile;
pub use requests::session_records::Given;
pub use scrub::{ScrubOptions, scrub};
pub use session_store::{Needed, Reservation, SessionStore};
pub use snapdir::WithSnapshots;
pub use space::reservation::{target_cost, write_cost};
pub use store::data_store::{At, DataStats, SpaceTotals};
pub use volume::{MkfsOptions, Superblock, VolumeError, mkfs};
