//! Waiting for a completion.

use crate::{Completion, JournalError};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;

/// The result of something that completes later.
pub struct Wait {
    result: Mutex<Option<Result<(), JournalError>>>,
    wake: Condvar,
}

impl Wait {
    /// Calls `start` with a completion and waits until that is called.
    pub fn until(start: impl FnOnce(Completion)) -> Result<(), JournalError> {
        let wait = Arc::new(Wait { result: Mutex::new(None), wake: Condvar::new() });
        let there = wait.clone();
        start(Box::new(move |result| {
            *there.result.lock() = Some(result);
            there.wake.notify_one();
        }));
        let mut result = wait.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            wait.wake.wait(&mut result);
        }
    }
}

/// Called once with the first error, if there was one.
type Then = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

/// Counts down what is still to complete, then goes on.
pub struct Countdown {
    /// What is left, and one more until [`Countdown::then`] is called.
    left: AtomicU32,
    error: Mutex<Option<JournalError>>,
    then: Mutex<Option<Then>>,
}

impl Countdown {
    /// `n` things are to complete.
    pub fn new(n: u32) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicU32::new(n + 1),
            error: Mutex::new(None),
            then: Mutex::new(None),
        })
    }

    /// One more; only before [`Countdown::then`].
    pub fn add(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    /// One of them completed.
    pub fn done(&self, result: Result<(), JournalError>) {
        if let Err(error) = result {
            self.error.lock().get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let then = self.then.lock().take().expect("set before the last count is given up");
            then(self.error.lock().take().map_or(Ok(()), Err));
        }
    }

    /// What to do when all have completed; perhaps at once.
    pub fn then(&self, then: impl FnOnce(Result<(), JournalError>) + Send + 'static) {
        *self.then.lock() = Some(Box::new(then));
        self.done(Ok(()));
    }
}
