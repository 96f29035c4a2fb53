//! Test only: the world as it can go wrong. A run is a function of its seed.
//!
//! [`device`] forgets, tears and fails; [`model`] is a file system in a few maps; [`history`] says
//! which states a crash may leave; [`crash`] runs operations ([`ops`]) on a real `LocalFs` over the
//! simulated device ([`world`]) and crashes it everywhere; [`plan`] draws runs from seeds,
//! [`enumerate`] numbers all short ones, [`begin`] is what they begin on; [`observe`] looks at a
//! volume; [`shrink`] makes what fails small; [`campaign`] runs many. [`overlap`] lets fsyncs be
//! answered later than asked, by a device that completes its requests late and in any order.
//! [`faults`] makes each request of the device fail in turn. [`fuzz`] damages volumes in every way
//! and lets everything meet them. [`ack`] is for real mounts: a workload whose acknowledgements are
//! checked after the daemon was killed.

pub mod ack;
pub mod begin;
pub mod campaign;
pub mod crash;
pub mod device;
pub mod enumerate;
pub mod faults;
pub mod fuzz;
pub mod history;
pub mod model;
pub mod observe;
pub mod ops;
pub mod overlap;
pub mod plan;
pub mod shrink;
pub mod world;
