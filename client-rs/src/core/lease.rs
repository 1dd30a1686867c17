//! Leases: a session's, one for each shard it uses, opened when first needed; and those that a
//! hold has for itself. How they begin, what becomes due on them, how they end.
//!
//! A lease that ends here ends for good: its holds are lost, once, its waits fail, and nothing
//! renews it any more. A session goes on and opens another when the next acquire needs one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::request::Request;

use super::cell::{LeaseCell, LossCause, RiskCause};
use super::exchange::{Exchange, Owner, as_request};
use super::numbers::Numbers;
use super::route::Lane;
use super::settle::Versions;
use super::{Call, CallId, Core, Event, ExchangeId, HoldChange, LeaseKey, OpId, SessionId, Timer};
use crate::clock::{BootTime, margin};
use crate::error::Failure;

/// Releases and cancels of one key on their way, and the acquires of the same key that wait for
/// them: those travel on another connection and must not overtake.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    pub(super) on_their_way: usize,
    pub(super) blocked: Vec<OpId>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(super) shard: ShardId,
    /// Whose it is; `None` for a hold's own lease.
    pub(super) session: Option<SessionId>,
    /// `None` until the cluster answered the open.
    pub(super) id: Option<LeaseId>,
    pub(super) secret: Secret,
    pub(super) ttl: Duration,
    pub(super) cell: Arc<LeaseCell>,
    pub(super) numbers: Numbers,
    pub(super) versions: Versions,
    /// Granted and not given back.
    /// Several under one token are entries of one hold.
    pub(super) holds: BTreeSet<(Token, OpId)>,
    /// Of those, granted but not reported yet: a renewal must show that they are current.
    pub(super) verifying: BTreeSet<OpId>,
    /// Of those that were reported: upgraded, and the new token not told yet for the same reason.
    pub(super) confirming: BTreeSet<OpId>,
    /// Acquires without a result.
    pub(super) pending: BTreeSet<OpId>,
    /// Of those, not sent yet, in the order in which they were asked for.
    pub(super) unsent: VecDeque<OpId>,
    /// Releases without an answer.
    pub(super) releasing: BTreeSet<OpId>,
    /// Keys that are being given back.
    pub(super) leaving: BTreeMap<Vec<u8>, Leaving>,
    /// Holds whose end is forced, by the time at which they end.
    pub(super) capped: BTreeSet<(BootTime, OpId)>,
    /// Renewals that a user asked for.
    pub(super) asks: Vec<CallId>,
    pub(super) opening: Option<ExchangeId>,
    pub(super) renewing: Option<ExchangeId>,
    pub(super) reading: Option<ExchangeId>,
    /// When to renew next, `NEVER` while a renewal is on its way.
    pub(super) renew_at: BootTime,
    pub(super) at_risk: bool,
    /// Without a hold that was reported, it is not given up before this.
    pub(super) kept_until: BootTime,
}

impl Lease {
    pub(super) fn new(
        shard: ShardId,
        session: Option<SessionId>,
        secret: Secret,
        ttl: Duration,
    ) -> Self {
        let cause = if session.is_some() { RiskCause::Late } else { RiskCause::NotRenewed };
        Self {
            shard,
            session,
            id: None,
            secret,
            ttl,
            cell: LeaseCell::new(ttl, cause),
            numbers: Numbers::new(),
            versions: Versions::new(),
            holds: BTreeSet::new(),
            verifying: BTreeSet::new(),
            confirming: BTreeSet::new(),
            pending: BTreeSet::new(),
            unsent: VecDeque::new(),
            releasing: BTreeSet::new(),
            leaving: BTreeMap::new(),
            capped: BTreeSet::new(),
            asks: Vec::new(),
            opening: None,
            renewing: None,
            reading: None,
            renew_at: BootTime::NEVER,
            at_risk: false,
            kept_until: BootTime(0),
        }
    }

    /// Some hold under it was reported to its caller.
    fn is_relied_on(&self) -> bool {
        self.holds.iter().any(|(_, op)| !self.verifying.contains(op))
    }

    /// Some hold under it has this token.
    pub(super) fn has_token(&self, token: Token) -> bool {
        self.holds.range((token, OpId(0))..=(token, OpId(u64::MAX))).next().is_some()
    }

    /// This hold, under these tokens, is not kept any more.
    pub(super) fn forget_hold(&mut self, op: OpId, tokens: impl IntoIterator<Item = Token>) {
        for token in tokens {
            self.holds.remove(&(token, op));
        }
    }

    /// Who speaks, for a command under `number`.
    pub(super) fn caller(&self, number: Number) -> Option<Caller> {
        let (floor, acks) = self.numbers.stamp();
        Some(Caller { lease: self.id?, secret: self.secret, number, floor, acks })
    }

    /// Until when its holds are valid if the renewal sent at `sent_at` was acknowledged.
    pub(super) fn validity(ttl: Duration, sent_at: BootTime) -> BootTime {
        sent_at.after(ttl.saturating_sub(margin(ttl)))
    }
}

impl Core {
    /// The session's lease in a shard, made if there is none.
    pub(super) fn lease_for(&mut self, session: SessionId, shard: ShardId) -> LeaseKey {
        let owner = &self.sessions[&session];
        if let Some(key) = owner.leases.get(&shard) {
            return *key;
        }
        let lease = Lease::new(shard, Some(session), owner.secret, owner.ttl);
        let key = LeaseKey(self.fresh());
        self.leases.insert(key, lease);
        let owner = self.sessions.get_mut(&session).expect("looked up above");
        owner.leases.insert(shard, key);
        let open = Exchange::new(Owner::Open(key), Some(shard), Lane::Bulk, BootTime::NEVER);
        let opening = self.start(open);
        // The exchange may have failed at once and taken the lease with it.
        if self.exchanges.contains_key(&opening)
            && let Some(lease) = self.leases.get_mut(&key)
        {
            lease.opening = Some(opening);
        }
        key
    }

    pub(super) fn build_open(&self, key: LeaseKey, ms: u32) -> Option<(Request, Vec<Number>)> {
        let lease = self.leases.get(&key)?;
        let owner = self.sessions.get(&lease.session?)?;
        let command = Command::Open {
            ttl_ms: lease.ttl.as_millis() as u32,
            secret: lease.secret,
            label: owner.label.clone().into_bytes(),
        };
        Some((as_request(lease.shard, ms, command), Vec::new()))
    }

    pub(super) fn open_answered(
        &mut self,
        key: LeaseKey,
        result: Result<Reply, Failure>,
        sent_at: BootTime,
    ) {
        let Some(lease) = self.leases.get_mut(&key) else { return };
        lease.opening = None;
        match result {
            Ok(Reply::Outcome(OutcomeReply {
                outcome: Outcome::Opened { lease: id, .. }, ..
            })) => {
                lease.id = Some(id);
                // An open counts as a renewal that was sent when its request was.
                lease.cell.extend(Lease::validity(lease.ttl, sent_at));
                self.schedule_renewal(key, sent_at);
                self.send_unsent(key);
                self.arm(key);
            }
            Ok(reply) => self.drop_unopened(key, &refusal_of(&reply)),
            Err(failure) => self.drop_unopened(key, &failure),
        }
    }

    /// A lease that nobody wants any more was opened all the same.
    pub(super) fn orphan_answered(
        &mut self,
        shard: ShardId,
        secret: Secret,
        result: &Result<Reply, Failure>,
    ) {
        if let Ok(Reply::Outcome(OutcomeReply { outcome: Outcome::Opened { lease, .. }, .. })) =
            *result
        {
            self.start_close(shard, lease, secret, None, self.now.after(self.timing.call));
        }
    }

    /// The lease could not be opened: whoever waited for it hears why.
    fn drop_unopened(&mut self, key: LeaseKey, failure: &Failure) {
        let lease = self.leases.get(&key).expect("the caller looked it up");
        for op in lease.pending.clone() {
            self.finish_op(op, failure.clone());
        }
        self.forget_if_unused(key);
    }

    /// A lease that never opened and that nobody waits for is not opened any more.
    pub(super) fn forget_if_unused(&mut self, key: LeaseKey) {
        let Some(lease) = self.leases.get(&key) else { return };
        if lease.id.is_none() && lease.pending.is_empty() {
            self.remove_lease(key);
        }
    }

    /// Sets the lease's timer to whatever comes first on it.
    pub(super) fn arm(&mut self, key: LeaseKey) {
        let Some(lease) = self.leases.get(&key) else { return };
        let until = lease.cell.valid_until();
        let mut at = lease.renew_at;
        if let Some((capped, _)) = lease.capped.first() {
            at = at.min(*capped);
        }
        if lease.id.is_some() && lease.is_relied_on() {
            let risk = lease.cell.risk_from(until);
            at = at.min(if lease.at_risk { until } else { risk.min(until) });
        } else if lease.id.is_some() {
            at = at.min(self.given_up_at(lease));
        }
        self.timers.set(Timer::Lease(key), at);
    }

    /// When a lease that nobody relies on is given up: waits, and grants that are being confirmed,
    /// may outlive a missed renewal for as long as a call may take.
    fn given_up_at(&self, lease: &Lease) -> BootTime {
        lease.cell.valid_until().after(self.timing.call).max(lease.kept_until)
    }

    /// Something is due on a lease. Its end comes first.
    pub(super) fn lease_due(&mut self, key: LeaseKey) {
        let Some(lease) = self.leases.get(&key) else { return };
        let expired = self.now >= lease.cell.valid_until();
        let given_up = self.now >= self.given_up_at(lease);
        if lease.id.is_some() && (expired && lease.is_relied_on() || given_up) {
            return self.end_lease(key, LossCause::Expired);
        }
        self.end_capped(key);
        self.warn(key);
        if self.leases.get(&key).is_some_and(|lease| lease.renew_at <= self.now) {
            self.renew_due(key);
        }
        self.arm(key);
        let next = self.timers.get(Timer::Lease(key));
        assert!(next.is_none_or(|at| at > self.now), "what was due has been done");
    }

    /// Forced holds whose last validity is over.
    fn end_capped(&mut self, key: LeaseKey) {
        while let Some(lease) = self.leases.get_mut(&key)
            && let Some((at, op)) = lease.capped.first().copied()
            && at <= self.now
        {
            lease.capped.pop_first();
            self.lose_hold(op, LossCause::Forced);
        }
    }

    /// Tells the holds of a lease, once, that its renewal is overdue.
    fn warn(&mut self, key: LeaseKey) {
        let Some(lease) = self.leases.get_mut(&key) else { return };
        let risk = lease.cell.risk_from(lease.cell.valid_until());
        if lease.at_risk || !lease.is_relied_on() || self.now < risk {
            return;
        }
        lease.at_risk = true;
        self.tell_holds(key, HoldChange::AtRisk);
    }

    pub(super) fn tell_holds(&mut self, key: LeaseKey, change: HoldChange) {
        let lease = &self.leases[&key];
        let reported = lease.holds.iter().filter(|(_, op)| !lease.verifying.contains(op));
        // One of several keys is told once, under its first token.
        let told = reported.filter(|(token, op)| self.ops[op].tokens().next() == Some(*token));
        self.events.extend(told.map(|(_, op)| Event::Hold { op: *op, change }));
    }

    /// The lease is over: holds are lost, waits fail, nothing is sent for it any more but a close
    /// that frees its keys early.
    pub(super) fn end_lease(&mut self, key: LeaseKey, cause: LossCause) {
        let Some(lease) = self.leases.get_mut(&key) else { return };
        // Nothing is sent under it any more, whatever the end of a hold makes room for.
        lease.leaving.clear();
        lease.unsent.clear();
        let (shard, session) = (lease.shard, lease.session);
        let unread = (lease.id, lease.secret, lease.ttl);
        let holds: Vec<OpId> = lease.holds.iter().map(|(_, op)| *op).collect();
        let (pending, releasing) = (lease.pending.clone(), lease.releasing.clone());
        for op in holds {
            self.lose_hold(op, cause);
        }
        for op in releasing {
            self.release_ended_by_lease(op, cause);
        }
        self.remove_lease(key);
        for op in pending {
            self.rehome_or_fail(op, cause);
        }
        // A lease of a session that is only late may still live and hold keys. A hold's own lease
        // may be kept by another process.
        if let (LossCause::Expired, (Some(lease), secret, ttl), Some(_)) = (cause, unread, session)
        {
            self.start_close(shard, lease, secret, None, self.now.after(ttl));
        }
    }

    /// Takes a lease out of every table.
    pub(super) fn remove_lease(&mut self, key: LeaseKey) {
        let Some(lease) = self.leases.remove(&key) else { return };
        self.timers.cancel(Timer::Lease(key));
        self.renewals.remove(&(lease.shard, lease.renew_at, key));
        self.orphan(lease.opening, lease.shard, lease.secret);
        self.kill(lease.reading);
        if let Some(session) = lease.session.and_then(|id| self.sessions.get_mut(&id)) {
            session.leases.remove(&lease.shard);
        }
        for ask in lease.asks {
            if let Some(Call::Renew { .. }) = self.calls.remove(&ask) {
                let failure = Failure::of(ErrorCode::LEASE_DEAD);
                self.events.push_back(Event::Renewed { call: ask, result: Err(failure) });
            }
        }
    }
}

/// What a reply that does not fit its request says.
pub(super) fn refusal_of(reply: &Reply) -> Failure {
    match reply {
        Reply::Outcome(OutcomeReply { outcome: Outcome::Refused { code, token, .. }, .. }) => {
            Failure { token: *token, ..Failure::of(*code) }
        }
        _ => Failure::new(ErrorCode::MALFORMED, "the reply does not fit its request"),
    }
}
