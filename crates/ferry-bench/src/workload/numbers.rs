//! Numbers that look random and follow from a seed.

use ferry_env::Entropy;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// splitmix64 (Steele, Lea and Flood, 2014).
pub struct Numbers(AtomicU64);

impl Numbers {
    /// Numbers that follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// A time below `bound`.
    pub fn below(&self, bound: Duration) -> Duration {
        let bound = bound.as_nanos() as u64;
        if bound == 0 { Duration::ZERO } else { Duration::from_nanos(self.next_u64() % bound) }
    }
}

impl Entropy for Numbers {
    fn next_u64(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
