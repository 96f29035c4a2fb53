//! Space on the volume: free blocks and who waits for them, reservations, segments and their
//! summaries.

pub mod free_blocks;
pub mod pool;
pub mod reservation;
pub mod segments;
pub mod summary;
