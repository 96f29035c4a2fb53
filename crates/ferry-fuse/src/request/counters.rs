//! Counts the requests of each kind, and those that failed.
//!
//! Each serving thread counts in a block of its own, so that counting shares no cache line; `stats`
//! adds the blocks up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
        }
    }

    fn slot(opcode: u32) -> usize {
        usize::try_from(opcode).ok().filter(|&i| i < OPS).unwrap_or(0)
    }

    pub(crate) fn request(&self, opcode: u32) {
        self.count[Self::slot(opcode)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn error(&self, opcode: u32) {
        self.errors[Self::slot(opcode)].fetch_add(1, Ordering::Relaxed);
    }
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

    /// `{"daemon": pid, "requests": n, "operations": {"lookup": {"count": n, "errors": n}, …}}`,
    /// without operations that never arrived.
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
                let both = [("count".into(), count.into()), ("errors".into(), errors.into())];
                operations.insert(name.into(), Value::Object(both.into_iter().collect()));
            }
        }
        let all = [
            ("daemon".into(), std::process::id().into()),
            ("requests".into(), requests.into()),
            ("operations".into(), operations.into()),
        ];
        Value::Object(all.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
