//! A thread that does things at their time. It sleeps until then, so what is to happen is a little
//! late; how late is counted.

use crate::stats::Histogram;
use ferry_env::{Clock, Env};
use parking_lot::{Condvar, Mutex};
use rustix::thread::set_current_timer_slack;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Something to do, given the time for which it was planned.
pub type Action = Box<dyn FnOnce() + Send>;

/// How much later than planned things happened, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Lateness {
    /// Things that happened.
    pub count: u64,
    /// Half of them were so late or less (within 10 %).
    pub median_ns: u64,
    /// 99 of 100 were so late or less (within 10 %).
    pub p99_ns: u64,
    /// The largest lateness, in nanoseconds.
    pub max_ns: u64,
}

/// The thread. Dropped, it ends, and what has not happened yet happens before, at its time.
pub struct Timer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    /// By time; of one time, in the order in which they were added.
    planned: BTreeMap<(Duration, u64), Action>,
    added: u64,
    stop: bool,
    lateness: Histogram,
}

impl Timer {
    /// A thread with nothing to do.
    pub fn new() -> io::Result<Self> {
        let shared = Arc::new(Shared {
            clock: Env::real().clock,
            state: Mutex::default(),
            wake: Condvar::new(),
        });
        let theirs = shared.clone();
        let thread = Builder::new().name("device-model".into()).spawn(move || theirs.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The time that plans are made in.
    pub fn now(&self) -> Duration {
        self.shared.clock.monotonic()
    }

    /// Does it at this time.
    pub fn at(&self, time: Duration, action: Action) {
        let mut state = self.shared.state.lock();
        state.added += 1;
        let key = (time, state.added);
        let first = state.planned.first_key_value().is_none_or(|(first, _)| key < *first);
        state.planned.insert(key, action);
        if first {
            self.shared.wake.notify_one();
        }
    }

    /// How late things were since the last call of this.
    pub fn take_lateness(&self) -> Lateness {
        let lateness = std::mem::take(&mut self.shared.state.lock().lateness);
        Lateness {
            count: lateness.count(),
            median_ns: lateness.quantile(0.5),
            p99_ns: lateness.quantile(0.99),
            max_ns: lateness.max(),
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.wake.notify_one();
        let thread = self.thread.take().expect("only this takes it");
        // What it does may drop the last handle of the device: then it ends by itself.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the device model's thread has panicked");
        }
    }
}

impl Shared {
    fn run(&self) {
        // By default the kernel may be 50 µs late on purpose.
        if let Err(error) = set_current_timer_slack(NonZeroU64::new(1)) {
            tracing::warn!(%error, "the device model's times are less exact");
        }
        while let Some(actions) = self.due() {
            actions.into_iter().for_each(|action| action());
        }
    }

    /// Waits for what is due next; nothing once all is done that was to be done before the end.
    fn due(&self) -> Option<Vec<Action>> {
        let mut state = self.state.lock();
        loop {
            let Some(((first, _), _)) = state.planned.first_key_value() else {
                if state.stop {
                    return None;
                }
                self.wake.wait(&mut state);
                continue;
            };
            let (first, now) = (*first, self.clock.monotonic());
            if first > now {
                self.wake.wait_for(&mut state, first - now);
                continue;
            }
            let later = state.planned.split_off(&(now, u64::MAX));
            let due = std::mem::replace(&mut state.planned, later);
            for (time, _) in due.keys() {
                state.lateness.add(now.saturating_sub(*time));
            }
            return Some(due.into_values().collect());
        }
    }
}
