//! Write-back: batches of dirty data, the cleaner, and the background thread.

pub(crate) mod cleaner;
pub(crate) mod flusher;
pub(crate) mod map;
pub(crate) mod send;
pub(crate) mod trim;
pub(crate) mod write_back;
