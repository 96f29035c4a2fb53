//! `mirror`: the same bytes on two or more sides.
//!
//! * M1. A write goes to every side, a read to one. A flush goes to every side that was written since its last.
//! * M2. Before a write is issued, its region is durably marked dirty on every side. After an unclean stop the dirty regions are
//!   made equal before anything else is read.
//! * M3. A write or flush that failed on some sides is not acknowledged before the others say durably, in their headers, that these
//!   sides are out: a higher generation, and the list of who is in. Such a side is stale for ever. If it failed on all
//!   sides, that is the error of the mirror and nobody is put out.
//! * M4. A read that fails is answered by another side, and what failed is written anew from there.
//! * M5. Whoever copies between sides keeps writers out of that region, and waits for those inside.
//!
//! The way of a write takes no lock: one word for each region ([`regions`]), and a mask of sides. What must wait for the device, or
//! happens rarely (marking a region, putting a side out, repair, rebuild), is done by one thread, the worker ([`worker`]).

mod map;
mod rebuild;
mod recover;
mod regions;
mod worker;

pub use recover::Side;
pub(super) use regions::region_len;

use super::component::{
    Component, ComponentState, ComponentStats, flush_and_wait, flush_each, host_free, slowest, unflushed,
};
use super::gather::{Gather, Outcome, wait_for};
use super::{COMPONENTS_MAX, CompositeError, bits};
use crate::{AlignedBuf, BlockDevice, FlushTiming, Io, IoDone, check_range};
use parking_lot::{Condvar, Mutex};
use rebuild::NewSide;
use regions::Regions;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};

/// Reads of neighbouring bytes go to the same side, in pieces of this many bytes, and pieces to each in turn.
const READ_TURN: u64 = 1 << 20;
/// Blocks that could not be read wait for repair, so many at most; more are repaired when they are read again.
const REPAIRS_MAX: usize = 256;

/// Who keeps what must be known of a mirror outside of it, durably, when the call returns. Called by the worker.
pub trait Observer: Send + Sync {
    /// From now on only sides of this generation count.
    fn raised(&self, generation: u64);
    /// `new` has taken its place among the sides, and `old`, if it is still known, has lost its own.
    fn rebuilt(&self, old: &str, new: &str);
}

/// What the worker is asked to do.
enum Job {
    /// A write into regions that it cannot enter by itself.
    Write { offset: u64, buf: Arc<AlignedBuf>, done: IoDone },
    /// The same for a caller that writes by itself: it is told when it is inside.
    Enter { range: Range<usize>, inside: IoDone },
    /// A request that failed on some sides.
    Failed { failed: u64, error: io::Error, done: IoDone },
    /// What a side could not read.
    Repair { side: usize, offset: u64, len: usize },
    /// Build a new side.
    Rebuild { new: NewSide, started: mpsc::SyncSender<io::Result<()>> },
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    repairs: usize,
}

/// What callers, completions and the worker share.
struct Shared {
    capacity: u64,
    read_only: bool,
    regions: Regions,
    /// Sides are added and never taken away; those that are out stay here until the mirror is closed.
    sides: [OnceLock<Arc<Component>>; COMPONENTS_MAX],
    /// Sides that have everything: one bit each.
    live: AtomicU64,
    /// Sides that writes go to: those, and one that is being built.
    written: AtomicU64,
    /// Sides that another one took the place of.
    replaced: AtomicU64,
    /// Writes that ended well on every side that they were sent to.
    writes: AtomicU64,
    /// Of these, so many are durable.
    flushed: AtomicU64,
    flushes_in_flight: AtomicU64,
    rebuilt: AtomicU64,
    /// The mirror's handle was dropped.
    closing: AtomicBool,
    queue: Mutex<Queue>,
    bell: Condvar,
}

/// The same bytes on two or more sides. Dropping it marks everything clean that is.
pub struct MirrorDevice {
    shared: Arc<Shared>,
    /// `None` when opened to read only.
    worker: Option<JoinHandle<()>>,
    /// A rebuild that was asked for has not ended.
    rebuilding: Arc<AtomicBool>,
}

/// A map in which no region is dirty, for a new side of `len` bytes.
pub(super) fn clean_map(set: &[u8; 16], len: u64, region_len: u64) -> AlignedBuf {
    map::encode(set, 1, region_len, &vec![false; len.div_ceil(region_len) as usize])
}

impl Shared {
    fn side(&self, i: usize) -> &Arc<Component> {
        self.sides[i].get().expect("masks name sides that there are")
    }

    fn those(&self, mask: u64) -> impl Iterator<Item = (usize, &Arc<Component>)> {
        bits(mask).map(|i| (i, self.side(i)))
    }

    /// M3: what a request failed on is for the worker to judge.
    fn judge(&self, outcome: Outcome, done: IoDone) {
        match outcome.error {
            None => done(Ok(())),
            Some(error) => self.ask(Job::Failed { failed: outcome.failed, error, done }),
        }
    }

    fn ask(&self, job: Job) {
        let mut queue = self.queue.lock();
        if let Job::Repair { .. } = job {
            if queue.repairs == REPAIRS_MAX {
                return;
            }
            queue.repairs += 1;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.bell.notify_one();
    }

    /// With the lock taken in between, so that a worker that looks and then waits does not miss it.
    fn wake(&self) {
        drop(self.queue.lock());
        self.bell.notify_one();
    }

    fn write(self: &Arc<Self>, offset: u64, buf: Arc<AlignedBuf>, done: IoDone) {
        let range = self.regions.range(offset, buf.len() as u64);
        if let Err(wakes) = self.regions.enter(range.clone()) {
            if wakes {
                self.wake();
            }
            return self.ask(Job::Write { offset, buf, done });
        }
        // After entering: see M5.
        let mask = self.written.load(Ordering::SeqCst);
        let me = Arc::clone(self);
        let ended = move |outcome: Outcome| {
            me.leave(range, outcome.failed == 0);
            me.judge(outcome, done);
        };
        let gather = Gather::new(mask.count_ones() as usize, Box::new(ended));
        let sides: Vec<_> = self.those(mask).collect();
        let last = sides.len() - 1;
        let mut buf = Some(buf);
        for (n, (i, side)) in sides.into_iter().enumerate() {
            // Whoever hears of the end may reuse the buffer, so nothing here keeps a share of it.
            let share = if n == last { buf.take() } else { buf.clone() };
            let share = share.expect("taken by the last side only");
            side.device().submit(vec![side.write_request(offset, share, gather.part(i))]);
        }
    }

    fn leave(&self, range: Range<usize>, well: bool) {
        // After every side has counted it: a flush that covers this number covers the write.
        let count = if well { self.writes.fetch_add(1, Ordering::SeqCst) + 1 } else { u64::MAX };
        if self.regions.leave(range, count) {
            self.wake();
        }
    }

    fn flush(self: &Arc<Self>, done: IoDone) {
        let (start, these) = self.begin_flush();
        if these.is_empty() {
            self.end_flush(start, true);
            return done(Ok(()));
        }
        let me = Arc::clone(self);
        let ended = move |outcome: Outcome| {
            let well = outcome.failed == 0;
            me.judge(outcome, done);
            me.end_flush(start, well);
        };
        let gather = Gather::new(these.len(), Box::new(ended));
        flush_each(&these, &gather);
    }

    /// How many writes a flush that starts now covers, and on which sides.
    fn begin_flush(&self) -> (u64, Vec<super::component::Unflushed>) {
        self.flushes_in_flight.fetch_add(1, Ordering::SeqCst);
        let start = self.writes.load(Ordering::SeqCst);
        (start, unflushed(self.those(self.written.load(Ordering::SeqCst))))
    }

    fn end_flush(&self, start: u64, well: bool) {
        if well {
            self.flushed.fetch_max(start, Ordering::SeqCst);
        }
        if self.flushes_in_flight.fetch_sub(1, Ordering::SeqCst) == 1 && self.closing.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Waits until this thread is inside the regions.
    fn enter(&self, range: Range<usize>) -> io::Result<()> {
        if let Err(wakes) = self.regions.enter(range.clone()) {
            if wakes {
                self.wake();
            }
            return wait_for(1, |gather| self.ask(Job::Enter { range, inside: gather.part(0) })).result();
        }
        Ok(())
    }

    /// Does the same on every side, on this thread. No space is an answer; any other error is a side's own.
    fn on_each(
        self: &Arc<Self>,
        offset: u64,
        len: u64,
        act: impl Fn(&Component) -> io::Result<()>,
    ) -> io::Result<()> {
        check_range(self.capacity, offset, len)?;
        if self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if len == 0 {
            return Ok(());
        }
        let range = self.regions.range(offset, len);
        self.enter(range.clone())?;
        let mut outcome = Outcome { failed: 0, error: None };
        let mut full = None;
        for (i, side) in self.those(self.written.load(Ordering::SeqCst)) {
            match act(side) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => full = Some(error),
                Err(error) => {
                    outcome.failed |= 1 << i;
                    outcome.error.get_or_insert(error);
                }
            }
        }
        self.leave(range, outcome.failed == 0);
        if outcome.failed != 0 {
            wait_for(1, |gather| self.judge(outcome, gather.part(0))).result()?;
        }
        full.map_or(Ok(()), Err)
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        let live = self.live.load(Ordering::SeqCst);
        let sides: Vec<_> = self.those(live).collect();
        // To read only, the sides may differ where they were not made equal: then all is read from one.
        let first = if self.read_only { 0 } else { (offset / READ_TURN) as usize % sides.len() };
        let mut failed = Vec::new();
        let mut last = None;
        for n in 0..sides.len() {
            let (i, side) = sides[(first + n) % sides.len()];
            match side.read(offset, buf) {
                Ok(()) => {
                    if !failed.is_empty() && !self.read_only {
                        let len = buf.len();
                        failed.into_iter().for_each(|side| self.ask(Job::Repair { side, offset, len }));
                    }
                    return Ok(());
                }
                Err(error) => {
                    tracing::warn!(side = side.name, offset, len = buf.len(), %error, "a mirror's side cannot be read");
                    failed.push(i);
                    last = Some(error);
                }
            }
        }
        Err(last.expect("a mirror has a side"))
    }
}

impl MirrorDevice {
    /// Opens a mirror from those of its sides that are there. `generation` is the newest that anybody knows of. Those sides that
    /// have everything are made equal where they may differ; the others are left alone and said so in the log.
    pub fn open(
        sides: Vec<Side>,
        read_only: bool,
        generation: u64,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, CompositeError> {
        let (shared, worker) = recover::open(sides, read_only, generation, observer)?;
        let rebuilding = Arc::default();
        let Some(worker) = worker else { return Ok(Self { shared, worker: None, rebuilding }) };
        let thread = thread::Builder::new().name("ferry-mirror".into()).spawn(move || worker.run());
        let thread = thread.map_err(super::header::io_error("start the thread of", "the mirror"))?;
        Ok(Self { shared, worker: Some(thread), rebuilding })
    }

    /// Number of sides that have everything.
    pub fn live_sides(&self) -> usize {
        self.shared.live.load(Ordering::SeqCst).count_ones() as usize
    }

    /// Starts to build a side on `dev`, which then takes the place of `old` (the name of a side, live or not). It counts when it is
    /// complete; [`Observer::rebuilt`] is told. `id` is random. With `zeroed` the device holds zeros everywhere: what
    /// the other sides never wrote is not written. One at a time: `EBUSY`; a device that is too small: `ENOSPC`.
    pub fn rebuild(
        &self,
        old: &str,
        name: String,
        dev: Arc<dyn BlockDevice>,
        id: u64,
        zeroed: bool,
    ) -> io::Result<()> {
        if self.worker.is_none() {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if self.rebuilding.swap(true, Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let new = NewSide {
            old: old.into(),
            component: Component::new(name, dev),
            id,
            zeroed,
            _busy: rebuild::Busy(Arc::clone(&self.rebuilding)),
        };
        let (started, hears) = mpsc::sync_channel(1);
        self.shared.ask(Job::Rebuild { new, started });
        hears.recv().unwrap_or_else(|_| Err(io::Error::from_raw_os_error(libc::ECANCELED)))
    }

    /// A rebuild is under way.
    pub fn is_rebuilding(&self) -> bool {
        self.rebuilding.load(Ordering::SeqCst)
    }
}

impl BlockDevice for MirrorDevice {
    fn capacity(&self) -> u64 {
        self.shared.capacity
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        check_range(self.shared.capacity, offset, buf.len() as u64)?;
        self.shared.read(offset, buf)
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        check_range(self.shared.capacity, offset, buf.len() as u64)?;
        // A copy costs less than to write to one side after the other.
        let mut copy = AlignedBuf::zeroed(buf.len());
        copy.copy_from_slice(buf);
        wait_for(1, |gather| {
            self.submit(vec![Io::Write { offset, buf: Arc::new(copy), done: gather.part(0) }])
        })
        .result()
    }

    fn flush(&self) -> io::Result<()> {
        if self.shared.read_only {
            return Ok(());
        }
        let (start, these) = self.shared.begin_flush();
        let outcome = flush_and_wait(&these);
        let well = outcome.failed == 0;
        let result = if well {
            Ok(())
        } else {
            wait_for(1, |gather| self.shared.judge(outcome, gather.part(0))).result()
        };
        self.shared.end_flush(start, well);
        result
    }

    fn submit(&self, batch: Vec<Io>) {
        for io in batch {
            match io {
                Io::Write { done, .. } if self.shared.read_only => {
                    done(Err(io::Error::from_raw_os_error(libc::EROFS)))
                }
                Io::Flush { done } if self.shared.read_only => done(Ok(())),
                Io::Flush { done } => self.shared.flush(done),
                Io::Write { offset, buf, done } => {
                    match check_range(self.shared.capacity, offset, buf.len() as u64) {
                        Ok(()) => self.shared.write(offset, buf, done),
                        Err(error) => done(Err(error)),
                    }
                }
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.on_each(offset, len, |side| side.discard(offset, len))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.on_each(offset, len, |side| side.allocate(offset, len))
    }

    fn host_free(&self) -> Option<u64> {
        host_free(self.shared.those(self.shared.written.load(Ordering::SeqCst)).map(|(_, side)| side))
    }

    fn flush_timing(&self) -> FlushTiming {
        slowest(self.shared.those(self.shared.written.load(Ordering::SeqCst)).map(|(_, side)| side))
    }

    fn reset_flush_timing(&self) {
        self.shared.sides.iter().flat_map(OnceLock::get).for_each(|side| side.device().reset_flush_timing());
    }

    fn components(&self) -> Vec<ComponentStats> {
        let (live, written, replaced) = (&self.shared.live, &self.shared.written, &self.shared.replaced);
        let [live, written, replaced] = [live, written, replaced].map(|mask| mask.load(Ordering::SeqCst));
        let sides = self.shared.sides.iter().map_while(OnceLock::get).enumerate();
        let stats = sides.map(|(i, side)| {
            let bit = 1 << i;
            let state = match () {
                () if live & bit != 0 => ComponentState::Active,
                () if written & bit != 0 => ComponentState::Rebuilding,
                () if replaced & bit != 0 => ComponentState::Replaced,
                () => ComponentState::Failed,
            };
            let copied = (self.shared.rebuilt.load(Ordering::Relaxed), self.shared.capacity);
            let rebuilt = (state == ComponentState::Rebuilding).then_some(copied);
            ComponentStats { rebuilt, ..side.stats(state) }
        });
        stats.collect()
    }
}

impl Drop for MirrorDevice {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.wake();
        let Some(worker) = self.worker.take() else { return };
        // A completion may hold the last handle. Neither the worker nor a thread that completes what the worker waits for can wait
        // for it; it ends on its own then.
        if worker.thread().id() != thread::current().id() && !crate::on_io_thread() {
            worker.join().expect("the worker aborts the process rather than panic");
        }
    }
}
