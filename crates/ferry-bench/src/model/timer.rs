//! Time, and what is to happen in it: real time, in which a thread does things when they are due,
//! and virtual time, which jumps to what is planned next. The thread sleeps until then, so what is
//! to happen is a little late; how late is counted.

use crate::stats::Histogram;
use ferry_env::{Clock, Env};
use parking_lot::{Condvar, Mutex};
use rustix::thread::set_current_timer_slack;
use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Something to do, given the time for which it was planned.
pub type Action = Box<dyn FnOnce() + Send>;

/// Time, and what is planned in it.
pub trait Timer: Send + Sync + 'static {
    /// Whether a caller can wait for what is planned. Nothing happens in virtual time while
    /// somebody waits.
    const CAN_WAIT: bool;

    /// The time that plans are made in.
    fn now(&self) -> Duration;

    /// Does it at this time.
    fn at(&self, time: Duration, action: Action);
}

/// What is planned, by time; of one time, in the order in which it was added.
#[derive(Default)]
struct Planned {
    actions: BTreeMap<(Duration, u64), Action>,
    added: u64,
}

impl Planned {
    fn add(&mut self, time: Duration, action: Action) {
        self.added += 1;
        self.actions.insert((time, self.added), action);
    }

    fn first(&self) -> Option<Duration> {
        self.actions.first_key_value().map(|((time, _), _)| *time)
    }
}

/// Virtual time: it passes only in [`VirtualTime::step`] and [`VirtualTime::advance_to`].
#[derive(Default)]
pub struct VirtualTime {
    now: AtomicU64,
    planned: Mutex<Planned>,
}

impl VirtualTime {
    /// When the next thing happens; `None`: nothing is planned.
    pub fn next_at(&self) -> Option<Duration> {
        self.planned.lock().first()
    }

    /// Time passes; nothing that is planned may have been due before.
    pub fn advance_to(&self, time: Duration) {
        self.now.fetch_max(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Lets time pass until the next thing, which happens.
    pub fn step(&self) {
        let first = self.planned.lock().actions.pop_first();
        if let Some(((time, _), action)) = first {
            self.advance_to(time);
            action();
        }
    }
}

impl Clock for VirtualTime {
    fn monotonic(&self) -> Duration {
        Duration::from_nanos(self.now.load(Ordering::Relaxed))
    }
    fn wall(&self) -> Duration {
        self.monotonic()
    }
}

impl Timer for Arc<VirtualTime> {
    const CAN_WAIT: bool = false;

    fn now(&self) -> Duration {
        self.monotonic()
    }

    fn at(&self, time: Duration, action: Action) {
        self.planned.lock().add(time, action);
    }
}

/// Real time, and the thread that does what is due. Dropped, it ends, and what has not happened yet
/// happens before, at its time.
pub struct RealTime {
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
    planned: Planned,
    stop: bool,
    lateness: Histogram,
}

impl RealTime {
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

    /// How late things were since the last call of this.
    pub fn take_lateness(&self) -> Histogram {
        std::mem::take(&mut self.shared.state.lock().lateness)
    }
}

impl Timer for RealTime {
    const CAN_WAIT: bool = true;

    fn now(&self) -> Duration {
        self.shared.clock.monotonic()
    }

    fn at(&self, time: Duration, action: Action) {
        let mut state = self.shared.state.lock();
        let first = state.planned.first().is_none_or(|first| time < first);
        state.planned.add(time, action);
        if first {
            self.shared.wake.notify_one();
        }
    }
}

impl Drop for RealTime {
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
            let Some(first) = state.planned.first() else {
                if state.stop {
                    return None;
                }
                self.wake.wait(&mut state);
                continue;
            };
            let now = self.clock.monotonic();
            if first > now {
                self.wake.wait_for(&mut state, first - now);
                continue;
            }
            let later = state.planned.actions.split_off(&(now, u64::MAX));
            let due = std::mem::replace(&mut state.planned.actions, later);
            for (time, _) in due.keys() {
                state.lateness.add(now.saturating_sub(*time));
            }
            return Some(due.into_values().collect());
        }
    }
}
