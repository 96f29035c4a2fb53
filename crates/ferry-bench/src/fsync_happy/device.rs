//! A device whose requests take virtual time.

use crate::model::DeviceModel;
use ferry_device::{AlignedBuf, BlockDevice, FlushTimer, FlushTiming, Io, IoDone, MemDevice};
use ferry_env::{Clock, Entropy, Env};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What happens at some time.
pub enum Event {
    /// A write has ended.
    Written { offset: u64, buf: Arc<AlignedBuf>, done: IoDone },
    /// A flush has ended that was asked for at this time.
    Flushed { since: Duration, done: IoDone },
    /// A caller makes its next call.
    Ready(u32),
}

/// The clock, what is to happen, and the device.
pub struct World {
    model: DeviceModel,
    contents: MemDevice,
    clock: Arc<VirtualClock>,
    timer: FlushTimer,
    /// Requests take time; before, they are done when they are submitted.
    live: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// By time; of one time, in the order in which they were added.
    events: BTreeMap<(Duration, u64), Event>,
    added: u64,
    /// Writes that the device can take up now.
    free: u32,
    waiting: VecDeque<(u64, Arc<AlignedBuf>, IoDone)>,
    /// When the last of the serial flushes ends.
    flushed_at: Duration,
    flushes: u64,
}

struct VirtualClock(AtomicU64);

impl Clock for VirtualClock {
    fn monotonic(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    fn wall(&self) -> Duration {
        self.monotonic()
    }
}

/// splitmix64 (Steele, Lea and Flood, 2014).
pub struct Numbers(AtomicU64);

impl Numbers {
    /// Numbers that follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// A time below `bound`.
    pub fn below(&self, bound: Duration) -> Duration {
        let bound = bound.as_nanos() as u64;
        if bound == 0 { Duration::ZERO } else { Duration::from_nanos(self.next_u64() % bound) }
    }
}

impl Entropy for Numbers {
    fn next_u64(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl World {
    /// At time zero, with nothing to happen.
    pub fn new(model: DeviceModel, capacity: u64) -> Arc<Self> {
        let state = State {
            events: BTreeMap::new(),
            added: 0,
            free: model.queue_depth.max(1),
            waiting: VecDeque::new(),
            flushed_at: Duration::ZERO,
            flushes: 0,
        };
        Arc::new(Self {
            model,
            contents: MemDevice::new(capacity),
            clock: Arc::new(VirtualClock(AtomicU64::new(0))),
            timer: FlushTimer::default(),
            live: AtomicBool::new(false),
            state: Mutex::new(state),
        })
    }

    /// This world's time, and numbers that follow from `seed`.
    pub fn env(&self, seed: u64) -> Env {
        Env { clock: self.clock.clone(), entropy: Arc::new(Numbers::new(seed)) }
    }

    /// From now on requests take time.
    pub fn begin(&self) {
        self.live.store(true, Ordering::Relaxed);
    }

    /// And from now on no longer.
    pub fn end(&self) {
        self.live.store(false, Ordering::Relaxed);
    }

    /// The virtual time.
    pub fn now(&self) -> Duration {
        self.clock.monotonic()
    }

    /// The number of flushes begun.
    pub fn flushes(&self) -> u64 {
        self.state.lock().flushes
    }

    /// Something will happen after this time.
    pub fn add(&self, after: Duration, event: Event) {
        self.state.lock().add(self.now() + after, event);
    }

    /// When the next thing happens.
    pub fn next_at(&self) -> Option<Duration> {
        self.state.lock().events.first_key_value().map(|((at, _), _)| *at)
    }

    /// Lets time pass.
    pub fn advance_to(&self, time: Duration) {
        self.clock.0.fetch_max(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Lets time pass until the next thing happens, and lets that happen; a caller that is ready is
    /// returned.
    pub fn step(&self) -> io::Result<Option<u32>> {
        let first = self.state.lock().events.pop_first();
        let Some(((at, _), event)) = first else { return Ok(None) };
        self.advance_to(at);
        match event {
            Event::Ready(caller) => return Ok(Some(caller)),
            Event::Flushed { since, done } => {
                self.timer.record(at - since);
                done(Ok(()));
            }
            Event::Written { offset, buf, done } => {
                self.contents.write(offset, &buf)?;
                let mut state = self.state.lock();
                state.free += 1;
                if let Some((offset, buf, done)) = state.waiting.pop_front() {
                    state.begin_write(at + self.model.write_time, offset, buf, done);
                }
                drop(state);
                done(Ok(()));
            }
        }
        Ok(None)
    }

    fn submit_one(&self, io: Io) {
        let (now, mut state) = (self.now(), self.state.lock());
        match io {
            Io::Write { offset, buf, done } if state.free > 0 => {
                state.begin_write(now + self.model.write_time, offset, buf, done);
            }
            Io::Write { offset, buf, done } => state.waiting.push_back((offset, buf, done)),
            Io::Flush { done } => {
                state.flushes += 1;
                let begins =
                    if self.model.serial_flushes { now.max(state.flushed_at) } else { now };
                state.flushed_at = begins + self.model.flush_time;
                let at = state.flushed_at;
                state.add(at, Event::Flushed { since: now, done });
            }
        }
    }
}

impl State {
    fn add(&mut self, at: Duration, event: Event) {
        self.added += 1;
        self.events.insert((at, self.added), event);
    }

    fn begin_write(&mut self, ends: Duration, offset: u64, buf: Arc<AlignedBuf>, done: IoDone) {
        self.free -= 1;
        self.add(ends, Event::Written { offset, buf, done });
    }
}

impl BlockDevice for World {
    fn capacity(&self) -> u64 {
        self.contents.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.contents.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        // A log that is laid out: reads as zeros anyway.
        if !self.live.load(Ordering::Relaxed) && buf.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        self.contents.write(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn submit(&self, batch: Vec<Io>) {
        if !self.live.load(Ordering::Relaxed) {
            return self.contents.submit(batch);
        }
        batch.into_iter().for_each(|io| self.submit_one(io));
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.contents.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.contents.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        None
    }
    fn flush_timing(&self) -> FlushTiming {
        self.timer.get()
    }
    fn reset_flush_timing(&self) {
        self.timer.reset();
    }
}
