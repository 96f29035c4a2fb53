//! Answers that take their time, as a slow device's do, or that do not come while the device
//! stalls.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use ferry_fs::{Answer, Cx, Parked, Reply, Stop};
use parking_lot::Mutex;

/// Gives one answer.
type Held = Box<dyn FnOnce() + Send>;

/// How fast writes and fsyncs are answered.
pub struct Slow {
    /// To the thread that gives each fsync its time.
    flushes: Option<Sender<Parked<()>>>,
    /// Answers that wait for the end of the stall; `None`: there is none.
    held: Mutex<Option<Vec<Held>>>,
}

impl Slow {
    /// An fsync takes so long, one after the other.
    pub fn new(flush_time: Duration) -> Self {
        let flushes = (!flush_time.is_zero()).then(|| {
            let (flushes, queue) = mpsc::channel();
            std::thread::spawn(move || flush_slowly(&queue, flush_time));
            flushes
        });
        Self { flushes, held: Mutex::new(None) }
    }

    /// A stall begins, or ends: then all that was held is answered.
    pub fn stall(&self, stalls: bool) {
        let mut held = self.held.lock();
        let answers = if stalls {
            held.get_or_insert_default().split_off(0)
        } else {
            held.take().unwrap_or_default()
        };
        drop(held);
        answers.into_iter().for_each(|answer| answer());
    }

    /// The answer to something that is done: now, or after the stall.
    pub fn answer<T: Into<Reply> + Send + 'static>(&self, cx: &Cx<'_>, value: T) -> Answer<T> {
        let mut held = self.held.lock();
        let Some(held) = &mut *held else { return Ok(value) };
        let parked = cx.park::<T>(None);
        held.push(Box::new(move || parked.complete(Ok(value))));
        Err(Stop::Parked)
    }

    /// The answer to an fsync.
    pub fn flush(&self, cx: &Cx<'_>) -> Answer<()> {
        let Some(flushes) = &self.flushes else { return self.answer(cx, ()) };
        let parked = cx.park(None);
        let flushes = flushes.clone();
        let send: Held = Box::new(move || {
            // If the thread is gone, dropping the request answers it.
            let _queued = flushes.send(parked);
        });
        match &mut *self.held.lock() {
            Some(held) => held.push(send),
            None => send(),
        }
        Err(Stop::Parked)
    }
}

/// Answers fsyncs, each after its time.
#[expect(clippy::disallowed_methods, reason = "a device that takes its time is what this is")]
fn flush_slowly(flushes: &Receiver<Parked<()>>, flush_time: Duration) {
    for flush in flushes {
        std::thread::sleep(flush_time);
        flush.complete(Ok(()));
    }
}
