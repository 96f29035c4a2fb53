//! Randomness and time that follow from a seed.

use ferry_env::{Clock, Entropy, Env};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Where simulated wall-clock time starts: some day in 2023, in seconds since the Unix epoch.
const WALL_START_S: u64 = 1_700_000_000;

/// A small, fast random number generator: xoshiro256** (Blackman and Vigna, 2018), seeded through
/// splitmix64.
#[derive(Clone, Debug)]
pub struct SimRng([u64; 4]);

impl SimRng {
    /// A generator whose numbers follow from `seed`.
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        Self(std::array::from_fn(|_| splitmix64(&mut state)))
    }

    /// A number of 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= shifted;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number in `0..bound`.
    ///
    /// # Panics
    /// When `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "no number is below zero");
        // The high half of the product; its bias (below 2^-32 for any bound that a test uses) does
        // not matter here.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `0..len`, to index with.
    ///
    /// # Panics
    /// When `len` is zero.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True `times` out of `of`.
    pub fn chance(&mut self, times: u64, of: u64) -> bool {
        self.below(of) < times
    }

    /// One of them.
    ///
    /// # Panics
    /// When there is none.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.index(from.len())]
    }

    /// Fills with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }

    /// Another generator, independent of what this one gives later.
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }
}

fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Time that stands still until it is moved.
#[derive(Debug, Default)]
pub struct SimClock(Mutex<Duration>);

impl SimClock {
    /// Lets time pass.
    pub fn advance(&self, time: Duration) {
        *self.0.lock() += time;
    }
}

impl Clock for SimClock {
    fn monotonic(&self) -> Duration {
        *self.0.lock()
    }

    fn wall(&self) -> Duration {
        Duration::from_secs(WALL_START_S) + self.monotonic()
    }
}

/// Random numbers that follow from a seed.
#[derive(Debug)]
pub struct SimEntropy(Mutex<SimRng>);

impl SimEntropy {
    /// Takes its numbers from `rng`.
    pub fn new(rng: SimRng) -> Self {
        Self(Mutex::new(rng))
    }
}

impl Entropy for SimEntropy {
    fn next_u64(&self) -> u64 {
        self.0.lock().next_u64()
    }
}

/// A whole simulated world, and the handle that moves its time.
pub fn sim_env(seed: u64) -> (Env, Arc<SimClock>) {
    let clock = Arc::new(SimClock::default());
    let entropy = Arc::new(SimEntropy::new(SimRng::new(seed)));
    (Env { clock: clock.clone(), entropy }, clock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generators_are_the_published_ones() {
        assert_eq!(splitmix64(&mut 0), 0xe220_a839_7b1d_cdaf);
        let mut rng = SimRng([1, 2, 3, 4]);
        let first: Vec<_> = (0..4).map(|_| rng.next_u64()).collect();
        assert_eq!(first, [11520, 0, 1_509_978_240, 1_215_971_899_390_074_240]);
    }
}
