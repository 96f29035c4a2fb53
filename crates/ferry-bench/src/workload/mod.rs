//! The workloads: each has the options of its command line, and makes a [`Bench`](crate::Bench) of
//! them.

mod bare;
pub mod create;
pub mod fserver;
pub mod fsmark;
pub mod fsync_happy;
pub mod log_space;
mod numbers;
pub mod overwrite;
pub mod programs;
pub mod randrw;
pub mod torn;
pub mod transactions;
