//! Time for the terms of leases. Neither clock of a machine suffices: the monotonic one stands
//! still while the machine sleeps, and the wall clock may be set. So both are read, and the longer
//! distance counts.

use std::time::Duration;

use ferry_env::Clock;

/// The readings of both clocks at one time.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockReading {
    pub(super) monotonic: Duration,
    wall: Duration,
}

impl ClockReading {
    pub(super) fn now(clock: &dyn Clock) -> Self {
        Self { monotonic: clock.monotonic(), wall: clock.wall() }
    }

    #[cfg(test)]
    pub(super) fn at(time: Duration) -> Self {
        Self { monotonic: time, wall: time }
    }

    pub(super) fn since(self, earlier: Self) -> Duration {
        let slept = self.wall.saturating_sub(earlier.wall);
        self.monotonic.saturating_sub(earlier.monotonic).max(slept)
    }
}
