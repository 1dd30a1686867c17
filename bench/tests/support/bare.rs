//! What the recipes share: a client of the bare protocol that sends exactly what it is told, and
//! questions to nodes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;
use std::time::Duration;

use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::wire::Wire;
use leasehold_bench::{process, random};
use leasehold_protocol::command::{Caller, Command, Want};
use leasehold_protocol::ids::{
    HoldSetVersion, LeaseId, Mode, NodeId, Number, RequestId, Secret, ShardId, Token,
};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{KeyInfo, KeysReply, Reply, SessionInfo, ShardStatus};
use leasehold_protocol::request::{
    CommandRequest, Freshness, GetRequest, HoldsRequest, ListRequest, RenewItem, RenewRequest,
    Request, SessionsRequest, TransferRequest,
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

/// A cluster that elects nobody else because a busy machine slows its leader down.
pub(crate) fn calm() -> Spec {
    Spec::default().flag("election-min-ms", 1_500).flag("election-max-ms", 2_400)
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

    /// With a mode, of several keys at once, or with a lock-delay: how long it waits, and how long
    /// its place stays taken after its loss.
    pub(crate) fn acquire_all(
        &self,
        number: u64,
        wants: &[Want],
        (wait_ms, delay_ms): (u32, u32),
    ) -> Request {
        let (caller, wants, value) = (self.caller(number), wants.to_vec(), Vec::new());
        command(Command::AcquireAll { caller, wants, own: None, value, wait_ms, delay_ms })
    }

    pub(crate) fn convert(&self, number: u64, key: &str, token: Token, mode: Mode) -> Request {
        let (caller, key) = (self.caller(number), key.as_bytes().to_vec());
        command(Command::Convert { caller, key, token, mode })
    }

    pub(crate) fn release(&self, number: u64, key: &str, token: Token) -> Request {
        command(Command::Release {
            caller: self.caller(number),
            key: key.as_bytes().to_vec(),
            token,
        })
    }

    /// Whatever the acquire of that number still holds.
    pub(crate) fn release_all(&self, number: u64, acquire: u64) -> Request {
        let (caller, acquire) = (self.caller(number), Number(acquire));
        command(Command::ReleaseAll { caller, acquire })
    }

    /// Of the acquire before this number.
    pub(crate) fn cancel(&self, number: u64) -> Request {
        command(Command::Cancel { caller: self.caller(number), release_if_granted: true })
    }

    pub(crate) fn close(&self) -> Request {
        command(Command::Close { lease: self.id, secret: self.secret })
    }

    pub(crate) fn renew(&self) -> Request {
        renewal(&[*self])
    }

    pub(crate) fn holds(&self) -> Request {
        let (lease, secret) = (self.id, self.secret);
        Request::Holds(HoldsRequest { shard: SHARD, lease, secret, timeout_ms: TIMEOUT_MS })
    }
}

/// One renewal of some leases.
pub(crate) fn renewal(leases: &[Lease]) -> Request {
    let version = HoldSetVersion(0);
    let item = |lease: &Lease| RenewItem { lease: lease.id, secret: lease.secret, version };
    let items = leases.iter().map(item).collect();
    Request::Renew(RenewRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, items })
}

fn want(key: &str, mode: Mode, limit: u32) -> Want {
    Want { key: key.as_bytes().to_vec(), mode, limit, reentrant: false }
}

/// A key to be held alone.
pub(crate) fn exclusive(key: &str) -> Want {
    want(key, Mode::EXCLUSIVE, 0)
}

/// A key to be held together with others.
pub(crate) fn shared(key: &str) -> Want {
    want(key, Mode::SHARED, 0)
}

/// So many permits of a semaphore that has `limit`.
pub(crate) fn permits(key: &str, count: u32, limit: u32) -> Want {
    want(key, Mode::permits(count), limit)
}

/// A request for a lease, and its secret.
pub(crate) fn open(ttl_ms: u32) -> (Secret, Request) {
    let secret = Secret(random::bytes());
    let label = b"recipe".to_vec();
    (secret, command(Command::Open { ttl_ms, secret, label }))
}

/// A read of a key.
pub(crate) fn get(key: &str, freshness: Freshness) -> Request {
    Request::Get(GetRequest {
        key: key.as_bytes().to_vec(),
        holders_after: LeaseId(0),
        freshness,
        timeout_ms: TIMEOUT_MS,
    })
}

/// The first page of keys that are held or waited for.
pub(crate) fn list(prefix: &str) -> Request {
    let (prefix, after, limit) = (prefix.as_bytes().to_vec(), Vec::new(), 256);
    let (freshness, timeout_ms) = (Freshness::Linearizable, TIMEOUT_MS);
    Request::List(ListRequest { shard: SHARD, prefix, after, limit, freshness, timeout_ms })
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
