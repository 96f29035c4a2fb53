//! A mounted volume: its options, inode numbers, open files, transactions and threads.

pub mod carried;
pub(crate) mod counters;
pub(crate) mod handles;
pub(crate) mod jobs;
pub(crate) mod local_fs;
pub(crate) mod lost_names;
pub(crate) mod name_hash;
pub(crate) mod pool;
pub(crate) mod reclaimer;
pub(crate) mod transaction;
