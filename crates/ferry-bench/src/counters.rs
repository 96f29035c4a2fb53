//! The cost of a turn: the differences of FerryFS's counters, and processor time.

use crate::error::BenchError;
use crate::target::{CpuTime, Target};
use serde_json::Value;

/// The counters and the processor time at one time.
pub struct Counters {
    stats: Option<Value>,
    cpu: CpuTime,
}

/// The difference between two times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spent {
    /// Processor time of the callers, and of the file system if it is in this process or a known
    /// daemon, in seconds.
    pub cpu_s: f64,
    /// Flushes of the device; `None`: the target is no FerryFS.
    pub flushes: Option<f64>,
    /// Contexts that became durable: commits.
    pub commits: Option<f64>,
}

impl Counters {
    /// The counters and the processor time of now.
    pub fn of(target: &Target) -> Result<Self, BenchError> {
        Ok(Self { stats: target.stats()?, cpu: target.cpu_time()? })
    }

    /// A counter of `ferry stats --json`, by its path: `/log/flushes`.
    pub fn get(&self, pointer: &str) -> Option<f64> {
        self.stats.as_ref()?.pointer(pointer)?.as_f64()
    }

    /// How much a counter has grown since an earlier time.
    pub fn grown(&self, earlier: &Self, pointer: &str) -> Option<f64> {
        Some(self.get(pointer)? - earlier.get(pointer)?)
    }

    /// What was spent since an earlier time.
    pub fn since(&self, earlier: &Self) -> Spent {
        Spent {
            cpu_s: self.cpu.total().saturating_sub(earlier.cpu.total()).as_secs_f64(),
            flushes: self.grown(earlier, "/log/flushes"),
            commits: self.grown(earlier, "/log/contexts"),
        }
    }
}
