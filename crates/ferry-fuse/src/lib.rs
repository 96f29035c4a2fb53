//! The kernel's FUSE protocol: mounts a [`ferry_fs::Filesystem`] and serves it. No policy lives
//! here.
//!
//! The modules are layers. Each uses only what stands below it, or to its left in its own line:
//!
//! ```text
//! session                                   mounts, starts the threads, ends them
//! transport/   buffer  dev  reads  uring    moves messages between the kernel and `request`
//! notify       mount                        tells the kernel what to forget; mount(2)
//! request/     counters  crowd  idle_poll   one request: decode, call the file system, encode,
//!              parked  realtime  chain      or park it until its answer arrives
//!              direct_write
//!              security_label  dispatch
//! outlet                                    writes notifications
//! decode       encode  device  init         bytes to operations, answers to bytes, INIT
//! abi          sys  error                   the kernel's numbers and structures; system calls
//! ```
//!
//! [`control`] stands beside them: it is the caller's side of FerryFS's own ioctl requests.
//!
//! Where to start reading: `request/dispatch.rs`, then [`Session`].

mod abi;
pub mod control;
mod decode;
mod device;
mod encode;
mod error;
mod init;
mod mount;
mod notify;
mod outlet;
mod request;
mod session;
mod sys;
mod transport;

pub use error::Error;
pub use init::IO_MAX;
pub use mount::{HELPER, MountOptions, Transport, Unmount, abort, connection, unmount};
pub use session::{Connection, Ended, MountHandle, Session};
pub use sys::inherited;
