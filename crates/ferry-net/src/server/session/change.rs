//! What goes through a session: changes, their answers, and the room that they take in the window.

use std::sync::Arc;
use std::time::Duration;

use ferry_fs::{Attr, Errno, Ino};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::message::{Acknowledged, Caller, Made, Op, Outcome};

/// Room in the window. An operation has it from the arrival of its message until its answer is
/// sent.
pub(in crate::server) type Room = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// Room for one more, if there is any.
pub(in crate::server) fn one_of(semaphore: &Arc<Semaphore>) -> Option<Room> {
    let one = Arc::clone(semaphore).try_acquire_owned().ok()?;
    let nothing = Arc::clone(semaphore).try_acquire_many_owned(0).ok()?;
    Some((one, nothing))
}

/// The queue of frames to send on one connection.
pub(in crate::server) type Line = crate::lanes::Line<Vec<Room>>;

/// The client has broken this rule of the protocol.
#[derive(Debug)]
pub(in crate::server) struct Violation(pub(in crate::server) &'static str);

/// A file that the client has open.
#[derive(Clone, Copy, Debug)]
pub(in crate::server) struct Open {
    pub(in crate::server) ino: Ino,
    /// The file system's number for it.
    pub(in crate::server) fh: u64,
    pub(in crate::server) writes: bool,
    pub(in crate::server) reads: bool,
    /// A lock on the file was lost: everything but closing fails.
    pub(in crate::server) lost: bool,
}

/// How a change ended, and what the client may cache of it.
pub(in crate::server) struct Applied {
    pub(in crate::server) outcome: Outcome,
    /// Attributes under leases of the client.
    pub(in crate::server) after: Vec<Attr>,
    pub(in crate::server) empty: bool,
    pub(in crate::server) made: Option<Made>,
}

impl Applied {
    /// An outcome of which nothing may be cached.
    pub(in crate::server) fn alone(outcome: Outcome) -> Self {
        Self { outcome, after: Vec::new(), empty: false, made: None }
    }

    pub(in crate::server) fn failed(Errno(errno): Errno) -> Self {
        Self::alone(Outcome::Failed { errno })
    }
}

/// A change that the server has received and not applied.
pub(in crate::server) struct Change {
    pub(in crate::server) seq: u64,
    /// The client had the answers up to this one when it sent the change.
    pub(in crate::server) answered: u64,
    pub(in crate::server) epoch: u32,
    pub(in crate::server) early: Option<Acknowledged>,
    /// When its message arrived, and the bytes of that.
    pub(in crate::server) arrived: Duration,
    pub(in crate::server) bytes: usize,
    pub(in crate::server) caller: Caller,
    pub(in crate::server) op: Op,
    pub(in crate::server) room: Room,
}
