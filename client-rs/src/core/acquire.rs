//! One acquire, from the call to the report of a hold or of its failure.
//!
//! A grant is reported at once only if it came without a wait and without a retry, and its version
//! follows on what is known. Any other grant is reported when a renewal has shown that it is
//! current: it may have been made long ago.
//!
//! An acquire whose wait is over, or whose caller has gone, is cancelled under the number it
//! reserved for that; the committed outcome is what counts. If its caller has gone and it was
//! granted all the same, the hold is given back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::command::OwnLease;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{HoldSetVersion, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::planted;
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::{check_key, check_ttl_ms, check_value};

use super::cell::{HoldCell, LossCause};
use super::change::Change;
use super::exchange::{Exchange, Owner, as_request};
use super::handover::NO_SESSION;
use super::lease::{Lease, refusal_of};
use super::options::{Further, Options};
use super::route::Lane;
use super::settle::{Adoption, OWN_GRANT, Versions};
use super::{Core, Event, ExchangeId, Held, HoldChange, LeaseKey, OPS_MAX, OpId, SessionId, Timer};
use crate::clock::BootTime;
use crate::error::Failure;

/// How long an acquire waits in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all.
    Try,
    /// This long.
    For(Duration),
    /// As long as the session's lease lives, once the cluster has said that it waits.
    Unlimited,
}

/// What a user asks for.
#[derive(Clone, Debug)]
pub(crate) struct AcquireRequest {
    pub(crate) session: SessionId,
    pub(crate) key: Vec<u8>,
    /// Further keys of the same shard: all are granted in one step, or none.
    pub(crate) more: Vec<Further>,
    pub(crate) value: Vec<u8>,
    pub(crate) wait: Wait,
    /// TTL, in milliseconds, and secret of a lease of the hold's own.
    pub(crate) own: Option<(u64, Secret)>,
    pub(crate) options: Options,
}

/// A cancel on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cancel {
    /// `None` only until it is registered.
    pub(super) exchange: Option<ExchangeId>,
    /// What it asks for, fixed when it is first sent.
    pub(super) release_if_granted: bool,
}

/// A release on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    /// `None` only until it is registered.
    pub(super) exchange: Option<ExchangeId>,
    /// Somebody waits for its outcome.
    pub(super) awaited: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Op {
    /// `NO_SESSION` if another client acquired it and handed it over.
    pub(super) session: SessionId,
    /// The session's lease, whose numbers it uses.
    pub(super) lease: LeaseKey,
    own: Option<OwnLease>,
    /// The hold's own lease, once granted.
    pub(super) own_lease: Option<LeaseKey>,
    pub(super) key: Vec<u8>,
    pub(super) more: Vec<Further>,
    value: Vec<u8>,
    pub(super) options: Options,
    wait: Wait,
    wait_until: BootTime,
    deadline: BootTime,
    /// `None` until it is sent.
    pub(super) number: Option<Number>,
    pub(super) exchange: Option<ExchangeId>,
    pub(super) cancel: Option<Cancel>,
    /// It was answered `queued`.
    waited: bool,
    /// How often it was moved to a new lease after its own had turned out dead.
    moves: u32,
    /// Its wait is over.
    timed: bool,
    /// Nobody waits for its outcome any more.
    pub(super) abandoned: bool,
    pub(super) grant: Option<Grant>,
    /// Set when the hold is reported to its caller.
    pub(super) cell: Option<Arc<HoldCell>>,
    pub(super) release: Option<Release>,
    /// Asked for and not over, in that order; the first may have been sent.
    pub(super) changes: VecDeque<Change>,
}

impl Op {
    /// The version of the lease that holds it, from which on it is among its holds.
    pub(super) fn granted_at(&self) -> HoldSetVersion {
        match (&self.grant, self.own) {
            (Some(grant), None) => grant.version_after,
            _ => OWN_GRANT,
        }
    }

    /// It does not wait.
    pub(super) fn tries_once(&self) -> bool {
        self.wait == Wait::Try
    }

    /// All its keys.
    pub(super) fn keys(&self) -> Vec<Vec<u8>> {
        let further = self.more.iter().map(|further| further.key.clone());
        std::iter::once(self.key.clone()).chain(further).collect()
    }

    /// The tokens of all its keys, once granted: they follow each other.
    pub(super) fn tokens(&self) -> impl Iterator<Item = Token> + use<> {
        let first = self.grant.as_ref().map(|grant| grant.token.0);
        let count = self.more.len() as u64;
        first.into_iter().flat_map(move |first| (first..=first + count).map(Token))
    }

    /// The lease that holds it.
    pub(super) fn held_by(&self) -> Option<LeaseKey> {
        self.grant?;
        self.own_lease.or(Some(self.lease))
    }

    /// Somebody saw by the clock that it is lost.
    pub(super) fn is_latched(&self) -> bool {
        self.cell.as_ref().is_some_and(|cell| cell.lost().is_some())
    }

    /// It is not extended past `until`. True if it was not capped before.
    pub(super) fn cap(&self, until: BootTime) -> bool {
        let Some(cell) = &self.cell else { return false };
        let first = !cell.is_capped();
        cell.cap(until);
        first
    }
}

impl Core {
    /// Starts an acquire; `Event::Acquired` follows, unless it is abandoned before.
    pub(crate) fn acquire(
        &mut self,
        now: BootTime,
        request: AcquireRequest,
    ) -> Result<OpId, Failure> {
        self.tick(now);
        let own = check_request(&request)?;
        let shard = self.shard_of(&request.key)?;
        for further in &request.more {
            if self.shard_of(&further.key)? != shard {
                let text = "keys of several shards cannot be acquired at once: give them one {tag}";
                return Err(Failure::new(ErrorCode::WRONG_SHARD, text));
            }
        }
        let open = self.sessions.get(&request.session).is_some_and(|session| !session.closing);
        if !open {
            return Err(Failure::new(ErrorCode::LEASE_DEAD, "the session was closed"));
        }
        if self.ops.len() >= OPS_MAX {
            let text = format!("this client has {OPS_MAX} acquires and holds already");
            return Err(Failure::new(ErrorCode::BUSY, text));
        }
        let id = OpId(self.fresh());
        let op = self.new_op(request, own);
        let session = op.session;
        self.ops.insert(id, op);
        // Registered before the lease is made, so that a lease that fails at once finds it.
        let lease = self.lease_for_op(session, shard, id);
        if lease {
            self.try_send(id);
            self.arm_op(id);
        }
        Ok(id)
    }

    fn new_op(&self, request: AcquireRequest, own: Option<OwnLease>) -> Op {
        let (wait_until, deadline) = match request.wait {
            // Without a limit: until it is known to wait.
            Wait::Try | Wait::Unlimited => (BootTime::NEVER, self.now.after(self.timing.call)),
            Wait::For(wait) => {
                let until = self.now.after(wait);
                (until, until.after(self.timing.call))
            }
        };
        Op {
            session: request.session,
            lease: LeaseKey(0),
            own,
            own_lease: None,
            key: request.key,
            more: request.more,
            value: request.value,
            options: request.options,
            wait: request.wait,
            wait_until,
            deadline,
            number: None,
            exchange: None,
            cancel: None,
            waited: false,
            moves: 0,
            timed: false,
            abandoned: false,
            grant: None,
            cell: None,
            release: None,
            changes: VecDeque::new(),
        }
    }

    /// A hold that another client was granted.
    pub(super) fn taken_op(
        &self,
        request: AcquireRequest,
        own: OwnLease,
        (number, grant): (Number, Grant),
    ) -> Op {
        let op = self.new_op(request, Some(own));
        Op { number: Some(number), grant: Some(grant), ..op }
    }

    /// Puts an op under its session's lease. False if that failed at once, and the op with it.
    fn lease_for_op(&mut self, session: SessionId, shard: ShardId, id: OpId) -> bool {
        let key = self.lease_for(session, shard);
        let Some(lease) = self.leases.get_mut(&key) else {
            self.finish_op(id, self.refusal());
            return false;
        };
        lease.pending.insert(id);
        self.ops.get_mut(&id).expect("the caller made it").lease = key;
        true
    }

    /// Why nothing can be opened at all.
    fn refusal(&self) -> Failure {
        let refused = self.router.all_refused().cloned();
        refused.unwrap_or_else(|| Failure::of(ErrorCode::UNREACHABLE))
    }

    /// Sends an acquire, or notes what it waits for.
    pub(super) fn try_send(&mut self, id: OpId) {
        let op = &self.ops[&id];
        let key = op.lease;
        let lease = self.leases.get_mut(&key).expect("a pending op has a lease");
        let leaving = op.keys().into_iter().find(|key| lease.leaving.contains_key(key));
        if let Some(leaving) = leaving.and_then(|key| lease.leaving.get_mut(&key)) {
            return leaving.blocked.push(id);
        }
        let number = lease.id.and_then(|_| lease.numbers.take());
        let Some(number) = number else { return lease.unsent.push_back(id) };
        self.ops.get_mut(&id).expect("looked up above").number = Some(number);
        let shard = lease.shard;
        let send = Exchange::new(Owner::Acquire(id), Some(shard), Lane::Bulk, BootTime::NEVER);
        let exchange = self.start(send);
        if let Some(op) = self.ops.get_mut(&id) {
            op.exchange = Some(exchange);
        }
    }

    /// Sends what had to wait for the lease or for room in its window.
    pub(super) fn send_unsent(&mut self, key: LeaseKey) {
        while let Some(lease) = self.leases.get_mut(&key)
            && lease.id.is_some()
            && let Some(id) = lease.unsent.pop_front()
        {
            let waits = |op: &Op| op.lease == key && op.number.is_none();
            if !self.ops.get(&id).is_some_and(waits) {
                continue;
            }
            self.try_send(id);
            let lease = self.leases.get_mut(&key).expect("nothing ended it");
            if lease.unsent.back() == Some(&id) {
                // No room: it goes back to where it was.
                lease.unsent.rotate_right(1);
                return;
            }
        }
    }

    /// Sets an op's timer to the end of its wait, then to its deadline.
    pub(super) fn arm_op(&mut self, id: OpId) {
        let Some(op) = self.ops.get(&id) else { return };
        let at = if op.timed { op.deadline } else { op.wait_until.min(op.deadline) };
        self.timers.set(Timer::Op(id), at);
    }

    pub(super) fn build_acquire(&self, id: OpId, ms: u32) -> Option<(Request, Vec<Number>)> {
        let op = self.ops.get(&id)?;
        let lease = self.leases.get(&op.lease)?;
        let caller = lease.caller(op.number?)?;
        let acks = caller.acks.clone();
        let wait_ms = self.wait_ms(op.wait);
        let command = op.options.command(caller, (&op.key, &op.more), op.own, &op.value, wait_ms);
        Some((as_request(lease.shard, ms, command), acks))
    }

    /// The server's limit of a wait: later than ours, and the same in each retry.
    fn wait_ms(&self, wait: Wait) -> u32 {
        match wait {
            Wait::Try => 0,
            Wait::Unlimited => u32::MAX,
            Wait::For(wait) => {
                let backstop = (wait + self.timing.call).as_millis();
                u32::try_from(backstop).unwrap_or(u32::MAX).clamp(1, u32::MAX - 1)
            }
        }
    }

    /// The end of a wait, the deadline of an acquire or of a release.
    pub(super) fn op_due(&mut self, id: OpId) {
        let Some(op) = self.ops.get(&id) else { return };
        if op.release.is_some() {
            return self.release_due(id);
        }
        if self.now >= op.deadline || self.is_kept_out(op.exchange) {
            let verdict = self.acquire_verdict(id);
            self.give_up(id, Some(verdict));
            return;
        }
        self.ops.get_mut(&id).expect("just looked up").timed = true;
        self.arm_op(id);
        if self.ops[&id].number.is_some() {
            self.start_cancel(id, false);
        }
    }

    /// What is said of an acquire that has no outcome in time.
    fn acquire_verdict(&self, id: OpId) -> Failure {
        let op = &self.ops[&id];
        if op.number.is_some() {
            return match op.exchange {
                // Refused whenever it was tried: it has not happened.
                exchange @ Some(_) => self.verdict(exchange),
                None => Failure::of(ErrorCode::DEADLINE),
            };
        }
        let lease = self.leases.get(&op.lease);
        let opening = lease.and_then(|lease| lease.opening);
        if opening.is_some() {
            return self.verdict(opening);
        }
        let text = match lease {
            Some(lease) if op.keys().iter().any(|key| lease.leaving.contains_key(key)) => {
                "an earlier release or cancel of this key has no answer yet"
            }
            _ => "the session has too many requests open",
        };
        Failure::new(ErrorCode::BUSY, text)
    }

    /// The caller has gone: its future was dropped.
    pub(crate) fn abandon(&mut self, now: BootTime, id: OpId) {
        self.tick(now);
        self.give_up(id, None);
    }

    /// Ends the caller's interest; the cluster's part is undone as far as it goes.
    fn give_up(&mut self, id: OpId, verdict: Option<Failure>) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        if let Some(failure) = verdict {
            self.events.push_back(Event::Acquired { op: id, result: Err(failure) });
        }
        op.abandoned = true;
        self.timers.cancel(Timer::Op(id));
        // What was taken over and not confirmed is not ours to give back.
        if op.number.is_none() || op.session == NO_SESSION {
            return self.remove_op(id);
        }
        if op.grant.is_some() {
            return self.start_release(id, false);
        }
        // Planted (G3): a hold that nobody waits for any more is kept.
        self.start_cancel(id, !planted!("dropped-acquire-keeps-its-hold"));
    }

    /// The cluster put it into the queue.
    pub(super) fn acquire_queued(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        op.waited = true;
        if op.wait == Wait::Unlimited {
            op.deadline = BootTime::NEVER;
            self.timers.cancel(Timer::Op(id));
        }
        let (key, number) = (op.lease, op.number.expect("it was sent"));
        if let Some(lease) = self.leases.get_mut(&key) {
            lease.numbers.queued(number);
        }
        self.send_unsent(key);
    }

    /// The cluster grants nothing yet, and is asked again after `pause`: without a limit, the time
    /// that it takes to do so is the only one that counts.
    pub(super) fn wait_out(&mut self, id: OpId, pause: Duration) {
        let until = self.now.after(pause).after(self.timing.call);
        let Some(op) = self.ops.get_mut(&id) else { return };
        // One that was queued has no deadline any more.
        if op.wait == Wait::Unlimited && !op.abandoned && op.deadline != BootTime::NEVER {
            op.deadline = until;
            self.arm_op(id);
        }
    }

    pub(super) fn acquire_answered(
        &mut self,
        id: OpId,
        retried: bool,
        result: Result<Reply, Failure>,
    ) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        op.exchange = None;
        let outcome = match result {
            Ok(Reply::Outcome(OutcomeReply { outcome, .. })) => Ok(outcome),
            Ok(reply) => Err(refusal_of(&reply)),
            Err(failure) => Err(failure),
        };
        self.take_outcome(id, retried, outcome);
    }

    /// The final outcome of an acquire, from its own reply or from its cancel's.
    pub(super) fn take_outcome(
        &mut self,
        id: OpId,
        retried: bool,
        outcome: Result<Outcome, Failure>,
    ) {
        let op = &self.ops[&id];
        if op.grant.is_some() {
            return;
        }
        let (key, number, kept) = (op.lease, op.number.expect("it was sent"), retried || op.waited);
        let (timed, options) = (op.timed, op.options);
        self.leases.get_mut(&key).expect("a pending op has a lease").numbers.settle(number, kept);
        let ended = if timed { ErrorCode::TIMED_OUT } else { ErrorCode::CANCELLED };
        let failure = match outcome {
            Ok(Outcome::Granted(grant)) => return self.granted(id, grant, kept),
            Ok(
                Outcome::Cancelled { .. }
                | Outcome::Released { .. }
                | Outcome::Changed { .. }
                | Outcome::Refused { code: ErrorCode::CANCELLED, .. },
            ) => Failure::of(ended),
            Ok(Outcome::TimedOut { .. }) => Failure::of(ErrorCode::TIMED_OUT),
            // A cancel found that the acquire had been granted and that its hold is over already.
            Ok(Outcome::Refused { code: ErrorCode::NOT_QUEUED, .. }) => {
                let text = "the hold had ended before it was confirmed";
                Failure::new(ErrorCode::LEASE_LOST, text)
            }
            Ok(Outcome::Refused { code, token, .. }) => options.refusal(code, token),
            Ok(_) => Failure::new(ErrorCode::MALFORMED, "the outcome does not fit an acquire"),
            Err(failure) => failure,
        };
        if matches!(failure.code, ErrorCode::LEASE_DEAD | ErrorCode::BAD_SECRET) {
            return self.end_lease(key, LossCause::LeaseDead);
        }
        self.finish_op(id, failure);
        self.send_unsent(key);
    }

    /// The cluster granted it; `doubtful` if that may have been a while ago.
    fn granted(&mut self, id: OpId, grant: Grant, doubtful: bool) {
        // Planted (G1): a grant that may be old is reported as it is.
        let doubtful = doubtful && !planted!("doubtful-grant-reported");
        let op = self.ops.get_mut(&id).expect("the caller looked it up");
        op.grant = Some(grant);
        let (key, own, tokens) = (op.lease, op.own, op.tokens().collect::<Vec<_>>());
        let exchange = op.exchange.take();
        self.kill(exchange);
        self.leases.get_mut(&key).expect("a pending op has a lease").pending.remove(&id);
        let adoption = self.adopt(key, &grant, tokens.len());
        let holder = match own {
            Some(own) => self.make_own_lease(id, own, &grant, self.leases[&key].shard),
            None => key,
        };
        let lease = self.leases.get_mut(&holder).expect("just looked up or made");
        lease.holds.extend(tokens.iter().map(|token| (*token, id)));
        lease.verifying.insert(id);
        let valid = self.now < lease.cell.valid_until();
        let op = &self.ops[&id];
        if op.abandoned {
            if op.cancel.is_some_and(|cancel| cancel.release_if_granted) {
                // The cancel gives it back; nobody is to hear of it.
                lease.forget_hold(id, tokens);
                lease.verifying.remove(&id);
                lease.releasing.insert(id);
            } else {
                self.start_release(id, false);
            }
        } else if own.is_none() && adoption == Adoption::Current && !doubtful && valid {
            self.report(id);
        } else {
            self.renew_soon(holder);
        }
        self.send_unsent(key);
        self.arm(holder);
    }

    pub(super) fn make_own_lease(
        &mut self,
        id: OpId,
        own: OwnLease,
        grant: &Grant,
        shard: ShardId,
    ) -> LeaseKey {
        let key = LeaseKey(self.fresh());
        let op = self.ops.get_mut(&id).expect("the caller looked it up");
        op.own_lease = Some(key);
        let ttl = Duration::from_millis(u64::from(own.ttl_ms));
        let mut lease = Lease::new(shard, None, own.secret, ttl);
        lease.id = Some(grant.lease);
        lease.versions = Versions::of_own_lease();
        lease.kept_until = self.now.after(self.timing.call);
        self.leases.insert(key, lease);
        key
    }

    /// The hold is current: its caller hears.
    pub(super) fn report(&mut self, id: OpId) {
        let op = self.ops.get_mut(&id).expect("the caller looked it up");
        let holder = op.held_by().expect("it was granted");
        let grant = op.grant.as_ref().expect("it was granted");
        let granted = (grant.token, grant.floor);
        let lease = self.leases.get_mut(&holder).expect("a hold has a lease");
        lease.verifying.remove(&id);
        let cell = HoldCell::new(Arc::clone(&lease.cell), granted, op.options.mode);
        op.cell = Some(Arc::clone(&cell));
        self.timers.cancel(Timer::Op(id));
        self.events.push_back(Event::Acquired { op: id, result: Ok(Held { cell }) });
        self.arm(holder);
    }

    /// An acquire ends without a hold.
    pub(super) fn finish_op(&mut self, id: OpId, failure: Failure) {
        let Some(op) = self.ops.get(&id) else { return };
        if !op.abandoned {
            self.events.push_back(Event::Acquired { op: id, result: Err(failure) });
        }
        self.remove_op(id);
    }

    /// A granted hold is over. Several keys are one hold to their holder: with one of them it has
    /// lost all, and gives the others back.
    pub(super) fn lose_hold(&mut self, id: OpId, cause: LossCause) {
        let Some(op) = self.ops.get_mut(&id).filter(|op| op.release.is_none()) else { return };
        if let Some(cell) = &op.cell {
            if let Some(cause) = cell.lose(cause) {
                self.events.push_back(Event::Hold { op: id, change: HoldChange::Lost(cause) });
            }
        } else if !op.abandoned {
            let text = match cause {
                LossCause::Forced => "the hold was ended by an operator before it was confirmed",
                _ => ErrorCode::LEASE_LOST.text(),
            };
            let failure = Failure::new(ErrorCode::LEASE_LOST, text);
            self.events.push_back(Event::Acquired { op: id, result: Err(failure) });
        }
        if cause == LossCause::Forced && !op.more.is_empty() {
            op.abandoned = true;
            self.timers.cancel(Timer::Op(id));
            return self.start_release(id, false);
        }
        self.remove_op(id);
    }

    /// Takes an op out of every table.
    pub(super) fn remove_op(&mut self, id: OpId) {
        self.drop_changes(id, true);
        let Some(op) = self.ops.remove(&id) else { return };
        self.timers.cancel(Timer::Op(id));
        self.kill(op.exchange);
        let cancel = op.cancel.and_then(|cancel| cancel.exchange);
        let release = op.release.and_then(|release| release.exchange);
        // Whatever they are answered, nobody needs it: or else the floor would wait for it.
        for (exchange, after) in [(cancel, 1), (release, 2)] {
            if let (Some(number), Some(lease), true) = (
                op.number,
                self.leases.get_mut(&op.lease),
                exchange.is_some_and(|id| self.exchanges.contains_key(&id)),
            ) {
                lease.numbers.settle(Number(number.0 + after), true);
            }
            self.kill(exchange);
        }
        for key in [Some(op.lease), op.own_lease].into_iter().flatten() {
            let Some(lease) = self.leases.get_mut(&key) else { continue };
            lease.pending.remove(&id);
            lease.releasing.remove(&id);
            lease.verifying.remove(&id);
            lease.capped.retain(|(_, capped)| *capped != id);
            lease.forget_hold(id, op.tokens());
        }
        if let Some(own) = op.own_lease {
            self.remove_lease(own);
        }
        for _ in 0..usize::from(op.cancel.is_some()) + usize::from(op.release.is_some()) {
            for key in op.keys() {
                self.arrived(op.lease, &key);
            }
        }
        self.forget_if_unused(op.lease);
        self.arm(op.lease);
    }

    /// An acquire's lease ended. One that was never admitted moves, once, to a new lease of its
    /// session; any other fails.
    pub(super) fn rehome_or_fail(&mut self, id: OpId, cause: LossCause) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let fresh = !op.waited && op.moves == 0 && !op.abandoned && op.cancel.is_none();
        let session = self.sessions.get(&op.session).is_some_and(|session| !session.closing);
        if !(fresh && session && cause != LossCause::SessionClosed) {
            let text = match cause {
                LossCause::SessionClosed => "the session was closed",
                _ => ErrorCode::LEASE_LOST.text(),
            };
            return self.finish_op(id, Failure::new(ErrorCode::LEASE_LOST, text));
        }
        op.moves += 1;
        op.number = None;
        let (session, exchange, name) = (op.session, op.exchange.take(), op.key.clone());
        self.kill(exchange);
        let shard = self.shard_of(&name).expect("the shards are known since the acquire began");
        if self.lease_for_op(session, shard, id) {
            self.try_send(id);
        }
    }
}

fn check_request(request: &AcquireRequest) -> Result<Option<OwnLease>, Failure> {
    check_key(&request.key).map_err(Failure::of)?;
    check_value(&request.value).map_err(Failure::of)?;
    request.options.check(&request.key, &request.more, request.own.is_some())?;
    request.own.map(|(ttl_ms, secret)| Ok(OwnLease { ttl_ms: ttl(ttl_ms)?, secret })).transpose()
}

/// A TTL in range, or a failure that names what was given and the range.
pub(super) fn ttl(ttl_ms: u64) -> Result<u32, Failure> {
    check_ttl_ms(ttl_ms).map_err(|code| {
        Failure::new(code, format!("a TTL of {ttl_ms} ms is out of range: {}", code.text()))
    })
}
