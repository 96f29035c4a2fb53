//! Workloads, measured.

pub mod fsync_happy;
pub mod null;
pub mod target;
pub mod torn;
