//! Workloads, measured.

pub mod fsync_happy;
pub mod null;
