//! Workloads, measured.

pub mod null;
