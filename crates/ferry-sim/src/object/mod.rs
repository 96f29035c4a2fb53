//! Owners of a volume in an object store, and a store that answers late, twice or never.
//!
//! Each owner is a thread, and one of them runs at a time: it hands the turn on at each request to
//! the store. Time is virtual. So a run is a function of its seed ([`run`]).
//!
//! Each module uses those below it:
//!
//! ```text
//! volume    a whole file system whose machine crashes at every request
//! noted     a store that can be had as it was after each request
//! cloning   owners that make and read clones
//! run       owners that write, flush, read, sleep, crash and take over
//! clones    what each clone must hold
//! snapshots what each snapshot must hold
//! history   what each owner wrote and was told, and what the next one may find
//! disk      the disk of a machine, for its local log
//! executor  one owner's requests, in any order
//! store     the objects, and what can go wrong with a request
//! objects   what the store holds
//! stored    how a volume stores its objects
//! turns     whose turn it is; virtual time; what happens late
//! ```

mod clones;
mod cloning;
mod disk;
mod executor;
mod history;
mod noted;
mod objects;
mod run;
mod snapshots;
mod store;
mod stored;
#[cfg(test)]
mod tests;
mod turns;
mod volume;

pub use noted::{NotedStore, Owner};
pub use run::{Outcome, Plan};
pub use volume::{VolumePlan, VolumeTally};
