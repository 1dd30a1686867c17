//! What a guard reads without taking the core's lock: until when its hold is valid, and how it
//! ended.
//!
//! A reader compares with the clock at each call, so a process that slept past the end sees the
//! end in the first call after it wakes, whatever its timers did. What was once seen as lost stays
//! lost: the reader latches it, and the core looks for the latch before it extends anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use leasehold_protocol::ids::{Mode, Token};

use crate::clock::BootTime;

/// Why a hold is not known to last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RiskCause {
    /// The renewal is overdue and nothing is known about why: its answer has not come, or this
    /// process was not running.
    Late,
    /// No node could be reached.
    Unreachable,
    /// A node answers, but the cluster has no majority or no leader.
    NoQuorum,
    /// The cluster is about to end the lease.
    Expiring,
    /// An operator forced the hold's end; it is passed on when its validity runs out.
    Forced,
    /// The hold has a lease of its own, which is renewed only when asked.
    NotRenewed,
}

impl RiskCause {
    const ALL: [Self; 6] = [
        Self::Late,
        Self::Unreachable,
        Self::NoQuorum,
        Self::Expiring,
        Self::Forced,
        Self::NotRenewed,
    ];

    /// The name in JSON and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Unreachable => "unreachable",
            Self::NoQuorum => "no_quorum",
            Self::Expiring => "expiring",
            Self::Forced => "forced",
            Self::NotRenewed => "not_renewed",
        }
    }

    fn from_byte(byte: u8) -> Self {
        Self::ALL.into_iter().find(|cause| *cause as u8 == byte).unwrap_or(Self::Late)
    }
}

/// Why a hold was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossCause {
    /// Its validity ended before a renewal was acknowledged.
    Expired,
    /// The cluster said that the lease is dead.
    LeaseDead,
    /// An operator ended it.
    Forced,
    /// The session was closed.
    SessionClosed,
}

impl LossCause {
    const ALL: [Self; 4] = [Self::Expired, Self::LeaseDead, Self::Forced, Self::SessionClosed];

    /// The name in JSON and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::LeaseDead => "lease_dead",
            Self::Forced => "forced",
            Self::SessionClosed => "session_closed",
        }
    }
}

/// What a holder may believe at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldState {
    /// Held, and renewed in time.
    Held,
    /// Still held, but more than half of the TTL passed without an acknowledged renewal, or its
    /// end is decided.
    AtRisk {
        /// Why.
        cause: RiskCause,
        /// How long it is valid if nothing changes.
        remaining: Duration,
    },
    /// Not held any more; it never comes back.
    Lost(LossCause),
}

const LIVE: u8 = 0;
const RELEASED: u8 = 1;
const LOST: u8 = 2;

/// A lease's validity.
#[derive(Debug)]
pub(crate) struct LeaseCell {
    valid_until: AtomicU64,
    ttl_ns: u64,
    cause: AtomicU8,
}

impl LeaseCell {
    pub(crate) fn new(ttl: Duration, cause: RiskCause) -> Arc<Self> {
        Arc::new(Self {
            valid_until: AtomicU64::new(0),
            ttl_ns: ttl.as_nanos() as u64,
            cause: AtomicU8::new(cause as u8),
        })
    }

    pub(crate) fn valid_until(&self) -> BootTime {
        BootTime(self.valid_until.load(Ordering::Acquire))
    }

    /// Moves the end; never back.
    pub(crate) fn extend(&self, until: BootTime) {
        self.valid_until.fetch_max(until.0, Ordering::AcqRel);
    }

    pub(crate) fn set_cause(&self, cause: RiskCause) {
        self.cause.store(cause as u8, Ordering::Release);
    }

    /// From when on an unrenewed hold is at risk.
    pub(crate) fn risk_from(&self, until: BootTime) -> BootTime {
        until.before(Duration::from_nanos(self.ttl_ns / 2))
    }
}

/// One hold.
#[derive(Debug)]
pub(crate) struct HoldCell {
    lease: Arc<LeaseCell>,
    /// A forced hold's own end.
    cap: AtomicU64,
    ended: AtomicU8,
    token: AtomicU64,
    floor: AtomicU64,
    mode: AtomicU32,
}

impl HoldCell {
    /// A hold as it was granted: its token, its floor and its mode.
    pub(crate) fn new(
        lease: Arc<LeaseCell>,
        (token, floor): (Token, Token),
        mode: Mode,
    ) -> Arc<Self> {
        Arc::new(Self {
            lease,
            cap: AtomicU64::new(u64::MAX),
            ended: AtomicU8::new(LIVE),
            token: AtomicU64::new(token.0),
            floor: AtomicU64::new(floor.0),
            mode: AtomicU32::new(mode.0),
        })
    }

    pub(crate) fn token(&self) -> Token {
        Token(self.token.load(Ordering::Acquire))
    }

    /// See `Grant::floor`.
    pub(crate) fn floor(&self) -> Token {
        Token(self.floor.load(Ordering::Acquire))
    }

    pub(crate) fn mode(&self) -> Mode {
        Mode(self.mode.load(Ordering::Acquire))
    }

    pub(crate) fn set_mode(&self, mode: Mode) {
        self.mode.store(mode.0, Ordering::Release);
    }

    /// It was granted anew. The mode that goes with it is told afterwards: whoever sees that sees
    /// the new token too.
    pub(crate) fn regrant(&self, (token, floor): (Token, Token)) {
        self.floor.store(floor.0, Ordering::Release);
        self.token.store(token.0, Ordering::Release);
    }

    fn until(&self) -> BootTime {
        self.lease.valid_until().min(BootTime(self.cap.load(Ordering::Acquire)))
    }

    /// It is not extended past `until` any more.
    pub(crate) fn cap(&self, until: BootTime) {
        self.cap.fetch_min(until.0, Ordering::AcqRel);
    }

    pub(crate) fn is_capped(&self) -> bool {
        self.cap.load(Ordering::Acquire) != u64::MAX
    }

    /// Its client gave it back: it is not held from here on, and is not lost either.
    pub(crate) fn release(&self) {
        let _ = self.ended.compare_exchange(LIVE, RELEASED, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Lost, unless it ended before; the first end stays. Returns the loss that is in force.
    pub(crate) fn lose(&self, cause: LossCause) -> Option<LossCause> {
        let byte = LOST + cause as u8;
        let _ = self.ended.compare_exchange(LIVE, byte, Ordering::AcqRel, Ordering::Acquire);
        self.lost()
    }

    /// The loss, if one was latched.
    pub(crate) fn lost(&self) -> Option<LossCause> {
        let byte = self.ended.load(Ordering::Acquire);
        LossCause::ALL.into_iter().find(|cause| LOST + *cause as u8 == byte)
    }

    /// How long the hold is valid without another renewal; zero if it ended. Latches an end that
    /// the clock shows.
    pub(crate) fn remaining(&self, now: BootTime) -> Duration {
        let until = self.until();
        if now >= until {
            self.lose(LossCause::Expired);
        }
        if self.ended.load(Ordering::Acquire) == LIVE { until.since(now) } else { Duration::ZERO }
    }

    /// See `HoldState`. A released hold answers as lost by its closing.
    pub(crate) fn state(&self, now: BootTime) -> HoldState {
        let remaining = self.remaining(now);
        if remaining.is_zero() {
            return HoldState::Lost(self.lost().unwrap_or(LossCause::SessionClosed));
        }
        if self.is_capped() {
            return HoldState::AtRisk { cause: RiskCause::Forced, remaining };
        }
        if now < self.lease.risk_from(self.until()) {
            return HoldState::Held;
        }
        let cause = RiskCause::from_byte(self.lease.cause.load(Ordering::Acquire));
        HoldState::AtRisk { cause, remaining }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn held_until(seconds: u64) -> (Arc<LeaseCell>, Arc<HoldCell>) {
        let lease = LeaseCell::new(TTL, RiskCause::Late);
        lease.extend(BootTime(seconds * 1_000_000_000));
        let granted = (Token(5), Token(5));
        (Arc::clone(&lease), HoldCell::new(lease, granted, Mode::EXCLUSIVE))
    }

    fn at(seconds: u64) -> BootTime {
        BootTime(seconds * 1_000_000_000)
    }

    #[test]
    fn held_then_at_risk_then_lost() {
        let (lease, hold) = held_until(20);
        assert_eq!(hold.state(at(14)), HoldState::Held);
        lease.set_cause(RiskCause::NoQuorum);
        let remaining = Duration::from_secs(4);
        assert_eq!(hold.state(at(16)), HoldState::AtRisk { cause: RiskCause::NoQuorum, remaining });
        assert_eq!(hold.state(at(20)), HoldState::Lost(LossCause::Expired));
    }

    #[test]
    fn a_seen_loss_is_latched_against_a_late_renewal() {
        let (lease, hold) = held_until(20);
        assert_eq!(hold.remaining(at(21)), Duration::ZERO);
        lease.extend(at(40));
        assert_eq!(hold.state(at(22)), HoldState::Lost(LossCause::Expired));
        assert_eq!(hold.lose(LossCause::Forced), Some(LossCause::Expired), "the first cause stays");
    }

    #[test]
    fn a_forced_hold_is_not_extended() {
        let (lease, hold) = held_until(20);
        hold.cap(lease.valid_until());
        lease.extend(at(40));
        assert!(matches!(hold.state(at(11)), HoldState::AtRisk { cause: RiskCause::Forced, .. }));
        assert_eq!(hold.remaining(at(20)), Duration::ZERO);
    }

    #[test]
    fn a_released_hold_is_neither_held_nor_lost() {
        let (_, hold) = held_until(20);
        hold.release();
        assert_eq!(hold.remaining(at(1)), Duration::ZERO);
        assert_eq!(hold.lost(), None);
        assert_eq!(hold.lose(LossCause::Expired), None);
    }
}
