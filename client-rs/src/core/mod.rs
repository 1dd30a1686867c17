//! The client without sockets, clock or threads: sessions and their leases, acquires, retries,
//! routing, and the arithmetic of validity.
//!
//! It is driven from outside. The driver calls one of the entries with the present time (a user's
//! request, `conn_up`, `conn_down`, `feed`, `tick`), then empties `poll_output` and `poll_event`,
//! and calls `tick` again at `next_deadline`. Every entry first does what became due, so no entry
//! acts on a lease whose validity has passed.
//!
//! Words: an *exchange* is one request from its first send to its final answer, with all its
//! retries (`exchange`); an *op* is one acquire and the hold it leads to (`acquire`, `release`); a
//! *lease* is what is renewed (`lease`, `renew`); a *call* is a read or an operator's request.
//!
//! Invariants:
//! - The validity of a lease is only ever extended from the send time of the very request that was
//!   acknowledged, and only while the hold-set version is the one this client knows (G1).
//! - A retry of a numbered command carries the same number and the same body (G5).
//! - A lease that was given up is never renewed again, and each of its holds is lost once.
//! - Everything kept here is bounded: exchanges by ops and calls, those by `OPS_MAX` and
//!   `CALLS_MAX`, sessions by `SESSIONS_MAX`; past them a request is answered `busy` at once.

mod acquire;
mod cell;
mod change;
mod connect;
mod exchange;
mod handover;
mod lease;
mod member;
mod numbers;
mod options;
mod release;
mod renew;
mod rng;
mod route;
mod session;
mod settle;
#[cfg(test)]
mod tests;
mod timers;
pub(crate) mod watch;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, LeaseId, NodeId, ShardId};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{ClaimRequest, Request};
use leasehold_protocol::shard::shard_of;

use self::acquire::Op;
pub(crate) use self::acquire::{AcquireRequest, Wait};
pub(crate) use self::cell::HoldCell;
pub use self::cell::{HoldState, LossCause, RiskCause};
pub(crate) use self::change::Wish;
use self::exchange::{Exchange, Owner};
pub(crate) use self::handover::Passed;
use self::lease::Lease;
use self::member::Doubt;
pub(crate) use self::options::{Further, Options, check_limit};
use self::rng::Rng;
use self::route::Router;
use self::session::Session;
use self::timers::Timers;
use crate::clock::BootTime;
use crate::error::Failure;

/// Acquires and holds of one client.
pub(crate) const OPS_MAX: usize = 256 * 1024;
/// Reads and operator's requests of one client that may be open at a time.
pub(crate) const CALLS_MAX: usize = 16 * 1024;
/// Sessions of one client.
pub(crate) const SESSIONS_MAX: usize = 64 * 1024;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
            pub(crate) struct $name(pub(crate) u64);
        )*
    };
}

ids! {
    /// A connection.
    ConnId
    /// A session.
    SessionId
    /// An acquire and its hold.
    OpId
    /// A lease as this client knows it, from before the cluster gave it an id.
    LeaseKey
    /// See the module.
    ExchangeId
    /// See the module.
    CallId
    /// A watch.
    WatchId
}

/// Time-outs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) connect: Duration,
    pub(crate) attempt: Duration,
    pub(crate) call: Duration,
}

/// What the driver must do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Open a byte stream to this address, then call `conn_up`, or `conn_down` if it fails.
    Connect { conn: ConnId, addr: String },
    /// Come for `take_output` and write it.
    Write { conn: ConnId },
    /// Close the stream; nothing more is heard of this connection.
    Close { conn: ConnId },
}

/// What the user must hear.
#[derive(Debug)]
pub(crate) enum Event {
    /// An acquire ended.
    Acquired { op: OpId, result: Result<Held, Failure> },
    /// A hold that was reported changed.
    Hold { op: OpId, change: HoldChange },
    /// A release that somebody waits for ended.
    Released { op: OpId, result: Result<(), Failure> },
    /// A renewal that was asked for ended.
    Renewed { call: CallId, result: Result<(), Failure> },
    /// A change of a hold ended. What the hold is now is in its cell.
    Changed { call: CallId, result: Result<(), Failure> },
    /// A call ended.
    Answered { call: CallId, result: Result<Reply, Failure> },
    /// A watch has something to take.
    Watched { watch: WatchId },
    /// A session that was closed is gone.
    Closed { session: SessionId, result: Result<(), Failure> },
}

/// A grant that is current.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) cell: std::sync::Arc<HoldCell>,
}

/// How a hold changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldChange {
    /// Renewals are overdue, or its end is decided.
    AtRisk,
    /// Renewed again.
    Safe,
    /// Lost.
    Lost(LossCause),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    // Leases first: at one instant an end of validity comes before anything that might extend it.
    Lease(LeaseKey),
    Op(OpId),
    Exchange(ExchangeId),
    Conn(ConnId),
    Session(SessionId),
    Call(CallId),
    Watch(WatchId),
}

/// A read or an operator's request.
#[derive(Clone, Debug)]
pub(crate) struct CallRequest {
    /// The shard whose leader should get it.
    pub(crate) shard: Option<ShardId>,
    /// `timeout_ms` is filled in at each send.
    pub(crate) request: Request,
    pub(crate) timeout: Duration,
}

#[derive(Debug)]
enum Call {
    Request(Request),
    /// A change of the membership that is looked up in the table.
    Doubt(Doubt),
    Renew {
        lease: LeaseKey,
    },
    Change {
        op: OpId,
    },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Core {
    timing: Timing,
    rng: Rng,
    now: BootTime,
    timers: Timers<Timer>,
    router: Router,
    exchanges: BTreeMap<ExchangeId, Exchange>,
    sessions: BTreeMap<SessionId, Session>,
    leases: BTreeMap<LeaseKey, Lease>,
    ops: BTreeMap<OpId, Op>,
    calls: BTreeMap<CallId, Call>,
    watches: BTreeMap<WatchId, watch::Watch>,
    /// Live leases by shard and the time of their next renewal.
    renewals: BTreeSet<(ShardId, BootTime, LeaseKey)>,
    last_id: u64,
    outputs: VecDeque<Output>,
    events: VecDeque<Event>,
}

impl Core {
    pub(crate) fn new(timing: Timing, endpoints: Vec<String>, seed: u64) -> Self {
        Self {
            timing,
            rng: Rng::new(seed),
            now: BootTime(0),
            timers: Timers::new(),
            router: Router::new(endpoints),
            exchanges: BTreeMap::new(),
            sessions: BTreeMap::new(),
            leases: BTreeMap::new(),
            ops: BTreeMap::new(),
            calls: BTreeMap::new(),
            watches: BTreeMap::new(),
            renewals: BTreeSet::new(),
            last_id: 0,
            outputs: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self, now: BootTime) {
        self.now = self.now.max(now);
        // After a pause of this process the answers may be waiting unread; they get a moment
        // before what waits for them is given up. Ends of validity get none.
        let patience = Duration::from_millis(200);
        while let Some((at, timer)) = self.timers.pop_due(self.now) {
            let stalled = self.now.since(at) > patience;
            match timer {
                Timer::Lease(lease) => self.lease_due(lease),
                Timer::Op(op) => self.op_due(op),
                Timer::Exchange(_) | Timer::Conn(_) if stalled => {
                    self.timers.set(timer, self.now.after(patience));
                }
                Timer::Exchange(exchange) => self.exchange_due(exchange),
                Timer::Conn(conn) => self.conn_due(conn),
                Timer::Session(session) => self.session_due(session),
                Timer::Call(call) => self.ask_due(call),
                Timer::Watch(watch) => self.watch_due(watch),
            }
        }
    }

    /// When `tick` must be called at the latest.
    pub(crate) fn next_deadline(&self) -> Option<BootTime> {
        self.timers.next()
    }

    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The number of shards, 0 until a node answered.
    pub(crate) const fn shards(&self) -> u32 {
        self.router.shards
    }

    /// The cluster, once a node answered.
    pub(crate) const fn cluster(&self) -> ClusterId {
        self.router.cluster
    }

    /// The members that nodes named last.
    pub(crate) fn nodes(&self) -> Vec<(NodeId, String)> {
        self.router.nodes()
    }

    /// Nothing is on its way.
    pub(crate) fn is_idle(&self) -> bool {
        self.exchanges.is_empty()
    }

    /// Nothing was left behind, but for answers on their way to nobody.
    #[cfg(test)]
    fn assert_empty(&self) {
        assert!(self.ops.is_empty(), "{:?}", self.ops);
        assert!(self.leases.is_empty(), "{:?}", self.leases);
        assert!(self.sessions.is_empty(), "{:?}", self.sessions);
        assert!(self.exchanges.is_empty(), "{:?}", self.exchanges);
        assert!(self.watches.is_empty(), "{:?}", self.watches);
        assert!(self.calls.is_empty() && self.renewals.is_empty());
    }

    fn fresh(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The shard of a key; an error until a node told how many there are.
    fn shard_of(&self, key: &[u8]) -> Result<ShardId, Failure> {
        match self.router.shards {
            0 => Err(Failure::of(ErrorCode::UNREACHABLE)),
            shards => Ok(shard_of(key, shards)),
        }
    }

    /// Starts a read or an operator's request; `Event::Answered` follows.
    pub(crate) fn call(&mut self, now: BootTime, call: CallRequest) -> Result<CallId, Failure> {
        self.tick(now);
        if self.calls.len() >= CALLS_MAX {
            return Err(Failure::new(
                ErrorCode::BUSY,
                format!("this client has {CALLS_MAX} calls open already"),
            ));
        }
        let id = CallId(self.fresh());
        self.calls.insert(id, Call::Request(call.request));
        let deadline = self.now.after(call.timeout);
        self.start(Exchange::new(Owner::Call(id), call.shard, route::Lane::Bulk, deadline));
        Ok(id)
    }

    /// Starts a read of what has become of an acquire; `Event::Answered` follows.
    pub(crate) fn claim(&mut self, now: BootTime, op: OpId) -> Result<CallId, Failure> {
        self.tick(now);
        let claim = self.build_claim(op).ok_or_else(|| {
            Failure::new(ErrorCode::NOT_QUEUED, "the acquire is over, or was not sent yet")
        })?;
        let shard = Some(claim.shard);
        let (request, timeout) = (Request::Claim(claim), self.timing.call);
        self.call(now, CallRequest { shard, request, timeout })
    }

    /// It was neither granted nor ended, as far as is known here.
    pub(crate) fn is_pending(&self, op: OpId) -> bool {
        self.ops.get(&op).is_some_and(|op| op.grant.is_none())
    }

    /// The lease that carries an acquire, once it is known.
    pub(crate) fn lease_of(&self, op: OpId) -> Option<LeaseId> {
        let op = self.ops.get(&op)?;
        self.leases.get(&op.held_by().unwrap_or(op.lease))?.id
    }

    fn build_claim(&self, op: OpId) -> Option<ClaimRequest> {
        let op = self.ops.get(&op)?;
        let lease = self.leases.get(&op.held_by().unwrap_or(op.lease))?;
        let (number, secret) = (op.number?, lease.secret);
        Some(ClaimRequest { shard: lease.shard, lease: lease.id?, secret, number, timeout_ms: 0 })
    }

    /// Nobody waits for this call any more. Its exchange ends by itself.
    pub(crate) fn forget_call(&mut self, call: CallId) {
        self.calls.remove(&call);
    }
}
