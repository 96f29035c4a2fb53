//! One request that became several: its caller is told when the last of them has ended.

use crate::device::IoDone;
use parking_lot::Mutex;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

/// How the parts ended.
#[derive(Debug)]
pub(super) struct Outcome {
    /// One bit for each part that failed.
    pub failed: u64,
    /// The error of the part that failed first.
    pub error: Option<io::Error>,
}

impl Outcome {
    /// Nothing failed, or the first error.
    pub fn result(self) -> io::Result<()> {
        self.error.map_or(Ok(()), Err)
    }
}

type Done = Box<dyn FnOnce(Outcome) + Send>;

/// Waits for a number of parts without a thread.
pub(super) struct Gather {
    left: AtomicUsize,
    failed: AtomicU64,
    error: Mutex<Option<io::Error>>,
    /// Taken by the last part.
    done: Mutex<Option<Done>>,
}

impl Gather {
    /// Calls `done` when `parts` (not zero) have ended.
    pub fn new(parts: usize, done: Done) -> Arc<Self> {
        assert!(parts > 0, "somebody must call `done`");
        Arc::new(Self {
            left: AtomicUsize::new(parts),
            failed: AtomicU64::new(0),
            error: Mutex::default(),
            done: Mutex::new(Some(done)),
        })
    }

    /// Part `index` has ended.
    pub fn arrive(&self, index: usize, result: io::Result<()>) {
        if let Err(error) = result {
            self.failed.fetch_or(1 << index, Ordering::Relaxed);
            self.error.lock().get_or_insert(error);
        }
        // Release what this part did, acquire what the others did.
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let outcome = Outcome {
            failed: self.failed.load(Ordering::Relaxed),
            error: self.error.lock().take(),
        };
        let done = self.done.lock().take().expect("only one part is the last");
        done(outcome);
    }

    /// What tells of part `index`.
    pub fn part(self: &Arc<Self>, index: usize) -> IoDone {
        let me = Arc::clone(self);
        Box::new(move |result| me.arrive(index, result))
    }
}

/// Starts `parts` parts with `start` and waits for all of them.
pub(super) fn wait_for(parts: usize, start: impl FnOnce(&Arc<Gather>)) -> Outcome {
    let (tell, told) = mpsc::sync_channel(1);
    let gather = Gather::new(
        parts,
        Box::new(move |outcome| tell.send(outcome).expect("the waiting thread waits")),
    );
    start(&gather);
    told.recv().expect("every request is told of once")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_completes_the_request_and_reports_every_failure() {
        let outcome = wait_for(3, |gather| {
            gather.arrive(2, Err(io::Error::from_raw_os_error(libc::EIO)));
            gather.arrive(0, Ok(()));
            gather.part(1)(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        });
        assert_eq!(outcome.failed, 0b110);
        assert_eq!(outcome.result().expect_err("two failed").raw_os_error(), Some(libc::EIO));
    }
}
