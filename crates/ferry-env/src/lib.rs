//! Time and randomness, injected so that tests and simulations decide them; and the bugs that tests
//! plant ([`planted`]).
//!
//! Every other crate takes an [`Env`]. `clippy.toml` forbids the calls that would go around it.
//! Real time and real randomness enter in this crate alone.

pub mod planted;

use std::sync::Arc;
use std::time::Duration;

use rustix::rand::GetRandomFlags;

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

/// The clock and the source of randomness that a volume, a client or a server runs on.
#[derive(Clone)]
pub struct Env {
    /// Where its time comes from.
    pub clock: Arc<dyn Clock>,
    /// Where its random numbers come from.
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
    fn next_u64(&self) -> u64 {
        let mut bytes = [0_u8; 8];
        // The kernel fills up to 256 bytes at once; only the wait for its first seed, at boot, can
        // be interrupted.
        let got = rustix::io::retry_on_intr(|| {
            rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())
        });
        assert_eq!(
            got,
            Ok(8),
            "getrandom(2) gives 8 bytes at once on any kernel that FUSE runs on"
        );
        u64::from_ne_bytes(bytes)
    }
}
