//! The thread that ends holds in time. It does nothing else, so that no checkpoint and no merge
//! delays it. While the background thread makes a checkpoint, which may take longer than a commit
//! interval, this thread also seals in time, and serves waiters for log space that are overdue.

use super::background::OVERDUE_LOOK;
use super::core::Core;
use ferry_env::activity::{self, Operation};
use std::sync::Arc;
use std::time::Duration;

impl Core {
    /// The loop of the thread. The thread that drives the pipe looks at the time again, and arms
    /// the timer again if the hold continues. A checkpoint arms the timer as it begins.
    pub fn run_holds(self: &Arc<Self>) {
        while self.hold_timer.wait(|| self.env.clock.monotonic()) {
            let _doing = activity::begin(Operation::Journal);
            self.drive();
            if self.checkpointing.is_locked() && self.failure().is_none() {
                let left = self.seal_in_time().unwrap_or(OVERDUE_LOOK).min(OVERDUE_LOOK);
                self.space.serve_overdue();
                self.hold_timer.arm(self.env.clock.monotonic() + left);
            }
        }
    }

    /// Time until a hold ends or the open context must be sealed; `None` if neither is due.
    pub fn next_due(&self) -> Option<Duration> {
        let held_until = self.pipe.lock().held_until;
        let seal_at = {
            let head = self.head.read();
            (!head.is_empty()).then(|| head.since + self.options.commit_interval)
        };
        let due = held_until.into_iter().chain(seal_at).min()?;
        Some(due.saturating_sub(self.env.clock.monotonic()))
    }
}
