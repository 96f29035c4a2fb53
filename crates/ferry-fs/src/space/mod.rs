//! Space on the volume: free blocks and their wait queue, reservations, segments and their
//! summaries.

pub(crate) mod free_blocks;
pub(crate) mod host;
pub(crate) mod pool;
pub(crate) mod reservation;
pub(crate) mod resize;
pub(crate) mod segments;
pub mod summary;
