//! One device of a composite: its bytes behind the head, what it was asked for, and whether a flush would do anything.

use super::gather::{Gather, Outcome, wait_for};
use super::header::HEAD_LEN;
use crate::{AlignedBuf, BlockDevice, FlushTiming, Io, IoDone};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a component is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComponentState {
    /// In use.
    Active,
    /// A mirror's side that failed and is left alone since.
    Failed,
    /// A mirror's side that gets a copy of the others.
    Rebuilding,
    /// A mirror's side that another one has taken the place of.
    Replaced,
    /// Listed, but not there, stale, or not completely rebuilt when the volume was opened.
    Absent,
}

/// One component, for people.
#[derive(Clone, Debug)]
pub struct ComponentStats {
    /// Its path, or what it was called when the composite was made.
    pub name: String,
    /// What it is good for.
    pub state: ComponentState,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes and flushes that failed.
    pub write_errors: u64,
    /// Reads whose data was written anew from another side.
    pub repairs: u64,
    /// Its own flushes.
    pub flush: FlushTiming,
    /// Bytes that a rebuild has copied, and of how many; only while it is being rebuilt.
    pub rebuilt: Option<(u64, u64)>,
}

impl ComponentStats {
    /// Of a component that could not be opened.
    pub(super) fn absent(name: String) -> Self {
        Self {
            name,
            state: ComponentState::Absent,
            read_errors: 0,
            write_errors: 0,
            repairs: 0,
            flush: FlushTiming::default(),
            rebuilt: None,
        }
    }
}

/// A device, the bytes behind its head. Offsets are counted from there.
pub(super) struct Component {
    pub name: String,
    dev: Arc<dyn BlockDevice>,
    /// Changes that completed. Begins at 1: what an earlier process wrote may still be in the device's cache.
    written: AtomicU64,
    /// Of these, those that a flush has made durable.
    flushed: AtomicU64,
    read_errors: AtomicU64,
    write_errors: AtomicU64,
    pub repairs: AtomicU64,
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

    /// A write behind the head, to be submitted to [`Component::device`].
    pub fn write_request(self: &Arc<Self>, offset: u64, buf: Arc<AlignedBuf>, done: IoDone) -> Io {
        self.raw_write_request(HEAD_LEN + offset, buf, done)
    }

    /// A write anywhere on the device.
    pub fn raw_write_request(self: &Arc<Self>, offset: u64, buf: Arc<AlignedBuf>, done: IoDone) -> Io {
        let me = Arc::clone(self);
        Io::Write { offset, buf, done: Box::new(move |result| done(me.changed(result))) }
    }

    /// What a flush that starts now would make durable; `None`: it is durable already.
    pub fn unflushed(&self) -> Option<u64> {
        let start = self.written.load(Ordering::SeqCst);
        (start > self.flushed.load(Ordering::SeqCst)).then_some(start)
    }

    /// A flush that began when [`Component::unflushed`] said `start`.
    pub fn flush_request(self: &Arc<Self>, start: u64, done: IoDone) -> Io {
        let me = Arc::clone(self);
        Io::Flush { done: Box::new(move |result| done(me.landed(start, result))) }
    }

    /// The same, on this thread.
    fn flush(&self, start: u64) -> io::Result<()> {
        self.landed(start, self.dev.flush())
    }

    fn landed(&self, start: u64, result: io::Result<()>) -> io::Result<()> {
        match &result {
            Ok(()) => self.flushed.fetch_max(start, Ordering::SeqCst),
            Err(_) => self.write_errors.fetch_add(1, Ordering::Relaxed),
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
        }
    }
}

/// A component that needs a flush: its number, itself, and what the flush covers.
pub(super) type Unflushed = (usize, Arc<Component>, u64);

/// Those of `components` that were written since their last flush.
pub(super) fn unflushed<'a>(components: impl Iterator<Item = (usize, &'a Arc<Component>)>) -> Vec<Unflushed> {
    components.filter_map(|(i, one)| one.unflushed().map(|start| (i, Arc::clone(one), start))).collect()
}

/// Flushes all of `these` (not none) at the same time.
pub(super) fn flush_each(these: &[Unflushed], gather: &Arc<Gather>) {
    for (i, one, start) in these {
        one.device().submit(vec![one.flush_request(*start, gather.part(*i))]);
    }
}

/// Flushes all of `these` at the same time and waits. One of them is flushed on this thread, the shortest way there is.
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
    components.fold(FlushTiming::default(), |slowest, one| slowest.slower(one.device().flush_timing()))
}

/// Bytes that every host could still give. Components may share one, so that a sum would count it twice.
pub(super) fn host_free<'a>(components: impl Iterator<Item = &'a Arc<Component>>) -> Option<u64> {
    components.filter_map(|one| one.device().host_free()).min()
}
