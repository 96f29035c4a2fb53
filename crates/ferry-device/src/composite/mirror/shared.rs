//! What the callers of a mirror, the completions of its requests and its worker share: the way of
//! each request.

use super::super::component::{Component, Unflushed, flush_each, unflushed};
use super::super::gather::{Gather, Outcome, wait_for};
use super::super::header::COMPONENTS_MAX;
use super::regions::Regions;
use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use crate::device::{IoDone, check_range};
use crate::started::{ReadDone, ReadRing};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};

/// Reads of neighbouring bytes go to the same side, in ranges of this many bytes, and ranges to
/// each in turn.
const READ_TURN: u64 = 1 << 20;
/// Blocks that could not be read wait for repair, so many at most; more are repaired when they are
/// read again.
const REPAIRS_MAX: usize = 256;

/// Who keeps what must be known of a mirror outside of it, durably, when the call returns. Called
/// by the worker.
pub trait Observer: Send + Sync {
    /// From now on only sides of this generation count. An error: it could not be written down. It
    /// is asked for again until it is.
    fn raised(&self, generation: u64) -> io::Result<()>;
    /// `new` has taken its place among the sides, and `old`, if it is still known, has lost its
    /// own.
    fn rebuilt(&self, old: &str, new: &str);
}

/// The device may be asked for another rebuild when this is dropped.
pub(super) struct Busy(pub Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// A side to be built.
pub(super) struct NewSide {
    /// Name of the side whose place it takes.
    pub old: String,
    pub component: Arc<Component>,
    pub id: u64,
    /// It holds zeros everywhere.
    pub zeroed: bool,
    /// Dropped with it, however it ends.
    pub _busy: Busy,
}

/// What the worker is asked to do.
pub(super) enum Job {
    /// A write into regions that it cannot enter by itself.
    Write { offset: u64, buf: Arc<AlignedBuf>, done: IoDone },
    /// The same for a caller that writes by itself: it is told when it is inside.
    Enter { offset: u64, len: u64, inside: IoDone },
    /// A request that failed on some sides.
    Failed { failed: u64, error: io::Error, done: IoDone },
    /// What a side could not read.
    Repair { side: usize, offset: u64, len: usize },
    /// Build a new side.
    Rebuild { new: NewSide, started: mpsc::SyncSender<io::Result<()>> },
    /// Another length.
    Resize { bytes: u64, resized: mpsc::SyncSender<io::Result<()>> },
}

#[derive(Default)]
pub(super) struct Queue {
    pub jobs: VecDeque<Job>,
    pub repairs: usize,
}

/// What callers, completions and the worker share.
pub(super) struct Shared {
    capacity: AtomicU64,
    pub read_only: bool,
    pub regions: Regions,
    /// Sides are added and never taken away; those that are out stay here until the mirror is
    /// closed.
    pub sides: [OnceLock<Arc<Component>>; COMPONENTS_MAX],
    /// Sides that have everything: one bit each.
    pub live: AtomicU64,
    /// Sides that writes go to: those, and one that is being built.
    pub written: AtomicU64,
    /// Sides that another one took the place of.
    pub replaced: AtomicU64,
    /// Writes that ended well on every side that they were sent to.
    pub writes: AtomicU64,
    /// Of these, so many are durable.
    pub flushed: AtomicU64,
    pub flushes_in_flight: AtomicU64,
    pub rebuilt: AtomicU64,
    /// The mirror's handle was dropped.
    pub closing: AtomicBool,
    pub queue: Mutex<Queue>,
    pub bell: Condvar,
}

/// How a read from several sides went.
pub(super) struct ReadAny {
    /// Sides that something came from.
    pub used: u64,
    /// Blocks that none could read, counted from the first.
    pub unreadable: Vec<usize>,
}

/// How often each side of a flush had failed before it.
pub(super) struct Before(Vec<(usize, Arc<Component>, u64)>);

impl Before {
    pub fn of(these: &[Unflushed]) -> Self {
        Self(these.iter().map(|(i, side, _)| (*i, Arc::clone(side), side.failures())).collect())
    }

    /// Adds the sides on which another request failed during the flush (MIRROR-7).
    pub fn doubt(&self, mut outcome: Outcome) -> Outcome {
        for (i, side, before) in &self.0 {
            if outcome.failed & 1 << i == 0 && side.failures() != *before {
                side.suspect();
                outcome.failed |= 1 << i;
                outcome.error.get_or_insert_with(|| io::Error::from_raw_os_error(libc::EIO));
            }
        }
        outcome
    }
}

impl Shared {
    /// What callers and the worker share of a mirror with these sides, numbered from 0.
    pub fn new(
        sides: Vec<Arc<Component>>,
        capacity: u64,
        region_len: u64,
        read_only: bool,
    ) -> Self {
        let live = (1 << sides.len()) - 1;
        let slots = [const { OnceLock::new() }; COMPONENTS_MAX];
        for (slot, side) in slots.iter().zip(sides) {
            slot.get_or_init(|| side);
        }
        Self {
            capacity: capacity.into(),
            read_only,
            regions: Regions::new(capacity, region_len),
            sides: slots,
            live: live.into(),
            written: live.into(),
            replaced: 0.into(),
            writes: 0.into(),
            flushed: 0.into(),
            flushes_in_flight: 0.into(),
            rebuilt: 0.into(),
            closing: false.into(),
            queue: Mutex::default(),
            bell: Condvar::default(),
        }
    }

    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::SeqCst)
    }

    /// By the worker, when the regions are those of this capacity: who sees it sees them.
    pub fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Ordering::SeqCst);
    }

    pub fn side(&self, i: usize) -> &Arc<Component> {
        self.sides[i].get().expect("masks name sides that there are")
    }

    pub fn those(&self, mask: u64) -> impl Iterator<Item = (usize, &Arc<Component>)> {
        bits(mask).map(|i| (i, self.side(i)))
    }

    /// MIRROR-3: what a request failed on is for the worker to judge.
    pub fn judge(&self, outcome: Outcome, done: IoDone) {
        match outcome.error {
            None => done(Ok(())),
            Some(error) => self.ask(Job::Failed { failed: outcome.failed, error, done }),
        }
    }

    pub fn ask(&self, job: Job) {
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
    pub fn wake(&self) {
        drop(self.queue.lock());
        self.bell.notify_one();
    }

    pub fn write(self: &Arc<Self>, offset: u64, buf: Arc<AlignedBuf>, done: IoDone) {
        let range = match self.regions.enter(offset, buf.len() as u64) {
            Ok(range) => range,
            Err(wakes) => {
                if wakes {
                    self.wake();
                }
                return self.ask(Job::Write { offset, buf, done });
            }
        };
        // After entering: see MIRROR-5.
        let mask = self.written.load(Ordering::SeqCst);
        let me = Arc::clone(self);
        let ended = move |outcome: Outcome| {
            if outcome.failed == 0 {
                me.leave(range, true);
                return done(Ok(()));
            }
            // Asked before it leaves: a worker that closes waits for those inside before it looks
            // for the last time.
            me.judge(outcome, done);
            me.leave(range, false);
        };
        let gather = Gather::new(mask.count_ones() as usize, Box::new(ended));
        let sides: Vec<_> = self.those(mask).collect();
        let last = sides.len() - 1;
        let mut buf = Some(buf);
        for (n, (i, side)) in sides.into_iter().enumerate() {
            // The caller may reuse the buffer once it is told of the end, so nothing here keeps a
            // share of it.
            let share = if n == last { buf.take() } else { buf.clone() };
            let share = share.expect("taken by the last side only");
            side.device().submit(vec![side.write_request(offset, share, gather.part(i))]);
        }
    }

    /// Of `mask` those that lack nothing, as far as anybody knows (MIRROR-6).
    pub fn trusted(&self, mask: u64) -> u64 {
        self.those(mask)
            .filter(|(_, side)| !side.is_suspect())
            .fold(0, |mask, (i, _)| mask | 1 << i)
    }

    pub fn leave(&self, range: Range<usize>, well: bool) {
        // After every side has counted it: a flush that covers this number covers the write.
        let count = if well { self.writes.fetch_add(1, Ordering::SeqCst) + 1 } else { u64::MAX };
        if self.regions.leave(range, count) {
            self.wake();
        }
    }

    pub fn flush(self: &Arc<Self>, done: IoDone) {
        let (start, these) = self.begin_flush();
        if these.is_empty() {
            self.end_flush(start, true);
            return done(Ok(()));
        }
        let (me, before) = (Arc::clone(self), Before::of(&these));
        let ended = move |outcome: Outcome| {
            let outcome = before.doubt(outcome);
            let well = outcome.failed == 0;
            me.judge(outcome, done);
            me.end_flush(start, well);
        };
        let gather = Gather::new(these.len(), Box::new(ended));
        flush_each(&these, &gather);
    }

    /// How many writes a flush that starts now covers, and on which sides.
    pub fn begin_flush(&self) -> (u64, Vec<Unflushed>) {
        self.flushes_in_flight.fetch_add(1, Ordering::SeqCst);
        let start = self.writes.load(Ordering::SeqCst);
        (start, unflushed(self.those(self.written.load(Ordering::SeqCst))))
    }

    pub fn end_flush(&self, start: u64, well: bool) {
        if well {
            self.flushed.fetch_max(start, Ordering::SeqCst);
        }
        if self.flushes_in_flight.fetch_sub(1, Ordering::SeqCst) == 1
            && self.closing.load(Ordering::SeqCst)
        {
            self.wake();
        }
    }

    /// Waits until this thread is inside the regions.
    pub fn enter(&self, offset: u64, len: u64) -> io::Result<Range<usize>> {
        match self.regions.enter(offset, len) {
            Ok(range) => Ok(range),
            Err(wakes) => {
                if wakes {
                    self.wake();
                }
                wait_for(1, |gather| self.ask(Job::Enter { offset, len, inside: gather.part(0) }))
                    .result()?;
                // They stay as they are while it is inside.
                Ok(self.regions.range(offset, len))
            }
        }
    }

    /// Does the same on every side, on this thread. No space is an answer; any other error is a
    /// side's own.
    pub fn on_each(
        self: &Arc<Self>,
        offset: u64,
        len: u64,
        act: impl Fn(&Component) -> io::Result<()>,
    ) -> io::Result<()> {
        check_range(self.capacity(), offset, len)?;
        if self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if len == 0 {
            return Ok(());
        }
        let range = self.enter(offset, len)?;
        let mut outcome = Outcome { failed: 0, error: None };
        let mut full = None;
        for (i, side) in self.those(self.written.load(Ordering::SeqCst)) {
            match act(side) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => full = Some(error),
                Err(error) => {
                    side.suspect();
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

    /// The sides to read from, and which of them to ask first.
    fn readable(&self, offset: u64) -> (Vec<(usize, &Arc<Component>)>, usize) {
        let live = self.live.load(Ordering::SeqCst);
        let trusted = self.trusted(live);
        let sides: Vec<_> = self.those(if trusted == 0 { live } else { trusted }).collect();
        // To read only, the sides may differ where they were not made equal: then all is read from
        // one.
        let first = if self.read_only { 0 } else { (offset / READ_TURN) as usize % sides.len() };
        (sides, first)
    }

    /// Asks one side. If it fails, [`Shared::read`] asks the others, and repairs this one.
    pub fn start_read(
        &self,
        ring: &dyn ReadRing,
        offset: u64,
        buf: Arc<AlignedBuf>,
        done: ReadDone,
    ) {
        let (sides, first) = self.readable(offset);
        sides[first].1.start_read(ring, offset, buf, done);
    }

    pub fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        let (sides, first) = self.readable(offset);
        let mut failed = Vec::new();
        let mut last = None;
        for n in 0..sides.len() {
            let (i, side) = sides[(first + n) % sides.len()];
            match side.read(offset, buf) {
                Ok(()) => {
                    last = None;
                    break;
                }
                Err(error) => {
                    tracing::warn!(side = side.name, offset, len = buf.len(), %error, "a mirror's side cannot be read");
                    failed.push(i);
                    last = Some(error);
                }
            }
        }
        if let Some(error) = last {
            // Each may lack another block.
            if failed.len() < 2 || !self.read_blocks(&failed, offset, buf).unreadable.is_empty() {
                return Err(error);
            }
        }
        if !self.read_only {
            let len = buf.len();
            failed.into_iter().for_each(|side| self.ask(Job::Repair { side, offset, len }));
        }
        Ok(())
    }

    /// MIRROR-4, for a reader that knows the contents. Returns whether a side has them.
    pub fn read_matching(
        &self,
        offset: u64,
        buf: &mut AlignedBuf,
        wanted: &dyn Fn(&[u8]) -> bool,
    ) -> bool {
        let live = self.live.load(Ordering::SeqCst);
        let mut other = AlignedBuf::zeroed(buf.len());
        let (mut found, mut wrong) = (false, Vec::new());
        for (i, side) in self.those(live) {
            if side.read(offset, &mut other).is_err() || !wanted(&other) {
                wrong.push((i, side));
            } else if !found {
                buf.copy_from_slice(&other);
                found = true;
            }
        }
        for (i, side) in wrong.into_iter().filter(|_| found) {
            let len = buf.len();
            tracing::warn!(
                side = side.name,
                offset,
                len,
                "a mirror's side does not have what was written; another side has it"
            );
            if !self.read_only {
                self.ask(Job::Repair { side: i, offset, len });
            }
        }
        found
    }

    /// Reads from the first of `sides` that can; where none can read all, block by block. The
    /// blocks that none can read are zeros in `buf`.
    pub fn read_any(&self, sides: &[usize], offset: u64, buf: &mut AlignedBuf) -> ReadAny {
        match sides.iter().find(|i| self.side(**i).read(offset, buf).is_ok()) {
            Some(i) => ReadAny { used: 1 << i, unreadable: Vec::new() },
            None => self.read_blocks(sides, offset, buf),
        }
    }

    pub fn read_blocks(&self, sides: &[usize], offset: u64, buf: &mut AlignedBuf) -> ReadAny {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        let mut read = ReadAny { used: 0, unreadable: Vec::new() };
        for (n, to) in buf.chunks_exact_mut(BLOCK_SIZE).enumerate() {
            let at = offset + (n * BLOCK_SIZE) as u64;
            match sides.iter().find(|i| self.side(**i).read(at, &mut block).is_ok()) {
                Some(i) => {
                    to.copy_from_slice(&block);
                    read.used |= 1 << i;
                }
                None => {
                    to.fill(0);
                    read.unreadable.push(n);
                }
            }
        }
        read
    }
}

/// The numbers of the bits that are set.
pub(super) fn bits(mask: u64) -> impl Iterator<Item = usize> {
    (0..u64::BITS as usize).filter(move |i| mask & (1 << i) != 0)
}
