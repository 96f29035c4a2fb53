//! The kernel's FUSE protocol: mounts a [`ferry_fs::Filesystem`] and serves it. No policy lives here.
//!
//! Where to start reading: [`Session`] mounts and starts the threads; `transport` moves messages; `core` decodes one,
//! calls the file system and encodes its answer; `park` keeps requests that wait.

mod abi;
pub mod control;
mod core;
mod counters;
mod decode;
mod encode;
mod error;
mod idle;
mod init;
mod mount;
mod notify;
mod park;
mod session;
mod synced;
mod sys;
mod transport;

pub use error::Error;
pub use init::IO_MAX;
pub use mount::{MountOptions, Transport, Unmount, unmount};
pub use session::{Handle, Session};
