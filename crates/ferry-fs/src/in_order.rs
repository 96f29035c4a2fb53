//! [`LeftInOrder`]: whether a volume is as the process before has closed it.

use crate::volume::VolumeError;
use ferry_journal::Seq;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// What a process has left in order, for [`FsOptions::in_order`](crate::FsOptions::in_order).
#[derive(Debug)]
pub struct LeftInOrder {
    /// The newest context with which it has closed the volume. 0: unknown.
    last: Seq,
    /// Where that is, and at which byte.
    memory: File,
    at: u64,
}

impl LeftInOrder {
    pub(crate) fn new(last: Seq, memory: OwnedFd, at: u64) -> Self {
        Self { last, memory: memory.into(), at }
    }

    /// Goes on only with the volume as the process before has closed it: what the kernel knows may
    /// be wrong if others have changed it. `last`: its newest context now.
    pub(crate) fn must_be_as_it_was(&self, last: Seq) -> Result<(), VolumeError> {
        if ![Seq(0), last].contains(&self.last) {
            return Err(VolumeError::Changed { was: self.last.0, is: last.0 });
        }
        // From now on this process changes it, and a next one must go on if this one fails.
        let unknown = self.memory.write_all_at(&[0; 8], self.at);
        unknown.map_err(|source| VolumeError::Io { what: "note that a mount goes on", source })
    }
}
