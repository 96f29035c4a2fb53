//! How the write-back thread and the threads that wait for it call each other.

use ferry_env::activity::{self, Layer};
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Default)]
struct State {
    wanted: bool,
    stopping: bool,
    /// The last round failed: writers are not to wait for the next.
    stuck: bool,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// How the thread and the threads that wait for it call each other. It outlives neither.
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
    /// Notes the thread, so that [`Signal::stop`] can wait for it.
    pub fn set_thread(&self, thread: std::thread::JoinHandle<()>) {
        self.state.lock().thread = Some(thread);
    }

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
            let _waiting = activity::enter(Layer::WriteBack);
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
    pub fn wait(&self) -> Option<bool> {
        let mut state = self.state.lock();
        if !state.wanted && !state.stopping {
            self.work.wait_for(&mut state, ROUND);
        }
        (!state.stopping).then(|| std::mem::take(&mut state.wanted))
    }

    pub fn end_round(&self, stuck: bool) {
        self.rounds.fetch_add(1, Ordering::AcqRel);
        self.state.lock().stuck = stuck;
        self.progress.notify_all();
    }
}
