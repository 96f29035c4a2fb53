//! Time and randomness, injected so that tests and simulations decide them; the bugs that tests
//! plant ([`planted`]); and what each thread does at the moment ([`activity`]).
//!
//! Every other crate takes an [`Env`]. `clippy.toml` forbids the calls that would go around it.
//! Real time and real randomness enter in this crate alone.

pub mod activity;
pub mod planted;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustix::rand::GetRandomFlags;

/// Where time comes from.
pub trait Clock: Send + Sync {
    /// Monotonic time since an arbitrary start. It stands still while the machine sleeps.
    fn monotonic(&self) -> Duration;
    /// The same with the time that the machine sleeps; the start is another one. Simulated machines
    /// do not sleep.
    fn monotonic_with_sleep(&self) -> Duration {
        self.monotonic()
    }
    /// Wall-clock time since the Unix epoch.
    fn wall(&self) -> Duration;
}

/// Where randomness comes from.
pub trait Entropy: Send + Sync {
    /// A number that no one can guess (or, in a simulation, that follows from the seed).
    fn next_u64(&self) -> u64;
}

/// A time as the calendar and the clock show it in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc {
    /// The year of our era.
    pub year: u64,
    /// 1 to 12.
    pub month: u64,
    /// 1 to 31.
    pub day: u64,
    /// 0 to 23.
    pub hour: u64,
    /// 0 to 59.
    pub minute: u64,
    /// 0 to 59.
    pub second: u64,
}

impl Utc {
    /// From seconds since the Unix epoch.
    pub fn from_secs(secs: u64) -> Self {
        let (days, rest) = (secs / 86_400, secs % 86_400);
        // Howard Hinnant's civil_from_days: eras of 400 years that begin in March, so that a leap
        // day is a year's last day.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        Self { year, month, day, hour: rest / 3600, minute: rest / 60 % 60, second: rest % 60 }
    }
}

/// As `2026-11-26 21:31:14 UTC`.
impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { year, month, day, hour, minute, second } = self;
        write!(f, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
    }
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

    fn monotonic_with_sleep(&self) -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Duration::try_from(time).expect("no time before the boot")
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
