//! How many requests of each kind came, and how many failed.
//!
//! Each serving thread counts in a block of its own, so that counting shares no cache line; `stats` adds them up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde_json::{Map, Value};

use crate::abi;

/// One more than the highest operation code; others are counted as 0.
const OPS: usize = 64;

/// One thread's counters.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Counters {
    /// For [`crate::idle`].
    pub(crate) pace: Pace,
    count: [AtomicU64; OPS],
    errors: [AtomicU64; OPS],
}

/// How closely one thread's requests come.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Requests.
    pub(crate) total: AtomicU64,
    /// When the clock was last looked at.
    pub(crate) looked_at: AtomicU64,
}

impl Counters {
    fn new() -> Self {
        Self {
            pace: Pace::default(),
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

/// All threads' counters.
#[derive(Debug, Default)]
pub(crate) struct AllCounters(Mutex<Vec<Arc<Counters>>>);

impl AllCounters {
    /// A new block, counted in from now on.
    pub(crate) fn block(&self) -> Arc<Counters> {
        let block = Arc::new(Counters::new());
        self.0.lock().push(Arc::clone(&block));
        block
    }

    /// Those that are there now.
    pub(crate) fn blocks(&self) -> Vec<Arc<Counters>> {
        self.0.lock().clone()
    }

    /// `{"daemon": pid, "requests": n, "operations": {"lookup": {"count": n, "errors": n}, …}}`, without those that never came.
    pub(crate) fn json(&self) -> Value {
        let blocks = self.0.lock();
        let sum = |pick: &dyn Fn(&Counters) -> &AtomicU64| -> u64 {
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
        let all = AllCounters::default();
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
