//! Latencies: recorded without loss in an HDR histogram, summed up in microseconds.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Longest latency told apart, in nanoseconds; longer ones count as this.
const LATENCY_NS_MAX: u64 = 600_000_000_000;

/// Latencies of one kind of operation.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3);
        Self(histogram.expect("the bounds are in order"))
    }
}

impl Latencies {
    /// Takes one, in nanoseconds.
    pub fn record(&mut self, nanos: u64) {
        self.0.saturating_record(nanos.max(1));
    }

    /// Takes all of another's.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// How many.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// True if none was taken.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sum-up.
    pub fn summary(&self) -> Summary {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e3;
        Summary {
            count: self.len(),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: if self.is_empty() { 0.0 } else { self.0.max() as f64 / 1e3 },
        }
    }
}

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// How many.
    pub count: u64,
    /// Half of them are at most this.
    pub p50_us: f64,
    /// Nine of ten.
    pub p90_us: f64,
    /// 99 of 100.
    pub p99_us: f64,
    /// 999 of 1,000.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |us: f64| us / 1e3;
        write!(
            f,
            "p50 {:.3} ms, p99 {:.3} ms, p999 {:.3} ms, max {:.1} ms",
            ms(self.p50_us),
            ms(self.p99_us),
            ms(self.p999_us),
            ms(self.max_us)
        )
    }
}

/// Errors by name.
pub type Errors = BTreeMap<String, u64>;

/// The index of the median of some values, by one of their figures.
pub fn median_index<T>(items: &[T], figure: impl Fn(&T) -> f64) -> Option<usize> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by(|a, b| figure(&items[*a]).total_cmp(&figure(&items[*b])));
    order.get(order.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_values() {
        let mut latencies = Latencies::default();
        (1..=1000).for_each(|us| latencies.record(us * 1000));
        let summary = latencies.summary();
        assert!((summary.p50_us - 500.0).abs() < 1.0, "{summary:?}");
        assert!((summary.p99_us - 990.0).abs() < 1.0, "{summary:?}");
        assert!((summary.max_us - 1000.0).abs() < 1.0, "{summary:?}");
    }

    #[test]
    fn the_median_is_one_of_the_items() {
        assert_eq!(median_index(&[3.0, 1.0, 2.0], |x| *x), Some(2));
        assert_eq!(median_index(&[4.0, 1.0, 3.0, 2.0], |x| *x), Some(3));
        assert_eq!(median_index(&[], |x: &f64| *x), None);
    }
}
