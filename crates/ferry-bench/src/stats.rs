//! Statistics of repeated measurements: medians, and intervals that hold the true value with a
//! stated probability.

use serde::Serialize;
use std::time::Duration;

/// A histogram of times, with bucket borders about a tenth apart, and the largest time.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    max_ns: u64,
}

/// Buckets for each doubling: borders are 2^(1/8), 9 %, apart.
const BUCKETS_PER_DOUBLING: f64 = 8.0;

impl Histogram {
    /// Adds one time.
    pub fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = ((ns.max(1) as f64).log2() * BUCKETS_PER_DOUBLING) as usize;
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.count += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        if other.counts.len() > self.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.count += other.count;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The number of times counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The upper border of the bucket that holds the quantile `q`, in nanoseconds; never above the
    /// largest.
    pub fn quantile(&self, q: f64) -> u64 {
        let wanted = (q * self.count as f64).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted && *count > 0 {
                return ((2_f64.powf((bucket + 1) as f64 / BUCKETS_PER_DOUBLING)) as u64)
                    .min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// The same in milliseconds; `quantile_ms(1.0)` is the largest time.
    pub fn quantile_ms(&self, q: f64) -> f64 {
        self.quantile(q) as f64 / 1e6
    }
}

/// With fewer rounds an interval means nothing: Student's t of one degree of freedom makes it span
/// many orders of magnitude.
pub const INTERVAL_ROUNDS_MIN: usize = 5;

/// An estimate and, with enough rounds, the interval that holds the true value with the requested
/// probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The estimated value.
    pub value: f64,
    /// The interval; `None` below [`INTERVAL_ROUNDS_MIN`] rounds.
    pub interval: Option<Interval>,
}

/// The two ends of an interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// The median: the middle value, or the mean of the two in the middle; `None` if there are no
/// values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// The ratio of what was measured in the same rounds: the mean of the logarithms, and Student's
/// interval of it. `None` where there are fewer than two rounds, or values that have no ratio.
pub fn ratio(of: &[f64], to: &[f64], confidence: f64) -> Option<Ratio> {
    let rounds = of.len().min(to.len());
    let logs: Vec<f64> = of.iter().zip(to).map(|(of, to)| (of / to).ln()).collect();
    if rounds < 2 || logs.iter().any(|log| !log.is_finite()) {
        return None;
    }
    let mean = logs.iter().sum::<f64>() / rounds as f64;
    let interval = || {
        let squares = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>();
        let error = (squares / (rounds - 1) as f64 / rounds as f64).sqrt();
        let half = t_quantile(f64::midpoint(1.0, confidence), rounds as u32 - 1) * error;
        Interval { low: (mean - half).exp(), high: (mean + half).exp() }
    };
    Some(Ratio { value: mean.exp(), interval: (rounds >= INTERVAL_ROUNDS_MIN).then(interval) })
}

/// The probability that Student's t with `freedom` degrees stays between -t and t (Abramowitz and
/// Stegun, 26.7.3 and 26.7.4).
fn t_within(t: f64, freedom: u32) -> f64 {
    let theta = (t / f64::from(freedom).sqrt()).atan();
    let (sin, cos) = theta.sin_cos();
    let odd = freedom % 2 == 1;
    let (mut term, mut sum) =
        if odd { (cos, if freedom > 1 { cos } else { 0.0 }) } else { (1.0, 1.0) };
    let mut k = if odd { 3 } else { 2 };
    while k + 2 <= freedom {
        term *= cos * cos * f64::from(k - 1) / f64::from(k);
        sum += term;
        k += 2;
    }
    if odd { std::f64::consts::FRAC_2_PI * (theta + sin * sum) } else { sin * sum }
}

/// The t below which Student's t with `freedom` degrees stays with this probability, of at least
/// one half.
fn t_quantile(probability: f64, freedom: u32) -> f64 {
    let within = 2.0 * probability - 1.0;
    let (mut low, mut high) = (0.0, 1.0);
    while t_within(high, freedom) < within && high < 1e12 {
        high *= 2.0;
    }
    for _ in 0..100 {
        let middle = f64::midpoint(low, high);
        if t_within(middle, freedom) < within { low = middle } else { high = middle }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-3, "{found} is not {expected}");
    }

    #[test]
    fn students_t_is_that_of_the_tables() {
        for (probability, freedom, expected) in [
            (0.975, 1, 12.706),
            (0.975, 2, 4.303),
            (0.975, 4, 2.776),
            (0.975, 9, 2.262),
            (0.995, 3, 5.841),
            (0.95, 10, 1.812),
            (0.995, 30, 2.750),
        ] {
            close(t_quantile(probability, freedom), expected);
        }
    }

    #[test]
    fn medians_and_ratios() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        let same = ratio(&[2.0, 4.0, 6.0, 8.0, 10.0], &[1.0, 2.0, 3.0, 4.0, 5.0], 0.95)
            .expect("five rounds");
        close(same.value, 2.0);
        let interval = same.interval.expect("five rounds have one");
        close(interval.low, 2.0);
        close(interval.high, 2.0);
        let e = std::f64::consts::E;
        let wide = ratio(&[1.0, e, 1.0, e, 1.0, e], &[1.0; 6], 0.95).expect("six rounds");
        close(wide.value, 0.5_f64.exp());
        // The standard error of three zeros and three ones is the root of 0.3 / 6; Student's t of
        // five degrees is 2.571.
        close(
            wide.interval.expect("six rounds have one").high,
            (0.5 + 2.571 * 0.05_f64.sqrt()).exp(),
        );
        assert_eq!(ratio(&[1.0], &[1.0], 0.95), None);
        let few = ratio(&[2.0; 4], &[1.0; 4], 0.95).expect("four rounds");
        assert_eq!(few.interval, None, "four rounds are too few for an interval");
        assert_eq!(ratio(&[1.0, 0.0], &[1.0, 1.0], 0.95), None);
    }

    #[test]
    fn quantiles_are_within_a_bucket() {
        let mut times = Histogram::default();
        (1..=1000).for_each(|us| times.add(Duration::from_micros(us)));
        let mut half = Histogram::default();
        half.merge(&times);
        for (q, expected) in [(0.5, 500_000.0), (0.99, 990_000.0), (1.0, 1_000_000.0)] {
            let found = half.quantile(q) as f64;
            assert!((expected..expected * 1.1).contains(&(found + 1.0)), "{q}: {found}");
        }
        assert_eq!((half.count(), half.quantile(1.0)), (1000, 1_000_000));
    }
}
