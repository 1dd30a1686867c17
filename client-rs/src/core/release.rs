//! Cancels and releases: each goes out under the number that its acquire reserved for it, and is
//! repeated until it is answered or the lease has ended.

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::Number;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::request::Request;

use super::acquire::{Cancel, Release};
use super::cell::LossCause;
use super::exchange::{Exchange, Owner, as_request};
use super::lease::refusal_of;
use super::route::Lane;
use super::{Core, Event, LeaseKey, OpId, Timer};
use crate::clock::BootTime;
use crate::error::Failure;

impl Core {
    /// Cancels an acquire that was sent. The body of a cancel cannot change once it is sent, so one
    /// that is on its way stays as it is.
    pub(super) fn start_cancel(&mut self, id: OpId, release_if_granted: bool) {
        let Some(op) = self.ops.get(&id) else { return };
        if op.cancel.is_some() || op.grant.is_some() {
            return;
        }
        let (key, number) = (op.lease, Number(op.number.expect("the caller checked").0 + 1));
        let names = op.keys();
        let lease = self.leases.get_mut(&key).expect("a pending op has a lease");
        lease.numbers.begin(number);
        for name in names {
            lease.leaving.entry(name).or_default().on_their_way += 1;
        }
        let shard = lease.shard;
        let cancel = Cancel { exchange: None, release_if_granted };
        self.ops.get_mut(&id).expect("looked up above").cancel = Some(cancel);
        let send = Exchange::new(Owner::Cancel(id), Some(shard), Lane::Lease, BootTime::NEVER);
        let exchange = Some(self.start(send));
        if let Some(op) = self.ops.get_mut(&id) {
            op.cancel = Some(Cancel { exchange, ..cancel });
        }
    }

    pub(super) fn build_cancel(&self, id: OpId, ms: u32) -> Option<(Request, Vec<Number>)> {
        let op = self.ops.get(&id)?;
        let lease = self.leases.get(&op.lease)?;
        let caller = lease.caller(Number(op.number?.0 + 1))?;
        let acks = caller.acks.clone();
        let command = Command::Cancel { caller, release_if_granted: op.cancel?.release_if_granted };
        Some((as_request(lease.shard, ms, command), acks))
    }

    pub(super) fn cancel_answered(&mut self, id: OpId, result: Result<Reply, Failure>) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        // From here on it is not on its way; `arrived` below says so to others.
        op.cancel = None;
        let (key, names) = (op.lease, op.keys());
        let number = Number(op.number.expect("it was sent").0 + 1);
        if let Some(lease) = self.leases.get_mut(&key) {
            lease.numbers.settle(number, false);
        }
        let outcome = match result {
            Ok(Reply::Outcome(OutcomeReply { outcome, .. })) => Ok(outcome),
            Ok(reply) => Err(refusal_of(&reply)),
            Err(failure) => Err(failure),
        };
        let granted = op_is_granted(self, id);
        match outcome {
            // Granted before, and given back by this cancel: the hold, or one entry of it.
            Ok(Outcome::Released { .. } | Outcome::Changed { .. }) if granted => self.remove_op(id),
            // The outcome of the acquire itself has come meanwhile.
            _ if granted && self.ops[&id].abandoned => self.start_release(id, false),
            _ if granted => {}
            // A grant that is heard of through a cancel may be old.
            outcome => self.take_outcome(id, true, outcome),
        }
        for name in names {
            self.arrived(key, &name);
        }
    }

    /// A release or cancel of this key is done: acquires that waited for it go out.
    pub(super) fn arrived(&mut self, key: LeaseKey, name: &[u8]) {
        let Some(lease) = self.leases.get_mut(&key) else { return };
        let Some(leaving) = lease.leaving.get_mut(name) else { return };
        leaving.on_their_way -= 1;
        if leaving.on_their_way > 0 {
            return;
        }
        let blocked = lease.leaving.remove(name).expect("just looked up").blocked;
        for op in blocked {
            let waits = |op: &super::Op| op.lease == key && op.number.is_none();
            if self.ops.get(&op).is_some_and(waits) {
                self.try_send(op);
            }
        }
    }

    /// Gives a hold back. With `awaited`, `Event::Released` follows.
    pub(crate) fn release(
        &mut self,
        now: BootTime,
        id: OpId,
        awaited: bool,
    ) -> Result<(), Failure> {
        self.tick(now);
        let Some(op) = self.ops.get(&id).filter(|op| op.release.is_none()) else {
            return Err(Failure::new(ErrorCode::LEASE_DEAD, "the hold had ended before"));
        };
        if let Some(cell) = &op.cell {
            cell.release();
            if let Some(cause) = cell.lost() {
                // Seen as lost by the clock; the core's own timer has not come to it yet.
                self.lose_hold(id, cause);
                return Err(Failure::new(ErrorCode::LEASE_DEAD, "the hold had ended before"));
            }
        }
        self.start_release(id, awaited);
        Ok(())
    }

    pub(super) fn start_release(&mut self, id: OpId, awaited: bool) {
        self.drop_changes(id, false);
        let Some(op) = self.ops.get_mut(&id).filter(|op| op.release.is_none()) else { return };
        assert!(op.grant.is_some(), "only a hold is released");
        op.release = Some(Release { exchange: None, awaited });
        let changing = op.is_changing();
        let (key, names, own, tokens) = (op.lease, op.keys(), op.own_lease, op.tokens());
        let holder = op.held_by().expect("only a hold is released");
        let number = op.number.expect("it was granted");
        let lease = self.leases.get_mut(&holder).expect("a hold has a lease");
        lease.forget_hold(id, tokens);
        lease.verifying.remove(&id);
        lease.capped.retain(|(_, capped)| *capped != id);
        lease.releasing.insert(id);
        if let Some(lease) = self.leases.get_mut(&key) {
            for name in names {
                lease.leaving.entry(name).or_default().on_their_way += 1;
            }
            if own.is_none() {
                lease.numbers.begin(Number(number.0 + 2));
            }
        }
        if awaited {
            self.timers.set(Timer::Op(id), self.now.after(self.timing.call));
        }
        // The token that it must name depends on how a change ends that is on its way.
        if !changing {
            self.send_release(id);
        }
        self.arm(holder);
    }

    pub(super) fn send_release(&mut self, id: OpId) {
        let Some(op) = self.ops.get(&id) else { return };
        let holder = op.held_by().expect("only a hold is released");
        let lease = self.leases.get(&holder).expect("a hold has a lease");
        // A hold's own lease outlives the session, but not its own TTL.
        let deadline = match op.own_lease {
            Some(_) => self.now.after(lease.ttl),
            None => BootTime::NEVER,
        };
        let shard = Some(lease.shard);
        let release = Exchange::new(Owner::Release(id), shard, Lane::Lease, deadline);
        let exchange = Some(self.start(release));
        if let Some(release) = self.ops.get_mut(&id).and_then(|op| op.release.as_mut()) {
            release.exchange = exchange;
        }
    }

    pub(super) fn build_release(&self, id: OpId, ms: u32) -> Option<(Request, Vec<Number>)> {
        let op = self.ops.get(&id)?;
        let lease = self.leases.get(&op.held_by()?)?;
        let token = op.grant.as_ref()?.token;
        let key = op.key.clone();
        if op.own_lease.is_some() {
            let command =
                Command::ReleaseOwn { lease: lease.id?, secret: lease.secret, key, token };
            return Some((as_request(lease.shard, ms, command), Vec::new()));
        }
        let caller = lease.caller(Number(op.number?.0 + 2))?;
        let acks = caller.acks.clone();
        let command = match op.more.as_slice() {
            [] => Command::Release { caller, key, token },
            _ => Command::ReleaseAll { caller, acquire: op.number? },
        };
        Some((as_request(lease.shard, ms, command), acks))
    }

    pub(super) fn release_answered(
        &mut self,
        id: OpId,
        retried: bool,
        result: Result<Reply, Failure>,
    ) {
        let Some(op) = self.ops.get(&id) else { return };
        let (key, own) = (op.lease, op.own_lease);
        if own.is_none() {
            let number = Number(op.number.expect("it was granted").0 + 2);
            if let Some(lease) = self.leases.get_mut(&key) {
                lease.numbers.settle(number, false);
            }
        }
        let failure = match result {
            // Of a hold that was re-entered one entry less.
            Ok(Reply::Outcome(OutcomeReply {
                outcome: Outcome::Released { .. } | Outcome::Changed { .. },
                ..
            })) => return self.release_done(id, Ok(())),
            Ok(reply) => refusal_of(&reply),
            Err(failure) => failure,
        };
        let dead = matches!(failure.code, ErrorCode::LEASE_DEAD | ErrorCode::BAD_SECRET);
        let over =
            dead || matches!(failure.code, ErrorCode::NOT_OWNER | ErrorCode::NUMBER_BELOW_FLOOR);
        // An acquire's numbers are forgotten with its hold: which of them it was helps nobody.
        let failure = match failure.code {
            ErrorCode::NUMBER_BELOW_FLOOR => {
                Failure::new(ErrorCode::NOT_OWNER, "the hold had ended before")
            }
            _ => failure,
        };
        // The hold is over. If an earlier attempt may have done it, it has.
        let done = over && retried && (own.is_some() || !dead);
        self.release_done(id, if done { Ok(()) } else { Err(failure) });
        if dead && own.is_none() {
            self.end_lease(key, LossCause::LeaseDead);
        }
    }

    fn release_done(&mut self, id: OpId, result: Result<(), Failure>) {
        let Some(op) = self.ops.get(&id) else { return };
        let key = op.lease;
        if op.release.is_some_and(|release| release.awaited) {
            self.events.push_back(Event::Released { op: id, result });
        }
        self.remove_op(id);
        self.send_unsent(key);
    }

    /// Somebody has waited long enough for a release. It goes on by itself.
    pub(super) fn release_due(&mut self, id: OpId) {
        let exchange = self.ops[&id].release.and_then(|release| release.exchange);
        let verdict = self.verdict(exchange);
        let release = self.ops.get_mut(&id).and_then(|op| op.release.as_mut());
        if release.is_some_and(|release| std::mem::take(&mut release.awaited)) {
            self.events.push_back(Event::Released { op: id, result: Err(verdict) });
        }
    }

    /// The lease ended while a release was on its way.
    pub(super) fn release_ended_by_lease(&mut self, id: OpId, cause: LossCause) {
        let result = match cause {
            // Closing gives back everything.
            LossCause::SessionClosed => Ok(()),
            _ => Err(Failure::of(ErrorCode::LEASE_LOST)),
        };
        self.release_done(id, result);
    }
}

fn op_is_granted(core: &Core, id: OpId) -> bool {
    core.ops.get(&id).is_some_and(|op| op.grant.is_some())
}
