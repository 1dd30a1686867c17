//! Renewals: when they are sent, and what an acknowledgement is worth.
//!
//! Each lease of a session is renewed when a third of its TTL has passed since the send of the
//! last acknowledged renewal, somewhat earlier by chance. Leases of one shard that are due at about
//! the same time share a message. A lease's own holds add nothing to it: a renewal costs the same
//! for one hold and for a thousand.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{HoldSetVersion, Number};
use leasehold_protocol::limits::RENEW_BATCH_MAX;
use leasehold_protocol::planted;
use leasehold_protocol::reply::{RenewResult, Reply};
use leasehold_protocol::request::{RenewItem, RenewRequest, Request};

use super::acquire::Op;
use super::cell::{LossCause, RiskCause};
use super::exchange::{Exchange, Owner};
use super::lease::{Lease, refusal_of};
use super::route::Lane;
use super::settle::Judgement;
use super::{CALLS_MAX, Call, CallId, Core, Event, HoldChange, LeaseKey, OpId};
use crate::clock::BootTime;
use crate::error::Failure;

impl Core {
    /// Sets when a lease is renewed next.
    fn set_renew_at(&mut self, key: LeaseKey, at: BootTime) {
        let Some(lease) = self.leases.get_mut(&key) else { return };
        self.renewals.remove(&(lease.shard, lease.renew_at, key));
        lease.renew_at = at;
        if at != BootTime::NEVER {
            self.renewals.insert((lease.shard, at, key));
        }
    }

    /// A third of the TTL after the send of what was last acknowledged, less some jitter. A hold's
    /// own lease is renewed only when asked.
    pub(super) fn schedule_renewal(&mut self, key: LeaseKey, sent_at: BootTime) {
        let Some(lease) = self.leases.get(&key) else { return };
        if lease.session.is_none() {
            return self.set_renew_at(key, BootTime::NEVER);
        }
        let third = lease.ttl / 3;
        let at = sent_at.after(self.rng.between(third * 4 / 5, third));
        self.set_renew_at(key, at.max(self.now));
    }

    /// Renews as soon as nothing is on its way.
    pub(super) fn renew_soon(&mut self, key: LeaseKey) {
        let Some(lease) = self.leases.get(&key) else { return };
        if lease.renewing.is_none() && lease.id.is_some() {
            self.set_renew_at(key, self.now);
            self.renew_due(key);
            self.arm(key);
        }
    }

    /// Sends one message for this lease and all of its shard that are nearly due.
    pub(super) fn renew_due(&mut self, key: LeaseKey) {
        let lease = &self.leases[&key];
        let shard = lease.shard;
        let soon = self.now.after(lease.ttl / 16);
        let due = self
            .renewals
            .range((shard, BootTime(0), LeaseKey(0))..=(shard, soon, LeaseKey(u64::MAX)));
        let mut batch: Vec<LeaseKey> = due.map(|(_, _, key)| *key).take(RENEW_BATCH_MAX).collect();
        if !batch.contains(&key) {
            batch.truncate(RENEW_BATCH_MAX - 1);
            batch.push(key);
        }
        let ttl = batch.iter().map(|key| self.leases[key].ttl).min().expect("not empty");
        for key in &batch {
            self.set_renew_at(*key, BootTime::NEVER);
        }
        let patience = (ttl / 6).max(Duration::from_millis(100));
        let owner = Owner::Renew(batch.clone());
        let renew = Exchange::new(owner, Some(shard), Lane::Lease, self.now.after(ttl));
        let id = self.start(renew.patience(patience));
        for key in batch {
            if let Some(lease) = self.leases.get_mut(&key) {
                lease.renewing = Some(id);
            }
        }
    }

    pub(super) fn build_renew(
        &self,
        leases: &[LeaseKey],
        timeout_ms: u32,
    ) -> Option<(Request, Vec<Number>)> {
        let mut shard = None;
        let mut items = Vec::with_capacity(leases.len());
        // Only leases that live: one that was given up is not in the table any more.
        for lease in leases.iter().filter_map(|key| self.leases.get(key)) {
            let Some(id) = lease.id else { continue };
            shard = Some(lease.shard);
            let version = lease.versions.known();
            items.push(RenewItem { lease: id, secret: lease.secret, version });
        }
        Some((Request::Renew(RenewRequest { shard: shard?, timeout_ms, items }), Vec::new()))
    }

    pub(super) fn renew_answered(
        &mut self,
        leases: &[LeaseKey],
        result: Result<Reply, Failure>,
        sent_at: BootTime,
    ) {
        for key in leases {
            if let Some(lease) = self.leases.get_mut(key) {
                lease.renewing = None;
            }
        }
        match result {
            Ok(Reply::Renewed(reply)) => self.take_renewals(leases, &reply.results, sent_at),
            Ok(reply) => self.renewal_failed(leases, refusal_of(&reply).code),
            Err(failure) => self.renewal_failed(leases, failure.code),
        }
        for key in leases {
            self.arm(*key);
        }
    }

    fn take_renewals(&mut self, leases: &[LeaseKey], results: &[RenewResult], sent_at: BootTime) {
        let known = leases.iter().filter_map(|key| Some((self.leases.get(key)?.id?, *key)));
        let mut unanswered: BTreeMap<_, _> = known.collect();
        for result in results {
            let Some(key) = unanswered.remove(&result.lease) else { continue };
            match result.error {
                None => self.renewed(key, result, sent_at),
                Some(ErrorCode::LEASE_DEAD | ErrorCode::BAD_SECRET) => {
                    self.end_lease(key, LossCause::LeaseDead);
                }
                Some(code) => self.renewal_failed(&[key], code),
            }
        }
        let silent: Vec<_> = unanswered.into_values().collect();
        self.renewal_failed(&silent, ErrorCode::INTERNAL);
    }

    /// No acknowledgement: tried again soon, while validity runs on.
    fn renewal_failed(&mut self, leases: &[LeaseKey], code: ErrorCode) {
        self.set_risk(leases, code);
        for key in leases {
            let pause = self.rng.between(Duration::from_millis(40), Duration::from_millis(120));
            self.set_renew_at(*key, self.now.after(pause));
        }
    }

    /// Why these leases are at risk, if they come to be.
    pub(super) fn set_risk(&self, leases: &[LeaseKey], code: ErrorCode) {
        let cause = match code {
            ErrorCode::UNREACHABLE => RiskCause::Unreachable,
            ErrorCode::LEASE_EXPIRING => RiskCause::Expiring,
            _ => RiskCause::NoQuorum,
        };
        for lease in leases.iter().filter_map(|key| self.leases.get(key)) {
            lease.cell.set_cause(cause);
        }
    }

    /// One lease was renewed by the request that was sent at `sent_at`.
    fn renewed(&mut self, key: LeaseKey, result: &RenewResult, sent_at: BootTime) {
        self.schedule_renewal(key, sent_at);
        let lease = self.leases.get_mut(&key).expect("the caller looked it up");
        lease.ttl = Duration::from_millis(u64::from(result.ttl_ms));
        let mut until = Lease::validity(lease.ttl, sent_at);
        // Planted (G1): the TTL counts from the answer, not from before the send.
        if planted!("validity-from-the-answer") {
            until = Lease::validity(lease.ttl, self.now);
        }
        match lease.versions.judge(result.version) {
            Judgement::Known => self.extend(key, until, result.version),
            Judgement::Other => self.park_renewal(key, result.version, sent_at),
        }
    }

    /// Validity moves on, and what waited for it is reported.
    pub(super) fn extend(&mut self, key: LeaseKey, until: BootTime, version: HoldSetVersion) {
        let lease = &self.leases[&key];
        let seen_as_lost = |op: &OpId| self.ops[op].is_latched();
        // Planted (G1): what a reader saw as lost comes back.
        if lease.holds.iter().any(|(_, op)| seen_as_lost(op)) && !planted!("loss-taken-back") {
            // A reader's clock was ahead of this answer: what was shown as lost stays lost.
            return self.end_lease(key, LossCause::Expired);
        }
        lease.cell.extend(until);
        let quiet = if lease.session.is_some() { RiskCause::Late } else { RiskCause::NotRenewed };
        lease.cell.set_cause(quiet);
        if self.now >= lease.cell.valid_until() {
            return self.renew_soon(key);
        }
        if lease.at_risk && self.now < lease.cell.risk_from(lease.cell.valid_until()) {
            self.leases.get_mut(&key).expect("looked up above").at_risk = false;
            self.tell_holds(key, HoldChange::Safe);
        }
        self.answer_asks(key);
        self.verified(key, version);
    }

    /// Reports the holds that this version covers.
    fn verified(&mut self, key: LeaseKey, version: HoldSetVersion) {
        let lease = &self.leases[&key];
        let covered = |op: &&OpId| self.ops[*op].granted_at() <= version;
        let current: Vec<OpId> = lease.verifying.iter().filter(covered).copied().collect();
        let confirmed: Vec<OpId> = lease.confirming.iter().filter(covered).copied().collect();
        for op in current {
            self.report(op);
        }
        for op in confirmed {
            self.confirm(op);
        }
        let open = |lease: &Lease| !lease.verifying.is_empty() || !lease.confirming.is_empty();
        if self.leases.get(&key).is_some_and(open) {
            self.renew_soon(key);
        }
    }

    /// A user asks for a renewal of this hold's lease; `Event::Renewed` follows.
    pub(crate) fn renew(&mut self, now: BootTime, op: OpId) -> Result<CallId, Failure> {
        self.tick(now);
        let lost = || Failure::new(ErrorCode::LEASE_DEAD, "the hold has ended");
        let key = self.ops.get(&op).and_then(Op::held_by).ok_or_else(lost)?;
        if self.calls.len() >= CALLS_MAX {
            return Err(Failure::of(ErrorCode::BUSY));
        }
        let call = CallId(self.fresh());
        self.calls.insert(call, Call::Renew { lease: key });
        self.leases.get_mut(&key).expect("a hold has a lease").asks.push(call);
        self.timers.set(super::Timer::Call(call), self.now.after(self.timing.call));
        self.renew_soon(key);
        Ok(call)
    }

    fn answer_asks(&mut self, key: LeaseKey) {
        let lease = self.leases.get_mut(&key).expect("the caller looked it up");
        for call in std::mem::take(&mut lease.asks) {
            self.timers.cancel(super::Timer::Call(call));
            if self.calls.remove(&call).is_some() {
                self.events.push_back(Event::Renewed { call, result: Ok(()) });
            }
        }
    }

    /// A renewal or a change that was asked for was not acknowledged in time.
    pub(super) fn ask_due(&mut self, call: CallId) {
        let lease = match self.calls.remove(&call) {
            Some(Call::Renew { lease }) => lease,
            Some(Call::Change { op }) => {
                let result = Err(self.change_verdict(call, op));
                return self.events.push_back(Event::Changed { call, result });
            }
            Some(Call::Request(_) | Call::Doubt(_)) | None => return,
        };
        let mut verdict = Failure::of(ErrorCode::UNREACHABLE);
        if let Some(lease) = self.leases.get_mut(&lease) {
            lease.asks.retain(|ask| *ask != call);
            let renewing = lease.renewing;
            verdict = self.verdict(renewing);
        }
        self.events.push_back(Event::Renewed { call, result: Err(verdict) });
    }
}
