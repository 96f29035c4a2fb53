//! The contents of all files of a volume.

pub(crate) mod ahead_jobs;
pub mod data_store;
pub mod dirty_queue;
pub(crate) mod drop;
pub(crate) mod fetch;
pub mod moves;
pub mod removed;
pub(crate) mod reservation;
pub(crate) mod signal;
pub(crate) mod windows;
