//! Callers that wait for a flush, and how each is answered.

use crate::device::IoDone;
use crate::sync::{Condvar, Mutex, lock, wait};
use std::io;
use std::sync::Arc;

/// A caller that waits for a flush.
pub(super) enum Waiter {
    /// An asynchronous caller.
    Callback(IoDone),
    /// A synchronous caller, whose thread waits.
    Thread(Arc<Wakeup>),
}

impl Waiter {
    /// Ends the wait with a copy of `result`.
    pub fn answer(self, result: &io::Result<()>) {
        let result = match result {
            Ok(()) => Ok(()),
            Err(error) => Err(same_error(error)),
        };
        match self {
            Self::Callback(done) => done(result),
            Self::Thread(wakeup) => wakeup.wake(Wake::Ended(result)),
        }
    }
}

/// Why a waiting thread was woken.
pub(super) enum Wake {
    /// The flush that covers its target has ended.
    Ended(io::Result<()>),
    /// It must make the next flush itself.
    Flush,
}

/// Wakes one waiting thread, once. Each wait has its own, so that none is ever armed again.
#[derive(Default)]
pub(super) struct Wakeup {
    why: Mutex<Option<Wake>>,
    woken: Condvar,
}

impl Wakeup {
    /// Wakes the thread, which waits or is about to.
    pub fn wake(&self, why: Wake) {
        *lock(&self.why) = Some(why);
        self.woken.notify_one();
    }

    /// Waits until another thread calls [`Wakeup::wake`].
    pub fn wait(&self) -> Wake {
        let mut why = lock(&self.why);
        loop {
            match why.take() {
                Some(why) => return why,
                None => why = wait(&self.woken, why),
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
