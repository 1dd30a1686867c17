//! What runs on a simulated machine: the server's own stack between the sockets and the disk. WAL,
//! peers, the Raft groups, their shards with leases and forwarding, and the connections of clients.
//! Only the founding of the cluster is left out: identities are given.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, ready};
use leasehold_core::State;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId, Token};
use leasehold_protocol::reply::{NodeAddress, Reply, ServerHello};
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::KEY_HASH;
use leasehold_protocol::watch::WatchRequest;
use leasehold_server::admin::Metrics;
use leasehold_server::disk::sim::SimDisk;
use leasehold_server::env::{Clock, Env};
use leasehold_server::lease::CoreWheel;
use leasehold_server::net::{Connections, ForwardService, Front, Hop, Hops, ReplyTo, Router};
use leasehold_server::raft::{
    ApplySink, Group, GroupSpec, Identity, Member, PeerInfo, PeerService, Peers,
};
use leasehold_server::rt::sim::{SimClock, SimRng, SimRt};
use leasehold_server::rt::sim_net::SimHost;
use leasehold_server::shard::{FORWARD_KIND, Origin, Shard, ShardCore, run_wheel};
use leasehold_server::wal::{Recovered, Wal, WalConfig, WalIdentity};
use leasehold_server::watch::{Sizes, WatchName};
use openraft_rt::AsyncRuntime;

use crate::coverage::{Coverage, Seen};
use crate::history::Violations;
use crate::ledger::Ledger;

/// Everything simulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SimEnv;

impl Env for SimEnv {
    type Rt = SimRt;
    type Clock = SimClock;
    type Disk = SimDisk;
    type Net = SimHost;
}

pub(crate) const CLUSTER: ClusterId = ClusterId([1; 16]);

const TOKEN_BASE: Token = Token(1 << 20);
pub(crate) const CONNECTIONS_MAX: usize = 256;

pub(crate) fn client_addr(node: u64) -> String {
    format!("node{node}:7000")
}

fn peer_addr(node: u64) -> String {
    format!("node{node}:7001")
}

/// Small segments, so that there are many of them.
pub(crate) fn wal_config() -> WalConfig {
    WalConfig { segment_len: 256 * 1024, ..WalConfig::default() }
}

/// Of the node's first disk, or of the one that came in its place.
pub(crate) fn disk_id(node: u64, wiped: bool) -> DiskId {
    DiskId([node as u8 | u8::from(wiped) << 7; 16])
}

/// The group's members.
pub(crate) fn members(nodes: u64) -> BTreeMap<u64, Member> {
    let member = |node| Member {
        disk: disk_id(node, false),
        peer_addr: peer_addr(node),
        client_addr: client_addr(node),
    };
    (1..=nodes).map(|node| (node, member(node))).collect()
}

/// What a node is started with.
pub(crate) struct Start {
    pub(crate) node: u64,
    pub(crate) nodes: u64,
    pub(crate) disk_id: DiskId,
    pub(crate) boot: u64,
    pub(crate) disk: SimDisk,
    pub(crate) host: SimHost,
    pub(crate) shards: u32,
    pub(crate) snapshot_entries: u64,
    pub(crate) watch_sizes: Sizes,
    pub(crate) ledger: Rc<Ledger>,
    pub(crate) violations: Rc<Violations>,
    pub(crate) coverage: Rc<Coverage>,
    /// Ends this node's process, as a real one ends itself, for the reason given.
    pub(crate) exit: Rc<dyn Fn(&str)>,
}

/// A running node, as the harness looks at it.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) shards: Rc<[Hosted]>,
    pub(crate) wal: Wal<SimEnv>,
    pub(crate) connections: Rc<Connections>,
}

impl Node {
    pub(crate) fn shard(&self, shard: ShardId) -> &Hosted {
        &self.shards[shard.0 as usize]
    }

    /// True if it leads any shard, as far as it knows.
    pub(crate) fn leads(&self) -> bool {
        self.shards.iter().any(|shard| shard.group.leadership().is_some())
    }
}

/// One shard of a running node.
pub(crate) struct Hosted {
    pub(crate) id: ShardId,
    pub(crate) group: Rc<Group<SimEnv>>,
    pub(crate) state: Rc<RefCell<State>>,
    pub(crate) shard: Rc<Shard<SimEnv>>,
}

/// Tells the ledger, then the shard, what was applied.
struct Sink {
    node: u64,
    id: ShardId,
    ledger: Rc<Ledger>,
    violations: Rc<Violations>,
    coverage: Rc<Coverage>,
    shard: RefCell<Option<Rc<Shard<SimEnv>>>>,
}

impl ApplySink for Sink {
    fn applied(&self, state: &State, events: &[Event]) {
        self.ledger.shard(self.id).applied(self.node, state, events, &self.violations);
        if let Some(shard) = &*self.shard.borrow() {
            shard.applied(events);
        }
    }

    fn installed(&self, state: &State) {
        self.coverage.count(Seen::SnapshotInstalled);
        self.ledger.shard(self.id).applied(self.node, state, &[], &self.violations);
        if let Some(shard) = &*self.shard.borrow() {
            shard.installed();
        }
    }
}

/// There is one core.
struct NoHops;

impl Hops for NoHops {
    fn send(&self, _core: usize, hop: Hop) -> Result<(), Hop> {
        Err(hop)
    }
}

/// What peers ask besides Raft: forwarded requests.
struct Service(ForwardServiceRef);

type ForwardServiceRef = Rc<ForwardService<SimEnv>>;

impl PeerService for Service {
    fn handle(
        &self,
        _from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        if kind != FORWARD_KIND {
            return ready(Err(ErrorCode::UNKNOWN_KIND)).boxed_local();
        }
        let (forward, body) = (self.0.clone(), body.to_vec());
        async move { forward.forwarded(&body).await }.boxed_local()
    }
}

/// What connections see of the node.
struct Door {
    node: u64,
    nodes: u64,
    shards: u32,
    router: Rc<Router<SimEnv>>,
}

impl Front for Door {
    fn cluster(&self) -> ClusterId {
        CLUSTER
    }

    fn hello(&self) -> Result<ServerHello, ErrorCode> {
        let address = |node| NodeAddress { node: NodeId(node), client_addr: client_addr(node) };
        Ok(ServerHello {
            version: 0,
            cluster: CLUSTER,
            node: NodeId(self.node),
            shards: self.shards,
            key_hash: KEY_HASH,
            features: 0,
            nodes: (1..=self.nodes).map(address).collect(),
            leaders: self.router.leaders(),
            server_version: String::new(),
        })
    }

    fn request(&self, request: Request, to: ReplyTo) {
        self.router.route(request, to, Origin::Client);
    }

    fn watch(&self, request: WatchRequest, to: ReplyTo) -> Option<WatchName> {
        self.router.watch(request, to)
    }

    fn unwatch(&self, shard: ShardId, name: WatchName) {
        self.router.unwatch(shard, name);
    }

    fn answered(&self, _reply: &Reply) {}
}

impl Start {
    /// Opens what the disk holds and serves peers and clients. Errors if a real process would end
    /// itself instead.
    pub(crate) async fn run(self) -> Result<Node, String> {
        let (wal, mut recovered) = self.open_wal().await?;
        // One core runs all shards.
        let peers = Peers::<SimEnv>::new(self.identity(), self.host.clone(), SimClock, ShardId(0));
        (1..=self.nodes).for_each(|node| peers.set_address(NodeId(node), peer_addr(node)));
        self.watch_log(wal.clone());
        let wheel = CoreWheel::new(SimClock.now());
        let core = ShardCore {
            shards_total: self.shards,
            clock: SimClock,
            wheel: wheel.clone(),
            metrics: Metrics::new(1, 1).handle(0),
            watch_sizes: self.watch_sizes,
        };
        let mut shards = Vec::new();
        for id in (0..self.shards).map(ShardId) {
            let recovered = recovered.remove(&id).unwrap_or_default();
            shards.push(self.open_shard(id, &wal, recovered, &peers, core.clone()).await?);
        }
        drop(SimRt::spawn(run_wheel(wheel, shards.clone(), SimClock)));
        let pinned = shards.clone();
        wal.on_pin(move |pinning, _bytes| {
            let group = pinned[pinning.0 as usize].group().clone();
            drop(SimRt::spawn(async move { group.trigger_snapshot().await }));
        });
        let addresses = (1..=self.nodes).map(|node| (NodeId(node), client_addr(node))).collect();
        let cluster = (CLUSTER, self.shards);
        let hops = Rc::new(NoHops);
        let router = Router::new((0, 1), cluster, shards.clone(), peers.clone(), addresses, hops);
        peers.set_service(Rc::new(Service(Rc::new(ForwardService::new(router.clone())))));
        self.serve_peers(peers);
        let connections = self.serve_clients(router);
        let hosted = |shard: &Rc<Shard<SimEnv>>| Hosted {
            id: shard.id(),
            group: shard.group().clone(),
            state: shard.state().clone(),
            shard: shard.clone(),
        };
        Ok(Node { shards: shards.iter().map(hosted).collect(), wal, connections })
    }

    async fn open_shard(
        &self,
        id: ShardId,
        wal: &Wal<SimEnv>,
        recovered: Recovered,
        peers: &Rc<Peers<SimEnv>>,
        core: ShardCore<SimEnv>,
    ) -> Result<Rc<Shard<SimEnv>>, String> {
        let state = Rc::new(RefCell::new(State::new(id)));
        let sink = Rc::new(Sink {
            node: self.node,
            id,
            ledger: self.ledger.clone(),
            violations: self.violations.clone(),
            coverage: self.coverage.clone(),
            shard: RefCell::default(),
        });
        let group = Group::open(
            self.spec(id),
            wal.shard(id),
            recovered,
            self.disk.clone(),
            peers.clone(),
            state.clone(),
            sink.clone(),
        );
        let group = group.await.map_err(|error| error.to_string())?;
        self.watch_engine(id, group.clone());
        let shard = Shard::new(id, group, state, peers.clone(), core);
        sink.shard.replace(Some(shard.clone()));
        drop(SimRt::spawn(shard.clone().run_proposals()));
        drop(SimRt::spawn(shard.clone().run_deadlines()));
        drop(SimRt::spawn(shard.clone().run_leadership(TOKEN_BASE)));
        drop(SimRt::spawn(shard.clone().run_watches()));
        drop(SimRt::spawn(shard.clone().run_freshness()));
        Ok(shard)
    }

    /// An engine that stops by itself would end a real process.
    fn watch_engine(&self, shard: ShardId, group: Rc<Group<SimEnv>>) {
        let exit = self.exit.clone();
        drop(SimRt::spawn(async move {
            let why = group.failed().await;
            exit(&format!("shard {shard} stopped: {why}"));
        }));
    }

    /// So does a log that failed.
    fn watch_log(&self, wal: Wal<SimEnv>) {
        let exit = self.exit.clone();
        drop(SimRt::spawn(async move {
            let why = wal.until_failed().await;
            exit(&format!("the log failed: {why}"));
        }));
    }

    async fn open_wal(&self) -> Result<(Wal<SimEnv>, BTreeMap<ShardId, Recovered>), String> {
        let identity = WalIdentity {
            cluster: CLUSTER,
            node: NodeId(self.node),
            disk: self.disk_id,
            core: 0,
            cores: 1,
            boot: self.boot,
        };
        let salts = SimRng::new(self.boot << 8 | self.node);
        let opened =
            Wal::open(wal_config(), identity, self.disk.clone(), move || salts.next()).await;
        opened.map_err(|error| error.to_string())
    }

    fn identity(&self) -> Identity {
        Identity {
            cluster: CLUSTER,
            node: NodeId(self.node),
            disk: self.disk_id,
            boot: self.boot,
            nonce: [self.boot as u8; 16],
            secret: b"the cluster's secret".as_slice().into(),
            peer_addr: peer_addr(self.node),
            client_addr: client_addr(self.node),
        }
    }

    fn spec(&self, shard: ShardId) -> GroupSpec {
        GroupSpec {
            snapshot_entries: self.snapshot_entries,
            log_keep: 2 * self.snapshot_entries,
            probe_quorum_loss: self.nodes >= 5,
            ..GroupSpec::new(CLUSTER, shard, NodeId(self.node))
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

    fn serve_clients(&self, router: Rc<Router<SimEnv>>) -> Rc<Connections> {
        let mut listener = self.host.listen(&client_addr(self.node)).expect("the address is free");
        let connections = Connections::new(CONNECTIONS_MAX);
        let door =
            Rc::new(Door { node: self.node, nodes: self.nodes, shards: self.shards, router });
        drop(SimRt::spawn(connections.clone().run_deadlines::<SimEnv>(SimClock)));
        let serving = connections.clone();
        drop(SimRt::spawn(async move {
            loop {
                let (reader, writer) = listener.accept().await;
                let serving =
                    serving.clone().serve::<SimEnv>(door.clone(), reader, writer, SimClock);
                drop(SimRt::spawn(serving));
            }
        }));
        connections
    }
}
