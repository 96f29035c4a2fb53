//! Threads for what would keep a transport's thread waiting: it serves many programs, and none of
//! them waits for another one's request.

use parking_lot::{Condvar, Mutex};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};

/// Work for a pool. When the pool stops, it drops what has not begun, which answers those requests
/// with an error.
pub(crate) trait Work<F>: Send + Sized + 'static {
    /// Of the threads, as the system shows it.
    const NAME: &'static str;
    /// Threads, at most.
    const THREADS_MAX: usize;
    /// A thread takes all that has gathered, or else one piece.
    const TOGETHER: bool;

    /// Does the work, on a thread of the pool.
    fn run(these: Vec<Self>, fs: &F);
}

struct State<W> {
    waiting: VecDeque<W>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that wait for work.
    idle: usize,
    stop: bool,
}

/// The threads, started as they are needed, and what they are to do.
pub(crate) struct Pool<F, W> {
    state: Mutex<State<W>>,
    more: Condvar,
    fs: Mutex<Weak<F>>,
    /// The processors that its maker may use. A transport's thread that starts one of these threads
    /// may be pinned to one processor.
    processors: Option<CpuSet>,
}

impl<F, W> Default for Pool<F, W> {
    fn default() -> Self {
        let state = State { waiting: VecDeque::new(), threads: Vec::new(), idle: 0, stop: false };
        let processors = sched_getaffinity(None).ok();
        Self {
            state: Mutex::new(state),
            more: Condvar::new(),
            fs: Mutex::new(Weak::new()),
            processors,
        }
    }
}

impl<F: Send + Sync + 'static, W: Work<F>> Pool<F, W> {
    /// From now on the pool works for `fs`.
    pub(crate) fn serve(&self, fs: &Arc<F>) {
        *self.fs.lock() = Arc::downgrade(fs);
    }

    /// Queues work, and starts a thread if none is idle.
    pub(crate) fn push(self: &Arc<Self>, work: W) {
        self.push_if_fewer(work, usize::MAX);
    }

    /// The same for work on which nobody relies: it is left out if so much waits already.
    pub(crate) fn push_if_fewer(self: &Arc<Self>, work: W, most: usize) {
        let mut state = self.state.lock();
        if state.stop || state.waiting.len() >= most {
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

    fn run(&self, fs: &Weak<F>) {
        if let Some(Err(error)) = self.processors.map(|all| sched_setaffinity(None, &all)) {
            tracing::debug!(%error, thread = W::NAME, "a thread may use few processors");
        }
        while let Some(these) = self.next() {
            let Some(fs) = fs.upgrade() else { return };
            W::run(these, &fs);
        }
    }

    /// Whether there is nothing to do, and all that was begun has ended.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.waiting.is_empty() && state.idle == state.threads.len()
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
