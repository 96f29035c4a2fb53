//! The queue of the thread that reads ahead.

use crate::inode::incore::Inode;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Jobs that wait for the thread; more are dropped, and the reader reads for itself.
const JOBS_MAX: usize = 16;

/// What is done for a reader of a file.
pub enum Job {
    /// These blocks are brought into the page cache.
    Fetch(Range<u64>),
    /// The device is told that these bytes will be read.
    Tell(Range<u64>),
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(Weak<Inode>, Job)>,
    stopping: bool,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What the thread is to do.
#[derive(Default)]
pub struct Jobs {
    state: Mutex<State>,
    changed: Condvar,
}

impl Jobs {
    /// Notes the thread, so that [`Jobs::stop`] can wait for it.
    pub fn set_thread(&self, thread: std::thread::JoinHandle<()>) {
        self.state.lock().thread = Some(thread);
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.abandon();
        let thread = self.state.lock().thread.take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the read-ahead thread panicked");
        }
    }

    /// Tells the thread to end.
    pub fn abandon(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }

    pub fn push(&self, inode: &Arc<Inode>, job: Job) {
        let mut state = self.state.lock();
        if state.jobs.len() < JOBS_MAX {
            state.jobs.push_back((Arc::downgrade(inode), job));
            self.changed.notify_one();
        }
    }

    pub fn next(&self) -> Option<(Weak<Inode>, Job)> {
        let mut state = self.state.lock();
        loop {
            if state.stopping {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            self.changed.wait(&mut state);
        }
    }
}
