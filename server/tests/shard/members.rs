//! Changes of the membership on simulated nodes: a step for an older table does nothing, and an
//! operation is carried out whoever of its drivers dies at whatever moment.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, ready};
use leasehold_protocol::birth::{BirthAnswer, BirthMember, BirthRecord, KIND_QUERY, Plan};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId};
use leasehold_protocol::member::{
    GroupGoal, GroupStepRequest, MemberChange, MemberChangeRequest, MemberPhase, NewMember,
    ShardProgress, Standing,
};
use leasehold_protocol::peer::{MemberEntry, PING};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use leasehold_server::member::Membership;
use leasehold_server::net::{ForwardService, ReplyTo};
use leasehold_server::raft::{Class, PeerInfo, PeerService};
use leasehold_server::rt::sim::{SimRng, SimRt};
use leasehold_server::shard::{FORWARD_KIND, Origin, Shard};
use openraft::AsyncRuntime;

use super::raft_support::{
    CLUSTER, Cluster, Running, SHARD, SimEnv, addr, disk_id, member, run, sleep_ms, until,
};
use super::{Replies, Service, TIMEOUT_MS, start_routed};

pub(super) const SEEDS: u64 = 12;

pub(super) fn entry(node: u64) -> MemberEntry {
    let member = member(node);
    let (peer_addr, client_addr) = (member.peer_addr, member.client_addr);
    MemberEntry { node: NodeId(node), disk: disk_id(node), peer_addr, client_addr }
}

fn founder(node: u64) -> BirthMember {
    let MemberEntry { node, disk, peer_addr, client_addr } = entry(node);
    BirthMember { node, disk, peer_addr, client_addr }
}

fn record() -> BirthRecord {
    BirthRecord {
        cluster: CLUSTER,
        name: "simulated".to_owned(),
        members: (1..=3).map(founder).collect(),
        shards: 1,
        key_hash: leasehold_protocol::shard::KEY_HASH,
        token_base: 100,
        restored: None,
    }
}

#[test]
fn a_step_for_an_older_table_does_nothing() {
    run(1, async {
        let service = Service::start(1, |_| {}).await;
        let step = |version, goal| {
            let request = GroupStepRequest { shard: SHARD, version, goal, timeout_ms: TIMEOUT_MS };
            service.ask(1, Request::GroupStep(request))
        };
        let done =
            |reply: &Reply| matches!(reply, Reply::GroupStepped(ShardProgress { done: true, .. }));
        step(5, GroupGoal::Undone(vec![entry(1)])).reply("nothing is to be done", done).await;
        let late = step(4, GroupGoal::Learner(entry(4)));
        let refused = |reply: &Reply| matches!(reply, Reply::Error(_));
        late.reply("a driver of before is refused", refused).await;
        assert_eq!(late.error(), Some(ErrorCode::MEMBER_CHANGE_OVER));
        let members = service.shards[&1].group().members();
        assert!(members.keys().eq(&[NodeId(1)]), "{members:?}");
    });
}

/// Answers forwarded requests, and who this node is.
struct Answers {
    forward: Rc<ForwardService<SimEnv>>,
    node: u64,
    promised: Option<BirthRecord>,
}

impl PeerService for Answers {
    fn handle(
        &self,
        _from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        if kind == KIND_QUERY {
            let BirthRecord { name, shards, key_hash, .. } = record();
            let plan = Plan { name, nodes: vec![NodeId(self.node)], shards, key_hash };
            let promised = self.promised.clone();
            let answer = BirthAnswer { member: founder(self.node), plan, promised };
            let answer = leasehold_protocol::codec::encode(&answer);
            return ready(Ok(answer)).boxed_local();
        }
        if kind != FORWARD_KIND {
            return ready(Err(ErrorCode::UNKNOWN_KIND)).boxed_local();
        }
        let (forward, body) = (self.forward.clone(), body.to_vec());
        async move { forward.forwarded(&body).await }.boxed_local()
    }
}

fn start_node(running: &Running, node: u64, runs: bool, promised: Option<BirthRecord>) -> Node {
    let (shard, router) = start_routed(running, leasehold_protocol::ids::Token(100).into());
    let peers = running.peers.clone();
    let membership = Membership::new(shard.clone(), &router, peers.clone(), Rc::new(record()));
    router.set_membership(membership.clone());
    let forward = Rc::new(ForwardService::new(router));
    peers.set_service(Rc::new(Answers { forward, node, promised }));
    if runs {
        drop(SimRt::spawn(membership.clone().run()));
    }
    (shard, membership)
}

/// What runs on a machine.
pub(super) type Node = (Rc<Shard<SimEnv>>, Rc<Membership<SimEnv>>);

/// Four machines, of which the first three are the cluster.
pub(super) struct World {
    pub(super) cluster: Cluster,
    /// What the fourth belongs to.
    promised: Option<BirthRecord>,
    pub(super) nodes: BTreeMap<u64, Node>,
    /// Whether the tables are followed and written; without, the cluster stays without a table.
    runs: bool,
}

impl World {
    pub(super) async fn new() -> Self {
        Self::with(None).await
    }

    async fn with(promised: Option<BirthRecord>) -> Self {
        let world = Self::formed(true, promised).await;
        let founded = || (1..=3).all(|node| world.version(node) > 0);
        until("the table is founded", founded).await;
        world
    }

    /// The three know each other's addresses, as a configuration tells them, and not the fourth's.
    async fn formed(runs: bool, promised: Option<BirthRecord>) -> Self {
        let cluster = Cluster { configured: 3, ..Cluster::new(4) };
        let mut world = Self { cluster, promised, nodes: BTreeMap::new(), runs };
        for node in 1..=4 {
            world.start(node).await;
        }
        let members = (1..=3).map(|node| (node, member(node))).collect();
        world.cluster.group(1).initialize(members).await.expect("node 1 is a member");
        world.cluster.leader().await;
        world
    }

    pub(super) async fn start(&mut self, node: u64) {
        self.cluster.start(node).await.expect("a sound disk");
        let running = self.cluster.running(node);
        let domain = self.cluster.machine(node).domain;
        let promised = self.promised.clone().filter(|_| node == 4);
        let runs = self.runs;
        let start = async move { start_node(&running, node, runs, promised) };
        let started = self.cluster.world.spawn_in(domain, start).await;
        self.nodes.insert(node, started.expect("nobody kills it"));
    }

    pub(super) fn kill(&mut self, node: u64) {
        self.nodes.remove(&node);
        self.cluster.kill(node);
    }

    pub(super) fn version(&self, node: u64) -> u64 {
        self.nodes[&node].0.state().borrow().members().version()
    }

    fn change(&self, node: u64, change: MemberChange) -> Replies {
        let request = MemberChangeRequest { change, timeout_ms: TIMEOUT_MS };
        let membership = self.nodes[&node].1.clone();
        self.ask(node, move |to| membership.change(request, to, Origin::Client))
    }

    /// Asks this node's shard.
    pub(super) fn submit(&self, node: u64, request: Request) -> Replies {
        let shard = self.nodes[&node].0.clone();
        self.ask(node, move |to| shard.submit(request, to, Origin::Client))
    }

    fn ask(&self, node: u64, ask: impl FnOnce(ReplyTo) + 'static) -> Replies {
        let replies = Replies::default();
        let to = ReplyTo::new(Rc::new(replies.clone()), 1);
        let ask = async move { ask(to) };
        drop(self.cluster.world.spawn_in(self.cluster.machine(node).domain, ask));
        replies
    }

    pub(super) async fn begin(&self, change: &MemberChange) -> u64 {
        self.try_begin(change).await.expect("it can be begun")
    }

    /// Asks one node after the other until one says that it is begun, or that it is over.
    pub(super) async fn try_begin(&self, change: &MemberChange) -> Result<u64, ErrorCode> {
        let nodes: Vec<u64> = self.nodes.keys().copied().filter(|node| *node <= 3).collect();
        for node in nodes.into_iter().cycle().take(300) {
            let replies = self.change(node, change.clone());
            until("an answer", || replies.last().is_some()).await;
            match replies.last() {
                Some(Reply::MemberChanged(reply)) => return Ok(reply.operation),
                Some(Reply::Error(error)) if error.code == ErrorCode::MEMBER_CHANGE_OVER => {
                    return Err(error.code);
                }
                Some(Reply::Error(_)) => sleep_ms(20).await,
                other => panic!("{other:?}"),
            }
        }
        panic!("it is never begun");
    }

    /// Asks a node for a change that it refuses.
    async fn refused(&self, node: u64, change: MemberChange) -> Option<ErrorCode> {
        let replies = self.change(node, change);
        until("an answer", || replies.last().is_some()).await;
        replies.error()
    }

    /// Hands the leadership from one node to another.
    async fn hand_over(&self, from: u64, to: u64) {
        let group = self.cluster.group(from);
        let transfer = async move { group.transfer(Some(NodeId(to))).await };
        let domain = self.cluster.machine(from).domain;
        let moved = self.cluster.world.spawn_in(domain, transfer).await.expect("nobody kills it");
        moved.expect("it takes the leadership");
        until("it leads", || self.leader() == Some(to)).await;
    }

    fn leader(&self) -> Option<u64> {
        self.cluster.leader_now().map(|(node, _)| node)
    }

    /// A node has applied what this one has.
    fn follows(&self, node: u64, leader: u64) -> bool {
        let revision = |node: u64| self.nodes[&node].0.state().borrow().revision();
        revision(node) == revision(leader)
    }

    /// The operation is over, and the group is what was asked for, as this node sees it.
    pub(super) fn is_over(&self, node: u64, voters: &BTreeSet<NodeId>) -> bool {
        let Some((shard, _)) = self.nodes.get(&node) else { return false };
        let state = shard.state().borrow();
        let members = state.members();
        let by_table = members.nodes().filter(|info| info.standing == Standing::Voter);
        members.operation().is_none()
            && by_table.map(|info| info.entry.node).eq(voters.iter().copied())
            && shard.group().membership().are(voters)
    }
}

pub(super) fn new_member(node: u64) -> NewMember {
    new_member_at(node, &addr(node))
}

fn new_member_at(node: u64, peer_addr: &str) -> NewMember {
    let (node, peer_addr) = (NodeId(node), peer_addr.to_owned());
    NewMember { node, peer_addr, client_addr: String::new() }
}

/// An address at which nobody listens.
const NOWHERE: &str = "nowhere:7001";

/// The node to which the wrong address was told leads again when the right one is known.
#[test]
fn an_address_that_was_refused_is_not_remembered() {
    run(1, async {
        let world = World::new().await;
        let first = world.leader().expect("there is a leader");
        let second = first % 3 + 1;
        let wrong = MemberChange::Add(new_member_at(4, NOWHERE));
        assert_eq!(world.refused(first, wrong).await, Some(ErrorCode::NODE_UNREACHABLE));
        world.hand_over(first, second).await;
        world.begin(&MemberChange::Add(new_member(4))).await;
        let voters = (1..=4).map(NodeId).collect();
        until("it is over", || (1..=4).all(|node| world.is_over(node, &voters))).await;
        assert_eq!(world.leader(), Some(second), "INVALID: another leader");
        world.hand_over(second, first).await;
        let leadership = world.cluster.leader().await;
        world.cluster.open_lease(1).await;
        until("the new node is replicated to", || world.follows(4, first)).await;
        assert_eq!(world.cluster.leader().await, leadership, "INVALID: another leader");
    });
}

/// Before the table is written, who was there from the beginning is named by the cluster's record.
#[test]
fn a_founder_is_no_new_node_before_there_is_a_table() {
    run(1, async {
        let world = World::formed(false, None).await;
        let leadership = world.cluster.leader().await;
        let leader = leadership.0;
        let founder = leader % 3 + 1;
        let moved = MemberChange::Add(new_member_at(founder, NOWHERE));
        assert_eq!(world.refused(leader, moved).await, Some(ErrorCode::NODE_ID_USED));
        assert_eq!(world.version(leader), 0, "INVALID: there is a table");
        // Where it is reached is what it was: when its connections are made anew, too.
        let peers = world.cluster.running(leader).peers;
        let domain = world.cluster.machine(leader).domain;
        let anew = async move { peers.disconnect() };
        world.cluster.world.spawn_in(domain, anew).await.expect("nobody kills it");
        world.cluster.open_lease(1).await;
        until("it is replicated to", || world.follows(founder, leader)).await;
        assert_eq!(world.cluster.leader().await, leadership, "INVALID: another leader");
    });
}

#[test]
fn a_node_that_belongs_to_another_cluster_is_not_added() {
    run(90, async {
        let other = BirthRecord { cluster: ClusterId([9; 16]), ..record() };
        let world = World::with(Some(other)).await;
        let (leader, _) = world.cluster.leader().await;
        let replies = world.change(leader, MemberChange::Add(new_member(4)));
        until("an answer", || replies.last().is_some()).await;
        assert_eq!(replies.error(), Some(ErrorCode::NODE_NOT_FRESH), "{:?}", replies.last());
        assert_eq!(world.version(leader), 1);
    });
}

#[test]
fn nobody_is_removed_who_is_needed_for_a_majority() {
    run(91, async {
        let mut world = World::new().await;
        let (leader, _) = world.cluster.leader().await;
        let (dead, other) = (leader % 3 + 1, (leader + 1) % 3 + 1);
        world.kill(dead);
        let node = NodeId(other);
        let replies = world.change(leader, MemberChange::Remove { node });
        until("an answer", || replies.last().is_some()).await;
        assert_eq!(replies.error(), Some(ErrorCode::NO_MAJORITY_LEFT), "{:?}", replies.last());
        assert_eq!(world.version(leader), 1);
        // The dead one may go.
        world.begin(&MemberChange::Remove { node: NodeId(dead) }).await;
        let voters = BTreeSet::from([NodeId(leader), node]);
        until("it is removed", || world.is_over(leader, &voters)).await;
    });
}

#[test]
fn a_removed_node_is_refused_by_its_peers() {
    run(92, async {
        let world = World::new().await;
        let (leader, _) = world.cluster.leader().await;
        let goes = leader % 3 + 1;
        let outside = Rc::new(Cell::new(false));
        let (peers, told) = (world.cluster.running(goes).peers, outside.clone());
        let wait = async move {
            peers.until_outside().await;
            told.set(true);
        };
        drop(world.cluster.world.spawn_in(world.cluster.machine(goes).domain, wait));
        sleep_ms(2_000).await;
        assert!(!outside.get(), "it is a member");
        world.begin(&MemberChange::Remove { node: NodeId(goes) }).await;
        let voters = (1..=3).filter(|node| *node != goes).map(NodeId).collect();
        until("it is removed", || world.is_over(leader, &voters)).await;
        until("it is told so", || outside.get()).await;
        let peers = world.cluster.running(goes).peers;
        let patience = Duration::from_millis(500);
        let ask =
            async move { peers.call(NodeId(leader), Class::Heartbeat, PING, &[], patience).await };
        let domain = world.cluster.machine(goes).domain;
        let asked = world.cluster.world.spawn_in(domain, ask).await.expect("nobody kills it");
        assert!(asked.is_err(), "it is heard: {asked:?}");
    });
}

#[test]
fn a_node_that_is_not_there_gets_no_vote() {
    run(93, async {
        let mut world = World::new().await;
        world.begin(&MemberChange::Add(new_member(4))).await;
        world.kill(4);
        sleep_ms(5_000).await;
        for node in 1..=3 {
            let (shard, _) = &world.nodes[&node];
            assert!(!shard.group().membership().votes(NodeId(4)), "node {node} lets it vote");
            let phase = shard.state().borrow().members().operation().map(|it| it.phase);
            assert_eq!(phase, Some(MemberPhase::Learn), "node {node}");
        }
        world.start(4).await;
        let voters = (1..=4).map(NodeId).collect();
        until("it has come", || (1..=4).all(|node| world.is_over(node, &voters))).await;
    });
}

/// The voters change in two steps; the leader dies between them.
#[test]
fn a_change_that_stopped_half_way_is_taken_up() {
    run(94, async {
        let mut world = World::new().await;
        world.begin(&MemberChange::Add(new_member(4))).await;
        // A step lasts so long that it can be seen; a heartbeat is answered before the next.
        let slow = Duration::from_millis(10);
        let domains = (1..=4).map(|node| world.cluster.machine(node).domain);
        for (from, to) in domains.clone().flat_map(|a| domains.clone().map(move |b| (a, b))) {
            world.cluster.net.set_delay(from, to, slow, slow);
        }
        let (leader, _) = world.cluster.leader().await;
        let others = || (1..=3).filter(|node| *node != leader);
        let is_half = |node| world.nodes[&node].0.group().membership().voters.len() == 2;
        until("the others have the first step", || others().all(is_half)).await;
        world.kill(leader);
        let halves =
            others().filter(|node| world.nodes[node].0.group().membership().voters.len() == 2);
        assert_eq!(halves.count(), 2, "INVALID: the second step was taken");
        let voters = (1..=4).map(NodeId).collect();
        until("it is over", || others().chain([4]).all(|node| world.is_over(node, &voters))).await;
    });
}

#[test]
fn an_operation_is_carried_out_whoever_drives_it_and_dies() {
    let mut killed_under_way = 0;
    for seed in 0..SEEDS {
        killed_under_way += run(seed, drivers_die(seed));
    }
    assert!(killed_under_way >= SEEDS, "INVALID: {killed_under_way} kills were in time");
}

/// How many drivers died while the operation was under way.
async fn drivers_die(seed: u64) -> u64 {
    let dice = SimRng::new(seed ^ 0x6d65_6d62);
    let mut world = World::new().await;
    let (change, voters): (_, &[u64]) = match seed % 3 {
        0 => (MemberChange::Add(new_member(4)), &[1, 2, 3, 4]),
        1 => (MemberChange::Replace { old: NodeId(3), new: new_member(4) }, &[1, 2, 4]),
        _ => {
            // The leader itself.
            let (leader, _) = world.cluster.leader().await;
            let node = NodeId(leader);
            let stay: &[u64] = [&[2, 3], &[1, 3], &[1, 2]][leader as usize - 1];
            (MemberChange::Remove { node }, stay)
        }
    };
    let voters: BTreeSet<NodeId> = voters.iter().map(|node| NodeId(*node)).collect();
    world.begin(&change).await;
    let mut under_way = 0;
    for _ in 0..3 {
        sleep_ms(dice.next() % 250).await;
        let Some((driver, _)) = world.cluster.leader_now() else { continue };
        let pending = world.nodes[&driver].0.state().borrow().members().operation().is_some();
        under_way += u64::from(pending);
        world.kill(driver);
        sleep_ms(dice.next() % 400).await;
        world.start(driver).await;
    }
    let over = || voters.iter().all(|node| world.is_over(node.0, &voters));
    until("the operation is over everywhere", over).await;
    under_way
}
