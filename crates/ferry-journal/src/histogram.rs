//! How long something took, many times over: a small histogram of a fixed size that takes no lock.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Buckets for each power of two.
const STEPS: u64 = 4;
const BUCKETS: usize = 64 * STEPS as usize;

/// The histogram as it fills.
pub struct Times {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

/// What it holds. The percentiles are exact to a fourth: the upper end of the bucket, or the
/// maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimesStats {
    /// Number of times noted.
    pub count: u64,
    /// All of them together.
    pub sum: Duration,
    /// Half of them took at most so long.
    pub p50: Duration,
    /// 99 of 100.
    pub p99: Duration,
    /// 999 of 1000.
    pub p999: Duration,
    /// The longest of them.
    pub max: Duration,
    /// How many took at most so long, for each of [`TimesStats::BOUNDS_NS`].
    pub within: [u64; TimesStats::BOUNDS_NS.len()],
}

impl TimesStats {
    /// From 1 µs to 17 s, each four times the one before. Each is the end of a bucket, so the
    /// counts are exact.
    pub const BOUNDS_NS: [u64; 13] = {
        let mut bounds = [(1 << 10) - 1; 13];
        let mut at = 1;
        while at < bounds.len() {
            bounds[at] = (bounds[at - 1] + 1) * 4 - 1;
            at += 1;
        }
        bounds
    };
}

impl Default for Times {
    fn default() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
        }
    }
}

/// Times below `STEPS` ns have a bucket each; then each power of two is cut into `STEPS` equal
/// parts.
fn bucket(ns: u64) -> usize {
    if ns < STEPS {
        return ns as usize;
    }
    let octave = u64::from(ns.ilog2());
    let shift = octave - u64::from(STEPS.ilog2());
    ((shift + 1) * STEPS + (ns >> shift) % STEPS) as usize
}

/// The largest time in a bucket.
fn upper(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    let last = u128::from(STEPS + bucket % STEPS + 1) << shift;
    u64::try_from(last - 1).unwrap_or(u64::MAX)
}

impl Times {
    /// It took `time` once more.
    pub fn note(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(ns)].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(ns, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
    }

    /// What it holds now.
    pub fn read(&self) -> TimesStats {
        let counts: Vec<u64> = self.buckets.iter().map(|n| n.load(Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        let max = self.max_ns.load(Relaxed);
        let within = |per_mille: u64| {
            let rank = (count * per_mille).div_ceil(1000);
            let mut seen = 0;
            let found = counts.iter().position(|n| {
                seen += n;
                seen >= rank
            });
            Duration::from_nanos(found.map_or(0, upper).min(max))
        };
        if count == 0 {
            return TimesStats::default();
        }
        TimesStats {
            count,
            sum: Duration::from_nanos(self.sum_ns.load(Relaxed)),
            p50: within(500),
            p99: within(990),
            p999: within(999),
            max: Duration::from_nanos(max),
            within: TimesStats::BOUNDS_NS.map(|ns| counts[..=bucket(ns)].iter().sum()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_in_the_bucket_that_ends_at_or_above_it() {
        let mut ns = 0;
        while ns < 1 << 62 {
            let b = bucket(ns);
            assert!(upper(b) >= ns && (b == 0 || upper(b - 1) < ns), "{ns} in bucket {b}");
            assert!(upper(b) - ns <= ns / 4, "{ns}");
            ns += ns / 7 + 1;
        }
        assert_eq!(TimesStats::BOUNDS_NS.map(|ns| upper(bucket(ns))), TimesStats::BOUNDS_NS);
        assert_eq!(upper(bucket(u64::MAX)), u64::MAX);
    }

    #[test]
    fn percentiles_count_from_below() {
        let times = Times::default();
        assert_eq!(times.read(), TimesStats::default());
        (1..=1000).for_each(|us| times.note(Duration::from_micros(us)));
        let t = times.read();
        assert_eq!((t.count, t.sum), (1000, Duration::from_micros(500_500)));
        let close =
            |time: Duration, us: u64| (us * 1000..=us * 1250).contains(&(time.as_nanos() as u64));
        assert!(close(t.p50, 500) && close(t.p99, 990) && close(t.p999, 999), "{t:?}");
        assert_eq!(t.max, Duration::from_millis(1));
        assert_eq!(t.within[..7], [1, 4, 16, 65, 262, 1000, 1000], "up to 1.02, 4.10, 16.4 µs, …");
        let one = Times::default();
        one.note(Duration::from_nanos(1_000_001));
        assert_eq!((one.read().p50, one.read().p99), (one.read().max, one.read().max));
    }
}
