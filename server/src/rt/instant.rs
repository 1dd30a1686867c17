//! Points in time for openraft, the same arithmetic for both runtimes.
//!
//! The value is signed: openraft subtracts durations from early instants, and a machine that has
//! just booted has little to subtract from.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::time::Duration;

/// Where an instant's `now` comes from.
pub trait TimeSource: fmt::Debug + Copy + Ord + Send + Sync + Unpin + 'static {
    /// Nanoseconds of a clock that never steps back.
    fn now_ns() -> u64;
}

/// A point in time of the source `S`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RtInstant<S> {
    nanos: i64,
    source: PhantomData<S>,
}

impl<S: TimeSource> RtInstant<S> {
    /// From here to `later`; zero if that is past.
    pub fn until(self, later: Self) -> Duration {
        Duration::from_nanos(u64::try_from(later.nanos.saturating_sub(self.nanos)).unwrap_or(0))
    }

    /// This point on its source's clock, in nanoseconds; zero if it lies before the clock's start.
    pub fn as_nanos(self) -> u64 {
        u64::try_from(self.nanos).unwrap_or(0)
    }
}

impl<S: TimeSource> openraft_rt::Instant for RtInstant<S>
where
    S: std::panic::UnwindSafe + std::panic::RefUnwindSafe,
{
    fn now() -> Self {
        let nanos = i64::try_from(S::now_ns()).expect("a clock runs for less than 292 years");
        Self { nanos, source: PhantomData }
    }
}

fn signed(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

impl<S> fmt::Debug for RtInstant<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}s", self.nanos / 1_000_000_000, (self.nanos % 1_000_000_000).abs())
    }
}

impl<S> Add<Duration> for RtInstant<S> {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self { nanos: self.nanos.saturating_add(signed(duration)), ..self }
    }
}

impl<S> Sub<Duration> for RtInstant<S> {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self { nanos: self.nanos.saturating_sub(signed(duration)), ..self }
    }
}

impl<S: TimeSource> Sub for RtInstant<S> {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        earlier.until(self)
    }
}

impl<S: Copy> AddAssign<Duration> for RtInstant<S> {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl<S: Copy> SubAssign<Duration> for RtInstant<S> {
    fn sub_assign(&mut self, duration: Duration) {
        *self = *self - duration;
    }
}
