//! Time and randomness, injected so that tests and simulations decide them.

use std::sync::Arc;
use std::time::Duration;

/// Where time comes from.
pub trait Clock: Send + Sync {
    /// Monotonic time since an arbitrary start.
    fn monotonic(&self) -> Duration;
    /// Wall-clock time since the Unix epoch.
    fn wall(&self) -> Duration;
}

/// Where randomness comes from.
pub trait Entropy: Send + Sync {
    /// A number that no one can guess (or, in a simulation, that follows from the seed).
    fn next_u64(&self) -> u64;
}

/// The world outside, as one handle.
#[derive(Clone)]
pub struct Env {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
}

impl Env {
    /// The real clock and the kernel's random numbers.
    pub fn real() -> Self {
        Self { clock: Arc::new(RealClock::new()), entropy: Arc::new(KernelEntropy) }
    }
}

struct RealClock {
    start: std::time::Instant,
}

impl RealClock {
    #[expect(clippy::disallowed_methods, reason = "the one place where real time enters")]
    fn new() -> Self {
        Self { start: std::time::Instant::now() }
    }
}

impl Clock for RealClock {
    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }

    #[expect(clippy::disallowed_methods, reason = "the one place where real time enters")]
    fn wall(&self) -> Duration {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
    }
}

struct KernelEntropy;

impl Entropy for KernelEntropy {
    #[expect(unsafe_code, reason = "getrandom(2) has no safe wrapper in libc")]
    fn next_u64(&self) -> u64 {
        let mut bytes = [0_u8; 8];
        // SAFETY: the pointer and length describe `bytes`, which outlives the call.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        assert_eq!(got, 8, "getrandom(2) gives 8 bytes at once on any kernel that FUSE runs on");
        u64::from_ne_bytes(bytes)
    }
}
