//! Write-back: batches of dirty data, the cleaner, and the background thread.

pub(crate) mod batch;
pub(crate) mod cleaner;
pub(crate) mod find_space;
pub(crate) mod flusher;
pub(crate) mod map;
pub(crate) mod pressure;
pub(crate) mod send;
pub(crate) mod trim;
pub(crate) mod write_back;
