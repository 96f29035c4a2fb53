//! Keeps a core awake while requests follow each other closely.
//!
//! A program that waits for each answer leaves its own core idle, and its answer must wake that
//! core: the other core is busy serving. Waking a halted core takes longer than serving most
//! requests, in a virtual machine several times as long. So, while requests follow each other
//! closely, one thread spins at the scheduler's idle priority. It yields to every other thread at
//! once, but no core halts under it. It stops shortly after the last request, and rests while more
//! threads can run than there are cores.
//!
//! Nothing depends on it: a missed start costs time only. On a busy machine it may not run for
//! seconds, not even to end. So nothing waits for its end, and it has no files open: a killed
//! daemon's mount and volume are free without it.

use std::io;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::request::counters::{MountCounters, ThreadCounters};
use crate::request::crowd::Crowd;
use crate::sys;

/// A serving thread reads the clock once in this many requests.
const EVERY: u64 = 16;
/// [`EVERY`] requests of one thread within this time follow each other closely.
const CLOSE_MICROS: u64 = 2000;
/// The poll ends after this time without a request.
const LINGER: Duration = Duration::from_micros(200);
/// It asks so often whether more threads can run than there are cores.
const CROWD_INTERVAL: Duration = Duration::from_millis(1);
/// Spin-loop hints between two reads of the counters: some microseconds.
const PAUSES: u32 = 64;

/// The polling thread, as the serving threads see it.
#[derive(Debug)]
pub(crate) struct IdlePoll {
    all: Arc<MountCounters>,
    crowd: Crowd,
    began: Instant,
    thread: OnceLock<Thread>,
    resting: AtomicBool,
    stopped: AtomicBool,
    polls: AtomicU64,
    polled_nanos: AtomicU64,
}

impl IdlePoll {
    pub(crate) fn new(all: Arc<MountCounters>, crowd: Crowd) -> Self {
        Self {
            all,
            crowd,
            began: now(),
            thread: OnceLock::new(),
            resting: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            polls: AtomicU64::new(0),
            polled_nanos: AtomicU64::new(0),
        }
    }

    /// Starts the thread. Without it requests are counted, and nothing else.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let this = Arc::clone(self);
        thread::Builder::new().name("fuse-idle".into()).spawn(move || this.run())
    }

    /// Ends the thread, or keeps it from starting.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Counts a request of the calling thread; `counters` are that thread's.
    pub(crate) fn request(&self, counters: &ThreadCounters) {
        let before = counters.pace.total.fetch_add(1, Ordering::Relaxed);
        if before % EVERY != EVERY - 1 {
            return;
        }
        let at = self.began.elapsed().as_micros() as u64;
        let last = counters.pace.looked_at.swap(at, Ordering::Relaxed);
        let close = at.saturating_sub(last) <= CLOSE_MICROS;
        if close
            && self.resting.load(Ordering::Relaxed)
            && self.resting.swap(false, Ordering::Relaxed)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// `{"polls": n, "nanos": n}`.
    pub(crate) fn json(&self) -> Value {
        let value = |counter: &AtomicU64| Value::from(counter.load(Ordering::Relaxed));
        let both =
            [("polls".into(), value(&self.polls)), ("nanos".into(), value(&self.polled_nanos))];
        Value::Object(both.into_iter().collect())
    }

    fn run(&self) {
        if let Err(error) = sys::forget_files().and_then(|()| sys::idle_priority()) {
            tracing::debug!(%error, "no idle priority: cores are not kept awake");
            return;
        }
        self.thread.get_or_init(thread::current);
        while !self.stopped.load(Ordering::Acquire) {
            self.resting.store(true, Ordering::Release);
            while self.resting.load(Ordering::Relaxed) && !self.stopped.load(Ordering::Acquire) {
                thread::park();
            }
            self.poll();
        }
    }

    fn poll(&self) {
        let blocks = self.all.blocks();
        let total = || blocks.iter().map(|b| b.pace.total.load(Ordering::Relaxed)).sum::<u64>();
        if !self.finds_room(total) {
            return;
        }
        let began = now();
        let (mut seen, mut last, mut asked) = (total(), began, began);
        while !self.stopped.load(Ordering::Acquire) {
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
            let (at, count) = (now(), total());
            if count != seen {
                (seen, last) = (count, at);
            } else if at - last > LINGER {
                break;
            }
            if at - asked > CROWD_INTERVAL {
                asked = at;
                if self.crowd.is_there() {
                    break;
                }
            }
        }
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.polled_nanos.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Waits while no core is idle; `false`: no requests came meanwhile, or it is stopped.
    fn finds_room(&self, total: impl Fn() -> u64) -> bool {
        let mut seen = total();
        while self.crowd.is_there() {
            thread::park_timeout(CROWD_INTERVAL);
            let before = mem::replace(&mut seen, total());
            if before == seen || self.stopped.load(Ordering::Acquire) {
                return false;
            }
        }
        true
    }
}

/// For what is measured and shown.
#[expect(clippy::disallowed_methods, reason = "real time is measured; no result depends on it")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "requests come at times")]
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::request::crowd::tests::TestCrowd;

    fn polls(idle: &IdlePoll) -> u64 {
        idle.polls.load(Ordering::Relaxed)
    }

    fn until(what: impl Fn() -> bool) {
        let end = now() + Duration::from_secs(60);
        while !what() {
            assert!(now() < end, "it never happened");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn close_requests_start_a_poll_that_ends_by_itself() {
        let all = Arc::new(MountCounters::default());
        let counters = all.block();
        let idle = Arc::new(IdlePoll::new(all, TestCrowd::new().crowd()));
        let thread = idle.start().unwrap();
        assert_eq!(polls(&idle), 0, "nothing polls without requests");
        for _ in 0..3 {
            until(|| idle.resting.load(Ordering::Acquire));
            let before = polls(&idle);
            // Which of these is the first close one depends on the machine's load.
            until(|| {
                (0..EVERY * 2).for_each(|_| idle.request(&counters));
                polls(&idle) > before
            });
        }
        idle.stop();
        thread.join().unwrap();
    }

    #[test]
    fn no_poll_lasts_while_more_threads_can_run_than_there_are_cores() {
        let said = TestCrowd::new();
        let all = Arc::new(MountCounters::default());
        let counters = all.block();
        let idle = Arc::new(IdlePoll::new(all, said.crowd()));
        let thread = idle.start().unwrap();
        let requests = || (0..EVERY * 2).for_each(|_| idle.request(&counters));
        until(|| {
            requests();
            polls(&idle) > 0
        });
        said.set(3);
        // The poll under way ends, though requests go on, and then none begins.
        until(|| {
            let before = polls(&idle);
            for _ in 0..20 {
                requests();
                thread::sleep(Duration::from_millis(1));
            }
            polls(&idle) == before
        });
        said.set(2);
        let before = polls(&idle);
        until(|| {
            requests();
            polls(&idle) > before
        });
        idle.stop();
        thread.join().unwrap();
    }

    #[test]
    fn the_polling_thread_has_no_file_open() {
        let idle = Arc::new(IdlePoll::new(Arc::default(), TestCrowd::new().crowd()));
        let (name, number) = std::sync::mpsc::channel();
        let this = Arc::clone(&idle);
        let thread = thread::spawn(move || {
            name.send(fs::read_link("/proc/thread-self").unwrap()).unwrap();
            this.run();
        });
        let files = Path::new("/proc").join(number.recv().unwrap()).join("fd");
        until(|| idle.resting.load(Ordering::Acquire));
        assert_eq!(fs::read_dir(files).unwrap().count(), 0);
        assert!(fs::read_dir("/proc/self/fd").unwrap().count() > 0);
        idle.stop();
        thread.join().unwrap();
    }

    #[test]
    fn requests_far_apart_start_no_poll() {
        let all = Arc::new(MountCounters::default());
        let counters = all.block();
        let idle = Arc::new(IdlePoll::new(all, TestCrowd::new().crowd()));
        let thread = idle.start().unwrap();
        until(|| idle.resting.load(Ordering::Relaxed));
        for _ in 0..3 {
            thread::sleep(Duration::from_millis(5));
            (0..EVERY - 1).for_each(|_| idle.request(&counters));
            assert!(idle.resting.load(Ordering::Relaxed));
            thread::sleep(Duration::from_millis(5));
            idle.request(&counters);
        }
        assert!(idle.resting.load(Ordering::Relaxed));
        idle.stop();
        thread.join().unwrap();
        assert!(polls(&idle) <= 1, "only the one that stopping ends");
    }
}
