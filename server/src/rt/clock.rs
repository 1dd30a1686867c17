//! The operating system's clocks. Nothing else in the server asks for the time.

use openraft_rt::Instant as _;
use rustix::time::{ClockId, clock_gettime};

use super::instant::{RtInstant, TimeSource};
use crate::env::{Clock, MonoTime};

/// `CLOCK_BOOTTIME`: never steps and runs through suspend, so that a lease is not longer for its
/// server than for a client that stayed awake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct OsClock;

impl Clock for OsClock {
    fn now(&self) -> MonoTime {
        MonoTime(Self::now_ns())
    }

    fn wall_ms(&self) -> u64 {
        let time = clock_gettime(ClockId::Realtime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        seconds * 1_000 + time.tv_nsec as u64 / 1_000_000
    }
}

impl TimeSource for OsClock {
    fn now_ns() -> u64 {
        let time = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).expect("time since boot is positive");
        seconds * 1_000_000_000 + time.tv_nsec as u64
    }
}

/// A point on `CLOCK_BOOTTIME`.
pub type OsInstant = RtInstant<OsClock>;

/// How long until `deadline`.
pub(super) fn time_left(deadline: OsInstant) -> std::time::Duration {
    OsInstant::now().until(deadline)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn arithmetic_holds_before_the_clock_began() {
        let now = OsInstant::now();
        let century = Duration::from_hours(24 * 365 * 100);
        let long_ago = now - century;
        assert!(long_ago < now);
        assert_eq!(now - long_ago, century);
        assert_eq!(long_ago - now, Duration::ZERO);
        assert_eq!(long_ago + century, now);
        assert_eq!(long_ago.as_nanos(), 0);
    }

    #[test]
    fn the_wall_clock_is_past_this_code_s_birth() {
        let clock = OsClock;
        assert!(clock.wall_ms() > 1_700_000_000_000);
        let first = clock.now();
        assert!(clock.now() >= first);
        assert!(first > MonoTime(0));
    }
}
