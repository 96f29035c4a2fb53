//! A mounted volume: its options, inode numbers, open files, transactions and threads.

pub(crate) mod change;
pub(crate) mod counters;
pub(crate) mod handles;
pub(crate) mod late;
pub(crate) mod local_fs;
pub(crate) mod long;
pub(crate) mod pool;
pub(crate) mod readers;
pub(crate) mod transaction;
