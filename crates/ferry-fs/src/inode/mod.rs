//! Inodes in memory: their table, their locks, and the cached entries of directories.

pub(crate) mod dir_cache;
pub(crate) mod extents_right;
pub mod incore;
pub(crate) mod locked;
pub(crate) mod residency;
#[cfg(test)]
mod residency_tests;
pub(crate) mod state;
pub(crate) mod state_lock;
pub mod table;
