//! Where requests go: the nodes, the connections to them, and who leads which shard.
//!
//! Any node answers any request, so a hint about the leader is only that: when it fails, another
//! node is asked. A connection is opened when a request needs it, never to keep a number of them;
//! a node that failed rests for a jittered, growing pause before it is tried again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold_protocol::conn::ClientConn;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId, RequestId, ShardId};
use leasehold_protocol::limits::IN_FLIGHT_MAX;
use leasehold_protocol::reply::{LeaderHint, NodeAddress, ServerHello};

use super::rng::{Backoff, Rng};
use super::{ConnId, ExchangeId};
use crate::clock::BootTime;
use crate::config::TARGETS_MAX;
use crate::error::Failure;

/// How long the address of a node that was removed is left alone; by then another one may be there.
const REMOVED_REST: Duration = Duration::from_secs(5);

/// Renewals, cancels and releases have a connection of their own, so that bulk cannot delay them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// Acquires, opens and reads.
    Bulk = 0,
    /// Renewals, cancels, releases, closes.
    Lease = 1,
    /// Watches, so that many events hold back nothing else.
    Watch = 2,
}

/// What a request id of a connection stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InFlight {
    Probe,
    Exchange { exchange: ExchangeId, sent_at: BootTime },
}

/// One address.
#[derive(Debug)]
struct Target {
    addr: String,
    node: Option<NodeId>,
    /// Given by the user, so never forgotten.
    given: bool,
    /// Its node was no member any more when nodes last named the members. Tried after all others:
    /// a node that lags behind may have said so of a newcomer.
    departed: bool,
    failures: u32,
    not_before: BootTime,
    /// Why it cannot be used, if its handshake was refused for good.
    refusal: Option<Failure>,
    conns: [Option<ConnId>; 3],
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Conn {
    target: usize,
    pub(crate) lane: Lane,
    /// The protocol's side of it, from when the byte stream is open.
    pub(crate) wire: Option<ClientConn>,
    pub(crate) last_heard: BootTime,
    /// When it was asked for a sign of life.
    pub(crate) probed: Option<BootTime>,
    pub(crate) in_flight: BTreeMap<RequestId, InFlight>,
    /// What waits for it to be set up.
    pub(crate) parked: BTreeSet<ExchangeId>,
    /// The handshake was made at some time.
    welcomed: bool,
    /// The driver was told that there is something to write, and has not come for it.
    pub(crate) writing: bool,
}

impl Conn {
    /// The handshake is made.
    pub(crate) fn is_ready(&self) -> bool {
        self.wire.as_ref().is_some_and(ClientConn::is_open)
    }

    /// Something is open on it again, after a time in which silence meant nothing.
    pub(crate) const fn quiet_since(&mut self, now: BootTime) {
        self.last_heard = now;
        self.probed = None;
    }

    fn has_room(&self) -> bool {
        // A few ids stay free for probes.
        self.in_flight.len() < IN_FLIGHT_MAX - 16
    }
}

/// Where a request may go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// This connection is ready.
    Use(ConnId),
    /// This connection is being set up.
    Park(ConnId),
    /// A connection to this address must be opened.
    Connect(usize),
    /// No address may be tried before.
    Rest(BootTime),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Router {
    targets: Vec<Target>,
    conns: BTreeMap<ConnId, Conn>,
    leaders: BTreeMap<ShardId, NodeId>,
    /// As a node named them last.
    members: Vec<NodeAddress>,
    backoff: Backoff,
    /// The first cluster that answered; another one is refused from then on.
    pub(crate) cluster: ClusterId,
    pub(crate) shards: u32,
}

impl Router {
    pub(crate) fn new(endpoints: Vec<String>) -> Self {
        let targets = endpoints.into_iter().map(|addr| Target::new(addr, None, true)).collect();
        Self {
            targets,
            conns: BTreeMap::new(),
            leaders: BTreeMap::new(),
            members: Vec::new(),
            backoff: Backoff { first: Duration::from_millis(40), longest: Duration::from_secs(3) },
            cluster: ClusterId::UNKNOWN,
            shards: 0,
        }
    }

    /// Picks a connection for a request. `avoid` is an address that has just failed it; it is used
    /// only if there is no other.
    pub(crate) fn choose(
        &self,
        shard: Option<ShardId>,
        lane: Lane,
        avoid: Option<usize>,
        now: BootTime,
        rng: &mut Rng,
    ) -> Choice {
        let allowed = |index: &usize| Some(*index) != avoid;
        let leader = shard.and_then(|shard| self.leaders.get(&shard)).copied();
        if let Some(leader) = leader {
            let led = |index: &usize| self.targets[*index].node == Some(leader) && allowed(index);
            if let Some(choice) = self.pick(lane, now, led, rng) {
                return choice;
            }
        }
        let member = |index: &usize| !self.targets[*index].departed && allowed(index);
        if let Some(choice) = self.pick(lane, now, member, rng) {
            return choice;
        }
        if let Some(choice) = self.pick(lane, now, allowed, rng) {
            return choice;
        }
        if avoid.is_some() {
            return self.choose(shard, lane, None, now, rng);
        }
        Choice::Rest(self.targets.iter().map(|t| t.not_before).min().unwrap_or(now))
    }

    /// The best of the addresses that `fits` accepts: a ready connection, one being set up, one to
    /// open; among equals a random one, so that clients spread over the nodes.
    fn pick(
        &self,
        lane: Lane,
        now: BootTime,
        fits: impl Fn(&usize) -> bool,
        rng: &mut Rng,
    ) -> Option<Choice> {
        let (mut parked, mut idle) = (None, Vec::new());
        for index in (0..self.targets.len()).filter(fits) {
            let target = &self.targets[index];
            match target.conns[lane as usize].map(|conn| (conn, &self.conns[&conn])) {
                Some((id, conn)) if conn.is_ready() && conn.has_room() => {
                    return Some(Choice::Use(id));
                }
                Some((_, conn)) if conn.is_ready() => {}
                Some((id, _)) => parked = Some(Choice::Park(id)),
                None if target.not_before <= now => idle.push(index),
                None => {}
            }
        }
        if parked.is_some() || idle.is_empty() {
            return parked;
        }
        Some(Choice::Connect(idle[rng.below(idle.len() as u64) as usize]))
    }

    /// Enters a connection that is being set up; returns the address to connect to.
    pub(crate) fn open(&mut self, id: ConnId, target: usize, lane: Lane, now: BootTime) -> String {
        let slot = &mut self.targets[target].conns[lane as usize];
        assert!(slot.is_none(), "one connection per address and lane");
        *slot = Some(id);
        let conn = Conn {
            target,
            lane,
            wire: None,
            last_heard: now,
            probed: None,
            in_flight: BTreeMap::new(),
            parked: BTreeSet::new(),
            welcomed: false,
            writing: false,
        };
        self.conns.insert(id, conn);
        self.targets[target].addr.clone()
    }

    pub(crate) fn conn(&mut self, id: ConnId) -> Option<&mut Conn> {
        self.conns.get_mut(&id)
    }

    pub(crate) fn target_of(&self, id: ConnId) -> Option<usize> {
        self.conns.get(&id).map(|conn| conn.target)
    }

    /// The address of a connection, for messages.
    pub(crate) fn addr_of(&self, id: ConnId) -> &str {
        self.conns.get(&id).map_or("?", |conn| &self.targets[conn.target].addr)
    }

    /// The handshake succeeded: learns the cluster from it.
    pub(crate) fn welcome(&mut self, id: ConnId, hello: &ServerHello, now: BootTime) {
        let conn = self.conns.get_mut(&id).expect("a connection that answered is known");
        conn.last_heard = now;
        conn.welcomed = true;
        let target = &mut self.targets[conn.target];
        target.node = Some(hello.node);
        target.refusal = None;
        self.cluster = hello.cluster;
        self.shards = hello.shards;
        self.learn_nodes(&hello.nodes);
        for hint in &hello.leaders {
            if hint.leader != NodeId(0) && !self.leaders.contains_key(&hint.shard) {
                self.leaders.insert(hint.shard, hint.leader);
            }
        }
    }

    /// A node answered something other than a hello on this connection: only now is its back-off
    /// over, so that a node which accepts and then drops connections is not hammered.
    pub(crate) fn answered(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get(&id) {
            self.targets[conn.target].failures = 0;
        }
    }

    /// Learns the members and their addresses, as a node named them.
    pub(crate) fn learn_nodes(&mut self, nodes: &[NodeAddress]) {
        self.members = nodes.to_vec();
        for target in &mut self.targets {
            target.departed =
                target.node.is_some_and(|node| nodes.iter().all(|known| known.node != node));
        }
        for node in nodes {
            if let Some(target) = self.target_for(&node.client_addr) {
                target.node = Some(node.node);
                target.departed = false;
            }
        }
    }

    /// The members that a node named last, by id.
    pub(crate) fn nodes(&self) -> Vec<(NodeId, String)> {
        self.members.iter().map(|member| (member.node, member.client_addr.clone())).collect()
    }

    /// The entry of an address; a new one if there is room, or the place of a node that is gone.
    fn target_for(&mut self, addr: &str) -> Option<&mut Target> {
        if let Some(index) = self.targets.iter().position(|target| target.addr == addr) {
            return self.targets.get_mut(index);
        }
        let new = Target::new(addr.to_owned(), None, false);
        if self.targets.len() < TARGETS_MAX {
            self.targets.push(new);
            return self.targets.last_mut();
        }
        let gone = self.targets.iter_mut().find(|target| target.is_spare())?;
        *gone = new;
        Some(gone)
    }

    /// A hint from a reply, `NodeId(0)` for "the answering node leads, or nobody is known to".
    pub(crate) fn hint(&mut self, hint: &LeaderHint) {
        self.leaders.insert(hint.shard, hint.leader);
    }

    /// Whoever was thought to lead this shard does not answer for it.
    pub(crate) fn forget_leader(&mut self, shard: ShardId) {
        self.leaders.remove(&shard);
    }

    /// The node of a connection, if it is known.
    pub(crate) fn node_of(&self, id: ConnId) -> Option<NodeId> {
        self.conns.get(&id).and_then(|conn| self.targets[conn.target].node)
    }

    /// Removes a connection that broke or was given up. The address rests; shards that its node
    /// led are looked for elsewhere. Returns what was in flight or waited for it.
    pub(crate) fn drop_conn(
        &mut self,
        id: ConnId,
        why: &Failure,
        now: BootTime,
        rng: &mut Rng,
    ) -> Vec<ExchangeId> {
        let Some(conn) = self.conns.remove(&id) else { return Vec::new() };
        let target = &mut self.targets[conn.target];
        target.conns[conn.lane as usize] = None;
        let mut lost = conn.parked;
        lost.extend(conn.in_flight.values().filter_map(exchange_of));
        // A refused handshake also ends the wire; only one that was made has carried requests.
        let refused = is_final_refusal(why.code);
        let quiet = conn.welcomed && lost.is_empty();
        if !quiet {
            target.failures = target.failures.saturating_add(1);
            target.not_before = now.after(self.backoff.pause(target.failures, rng));
            target.refusal = (refused && !conn.welcomed).then(|| why.clone());
            if let Some(node) = target.node {
                self.leaders.retain(|_, leader| *leader != node);
            }
        }
        lost.into_iter().collect()
    }

    /// An address whose node is no longer a member: it rests, and leads nothing.
    pub(crate) fn retire(&mut self, target: Option<usize>, now: BootTime) {
        let Some(target) = target.and_then(|target| self.targets.get_mut(target)) else { return };
        target.not_before = now.after(REMOVED_REST);
        if let Some(node) = target.node {
            self.leaders.retain(|_, leader| *leader != node);
        }
    }

    /// Set if every address refused the handshake for good: there is nobody to wait for.
    pub(crate) fn all_refused(&self) -> Option<&Failure> {
        let given = || self.targets.iter().filter(|target| target.given);
        if given().all(|target| target.refusal.is_some()) {
            return given().find_map(|target| target.refusal.as_ref());
        }
        None
    }
}

impl Target {
    const fn new(addr: String, node: Option<NodeId>, given: bool) -> Self {
        Self {
            addr,
            node,
            given,
            departed: false,
            failures: 0,
            not_before: BootTime(0),
            refusal: None,
            conns: [None; 3],
        }
    }

    /// Another address may have its place.
    fn is_spare(&self) -> bool {
        self.departed && !self.given && self.conns == [None; 3]
    }
}

const fn exchange_of(what: &InFlight) -> Option<ExchangeId> {
    match what {
        InFlight::Exchange { exchange, .. } => Some(*exchange),
        InFlight::Probe => None,
    }
}

/// Whether a handshake that ended with this code can ever succeed with the same node.
fn is_final_refusal(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::WRONG_CLUSTER
            | ErrorCode::AUTH_FAILED
            | ErrorCode::UNSUPPORTED_VERSION
            | ErrorCode::MALFORMED
            | ErrorCode::UNKNOWN_KIND
    )
}
