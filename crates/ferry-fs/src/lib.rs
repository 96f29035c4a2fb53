//! The file system itself: inodes, dentries, extents, segments, page cache, locks.
//!
//! [`Filesystem`] is what a transport (FUSE, later the server) calls; [`LocalFs`] implements it on a volume.

pub mod api;
pub mod data;
pub mod dir;
pub mod error;
pub mod inode;
pub mod keys;

pub use api::*;
