//! One shard on one node: takes requests, batches commands into the log, forwards what another
//! node leads, and keeps leases alive while it leads.
//!
//! Owns batching, leadership, deadlines and the read barrier. Never looks inside Raft or the WAL,
//! never decides who holds a key: `leasehold_core::State` does, in `apply`.
//!
//! Invariants:
//! - A request gets one final answer, by its deadline at the latest.
//! - Nothing that depends on the present (a renewal, a linearizable read, a dead lease) is answered
//!   without a confirmed round that began after the request was read from its socket.

mod backup;
mod batch;
mod count;
mod expire;
mod forward;
mod freshness;
mod member;
mod probe;
mod propose;
mod quarantine;
mod read;
mod renew;
mod waits;
mod watch;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::State;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{LeaseId, NodeId, ShardId};
use leasehold_protocol::member::ShardProgress;
use leasehold_protocol::planted;
use leasehold_protocol::request::Request;

use self::backup::Backups;
use self::batch::{Pending, Slot};
use self::count::{Totals, count_events};
pub use self::expire::run_wheel;
pub use self::forward::FORWARD_KIND;
use self::freshness::Freshness;
pub use self::quarantine::Beginning;
use self::waits::Waits;
use crate::admin::{CoreHandle, Counter};
use crate::env::{Clock, Env, MonoTime};
use crate::lease::{CoreWheel, LeaseTable, ShardTimers};
use crate::net::ReplyTo;
use crate::raft::{Group, Leadership, Peers};
use crate::rt::channels::Notify;
use crate::watch::{Hub, Sizes};

/// A request waits at most this long, whatever it asks for.
pub const TIMEOUT_MS_MAX: u32 = 60_000;
/// How long a request that names no time waits.
pub const TIMEOUT_MS_DEFAULT: u32 = 5_000;
/// Renewals, reads and forwarded requests of one shard that wait at once; above it the answer is
/// `busy`.
pub const UNDER_WAY_MAX: usize = 64 * 1024;

/// Where a request came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A client of this node: what this node does not lead is forwarded.
    Client,
    /// A peer that forwarded it here: never forwarded again.
    Peer,
    /// Another core of this node, about that core alone.
    Core,
}

/// What all shards of a core share.
#[derive(Clone)]
pub struct ShardCore<E: Env> {
    /// Number of shards of the cluster.
    pub shards_total: u32,
    /// Time.
    pub clock: E::Clock,
    /// The core's wheel.
    pub wheel: CoreWheel,
    /// The core's figures.
    pub metrics: CoreHandle,
    /// What is kept for watches of each shard.
    pub watch_sizes: Sizes,
}

/// One shard on one node.
pub struct Shard<E: Env> {
    id: ShardId,
    group: Rc<Group<E>>,
    state: Rc<RefCell<State>>,
    peers: Rc<Peers<E>>,
    clock: E::Clock,
    timers: RefCell<ShardTimers>,
    leases: RefCell<LeaseTable>,
    waits: RefCell<Waits>,
    backups: RefCell<Backups>,
    pending: RefCell<Pending>,
    /// Slots of the proposals under way.
    proposed: RefCell<BTreeMap<u64, Vec<Slot>>>,
    next_proposal: Cell<u64>,
    /// When a proposal of this node was committed last.
    committed: Cell<Option<MonoTime>>,
    work: Notify,
    /// Something waits whose deadline must be watched.
    busy_again: Notify,
    /// Cloned once by each renewal, read and forwarded request that waits.
    under_way: Rc<()>,
    /// The leadership whose leases run here.
    leading: Cell<Option<Leadership>>,
    /// Since when a round is under way that asks whether a majority follows.
    probing: Cell<Option<MonoTime>>,
    hub: RefCell<Hub>,
    /// Watchers are to be told something.
    to_tell: Notify,
    /// The same, once the commands that it comes from are answered.
    tell_due: Cell<bool>,
    /// Somebody watches again, or reads what is here.
    watched: Notify,
    freshness: Freshness,
    stopping: Cell<bool>,
    /// A step towards another membership is being taken: one at a time.
    stepping: Cell<bool>,
    /// How far an operation is, as its driver saw it, and for which version of the member table.
    member_progress: RefCell<(u64, Vec<ShardProgress>)>,
    shards_total: u32,
    metrics: CoreHandle,
    totals: Totals,
}

impl<E: Env> Shard<E> {
    /// A shard over its opened Raft group. `run` must be driven for it to work.
    pub fn new(
        id: ShardId,
        group: Rc<Group<E>>,
        state: Rc<RefCell<State>>,
        peers: Rc<Peers<E>>,
        core: ShardCore<E>,
    ) -> Rc<Self> {
        let ShardCore { shards_total, clock, wheel, metrics, watch_sizes } = core;
        let totals = Totals::default();
        totals.recount(&state.borrow());
        let hub = RefCell::new(Hub::new(&state.borrow(), watch_sizes));
        Rc::new(Self {
            id,
            group,
            state,
            peers,
            clock,
            timers: RefCell::new(ShardTimers::new(id, wheel)),
            leases: RefCell::default(),
            waits: RefCell::default(),
            backups: RefCell::default(),
            pending: RefCell::default(),
            proposed: RefCell::default(),
            next_proposal: Cell::new(0),
            committed: Cell::new(None),
            work: Notify::new(),
            busy_again: Notify::new(),
            under_way: Rc::new(()),
            leading: Cell::new(None),
            probing: Cell::new(None),
            hub,
            to_tell: Notify::new(),
            tell_due: Cell::new(false),
            watched: Notify::new(),
            freshness: Freshness::default(),
            stopping: Cell::new(false),
            stepping: Cell::new(false),
            member_progress: RefCell::default(),
            shards_total,
            metrics,
            totals,
        })
    }

    /// This shard's id.
    pub fn id(&self) -> ShardId {
        self.id
    }

    /// Its Raft group.
    pub fn group(&self) -> &Rc<Group<E>> {
        &self.group
    }

    /// Its state, as this node has applied it.
    pub fn state(&self) -> &Rc<RefCell<State>> {
        &self.state
    }

    /// Takes one request; its answer goes to `to`, now or later.
    pub fn submit(self: &Rc<Self>, request: Request, to: ReplyTo, origin: Origin) {
        if self.stopping.get() {
            return to.error(ErrorCode::SHUTTING_DOWN, self.leader());
        }
        match request {
            Request::Command(request) => self.command(request, to, origin),
            Request::Renew(request) => self.renew(request, to, origin),
            Request::Get(_)
            | Request::List(_)
            | Request::Sessions(_)
            | Request::Holds(_)
            | Request::Claim(_)
            | Request::Members(_) => {
                self.read(request, to, origin);
            }
            Request::Transfer(request) => self.transfer(request, to, origin),
            Request::GroupStep(request) => self.group_step(request, to, origin),
            Request::Backup(request) => self.backup(request, to, origin),
            Request::Hello(_)
            | Request::Status(_)
            | Request::MemberChange(_)
            | Request::Ping
            | Request::Watch(_)
            | Request::Unwatch(_) => {
                to.error(ErrorCode::UNKNOWN_KIND, NodeId(0));
            }
        }
    }

    /// Refuses new requests from now on.
    pub fn stop(&self) {
        self.stopping.set(true);
    }

    /// New requests are refused.
    pub fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// So many commands were applied.
    pub fn counted(&self, commands: usize) {
        self.metrics.add(Counter::CommandsApplied, commands as u64);
    }

    /// What `apply` did: wakes waiters, keeps the lease table, feeds the counters.
    pub fn applied(&self, events: &[Event]) {
        count_events(&self.metrics, events);
        self.totals.follow(events);
        self.waits.borrow_mut().applied(events);
        self.follow_leases(events);
        if self.hub.borrow_mut().applied(&self.state.borrow(), events) {
            self.tell_due.set(true);
        }
    }

    /// The commands of an entry have their answers: who asked comes before who watches.
    pub fn answered(&self) {
        if self.tell_due.take() {
            self.to_tell.notify_one();
        }
    }

    /// A snapshot replaced the state: events were skipped.
    pub fn installed(&self) {
        self.metrics.count(Counter::SnapshotsInstalled);
        self.totals.recount(&self.state.borrow());
        // Planted (G4): whose turn came within the snapshot is never told.
        if !planted!("snapshot-wakes-nobody") {
            self.waits.borrow_mut().resync();
        }
        self.hub.borrow_mut().installed(&self.state.borrow());
        self.to_tell.notify_one();
    }

    /// Holds of this shard.
    pub fn holds_len(&self) -> usize {
        self.totals.holds()
    }

    /// Queued acquires of this shard.
    pub fn waiters_len(&self) -> usize {
        self.totals.waiters()
    }

    /// Requests that wait for a confirmed round or for another node; `UNDER_WAY_MAX` at most.
    pub fn under_way_len(&self) -> usize {
        Rc::strong_count(&self.under_way) - 1
    }

    /// What is left of a live lease's TTL by the deadlines of this leader; `None` if it does not lead.
    pub fn lease_left(&self, lease: LeaseId) -> Option<Duration> {
        self.leads()?;
        let ttl_ms = self.state.borrow().lease(lease)?.ttl_ms();
        let left_ms = self.leases.borrow().remaining_ms(lease, ttl_ms, self.clock.now());
        Some(Duration::from_millis(left_ms.into()))
    }

    /// The leader as this node knows it, `NodeId(0)` if unknown.
    fn leader(&self) -> NodeId {
        self.group.leader_hint().unwrap_or(NodeId(0))
    }

    /// The node to forward a request to, if it came from a client and another node leads. This
    /// node itself may be the leader that has not applied its first entry yet: then nobody can
    /// answer just now.
    fn elsewhere(&self, origin: Origin) -> Option<NodeId> {
        let leader = self.group.leader_hint()?;
        (origin == Origin::Client && leader != self.peers.node()).then_some(leader)
    }

    /// The leadership under which this node may answer for the shard.
    fn leads(&self) -> Option<Leadership> {
        let leadership = self.group.leadership()?;
        (self.leading.get() == Some(leadership)).then_some(leadership)
    }

    /// A place among the requests that wait, given back when dropped; `None` if there is none.
    fn room(&self) -> Option<Rc<()>> {
        (self.under_way_len() < UNDER_WAY_MAX).then(|| Rc::clone(&self.under_way))
    }

    fn deadline(&self, timeout_ms: u32) -> MonoTime {
        self.clock.now().after(Self::timeout(timeout_ms))
    }

    fn timeout(timeout_ms: u32) -> Duration {
        let timeout_ms = if timeout_ms == 0 { TIMEOUT_MS_DEFAULT } else { timeout_ms };
        Duration::from_millis(u64::from(timeout_ms.min(TIMEOUT_MS_MAX)))
    }
}
