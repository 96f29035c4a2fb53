//! Write-back: batches of dirty data, the cleaner, and the background thread.
//!
//! The locks of a batch, in order (`docs/locking.md` has the rules):
//!
//! 1. `new_batch` allocates blocks with no lock held: that may make room.
//! 2. Each file of the batch gives its extents right to its `batch::Work`. A batch of one file
//!    waits for it; a batch of many tries (LOCK-2).
//! 3. `take` copies under the inode lock, shared, and then the page lock.
//! 4. `log` reserves log space with no lock but the rights, then takes the inode lock exclusively,
//!    the page lock, and at the commit the segment table (LOCK-8, LOCK-9).
//! 5. The right goes when the `Work` is dropped: after its commit, or when `undo` has made its
//!    blocks dirty again.

pub(crate) mod batch;
pub(crate) mod cleaner;
pub(crate) mod find_space;
pub(crate) mod flusher;
pub(crate) mod map;
pub(crate) mod pressure;
pub(crate) mod send;
pub(crate) mod trim;
pub(crate) mod vacate;
pub(crate) mod write_back;
