//! A shard's deadlines while this node leads it.
//!
//! Invariants:
//! - A lease without an entry of the present epoch ends no earlier than the epoch's start + its
//!   TTL: taking over costs O(1), however many leases there are.
//! - A deadline moves only forward, except that its lease ends.
//! - While an expiry is proposed, the lease is not renewed.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_core::lease;
use leasehold_protocol::ids::LeaseId;

use crate::env::MonoTime;

/// What the shard must do about a lease whose wheel entry came up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Its deadline lies ahead, here: put the entry back.
    Later(MonoTime),
    /// Deadline and pad passed: it may be expired after a confirmed round.
    Now,
    /// An expiry is under way already.
    Proposed,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    deadline: MonoTime,
    /// `LeaseTable::stalls` when the deadline was set.
    stalls: Duration,
    expiring: bool,
}

/// Deadlines of one leadership.
#[derive(Debug, Default)]
pub struct LeaseTable {
    epoch: u64,
    started: MonoTime,
    /// Sum of this leader's stalls since the epoch began.
    stalls: Duration,
    entries: BTreeMap<LeaseId, Entry>,
}

impl LeaseTable {
    /// Starts an epoch: the leader has applied its first entry at `now`.
    pub fn begin(&mut self, now: MonoTime) {
        self.epoch += 1;
        self.started = now;
        self.stalls = Duration::ZERO;
        self.entries.clear();
    }

    /// The leadership ended: wheel entries of this epoch are stale from now on.
    pub fn end(&mut self) {
        self.epoch += 1;
        self.entries.clear();
    }

    /// Tells wheel entries of different leaderships apart.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// A lease was opened, or renewed in a confirmed round, at `now`.
    pub fn extend(&mut self, lease: LeaseId, ttl_ms: u32, now: MonoTime) {
        let deadline = now.after(Duration::from_millis(u64::from(ttl_ms)));
        let stalls = self.stalls;
        let entry =
            self.entries.entry(lease).or_insert(Entry { deadline, stalls, expiring: false });
        assert!(!entry.expiring, "a lease whose expiry is proposed is not renewed");
        entry.deadline = entry.deadline.max(deadline);
        entry.stalls = stalls;
    }

    /// The lease ended.
    pub fn remove(&mut self, lease: LeaseId) {
        self.entries.remove(&lease);
    }

    /// The leader could not serve for `stall`: its clients could not renew either.
    pub fn add_stall(&mut self, stall: Duration) {
        self.stalls += stall;
    }

    /// When the lease may end, its pad and this leader's stalls (at most one TTL of them) included.
    pub fn ends_at(&self, lease: LeaseId, ttl_ms: u32) -> MonoTime {
        let ttl = Duration::from_millis(u64::from(ttl_ms));
        let (deadline, stalls) = match self.entries.get(&lease) {
            Some(entry) => (entry.deadline, self.stalls.saturating_sub(entry.stalls)),
            None => (self.started.after(ttl), self.stalls),
        };
        deadline.after(stalls.min(ttl)).after(lease::pad(ttl_ms))
    }

    /// What to do about the lease at `now`.
    pub fn due(&self, lease: LeaseId, ttl_ms: u32, now: MonoTime) -> Due {
        if self.is_expiring(lease) {
            return Due::Proposed;
        }
        let ends_at = self.ends_at(lease, ttl_ms);
        if ends_at > now { Due::Later(ends_at) } else { Due::Now }
    }

    /// An expiry of the lease is proposed and its outcome not known.
    pub fn is_expiring(&self, lease: LeaseId) -> bool {
        self.entries.get(&lease).is_some_and(|entry| entry.expiring)
    }

    /// Marks the lease before its expiry is proposed.
    pub fn mark_expiring(&mut self, lease: LeaseId, ttl_ms: u32) {
        let deadline = self.started.after(Duration::from_millis(u64::from(ttl_ms)));
        let stalls = Duration::ZERO;
        let entry =
            self.entries.entry(lease).or_insert(Entry { deadline, stalls, expiring: false });
        entry.expiring = true;
    }

    /// The proposal was definitely refused: the lease may be renewed again.
    pub fn clear_expiring(&mut self, lease: LeaseId) {
        if let Some(entry) = self.entries.get_mut(&lease) {
            entry.expiring = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: LeaseId = LeaseId(7);

    fn at_ms(ms: u64) -> MonoTime {
        MonoTime(ms * 1_000_000)
    }

    #[test]
    fn a_new_epoch_gives_every_lease_its_full_ttl() {
        let mut table = LeaseTable::default();
        table.begin(at_ms(1_000));
        table.extend(LEASE, 5_000, at_ms(1_500));
        table.end();
        table.begin(at_ms(9_000));
        assert!(table.ends_at(LEASE, 5_000) >= at_ms(14_000));
        assert!(matches!(table.due(LEASE, 5_000, at_ms(13_999)), Due::Later(_)));
    }

    #[test]
    fn a_renewal_moves_the_deadline_and_never_back() {
        let mut table = LeaseTable::default();
        table.begin(at_ms(0));
        table.extend(LEASE, 5_000, at_ms(2_000));
        let later = table.ends_at(LEASE, 5_000);
        table.extend(LEASE, 1_000, at_ms(2_100));
        assert_eq!(table.ends_at(LEASE, 5_000), later);
        assert_eq!(table.due(LEASE, 5_000, later), Due::Now);
    }

    #[test]
    fn stalls_extend_what_was_set_before_them_and_at_most_one_ttl() {
        let mut table = LeaseTable::default();
        table.begin(at_ms(0));
        table.extend(LEASE, 2_000, at_ms(0));
        let before = table.ends_at(LEASE, 2_000);
        table.add_stall(Duration::from_millis(700));
        assert_eq!(table.ends_at(LEASE, 2_000), before.after(Duration::from_millis(700)));
        table.add_stall(Duration::from_secs(60));
        assert_eq!(table.ends_at(LEASE, 2_000), before.after(Duration::from_secs(2)));
        table.extend(LEASE, 2_000, at_ms(100));
        assert_eq!(
            table.ends_at(LEASE, 2_000),
            at_ms(2_100).after(lease::pad(2_000)),
            "a deadline set after the stall does not count it"
        );
    }

    #[test]
    fn a_proposed_expiry_stays_marked_until_it_is_refused() {
        let mut table = LeaseTable::default();
        table.begin(at_ms(0));
        table.mark_expiring(LEASE, 1_000);
        assert_eq!(table.due(LEASE, 1_000, at_ms(60_000)), Due::Proposed);
        table.clear_expiring(LEASE);
        assert_eq!(table.due(LEASE, 1_000, at_ms(60_000)), Due::Now);
    }
}
