//! One request from its first send to its final answer: where it is, how often it was tried, and
//! what a failed attempt means.
//!
//! An attempt that broke (connection lost, no answer, an error of class *retryable* or *unknown*)
//! is repeated under the same number after a jittered pause, at another node where there is one,
//! until an answer comes or the deadline passes. An answer to an earlier attempt counts as well.

use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{LeaseId, NodeId, Number, Secret, ShardId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{ErrorReply, LeaderHint, OutcomeReply, Reply};
use leasehold_protocol::request::{CommandRequest, Request};

use super::member::Doubt;
use super::rng::Backoff;
use super::route::{Choice, InFlight, Lane};
use super::{
    Call, CallId, ConnId, Core, Event, ExchangeId, LeaseKey, OpId, Output, SessionId, Timer,
    WatchId,
};
use crate::clock::BootTime;
use crate::error::Failure;

/// How long a request waits for a connection that is being set up before it also tries another.
const HEDGE: Duration = Duration::from_millis(250);
/// Hints followed at once; after that a request that is passed around rests between attempts.
const REDIRECTS_MAX: u32 = 2;
/// Failed attempts, about a second of them, after which the pauses grow.
const QUICK_RETRIES: u32 = 16;

/// Whose request it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Open(LeaseKey),
    /// An open whose lease nobody wants any more: if it comes, it is closed.
    Orphan {
        shard: ShardId,
        secret: Secret,
    },
    Acquire(OpId),
    Cancel(OpId),
    Release(OpId),
    Change(OpId),
    Renew(Vec<LeaseKey>),
    Holds(LeaseKey),
    Close {
        shard: ShardId,
        lease: LeaseId,
        secret: Secret,
        session: Option<SessionId>,
    },
    Call(CallId),
    Watch(WatchId, ShardId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Until its timer.
    Resting,
    /// Waits for this connection to be set up.
    Parked(ConnId),
    /// Sent, no answer yet.
    Sent(ConnId),
    /// Answered `queued`; the final answer comes on the same connection.
    Queued(ConnId),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Exchange {
    owner: Owner,
    pub(super) shard: Option<ShardId>,
    pub(super) lane: Lane,
    deadline: BootTime,
    /// How long one attempt waits for its answer; `None` is the default.
    patience: Option<Duration>,
    /// Sends so far.
    attempts: u32,
    failures: u32,
    redirects: u32,
    /// Some attempt may have had an effect that is not known.
    pub(super) uncertain: bool,
    pub(super) last: Option<Failure>,
    pub(super) state: State,
    last_sent: BootTime,
    /// Results that the last attempt acknowledged.
    acks: Vec<Number>,
    /// The address that the next attempt avoids if it can.
    avoid: Option<usize>,
}

impl Exchange {
    pub(super) const fn new(
        owner: Owner,
        shard: Option<ShardId>,
        lane: Lane,
        deadline: BootTime,
    ) -> Self {
        Self {
            owner,
            shard,
            lane,
            deadline,
            patience: None,
            attempts: 0,
            failures: 0,
            redirects: 0,
            uncertain: false,
            last: None,
            state: State::Resting,
            last_sent: BootTime(0),
            acks: Vec::new(),
            avoid: None,
        }
    }

    pub(super) const fn avoiding(mut self, avoid: Option<usize>) -> Self {
        self.avoid = avoid;
        self
    }

    pub(super) const fn owner(&self) -> &Owner {
        &self.owner
    }

    /// An answer on `conn` to what was sent at `sent_at` is one to the last attempt, which waits.
    pub(super) fn is_present(&self, conn: ConnId, sent_at: BootTime) -> bool {
        let waits = matches!(self.state, State::Sent(at) | State::Queued(at) if at == conn);
        waits && sent_at == self.last_sent
    }

    /// The last attempt is answered and goes on to be.
    pub(super) const fn settle_in(&mut self, conn: ConnId) {
        self.state = State::Queued(conn);
        self.failures = 0;
    }

    pub(super) const fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// What is said if no answer comes any more.
    fn verdict(&self) -> Failure {
        let open = self.uncertain || matches!(self.state, State::Sent(_) | State::Queued(_));
        match (&self.last, open) {
            (Some(last), false) => last.clone(),
            (Some(last), true) => {
                let text = format!("{} The last answer was {last}", ErrorCode::DEADLINE.text());
                Failure::new(ErrorCode::DEADLINE, text)
            }
            (None, true) => Failure::of(ErrorCode::DEADLINE),
            (None, false) => Failure::of(ErrorCode::UNREACHABLE),
        }
    }
}

impl Core {
    pub(super) fn start(&mut self, exchange: Exchange) -> ExchangeId {
        let id = self.enter_exchange(exchange);
        self.begin_exchange(id);
        id
    }

    /// Enters an exchange that is begun later.
    pub(super) fn enter_exchange(&mut self, exchange: Exchange) -> ExchangeId {
        let id = ExchangeId(self.fresh());
        self.exchanges.insert(id, exchange);
        id
    }

    pub(super) fn begin_exchange(&mut self, id: ExchangeId) {
        self.dispatch(id, None);
    }

    /// Forgets an exchange without an answer.
    pub(super) fn kill(&mut self, id: Option<ExchangeId>) {
        if let Some(id) = id {
            self.exchanges.remove(&id);
            self.timers.cancel(Timer::Exchange(id));
        }
    }

    /// An open that nobody waits for any more goes on only to be undone.
    pub(super) fn orphan(&mut self, id: Option<ExchangeId>, shard: ShardId, secret: Secret) {
        let Some(id) = id else { return };
        let deadline = self.now.after(self.timing.call);
        match self.exchanges.get_mut(&id) {
            Some(exchange) if matches!(exchange.state, State::Sent(_)) => {
                exchange.owner = Owner::Orphan { shard, secret };
                exchange.deadline = deadline;
            }
            _ => self.kill(Some(id)),
        }
    }

    /// What would be said about this exchange if it ended now.
    pub(super) fn verdict(&self, id: Option<ExchangeId>) -> Failure {
        id.and_then(|id| self.exchanges.get(&id))
            .map_or_else(|| Failure::of(ErrorCode::UNREACHABLE), Exchange::verdict)
    }

    /// Sends it, or finds out what it has to wait for.
    fn dispatch(&mut self, id: ExchangeId, avoid: Option<usize>) {
        let Some(exchange) = self.exchanges.get(&id) else { return };
        if self.now >= exchange.deadline {
            let verdict = exchange.verdict();
            return self.finish(id, Err(verdict), self.now);
        }
        // What concerns a live lease goes on as long as it may live; but an acquire that was never
        // sent has no effect to wait for.
        let may_end = match exchange.owner {
            Owner::Call(_) | Owner::Open(_) | Owner::Watch(..) => true,
            Owner::Acquire(_) => exchange.attempts == 0,
            _ => false,
        };
        if may_end && let Some(refusal) = self.router.all_refused() {
            let refusal = refusal.clone();
            return self.finish(id, Err(refusal), self.now);
        }
        let (shard, lane) = (exchange.shard, exchange.lane);
        match self.router.choose(shard, lane, avoid, self.now, &mut self.rng) {
            Choice::Use(conn) => self.send(id, conn),
            Choice::Park(conn) => self.park(id, conn),
            Choice::Connect(target) => {
                let conn = ConnId(self.fresh());
                let addr = self.router.open(conn, target, lane, self.now);
                self.timers.set(Timer::Conn(conn), self.now.after(self.timing.connect));
                self.outputs.push_back(Output::Connect { conn, addr });
                self.park(id, conn);
            }
            Choice::Rest(at) => {
                let at = at.max(self.now.after(Duration::from_millis(1)));
                self.set_state(id, State::Resting, at);
            }
        }
    }

    fn park(&mut self, id: ExchangeId, conn: ConnId) {
        self.router.conn(conn).expect("just chosen").parked.insert(id);
        self.set_state(id, State::Parked(conn), self.now.after(HEDGE));
    }

    /// Sets the state and the timer, which never runs past the deadline.
    pub(super) fn set_state(&mut self, id: ExchangeId, state: State, at: BootTime) {
        let exchange = self.exchanges.get_mut(&id).expect("the caller looked it up");
        exchange.state = state;
        let at = at.min(exchange.deadline);
        self.timers.set(Timer::Exchange(id), at);
    }

    pub(super) fn send(&mut self, id: ExchangeId, conn: ConnId) {
        let exchange = &self.exchanges[&id];
        let patience = exchange.patience.unwrap_or(self.timing.attempt).min(self.timing.attempt);
        let left = exchange.deadline.since(self.now);
        let timeout_ms = patience.min(left).as_millis().clamp(1, u128::from(u32::MAX)) as u32;
        let owner = exchange.owner.clone();
        let Some((request, acks)) = self.build(&owner, timeout_ms) else {
            return self.kill(Some(id));
        };
        let what = InFlight::Exchange { exchange: id, sent_at: self.now };
        if let Err(error) = self.put_out(conn, &request, what) {
            let why = Failure::new(ErrorCode::BUSY, error.to_string());
            return self.not_sent(id, why);
        }
        let exchange = self.exchanges.get_mut(&id).expect("checked above");
        exchange.attempts += 1;
        exchange.acks = acks;
        exchange.last_sent = self.now;
        // The node answers an error within `timeout_ms`; its answer gets some time to travel.
        let grace = patience / 4;
        self.set_state(id, State::Sent(conn), self.now.after(patience + grace));
    }

    /// The connection took no more: later there may be room.
    fn not_sent(&mut self, id: ExchangeId, why: Failure) {
        let exchange = self.exchanges.get_mut(&id).expect("the caller looked it up");
        exchange.failures += 1;
        exchange.last = Some(why);
        let failures = exchange.failures;
        let pause = self.retry_pause(failures);
        self.set_state(id, State::Resting, self.now.after(pause));
    }

    /// The request of an owner as it is to be sent now; `None` if there is nothing to ask any more.
    fn build(&self, owner: &Owner, timeout_ms: u32) -> Option<(Request, Vec<Number>)> {
        match owner {
            Owner::Open(lease) => self.build_open(*lease, timeout_ms),
            Owner::Acquire(op) => self.build_acquire(*op, timeout_ms),
            Owner::Cancel(op) => self.build_cancel(*op, timeout_ms),
            Owner::Release(op) => self.build_release(*op, timeout_ms),
            Owner::Change(op) => self.build_change(*op, timeout_ms),
            Owner::Renew(leases) => self.build_renew(leases, timeout_ms),
            Owner::Holds(lease) => self.build_holds(*lease, timeout_ms),
            // It is not sent again.
            Owner::Orphan { .. } => None,
            Owner::Close { shard, lease, secret, .. } => {
                let command = Command::Close { lease: *lease, secret: *secret };
                Some((as_request(*shard, timeout_ms, command), Vec::new()))
            }
            Owner::Call(call) => match self.calls.get(call)? {
                Call::Request(request) => Some((with_timeout(request, timeout_ms), Vec::new())),
                Call::Doubt(_) => Some((Doubt::request(timeout_ms), Vec::new())),
                Call::Renew { .. } | Call::Change { .. } => None,
            },
            Owner::Watch(watch, shard) => Some((self.build_watch(*watch, *shard)?, Vec::new())),
        }
    }

    /// The exchange's time is up in its present state.
    pub(super) fn exchange_due(&mut self, id: ExchangeId) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        if self.now >= exchange.deadline {
            let verdict = exchange.verdict();
            return self.finish(id, Err(verdict), self.now);
        }
        match exchange.state {
            State::Resting => {
                let avoid = exchange.avoid.take();
                self.dispatch(id, avoid);
            }
            State::Parked(conn) => {
                let avoid = self.router.target_of(conn);
                self.dispatch(id, avoid);
            }
            State::Sent(conn) => self.unanswered(id, conn),
            State::Queued(_) => {}
        }
    }

    /// An attempt got no answer in time, although the node should have answered an error by now.
    fn unanswered(&mut self, id: ExchangeId, conn: ConnId) {
        let message = format!("{}: no answer in time", self.router.addr_of(conn));
        let why = Failure::new(ErrorCode::UNREACHABLE, message);
        let avoid = self.router.target_of(conn);
        let exchange = self.exchanges.get_mut(&id).expect("the caller looked it up");
        exchange.uncertain = true;
        exchange.failures += 1;
        exchange.last = Some(why.clone());
        if let Some(shard) = exchange.shard {
            self.router.forget_leader(shard);
        }
        self.note_risk(id, why.code);
        self.dispatch(id, avoid);
    }

    pub(super) fn exchange_answered(
        &mut self,
        conn: ConnId,
        id: ExchangeId,
        sent_at: BootTime,
        reply: Reply,
    ) {
        self.take_hint(conn, id, &reply);
        if matches!(reply, Reply::Outcome(_)) {
            self.confirm_acks(id, sent_at);
        }
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        if matches!(exchange.owner, Owner::Watch(..)) && !matches!(reply, Reply::Error(_)) {
            return self.watch_told(conn, id, sent_at, reply);
        }
        match reply {
            // A later attempt is on its way or waits: an earlier one's trouble is old news.
            Reply::Error(error) if is_retried_here(error.code) && sent_at != exchange.last_sent => {
            }
            Reply::Error(error) => self.attempt_failed(conn, id, error),
            Reply::Outcome(OutcomeReply { outcome: Outcome::Queued { .. }, .. }) => {
                let Owner::Acquire(op) = exchange.owner else { return };
                // The final outcome comes where the acquire was sent last.
                if sent_at == exchange.last_sent && exchange.state == State::Sent(conn) {
                    exchange.state = State::Queued(conn);
                    exchange.failures = 0;
                    self.timers.cancel(Timer::Exchange(id));
                }
                self.acquire_queued(op);
            }
            Reply::Outcome(OutcomeReply { outcome: Outcome::Refused { code, .. }, .. })
                if is_retried_here(code) =>
            {
                let error = ErrorReply {
                    code,
                    message: code.text().to_owned(),
                    leader: NodeId(0),
                    retry_after_ms: 0,
                };
                self.attempt_failed(conn, id, error);
            }
            reply => self.finish(id, Ok(reply), sent_at),
        }
    }

    /// The cluster has executed or refused the command: it took its acknowledgements.
    fn confirm_acks(&mut self, id: ExchangeId, sent_at: BootTime) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let (Owner::Acquire(op) | Owner::Cancel(op) | Owner::Release(op) | Owner::Change(op)) =
            exchange.owner
        else {
            return;
        };
        if exchange.last_sent == sent_at {
            let acks = std::mem::take(&mut exchange.acks);
            if let Some(lease) = self.ops.get(&op).and_then(|op| self.leases.get_mut(&op.lease)) {
                lease.numbers.acknowledged(&acks);
            }
        }
    }

    /// Learns from a reply who leads the shard.
    fn take_hint(&mut self, conn: ConnId, id: ExchangeId, reply: &Reply) {
        let Some(shard) = self.exchanges.get(&id).and_then(|exchange| exchange.shard) else {
            return;
        };
        let answering = self.router.node_of(conn).unwrap_or(NodeId(0));
        let leader = match reply {
            Reply::Outcome(reply) if reply.leader == NodeId(0) => answering,
            Reply::Outcome(reply) => reply.leader,
            Reply::Renewed(reply) if reply.leader == NodeId(0) => answering,
            Reply::Renewed(reply) => reply.leader,
            Reply::Error(error) if error.leader != NodeId(0) => error.leader,
            Reply::Error(error) if error.code == ErrorCode::NOT_LEADER => {
                return self.router.forget_leader(shard);
            }
            _ => return,
        };
        if leader != NodeId(0) {
            self.router.hint(&LeaderHint { shard, leader });
        }
    }

    /// An error instead of an answer: the end, or another attempt.
    fn attempt_failed(&mut self, conn: ConnId, id: ExchangeId, error: ErrorReply) {
        let why = Failure::new(error.code, error.message);
        let answering = self.router.node_of(conn);
        let exchange = self.exchanges.get_mut(&id).expect("the caller looked it up");
        if !is_retried_here(error.code) {
            return self.finish(id, Err(why), self.now);
        }
        exchange.uncertain |= error.code.class() == ErrorClass::Unknown;
        let elsewhere = error.leader != NodeId(0) && Some(error.leader) != answering;
        let at_once = elsewhere && exchange.redirects < REDIRECTS_MAX
            || error.code == ErrorCode::RESYNC && exchange.failures == 0;
        exchange.redirects += u32::from(elsewhere);
        exchange.failures += 1;
        let failures = exchange.failures;
        let code = why.code;
        exchange.last = Some(why.clone());
        self.note_risk(id, code);
        if code == ErrorCode::NODE_REMOVED {
            // Its hello has named the others.
            let target = self.router.target_of(conn);
            self.close_conn(conn, &why);
            self.router.retire(target, self.now);
        }
        if at_once {
            return self.dispatch(id, None);
        }
        let pause = self.retry_pause(failures);
        let pause = pause.max(Duration::from_millis(u64::from(error.retry_after_ms)));
        if code == ErrorCode::QUARANTINED {
            self.acquire_kept_out(id, pause);
        }
        self.set_state(id, State::Resting, self.now.after(pause));
        if self.is_kept_out(Some(id)) && self.tries_once(id) {
            self.finish(id, Err(why), self.now);
        }
    }

    /// Nothing is granted yet, which says that the cluster lives: an acquire without a limit goes on.
    fn acquire_kept_out(&mut self, id: ExchangeId, pause: Duration) {
        if let Some(Exchange { owner: Owner::Acquire(op), .. }) = self.exchanges.get(&id) {
            self.wait_out(*op, pause);
        }
    }

    /// It is an acquire that does not wait.
    fn tries_once(&self, id: ExchangeId) -> bool {
        matches!(self.exchanges[&id].owner, Owner::Acquire(op) if self.ops[&op].tries_once())
    }

    /// It was refused because nothing is granted yet, and nothing else can have become of it.
    pub(super) fn is_kept_out(&self, id: Option<ExchangeId>) -> bool {
        self.verdict(id).code == ErrorCode::QUARANTINED
    }

    /// The pause after a failed attempt. Short while a cluster may just be choosing a leader, long
    /// when that has taken too long to be it.
    pub(super) fn retry_pause(&mut self, failures: u32) -> Duration {
        let quick = Backoff { first: Duration::from_millis(8), longest: Duration::from_millis(80) };
        let slow = Backoff { first: Duration::from_millis(80), longest: Duration::from_secs(1) };
        match failures.checked_sub(QUICK_RETRIES) {
            None | Some(0) => quick.pause(failures, &mut self.rng),
            Some(further) => slow.pause(further, &mut self.rng),
        }
    }

    /// The exchange is over: its owner hears.
    fn finish(&mut self, id: ExchangeId, result: Result<Reply, Failure>, sent_at: BootTime) {
        let exchange = self.exchanges.remove(&id).expect("the caller looked it up");
        self.timers.cancel(Timer::Exchange(id));
        let retried = exchange.attempts > 1;
        let in_doubt = exchange.uncertain.then_some(exchange.deadline);
        match exchange.owner {
            Owner::Open(lease) => self.open_answered(lease, result, sent_at),
            Owner::Orphan { shard, secret } => self.orphan_answered(shard, secret, &result),
            Owner::Acquire(op) => self.acquire_answered(op, retried, result),
            Owner::Cancel(op) => self.cancel_answered(op, result),
            Owner::Release(op) => self.release_answered(op, retried, result),
            Owner::Change(op) => self.change_answered(op, retried, result),
            Owner::Renew(leases) => self.renew_answered(&leases, result, sent_at),
            Owner::Holds(lease) => self.holds_answered(lease, result),
            Owner::Close { session, .. } => self.close_answered(session, result),
            Owner::Call(call) => self.call_answered(call, retried, in_doubt, result),
            Owner::Watch(watch, shard) => self.watch_answered(watch, shard, result),
        }
    }

    /// `in_doubt` is the deadline, if some attempt may have had an effect that is not known.
    fn call_answered(
        &mut self,
        call: CallId,
        retried: bool,
        in_doubt: Option<BootTime>,
        result: Result<Reply, Failure>,
    ) {
        match self.calls.remove(&call) {
            Some(Call::Request(request)) => {
                let doubt = in_doubt.zip(Doubt::of(&request, &result));
                if let Some((deadline, doubt)) = doubt {
                    return self.look_it_up(call, doubt, deadline);
                }
                let result =
                    if retried { result.map(|reply| reread(&request, reply)) } else { result };
                self.events.push_back(Event::Answered { call, result });
            }
            Some(Call::Doubt(doubt)) => self.looked_up(call, doubt, &result),
            Some(Call::Renew { .. } | Call::Change { .. }) | None => {}
        }
    }

    /// Remembers on the leases of a failed renewal why they are at risk.
    pub(super) fn note_risk(&self, id: ExchangeId, code: ErrorCode) {
        if let Some(Exchange { owner: Owner::Renew(leases), .. }) = self.exchanges.get(&id) {
            self.set_risk(leases, code);
        }
    }
}

pub(super) const fn as_request(shard: ShardId, timeout_ms: u32, command: Command) -> Request {
    Request::Command(CommandRequest { shard, timeout_ms, command })
}

/// Whether this library repeats a request that got this code, or gives the code to its caller.
const fn is_retried_here(code: ErrorCode) -> bool {
    match code.class() {
        ErrorClass::NotApplied => false,
        ErrorClass::Unknown => true,
        // What the state itself refuses for lack of room is the caller's to decide, but for the
        // window, which this library's own acknowledgements will open.
        ErrorClass::Retryable => !matches!(
            code,
            ErrorCode::QUEUE_FULL | ErrorCode::LEASES_FULL | ErrorCode::WATCHES_FULL
        ),
    }
}

/// A forced release has no number. If its token is not held any more when it is repeated, the
/// attempt whose reply was lost has done it, or the holder has: what was asked for is so.
fn reread(request: &Request, reply: Reply) -> Reply {
    let Request::Command(CommandRequest { command: Command::ForceRelease { token, .. }, .. }) =
        request
    else {
        return reply;
    };
    match reply {
        Reply::Outcome(OutcomeReply {
            outcome: Outcome::Refused { code: ErrorCode::NOT_OWNER, revision, .. },
            leader,
        }) => {
            let outcome = Outcome::Forced { token: *token, passed_on: true, revision };
            Reply::Outcome(OutcomeReply { outcome, leader })
        }
        reply => reply,
    }
}

/// A call's request with the time that is left for this attempt.
fn with_timeout(request: &Request, timeout_ms: u32) -> Request {
    let mut request = request.clone();
    match &mut request {
        Request::Command(body) => body.timeout_ms = timeout_ms,
        Request::Renew(body) => body.timeout_ms = timeout_ms,
        Request::Get(body) => body.timeout_ms = timeout_ms,
        Request::List(body) => body.timeout_ms = timeout_ms,
        Request::Sessions(body) => body.timeout_ms = timeout_ms,
        Request::Holds(body) => body.timeout_ms = timeout_ms,
        Request::Claim(body) => body.timeout_ms = timeout_ms,
        Request::Backup(body) => body.timeout_ms = timeout_ms,
        Request::Status(body) => body.timeout_ms = timeout_ms,
        Request::Transfer(body) => body.timeout_ms = timeout_ms,
        Request::Members(body) => body.timeout_ms = timeout_ms,
        Request::MemberChange(body) => body.timeout_ms = timeout_ms,
        Request::GroupStep(body) => body.timeout_ms = timeout_ms,
        Request::Hello(_) | Request::Ping | Request::Watch(_) | Request::Unwatch(_) => {}
    }
    request
}
