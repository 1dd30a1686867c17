//! The hold-set version: how a client notices that the cluster's idea of what its lease holds has
//! changed without it (DESIGN §4).
//!
//! A grant's reply names the version before and after that very grant. A client that knows *before*
//! adopts *after*. Any other version means that something happened which this client has not been
//! told of (a grant whose reply was lost, a forced release): it reads its holds before it extends
//! anything.
//!
//! One refinement: a renewal and a grant travel on different connections, so a renewal's reply may
//! show a version that this client *knew* a moment ago and has since left by adopting grants, each
//! from exactly the version before it. Such a reply is proof of the state at that version, in which
//! every hold it extends was held; the grants since then stand under the same lease. It is accepted
//! for what was held at that version. It is never taken as the newest.
//!
//! A hold that is entered once more leaves the version as it is. So does its end by entries that are
//! released, and the reply to the one may come long after those of the others: only at the very
//! version of the grant is it known to be current, else the holds are read.

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{HoldSetVersion, Number, Token};
use leasehold_protocol::outcome::Grant;
use leasehold_protocol::planted;
use leasehold_protocol::reply::{HeldKey, HoldsReply, Reply};
use leasehold_protocol::request::{HoldsRequest, Request};

use super::cell::LossCause;
use super::exchange::{Exchange, Owner};
use super::lease::{Lease, refusal_of};
use super::route::Lane;
use super::{Core, LeaseKey, OpId};
use crate::clock::BootTime;
use crate::error::Failure;

/// The version of a hold's own lease after the grant that made it.
pub(super) const OWN_GRANT: HoldSetVersion = HoldSetVersion(1);

/// What a renewal's version says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// It was known, see the module: what was held at that version is extended.
    Known,
    /// Something happened that this client does not know.
    Other,
}

/// What is known of a lease's versions.
#[derive(Debug)]
pub(super) struct Versions {
    /// The known version was reached from this one by adopting single grants.
    from: u64,
    known: u64,
    /// The highest version that any reply has shown.
    seen: u64,
    settled: bool,
    /// Holds of the last read that no grant's reply has named yet.
    unclaimed: Vec<HeldKey>,
    /// A renewal that was acknowledged at a version that was not known.
    parked: Option<(HoldSetVersion, BootTime)>,
}

impl Versions {
    pub(super) const fn new() -> Self {
        Self { from: 0, known: 0, seen: 0, settled: true, unclaimed: Vec::new(), parked: None }
    }

    /// For a hold's own lease: it begins with its one grant.
    pub(super) const fn of_own_lease() -> Self {
        let first = OWN_GRANT.0;
        let settled = true;
        Self {
            from: first,
            known: first,
            seen: first,
            settled,
            unclaimed: Vec::new(),
            parked: None,
        }
    }

    pub(super) const fn known(&self) -> HoldSetVersion {
        HoldSetVersion(self.known)
    }

    pub(super) fn judge(&mut self, version: HoldSetVersion) -> Judgement {
        self.seen = self.seen.max(version.0);
        // Planted (G1): whatever was seen counts as known.
        if planted!("max-of-known-and-seen") {
            self.known = self.known.max(self.seen);
        }
        if self.settled && (self.from..=self.known).contains(&version.0) {
            return Judgement::Known;
        }
        self.settled = false;
        Judgement::Other
    }

    /// Adopts a grant, or becomes unsettled.
    fn adopt(&mut self, grant: &Grant) {
        let (before, after) = (grant.version_before.0, grant.version_after.0);
        self.seen = self.seen.max(after);
        if !self.settled || before != self.known {
            self.settled = false;
            return;
        }
        if after > before + 1 {
            self.from = after;
        }
        self.known = after;
    }

    /// What is held may be other than it is known to be.
    pub(super) const fn unsettle(&mut self) {
        self.settled = false;
    }

    /// The lease's holds were read. Settled, unless a later version was seen meanwhile.
    fn read(&mut self, version: HoldSetVersion) {
        self.from = version.0;
        self.known = version.0;
        self.settled = version.0 >= self.seen;
    }
}

/// What a grant's reply leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adoption {
    /// The version is known: the hold is as good as its lease.
    Current,
    /// It must be shown to be current first.
    Doubtful,
}

impl Core {
    /// Takes a grant's versions into account; it is of so many keys.
    pub(super) fn adopt(&mut self, key: LeaseKey, grant: &Grant, keys: usize) -> Adoption {
        let lease = self.leases.get_mut(&key).expect("a granted op's lease is known");
        let versions = &mut lease.versions;
        let entered_again = grant.version_before == grant.version_after;
        if versions.settled && !entered_again && grant.version_after.0 <= versions.from {
            let tokens = grant.token.0..grant.token.0 + keys as u64;
            let before = versions.unclaimed.len();
            versions.unclaimed.retain(|held| !tokens.contains(&held.token.0));
            // The holds were read after this grant, and it was not among them, or another entry of
            // the hold had been named already.
            if versions.unclaimed.len() + keys != before {
                self.doubt(key);
            }
            return Adoption::Doubtful;
        }
        versions.adopt(grant);
        if versions.settled {
            return Adoption::Current;
        }
        self.read_holds(key);
        Adoption::Doubtful
    }

    /// Asks the cluster what the lease holds, unless that is being asked already.
    pub(super) fn read_holds(&mut self, key: LeaseKey) {
        let Some(lease) = self.leases.get(&key) else { return };
        if lease.reading.is_some() {
            return;
        }
        let read =
            Exchange::new(Owner::Holds(key), Some(lease.shard), Lane::Lease, BootTime::NEVER);
        let reading = self.start(read);
        if let Some(lease) = self.leases.get_mut(&key) {
            lease.reading = Some(reading);
        }
    }

    pub(super) fn build_holds(&self, key: LeaseKey, ms: u32) -> Option<(Request, Vec<Number>)> {
        let lease = self.leases.get(&key)?;
        let request = HoldsRequest {
            shard: lease.shard,
            lease: lease.id?,
            secret: lease.secret,
            timeout_ms: ms,
        };
        Some((Request::Holds(request), Vec::new()))
    }

    /// A renewal was acknowledged at a version that is not known: it counts once that is settled.
    pub(super) fn park_renewal(
        &mut self,
        key: LeaseKey,
        version: HoldSetVersion,
        sent_at: BootTime,
    ) {
        if let Some(lease) = self.leases.get_mut(&key) {
            lease.versions.parked = Some((version, sent_at));
        }
        self.read_holds(key);
    }

    pub(super) fn holds_answered(&mut self, key: LeaseKey, result: Result<Reply, Failure>) {
        let Some(lease) = self.leases.get_mut(&key) else { return };
        lease.reading = None;
        let failure = match result {
            Ok(Reply::Holds(reply)) => return self.holds_read(key, reply),
            Ok(reply) => refusal_of(&reply),
            Err(failure) => failure,
        };
        if matches!(failure.code, ErrorCode::LEASE_DEAD | ErrorCode::BAD_SECRET) {
            self.end_lease(key, LossCause::LeaseDead);
        }
        // Any other refusal leaves the versions unsettled: nothing is extended, and the next
        // renewal asks again.
    }

    fn holds_read(&mut self, key: LeaseKey, reply: HoldsReply) {
        let lease = self.leases.get_mut(&key).expect("the caller looked it up");
        lease.versions.read(reply.version);
        let parked = lease.versions.parked.take();
        self.drop_unlisted(key, &reply);
        for held in reply.holds.iter().filter(|held| held.forced) {
            self.cap_hold(key, held);
        }
        let Some(lease) = self.leases.get_mut(&key) else { return };
        let mut unclaimed = reply.holds;
        unclaimed.retain(|held| !lease.has_token(held.token) && !held.forced);
        lease.versions.unclaimed = unclaimed;
        if !lease.versions.settled {
            return self.read_holds(key);
        }
        match parked {
            Some((version, sent_at)) if version == reply.version => {
                let ttl = lease.ttl;
                self.extend(key, Lease::validity(ttl, sent_at), version);
            }
            _ => self.renew_soon(key),
        }
        self.arm(key);
    }

    /// Holds that the cluster did not list, though it knew of their grant, have ended.
    fn drop_unlisted(&mut self, key: LeaseKey, reply: &HoldsReply) {
        let lease = &self.leases[&key];
        let ended = |(token, id): &(Token, OpId)| {
            let op = &self.ops[id];
            let listed = reply.holds.iter().any(|held| op.is_listed_as(*token, held));
            (!listed && op.granted_at() <= reply.version).then_some(*id)
        };
        for op in lease.holds.iter().filter_map(ended).collect::<Vec<_>>() {
            self.lose_hold(op, LossCause::Forced);
        }
    }

    /// An operator forced this hold: it lasts as long as it was valid, and no longer.
    fn cap_hold(&mut self, key: LeaseKey, held: &HeldKey) {
        let Some(lease) = self.leases.get(&key) else { return };
        let until = lease.cell.valid_until();
        let meant =
            |(token, op): &(Token, OpId)| self.ops[op].is_listed_as(*token, held).then_some(*op);
        let entries: Vec<OpId> = lease.holds.iter().filter_map(meant).collect();
        for op in entries {
            let Some(lease) = self.leases.get_mut(&key) else { return };
            if lease.verifying.contains(&op) {
                self.lose_hold(op, LossCause::Forced);
            } else if self.ops[&op].cap(until) {
                lease.capped.insert((until, op));
                self.events.push_back(super::Event::Hold { op, change: super::HoldChange::AtRisk });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use leasehold_protocol::ids::{LeaseId, Revision};

    use super::*;

    fn grant(before: u64, after: u64) -> Grant {
        Grant {
            lease: LeaseId(1),
            token: Token(1),
            revision: Revision(1),
            version_before: HoldSetVersion(before),
            version_after: HoldSetVersion(after),
            floor: Token(1),
        }
    }

    #[test]
    fn a_grant_is_adopted_only_from_the_version_before_it() {
        let mut versions = Versions::new();
        versions.adopt(&grant(0, 1));
        assert_eq!((versions.known, versions.settled), (1, true));
        versions.adopt(&grant(2, 3));
        assert_eq!((versions.known, versions.settled), (1, false));
        versions.adopt(&grant(1, 2));
        assert!(!versions.settled, "only a read settles");
        versions.read(HoldSetVersion(3));
        assert_eq!((versions.known, versions.settled), (3, true));
    }

    #[test]
    fn a_version_that_was_known_is_known_and_any_other_is_not() {
        let mut versions = Versions::new();
        versions.adopt(&grant(0, 1));
        versions.adopt(&grant(1, 2));
        assert_eq!(versions.judge(HoldSetVersion(1)), Judgement::Known);
        assert_eq!(versions.judge(HoldSetVersion(3)), Judgement::Other);
        assert_eq!(versions.judge(HoldSetVersion(2)), Judgement::Other, "until it is settled");
    }

    #[test]
    fn a_read_older_than_what_was_seen_does_not_settle() {
        let mut versions = Versions::new();
        assert_eq!(versions.judge(HoldSetVersion(5)), Judgement::Other);
        versions.read(HoldSetVersion(4));
        assert!(!versions.settled);
        versions.read(HoldSetVersion(5));
        assert!(versions.settled);
        assert_eq!(versions.judge(HoldSetVersion(4)), Judgement::Other, "not reached by a grant");
    }
}
