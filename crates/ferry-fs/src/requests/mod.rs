//! What transports and servers ask of a mounted volume.

pub(crate) mod blocking;
pub(crate) mod bulk_sync;
pub(crate) mod bypass;
pub(crate) mod contents;
pub(crate) mod deferred_errors;
pub(crate) mod devices;
pub(crate) mod durable;
pub(crate) mod filesystem;
pub(crate) mod grow_log;
pub(crate) mod memory;
pub(crate) mod mount;
pub(crate) mod read_ahead;
pub(crate) mod resize;
pub(crate) mod scrub;
pub(crate) mod session_records;
pub(crate) mod snapshots;
pub(crate) mod stats;
#[cfg(test)]
mod tests;
pub(crate) mod trim;
pub(crate) mod tune;
pub(crate) mod warm;
