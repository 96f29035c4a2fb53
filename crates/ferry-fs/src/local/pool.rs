//! Threads for what would keep a transport's thread waiting: it serves many programs, and none of
//! them waits for another one's request.

use crate::local::local_fs::LocalFs;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};

/// What a pool does. Where nobody can do it any more it is dropped, which answers its request with
/// an error.
pub(crate) trait Work: Send + Sized + 'static {
    /// Of the threads, as the system shows it.
    const NAME: &'static str;
    /// Threads, at most.
    const THREADS_MAX: usize;
    /// A thread takes all that has gathered, or else one piece.
    const TOGETHER: bool;

    /// Does it.
    fn run(these: Vec<Self>, fs: &LocalFs);
}

struct State<W> {
    waiting: VecDeque<W>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that wait for work.
    idle: usize,
    stop: bool,
}

/// The threads, started as they are needed, and what they are to do.
pub(crate) struct Pool<W> {
    state: Mutex<State<W>>,
    more: Condvar,
    fs: Mutex<Weak<LocalFs>>,
}

impl<W> Default for Pool<W> {
    fn default() -> Self {
        let state = State { waiting: VecDeque::new(), threads: Vec::new(), idle: 0, stop: false };
        Self { state: Mutex::new(state), more: Condvar::new(), fs: Mutex::default() }
    }
}

impl<W: Work> Pool<W> {
    /// From now on it works for `fs`.
    pub(crate) fn serve(&self, fs: &Arc<LocalFs>) {
        *self.fs.lock() = Arc::downgrade(fs);
    }

    /// Has it done.
    pub(crate) fn push(self: &Arc<Self>, work: W) {
        let mut state = self.state.lock();
        if state.stop {
            return;
        }
        state.waiting.push_back(work);
        let portions = if W::TOGETHER { 1 } else { state.waiting.len() };
        if portions > state.idle && state.threads.len() < W::THREADS_MAX {
            let (pool, fs) = (Arc::clone(self), self.fs.lock().clone());
            match Builder::new().name(W::NAME.into()).spawn(move || pool.run(&fs)) {
                Ok(thread) => state.threads.push(thread),
                Err(error) if state.threads.is_empty() => {
                    tracing::error!(%error, thread = W::NAME, "no thread can be started");
                    state.waiting.clear();
                }
                Err(error) => {
                    tracing::debug!(%error, thread = W::NAME, "no further thread can be started")
                }
            }
        }
        drop(state);
        self.more.notify_one();
    }

    /// What a thread is to do next; `None`: the end.
    fn next(&self) -> Option<Vec<W>> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            if !state.waiting.is_empty() {
                let count = if W::TOGETHER { state.waiting.len() } else { 1 };
                return Some(state.waiting.drain(..count).collect());
            }
            state.idle += 1;
            self.more.wait(&mut state);
            state.idle -= 1;
        }
    }

    fn run(&self, fs: &Weak<LocalFs>) {
        while let Some(these) = self.next() {
            let Some(fs) = fs.upgrade() else { return };
            W::run(these, &fs);
        }
    }

    /// Ends the threads; what is still to be done fails.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.stop = true;
        let (waiting, threads) =
            (std::mem::take(&mut state.waiting), std::mem::take(&mut state.threads));
        drop(state);
        drop(waiting);
        self.more.notify_all();
        for thread in threads.into_iter().filter(|t| t.thread().id() != std::thread::current().id())
        {
            if thread.join().is_err() {
                tracing::error!(thread = W::NAME, "a thread panicked");
            }
        }
    }
}
