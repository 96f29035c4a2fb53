//! Keeps a scrub below its rate.

use ferry_env::{Clock, Env};
use std::sync::Arc;
use std::time::Duration;

/// Bytes are paid for after they were read: a scrub that has read `n` of them waits until the rate
/// would have given them. Time that was not used is not saved up, so no second sees more than the
/// rate and one read.
pub(crate) struct Pace {
    clock: Arc<dyn Clock>,
    rate: Option<u64>,
    /// When the next read may begin.
    due: Duration,
}

impl Pace {
    pub(crate) fn new(rate: Option<u64>, env: &Env) -> Self {
        let clock = env.clock.clone();
        let due = clock.monotonic();
        Self { clock, rate: rate.map(|rate| rate.max(1)), due }
    }

    /// A read of so many bytes is done, which began when it was due or later: how long to wait
    /// before the next one.
    pub(crate) fn took(&mut self, bytes: u64) -> Option<Duration> {
        let rate = self.rate?;
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        self.due += Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let now = self.clock.monotonic();
        match self.due.checked_sub(now).filter(|left| !left.is_zero()) {
            Some(left) => Some(left),
            None => {
                self.due = now;
                None
            }
        }
    }
}
