//! Who waits for a flush, and how he is told.

use crate::IoDone;
use crate::sync::{Condvar, Mutex, lock, wait};
use std::io;
use std::sync::Arc;

/// A caller on board.
pub(super) enum Passenger {
    /// Asynchronous: told by a call.
    Told(IoDone),
    /// Synchronous: its thread waits.
    Seated(Arc<Seat>),
}

impl Passenger {
    /// Ends the passenger's wait with a copy of `result`.
    pub fn tell(self, result: &io::Result<()>) {
        let result = match result {
            Ok(()) => Ok(()),
            Err(error) => Err(same_error(error)),
        };
        match self {
            Self::Told(done) => done(result),
            Self::Seated(seat) => seat.call(Called::Landed(result)),
        }
    }
}

/// Why a waiting thread was woken.
pub(super) enum Called {
    /// The flush that covers it has ended.
    Landed(io::Result<()>),
    /// It is to make the next crossing itself.
    Flush,
}

/// Where one thread waits to be called, once. Each wait has its own: there is nothing to set up again.
#[derive(Default)]
pub(super) struct Seat {
    called: Mutex<Option<Called>>,
    woken: Condvar,
}

impl Seat {
    /// Wakes the thread.
    pub fn call(&self, called: Called) {
        *lock(&self.called) = Some(called);
        self.woken.notify_one();
    }

    /// Waits for the call.
    pub fn wait(&self) -> Called {
        let mut called = lock(&self.called);
        loop {
            match called.take() {
                Some(called) => return called,
                None => called = wait(&self.woken, called),
            }
        }
    }
}

/// An equal error for another caller: the same errno where there is one.
pub(super) fn same_error(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}
