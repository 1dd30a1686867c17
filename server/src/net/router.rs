//! From a request to the shard that answers it, on this core or another.
//!
//! A request hops at most once: its shard's core answers, and the answer comes back by the
//! reverse lane. Invariant: the table of hopped requests is bounded by what the lanes and the
//! connections' in-flight limits allow, and each entry goes with its last reply.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId, ShardId};
use leasehold_protocol::reply::{LeaderHint, Reply};
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::shard_of;

use openraft::AsyncRuntime;

use super::lanes::Lanes;
use super::reply::{ReplySink, ReplyTo};
use crate::env::Env;
use crate::member::Membership;
use crate::raft::{Member, PeerInfo, Peers};
use crate::rt::channels::{OneshotSender, oneshot};
use crate::shard::{Origin, Shard};
use crate::watch::WatchName;

/// A peer's message that another core does not answer in this time is given up; Raft sends anew.
const PEER_HOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A group's answer to a peer's message: a body, or a code.
type PeerAnswer = Result<Vec<u8>, ErrorCode>;

/// What one core sends another.
#[derive(Debug)]
pub enum Hop {
    /// A request for a shard of the receiving core.
    Request {
        /// The sending core.
        from: usize,
        /// The sender's name for it.
        id: u64,
        /// Where it came from.
        origin: Origin,
        /// The request.
        request: Box<Request>,
    },
    /// An answer to such a request.
    Reply {
        /// The name it was sent under.
        id: u64,
        /// The answer.
        reply: Box<Reply>,
    },
    /// A peer's message to a group of the receiving core.
    Peer {
        /// The sending core.
        from: usize,
        /// The sender's name for it.
        id: u64,
        /// Whose message it is.
        peer: Box<PeerInfo>,
        /// Its kind.
        kind: u8,
        /// Its body.
        body: Vec<u8>,
    },
    /// The answer to such a message.
    PeerReply {
        /// The name it was sent under.
        id: u64,
        /// The answer.
        answer: PeerAnswer,
    },
    /// Who leads the sender's shards, and the members by them, for the hellos of other cores.
    Known {
        /// The leaders.
        leaders: Vec<LeaderHint>,
        /// The members, `None` from a core without a shard.
        members: Option<BTreeMap<NodeId, String>>,
    },
    /// Ends a watch that the sender's connection does not want any more.
    Unwatch {
        /// Its shard.
        shard: ShardId,
        /// Its name.
        name: WatchName,
    },
}

/// The lanes to the other cores.
pub trait Hops {
    /// Sends, or gives the message back if the lane is full or closed.
    fn send(&self, core: usize, hop: Hop) -> Result<(), Hop>;
}

/// One core's router.
pub struct Router<E: Env> {
    core: usize,
    cores: usize,
    cluster: ClusterId,
    shards_total: u32,
    pub(super) shards: BTreeMap<ShardId, Rc<Shard<E>>>,
    peers: Rc<Peers<E>>,
    pub(super) lanes: Rc<Lanes>,
    pub(super) hopped: RefCell<BTreeMap<u64, ReplyTo>>,
    hopped_peers: RefCell<BTreeMap<u64, OneshotSender<PeerAnswer>>>,
    pub(super) next_hop: Cell<u64>,
    /// Leaders of other cores' shards, as they last told.
    told: RefCell<BTreeMap<ShardId, NodeId>>,
    /// The members as other cores last told, the founding nodes at first: for a core without a shard.
    told_members: RefCell<BTreeMap<NodeId, String>>,
    /// On the core of shard 0.
    membership: RefCell<Option<Rc<Membership<E>>>>,
}

impl<E: Env> Router<E> {
    /// A router on `core` of `cores`, over the shards that live there.
    pub fn new(
        (core, cores): (usize, usize),
        (cluster, shards_total): (ClusterId, u32),
        shards: Vec<Rc<Shard<E>>>,
        peers: Rc<Peers<E>>,
        founders: BTreeMap<NodeId, String>,
        hops: Rc<dyn Hops>,
    ) -> Rc<Self> {
        Rc::new(Self {
            core,
            cores,
            cluster,
            shards_total,
            shards: shards.into_iter().map(|shard| (shard.id(), shard)).collect(),
            peers,
            lanes: Lanes::new(hops),
            hopped: RefCell::default(),
            hopped_peers: RefCell::default(),
            next_hop: Cell::new(0),
            told: RefCell::default(),
            told_members: RefCell::new(founders),
            membership: RefCell::default(),
        })
    }

    /// Changes of the membership are asked of `membership` from now on.
    pub fn set_membership(&self, membership: Rc<Membership<E>>) {
        self.membership.replace(Some(membership));
    }

    /// Set on the core of shard 0.
    pub fn membership(&self) -> Option<Rc<Membership<E>>> {
        self.membership.borrow().clone()
    }

    /// This core's shards.
    pub fn shards(&self) -> impl Iterator<Item = &Rc<Shard<E>>> {
        self.shards.values()
    }

    /// This core's connections to peers.
    pub fn peers(&self) -> &Rc<Peers<E>> {
        &self.peers
    }

    /// The cluster's nodes and their advertised client addresses.
    pub fn members(&self) -> BTreeMap<NodeId, String> {
        self.own_members().unwrap_or_else(|| self.told_members.borrow().clone())
    }

    fn own_members(&self) -> Option<BTreeMap<NodeId, String>> {
        let shard = self.shards.values().next()?;
        let address = |(node, member): (NodeId, Member)| (node, member.client_addr);
        Some(shard.group().members().into_iter().map(address).collect())
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Number of shards of the cluster.
    pub fn shards_total(&self) -> u32 {
        self.shards_total
    }

    /// Number of cores of this node.
    pub fn cores(&self) -> usize {
        self.cores
    }

    /// This core.
    pub fn core(&self) -> usize {
        self.core
    }

    /// Routes a request that belongs to a shard.
    pub fn route(self: &Rc<Self>, request: Request, to: ReplyTo, origin: Origin) {
        let Some(shard) = self.shard_of(&request) else {
            return to.error(ErrorCode::UNKNOWN_KIND, NodeId(0));
        };
        if shard.0 >= self.shards_total {
            return to.error(ErrorCode::WRONG_SHARD, NodeId(0));
        }
        match (self.shards.get(&shard), request) {
            (Some(_), Request::MemberChange(request)) => match &*self.membership.borrow() {
                Some(membership) => membership.change(request, to, origin),
                None => to.error(ErrorCode::NOT_READY, NodeId(0)),
            },
            (Some(shard), request) => shard.submit(request, to, origin),
            (None, request) => self.hop(shard.0 as usize % self.cores, request, to, origin),
        }
    }

    /// Sends a request to another core.
    pub fn hop(&self, core: usize, request: Request, to: ReplyTo, origin: Origin) {
        assert_ne!(core, self.core, "a request for this core does not hop");
        let id = self.next_hop.get();
        self.next_hop.set(id + 1);
        let hop = Hop::Request { from: self.core, id, origin, request: Box::new(request) };
        match self.lanes.send(core, hop) {
            Ok(()) => {
                self.hopped.borrow_mut().insert(id, to);
            }
            Err(_) => to.error(ErrorCode::BUSY, NodeId(0)),
        }
    }

    /// Takes a peer's message to a group that lives on another core there.
    pub async fn hop_peer(
        &self,
        shard: ShardId,
        peer: PeerInfo,
        kind: u8,
        body: Vec<u8>,
    ) -> Result<Vec<u8>, ErrorCode> {
        let core = shard.0 as usize % self.cores;
        if shard.0 >= self.shards_total || core == self.core {
            return Err(ErrorCode::WRONG_SHARD);
        }
        let id = self.next_hop.get();
        self.next_hop.set(id + 1);
        let (sender, answer) = oneshot();
        self.hopped_peers.borrow_mut().insert(id, sender);
        let hop = Hop::Peer { from: self.core, id, peer: Box::new(peer), kind, body };
        if self.lanes.send(core, hop).is_err() {
            self.hopped_peers.borrow_mut().remove(&id);
            return Err(ErrorCode::BUSY);
        }
        let answer = E::Rt::timeout(PEER_HOP_TIMEOUT, answer).await;
        self.hopped_peers.borrow_mut().remove(&id);
        answer.unwrap_or(Ok(Err(ErrorCode::DEADLINE))).unwrap_or(Err(ErrorCode::BUSY))
    }

    /// Handles what another core sent.
    pub fn hopped(self: &Rc<Self>, hop: Hop) {
        match hop {
            Hop::Request { from, id, origin, request } => {
                let to = self.answer_to(from, id);
                match *request {
                    Request::Status(request) => self.status(request, to, origin),
                    Request::Watch(request) => {
                        self.open_watch(WatchName { core: from, id }, request, &to);
                    }
                    request => self.route(request, to, origin),
                }
            }
            Hop::Reply { id, reply } => self.pass_on(id, &reply),
            Hop::Unwatch { shard, name } => {
                if let Some(shard) = self.shards.get(&shard) {
                    shard.unwatch(name);
                }
            }
            Hop::Peer { from, id, peer, kind, body } => {
                let router = Rc::clone(self);
                let answer = self.peers.dispatch(&peer, kind, &body);
                drop(E::Rt::spawn(async move {
                    let answer = match answer {
                        Ok(answer) => answer.await,
                        Err(code) => Err(code),
                    };
                    router.lanes.send_in_order::<E>(from, Hop::PeerReply { id, answer });
                }));
            }
            Hop::PeerReply { id, answer } => {
                if let Some(waiting) = self.hopped_peers.borrow_mut().remove(&id) {
                    let _ = waiting.send(answer);
                }
            }
            Hop::Known { leaders, members } => {
                let leaders = leaders.into_iter().map(|hint| (hint.shard, hint.leader));
                self.told.borrow_mut().extend(leaders);
                if let Some(members) = members {
                    self.told_members.replace(members);
                }
            }
        }
    }

    /// Where the answer to another core's request goes.
    pub fn answer_to(&self, core: usize, id: u64) -> ReplyTo {
        let sink = HopSink::<E> { core, lanes: Rc::clone(&self.lanes), env: PhantomData };
        ReplyTo::new(Rc::new(sink), id)
    }

    /// Tells the other cores who leads this core's shards, and who the members are.
    pub fn tell_cores(&self) {
        let (leaders, members) = (self.own_leaders(), self.own_members());
        for core in (0..self.cores).filter(|core| *core != self.core) {
            // A full lane only makes a hint older.
            let known = Hop::Known { leaders: leaders.clone(), members: members.clone() };
            let _ = self.lanes.send(core, known);
        }
    }

    /// Who leads, as far as this core knows.
    pub fn leaders(&self) -> Vec<LeaderHint> {
        let told = self.told.borrow();
        let told = told.iter().map(|(shard, leader)| LeaderHint { shard: *shard, leader: *leader });
        self.own_leaders().into_iter().chain(told).collect()
    }

    fn own_leaders(&self) -> Vec<LeaderHint> {
        let hint = |shard: &Rc<Shard<E>>| LeaderHint {
            shard: shard.id(),
            leader: shard.known_leader().unwrap_or(NodeId(0)),
        };
        self.shards.values().map(hint).collect()
    }

    fn shard_of(&self, request: &Request) -> Option<ShardId> {
        match request {
            Request::Command(request) => Some(match &request.command {
                // The key decides; a wrong name for its shard is refused there.
                Command::Acquire { key, .. } if key.is_empty() => request.shard,
                Command::Acquire { key, .. }
                | Command::Release { key, .. }
                | Command::ReleaseOwn { key, .. }
                | Command::Convert { key, .. }
                | Command::SetLimit { key, .. }
                | Command::SetValue { key, .. }
                | Command::AskYield { key, .. }
                | Command::ForceRelease { key, .. }
                    if shard_of(key, self.shards_total) != request.shard =>
                {
                    ShardId(u32::MAX)
                }
                _ => request.shard,
            }),
            Request::Renew(request) => Some(request.shard),
            Request::Get(request) => Some(shard_of(&request.key, self.shards_total)),
            Request::List(request) => Some(request.shard),
            Request::Sessions(request) => Some(request.shard),
            Request::Holds(request) => Some(request.shard),
            Request::Claim(request) => Some(request.shard),
            Request::Backup(request) => Some(request.shard),
            Request::Transfer(request) => Some(request.shard),
            Request::Watch(request) => Some(request.shard),
            Request::GroupStep(request) => Some(request.shard),
            // The member table is shard 0's.
            Request::Members(_) | Request::MemberChange(_) => Some(ShardId(0)),
            Request::Hello(_) | Request::Status(_) | Request::Ping | Request::Unwatch(_) => None,
        }
    }
}

struct HopSink<E> {
    core: usize,
    lanes: Rc<Lanes>,
    env: PhantomData<E>,
}

impl<E: Env> ReplySink for HopSink<E> {
    fn reply(&self, id: u64, reply: &Reply) {
        let hop = Hop::Reply { id, reply: Box::new(reply.clone()) };
        self.lanes.send_in_order::<E>(self.core, hop);
    }

    fn offer(&self, id: u64, reply: &Reply) -> bool {
        let room = self.lanes.has_room(self.core);
        if room {
            self.reply(id, reply);
        }
        room
    }
}
