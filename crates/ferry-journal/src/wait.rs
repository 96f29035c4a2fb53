//! Waiting for a completion.

use crate::{Completion, JournalError};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

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
