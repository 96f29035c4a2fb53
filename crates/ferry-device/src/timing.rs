//! How long flushes take: an exponential average that policies of `force` and administrators read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A new sample counts for 1/256 of the average.
const WEIGHT_SHIFT: u32 = 8;
/// Samples are counted up to here.
const SAMPLES_MAX: u64 = 256;
/// Low bits of the packed word that hold the count of samples.
const SAMPLES_BITS: u32 = 9;
/// Longest flush that the packed word can hold, about 39 hours in nanoseconds.
const FLUSH_TIME_NS_MAX: u64 = (1 << (64 - SAMPLES_BITS - WEIGHT_SHIFT)) - 1;

const _: () = assert!(SAMPLES_MAX < 1 << SAMPLES_BITS);

/// What is known of a device's flushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushTiming {
    /// Average time of one flush; zero without samples.
    pub avg: Duration,
    /// Flushes seen since the last reset, counted up to 256.
    pub samples: u32,
}

impl FlushTiming {
    /// The slower of two components. One that no flush was sent to does not count.
    pub fn slower(self, other: Self) -> Self {
        if (other.samples > 0, other.avg) > (self.samples > 0, self.avg) { other } else { self }
    }
}

/// Averages flush times without a lock: the average (times 256, so that small differences are not
/// lost to rounding) and the count share one word.
#[derive(Debug, Default)]
pub struct FlushTimer(AtomicU64);

impl FlushTimer {
    /// Adds one flush that took `time`.
    pub fn record(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(FLUSH_TIME_NS_MAX);
        let add = |word: u64| {
            let (scaled, samples) = (word >> SAMPLES_BITS, word & ((1 << SAMPLES_BITS) - 1));
            let scaled = if samples == 0 {
                ns << WEIGHT_SHIFT
            } else {
                scaled - (scaled >> WEIGHT_SHIFT) + ns
            };
            Some(scaled << SAMPLES_BITS | (samples + 1).min(SAMPLES_MAX))
        };
        // Relaxed: the word carries all there is; nothing else is published by it.
        let updated = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        debug_assert!(updated.is_ok(), "the closure always gives a value");
    }

    /// The average and the count, of one moment.
    pub fn get(&self) -> FlushTiming {
        let word = self.0.load(Ordering::Relaxed);
        let ns = (word >> SAMPLES_BITS) >> WEIGHT_SHIFT;
        FlushTiming {
            avg: Duration::from_nanos(ns),
            samples: (word & ((1 << SAMPLES_BITS) - 1)) as u32,
        }
    }

    /// Forgets all samples; the next one sets the average.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_sample_sets_the_average_and_later_ones_weigh_1_in_256() {
        let timer = FlushTimer::default();
        assert_eq!(timer.get(), FlushTiming::default());
        timer.record(Duration::from_nanos(25_600));
        assert_eq!(timer.get(), FlushTiming { avg: Duration::from_nanos(25_600), samples: 1 });
        timer.record(Duration::from_nanos(51_200));
        assert_eq!(timer.get(), FlushTiming { avg: Duration::from_nanos(25_700), samples: 2 });
        timer.reset();
        assert_eq!(timer.get(), FlushTiming::default());
        timer.record(Duration::from_nanos(7));
        assert_eq!(timer.get(), FlushTiming { avg: Duration::from_nanos(7), samples: 1 });
    }

    #[test]
    fn samples_stop_at_256_and_the_average_goes_on() {
        let timer = FlushTimer::default();
        for _ in 0..300 {
            timer.record(Duration::from_micros(130));
        }
        assert_eq!(timer.get(), FlushTiming { avg: Duration::from_micros(130), samples: 256 });
        for _ in 0..10_000 {
            timer.record(Duration::from_millis(2));
        }
        let avg = timer.get().avg;
        assert!(avg > Duration::from_micros(1_999) && avg <= Duration::from_millis(2), "{avg:?}");
    }

    #[test]
    fn a_day_long_flush_does_not_overflow() {
        let timer = FlushTimer::default();
        for _ in 0..1_000 {
            timer.record(Duration::from_secs(u64::MAX));
        }
        assert_eq!(
            timer.get(),
            FlushTiming { avg: Duration::from_nanos(FLUSH_TIME_NS_MAX), samples: 256 }
        );
    }

    #[test]
    fn the_slower_component_counts_only_if_it_was_flushed() {
        let never = FlushTiming { avg: Duration::ZERO, samples: 0 };
        let fast = FlushTiming { avg: Duration::ZERO, samples: 1 };
        let slow = FlushTiming { avg: Duration::from_millis(16), samples: 9 };
        assert_eq!(never.slower(fast), fast);
        assert_eq!(fast.slower(never), fast);
        assert_eq!(fast.slower(slow), slow);
        assert_eq!(slow.slower(fast), slow);
    }
}
