//! What runs on a simulated machine: WAL, peers, one Raft group, and a door for clients that
//! proposes each command as a batch of its own.

use std::cell::RefCell;
use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use leasehold_server::disk::sim::SimDisk;
use leasehold_server::env::Env;
use leasehold_server::raft::peers::{Identity, Peers};
use leasehold_server::raft::types::Member;
use leasehold_server::raft::{ApplySink, Group, GroupSpec, ProposeError};
use leasehold_server::rt::channels::Semaphore;
use leasehold_server::rt::sim::{SimClock, SimRng, SimRt};
use leasehold_server::rt::sim_net::{SimHost, SimReader, SimWriter};
use leasehold_server::wal::{Wal, WalConfig, WalIdentity};
use openraft_rt::AsyncRuntime;

use crate::history::Violations;
use crate::ledger::Ledger;
use crate::params::NODES;
use crate::wire::{Answer, read_frame, write_frame};

/// Everything simulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SimEnv;

impl Env for SimEnv {
    type Rt = SimRt;
    type Clock = SimClock;
    type Disk = SimDisk;
    type Net = SimHost;
}

const CLUSTER: ClusterId = ClusterId([1; 16]);
const SHARD: ShardId = ShardId(0);

/// Commands of clients under way on a node; more are refused.
const PROPOSALS_MAX: usize = 64;

pub(crate) fn client_addr(node: u64) -> String {
    format!("node{node}:7000")
}

fn peer_addr(node: u64) -> String {
    format!("node{node}:7001")
}

fn disk_id(node: u64) -> DiskId {
    DiskId([node as u8; 16])
}

/// The group's members.
pub(crate) fn members() -> std::collections::BTreeMap<u64, Member> {
    let member = |node| Member {
        disk: disk_id(node),
        peer_addr: peer_addr(node),
        client_addr: client_addr(node),
    };
    (1..=NODES).map(|node| (node, member(node))).collect()
}

/// What a node is started with.
pub(crate) struct Start {
    pub(crate) node: u64,
    pub(crate) boot: u64,
    pub(crate) disk: SimDisk,
    pub(crate) host: SimHost,
    pub(crate) snapshot_entries: u64,
    pub(crate) ledger: Rc<Ledger>,
    pub(crate) violations: Rc<Violations>,
}

/// A running node, as the harness looks at it.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) group: Rc<Group<SimEnv>>,
    pub(crate) state: Rc<RefCell<State>>,
}

struct Sink {
    node: u64,
    ledger: Rc<Ledger>,
    violations: Rc<Violations>,
}

impl ApplySink for Sink {
    fn applied(&self, state: &State, events: &[Event]) {
        self.ledger.applied(self.node, state, events, &self.violations);
    }

    fn installed(&self, state: &State) {
        self.ledger.applied(self.node, state, &[], &self.violations);
    }
}

impl Start {
    /// Opens what the disk holds and serves peers and clients.
    pub(crate) async fn run(self) -> Node {
        let (wal, recovered) = self.open_wal().await;
        let peers = Peers::<SimEnv>::new(self.identity(), self.host.clone(), SimClock, SHARD);
        (1..=NODES).for_each(|node| peers.set_address(NodeId(node), peer_addr(node)));
        let state = Rc::new(RefCell::new(State::new(SHARD)));
        let sink = Sink {
            node: self.node,
            ledger: self.ledger.clone(),
            violations: self.violations.clone(),
        };
        let group = Group::open(
            self.spec(),
            wal.shard(SHARD),
            recovered,
            self.disk.clone(),
            peers.clone(),
            state.clone(),
            Rc::new(sink),
        );
        let group = group.await.unwrap_or_else(|error| panic!("node {}: {error}", self.node));
        self.serve_peers(peers);
        self.serve_clients(group.clone());
        Node { group, state }
    }

    async fn open_wal(&self) -> (Wal<SimEnv>, leasehold_server::wal::Recovered) {
        let identity = WalIdentity {
            cluster: CLUSTER,
            node: NodeId(self.node),
            disk: disk_id(self.node),
            core: 0,
            cores: 1,
            boot: self.boot,
        };
        let config = WalConfig { segment_len: 256 * 1024, ..WalConfig::default() };
        let salts = SimRng::new(self.boot << 8 | self.node);
        let opened = Wal::open(config, identity, self.disk.clone(), move || salts.next()).await;
        let (wal, mut recovered) = opened.unwrap_or_else(|e| panic!("node {}: {e}", self.node));
        (wal, recovered.remove(&SHARD).unwrap_or_default())
    }

    fn identity(&self) -> Identity {
        Identity {
            cluster: CLUSTER,
            node: NodeId(self.node),
            disk: disk_id(self.node),
            boot: self.boot,
            nonce: [self.boot as u8; 16],
            secret: b"the cluster's secret".as_slice().into(),
            peer_addr: peer_addr(self.node),
            client_addr: client_addr(self.node),
        }
    }

    fn spec(&self) -> GroupSpec {
        GroupSpec {
            snapshot_entries: self.snapshot_entries,
            log_keep: 2 * self.snapshot_entries,
            ..GroupSpec::new(CLUSTER, SHARD, NodeId(self.node))
        }
    }

    fn serve_peers(&self, peers: Rc<Peers<SimEnv>>) {
        let mut listener = self.host.listen(&peer_addr(self.node)).expect("the address is free");
        drop(SimRt::spawn(async move {
            loop {
                let (reader, writer) = listener.accept().await;
                let peers = peers.clone();
                drop(SimRt::spawn(async move { peers.serve(reader, writer).await }));
            }
        }));
    }

    fn serve_clients(&self, group: Rc<Group<SimEnv>>) {
        let mut listener = self.host.listen(&client_addr(self.node)).expect("the address is free");
        let room = Rc::new(Semaphore::new(PROPOSALS_MAX));
        drop(SimRt::spawn(async move {
            loop {
                let (reader, writer) = listener.accept().await;
                drop(SimRt::spawn(serve_client(reader, writer, group.clone(), room.clone())));
            }
        }));
    }
}

/// One request at a time, as the simulated clients send them.
async fn serve_client(
    mut reader: SimReader,
    mut writer: SimWriter,
    group: Rc<Group<SimEnv>>,
    room: Rc<Semaphore>,
) {
    while let Ok(Some((number, body))) = read_frame(&mut reader).await {
        let answer = match room.try_acquire() {
            Some(_room) => propose(&group, body).await,
            None => Answer::NotNow,
        };
        if write_frame(&mut writer, number, &answer.encode()).await.is_err() {
            return;
        }
    }
}

async fn propose(group: &Group<SimEnv>, body: Vec<u8>) -> Answer {
    let elsewhere = |hint: Option<NodeId>| Answer::Elsewhere(hint.map(|node| node.0));
    let Some(leadership) = group.leadership() else { return elsewhere(group.leader_hint()) };
    match group.propose(leadership, body.into()).await {
        Ok(outcomes) => Answer::Done(outcomes[0]),
        Err(ProposeError::NotLeader { hint }) => elsewhere(hint),
        Err(ProposeError::NoQuorum) => Answer::NotNow,
        Err(_) => Answer::Unknown,
    }
}
