//! The device as this crate uses it: errors say which part of the volume they concern, every flush
//! is shared.

use crate::JournalError;
use ferry_device::{AlignedBuf, BlockDevice, FlushCoordinator, FlushTiming, Io, IoDone};
use ferry_env::activity::{Layer, Operation, Waiting};
use parking_lot::Mutex;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The device and its flushes.
pub struct Disk {
    dev: Arc<dyn BlockDevice>,
    flushes: Arc<FlushCoordinator>,
    watch: Option<Watch>,
}

/// Whether reads fail, but for those of a part of the device.
struct Watch {
    but_of: Range<u64>,
    /// The shortest that failed: its bytes, and where it was.
    shortest: Mutex<Option<(usize, u64, Arc<io::Error>)>>,
}

/// An error of the device.
pub fn io_error(what: &'static str) -> impl Fn(io::Error) -> JournalError {
    move |e| JournalError::Io { what, source: Arc::new(e) }
}

impl Disk {
    /// Wraps a device.
    pub fn new(dev: Arc<dyn BlockDevice>) -> Self {
        let flushes = FlushCoordinator::new(dev.clone());
        // What an earlier process wrote and never flushed is in the device's cache still: the first
        // flush is a real one.
        flushes.write_completed();
        Self { dev, flushes, watch: None }
    }

    /// The same, and remembers the shortest read that fails but for those of `but_of`.
    pub fn watched(dev: Arc<dyn BlockDevice>, but_of: Range<u64>) -> Self {
        Self { watch: Some(Watch { but_of, shortest: Mutex::default() }), ..Self::new(dev) }
    }

    /// Where a read failed, and how.
    pub fn unreadable(&self) -> Option<(u64, Arc<io::Error>)> {
        let shortest = self.watch.as_ref()?.shortest.lock();
        shortest.as_ref().map(|(_, offset, error)| (*offset, Arc::clone(error)))
    }

    fn note(&self, (offset, len): (u64, usize), result: &io::Result<()>) {
        let watch = self.watch.as_ref().filter(|watch| !watch.but_of.contains(&offset));
        if let (Some(watch), Err(error)) = (watch, result) {
            let copy = match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::from(error.kind()),
            };
            let mut shortest = watch.shortest.lock();
            if shortest.as_ref().is_none_or(|(other, ..)| len < *other) {
                *shortest = Some((len, offset, Arc::new(copy)));
            }
        }
    }

    /// Reads at `offset`, and waits for it.
    pub fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        let result = self.dev.read(offset, buf);
        self.note((offset, buf.len()), &result);
        result
    }

    /// Whether a write that has ended needs no flush before one that relies on it.
    pub fn is_ordered(&self) -> bool {
        self.dev.is_ordered()
    }

    /// Whether the device reads ahead where it is told to.
    pub fn reads_ahead(&self) -> bool {
        self.dev.read_ahead_bytes() > 0
    }

    /// A range will be read soon.
    pub fn read_ahead(&self, offset: u64, len: u64) {
        self.dev.read_ahead(offset, len);
    }

    /// Reads into each buffer from its offset, in any order; waits. One result for each.
    pub fn read_many(&self, reads: &mut [(u64, AlignedBuf)]) -> Vec<io::Result<()>> {
        let results = self.dev.read_many(reads);
        reads
            .iter()
            .zip(&results)
            .for_each(|((offset, buf), result)| self.note((*offset, buf.len()), result));
        results
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
        let in_flight = Waiting::new(Operation::Device, Layer::DeviceWrite);
        let done = Box::new(move |result: io::Result<()>| {
            drop(in_flight);
            tracing::trace!(offset, ok = result.is_ok(), "{what} write ended");
            if result.is_ok() {
                flushes.write_completed();
            }
            done(result);
        });
        Io::Write { offset, buf, done }
    }

    /// Starts requests, whose completions say how they ended.
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

    /// Whether dead data costs what it takes until its range is discarded.
    pub fn keeps_what_is_dead(&self) -> bool {
        self.dev.keeps_what_is_dead()
    }

    /// Gives back the space of a range of the log.
    pub fn discard_log(&self, offset: u64, len: u64) {
        if let Err(error) = self.dev.discard(offset, len) {
            tracing::warn!(offset, len, %error, "the space of an old part of the log is not given back");
        }
    }

    /// The log is in this range.
    pub fn note_ring(&self, offset: u64, len: u64) {
        self.dev.note_ring(offset..offset + len);
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

/// Says when a flush begins (or one that is under way is joined) and ends, to a caller that wants
/// to see what an fsync costs.
fn traced_flush(done: IoDone) -> IoDone {
    let in_flight = Waiting::new(Operation::Device, Layer::DeviceFlush);
    tracing::trace!("flush begun");
    Box::new(move |result| {
        drop(in_flight);
        tracing::trace!(ok = result.is_ok(), "flush ended");
        done(result);
    })
}
