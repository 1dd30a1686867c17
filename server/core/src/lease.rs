//! The arithmetic of leases: the one place that knows margin, pad, stall and take-over (G1, G3).
//!
//! Two clocks measure one TTL, neither knows the other's time, and their rates may differ by
//! 500 ppm. The client counts from *before its send* and stops a *margin* early; the server counts
//! from *after it read* the request, and waits a *pad* longer. So with a renewal that was
//! acknowledged:
//!
//! ```text
//! client   send ├──────────── TTL − margin ───────────┤ sure until here
//! server     read ├──────────────────── TTL ──────────────┼─ pad ─┤ may end from here
//! ```
//!
//! The client's clock may run slow by 500 ppm against the server's: 0.05 % of the TTL, a tenth of
//! the margin (0.5 %, and never below 20 ms, which covers coarse timers on short TTLs). The pad is
//! 0.1 % of the TTL and a little more, so that a server whose own clock runs fast by 500 ppm still
//! never ends a lease before its TTL has passed in real time.
//!
//! A **stall** is time in which the leader could not serve (stopped, starved, without a majority):
//! its clients could not renew either, so what it missed is added to every deadline that was set
//! before, but never more than one TTL per lease. It is kept as one running sum; a deadline
//! remembers the sum at its setting. So a stall costs O(1), however many leases there are.
//!
//! A **tenure** is one leadership, from the moment the leader applied the first entry of its term.
//! A lease without a deadline of this tenure ends no earlier than one full TTL after the tenure's
//! beginning. So a take-over costs O(1) too.
//!
//! All times are nanoseconds of a monotonic clock that runs through suspend; the caller reads it.

use core::time::Duration;

use leasehold_protocol::planted;

/// Nanoseconds of a millisecond.
pub const NS_PER_MS: u64 = 1_000_000;

/// How much before its TTL a client stops to be sure, in milliseconds: 0.5 % of the TTL, at least
/// 20 ms.
pub const fn margin_ms(ttl_ms: u32) -> u32 {
    let share = ttl_ms.div_ceil(200);
    if share > 20 { share } else { 20 }
}

/// How long after its TTL a server keeps a lease, in milliseconds: 0.1 % of the TTL, at least
/// 5 ms.
pub const fn pad_ms(ttl_ms: u32) -> u32 {
    let share = ttl_ms.div_ceil(1000);
    if share > 5 { share } else { 5 }
}

/// `margin_ms` as a duration.
pub const fn margin(ttl_ms: u32) -> Duration {
    Duration::from_millis(margin_ms(ttl_ms) as u64)
}

/// `pad_ms` as a duration.
pub const fn pad(ttl_ms: u32) -> Duration {
    Duration::from_millis(pad_ms(ttl_ms) as u64)
}

/// Until when a client is sure of a lease, by its own clock: `sent_ns` is the time before the send
/// of the first request of the last acknowledged renewal.
pub const fn sure_until_ns(sent_ns: u64, ttl_ms: u32) -> u64 {
    let validity_ms = ttl_ms.saturating_sub(margin_ms(ttl_ms));
    sent_ns.saturating_add(validity_ms as u64 * NS_PER_MS)
}

/// When a lease's TTL was last restarted, within one tenure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    renewed_ns: u64,
    stalled_ns: u64,
}

/// One leadership's lease time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenure {
    began_ns: u64,
    stalled_ns: u64,
}

impl Tenure {
    /// Begins when the leader has applied the first entry of its term.
    pub const fn begin(now_ns: u64) -> Self {
        Self { began_ns: now_ns, stalled_ns: 0 }
    }

    /// Adds time in which this leader could not serve.
    pub const fn add_stall(&mut self, stall_ns: u64) {
        self.stalled_ns = self.stalled_ns.saturating_add(stall_ns);
    }

    /// A renewal was confirmed, or the lease was opened: its TTL starts again.
    pub const fn stamp(&self, now_ns: u64) -> Stamp {
        Stamp { renewed_ns: now_ns, stalled_ns: self.stalled_ns }
    }

    /// When the TTL is over, stalls included. `None` is a lease that was not renewed in this
    /// tenure.
    pub fn deadline_ns(&self, stamp: Option<Stamp>, ttl_ms: u32) -> u64 {
        let mut stamp = stamp.unwrap_or(Stamp { renewed_ns: self.began_ns, stalled_ns: 0 });
        let ttl_ns = u64::from(ttl_ms) * NS_PER_MS;
        // Planted (G3): a new leader starts leases at less than their full TTL.
        if planted!("take-over-gives-half-a-ttl") && stamp.renewed_ns == self.began_ns {
            stamp.renewed_ns = stamp.renewed_ns.saturating_sub(ttl_ns / 2);
        }
        let stall_ns = self.stalled_ns.saturating_sub(stamp.stalled_ns).min(ttl_ns);
        stamp.renewed_ns.saturating_add(ttl_ns).saturating_add(stall_ns)
    }

    /// When the lease may be ended: deadline and pad.
    pub fn ends_at_ns(&self, stamp: Option<Stamp>, ttl_ms: u32) -> u64 {
        let mut pad_ns = u64::from(pad_ms(ttl_ms)) * NS_PER_MS;
        // Planted (G3): a clock that runs fast ends leases early.
        if planted!("deadline-without-pad") {
            pad_ns = 0;
        }
        self.deadline_ns(stamp, ttl_ms).saturating_add(pad_ns)
    }

    /// What is left of the TTL, in milliseconds, for display: never more than the TTL, never
    /// negative.
    pub fn remaining_ms(&self, stamp: Option<Stamp>, ttl_ms: u32, now_ns: u64) -> u32 {
        let left_ns = self.deadline_ns(stamp, ttl_ms).saturating_sub(now_ns);
        u32::try_from(left_ns / NS_PER_MS).unwrap_or(ttl_ms).min(ttl_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000 * NS_PER_MS;

    #[test]
    fn margin_and_pad_at_both_ends_of_the_range() {
        assert_eq!((margin_ms(1_000), pad_ms(1_000)), (20, 5));
        assert_eq!((margin_ms(4_000), margin_ms(4_200)), (20, 21));
        assert_eq!((margin_ms(600_000), pad_ms(600_000)), (3_000, 600));
        assert_eq!((margin_ms(5_001), pad_ms(5_001)), (26, 6), "shares are rounded up");
        assert_eq!(margin(600_000), Duration::from_secs(3));
        assert_eq!(pad(1_000), Duration::from_millis(5));
    }

    /// With both clocks off by 500 ppm in the worst direction, and a request that took no time.
    #[test]
    fn a_client_is_never_sure_when_the_server_may_end_the_lease() {
        for ttl_ms in [1_000, 1_001, 4_999, 5_000, 30_000, 599_999, 600_000] {
            let sure_ns = sure_until_ns(0, ttl_ms);
            let ends_ns = Tenure::begin(0).ends_at_ns(None, ttl_ms);
            // In real time: the client's clock slow, the server's fast.
            let sure_real = sure_ns + sure_ns / 2_000 + 1;
            let ends_real = ends_ns - ends_ns / 2_000;
            assert!(sure_real < ends_real, "{ttl_ms}");
            assert!(ends_real >= u64::from(ttl_ms) * NS_PER_MS, "never early: {ttl_ms}");
        }
    }

    #[test]
    fn a_take_over_gives_every_lease_its_full_ttl() {
        let old = Tenure::begin(0);
        let stamp = old.stamp(SECOND_NS);
        assert_eq!(old.deadline_ns(Some(stamp), 5_000), 6 * SECOND_NS);
        let new = Tenure::begin(9 * SECOND_NS);
        assert_eq!(new.deadline_ns(None, 5_000), 14 * SECOND_NS);
    }

    #[test]
    fn a_stall_moves_earlier_deadlines_by_at_most_one_ttl() {
        let mut tenure = Tenure::begin(0);
        let before = tenure.stamp(0);
        tenure.add_stall(3 * SECOND_NS / 2);
        assert_eq!(tenure.deadline_ns(Some(before), 2_000), 7 * SECOND_NS / 2);
        let after = tenure.stamp(SECOND_NS);
        assert_eq!(tenure.deadline_ns(Some(after), 2_000), 3 * SECOND_NS);
        tenure.add_stall(u64::MAX);
        assert_eq!(tenure.deadline_ns(Some(before), 2_000), 4 * SECOND_NS);
        assert_eq!(tenure.deadline_ns(None, 2_000), 4 * SECOND_NS);
        assert_eq!(tenure.deadline_ns(Some(after), 2_000), 5 * SECOND_NS);
    }

    #[test]
    fn what_is_left_lies_between_zero_and_the_ttl() {
        let mut tenure = Tenure::begin(10 * SECOND_NS);
        tenure.add_stall(60 * SECOND_NS);
        assert_eq!(tenure.remaining_ms(None, 5_000, 0), 5_000);
        assert_eq!(tenure.remaining_ms(None, 5_000, 19 * SECOND_NS), 1_000);
        assert_eq!(tenure.remaining_ms(None, 5_000, u64::MAX), 0);
    }
}
