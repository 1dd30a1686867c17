//! A recorded client: one lease of one shard, one call at a time, over the bare protocol.
//!
//! It does what every client must do (renews in time, retries a request under its number after
//! any broken connection or retryable answer, follows hints) in the simplest way, and records
//! every call with the revisions that the client library does not show. Being written apart from
//! that library, it also checks the server without the library's help.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{
    HoldSetVersion, LeaseId, Mode, NodeId, Number, RequestId, Secret, ShardId, Token,
};
use leasehold_protocol::outcome::Outcome as WireOutcome;
use leasehold_protocol::reply::{RenewReply, Reply};
use leasehold_protocol::request::{
    CommandRequest, Freshness, GetRequest, RenewItem, RenewRequest, Request,
};

use crate::clock::{Deadline, now_ns};
use crate::history::{Lost, Op, OpKind, Outcome, QueuedAt, Record, Recorder, Renewal};
use crate::random;
use crate::wire::Wire;

/// Time-out that requests state.
const TIMEOUT_MS: u32 = 1_000;
/// A request or a renewal without an answer for this long moves the actor to another node.
const SILENCE: Duration = Duration::from_millis(1_500);
/// Longest sleep before the stop flag is looked at again.
const TURN: Duration = Duration::from_millis(20);
/// Pause before a retry.
const BACK_OFF: Duration = Duration::from_millis(15);
/// Within this time a connection is made.
const CONNECT: Duration = Duration::from_millis(500);

/// A hold of an actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The key.
    pub key: String,
    /// The token.
    pub token: u64,
    /// The acquire's number.
    number: u64,
}

/// Why a call came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// A definite answer.
    Refused(ErrorCode),
    /// The wait ended: cancelled or timed out.
    Ended,
    /// The stop flag was raised, or the call's deadline passed, before there was an answer.
    Stopped,
}

/// A message on its way that restarts the lease's TTL.
#[derive(Clone, Copy, Debug)]
struct RenewalSent {
    id: RequestId,
    send_ns: u64,
}

/// One client.
#[derive(Debug)]
pub struct Actor {
    client: u32,
    endpoints: Vec<SocketAddr>,
    recorder: Recorder,
    stop: Arc<AtomicBool>,
    wire: Option<Wire>,
    /// The endpoint to connect to next.
    target: usize,
    addresses: BTreeMap<NodeId, SocketAddr>,
    shard: ShardId,
    lease: LeaseId,
    secret: Secret,
    ttl_ms: u32,
    version: HoldSetVersion,
    /// The next acquire's number.
    next: u64,
    /// Everything at or below has its outcome.
    floor: u64,
    renew_at_ns: u64,
    renewal: Option<RenewalSent>,
    dead: bool,
}

/// How a command ended.
struct Settled {
    attempts: u32,
    queued: Option<QueuedAt>,
    invoke_ns: u64,
    answer: Answer,
}

enum Answer {
    Outcome(WireOutcome),
    Refused(Refusal),
    None,
}

#[derive(Clone, Copy)]
struct Refusal {
    code: ErrorCode,
    /// If the state decided it: the present token, and at which revision.
    state: Option<(u64, u64)>,
}

impl Refusal {
    const fn by_node(code: ErrorCode) -> Self {
        Self { code, state: None }
    }
}

impl Actor {
    /// A client without a session yet. It stops waiting for answers when `stop` is raised.
    pub fn new(
        client: u32,
        endpoints: Vec<SocketAddr>,
        recorder: Recorder,
        stop: Arc<AtomicBool>,
    ) -> Self {
        assert!(!endpoints.is_empty(), "an actor needs a node to talk to");
        Self {
            client,
            target: client as usize % endpoints.len(),
            endpoints,
            recorder,
            stop,
            wire: None,
            addresses: BTreeMap::new(),
            shard: ShardId(0),
            lease: LeaseId(0),
            secret: Secret(random::bytes()),
            ttl_ms: 0,
            version: HoldSetVersion(0),
            next: 1,
            floor: 0,
            renew_at_ns: u64::MAX,
            renewal: None,
            dead: false,
        }
    }

    /// The lease, once opened.
    pub fn lease(&self) -> u64 {
        self.lease.0
    }

    /// The cluster said that the lease is dead.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Opens the session.
    pub fn open(&mut self, ttl_ms: u32, limit: Duration) -> Result<(), Failed> {
        self.ttl_ms = ttl_ms;
        let label = format!("actor-{}", self.client).into_bytes();
        let command = Command::Open { ttl_ms, secret: self.secret, label };
        let settled = self.settle(command, Deadline::after(limit));
        let kind = OpKind::Open { ttl_ms };
        let Answer::Outcome(WireOutcome::Opened { lease, revision }) = settled.answer else {
            return Err(self.failed(kind, None, "", &settled));
        };
        self.lease = lease;
        self.renewed(settled.invoke_ns);
        let outcome = Outcome::Opened { revision: Some(revision.0) };
        self.record(kind, None, "", &settled, outcome);
        Ok(())
    }

    /// Asks for a key. `wait_ms` is the server's limit, `limit` the time after which the actor
    /// gives up without an answer.
    pub fn acquire(&mut self, key: &str, wait_ms: u32, limit: Duration) -> Result<Held, Failed> {
        let number = self.next;
        self.next += 3;
        let command = Command::Acquire {
            caller: self.caller(number),
            key: key.as_bytes().to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: Vec::new(),
            wait_ms,
        };
        let settled = self.settle(command, Deadline::after(limit));
        let kind = OpKind::Acquire { wait_ms };
        let number_shown = Some(number);
        match settled.answer {
            Answer::Outcome(WireOutcome::Granted(grant)) => {
                self.version = grant.version_after;
                let token = grant.token.0;
                let revision = Some(grant.revision.0);
                let outcome = Outcome::Granted { token, own_lease: None, revision };
                self.record(kind, number_shown, key, &settled, outcome);
                Ok(Held { key: key.to_owned(), token, number })
            }
            Answer::Outcome(
                WireOutcome::Cancelled { revision } | WireOutcome::TimedOut { revision },
            ) => {
                self.floor = number + 2;
                let outcome = Outcome::Ended { revision: Some(revision.0) };
                self.record(kind, number_shown, key, &settled, outcome);
                Err(Failed::Ended)
            }
            Answer::Outcome(_) | Answer::Refused(_) => {
                self.floor = number + 2;
                Err(self.failed(kind, number_shown, key, &settled))
            }
            Answer::None => Err(self.failed(kind, number_shown, key, &settled)),
        }
    }

    /// Gives a hold back.
    pub fn release(&mut self, held: &Held, limit: Duration) -> Result<(), Failed> {
        let number = held.number + 2;
        let command = Command::Release {
            caller: self.caller(number),
            key: held.key.as_bytes().to_vec(),
            token: Token(held.token),
        };
        let settled = self.settle(command, Deadline::after(limit));
        let kind = OpKind::Release { token: held.token };
        match settled.answer {
            Answer::Outcome(WireOutcome::Released { token, revision }) => {
                self.floor = self.floor.max(number);
                let outcome = Outcome::Released { token: token.0, revision: Some(revision.0) };
                self.record(kind, Some(number), &held.key, &settled, outcome);
                Ok(())
            }
            _ => Err(self.failed(kind, Some(number), &held.key, &settled)),
        }
    }

    /// Ends the session.
    pub fn close(&mut self, limit: Duration) -> Result<(), Failed> {
        let command = Command::Close { lease: self.lease, secret: self.secret };
        let settled = self.settle(command, Deadline::after(limit));
        match settled.answer {
            Answer::Outcome(WireOutcome::Closed { revision }) => {
                let outcome = Outcome::Done { revision: Some(revision.0) };
                self.record(OpKind::Close, None, "", &settled, outcome);
                self.renew_at_ns = u64::MAX;
                Ok(())
            }
            _ => Err(self.failed(OpKind::Close, None, "", &settled)),
        }
    }

    /// Reads a key linearizably: the holder's token.
    pub fn get(&mut self, key: &str, limit: Duration) -> Result<Option<u64>, Failed> {
        let request = Request::Get(GetRequest {
            key: key.as_bytes().to_vec(),
            freshness: Freshness::Linearizable,
            timeout_ms: TIMEOUT_MS,
        });
        let invoke_ns = now_ns();
        let (attempts, reply) = self.ask(&request, Deadline::after(limit), &mut |_, _| false);
        let mut settled = Settled { attempts, queued: None, invoke_ns, answer: Answer::None };
        match reply {
            Some(Reply::Keys(keys)) => {
                let holder = keys.keys.first().and_then(|info| info.holders.first());
                let token = holder.map(|holder| holder.token.0);
                let outcome = Outcome::Read { token, revision: keys.revision.0, stale: keys.stale };
                self.record(OpKind::Get, None, key, &settled, outcome);
                Ok(token)
            }
            Some(Reply::Error(error)) => {
                settled.answer = Answer::Refused(Refusal::by_node(error.code));
                Err(self.failed(OpKind::Get, None, key, &settled))
            }
            _ => Err(self.failed(OpKind::Get, None, key, &settled)),
        }
    }

    /// Keeps the session alive for a while, or until the stop flag is raised.
    pub fn idle(&mut self, duration: Duration) {
        let deadline = Deadline::after(duration);
        while !deadline.passed() && !self.stopped() {
            if self.connect() && self.turn(deadline).is_err() {
                self.drop_wire();
            }
        }
    }

    /// Stops renewing and forgets the connection, as a killed client does.
    pub fn abandon(&mut self) {
        self.drop_wire();
        self.renew_at_ns = u64::MAX;
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn caller(&self, number: u64) -> Caller {
        Caller {
            lease: self.lease,
            secret: self.secret,
            number: Number(number),
            floor: Number(self.floor),
            acks: Vec::new(),
        }
    }

    /// Sends a command until it has its final outcome.
    fn settle(&mut self, command: Command, deadline: Deadline) -> Settled {
        let request =
            Request::Command(CommandRequest { shard: self.shard, timeout_ms: TIMEOUT_MS, command });
        let invoke_ns = now_ns();
        let mut queued = None;
        let (attempts, reply) = self.ask(&request, deadline, &mut |attempt, reply| match reply {
            Reply::Outcome(outcome) => match outcome.outcome {
                WireOutcome::Queued { revision, .. } => {
                    // A retry's `queued` tells where the wait stands, not where it began.
                    if attempt == 1 {
                        queued = Some(QueuedAt { revision: revision.0, at_ns: now_ns() });
                    }
                    true
                }
                _ => false,
            },
            _ => false,
        });
        let answer = match reply {
            Some(Reply::Outcome(reply)) => match reply.outcome {
                WireOutcome::Refused { code, token, revision } => {
                    Answer::Refused(Refusal { code, state: Some((token.0, revision.0)) })
                }
                outcome => Answer::Outcome(outcome),
            },
            Some(Reply::Error(error)) => Answer::Refused(Refusal::by_node(error.code)),
            _ => Answer::None,
        };
        if let Answer::Refused(refusal) = answer
            && matches!(refusal.code, ErrorCode::LEASE_DEAD | ErrorCode::LEASE_LOST)
        {
            self.lost(refusal.code.name());
        }
        Settled { attempts, queued, invoke_ns, answer }
    }

    /// Sends a request until a final answer that is no reason to retry; `None` when stopped.
    /// `interim` says whether a reply is only an interim one.
    fn ask(
        &mut self,
        request: &Request,
        deadline: Deadline,
        interim: &mut dyn FnMut(u32, &Reply) -> bool,
    ) -> (u32, Option<Reply>) {
        let mut attempts = 0;
        while !deadline.passed() && !self.stopped() {
            if !self.connect() {
                continue;
            }
            attempts += 1;
            match self.attempt(request, deadline, &mut |reply| interim(attempts, reply)) {
                Ok(Some(reply)) => match retry_hint(&reply) {
                    None => return (attempts, Some(reply)),
                    Some(leader) => self.follow(leader),
                },
                Ok(None) => {}
                Err(_) => self.drop_wire(),
            }
        }
        (attempts, None)
    }

    /// One send, and the wait for its answer. `None` when stopped.
    fn attempt(
        &mut self,
        request: &Request,
        deadline: Deadline,
        interim: &mut dyn FnMut(&Reply) -> bool,
    ) -> io::Result<Option<Reply>> {
        let wire = self.wire.as_mut().expect("connected before an attempt");
        let sent = wire.send(request)?;
        let mut silent = Some(Deadline::after(SILENCE));
        while !deadline.passed() && !self.stopped() {
            if let Some((id, reply)) = self.turn(deadline)? {
                if id == sent && !interim(&reply) {
                    return Ok(Some(reply));
                }
                silent = silent.filter(|_| id != sent);
            }
            if silent.is_some_and(Deadline::passed) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(None)
    }

    /// Renews if it is time and reads one reply that is not a renewal's.
    fn turn(&mut self, deadline: Deadline) -> io::Result<Option<(RequestId, Reply)>> {
        self.renew()?;
        let Some(wire) = self.wire.as_mut() else { return Err(io::ErrorKind::NotConnected.into()) };
        let until = Deadline::after(TURN.min(deadline.left()));
        let Some((id, reply)) = wire.recv(until)? else {
            return Ok(None);
        };
        let Some(renewal) = self.renewal.filter(|renewal| renewal.id == id) else {
            return Ok(Some((id, reply)));
        };
        self.renewal = None;
        match reply {
            Reply::Renewed(reply) => self.take_renewal(renewal, &reply),
            Reply::Error(error) if error.code.class() == ErrorClass::NotApplied => {
                return Err(io::Error::other(error.code.to_string()));
            }
            _ => {
                self.push_renewal(renewal, None);
                self.renew_at_ns = now_ns() + BACK_OFF.as_nanos() as u64;
            }
        }
        Ok(None)
    }

    fn renew(&mut self) -> io::Result<()> {
        let now = now_ns();
        if let Some(renewal) = self.renewal {
            let silent = now.saturating_sub(renewal.send_ns) > SILENCE.as_nanos() as u64;
            return if silent { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) };
        }
        if now < self.renew_at_ns || self.dead {
            return Ok(());
        }
        let item = RenewItem { lease: self.lease, secret: self.secret, version: self.version };
        let items = vec![item];
        let request = RenewRequest { shard: self.shard, timeout_ms: TIMEOUT_MS, items };
        let Some(wire) = self.wire.as_mut() else { return Err(io::ErrorKind::NotConnected.into()) };
        let id = wire.send(&Request::Renew(request))?;
        self.renewal = Some(RenewalSent { id, send_ns: now });
        Ok(())
    }

    fn take_renewal(&mut self, renewal: RenewalSent, reply: &RenewReply) {
        let Some(result) = reply.results.iter().find(|result| result.lease == self.lease) else {
            self.push_renewal(renewal, None);
            return;
        };
        match result.error {
            None => {
                self.version = result.version;
                self.push_renewal(renewal, Some(now_ns()));
                self.renew_at_ns = renewal.send_ns + u64::from(self.ttl_ms) * 1_000_000 / 3;
            }
            Some(ErrorCode::LEASE_DEAD) => {
                self.push_renewal(renewal, None);
                self.lost("lease_dead");
            }
            Some(_) => {
                self.push_renewal(renewal, None);
                self.renew_at_ns = now_ns() + BACK_OFF.as_nanos() as u64;
            }
        }
    }

    /// The lease's TTL was restarted by a message sent at that time.
    fn renewed(&mut self, send_ns: u64) {
        self.push_renewal(RenewalSent { id: RequestId(0), send_ns }, Some(now_ns()));
        self.renew_at_ns = send_ns + u64::from(self.ttl_ms) * 1_000_000 / 3;
    }

    fn push_renewal(&self, renewal: RenewalSent, ack_ns: Option<u64>) {
        self.recorder.push(Record::Renewal(Renewal {
            client: self.client,
            shard: self.shard.0,
            lease: self.lease.0,
            ttl_ms: self.ttl_ms,
            send_ns: renewal.send_ns,
            ack_ns,
        }));
    }

    fn lost(&mut self, cause: &str) {
        if self.dead || self.lease == LeaseId(0) {
            return;
        }
        self.dead = true;
        self.recorder.push(Record::Lost(Lost {
            client: self.client,
            shard: self.shard.0,
            lease: Some(self.lease.0),
            key: None,
            token: None,
            at_ns: now_ns(),
            cause: cause.to_owned(),
        }));
    }

    /// True if there is a connection; else the next node's turn has come.
    fn connect(&mut self) -> bool {
        if self.wire.is_some() {
            return true;
        }
        if let Ok(wire) = Wire::connect(self.endpoints[self.target], CONNECT) {
            let nodes = wire.hello().nodes.iter();
            self.addresses
                .extend(nodes.filter_map(|node| Some((node.node, node.client_addr.parse().ok()?))));
            self.wire = Some(wire);
            return true;
        }
        self.target = (self.target + 1) % self.endpoints.len();
        std::thread::sleep(BACK_OFF);
        false
    }

    fn drop_wire(&mut self) {
        self.wire = None;
        if let Some(renewal) = self.renewal.take() {
            self.push_renewal(renewal, None);
        }
        self.target = (self.target + 1) % self.endpoints.len();
    }

    /// Pauses, and goes to the leader if it is known.
    fn follow(&mut self, leader: NodeId) {
        std::thread::sleep(BACK_OFF);
        let addr = self.addresses.get(&leader);
        let index = addr.and_then(|addr| self.endpoints.iter().position(|other| other == addr));
        if let Some(index) = index.filter(|index| *index != self.target) {
            self.drop_wire();
            self.target = index;
        }
    }

    fn failed(&self, kind: OpKind, number: Option<u64>, key: &str, settled: &Settled) -> Failed {
        let (outcome, failed) = match settled.answer {
            Answer::Refused(Refusal { code, state }) => {
                let token = state.map(|state| state.0).filter(|token| *token != 0);
                let revision = state.map(|state| state.1);
                let name = code.name().to_owned();
                (Outcome::Refused { code: name, token, revision }, Failed::Refused(code))
            }
            Answer::Outcome(_) => (Outcome::Unknown, Failed::Refused(ErrorCode::INTERNAL)),
            Answer::None => (Outcome::Unknown, Failed::Stopped),
        };
        self.record(kind, number, key, settled, outcome);
        failed
    }

    fn record(
        &self,
        kind: OpKind,
        number: Option<u64>,
        key: &str,
        settled: &Settled,
        outcome: Outcome,
    ) {
        let answered = !matches!(outcome, Outcome::Unknown);
        self.recorder.push(Record::Op(Op {
            client: self.client,
            shard: self.shard.0,
            lease: Some(self.lease.0).filter(|lease| *lease != 0),
            number,
            key: key.to_owned(),
            kind,
            invoke_ns: settled.invoke_ns,
            return_ns: answered.then(now_ns),
            attempts: settled.attempts,
            queued: settled.queued,
            outcome,
        }));
    }
}

/// The leader to try next if the reply is a reason to send the request again.
fn retry_hint(reply: &Reply) -> Option<NodeId> {
    match reply {
        Reply::Error(error) if error.code.class() != ErrorClass::NotApplied => Some(error.leader),
        Reply::Outcome(outcome) => match outcome.outcome {
            WireOutcome::Refused { code, .. } if code.class() != ErrorClass::NotApplied => {
                Some(outcome.leader)
            }
            _ => None,
        },
        _ => None,
    }
}
