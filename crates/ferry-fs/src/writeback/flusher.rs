//! The background thread: writes back what is old or too much, frees what became dead, cleans ahead
//! of need.

use crate::store::data_store::DataStore;
use crate::writeback::trim::Quiet;
use crate::writeback::write_back::Busy;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

#[derive(Default)]
struct State {
    wanted: bool,
    stopping: bool,
    /// The last round failed: writers are not to wait for the next.
    stuck: bool,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// How the thread and those who wait for it call each other. It outlives neither.
#[derive(Default)]
pub struct Signal {
    state: Mutex<State>,
    work: Condvar,
    progress: Condvar,
    /// Rounds of write-back that have ended.
    rounds: AtomicU64,
}

/// The longest sleep, so that old data is found in time.
pub(crate) const ROUND: Duration = Duration::from_millis(500);

impl Signal {
    /// There is something to do now.
    pub fn wake(&self) {
        let mut state = self.state.lock();
        if !state.wanted {
            state.wanted = true;
            self.work.notify_one();
        }
    }

    /// How many rounds have ended.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Acquire)
    }

    /// Something was written back.
    pub fn progress(&self) {
        self.progress.notify_all();
    }

    /// Waits while `held` says so and the thread gets on; `false`: it does not.
    pub fn wait_while(&self, held: impl Fn() -> bool) -> bool {
        let mut state = self.state.lock();
        while held() {
            if state.stuck || state.stopping {
                return false;
            }
            state.wanted = true;
            self.work.notify_one();
            // The condition is not under this lock: a wake-up can fall between the look and the
            // wait.
            self.progress.wait_for(&mut state, ROUND);
        }
        true
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.abandon();
        let thread = self.state.lock().thread.take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the write-back thread panicked");
        }
    }

    /// Tells the thread to end.
    pub fn abandon(&self) {
        self.state.lock().stopping = true;
        self.work.notify_all();
        self.progress.notify_all();
    }

    /// Waits for work, or until it is time to look for old data. `None`: the end.
    fn wait(&self) -> Option<bool> {
        let mut state = self.state.lock();
        if !state.wanted && !state.stopping {
            self.work.wait_for(&mut state, ROUND);
        }
        (!state.stopping).then(|| std::mem::take(&mut state.wanted))
    }

    fn end_round(&self, stuck: bool) {
        self.rounds.fetch_add(1, Ordering::AcqRel);
        self.state.lock().stuck = stuck;
        self.progress.notify_all();
    }
}

/// Starts the thread. It holds the store only while it works.
pub fn start(store: &Arc<DataStore>) {
    let (weak, signal) = (Arc::downgrade(store), Arc::clone(&store.signal));
    let body = {
        let signal = Arc::clone(&signal);
        move || run(&weak, &signal)
    };
    match std::thread::Builder::new().name("ferry-writeback".into()).spawn(body) {
        Ok(thread) => signal.state.lock().thread = Some(thread),
        Err(error) => {
            tracing::error!(%error, "no write-back thread: data is written at fsync only")
        }
    }
}

fn run(store: &Weak<DataStore>, signal: &Signal) {
    let (mut stuck, mut untidy, mut quiet) = (false, false, Quiet::default());
    while let Some(wanted) = signal.wait() {
        let Some(store) = store.upgrade() else { return };
        let result = store.round(wanted);
        if let (Err(error), false) = (&result, stuck) {
            tracing::error!(%error, "write-back failed");
        }
        stuck = result.is_err();
        signal.end_round(stuck);
        let result =
            if stuck { Ok(()) } else { store.idle_work(&mut quiet, store.env.clock.monotonic()) };
        if let (Err(error), false) = (&result, untidy) {
            tracing::error!(%error, "the cleaner failed");
        }
        untidy = result.is_err();
    }
}

impl DataStore {
    /// Does what the background thread would do now; only for `background: false`.
    pub fn tick(&self) -> Result<(), crate::error::FsError> {
        if self.options.read_only { Ok(()) } else { self.round(false) }
    }

    /// What follows a round of write-back.
    pub(crate) fn idle_work(
        &self,
        quiet: &mut Quiet,
        now: Duration,
    ) -> Result<(), crate::error::FsError> {
        self.tidy()?;
        self.give_back_when_quiet(quiet, now)
    }

    /// One round of write-back.
    fn round(&self, wanted: bool) -> Result<(), crate::error::FsError> {
        if self.failed.load(Ordering::Relaxed) {
            return self.writable();
        }
        let much = self.cache.dirty() > self.dirty_threshold()
            || self.too_much()
            || self.space.is_wanted();
        let since = match (
            wanted && much,
            self.env.clock.monotonic().checked_sub(self.options.writeback_age),
        ) {
            (true, _) => Duration::MAX,
            (false, Some(since)) => since,
            (false, None) => return Ok(()),
        };
        if self.queue.oldest().is_some_and(|oldest| oldest <= since) {
            self.write_back_since(since, Busy::Skip)?;
        }
        self.cache.tidy();
        Ok(())
    }
}
