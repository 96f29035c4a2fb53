//! Space on the volume: free blocks and their wait queue, reservations, segments and their
//! summaries.

pub mod free_blocks;
pub(crate) mod host;
pub mod pool;
pub mod reservation;
pub mod segments;
pub mod summary;
