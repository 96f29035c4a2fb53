//! Test only: the world as it can go wrong. A run is a function of its seed.
//!
//! Each layer uses only layers below it:
//!
//! ```text
//! ack  campaign  fuzz/   real mounts whose daemon is killed; many runs; volumes with every damage
//! shrink  enumerate      makes what fails small; numbers all short runs
//! run  faults            runs a plan; makes each request of the device fail in turn
//! crash/                 one life of a volume, crashed everywhere, and what is looked at then
//! overlap                fsyncs answered later than asked, by a device that completes in any order
//! plan  begin            a run, drawn from a seed; what it begins on
//! world  observe         operations on a real `LocalFs` over the simulated device; what it shows
//! history                which states a crash may leave
//! generator  model  ops  draws operations; a file system in a few maps; the operations
//! object/                owners of a volume in an object store that fails
//! device/                a device that forgets, tears and fails
//! words                  memory that outlives a process, which is killed between any two stores
//! ```

pub mod ack;
pub mod begin;
pub mod campaign;
pub mod crash;
pub mod device;
pub mod enumerate;
pub mod faults;
pub mod fuzz;
pub mod generator;
pub mod history;
pub mod model;
pub mod object;
pub mod observe;
pub mod ops;
pub mod overlap;
pub mod plan;
mod run;
pub mod shrink;
pub mod words;
pub mod world;
