//! Inodes in memory: their table, their locks, and the cached entries of directories.

pub mod dir_cache;
pub mod extents_right;
pub mod incore;
pub mod locked;
pub mod state;
pub mod state_lock;
pub mod table;
