//! Callers that overwrite a block of their own file and fsync it, again and again.
//!
//! [`real`] does it in real time on any target. The rest of this module does it in virtual time:
//! the journal is the real one. The device and the callers are events of one queue, run by
//! one thread: what they take is added to a clock and not waited for, so counts and times are exact
//! and the same in every run. What the journal does besides (reads, checkpoints, its own computing)
//! takes no time.

pub mod real;
mod report;
mod run;

pub use crate::model::DeviceModel;
pub use run::{Load, Outcome, run};

use crate::error::BenchError;
use ferry_journal::FlushPolicy;
use std::time::Duration;

/// Numbers of callers of the grid.
pub const CALLERS: [u32; 6] = [1, 2, 4, 8, 16, 64];

/// One device and number of callers under each policy.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The device that the model describes.
    pub device: DeviceModel,
    /// The load of the callers.
    pub load: Load,
    /// One for each policy that was asked for, in that order.
    pub outcomes: Vec<(FlushPolicy, Outcome)>,
}

impl Cell {
    /// Runs the policies.
    pub fn run(
        device: DeviceModel,
        load: Load,
        policies: &[FlushPolicy],
        fast_flush: Duration,
    ) -> Result<Self, BenchError> {
        let one = |policy: &FlushPolicy| Ok((*policy, run(&device, &load, *policy, fast_flush)?));
        let outcomes = policies.iter().map(one).collect::<Result<_, BenchError>>()?;
        Ok(Self { device, load, outcomes })
    }

    /// What a policy came to, if it was run.
    pub fn of(&self, policy: FlushPolicy) -> Option<&Outcome> {
        self.outcomes.iter().find(|(p, _)| *p == policy).map(|(_, outcome)| outcome)
    }

    /// The highest rate of all.
    pub fn best(&self) -> f64 {
        self.outcomes.iter().map(|(_, outcome)| outcome.rate()).fold(0.0, f64::max)
    }
}
