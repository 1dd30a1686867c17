//! Changes of the membership on simulated nodes: a step for an older table does nothing, and an
//! operation is carried out whoever of its drivers dies at whatever moment.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, ready};
use leasehold_protocol::birth::{BirthAnswer, BirthMember, BirthRecord, KIND_QUERY, Plan};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::member::{
    GroupGoal, GroupStepRequest, MemberChange, MemberChangeRequest, NewMember, ShardProgress,
    Standing,
};
use leasehold_protocol::peer::MemberEntry;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use leasehold_server::member::Membership;
use leasehold_server::net::{ForwardService, ReplyTo};
use leasehold_server::raft::{PeerInfo, PeerService};
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
            let answer = BirthAnswer { member: founder(self.node), plan, promised: None };
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

fn start_node(running: &Running, node: u64) -> (Rc<Shard<SimEnv>>, Rc<Membership<SimEnv>>) {
    let (shard, router) = start_routed(running, leasehold_protocol::ids::Token(100).into());
    let peers = running.peers.clone();
    let membership = Membership::new(shard.clone(), &router, peers.clone(), Rc::new(record()));
    router.set_membership(membership.clone());
    let forward = Rc::new(ForwardService::new(router));
    peers.set_service(Rc::new(Answers { forward, node }));
    drop(SimRt::spawn(membership.clone().run()));
    (shard, membership)
}

/// What runs on a machine.
pub(super) type Node = (Rc<Shard<SimEnv>>, Rc<Membership<SimEnv>>);

/// Four machines, of which the first three are the cluster.
pub(super) struct World {
    pub(super) cluster: Cluster,
    pub(super) nodes: BTreeMap<u64, Node>,
}

impl World {
    pub(super) async fn new() -> Self {
        let mut world = Self { cluster: Cluster::new(4), nodes: BTreeMap::new() };
        for node in 1..=4 {
            world.start(node).await;
        }
        let members = (1..=3).map(|node| (node, member(node))).collect();
        world.cluster.group(1).initialize(members).await.expect("node 1 is a member");
        world.cluster.leader().await;
        let founded = || (1..=3).all(|node| world.version(node) > 0);
        until("the table is founded", founded).await;
        world
    }

    pub(super) async fn start(&mut self, node: u64) {
        self.cluster.start(node).await.expect("a sound disk");
        let running = self.cluster.running(node);
        let domain = self.cluster.machine(node).domain;
        let start = async move { start_node(&running, node) };
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
    NewMember { node: NodeId(node), peer_addr: addr(node), client_addr: String::new() }
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
