//! A distribution that one core records into while another thread reads it, without a lock.
//!
//! Log-linear: values below 32 exactly, above that 32 steps per power of two, so a value is known
//! to 3 %. A record is two relaxed atomic additions. Whoever reads copies the counts and works on
//! the copy; counts of one copy may be a few records apart, never torn.

use std::sync::atomic::{AtomicU64, Ordering};

use hdrhistogram::Histogram as Hdr;

/// Steps per power of two, as a power of two.
const STEP_BITS: u32 = 5;
const STEPS: usize = 1 << STEP_BITS;
/// Values from here on count as the largest below it: 18 minutes in nanoseconds.
const VALUE_BITS: u32 = 40;
const VALUE_MAX: u64 = (1 << VALUE_BITS) - 1;
const SLOTS: usize = STEPS * (VALUE_BITS - STEP_BITS + 1) as usize;

/// Where a core records.
#[derive(Debug)]
pub(super) struct Recorder {
    slots: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Recorder {
    pub(super) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    pub(super) fn record(&self, value: u64) {
        let value = value.min(VALUE_MAX);
        self.slots[slot(value)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Takes over what is recorded elsewhere, a unit there being `scale` here. `hdr` must have
    /// everything since the start, so that no count ever falls.
    pub(super) fn follow(&self, hdr: &Hdr<u64>, scale: u64) {
        let mut counts = Counts::empty();
        for recorded in hdr.iter_recorded() {
            let value = recorded.value_iterated_to().saturating_mul(scale).min(VALUE_MAX);
            counts.slots[slot(value)] += recorded.count_since_last_iteration();
            counts.sum += value * recorded.count_since_last_iteration();
        }
        for (mine, count) in self.slots.iter().zip(&counts.slots) {
            mine.store(*count, Ordering::Relaxed);
        }
        self.sum.store(counts.sum, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> Counts {
        let slots = self.slots.iter().map(|slot| slot.load(Ordering::Relaxed)).collect();
        Counts { slots, sum: self.sum.load(Ordering::Relaxed) }
    }
}

/// A copy of what was recorded.
#[derive(Clone, Debug)]
pub(super) struct Counts {
    slots: Box<[u64]>,
    /// The sum of all values.
    pub(super) sum: u64,
}

impl Counts {
    pub(super) fn empty() -> Self {
        Self { slots: vec![0; SLOTS].into(), sum: 0 }
    }

    /// How many values.
    pub(super) fn total(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// How many values are at most `bound`, to the precision of a slot.
    pub(super) fn at_most(&self, bound: u64) -> u64 {
        let whole = |(index, _): &(usize, &u64)| slot_max(*index) <= bound;
        self.slots.iter().enumerate().take_while(whole).map(|(_, count)| count).sum()
    }

    /// Adds what another core recorded.
    pub(super) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.slots.iter_mut().zip(&other.slots) {
            *mine += theirs;
        }
        self.sum += other.sum;
    }

    /// What was recorded since `earlier`, for quantiles.
    pub(super) fn since(&self, earlier: &Self) -> Hdr<u64> {
        let mut hdr = Hdr::new_with_bounds(1, VALUE_MAX, 2).expect("the bounds are constant");
        for (index, (now, then)) in self.slots.iter().zip(&earlier.slots).enumerate() {
            let count = now.saturating_sub(*then);
            if count > 0 {
                hdr.record_n(slot_max(index), count).expect("no slot is above the bound");
            }
        }
        hdr
    }
}

fn slot(value: u64) -> usize {
    if value < STEPS as u64 {
        return value as usize;
    }
    let octave = value.ilog2() - STEP_BITS;
    let step = (value >> octave) as usize - STEPS;
    STEPS * (octave as usize + 1) + step
}

/// The largest value of a slot.
fn slot_max(index: usize) -> u64 {
    if index < STEPS {
        return index as u64;
    }
    let (octave, step) = (index / STEPS - 1, index % STEPS);
    (((STEPS + step + 1) as u64) << octave) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_follows_its_neighbour() {
        let mut low = 0;
        for index in 0..SLOTS {
            let high = slot_max(index);
            assert!((slot(low), slot(high)) == (index, index), "slot {index}: {low}..={high}");
            assert!(high - low <= low / STEPS as u64, "slot {index} is wider than 1/32");
            low = high + 1;
        }
        assert_eq!(low, VALUE_MAX + 1);
    }

    #[test]
    fn what_is_recorded_elsewhere_is_shown_as_if_it_were_here() {
        let (recorder, mut hdr) = (Recorder::new(), Hdr::new_with_max(60_000_000, 2).unwrap());
        for round in 1..=2 {
            hdr.record_n(90, 7).unwrap();
            hdr.record_n(60_000_000, 1).unwrap();
            recorder.follow(&hdr, 1000);
            let counts = recorder.counts();
            assert_eq!((counts.total(), counts.at_most(95_000)), (round * 8, round * 7));
            assert!(counts.sum.abs_diff(round * (7 * 90_000 + 60_000_000_000)) < counts.sum / 50);
        }
    }

    #[test]
    fn cores_merge_and_quantiles_cover_only_what_came_since() {
        let (a, b) = (Recorder::new(), Recorder::new());
        (0..100).for_each(|_| a.record(1_000_000));
        let earlier = a.counts();
        (1..=99).for_each(|_| a.record(20));
        b.record(u64::MAX);
        let mut all = a.counts();
        all.merge(&b.counts());
        assert_eq!(all.total(), 200);
        assert_eq!(all.sum, 100 * 1_000_000 + 99 * 20 + VALUE_MAX);
        assert_eq!((all.at_most(19), all.at_most(20), all.at_most(2_000_000)), (0, 99, 199));
        let recent = all.since(&earlier);
        assert_eq!((recent.len(), recent.value_at_quantile(0.5)), (100, 20));
        assert!(recent.max() >= VALUE_MAX / 2);
    }
}
