//! Time, threads, tasks and locks. Everything in this crate that waits, spawns, locks or hashes
//! with random keys comes through here.
//!
//! In a product these are tokio's, parking_lot's and std's own, and nothing is added. The tests of
//! this crate get types of the same names (`switch`): they do the same, unless the calling thread
//! belongs to a simulation (`sim`). There one thread runs at a time, time is virtual, and a seed
//! decides who is next. So the same seed gives the same run, of the same client and server code.
//!
//! tokio's channels, `Notify`, `Semaphore` and streams in memory need no replacement: they are
//! deterministic where their callers are.

#[cfg(not(test))]
pub(crate) use {
    parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard},
    std::collections,
    tokio::{runtime, select, spawn, task, time},
};

/// An invariant is broken, and the product can go on. A test fails here.
#[cfg(not(test))]
pub(crate) fn broken(what: &str) {
    tracing::error!("{what}: this is a bug of FerryFS");
}

#[cfg(test)]
pub(crate) mod sim;
#[cfg(test)]
mod switch;
#[cfg(test)]
pub(crate) use switch::*;
