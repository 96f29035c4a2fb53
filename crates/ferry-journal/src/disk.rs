//! The device as this crate uses it: errors say which part of the volume they concern, every flush is shared.

use crate::JournalError;
use ferry_device::{AlignedBuf, BlockDevice, FlushCoordinator, FlushTiming, Io, IoDone};
use std::io;
use std::sync::Arc;

/// The device and its flushes.
pub struct Disk {
    dev: Arc<dyn BlockDevice>,
    flushes: Arc<FlushCoordinator>,
}

/// An error of the device.
pub fn io_error(what: &'static str) -> impl Fn(io::Error) -> JournalError {
    move |e| JournalError::Io { what, source: Arc::new(e) }
}

impl Disk {
    /// Wraps a device.
    pub fn new(dev: Arc<dyn BlockDevice>) -> Self {
        let flushes = FlushCoordinator::new(dev.clone());
        // What an earlier process wrote and never flushed is in the device's cache still: the first flush is a real one.
        flushes.write_completed();
        Self { dev, flushes }
    }

    /// Reads; waits.
    pub fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.dev.read(offset, buf)
    }

    /// Reads into each buffer from its place, in any order; waits. One result for each.
    pub fn read_many(&self, reads: &mut [(u64, AlignedBuf)]) -> Vec<io::Result<()>> {
        self.dev.read_many(reads)
    }

    /// Writes; waits until the write completed.
    pub fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.dev.write(offset, buf)?;
        self.flushes.write_completed();
        Ok(())
    }

    /// A write of `what` to be submitted; a flush asked for in or after `done` covers it.
    pub fn write_request(
        &self,
        what: &'static str,
        offset: u64,
        buf: Arc<AlignedBuf>,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> Io {
        let flushes = self.flushes.clone();
        tracing::trace!(offset, bytes = buf.len(), "{what} write begun");
        let done = Box::new(move |result: io::Result<()>| {
            tracing::trace!(offset, ok = result.is_ok(), "{what} write ended");
            if result.is_ok() {
                flushes.write_completed();
            }
            done(result);
        });
        Io::Write { offset, buf, done }
    }

    /// Starts requests.
    pub fn submit(&self, batch: Vec<Io>) {
        self.dev.submit(batch);
    }

    /// Makes all that completed before durable, without waiting.
    pub fn flush(&self, done: IoDone) {
        self.flushes.flush(self.flushes.target(), traced_flush(done));
    }

    /// As [`Disk::flush`], and shares the flush with nobody.
    pub fn flush_alone(&self, done: IoDone) {
        self.flushes.flush_alone(traced_flush(done));
    }

    /// How long flushes take.
    pub fn flush_timing(&self) -> FlushTiming {
        self.dev.flush_timing()
    }

    /// Forgets how long flushes took.
    pub fn reset_flush_timing(&self) {
        self.dev.reset_flush_timing();
    }

    /// Makes all that completed before durable.
    pub fn flush_wait(&self) -> io::Result<()> {
        self.flushes.flush_wait(self.flushes.target())
    }

    /// Flushes sent to the device.
    pub fn flushes(&self) -> u64 {
        self.flushes.stats().flushes
    }
}

/// Says when a flush begins (or one that is under way is joined) and ends, to who wants to see what an fsync costs.
fn traced_flush(done: IoDone) -> IoDone {
    if !tracing::enabled!(tracing::Level::TRACE) {
        return done;
    }
    tracing::trace!("flush begun");
    Box::new(move |result| {
        tracing::trace!(ok = result.is_ok(), "flush ended");
        done(result);
    })
}
