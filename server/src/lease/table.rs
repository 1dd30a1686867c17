//! A shard's deadlines while this node leads it. The arithmetic is `leasehold_core::lease`'s.
//!
//! Invariants:
//! - A lease without an entry of this tenure ends no earlier than the tenure's beginning + its TTL:
//!   taking over costs O(1), however many leases there are.
//! - A lease's TTL is restarted only by its opening and by a renewal in a confirmed round.
//! - While an expiry is proposed, the lease is not renewed.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_core::lease::{Stamp, Tenure};
use leasehold_protocol::ids::LeaseId;
use leasehold_protocol::planted;

use crate::env::MonoTime;

/// What the shard must do about a lease whose wheel entry came up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Its end lies ahead, here: put the entry back.
    Later(MonoTime),
    /// Deadline and pad passed: it may be expired after a confirmed round.
    Now,
    /// An expiry is under way already.
    Proposed,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    stamp: Option<Stamp>,
    expiring: bool,
}

/// Deadlines of one tenure.
#[derive(Debug)]
pub struct LeaseTable {
    tenure: Tenure,
    entries: BTreeMap<LeaseId, Entry>,
}

impl Default for LeaseTable {
    fn default() -> Self {
        Self { tenure: Tenure::begin(0), entries: BTreeMap::new() }
    }
}

impl LeaseTable {
    /// Starts a tenure: the leader has applied its first entry at `now`.
    pub fn begin(&mut self, now: MonoTime) {
        self.tenure = Tenure::begin(now.0);
        self.forget();
    }

    /// The leadership ended.
    pub fn end(&mut self) {
        self.forget();
    }

    fn forget(&mut self) {
        // Planted (G3): deadlines of an earlier leadership, before others led, still count.
        if !planted!("old-deadlines-kept") {
            self.entries.clear();
        }
    }

    /// A lease was opened, or renewed in a confirmed round, at `now`.
    pub fn extend(&mut self, lease: LeaseId, now: MonoTime) {
        let stamp = self.tenure.stamp(now.0);
        let entry = self.entries.entry(lease).or_default();
        assert!(!entry.expiring, "a lease whose expiry is proposed is not renewed");
        entry.stamp = Some(stamp);
    }

    /// The lease ended.
    pub fn remove(&mut self, lease: LeaseId) {
        self.entries.remove(&lease);
    }

    /// The leader could not serve for `stall`: its clients could not renew either.
    pub fn add_stall(&mut self, stall: Duration) {
        self.tenure.add_stall(u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX));
    }

    /// When the lease may be ended: deadline, stalls and pad.
    pub fn ends_at(&self, lease: LeaseId, ttl_ms: u32) -> MonoTime {
        MonoTime(self.tenure.ends_at_ns(self.stamp(lease), ttl_ms))
    }

    /// What is left of the lease's TTL, for display.
    pub fn remaining_ms(&self, lease: LeaseId, ttl_ms: u32, now: MonoTime) -> u32 {
        self.tenure.remaining_ms(self.stamp(lease), ttl_ms, now.0)
    }

    /// What to do about the lease at `now`.
    pub fn due(&self, lease: LeaseId, ttl_ms: u32, now: MonoTime) -> Due {
        if self.is_expiring(lease) {
            return Due::Proposed;
        }
        let ends_at = self.ends_at(lease, ttl_ms);
        // Planted (G3): a lease is over one turn of the wheel early.
        let early = Duration::from_millis(if planted!("expired-a-tick-early") { 25 } else { 0 });
        if ends_at > now.after(early) { Due::Later(ends_at) } else { Due::Now }
    }

    /// An expiry of the lease is proposed and its outcome not known.
    pub fn is_expiring(&self, lease: LeaseId) -> bool {
        self.entries.get(&lease).is_some_and(|entry| entry.expiring)
    }

    /// Marks the lease before its expiry is proposed.
    pub fn mark_expiring(&mut self, lease: LeaseId) {
        self.entries.entry(lease).or_default().expiring = true;
    }

    /// The proposal was definitely refused: the lease may be renewed again.
    pub fn clear_expiring(&mut self, lease: LeaseId) {
        if let Some(entry) = self.entries.get_mut(&lease) {
            entry.expiring = false;
        }
    }

    fn stamp(&self, lease: LeaseId) -> Option<Stamp> {
        self.entries.get(&lease)?.stamp
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: LeaseId = LeaseId(7);
    const TTL_MS: u32 = 5_000;

    fn at_ms(ms: u64) -> MonoTime {
        MonoTime(ms * 1_000_000)
    }

    #[test]
    fn a_new_tenure_forgets_the_old_deadlines() {
        let mut table = LeaseTable::default();
        table.begin(at_ms(1_000));
        table.extend(LEASE, at_ms(1_500));
        table.end();
        table.begin(at_ms(9_000));
        assert!(matches!(table.due(LEASE, TTL_MS, at_ms(13_999)), Due::Later(_)));
        assert_eq!(table.due(LEASE, TTL_MS, at_ms(14_100)), Due::Now);
    }

    #[test]
    fn a_renewal_moves_the_end() {
        let mut table = LeaseTable::default();
        table.begin(at_ms(0));
        let before = table.ends_at(LEASE, TTL_MS);
        table.extend(LEASE, at_ms(2_000));
        assert_eq!(table.due(LEASE, TTL_MS, before), Due::Later(table.ends_at(LEASE, TTL_MS)));
        assert_eq!(table.ends_at(LEASE, TTL_MS), before.after(Duration::from_secs(2)));
    }

    #[test]
    fn a_proposed_expiry_stays_marked_until_it_is_refused() {
        let mut table = LeaseTable::default();
        table.begin(at_ms(0));
        table.mark_expiring(LEASE);
        assert_eq!(table.due(LEASE, TTL_MS, at_ms(60_000)), Due::Proposed);
        table.clear_expiring(LEASE);
        assert_eq!(table.due(LEASE, TTL_MS, at_ms(60_000)), Due::Now);
    }
}
