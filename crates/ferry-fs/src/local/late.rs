//! Fsyncs whose data must wait before it can be sent, because enough is on its way to the device already (or it is much), because the
//! log is full, or because somebody else is at the file: they have threads of their own, so that no transport's thread waits with them. What gathers meanwhile is written back together.

use super::LocalFs;
use crate::data::Busy;
use crate::inode::Inode;
use parking_lot::{Condvar, Mutex};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};

/// Such threads, at most: more than one, so that small files need not wait for all of a large one.
const LATE_MAX: usize = 4;

/// Files to be written back, and what is to be done then.
pub(super) struct Job {
    pub files: Vec<Arc<Inode>>,
    /// Writes back itself whatever of the files is still dirty, and hears why if that fails.
    pub then: Box<dyn FnOnce(&LocalFs) + Send>,
}

#[derive(Default)]
struct State {
    jobs: Vec<Job>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that wait for work.
    idle: usize,
    stop: bool,
}

/// The threads, started as they are needed, and what they are to do.
#[derive(Default)]
pub(super) struct Late {
    state: Mutex<State>,
    more: Condvar,
    fs: Mutex<Weak<LocalFs>>,
}

impl Late {
    /// From now on the files are of `fs`.
    pub(super) fn serve(&self, fs: &Arc<LocalFs>) {
        *self.fs.lock() = Arc::downgrade(fs);
    }

    /// Has it done. Where nobody can any more it is dropped, which answers its request with an error.
    pub(super) fn push(self: &Arc<Self>, job: Job) {
        let mut state = self.state.lock();
        if state.stop {
            return;
        }
        state.jobs.push(job);
        if state.idle == 0 && state.threads.len() < LATE_MAX {
            let (late, fs) = (Arc::clone(self), self.fs.lock().clone());
            match Builder::new().name("ferry-fsync".into()).spawn(move || late.run(&fs)) {
                Ok(thread) => state.threads.push(thread),
                Err(error) if state.threads.is_empty() => {
                    tracing::error!(%error, "no thread to write back with");
                    state.jobs.clear();
                }
                Err(error) => tracing::debug!(%error, "no further thread to write back with"),
            }
        }
        drop(state);
        self.more.notify_one();
    }

    /// All that has gathered; `None`: the end.
    fn next(&self) -> Option<Vec<Job>> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            if !state.jobs.is_empty() {
                return Some(std::mem::take(&mut state.jobs));
            }
            state.idle += 1;
            self.more.wait(&mut state);
            state.idle -= 1;
        }
    }

    fn run(&self, fs: &Weak<LocalFs>) {
        while let Some(jobs) = self.next() {
            let Some(fs) = fs.upgrade() else { return };
            let files = jobs.iter().flat_map(|job| job.files.iter().cloned()).collect();
            if let Err(error) = fs.data.write_back_many(files, Busy::Wait) {
                tracing::debug!(%error, "writing back for many fsyncs; each hears of its own");
            }
            jobs.into_iter().for_each(|job| (job.then)(&fs));
        }
    }

    /// Ends the threads; what is still to be done fails.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.stop = true;
        let (jobs, threads) = (std::mem::take(&mut state.jobs), std::mem::take(&mut state.threads));
        drop(state);
        drop(jobs);
        self.more.notify_all();
        for thread in threads.into_iter().filter(|t| t.thread().id() != std::thread::current().id()) {
            if thread.join().is_err() {
                tracing::error!("a thread that writes back for fsyncs panicked");
            }
        }
    }
}
