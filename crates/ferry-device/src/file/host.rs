//! The file or block device below a [`super::FileDevice`], owned, and the flushes of it.

use super::cached::CachedFlushes;
use super::lock;
use crate::timing::FlushTimer;
use ferry_env::Env;
use ferry_env::activity::{self, Layer};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The open file and what every flush of it needs.
pub(super) struct HostFile {
    pub file: File,
    /// The same, for reads on rings of others, in a description of its own: a read that the kernel
    /// has yet when the process is killed does not hold the volume's lock.
    pub for_rings: Arc<File>,
    /// For a block device: the handle whose `O_EXCL` keeps the kernel from mounting it.
    pub _claim: Option<File>,
    pub block_device: bool,
    pub timer: FlushTimer,
    /// Where transfers go through the host's page cache.
    pub cached: Option<CachedFlushes>,
    pub env: Env,
}

impl HostFile {
    /// Flushes and takes the time of it.
    pub fn flush(&self) -> io::Result<()> {
        let _inside = activity::enter(Layer::DeviceFlush);
        let begun = self.env.clock.monotonic();
        match &self.cached {
            None => self.file.sync_data(),
            Some(cached) => cached.flush(|| self.file.sync_data()),
        }?;
        self.timer.record(self.env.clock.monotonic().saturating_sub(begun));
        Ok(())
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        // A process forked from this one may still have the file open, but nobody uses the volume
        // any more.
        if let Err(error) = lock::release(&self.file) {
            tracing::warn!(%error, "cannot give up the ownership of a volume");
        }
    }
}

/// Writes all of `buf`, however many calls it takes.
pub(super) fn write_all(file: &File, offset: u64, buf: &[u8]) -> io::Result<()> {
    // std goes on after short writes and signals, and keeps the errno of the write that failed.
    file.write_all_at(buf, offset)
}
