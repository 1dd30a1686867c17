//! A recorded client: one lease of one shard, one call at a time, over the bare protocol.
//!
//! It does what every client must do (renews in time, retries a request under its number after
//! any broken connection or retryable answer, follows hints) in the simplest way, and records
//! every call with the revisions that the client library does not show. Being written apart from
//! that library, it also checks the server without the library's help.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{
    HoldSetVersion, LeaseId, Mode, NodeId, Number, Secret, ShardId, Token,
};
use leasehold_protocol::outcome::Outcome as WireOutcome;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{CommandRequest, Freshness, GetRequest, Request};

use crate::clock::{Deadline, now_ns};
use crate::history::{Op, OpKind, Outcome, QueuedAt, Record, Recorder};
use crate::random;
use crate::wire::Wire;

mod link;

use link::RenewalSent;

/// Time-out that requests state.
const TIMEOUT_MS: u32 = 1_000;
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
    /// Nodes that it is told of are endpoints too.
    learns: bool,
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
    /// Goes to every node that it is told of, not only to those that it was given.
    #[must_use]
    pub fn learning(self) -> Self {
        Self { learns: true, ..self }
    }

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
            learns: false,
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

    /// The nodes that it goes to: those that it was given and, if it learns, those it was told of.
    pub fn endpoints(&self) -> &[SocketAddr] {
        &self.endpoints
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
            holders_after: LeaseId(0),
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
