//! What the requests of a process have come to that was killed.
//!
//! The transport begins each request anew that it finds without an answer. One that had come to a
//! change is not applied twice: it has the answer that is noted, or waits for that change. All of
//! them have begun before the server is asked for anything.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::rt::Mutex;
use crate::rt::collections::HashMap;
use ferry_fs::Ino;

use crate::message::Outcome;

/// What a request of the kernel has come to in the process before.
pub(super) enum Came {
    /// It has this answer.
    To(Outcome),
    /// It waits for the change of this number.
    Waits(u64),
}

/// What a process has left that was killed, until all of its requests have begun anew.
#[derive(Default)]
pub(super) struct Left {
    /// There is anything.
    is_there: AtomicBool,
    /// By the transport's numbers, each with the number of the file that it opens; 0: none.
    requests: Mutex<HashMap<u64, (Came, u64)>>,
    /// The inodes that the kernel knows.
    known: Mutex<Vec<Ino>>,
}

impl Left {
    /// A process has left this.
    pub(super) fn set(&self, requests: HashMap<u64, (Came, u64)>, known: Vec<Ino>) {
        *self.requests.lock() = requests;
        *self.known.lock() = known;
        self.is_there.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_there(&self) -> bool {
        self.is_there.load(Ordering::SeqCst)
    }

    /// What a request has come to, once. `number`: the transport's.
    pub(super) fn take(&self, number: u64) -> Option<Came> {
        if number == 0 || !self.is_there() {
            return None;
        }
        self.requests.lock().remove(&number).map(|(came, _)| came)
    }

    /// The number of the file that a request opens.
    pub(super) fn opens(&self, number: u64) -> Option<u64> {
        if number == 0 || !self.is_there() {
            return None;
        }
        self.requests.lock().get(&number).map(|(_, fh)| *fh).filter(|fh| *fh != 0)
    }

    /// The inodes that the kernel knows, once.
    pub(super) fn take_known(&self) -> Vec<Ino> {
        std::mem::take(&mut *self.known.lock())
    }

    /// All requests have begun. Gives the changes for which none waits any more.
    pub(super) fn end(&self) -> Vec<u64> {
        let requests = std::mem::take(&mut *self.requests.lock());
        self.is_there.store(false, Ordering::SeqCst);
        let waits = |(came, _)| if let Came::Waits(seq) = came { Some(seq) } else { None };
        requests.into_values().filter_map(waits).collect()
    }
}
