//! One device of a composite: its bytes behind the head, what it was asked for, and whether a flush
//! would do anything.

use super::gather::{Gather, Outcome, wait_for};
use super::header::HEAD_LEN;
use crate::buffer::AlignedBuf;
use crate::device::{BlockDevice, ComponentState, ComponentStats, Io, IoDone};
use crate::started::{ReadDone, ReadRing};
use crate::timing::FlushTiming;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A device, the bytes behind its head. Offsets are counted from there.
pub(super) struct Component {
    pub name: String,
    dev: Arc<dyn BlockDevice>,
    /// Changes that completed. Begins at 1: what an earlier process wrote may still be in the
    /// device's cache.
    written: AtomicU64,
    /// Of these, those that a flush has made durable.
    flushed: AtomicU64,
    read_errors: AtomicU64,
    write_errors: AtomicU64,
    pub repairs: AtomicU64,
    pub unreadable: AtomicU64,
    /// Writes and flushes that failed and that the mirror's worker has not judged yet. While there
    /// are any, the device may lack what the other sides have: nothing is copied from it. Counted
    /// before the request's caller is told.
    unjudged: AtomicU32,
    /// All of them so far.
    failures: AtomicU64,
}

impl Component {
    pub fn new(name: String, dev: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self {
            name,
            dev,
            written: AtomicU64::new(1),
            flushed: AtomicU64::new(0),
            read_errors: AtomicU64::new(0),
            write_errors: AtomicU64::new(0),
            repairs: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
            unjudged: AtomicU32::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// The whole device, head and all.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.dev
    }

    pub fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        let result = self.dev.read(HEAD_LEN + offset, buf);
        if result.is_err() {
            self.read_errors.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Starts a read, as [`BlockDevice::start_read`] does.
    pub fn start_read(
        self: &Arc<Self>,
        ring: &dyn ReadRing,
        offset: u64,
        buf: Arc<AlignedBuf>,
        done: ReadDone,
    ) {
        let me = Arc::clone(self);
        let done = move |result: io::Result<_>| {
            if result.as_ref().is_err_and(|error| error.raw_os_error() != Some(libc::EOPNOTSUPP)) {
                me.read_errors.fetch_add(1, Ordering::Relaxed);
            }
            done(result);
        };
        self.dev.start_read(ring, HEAD_LEN + offset, buf, Box::new(done));
    }

    /// It can read its own head, so that it is there.
    pub fn answers(&self) -> bool {
        self.dev.read(0, &mut AlignedBuf::zeroed(crate::BLOCK_SIZE)).is_ok()
    }

    pub fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.changed(self.dev.write(HEAD_LEN + offset, buf))
    }

    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.changed(self.dev.discard(HEAD_LEN + offset, len))
    }

    pub fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.changed(self.dev.allocate(HEAD_LEN + offset, len))
    }

    /// The first byte at or behind `offset` that may hold anything but zeros.
    pub fn next_data(&self, offset: u64) -> u64 {
        self.dev.next_data(HEAD_LEN + offset).saturating_sub(HEAD_LEN)
    }

    /// A write behind the head, to be submitted to [`Component::device`]. If it fails, the
    /// component is suspect.
    pub fn write_request(self: &Arc<Self>, offset: u64, buf: Arc<AlignedBuf>, done: IoDone) -> Io {
        let me = Arc::clone(self);
        let done = move |result: io::Result<()>| {
            if result.is_err() {
                me.suspect();
            }
            done(me.changed(result));
        };
        Io::Write { offset: HEAD_LEN + offset, buf, done: Box::new(done) }
    }

    /// A write anywhere on the device.
    pub fn raw_write_request(
        self: &Arc<Self>,
        offset: u64,
        buf: Arc<AlignedBuf>,
        done: IoDone,
    ) -> Io {
        let me = Arc::clone(self);
        Io::Write { offset, buf, done: Box::new(move |result| done(me.changed(result))) }
    }

    /// A change failed: the device may lack what others have, until [`Component::judged`] is called
    /// as often.
    pub fn suspect(&self) {
        self.failures.fetch_add(1, Ordering::SeqCst);
        self.unjudged.fetch_add(1, Ordering::SeqCst);
    }

    /// Of one failure all that follows has been done.
    pub fn judged(&self) {
        let before = self.unjudged.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "each failure is judged once");
    }

    /// How often it became suspect.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    pub fn is_suspect(&self) -> bool {
        self.unjudged.load(Ordering::SeqCst) > 0
    }

    /// What a flush that starts now would make durable; `None`: it is durable already.
    pub fn unflushed(&self) -> Option<u64> {
        let start = self.written.load(Ordering::SeqCst);
        (start > self.flushed.load(Ordering::SeqCst)).then_some(start)
    }

    /// A flush that began when [`Component::unflushed`] said `start`. If it fails, the component is
    /// suspect.
    pub fn flush_request(self: &Arc<Self>, start: u64, done: IoDone) -> Io {
        let me = Arc::clone(self);
        Io::Flush { done: Box::new(move |result| done(me.completed(start, result))) }
    }

    /// The same, on this thread.
    fn flush(&self, start: u64) -> io::Result<()> {
        self.completed(start, self.dev.flush())
    }

    fn completed(&self, start: u64, result: io::Result<()>) -> io::Result<()> {
        match &result {
            Ok(()) => self.flushed.fetch_max(start, Ordering::SeqCst),
            Err(_) => {
                self.suspect();
                self.write_errors.fetch_add(1, Ordering::Relaxed)
            }
        };
        result
    }

    fn changed(&self, result: io::Result<()>) -> io::Result<()> {
        match &result {
            Ok(()) => self.written.fetch_add(1, Ordering::SeqCst),
            Err(_) => self.write_errors.fetch_add(1, Ordering::Relaxed),
        };
        result
    }

    pub fn stats(&self, state: ComponentState) -> ComponentStats {
        ComponentStats {
            name: self.name.clone(),
            state,
            read_errors: self.read_errors.load(Ordering::Relaxed),
            write_errors: self.write_errors.load(Ordering::Relaxed),
            repairs: self.repairs.load(Ordering::Relaxed),
            flush: self.dev.flush_timing(),
            rebuilt: None,
            unreadable: self.unreadable.load(Ordering::Relaxed),
        }
    }
}

/// A component that needs a flush: its number, itself, and what the flush covers.
pub(super) type Unflushed = (usize, Arc<Component>, u64);

/// Those of `components` that were written since their last flush.
pub(super) fn unflushed<'a>(
    components: impl Iterator<Item = (usize, &'a Arc<Component>)>,
) -> Vec<Unflushed> {
    components
        .filter_map(|(i, one)| one.unflushed().map(|start| (i, Arc::clone(one), start)))
        .collect()
}

/// Flushes all of `these` (not none) at the same time.
pub(super) fn flush_each(these: &[Unflushed], gather: &Arc<Gather>) {
    for (i, one, start) in these {
        one.device().submit(vec![one.flush_request(*start, gather.part(*i))]);
    }
}

/// Flushes all of `these` at the same time and waits. One of them is flushed on this thread, the
/// shortest way there is.
pub(super) fn flush_and_wait(these: &[Unflushed]) -> Outcome {
    let Some(((mine, one, start), others)) = these.split_first() else {
        return Outcome { failed: 0, error: None };
    };
    wait_for(these.len(), |gather| {
        flush_each(others, gather);
        gather.arrive(*mine, one.flush(*start));
    })
}

/// The slowest of those that a flush was sent to.
pub(super) fn slowest<'a>(components: impl Iterator<Item = &'a Arc<Component>>) -> FlushTiming {
    components
        .fold(FlushTiming::default(), |slowest, one| slowest.slower(one.device().flush_timing()))
}

/// Bytes that every host could still give. Components may share one, so that a sum would count it
/// twice.
pub(super) fn host_free<'a>(components: impl Iterator<Item = &'a Arc<Component>>) -> Option<u64> {
    components.filter_map(|one| one.device().host_free()).min()
}
