//! A mount that follows a volume which another process, perhaps of another machine, goes on
//! changing.
//!
//! [`Replica`] is the file system that a transport sees. It shows one *version* of the volume at a
//! time, which is opened as a file system of its own that never changes. A thread looks for a newer
//! one, opens it, and turns to it.
//!
//! * REPLICA-1: each request is answered from one version. A request that begins after another one
//!   was answered is answered from the same version, or a later one.
//! * REPLICA-2: the kernel caches no names and no attributes, and pages of open files only. A turn
//!   drops all of these. Until that is done, only reads of contents are answered: no program sees a
//!   new name or attribute and then an old page.
//! * REPLICA-3: reads have threads of their own. The kernel has locked the pages that it reads, and
//!   a turn waits for those locks.
//! * REPLICA-4: an inode number has its *timeline* in the upper bits ([`timeline`]): what a number
//!   meant before a rollback it never means behind it.
//! * REPLICA-5: a version is closed when its last request has ended. An open file moves to the
//!   next version. One that the next version has not any more (it was removed, replaced, or is of
//!   an earlier timeline) holds its last version, until it is closed or the time is up: then it is
//!   stale. So nothing here needs for long what the owner deletes when its grace has passed. An
//!   orphan counts as removed: its owner keeps the contents elsewhere, or is reclaiming them.
//! * REPLICA-6: an open directory goes on listing the version in which the listing began, for as
//!   long as a file would hold it. So a file that moved meanwhile is listed once.
//! * REPLICA-7: a process that goes on with the mount of another one begins with a turn: the kernel
//!   drops pages first. For that, and for REPLICA-1 and REPLICA-4, a version is noted before
//!   programs see it, and an open file before its open is answered. Older versions are not there
//!   any more: files that the new one has not are stale at once, and listings go on in the new one.

mod carried;
mod follow;
mod requests;
mod showing;
mod timeline;

#[cfg(test)]
mod tests;

pub use carried::CarriedReplica;
pub use follow::{Lag, ReplicaOptions, Version, Versions};
pub use requests::Replica;
