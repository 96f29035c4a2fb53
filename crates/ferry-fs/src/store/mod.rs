//! The contents of all files of a volume.

pub(crate) mod ahead_jobs;
pub mod data_store;
pub(crate) mod dirty_queue;
pub(crate) mod drop;
pub(crate) mod fetch;
pub(crate) mod memory;
pub(crate) mod moves;
pub(crate) mod read_shares;
pub(crate) mod removed;
pub(crate) mod reservation;
pub(crate) mod signal;
pub(crate) mod windows;
