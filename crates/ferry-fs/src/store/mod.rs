//! The contents of all files of a volume.

pub mod data_store;
pub mod dirty_queue;
pub mod moves;
pub mod removed;
