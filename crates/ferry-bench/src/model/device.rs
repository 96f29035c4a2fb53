//! A device in memory whose requests take time, real or virtual, and no processor time while they
//! do.

use super::DeviceModel;
use super::timer::{RealTime, Timer};
use crate::stats::Histogram;
use ferry_device::{AlignedBuf, BlockDevice, FlushTimer, FlushTiming, Io, IoDone, MemDevice};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The device. Reads take no time: what the journal and the file system need is in their caches.
pub struct ModelDevice<T = RealTime> {
    me: Weak<Self>,
    model: DeviceModel,
    contents: MemDevice,
    flush_timer: FlushTimer,
    /// Requests take time; before, they are done when they are submitted.
    live: AtomicBool,
    queue: Mutex<Queue>,
    timer: T,
}

struct Queue {
    /// Writes that the device can take up now.
    free: u32,
    waiting: VecDeque<Write>,
    /// When the last of the serial flushes ends.
    flushed_at: Duration,
    done: Done,
}

struct Write {
    offset: u64,
    buf: Arc<AlignedBuf>,
    done: IoDone,
}

/// Requests that reached the device since it takes time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// The number of flushes begun.
    pub flushes: u64,
    /// The number of writes begun.
    pub writes: u64,
}

impl ModelDevice {
    /// A device of `capacity` bytes, all zeros, that takes no time yet.
    pub fn new(model: DeviceModel, capacity: u64) -> io::Result<Arc<Self>> {
        Ok(Self::in_time(RealTime::new()?, model, capacity))
    }

    /// How much longer requests took than the model says, since the last call of this.
    pub fn take_lateness(&self) -> Histogram {
        self.timer.take_lateness()
    }
}

impl<T: Timer> ModelDevice<T> {
    /// The same in this time.
    pub fn in_time(timer: T, model: DeviceModel, capacity: u64) -> Arc<Self> {
        let queue = Queue {
            free: model.queue_depth.max(1),
            waiting: VecDeque::new(),
            flushed_at: Duration::ZERO,
            done: Done::default(),
        };
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            model,
            contents: MemDevice::new(capacity),
            flush_timer: FlushTimer::default(),
            live: AtomicBool::new(false),
            queue: Mutex::new(queue),
            timer,
        })
    }

    /// From now on requests take time.
    pub fn begin(&self) {
        self.live.store(true, Ordering::Release);
    }

    /// And from now on those that come no longer do.
    pub fn end(&self) {
        self.live.store(false, Ordering::Release);
    }

    /// Requests that took time.
    pub fn done(&self) -> Done {
        self.queue.lock().done
    }

    fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    fn submit_write(&self, write: Write) {
        let now = self.timer.now();
        let mut queue = self.queue.lock();
        queue.done.writes += 1;
        if queue.free == 0 {
            return queue.waiting.push_back(write);
        }
        queue.free -= 1;
        drop(queue);
        self.begin_write(now + self.model.write_time, write);
    }

    fn begin_write(&self, ends: Duration, write: Write) {
        let me = self.me.clone();
        self.timer.at(ends, Box::new(move || Self::upgraded(&me, write, ends)));
    }

    fn upgraded(me: &Weak<Self>, write: Write, ended: Duration) {
        match me.upgrade() {
            Some(me) => me.written(write, ended),
            None => (write.done)(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    /// A write ends. The next one has begun when the model says that this one ended: that the
    /// thread is late slows nothing down.
    fn written(&self, write: Write, ended: Duration) {
        let result = self.contents.write(write.offset, &write.buf);
        let mut queue = self.queue.lock();
        let next = queue.waiting.pop_front();
        if next.is_none() {
            queue.free += 1;
        }
        drop(queue);
        if let Some(next) = next {
            self.begin_write(ended + self.model.write_time, next);
        }
        (write.done)(result);
    }

    fn submit_flush(&self, done: IoDone) {
        let now = self.timer.now();
        let mut queue = self.queue.lock();
        queue.done.flushes += 1;
        let begins = if self.model.serial_flushes { now.max(queue.flushed_at) } else { now };
        let ends = begins + self.model.flush_time;
        queue.flushed_at = ends;
        drop(queue);
        let me = self.me.clone();
        let flushed = move || {
            if let Some(me) = me.upgrade() {
                me.flush_timer.record(me.timer.now().saturating_sub(now));
            }
            done(Ok(()));
        };
        self.timer.at(ends, Box::new(flushed));
    }

    /// Whether a caller waits for a request. Where callers cannot wait, such a request takes no
    /// time.
    fn waits(&self) -> bool {
        T::CAN_WAIT && self.is_live()
    }

    /// Submits one request and waits for its end.
    fn wait(&self, request: impl FnOnce(&Self, IoDone)) -> io::Result<()> {
        let (told, tell) = mpsc::channel();
        request(self, Box::new(move |result| drop(told.send(result))));
        tell.recv().unwrap_or_else(|_| Err(io::ErrorKind::NotConnected.into()))
    }
}

impl<T: Timer> BlockDevice for ModelDevice<T> {
    fn capacity(&self) -> u64 {
        self.contents.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.contents.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        if !self.waits() {
            // A log that is laid out: reads as zeros anyway, and needs no memory.
            let zeros = buf.iter().all(|byte| *byte == 0);
            return if zeros {
                self.contents.discard(offset, buf.len() as u64)
            } else {
                self.contents.write(offset, buf)
            };
        }
        let mut copy = AlignedBuf::zeroed(buf.len());
        copy.copy_from_slice(buf);
        self.wait(|me, done| me.submit_write(Write { offset, buf: Arc::new(copy), done }))
    }
    fn flush(&self) -> io::Result<()> {
        if self.waits() { self.wait(Self::submit_flush) } else { Ok(()) }
    }
    fn submit(&self, batch: Vec<Io>) {
        if !self.is_live() {
            return self.contents.submit(batch);
        }
        for io in batch {
            match io {
                Io::Write { offset, buf, done } => self.submit_write(Write { offset, buf, done }),
                Io::Flush { done } => self.submit_flush(done),
            }
        }
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
        self.flush_timer.get()
    }
    fn reset_flush_timing(&self) {
        self.flush_timer.reset();
    }
}
