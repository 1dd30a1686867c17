//! Jitter: a small seeded generator, and the back-off that uses it.
//!
//! Not for secrets: those come from the system (`Secrets`).

use std::time::Duration;

/// `SplitMix64`.
#[derive(Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `bound`; 0 if that is 0.
    pub(crate) const fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// Between `low` and `high`.
    pub(crate) fn between(&mut self, low: Duration, high: Duration) -> Duration {
        let span = high.saturating_sub(low).as_nanos() as u64;
        low + Duration::from_nanos(self.below(span.saturating_add(1)))
    }
}

/// A pause that doubles with each failure from `first` up to `longest`, of which the later half is
/// random, so that clients that failed together do not come back together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    pub(crate) first: Duration,
    pub(crate) longest: Duration,
}

impl Backoff {
    /// The pause after the `failures`-th failure in a row, counted from 1.
    pub(crate) fn pause(self, failures: u32, rng: &mut Rng) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        let full = self.first.saturating_mul(1 << doublings).min(self.longest);
        rng.between(full / 2, full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_grows_to_its_bound_and_is_jittered() {
        let backoff =
            Backoff { first: Duration::from_millis(10), longest: Duration::from_millis(500) };
        let mut rng = Rng::new(7);
        let first = backoff.pause(1, &mut rng);
        assert!(first >= Duration::from_millis(5) && first <= Duration::from_millis(10));
        let pauses: Vec<_> = (0..50).map(|_| backoff.pause(40, &mut rng)).collect();
        assert!(pauses.iter().all(|pause| *pause >= Duration::from_millis(250)));
        assert!(pauses.iter().all(|pause| *pause <= Duration::from_millis(500)));
        let distinct: std::collections::BTreeSet<_> = pauses.iter().collect();
        assert!(distinct.len() > 40, "{} distinct pauses of 50", distinct.len());
    }
}
