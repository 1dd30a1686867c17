//! What belongs to one simulated machine: its clock, and whether its tasks may run.

use std::rc::Rc;
use std::time::Duration;

use super::super::channels::Notify;
use super::task::TaskId;

/// Names a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub(super) u32);

impl DomainId {
    /// The world's own domain: true time, never killed. The main future runs here.
    pub const ROOT: Self = Self(0);
}

/// One part in this many is the unit of a clock's rate error.
const PARTS: i128 = 1_000_000;

/// A clock that starts anywhere and runs a little fast or slow.
#[derive(Clone, Copy, Debug)]
pub(super) struct SkewedClock {
    base_true_ns: u64,
    base_local_ns: u64,
    rate_ppm: i128,
}

impl SkewedClock {
    pub(super) fn new(true_ns: u64, local_ns: u64, rate_ppm: i32) -> Self {
        let rate_ppm = i128::from(rate_ppm);
        assert!(rate_ppm > -PARTS, "a clock never stands still");
        Self { base_true_ns: true_ns, base_local_ns: local_ns, rate_ppm }
    }

    /// What the clock shows at true time `true_ns`.
    pub(super) fn local(&self, true_ns: u64) -> u64 {
        let passed = i128::from(true_ns) - i128::from(self.base_true_ns);
        let shown = i128::from(self.base_local_ns) + passed * (PARTS + self.rate_ppm) / PARTS;
        u64::try_from(shown).expect("a simulated clock is never before its start")
    }

    /// The earliest true time at which the clock shows at least `local_ns`.
    pub(super) fn true_at(&self, local_ns: u64) -> u64 {
        let ahead = i128::from(local_ns) - i128::from(self.base_local_ns);
        let rate = PARTS + self.rate_ppm;
        let passed = (ahead * PARTS).div_euclid(rate);
        let exact = (ahead * PARTS).rem_euclid(rate) == 0;
        let shown = i128::from(self.base_true_ns) + passed + i128::from(!exact);
        u64::try_from(shown.max(0)).unwrap_or(u64::MAX)
    }

    /// The same clock from now on at another rate.
    pub(super) fn at_rate(&self, true_ns: u64, rate_ppm: i32) -> Self {
        Self::new(true_ns, self.local(true_ns), rate_ppm)
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) alive: bool,
    clock: SkewedClock,
    /// What the clock shows while it stands still, and until when it does.
    frozen: Option<(u64, u64)>,
    /// Added to the wall clock, in milliseconds.
    pub(super) wall_offset_ms: i64,
    /// Its tasks do not run before this true time.
    pub(super) stunned_until_ns: u64,
    /// Tasks that became ready while the domain was stunned.
    pub(super) held_back: Vec<TaskId>,
    /// The domain is killed when this many more polls were made.
    pub(super) fuse: Option<u64>,
    /// Rings whenever the domain is killed.
    pub(super) killed: Rc<Notify>,
}

impl Domain {
    pub(super) fn new(clock: SkewedClock) -> Self {
        Self {
            alive: true,
            clock,
            frozen: None,
            wall_offset_ms: 0,
            stunned_until_ns: 0,
            held_back: Vec::new(),
            fuse: None,
            killed: Rc::new(Notify::new()),
        }
    }

    /// Counts one poll; true if the fuse has burnt down before it.
    pub(super) fn burn(&mut self) -> bool {
        match &mut self.fuse {
            Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        }
    }

    /// What the domain's clock shows.
    pub(super) fn local(&self, true_ns: u64) -> u64 {
        match self.frozen {
            Some((local_ns, until_ns)) if true_ns < until_ns => local_ns,
            _ => self.running_clock(u64::MAX).local(true_ns),
        }
    }

    /// What the domain's clock shows `duration` from now.
    pub(super) fn local_after(&self, true_ns: u64, duration: Duration) -> u64 {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.local(true_ns).saturating_add(nanos)
    }

    /// The earliest true time at which the clock shows at least `local_ns`, as things are.
    pub(super) fn true_at(&self, local_ns: u64) -> u64 {
        self.running_clock(u64::MAX).true_at(local_ns)
    }

    /// The clock as it runs after it stood still, until `true_ns` at most.
    fn running_clock(&self, true_ns: u64) -> SkewedClock {
        match self.frozen {
            Some((base_local_ns, until_ns)) => {
                SkewedClock { base_true_ns: until_ns.min(true_ns), base_local_ns, ..self.clock }
            }
            None => self.clock,
        }
    }

    /// The clock stands still until `until_ns`.
    pub(super) fn freeze(&mut self, true_ns: u64, until_ns: u64) {
        let before_ns = self.frozen.map_or(0, |(_, before_ns)| before_ns);
        self.frozen = Some((self.local(true_ns), until_ns.max(before_ns)));
    }

    /// The clock stands still no more.
    pub(super) fn thaw(&mut self, true_ns: u64) {
        self.clock = self.running_clock(true_ns);
        self.frozen = None;
    }

    /// From now on the clock runs at another rate; it stands still no more.
    pub(super) fn set_rate(&mut self, true_ns: u64, rate_ppm: i32) {
        self.thaw(true_ns);
        self.clock = self.clock.at_rate(true_ns, rate_ppm);
    }

    /// The clock shows `by_ns` more from now on.
    pub(super) fn jump(&mut self, true_ns: u64, by_ns: u64) {
        self.thaw(true_ns);
        self.clock.base_local_ns += by_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_never_early_on_its_own_clock() {
        for rate_ppm in [-500, -7, 0, 3, 500, 250_000] {
            let clock = SkewedClock::new(1_000_003, 77_000_000_019, rate_ppm);
            for local in (77_000_000_019..).step_by(999_983).take(1_000) {
                let true_ns = clock.true_at(local);
                assert!(clock.local(true_ns) >= local, "rate {rate_ppm}, local {local}");
                assert!(true_ns == 1_000_003 || clock.local(true_ns - 1) < local);
            }
        }
    }

    #[test]
    fn a_change_of_rate_does_not_step_the_clock() {
        let clock = SkewedClock::new(0, 5_000, 400);
        let changed = clock.at_rate(1_000_000_000, -400);
        assert_eq!(clock.local(1_000_000_000), changed.local(1_000_000_000));
        assert_eq!(changed.local(2_000_000_000) - changed.local(1_000_000_000), 999_600_000);
    }
}
