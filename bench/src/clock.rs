//! The harness's clock: the only place of this crate that asks the operating system for the time.
//!
//! All processes of one machine read the same clock, so times of different processes compare.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_BOOTTIME`, the clock that Leasehold's clients count by.
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A point in time after which something has taken too long.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(u64);

impl Deadline {
    /// From now on.
    pub fn after(duration: Duration) -> Self {
        Self(now_ns().saturating_add(duration.as_nanos() as u64))
    }

    /// True once it passed.
    pub fn passed(self) -> bool {
        now_ns() >= self.0
    }

    /// What is left; zero once it passed.
    pub fn left(self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(now_ns()))
    }
}

/// Milliseconds of a span of nanoseconds, for people.
pub fn to_ms(nanos: u64) -> f64 {
    nanos as f64 / 1e6
}
