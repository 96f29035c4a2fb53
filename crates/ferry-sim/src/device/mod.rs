//! A device in memory that can crash, fail and lie.
//!
//! It records all that it is asked for, so that a run can be made once and then crashed at every
//! point of it: [`SimDevice::crash_image`] is a new device with what might have been left.
//! Everything is a function of the calls and the seed. Its faults: unflushed changes are lost, kept
//! or torn in any combination; chosen operations fail once or from then on; a flush can be made to
//! lie; completions can be held back and let go in any order.

mod image;
mod trace;
mod world;

pub use world::{SimClock, SimEntropy, SimRng, sim_env};

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, FlushTiming, Io, IoDone, Longest};
use image::Image;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use trace::{Change, FlushEffect, Trace};

/// What can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads of one range.
    Read,
    /// Writes, both synchronous and submitted.
    Write,
    /// Flushes, both synchronous and submitted.
    Flush,
    /// Discards of one range.
    Discard,
    /// Allocations of one range.
    Allocate,
    /// Changes of the device's length.
    Resize,
}

/// An error to come.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Which operations are counted.
    pub op: Op,
    /// So many of them succeed before one fails.
    pub after: u64,
    /// The error, for instance `EIO` or `ENOSPC`.
    pub errno: i32,
    /// All later ones fail too.
    pub sticky: bool,
}

/// A request whose completion is held back.
enum Held {
    Write { change: usize, result: io::Result<()>, done: IoDone },
    Flush { flush: usize, result: io::Result<()>, done: IoDone },
}

#[derive(Default)]
struct State {
    /// Earlier lengths, and the number of events at which each ended.
    earlier: Vec<(usize, u64)>,
    /// Contents before the trace.
    base: Image,
    /// Contents as reads see them.
    now: Image,
    trace: Trace,
    faults: Vec<Fault>,
    /// Operations asked for, by [`Op`].
    asked: [u64; 6],
    struck: u64,
    hold: bool,
    held: VecDeque<Held>,
    flush_lies: bool,
    host_free: Option<u64>,
    flush_time: Duration,
}

/// The simulated device. Requests complete before the call returns, unless they are held.
pub struct SimDevice {
    /// Its length now, in bytes. Changed with the state locked.
    capacity: AtomicU64,
    state: Mutex<State>,
}

impl SimDevice {
    /// A device of `capacity` bytes, all zeros.
    ///
    /// # Panics
    /// When `capacity` is not a multiple of [`BLOCK_SIZE`].
    pub fn new(capacity: u64) -> Self {
        assert!(
            capacity.is_multiple_of(BLOCK_SIZE as u64),
            "capacity {capacity} is not whole blocks"
        );
        Self { capacity: AtomicU64::new(capacity), state: Mutex::default() }
    }

    /// Puts random bytes where an earlier life of the medium left some. Not traced: they survive
    /// every crash.
    pub fn scribble(&self, offset: u64, len: u64, rng: &mut SimRng) {
        let range = self.blocks(offset, len).expect("a range of whole blocks inside the device");
        let mut state = self.state.lock();
        for block in range {
            let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
            rng.fill(&mut buf);
            let buf = Arc::new(buf);
            state.base.write(block, &buf);
            state.now.write(block, &buf);
        }
    }

    /// Makes the present contents the start of a new trace. Whatever was volatile is durable from
    /// here on.
    ///
    /// # Panics
    /// When completions are held.
    pub fn restart_trace(&self) {
        let mut state = self.state.lock();
        assert!(state.held.is_empty(), "requests are in flight");
        state.base = state.now.settled();
        state.now = state.base.clone();
        state.trace = Trace::default();
        state.earlier.clear();
    }

    /// Events so far. A crash may come at any number from 0 to this.
    pub fn trace_len(&self) -> usize {
        self.state.lock().trace.len()
    }

    /// The points just before and just after the end of each flush, ascending.
    pub fn flush_points(&self) -> Vec<usize> {
        self.state.lock().trace.flush_points()
    }

    /// A device with what a crash might leave after the first `point` events, without faults and
    /// with an empty trace.
    ///
    /// # Panics
    /// When there are not so many events.
    pub fn crash_image(&self, point: usize, rng: &mut SimRng) -> Self {
        let state = self.state.lock();
        let mut image = state.base.clone();
        state.trace.crash(point, &mut image, rng);
        let earlier = state.earlier.iter().find(|(end, _)| point < *end);
        let capacity = earlier.map_or_else(|| self.capacity(), |(_, capacity)| *capacity);
        let state = State {
            base: image.clone(),
            now: image,
            host_free: state.host_free,
            ..State::default()
        };
        Self { capacity: AtomicU64::new(capacity), state: Mutex::new(state) }
    }

    /// A device with the same contents, without faults and with an empty trace.
    pub fn copy(&self) -> Self {
        let state = self.state.lock();
        let now = state.now.clone();
        let state =
            State { base: now.clone(), now, host_free: state.host_free, ..State::default() };
        Self { capacity: AtomicU64::new(self.capacity()), state: Mutex::new(state) }
    }

    /// Adds a fault. Of several that fit one operation the first added decides, but all count it.
    pub fn inject(&self, fault: Fault) {
        self.state.lock().faults.push(fault);
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.state.lock().faults.clear();
    }

    /// Operations of this kind that were asked for so far.
    pub fn asked(&self, op: Op) -> u64 {
        self.state.lock().asked[op as usize]
    }

    /// Operations that a fault made fail so far.
    pub fn struck(&self) -> u64 {
        self.state.lock().struck
    }

    /// A planted bug: flushes say that they are well and do nothing.
    pub fn set_flush_lies(&self, lies: bool) {
        self.state.lock().flush_lies = lies;
    }

    /// What [`BlockDevice::host_free`] answers.
    pub fn set_host_free(&self, bytes: Option<u64>) {
        self.state.lock().host_free = bytes;
    }

    /// What it says that a flush takes.
    pub fn set_flush_time(&self, time: Duration) {
        self.state.lock().flush_time = time;
    }

    /// Whether completions of submitted requests are held back from now on. What is held already
    /// stays held.
    pub fn set_hold(&self, hold: bool) {
        self.state.lock().hold = hold;
    }

    /// Number of completions that are held back.
    pub fn held(&self) -> usize {
        self.state.lock().held.len()
    }

    /// Completes the held request with this index (0 is the oldest) on this thread. `false` when
    /// there is none.
    pub fn release(&self, index: usize) -> bool {
        let mut state = self.state.lock();
        let Some(held) = state.held.remove(index) else { return false };
        let (result, done) = match held {
            Held::Write { change, result, done } => (state.finish_write(change, result), done),
            Held::Flush { flush, result, done } => (state.finish_flush(flush, result), done),
        };
        drop(state);
        done(result);
        true
    }

    /// Completes held requests, in random order, until none is left (those that completions submit
    /// included).
    pub fn release_all(&self, rng: &mut SimRng) {
        loop {
            let held = self.held();
            if held == 0 {
                return;
            }
            self.release(rng.index(held));
        }
    }

    /// The range in blocks, or the error of a caller's mistake.
    fn blocks(&self, offset: u64, len: u64) -> io::Result<Range<u64>> {
        let block = BLOCK_SIZE as u64;
        let whole = offset.is_multiple_of(block) && len.is_multiple_of(block);
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.capacity());
        if whole && inside {
            Ok(offset / block..(offset + len) / block)
        } else {
            Err(errno(EINVAL))
        }
    }

    fn submit_one(&self, io: Io) {
        let mut state = self.state.lock();
        let (result, done) = match io {
            Io::Write { offset, buf, done } => match self.blocks(offset, buf.len() as u64) {
                Err(error) => (Err(error), done),
                Ok(range) => {
                    let (change, result) = state.begin_write(range.start, buf);
                    if state.hold {
                        return state.held.push_back(Held::Write { change, result, done });
                    }
                    (state.finish_write(change, result), done)
                }
            },
            Io::Flush { done } => {
                let (flush, result) = state.begin_flush();
                if state.hold {
                    return state.held.push_back(Held::Flush { flush, result, done });
                }
                (state.finish_flush(flush, result), done)
            }
        };
        drop(state);
        done(result);
    }
}

/// `EINVAL`, the same on every Linux.
const EINVAL: i32 = 22;

fn errno(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

impl State {
    /// Counts an operation for every fault; the error of the first that strikes.
    fn strike(&mut self, op: Op) -> io::Result<()> {
        let mut struck = Ok(());
        self.asked[op as usize] += 1;
        self.faults.retain_mut(|fault| {
            if fault.op != op {
                return true;
            }
            if fault.after > 0 {
                fault.after -= 1;
                return true;
            }
            if struck.is_ok() {
                struck = Err(errno(fault.errno));
            }
            fault.sticky
        });
        self.struck += u64::from(struck.is_err());
        struck
    }

    fn begin_write(&mut self, first: u64, buf: Arc<AlignedBuf>) -> (usize, io::Result<()>) {
        let result = self.strike(Op::Write);
        (self.trace.issue(Change::Write { first, buf }), result)
    }

    /// A write that failed may have reached the medium all the same, at a crash; it never counts as
    /// completed.
    fn finish_write(&mut self, change: usize, result: io::Result<()>) -> io::Result<()> {
        if result.is_ok() {
            self.trace.complete(change).apply(&mut self.now);
        }
        result
    }

    fn begin_flush(&mut self) -> (usize, io::Result<()>) {
        let result = self.strike(Op::Flush);
        (self.trace.begin_flush(), result)
    }

    fn finish_flush(&mut self, flush: usize, result: io::Result<()>) -> io::Result<()> {
        let effect = match &result {
            Err(_) => FlushEffect::Doomed,
            Ok(()) if self.flush_lies => FlushEffect::Nothing,
            Ok(()) => FlushEffect::Durable,
        };
        self.trace.end_flush(flush, effect);
        result
    }
}

impl BlockDevice for SimDevice {
    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::SeqCst)
    }

    fn capacity_max(&self) -> io::Result<Longest> {
        Ok(Longest::Asked(u64::MAX / 2))
    }

    /// As that of a file, it is durable when this returns. What is cut off is zeros from then on.
    fn resize(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.strike(Op::Resize)?;
        let (block, before) = (BLOCK_SIZE as u64, self.capacity());
        // Of no block if it becomes longer: also then there is a moment before it and one after.
        let blocks = bytes.min(before) / block..before / block;
        let change = state.trace.issue(Change::Discard { blocks });
        state.finish_write(change, Ok(()))?;
        let ended = state.trace.len();
        state.earlier.push((ended, before));
        self.capacity.store(bytes, Ordering::SeqCst);
        Ok(())
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        let range = self.blocks(offset, buf.len() as u64)?;
        let mut state = self.state.lock();
        state.strike(Op::Read)?;
        state.now.read(range.start, buf);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        let range = self.blocks(offset, buf.len() as u64)?;
        let mut copy = AlignedBuf::zeroed(buf.len());
        copy.copy_from_slice(buf);
        let mut state = self.state.lock();
        let (change, result) = state.begin_write(range.start, Arc::new(copy));
        state.finish_write(change, result)
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        let (flush, result) = state.begin_flush();
        state.finish_flush(flush, result)
    }

    fn submit(&self, batch: Vec<Io>) {
        batch.into_iter().for_each(|io| self.submit_one(io));
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let blocks = self.blocks(offset, len)?;
        let mut state = self.state.lock();
        state.strike(Op::Discard)?;
        let change = state.trace.issue(Change::Discard { blocks });
        state.finish_write(change, Ok(()))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.blocks(offset, len)?;
        self.state.lock().strike(Op::Allocate)
    }

    fn host_free(&self) -> Option<u64> {
        self.state.lock().host_free
    }

    fn flush_timing(&self) -> FlushTiming {
        FlushTiming { avg: self.state.lock().flush_time, ..FlushTiming::default() }
    }
}

#[cfg(test)]
mod tests;
