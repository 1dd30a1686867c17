//! What the recipes share: a client of the bare protocol that sends exactly what it is told, and
//! questions to nodes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;
use std::time::Duration;

use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE};
use leasehold_bench::wire::Wire;
use leasehold_bench::{process, random};
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::ids::{
    HoldSetVersion, LeaseId, Mode, NodeId, Number, RequestId, Secret, ShardId, Token,
};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{KeyInfo, KeysReply, Reply, SessionInfo, ShardStatus};
use leasehold_protocol::request::{
    CommandRequest, Freshness, GetRequest, HoldsRequest, RenewItem, RenewRequest, Request,
    SessionsRequest, TransferRequest,
};

/// Time-out that requests state.
pub(crate) const TIMEOUT_MS: u32 = 3_000;
/// Within this time a node that runs answers.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
const SHARD: ShardId = ShardId(0);

/// The long form of a recipe: more rounds and longer times.
pub(crate) fn long() -> bool {
    std::env::var_os("LEASEHOLD_LONG").is_some()
}

/// One of two figures, for the short and for the long form.
pub(crate) fn scaled<T>(short: T, in_long_form: T) -> T {
    if long() { in_long_form } else { short }
}

/// Waits until something is so.
pub(crate) fn until(what: &str, fits: impl FnMut() -> bool) {
    until_within(PATIENCE, what, fits);
}

/// The same, for what takes its time.
pub(crate) fn until_within(limit: Duration, what: &str, mut fits: impl FnMut() -> bool) {
    let deadline = Deadline::after(limit);
    while !fits() {
        assert!(!deadline.passed(), "within {limit:?}: {what}");
        std::thread::sleep(process::POLL);
    }
}

/// A command for the only shard.
pub(crate) fn command(command: Command) -> Request {
    Request::Command(CommandRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, command })
}

/// For requests that are not sent again: a node that is slow because the machine is very busy
/// does not give them up.
pub(crate) trait Patient {
    /// Sends it with a time-out as long as a test's patience.
    fn send_patiently(&mut self, request: &Request) -> RequestId;
}

impl Patient for Wire {
    fn send_patiently(&mut self, request: &Request) -> RequestId {
        let mut request = request.clone();
        if let Request::Command(request) = &mut request {
            request.timeout_ms = PATIENCE.as_millis() as u32;
        }
        self.send(&request).expect("sent")
    }
}

/// A lease as its owner knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub(crate) id: LeaseId,
    pub(crate) secret: Secret,
    /// What its requests state as the floor; 0 lets the cluster remember everything.
    pub(crate) floor: u64,
}

impl Lease {
    pub(crate) fn caller(&self, number: u64) -> Caller {
        let (lease, secret, acks) = (self.id, self.secret, Vec::new());
        Caller { lease, secret, number: Number(number), floor: Number(self.floor), acks }
    }

    pub(crate) fn acquire(&self, number: u64, key: &str, wait_ms: u32) -> Request {
        command(Command::Acquire {
            caller: self.caller(number),
            key: key.as_bytes().to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: Vec::new(),
            wait_ms,
        })
    }

    pub(crate) fn release(&self, number: u64, key: &str, token: Token) -> Request {
        command(Command::Release {
            caller: self.caller(number),
            key: key.as_bytes().to_vec(),
            token,
        })
    }

    /// Of the acquire before this number.
    pub(crate) fn cancel(&self, number: u64) -> Request {
        command(Command::Cancel { caller: self.caller(number), release_if_granted: true })
    }

    pub(crate) fn close(&self) -> Request {
        command(Command::Close { lease: self.id, secret: self.secret })
    }

    pub(crate) fn renew(&self) -> Request {
        let version = HoldSetVersion(0);
        let items = vec![RenewItem { lease: self.id, secret: self.secret, version }];
        Request::Renew(RenewRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, items })
    }

    pub(crate) fn holds(&self) -> Request {
        let (lease, secret) = (self.id, self.secret);
        Request::Holds(HoldsRequest { shard: SHARD, lease, secret, timeout_ms: TIMEOUT_MS })
    }
}

/// A request for a lease, and its secret.
pub(crate) fn open(ttl_ms: u32) -> (Secret, Request) {
    let secret = Secret(random::bytes());
    let label = b"recipe".to_vec();
    (secret, command(Command::Open { ttl_ms, secret, label }))
}

/// A read of a key.
pub(crate) fn get(key: &str, freshness: Freshness) -> Request {
    Request::Get(GetRequest { key: key.as_bytes().to_vec(), freshness, timeout_ms: TIMEOUT_MS })
}

/// The first page of leases.
pub(crate) fn sessions() -> Request {
    let (after, limit) = (LeaseId(0), 256);
    Request::Sessions(SessionsRequest { shard: SHARD, after, limit, timeout_ms: TIMEOUT_MS })
}

/// A move of the leadership.
pub(crate) fn transfer(to: u64) -> Request {
    Request::Transfer(TransferRequest { shard: SHARD, to: NodeId(to), timeout_ms: TIMEOUT_MS })
}

/// Connects, also to a node that is about to be ready.
pub(crate) fn connect(addr: SocketAddr) -> Wire {
    let mut wire = None;
    until("a node answers a hello", || {
        wire = Wire::connect(addr, LIMIT).ok();
        wire.is_some()
    });
    wire.expect("just made")
}

/// Calls until the answer is no reason to try again: for a cluster that is healthy or about to be.
pub(crate) fn call(wire: &mut Wire, request: &Request) -> Reply {
    let deadline = Deadline::after(PATIENCE);
    loop {
        let reply = wire.call(request, LIMIT).expect("an answer");
        let again = match &reply {
            Reply::Error(error) => {
                error.code.class() != leasehold_protocol::error::ErrorClass::NotApplied
            }
            _ => false,
        };
        if !again {
            return reply;
        }
        assert!(!deadline.passed(), "still refused: {reply:?}");
        std::thread::sleep(process::POLL);
    }
}

/// The outcome of a command.
pub(crate) fn outcome(wire: &mut Wire, request: &Request) -> Outcome {
    match call(wire, request) {
        Reply::Outcome(reply) => reply.outcome,
        reply => panic!("no outcome: {reply:?}"),
    }
}

pub(crate) fn opened(reply: &Reply, secret: Secret) -> Lease {
    match reply {
        Reply::Outcome(reply) => match reply.outcome {
            Outcome::Opened { lease, .. } => Lease { id: lease, secret, floor: 0 },
            outcome => panic!("no lease: {outcome:?}"),
        },
        reply => panic!("no lease: {reply:?}"),
    }
}

/// Opens a lease.
pub(crate) fn open_lease(wire: &mut Wire, ttl_ms: u32) -> Lease {
    let (secret, request) = open(ttl_ms);
    opened(&call(wire, &request), secret)
}

/// Takes a free key.
pub(crate) fn grant(wire: &mut Wire, lease: &Lease, number: u64, key: &str) -> Grant {
    match outcome(wire, &lease.acquire(number, key, 0)) {
        Outcome::Granted(grant) => grant,
        outcome => panic!("{key} is not granted: {outcome:?}"),
    }
}

/// A key, linearizably.
pub(crate) fn key(wire: &mut Wire, name: &str) -> KeyInfo {
    match call(wire, &get(name, Freshness::Linearizable)) {
        Reply::Keys(KeysReply { mut keys, .. }) => keys.pop().expect("one key was asked for"),
        reply => panic!("no key: {reply:?}"),
    }
}

/// The leases, linearizably, if the node can tell.
pub(crate) fn try_sessions(wire: &mut Wire, limit: Duration) -> Option<Vec<SessionInfo>> {
    match wire.call(&sessions(), limit) {
        Ok(Reply::Sessions(reply)) => Some(reply.sessions),
        _ => None,
    }
}

/// What a node says about its own part in the shard.
pub(crate) fn own_status(cluster: &Cluster, id: u64) -> Option<ShardStatus> {
    let status = cluster.status_of(id).ok()?;
    let node = status.nodes.into_iter().find(|node| node.node == NodeId(id))?;
    node.shards.into_iter().next()
}

/// The highest term that any node knows.
pub(crate) fn term(cluster: &Cluster) -> u64 {
    let terms = cluster.ids().filter_map(|id| Some(own_status(cluster, id)?.term));
    terms.max().unwrap_or(0)
}

/// No node has said that it panicked.
pub(crate) fn assert_no_panic(cluster: &Cluster) {
    for id in cluster.ids() {
        let log = cluster.log(id);
        let line = log.lines().find(|line| line.contains("panicked"));
        assert_eq!(line, None, "node {id}");
    }
}
