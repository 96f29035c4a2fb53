//! What repeated measurements say: medians, and intervals that hold the truth with a stated probability.

use serde::Serialize;
use std::time::Duration;

/// Times in buckets whose borders are a tenth apart; the count of each, and the largest.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    max_ns: u64,
}

/// Buckets for each doubling: borders are 2^(1/8), 9 %, apart.
const BUCKETS_PER_DOUBLING: f64 = 8.0;

impl Histogram {
    /// Counts one.
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

    /// Takes over what another one has counted.
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

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The largest, in nanoseconds.
    pub fn max(&self) -> u64 {
        self.max_ns
    }

    /// The upper border of the bucket that holds the quantile `q`, in nanoseconds; never above the largest.
    pub fn quantile(&self, q: f64) -> u64 {
        let wanted = (q * self.count as f64).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted && *count > 0 {
                return ((2_f64.powf((bucket + 1) as f64 / BUCKETS_PER_DOUBLING)) as u64).min(self.max_ns);
            }
        }
        self.max_ns
    }
}

/// An estimate and the interval that holds the truth with the probability asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The middle one, or the mean of the two in the middle; `None` of nothing.
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

/// The ratio of what was measured in the same rounds: the mean of the logarithms, and Student's interval of it. `None` where there
/// are fewer than two rounds, or values that have no ratio.
pub fn ratio(of: &[f64], to: &[f64], confidence: f64) -> Option<Interval> {
    let rounds = of.len().min(to.len());
    let logs: Vec<f64> = of.iter().zip(to).map(|(of, to)| (of / to).ln()).collect();
    if rounds < 2 || logs.iter().any(|log| !log.is_finite()) {
        return None;
    }
    let mean = logs.iter().sum::<f64>() / rounds as f64;
    let squares = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>();
    let error = (squares / (rounds - 1) as f64 / rounds as f64).sqrt();
    let half = t_quantile(f64::midpoint(1.0, confidence), rounds as u32 - 1) * error;
    Some(Interval { value: mean.exp(), low: (mean - half).exp(), high: (mean + half).exp() })
}

/// The probability that Student's t with `freedom` degrees stays between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4).
fn t_within(t: f64, freedom: u32) -> f64 {
    let theta = (t / f64::from(freedom).sqrt()).atan();
    let (sin, cos) = theta.sin_cos();
    let odd = freedom % 2 == 1;
    let (mut term, mut sum) = if odd { (cos, if freedom > 1 { cos } else { 0.0 }) } else { (1.0, 1.0) };
    let mut k = if odd { 3 } else { 2 };
    while k + 2 <= freedom {
        term *= cos * cos * f64::from(k - 1) / f64::from(k);
        sum += term;
        k += 2;
    }
    if odd { std::f64::consts::FRAC_2_PI * (theta + sin * sum) } else { sin * sum }
}

/// The t below which Student's t with `freedom` degrees stays with this probability, of at least one half.
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
        let same = ratio(&[2.0, 4.0, 6.0], &[1.0, 2.0, 3.0], 0.95).expect("three rounds");
        close(same.value, 2.0);
        close(same.low, 2.0);
        close(same.high, 2.0);
        let e = std::f64::consts::E;
        let wide = ratio(&[1.0, e], &[1.0, 1.0], 0.95).expect("two rounds");
        close(wide.value, 0.5_f64.exp());
        close(wide.high, (0.5 + 12.706 * 0.5_f64).exp());
        assert_eq!(ratio(&[1.0], &[1.0], 0.95), None);
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
        assert_eq!((half.count(), half.max()), (1000, 1_000_000));
    }
}
