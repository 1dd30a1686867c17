//! Time, as validity is counted in: nanoseconds of a clock that never steps and, where the
//! platform has one, runs on through suspend (`CLOCK_BOOTTIME` on Linux).
//!
//! The only caller of the platform's clock. Everything else takes a `BootTime` as an argument, so
//! that the core runs on virtual time in tests.

use std::time::Duration;

/// A point on the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BootTime(pub(crate) u64);

impl BootTime {
    /// Later than every point that is reached.
    pub(crate) const NEVER: Self = Self(u64::MAX);

    /// Now.
    #[cfg(target_os = "linux")]
    pub(crate) fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Self(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }

    /// Now. This platform's clock may stand still while the machine is suspended: a hold can then
    /// look valid for as long as the machine slept.
    #[cfg(not(target_os = "linux"))]
    #[allow(clippy::disallowed_methods, reason = "this is the clock")]
    pub(crate) fn now() -> Self {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        let start = *START.get_or_init(std::time::Instant::now);
        Self(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// This point and `duration` more; `NEVER` where that does not fit.
    #[must_use]
    pub(crate) fn after(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }

    /// This point less `duration`.
    #[must_use]
    pub(crate) fn before(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(nanos))
    }

    /// From `earlier` to here; zero if `earlier` is not earlier.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// How much earlier than its lease a client stops believing: 0.5 % of the TTL, 20 ms at least.
/// It covers clock rates that differ by 500 ppm and the granularity of both sides (G3).
pub(crate) fn margin(ttl: Duration) -> Duration {
    (ttl / 200).max(Duration::from_millis(20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_has_a_floor() {
        assert_eq!(margin(Duration::from_secs(1)), Duration::from_millis(20));
        assert_eq!(margin(Duration::from_mins(10)), Duration::from_secs(3));
    }

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(BootTime(5).after(Duration::MAX), BootTime::NEVER);
        assert_eq!(BootTime(5).since(BootTime(7)), Duration::ZERO);
        assert_eq!(BootTime(5).before(Duration::from_nanos(9)), BootTime(0));
    }

    #[test]
    fn the_clock_does_not_go_back() {
        let first = BootTime::now();
        assert!(BootTime::now() >= first);
        assert!(first > BootTime(0));
    }
}
