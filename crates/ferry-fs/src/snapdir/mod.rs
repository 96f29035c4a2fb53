//! The snapshots of a volume below `.snapshots`, in the root of its mount.
//!
//! [`WithSnapshots`] is the file system that a transport sees: that of the volume, and beside
//! it those of its snapshots, which are opened as they are looked up.
//!
//! * SNAPDIR-1: an inode number has its *tree* in the upper bits ([`number`]). Tree 0 is the volume
//!   itself. As long as the mount lasts, a tree's number means one snapshot, and so does every
//!   number that the kernel knows.
//! * SNAPDIR-2: a snapshot never changes, so it need not remember what the kernel knows of it: no
//!   lookup and no open file is counted. It may be closed at any time that nobody reads it, and is
//!   opened again by the next request.
//! * SNAPDIR-3: what may have to read a snapshot is done by a thread of a pool. A store that does
//!   not answer keeps no request to the volume itself waiting.

mod directory;
pub(crate) mod number;
mod open;
mod requests;

pub use requests::WithSnapshots;
