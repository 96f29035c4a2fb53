//! The page cache: folios and their bytes, the extent windows of each file, what leaves memory, and
//! what is on its way to the device.

pub(crate) mod batch;
pub(crate) mod copy;
pub(crate) mod deferred;
pub(crate) mod eviction;
pub(crate) mod fetching;
pub(crate) mod file_data;
pub(crate) mod folio;
pub(crate) mod frame;
pub(crate) mod frame_table;
#[cfg(test)]
mod frame_table_tests;
pub(crate) mod memory;
pub(crate) mod node;
pub(crate) mod pages;
mod queues;
