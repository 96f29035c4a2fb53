//! Reads that must wait for the device have threads of their own: a transport's thread serves many programs, and none of them
//! waits for another one's read.

use super::LocalFs;
use super::handles::Handle;
use crate::api::{Parked, Reply};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

/// Reads that the device is asked for at the same time, beside read-ahead.
pub(super) const READERS_MAX: usize = 8;

/// A read that somebody waits for.
pub(super) struct Wanted {
    pub handle: Arc<Handle>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    pub parked: Parked<Reply>,
}

#[derive(Default)]
struct State {
    wanted: VecDeque<Wanted>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that wait for work.
    idle: usize,
    stop: bool,
}

/// The threads, started as they are needed, and what they are to do.
#[derive(Default)]
pub(super) struct Readers {
    state: Mutex<State>,
    more: Condvar,
    fs: Mutex<Weak<LocalFs>>,
}

impl Readers {
    /// From now on the reads are of `fs`.
    pub(super) fn serve(&self, fs: &Arc<LocalFs>) {
        *self.fs.lock() = Arc::downgrade(fs);
    }

    /// Has it read. Where nobody can any more it fails: what is dropped is answered.
    pub(super) fn push(self: &Arc<Self>, wanted: Wanted) {
        let mut state = self.state.lock();
        if state.stop {
            return;
        }
        state.wanted.push_back(wanted);
        if state.wanted.len() > state.idle && state.threads.len() < READERS_MAX {
            let (readers, fs) = (Arc::clone(self), self.fs.lock().clone());
            let thread =
                std::thread::Builder::new().name("ferry-read".into()).spawn(move || readers.run(&fs));
            match thread {
                Ok(thread) => state.threads.push(thread),
                Err(error) if state.threads.is_empty() => {
                    tracing::error!(%error, "no thread to read with");
                    state.wanted.clear();
                }
                Err(error) => tracing::debug!(%error, "no further thread to read with"),
            }
        }
        drop(state);
        self.more.notify_one();
    }

    fn next(&self) -> Option<Wanted> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            if let Some(wanted) = state.wanted.pop_front() {
                return Some(wanted);
            }
            state.idle += 1;
            self.more.wait(&mut state);
            state.idle -= 1;
        }
    }

    fn run(&self, fs: &Weak<LocalFs>) {
        while let Some(wanted) = self.next() {
            let Some(fs) = fs.upgrade() else { return };
            let Wanted { handle, offset, len, parked } = wanted;
            parked.complete(fs.read_waiting(&handle, offset, len));
        }
    }

    /// Ends the threads; what is still wanted fails.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.stop = true;
        let (wanted, threads) = (std::mem::take(&mut state.wanted), std::mem::take(&mut state.threads));
        drop(state);
        drop(wanted);
        self.more.notify_all();
        for thread in threads.into_iter().filter(|t| t.thread().id() != std::thread::current().id()) {
            if thread.join().is_err() {
                tracing::error!("a reading thread panicked");
            }
        }
    }
}
