//! Checks a volume that nobody has mounted: opens it without writing, recovers in memory, and holds
//! everything that is stored against everything else.
//!
//! One pass in key order; what needs the whole is kept in compact tables (about 50 bytes for each
//! inode and name, one bit for each block in use). Nothing that a damaged or hostile volume holds
//! makes it panic, loop, or take unbounded memory.

mod check;
mod inode;
mod repair;
mod report;
mod space;
#[cfg(test)]
mod tests;
mod tree;
mod verify;
mod volume;

pub use repair::repair;
pub use report::{Code, FINDINGS_MAX, Finding, Holdings, LostRange, Repair, Report};
pub(crate) use volume::check_copied;
pub use volume::{FsckOptions, Progress, fsck};
