//! The device that tests put around another one: it counts requests, calls a hook around each,
//! holds some back, and fails others.
//!
//! A request takes these steps: a rule may hold it; it is counted; the hook runs; a fault or an
//! unreadable block makes it fail; the wrapped device serves it. The requests of a batch take these
//! steps one after the other.

use crate::buffer::AlignedBuf;
use crate::device::{
    BlockDevice, ComponentStats, Io, IoDone, Longest, Snapshot, WarmDone, check_range, read_at_once,
};
use crate::started::{ReadDone, ReadRing};
use crate::timing::{FlushTimer, FlushTiming};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// What a request asks a device for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// [`BlockDevice::read`], also as a part of [`BlockDevice::read_many`].
    Read,
    /// [`BlockDevice::write`] or [`Io::Write`].
    Write,
    /// [`BlockDevice::flush`] or [`Io::Flush`].
    Flush,
    /// A call of [`BlockDevice::discard`].
    Discard,
    /// A call of [`BlockDevice::allocate`].
    Allocate,
    /// A call of [`BlockDevice::resize`].
    Resize,
    /// [`BlockDevice::next_data`]. It cannot fail.
    NextData,
}

/// Number of kinds of requests.
const OPS: usize = Op::NextData as usize + 1;

/// A request, as hooks and rules see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What the request asks for.
    pub op: Op,
    /// First byte on the device; 0 for a flush and for [`Op::Resize`].
    pub offset: u64,
    /// Bytes; 0 for a flush, for [`Op::Resize`] and for [`Op::NextData`].
    pub len: u64,
    /// It came through [`BlockDevice::submit`].
    pub submitted: bool,
}

impl Request {
    fn new(op: Op, offset: u64, len: u64) -> Self {
        Self { op, offset, len, submitted: false }
    }

    fn of(io: &Io) -> Self {
        let request = match io {
            Io::Write { offset, buf, .. } => Self::new(Op::Write, *offset, buf.len() as u64),
            Io::Flush { .. } => Self::new(Op::Flush, 0, 0),
        };
        Self { submitted: true, ..request }
    }

    /// The bytes of the device that it concerns.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.len)
    }
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Requests; a call of [`BlockDevice::read_many`] is one.
    pub requests: u64,
    /// Bytes of these requests together.
    pub bytes: u64,
}

/// Serves the request. A hook may call it once, or not at all and so answer in the device's place.
///
/// A submitted request may still be under way when this returns `Ok`. Its result then goes to its
/// `done`, and not to the hook.
pub type Serve<'a> = &'a mut dyn FnMut() -> io::Result<()>;

type Hook = Arc<dyn Fn(&Request, Serve<'_>) -> io::Result<()> + Send + Sync>;
type AfterSubmit = Arc<dyn Fn() + Send + Sync>;
type Rule = Box<dyn Fn(&Request) -> bool + Send>;

/// Requests of these kinds fail, all of them after so many more.
struct Fault {
    ops: Vec<Op>,
    left: u64,
}

#[derive(Default)]
struct Holding {
    rule: Option<Rule>,
    /// The requests that are held, the oldest first.
    held: VecDeque<Io>,
}

/// A device around another one. Without a hook, faults and rules it does what that one does.
pub struct HookedDevice {
    inner: Arc<dyn BlockDevice>,
    /// Where it ends, if the rest was cut off.
    cut: Option<u64>,
    host_free: Option<u64>,
    keeps_what_is_dead: bool,
    read_ahead_bytes: u64,
    /// How long it says that a flush takes, and what it said so far.
    flush_time: Option<(Duration, Arc<FlushTimer>)>,
    asked: Mutex<[Asked; OPS]>,
    hook: Mutex<Option<Hook>>,
    after_submit: Mutex<Option<AfterSubmit>>,
    faults: Mutex<Vec<Fault>>,
    unreadable: Mutex<BTreeSet<u64>>,
    writes_heal: AtomicBool,
    refuses_starts: AtomicBool,
    holding: Mutex<Holding>,
    held: Condvar,
}

impl HookedDevice {
    /// A device around `inner`.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Self {
        Self {
            inner,
            cut: None,
            host_free: None,
            keeps_what_is_dead: false,
            read_ahead_bytes: 0,
            flush_time: None,
            asked: Mutex::default(),
            hook: Mutex::default(),
            after_submit: Mutex::default(),
            faults: Mutex::default(),
            unreadable: Mutex::default(),
            writes_heal: AtomicBool::new(false),
            refuses_starts: AtomicBool::new(false),
            holding: Mutex::default(),
            held: Condvar::new(),
        }
    }

    /// It ends after `capacity` bytes, as if the rest had been cut off.
    #[must_use]
    pub fn with_capacity(self, capacity: u64) -> Self {
        assert!(capacity <= self.inner.capacity(), "a device can be cut, not made longer");
        Self { cut: Some(capacity), ..self }
    }

    /// The host says that it has so many bytes free.
    #[must_use]
    pub fn with_host_free(self, bytes: u64) -> Self {
        Self { host_free: Some(bytes), ..self }
    }

    /// It says that it keeps what is dead until that is discarded.
    #[must_use]
    pub fn keeping_what_is_dead(self) -> Self {
        Self { keeps_what_is_dead: true, ..self }
    }

    /// It says that it is far away, and wants to know of so many bytes ahead of a reader.
    #[must_use]
    pub fn far_away(self, read_ahead_bytes: u64) -> Self {
        Self { read_ahead_bytes, ..self }
    }

    /// It says that each flush takes this long.
    #[must_use]
    pub fn with_flush_time(self, time: Duration) -> Self {
        Self { flush_time: Some((time, Arc::default())), ..self }
    }

    /// The device that it wraps: requests to that one are neither counted nor held, and do not
    /// fail.
    pub fn inner(&self) -> &Arc<dyn BlockDevice> {
        &self.inner
    }

    /// Requests of this kind that were not held, or are held no longer, whatever became of them.
    pub fn asked(&self, op: Op) -> Asked {
        self.asked.lock()[op as usize]
    }

    /// From now on `hook` runs around each request, on its thread, in place of any hook before.
    pub fn set_hook(
        &self,
        hook: impl Fn(&Request, Serve<'_>) -> io::Result<()> + Send + Sync + 'static,
    ) {
        *self.hook.lock() = Some(Arc::new(hook));
    }

    /// From now on `hook` runs after each batch that was submitted, before [`BlockDevice::submit`]
    /// returns.
    pub fn set_after_submit(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.after_submit.lock() = Some(Arc::new(hook));
    }

    /// From now on all requests of these kinds fail with `EIO`, after so many more that succeed.
    pub fn fail_after(&self, ops: &[Op], successes: u64) {
        let mut faults = self.faults.lock();
        faults.retain(|fault| fault.ops != ops);
        faults.push(Fault { ops: ops.to_vec(), left: successes });
    }

    /// Ends all faults of [`HookedDevice::fail_after`].
    pub fn heal(&self) {
        self.faults.lock().clear();
    }

    /// From now on the blocks at these offsets cannot be read, and all others can.
    pub fn set_unreadable(&self, offsets: impl IntoIterator<Item = u64>) {
        *self.unreadable.lock() = offsets.into_iter().collect();
    }

    /// From now on the block at this offset cannot be read either.
    pub fn add_unreadable(&self, offset: u64) {
        self.unreadable.lock().insert(offset);
    }

    /// Offsets of the blocks that cannot be read, ascending.
    pub fn unreadable(&self) -> Vec<u64> {
        self.unreadable.lock().iter().copied().collect()
    }

    /// From now on a block that is written can be read again, as on a disk that remaps a bad
    /// sector.
    pub fn heal_by_writing(&self) {
        self.writes_heal.store(true, Ordering::SeqCst);
    }

    /// From now on it refuses to start reads, as a device does that can only wait.
    pub fn refuse_started_reads(&self) {
        self.refuses_starts.store(true, Ordering::SeqCst);
    }

    /// From now on it keeps back each submitted write and each flush that `rule` names.
    pub fn hold(&self, rule: impl Fn(&Request) -> bool + Send + 'static) {
        self.holding.lock().rule = Some(Box::new(rule));
    }

    /// Holds no more requests. Those that are held stay held.
    pub fn stop_holding(&self) {
        self.holding.lock().rule = None;
    }

    /// Requests that are held.
    pub fn held(&self) -> usize {
        self.holding.lock().held.len()
    }

    /// Returns when a request is held.
    pub fn wait_for_held(&self) {
        let mut holding = self.holding.lock();
        while holding.held.is_empty() {
            self.held.wait(&mut holding);
        }
    }

    /// Ends the oldest held request: it goes on, or fails with this error.
    ///
    /// # Panics
    /// When none is held.
    pub fn release(&self, result: io::Result<()>) {
        let io = self.holding.lock().held.pop_front().expect("a request is held");
        match result {
            Ok(()) => self.go_on(io),
            Err(error) => io.into_done()(Err(error)),
        }
    }

    /// Holds no more requests, and lets go on those that it holds.
    pub fn release_all(&self) {
        let holding = std::mem::take(&mut *self.holding.lock());
        holding.held.into_iter().for_each(|io| self.go_on(io));
    }

    /// Holds the request that `make` makes if a rule says so; otherwise `make` is returned.
    fn held_or<M: FnOnce() -> Io>(&self, request: &Request, make: M) -> Option<M> {
        let mut holding = self.holding.lock();
        if !holding.rule.as_ref().is_some_and(|rule| rule(request)) {
            return Some(make);
        }
        holding.held.push_back(make());
        self.held.notify_all();
        None
    }

    /// What a submitted request does once it is not, or no longer, held. It is answered when the
    /// hook has returned.
    fn go_on(&self, io: Io) {
        let request = Request::of(&io);
        let (mut write, done) = match io {
            Io::Write { offset, buf, done } => (Some((offset, buf)), done),
            Io::Flush { done } => (None, done),
        };
        let answer = Arc::new(Mutex::new(Answer::default()));
        let mut under_way = false;
        let result = self.serve(&request, &mut || {
            let done = Answer::done(Arc::clone(&answer));
            let io = match write.take() {
                Some((offset, buf)) => Io::Write { offset, buf, done },
                None => self.timed_flush(done),
            };
            self.inner.submit(vec![io]);
            answer.lock().result.take().unwrap_or_else(|| {
                under_way = true;
                Ok(())
            })
        });
        if !under_way {
            return done(result);
        }
        let mut answer = answer.lock();
        match answer.result.take() {
            Some(result) => {
                drop(answer);
                done(result);
            }
            None => answer.owed = Some(done),
        }
    }

    fn serve(&self, request: &Request, act: Serve<'_>) -> io::Result<()> {
        self.count(request.op, request.len);
        self.serve_counted(request, act)
    }

    fn serve_counted(&self, request: &Request, act: Serve<'_>) -> io::Result<()> {
        let mut serve = || {
            self.fail(request)?;
            act()
        };
        let hook = self.hook.lock().clone();
        match hook {
            Some(hook) => hook(request, &mut serve),
            None => serve(),
        }
    }

    fn count(&self, op: Op, bytes: u64) {
        let mut asked = self.asked.lock();
        asked[op as usize].requests += 1;
        asked[op as usize].bytes += bytes;
    }

    fn read_counted(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        let request = Request::new(Op::Read, offset, buf.len() as u64);
        self.serve_counted(&request, &mut || self.inner.read(offset, buf))
    }

    /// The error of a request that must fail.
    fn fail(&self, request: &Request) -> io::Result<()> {
        let eio = || io::Error::from_raw_os_error(libc::EIO);
        check_range(self.capacity(), request.offset, request.len)?;
        let mut fails = false;
        for fault in self.faults.lock().iter_mut().filter(|fault| fault.ops.contains(&request.op)) {
            fails |= fault.left == 0;
            fault.left = fault.left.saturating_sub(1);
        }
        if fails {
            return Err(eio());
        }
        let mut unreadable = self.unreadable.lock();
        match request.op {
            Op::Read if unreadable.range(request.range()).next().is_some() => return Err(eio()),
            Op::Write if self.writes_heal.load(Ordering::SeqCst) => {
                unreadable.retain(|offset| !request.range().contains(offset));
            }
            _ => {}
        }
        Ok(())
    }

    /// A flush that is recorded, if it succeeds, as one of [`HookedDevice::with_flush_time`].
    fn timed_flush(&self, done: IoDone) -> Io {
        let Some((time, timer)) = self.flush_time.clone() else { return Io::Flush { done } };
        let timed = move |result: io::Result<()>| {
            if result.is_ok() {
                timer.record(time);
            }
            done(result);
        };
        Io::Flush { done: Box::new(timed) }
    }
}

/// How a submitted request ends: the wrapped device says so while the hook runs, or later on
/// another thread.
#[derive(Default)]
struct Answer {
    /// It ended with this, and nobody was told yet.
    result: Option<io::Result<()>>,
    /// The hook has returned, and the end is still to come.
    owed: Option<IoDone>,
}

impl Answer {
    /// What the wrapped device calls at the end.
    fn done(answer: Arc<Mutex<Self>>) -> IoDone {
        Box::new(move |result| {
            let mut answer = answer.lock();
            match answer.owed.take() {
                Some(done) => {
                    drop(answer);
                    done(result);
                }
                None => answer.result = Some(result),
            }
        })
    }
}

impl BlockDevice for HookedDevice {
    fn capacity(&self) -> u64 {
        self.cut.unwrap_or_else(|| self.inner.capacity())
    }

    fn capacity_max(&self) -> io::Result<Longest> {
        self.inner.capacity_max()
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        let request = Request::new(Op::Resize, 0, 0);
        self.serve(&request, &mut || self.inner.resize(bytes))
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.count(Op::Read, buf.len() as u64);
        self.read_counted(offset, buf)
    }

    fn start_read(&self, _ring: &dyn ReadRing, offset: u64, buf: Arc<AlignedBuf>, done: ReadDone) {
        if self.refuses_starts.load(Ordering::SeqCst) {
            return done(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
        }
        read_at_once(self, offset, buf, done);
    }

    fn read_many(&self, reads: &mut [(u64, AlignedBuf)]) -> Vec<io::Result<()>> {
        self.count(Op::Read, reads.iter().map(|(_, buf)| buf.len() as u64).sum());
        reads.iter_mut().map(|(offset, buf)| self.read_counted(*offset, buf)).collect()
    }

    fn read_matching(
        &self,
        offset: u64,
        buf: &mut AlignedBuf,
        wanted: &dyn Fn(&[u8]) -> bool,
    ) -> bool {
        self.inner.read_matching(offset, buf, wanted)
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        let request = Request::new(Op::Write, offset, buf.len() as u64);
        self.serve(&request, &mut || self.inner.write(offset, buf))
    }

    fn flush(&self) -> io::Result<()> {
        let request = Request::new(Op::Flush, 0, 0);
        let (ended, end) = mpsc::channel();
        let make = || Io::Flush { done: Box::new(move |result| drop(ended.send(result))) };
        if self.held_or(&request, make).is_none() {
            return end.recv().unwrap_or_else(|_| Err(io::ErrorKind::NotConnected.into()));
        }
        self.serve(&request, &mut || {
            self.inner.flush()?;
            self.flush_time.iter().for_each(|(time, timer)| timer.record(*time));
            Ok(())
        })
    }

    fn submit(&self, batch: Vec<Io>) {
        for io in batch {
            let request = Request::of(&io);
            if let Some(make) = self.held_or(&request, || io) {
                self.go_on(make());
            }
        }
        let hook = self.after_submit.lock().clone();
        hook.into_iter().for_each(|hook| hook());
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let request = Request::new(Op::Discard, offset, len);
        self.serve(&request, &mut || self.inner.discard(offset, len))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let request = Request::new(Op::Allocate, offset, len);
        self.serve(&request, &mut || self.inner.allocate(offset, len))
    }

    fn is_ordered(&self) -> bool {
        self.inner.is_ordered()
    }

    fn busy_bytes(&self) -> usize {
        self.inner.busy_bytes()
    }

    fn read_ahead_bytes(&self) -> u64 {
        self.inner.read_ahead_bytes().max(self.read_ahead_bytes)
    }

    fn read_ahead(&self, offset: u64, len: u64) {
        self.inner.read_ahead(offset, len);
    }

    fn warm(&self, begins: bool, ranges: &[Range<u64>], done: WarmDone) {
        self.inner.warm(begins, ranges, done);
    }

    fn host_free(&self) -> Option<u64> {
        self.host_free.or_else(|| self.inner.host_free())
    }

    fn keeps_what_is_dead(&self) -> bool {
        self.keeps_what_is_dead || self.inner.keeps_what_is_dead()
    }

    fn note_ring(&self, range: Range<u64>) {
        self.inner.note_ring(range);
    }

    fn flush_timing(&self) -> FlushTiming {
        self.flush_time.as_ref().map_or_else(|| self.inner.flush_timing(), |(_, timer)| timer.get())
    }

    fn reset_flush_timing(&self) {
        if let Some((_, timer)) = &self.flush_time {
            timer.reset();
        }
        self.inner.reset_flush_timing();
    }

    /// A block that cannot be read counts as data.
    fn next_data(&self, offset: u64) -> u64 {
        let mut next = self.capacity();
        let asked = self.serve(&Request::new(Op::NextData, offset, 0), &mut || {
            next = next.min(self.inner.next_data(offset));
            Ok(())
        });
        let bad = self.unreadable.lock().range(offset..).next().copied();
        // A hook that fails the question has no say: the answer is that anything may be data.
        if asked.is_ok() { bad.map_or(next, |bad| bad.min(next)) } else { offset }
    }

    fn components(&self) -> Vec<ComponentStats> {
        self.inner.components()
    }

    fn replace(&self, old: &Path, new: &Path) -> io::Result<()> {
        self.inner.replace(old, new)
    }

    fn create_snapshot(&self, name: &str) -> io::Result<()> {
        self.inner.create_snapshot(name)
    }

    fn delete_snapshot(&self, name: &str) -> io::Result<()> {
        self.inner.delete_snapshot(name)
    }

    fn snapshots(&self) -> io::Result<Vec<Snapshot>> {
        self.inner.snapshots()
    }
}
