//! Counts the requests of each kind, and those that failed.
//!
//! Each serving thread counts in a block of its own, so that counting shares no cache line; `stats`
//! adds the blocks up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Map, Value};

use crate::abi;

/// One more than the highest operation code; others are counted as 0.
const OPS: usize = 64;

/// The counters of one thread.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ThreadCounters {
    /// Read by [`crate::request::idle_poll`].
    pub(crate) pace: RequestPace,
    count: [AtomicU64; OPS],
    errors: [AtomicU64; OPS],
    times: [OpTimes; OPS],
}

/// The upper ends of the buckets for times, in nanoseconds: from 1 µs to 17 s.
const BOUNDS_NS: [u64; 13] = {
    let mut bounds = [1 << 10; 13];
    let mut at = 1;
    while at < bounds.len() {
        bounds[at] = bounds[at - 1] * 4;
        at += 1;
    }
    bounds
};

/// How long requests of one kind took that were answered.
#[derive(Debug, Default)]
struct OpTimes {
    total_ns: AtomicU64,
    /// How many were in each bucket; the last is for longer ones.
    within: [AtomicU64; BOUNDS_NS.len() + 1],
}

/// How closely the requests of one thread follow each other.
#[derive(Debug, Default)]
pub(crate) struct RequestPace {
    /// Requests that the thread has served.
    pub(crate) total: AtomicU64,
    /// When the thread last read the clock, in microseconds.
    pub(crate) looked_at: AtomicU64,
}

impl ThreadCounters {
    fn new() -> Self {
        Self {
            pace: RequestPace::default(),
            count: std::array::from_fn(|_| AtomicU64::new(0)),
            errors: std::array::from_fn(|_| AtomicU64::new(0)),
            times: std::array::from_fn(|_| OpTimes::default()),
        }
    }

    fn slot(opcode: u32) -> usize {
        usize::try_from(opcode).ok().filter(|&i| i < OPS).unwrap_or(0)
    }

    pub(crate) fn request(&self, opcode: u32) {
        self.count[Self::slot(opcode)].fetch_add(1, Ordering::Relaxed);
    }

    /// A request was answered that took so long.
    pub(crate) fn answered(&self, opcode: u32, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let times = &self.times[Self::slot(opcode)];
        times.total_ns.fetch_add(ns, Ordering::Relaxed);
        times.within[bucket(ns)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn error(&self, opcode: u32) {
        self.errors[Self::slot(opcode)].fetch_add(1, Ordering::Relaxed);
    }
}

/// The first bucket that ends at `ns` or above it.
fn bucket(ns: u64) -> usize {
    let fours = ns.saturating_sub(1).checked_ilog2().map_or(0, |log| log / 2 + 1);
    (fours as usize).saturating_sub(5).min(BOUNDS_NS.len())
}

/// The counters of all threads of a mount.
#[derive(Debug, Default)]
pub(crate) struct MountCounters(Mutex<Vec<Arc<ThreadCounters>>>);

impl MountCounters {
    /// Adds a block.
    pub(crate) fn block(&self) -> Arc<ThreadCounters> {
        let block = Arc::new(ThreadCounters::new());
        self.0.lock().push(Arc::clone(&block));
        block
    }

    /// The blocks that exist now.
    pub(crate) fn blocks(&self) -> Vec<Arc<ThreadCounters>> {
        self.0.lock().clone()
    }

    /// `{"daemon": pid, "requests": n, "operations": {"lookup": {"count": n, "errors": n, …}, …}}`,
    /// without operations that never arrived. Buckets count all times up to their ends.
    pub(crate) fn json(&self) -> Value {
        let blocks = self.0.lock();
        let sum = |pick: &dyn Fn(&ThreadCounters) -> &AtomicU64| -> u64 {
            blocks.iter().map(|b| pick(b).load(Ordering::Relaxed)).sum()
        };
        let mut operations = Map::new();
        let mut requests = 0_u64;
        for i in 0..OPS {
            let count = sum(&|b| &b.count[i]);
            if count > 0 {
                requests += count;
                let name = abi::op_name(i as u32);
                let errors = sum(&|b| &b.errors[i]);
                let total_ns = sum(&|b| &b.times[i].total_ns);
                let (mut answered, mut buckets) = (0, Vec::new());
                for (at, bound) in BOUNDS_NS.iter().enumerate() {
                    answered += sum(&|b| &b.times[i].within[at]);
                    buckets.push(Value::from(vec![*bound, answered]));
                }
                answered += sum(&|b| &b.times[i].within[BOUNDS_NS.len()]);
                let average_ns = total_ns.checked_div(answered).unwrap_or(0);
                let times = object([
                    ("count", answered.into()),
                    ("total_ns", total_ns.into()),
                    ("buckets", buckets.into()),
                ]);
                let facts = object([
                    ("count", count.into()),
                    ("errors", errors.into()),
                    ("average_ns", average_ns.into()),
                    ("times", times),
                ]);
                operations.insert(name.into(), facts);
            }
        }
        object([
            ("daemon", std::process::id().into()),
            ("requests", requests.into()),
            ("operations", operations.into()),
        ])
    }
}

/// An object with these members.
pub(crate) fn object<const N: usize>(members: [(&str, Value); N]) -> Value {
    members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "tests may unwrap")]
    use super::*;
    use serde_json::json;

    #[test]
    fn blocks_are_summed_and_unknown_operations_counted_together() {
        let all = MountCounters::default();
        let (a, b) = (all.block(), all.block());
        a.request(abi::op::LOOKUP);
        b.request(abi::op::LOOKUP);
        b.error(abi::op::LOOKUP);
        b.request(u32::MAX);
        let json = all.json();
        assert_eq!(json["requests"], 3);
        assert_eq!(json["operations"]["lookup"]["count"], 2);
        assert_eq!(json["operations"]["lookup"]["errors"], 1);
        assert_eq!(json["operations"]["unknown"]["count"], 1);
        assert!(json["operations"].get("write").is_none());
    }

    #[test]
    fn each_time_is_in_the_first_bucket_that_ends_at_or_above_it() {
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BOUNDS_NS.len()));
        for (at, bound) in BOUNDS_NS.into_iter().enumerate() {
            assert_eq!((bucket(bound - 1), bucket(bound), bucket(bound + 1)), (at, at, at + 1));
        }
    }

    #[test]
    fn times_are_summed_and_their_buckets_count_all_below() {
        let all = MountCounters::default();
        let (a, b) = (all.block(), all.block());
        for (block, micros) in [(&a, 1), (&b, 3), (&b, 100), (&a, 20_000_000)] {
            block.request(abi::op::FSYNC);
            block.answered(abi::op::FSYNC, Duration::from_micros(micros));
        }
        let times = &all.json()["operations"]["fsync"]["times"];
        assert_eq!((&times["count"], &times["total_ns"]), (&json!(4), &json!(20_000_104_000_u64)));
        assert_eq!(times["buckets"][0], json!([1024, 1]));
        assert_eq!(times["buckets"][1], json!([4096, 2]));
        assert_eq!(times["buckets"][12], json!([BOUNDS_NS[12], 3]), "one took longer");
    }
}
