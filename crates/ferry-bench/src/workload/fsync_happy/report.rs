//! A cell as JSON; times in nanoseconds.

use super::{Cell, Outcome};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Serialize)]
struct CellReport {
    flush_time_ns: u64,
    write_time_ns: u64,
    queue_depth: u32,
    serial_flushes: bool,
    callers: u32,
    think_time_ns: u64,
    jitter_ns: u64,
    policies: BTreeMap<&'static str, OutcomeReport>,
}

#[derive(Serialize)]
struct OutcomeReport {
    fsyncs: u64,
    time_ns: u64,
    fsyncs_per_s: f64,
    flushes: u64,
    callers_per_flush: f64,
    holds: u64,
    holds_in_vain: u64,
}

impl OutcomeReport {
    fn new(outcome: &Outcome) -> Self {
        Self {
            fsyncs: outcome.fsyncs,
            time_ns: nanos(outcome.time),
            fsyncs_per_s: outcome.rate(),
            flushes: outcome.flushes,
            callers_per_flush: outcome.callers_per_flush(),
            holds: outcome.holds,
            holds_in_vain: outcome.holds_in_vain,
        }
    }
}

impl Cell {
    /// The cell as a JSON object.
    pub fn to_json(&self) -> serde_json::Value {
        let outcomes = self.outcomes.iter();
        let report = CellReport {
            flush_time_ns: nanos(self.device.flush_time),
            write_time_ns: nanos(self.device.write_time),
            queue_depth: self.device.queue_depth,
            serial_flushes: self.device.serial_flushes,
            callers: self.load.callers,
            think_time_ns: nanos(self.load.think_time),
            jitter_ns: nanos(self.load.jitter),
            policies: outcomes.map(|(policy, o)| (policy.name(), OutcomeReport::new(o))).collect(),
        };
        serde_json::to_value(report).expect("plain numbers and strings are JSON")
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
