//! Test only: the world as it can go wrong. A run is a function of its seed.
//!
//! [`device`] forgets, tears and fails; [`model`] is a file system in a few maps; [`history`] says which states a crash may leave;
//! [`crash`] runs operations ([`ops`]) on a real `LocalFs` over the simulated device ([`world`]) and crashes it everywhere;
//! [`shrink`] makes what fails small; [`campaign`] runs many.
//! [`ack`] is for real mounts: a workload whose acknowledgements are checked after the daemon was killed.

pub mod ack;
pub mod campaign;
pub mod crash;
pub mod device;
pub mod history;
pub mod model;
pub mod ops;
pub mod shrink;
pub mod world;
