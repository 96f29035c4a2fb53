//! What a file system offers to whatever carries requests to it.
//!
//! An operation runs to completion on the thread that brought it and returns its answer, or it
//! *parks*: it takes the request's [`Parked`] handle with [`Cx::park`], returns [`Stop::Parked`],
//! and completes the handle later from any thread. So no thread waits for durability, a lease or a
//! lock.

pub(crate) mod answer;
pub(crate) mod filesystem;
pub mod ioctl;
pub(crate) mod types;

pub use answer::*;
pub use filesystem::*;
pub use types::*;
