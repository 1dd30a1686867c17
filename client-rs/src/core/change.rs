//! Changes of a hold that its holder asks for: of its mode, or of its value.
//!
//! Changes of one hold go out one after the other, each under a number of its own. One that was
//! sent goes on until it is answered, whoever waits for it: its outcome decides what the hold is.
//! A release waits for it, because it must name the token that is in force then.
//!
//! An upgrade is a new grant under a new token. While its answer is open the hold may be either;
//! what its holder may believe, a shared hold, is true of both. The new token is told like any
//! grant: at once if it came without a retry and its version follows on what is known, else when a
//! renewal has shown that it is current.

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{Mode, Number, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{HeldKey, OutcomeReply, Reply};
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::{check_mode, check_value};

use super::acquire::Op;
use super::cell::LossCause;
use super::exchange::{Exchange, Owner, as_request};
use super::lease::refusal_of;
use super::route::Lane;
use super::settle::Adoption;
use super::{CALLS_MAX, Call, CallId, Core, Event, ExchangeId, LeaseKey, OpId, Timer};
use crate::clock::BootTime;
use crate::error::Failure;

/// Changes of one hold that may wait for each other.
const CHANGES_MAX: usize = 16;

/// What is to become of a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Another mode.
    Mode(Mode),
    /// Another value.
    Value(Vec<u8>),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Change {
    call: CallId,
    wish: Wish,
    /// `None` until it is sent.
    number: Option<Number>,
    exchange: Option<ExchangeId>,
    /// Granted anew, and not shown to be current yet.
    confirming: bool,
}

impl Op {
    /// A change was sent and has no answer yet.
    pub(super) fn is_changing(&self) -> bool {
        self.changes.front().is_some_and(|change| change.number.is_some() && !change.confirming)
    }

    /// Tells the holder its mode. From the moment at which it asks to hold with others it is not
    /// alone any more: they may be let in before the answer comes.
    fn show_mode(&self) {
        let shares = |change: &Change| change.wish == Wish::Mode(Mode::SHARED);
        if let Some(cell) = &self.cell {
            let shared = self.changes.iter().any(shares);
            cell.set_mode(if shared { Mode::SHARED } else { self.options.mode });
        }
    }

    /// The hold that the cluster lists is this one: under this token of it, or under that of an
    /// upgrade whose answer has not come.
    pub(super) fn is_listed_as(&self, token: Token, held: &HeldKey) -> bool {
        let upgrade = |change: &Change| change.wish == Wish::Mode(Mode::EXCLUSIVE);
        let upgrading = self.is_changing() && self.changes.front().is_some_and(upgrade);
        token == held.token || upgrading && held.key == self.key
    }
}

impl Core {
    /// Starts a change of a hold that was reported; `Event::Changed` follows.
    pub(crate) fn change(
        &mut self,
        now: BootTime,
        id: OpId,
        wish: Wish,
    ) -> Result<CallId, Failure> {
        self.tick(now);
        match &wish {
            Wish::Mode(mode) => check_mode(*mode).map_err(Failure::of)?,
            Wish::Value(value) => check_value(value).map_err(Failure::of)?,
        }
        let open = |op: &&Op| op.cell.is_some() && op.release.is_none() && !op.is_latched();
        let Some(op) = self.ops.get(&id).filter(open) else {
            return Err(Failure::new(ErrorCode::LEASE_DEAD, "the hold has ended"));
        };
        if op.own_lease.is_some() {
            let text = "a hold with a lease of its own keeps its mode and its value";
            return Err(Failure::new(ErrorCode::BAD_COMBINATION, text));
        }
        if !op.more.is_empty() {
            let text = "a hold of several keys keeps its modes and its value";
            return Err(Failure::new(ErrorCode::BAD_COMBINATION, text));
        }
        if matches!(wish, Wish::Mode(_)) && op.options.mode.permit_count().is_some() {
            let text = "permits of a semaphore have no other mode";
            return Err(Failure::new(ErrorCode::MODE_MISMATCH, text));
        }
        if op.changes.len() >= CHANGES_MAX || self.calls.len() >= CALLS_MAX {
            let text = "too many changes of this hold, or calls of this client, have no answer yet";
            return Err(Failure::new(ErrorCode::BUSY, text));
        }
        let call = CallId(self.fresh());
        self.calls.insert(call, Call::Change { op: id });
        self.timers.set(Timer::Call(call), self.now.after(self.timing.call));
        let change = Change { call, wish, number: None, exchange: None, confirming: false };
        let op = self.ops.get_mut(&id).expect("looked up above");
        op.changes.push_back(change);
        op.show_mode();
        if op.changes.len() == 1 {
            self.send_change(id);
        }
        Ok(call)
    }

    /// Sends the first change of a hold.
    fn send_change(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let Some(change) = op.changes.front_mut() else { return };
        let lease = self.leases.get_mut(&op.lease).expect("a hold has a lease");
        let Some(number) = lease.numbers.take_single() else {
            let text = "the session has too many requests open";
            return self.change_done(id, Err(Failure::new(ErrorCode::BUSY, text)));
        };
        change.number = Some(number);
        let shard = lease.shard;
        let send = Exchange::new(Owner::Change(id), Some(shard), Lane::Bulk, BootTime::NEVER);
        let exchange = Some(self.start(send));
        if let Some(change) = self.ops.get_mut(&id).and_then(|op| op.changes.front_mut()) {
            change.exchange = exchange;
        }
    }

    pub(super) fn build_change(&self, id: OpId, ms: u32) -> Option<(Request, Vec<Number>)> {
        let op = self.ops.get(&id)?;
        let change = op.changes.front()?;
        let lease = self.leases.get(&op.lease)?;
        let caller = lease.caller(change.number?)?;
        let acks = caller.acks.clone();
        let (key, token) = (op.key.clone(), op.grant.as_ref()?.token);
        let command = match &change.wish {
            Wish::Mode(mode) => Command::Convert { caller, key, token, mode: *mode },
            Wish::Value(value) => Command::SetValue { caller, key, token, value: value.clone() },
        };
        Some((as_request(lease.shard, ms, command), acks))
    }

    pub(super) fn change_answered(
        &mut self,
        id: OpId,
        retried: bool,
        result: Result<Reply, Failure>,
    ) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let key = op.lease;
        let change = op.changes.front_mut().expect("it was sent");
        change.exchange = None;
        let (number, wish) = (change.number.expect("it was sent"), change.wish.clone());
        let lease = self.leases.get_mut(&key).expect("a hold has a lease");
        lease.numbers.settle(number, false);
        let result = match (result, wish) {
            (Ok(Reply::Outcome(OutcomeReply { outcome: Outcome::Changed { .. }, .. })), wish) => {
                if let Wish::Mode(mode) = wish {
                    op.options.mode = mode;
                }
                Ok(())
            }
            (Ok(Reply::Outcome(OutcomeReply { outcome: Outcome::Granted(grant), .. })), _) => {
                return self.upgraded(id, grant, retried);
            }
            (Ok(reply), _) => Err(refusal_of(&reply)),
            (Err(failure), _) => Err(failure),
        };
        match &result {
            Err(failure)
                if matches!(failure.code, ErrorCode::LEASE_DEAD | ErrorCode::BAD_SECRET) =>
            {
                return self.end_lease(key, LossCause::LeaseDead);
            }
            // It is not held any more, which was not known: what is held is read anew.
            Err(failure) if failure.code == ErrorCode::NOT_OWNER => {
                self.doubt(key);
            }
            _ => {}
        }
        self.change_done(id, result);
    }

    /// The hold is exclusive, under a new token.
    fn upgraded(&mut self, id: OpId, grant: Grant, retried: bool) {
        let op = self.ops.get_mut(&id).expect("the caller looked it up");
        let key = op.lease;
        let former = op.grant.replace(grant).expect("it was granted").token;
        op.options.mode = Mode::EXCLUSIVE;
        let releasing = op.release.is_some();
        op.changes.front_mut().expect("the caller looked it up").confirming = true;
        let adoption = self.adopt(key, &grant, 1);
        if releasing {
            return self.change_done(id, Ok(()));
        }
        let lease = self.leases.get_mut(&key).expect("a hold has a lease");
        lease.holds.remove(&(former, id));
        lease.holds.insert((grant.token, id));
        lease.confirming.insert(id);
        if adoption == Adoption::Current && !retried && self.now < lease.cell.valid_until() {
            self.confirm(id);
        } else {
            self.renew_soon(key);
        }
    }

    /// The new grant of an upgraded hold is current: its holder hears.
    pub(super) fn confirm(&mut self, id: OpId) {
        let Some(op) = self.ops.get(&id) else { return };
        self.leases.get_mut(&op.lease).expect("a hold has a lease").confirming.remove(&id);
        if let (Some(grant), Some(cell)) = (&op.grant, &op.cell) {
            cell.regrant((grant.token, grant.floor));
        }
        self.change_done(id, Ok(()));
    }

    /// The first change of a hold is over. What waited for it follows.
    fn change_done(&mut self, id: OpId, result: Result<(), Failure>) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let change = op.changes.pop_front().expect("the caller looked it up");
        op.show_mode();
        let (key, releasing) = (op.lease, op.release.is_some());
        self.tell_change(change.call, result);
        if releasing {
            self.send_release(id);
        } else {
            self.send_change(id);
        }
        self.send_unsent(key);
    }

    fn tell_change(&mut self, call: CallId, result: Result<(), Failure>) {
        self.timers.cancel(Timer::Call(call));
        if self.calls.remove(&call).is_some() {
            self.events.push_back(Event::Changed { call, result });
        }
    }

    /// The hold ends: changes that were not sent never will be, and nobody learns of a sent one.
    pub(super) fn drop_changes(&mut self, id: OpId, sent_too: bool) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let keep = usize::from(!sent_too && op.is_changing());
        let (key, dropped) = (op.lease, op.changes.split_off(keep.min(op.changes.len())));
        for change in dropped {
            self.kill(change.exchange);
            if let Some(lease) = self.leases.get_mut(&key) {
                lease.confirming.remove(&id);
                if let (Some(number), false) = (change.number, change.confirming) {
                    lease.numbers.settle(number, true);
                }
            }
            let failure = Failure::new(ErrorCode::LEASE_LOST, "the hold has ended");
            self.tell_change(change.call, Err(failure));
        }
    }

    /// What is said of a change whose caller has waited long enough. It goes on by itself.
    pub(super) fn change_verdict(&self, call: CallId, op: OpId) -> Failure {
        let changes = self.ops.get(&op).map(|op| &op.changes);
        let change = changes.and_then(|all| all.iter().find(|change| change.call == call));
        match change {
            Some(change) if change.number.is_some() => self.verdict(change.exchange),
            _ => Failure::new(ErrorCode::BUSY, "an earlier change of the hold has no answer yet"),
        }
    }

    /// Holds may be other than they are known to be: nothing is extended before they are read.
    pub(super) fn doubt(&mut self, key: LeaseKey) {
        if let Some(lease) = self.leases.get_mut(&key) {
            lease.versions.unsettle();
            self.read_holds(key);
        }
    }
}
