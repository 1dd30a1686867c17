//! What runs on a simulated machine: the server's own stack between the sockets and the disk. WAL,
//! peers, the Raft groups, their shards with leases and forwarding, the membership, and the
//! connections of clients. Only the founding of the cluster is left out: founders' identities are
//! given. Nodes that come later are admitted.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::birth::{BirthMember, BirthRecord, Plan};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use leasehold_protocol::shard::KEY_HASH;
use leasehold_server::admin::{CoreHandle, Metrics};
use leasehold_server::disk::sim::SimDisk;
use leasehold_server::env::{Clock, Env};
use leasehold_server::lease::CoreWheel;
use leasehold_server::member::Membership;
use leasehold_server::net::{
    Connections, CoreService, EarlyFront, Front, Hop, Hops, NodeFront, Router,
};
use leasehold_server::raft::{ApplySink, Group, GroupSpec, Identity, Member, Peers};
use leasehold_server::rt::sim::{SimClock, SimRng, SimRt};
use leasehold_server::rt::sim_net::{SimHost, SimListener, SimReader, SimWriter};
use leasehold_server::shard::{Beginning, Shard, ShardCore, run_wheel};
use leasehold_server::wal::{Recovered, Wal, WalConfig, WalIdentity};
use leasehold_server::watch::Sizes;
use openraft_rt::{AsyncRuntime, Select2};

use crate::birth::{Founding, Outside, Promised};
use crate::coverage::{Coverage, Seen};
use crate::history::Violations;
use crate::ledger::Ledger;
use crate::tables::Tables;

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

pub(crate) const CONNECTIONS_MAX: usize = 256;

pub(crate) fn client_addr(node: u64) -> String {
    format!("node{node}:7000")
}

pub(crate) fn peer_addr(node: u64) -> String {
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

pub(crate) fn birth_member(node: u64, wiped: bool) -> BirthMember {
    BirthMember {
        node: NodeId(node),
        disk: disk_id(node, wiped),
        peer_addr: peer_addr(node),
        client_addr: client_addr(node),
    }
}

/// What a cluster of the nodes up to this one is born with.
pub(crate) fn record(nodes: u64, shards: u32, token_base: u64) -> BirthRecord {
    BirthRecord {
        cluster: CLUSTER,
        name: "simulated".to_owned(),
        members: (1..=nodes).map(|node| birth_member(node, false)).collect(),
        shards,
        key_hash: KEY_HASH,
        token_base,
        restored: None,
    }
}

/// The groups' first members.
pub(crate) fn members(record: &BirthRecord) -> BTreeMap<u64, Member> {
    let member = |member: &BirthMember| Member {
        disk: member.disk,
        peer_addr: member.peer_addr.clone(),
        client_addr: member.client_addr.clone(),
    };
    record.members.iter().map(|founder| (founder.node.0, member(founder))).collect()
}

/// There is one core.
struct NoHops;

impl Hops for NoHops {
    fn send(&self, _core: usize, hop: Hop) -> Result<(), Hop> {
        Err(hop)
    }
}

/// What a node is started with.
pub(crate) struct Start {
    pub(crate) node: u64,
    /// Its disk is not the first.
    pub(crate) wiped: bool,
    /// What the cluster was born with: it is configured alike.
    pub(crate) born: Rc<BirthRecord>,
    /// Where it looks for the cluster.
    pub(crate) looks_for: Vec<u64>,
    /// What its directory says.
    pub(crate) promised: Promised,
    pub(crate) boot: u64,
    pub(crate) disk: SimDisk,
    pub(crate) host: SimHost,
    pub(crate) snapshot_entries: u64,
    pub(crate) watch_sizes: Sizes,
    pub(crate) ledger: Rc<Ledger>,
    pub(crate) tables: Rc<Tables>,
    pub(crate) violations: Rc<Violations>,
    pub(crate) coverage: Rc<Coverage>,
    /// Ends this node's process, as a real one ends itself, for the reason given.
    pub(crate) exit: Rc<dyn Fn(&str)>,
    /// Its directory is marked: the node was removed.
    pub(crate) mark_removed: Rc<dyn Fn()>,
}

/// A running node, as the harness looks at it.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) shards: Rc<[Hosted]>,
    pub(crate) wal: Wal<SimEnv>,
    pub(crate) connections: Rc<Connections>,
    pub(crate) front: Rc<NodeFront<SimEnv>>,
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
    tables: Rc<Tables>,
    /// This process has applied entries.
    lives: Cell<bool>,
    shard: RefCell<Option<Rc<Shard<SimEnv>>>>,
}

impl Sink {
    fn note(&self, state: &State, events: &[Event]) {
        self.ledger.shard(self.id).applied(self.node, state, events, &self.violations);
        if self.id == ShardId(0) {
            self.tables.applied(state.members(), &self.coverage, &self.violations);
        }
    }
}

impl ApplySink for Sink {
    fn applied(&self, state: &State, events: &[Event]) {
        self.lives.set(true);
        self.note(state, events);
        if let Some(shard) = &*self.shard.borrow() {
            shard.applied(events);
        }
    }

    fn answered(&self) {
        if let Some(shard) = &*self.shard.borrow() {
            shard.answered();
        }
    }

    fn installed(&self, state: &State) {
        self.ledger.shard(self.id).installed(self.node);
        self.coverage.count(Seen::SnapshotInstalled);
        self.coverage.add(Seen::SnapshotInstalledLive, u64::from(self.lives.get()));
        self.note(state, &[]);
        if let Some(shard) = &*self.shard.borrow() {
            shard.installed();
        }
    }
}

impl Start {
    /// Opens what the disk holds and serves peers and clients; a node without a cluster waits until
    /// it is admitted. Errors if a real process would end itself instead.
    pub(crate) async fn run(self) -> Result<Node, Outside> {
        // One core runs all shards.
        let peers = Peers::<SimEnv>::new(self.identity(), self.host.clone(), SimClock, ShardId(0));
        for node in &self.looks_for {
            peers.set_address(NodeId(*node), peer_addr(*node));
        }
        let founding = self.founding();
        let service = CoreService::new(Some(founding.clone()));
        peers.set_service(service.clone());
        let listen = |address: String| self.host.listen(&address).expect("the address is free");
        let mut doors =
            Doors { peers: listen(peer_addr(self.node)), clients: listen(client_addr(self.node)) };
        let connections = Connections::new(CONNECTIONS_MAX);
        let promised = self.promised.borrow().as_ref().map(|promise| promise.record.clone());
        let record = match promised {
            Some(record) => record,
            None => self.admitted(&founding, &peers, &connections, &mut doors).await?,
        };
        peers.set_cluster(record.cluster);
        for member in &record.members {
            peers.set_disk(member.node, member.disk);
        }
        let record = Rc::new(record);
        let metrics = Metrics::new(1, record.shards).handle(0);
        let opened = self.open(&record, &peers, metrics.clone()).await;
        let (wal, shards) = opened.map_err(Outside::Failed)?;
        let router = Router::new(
            (0, 1),
            (record.cluster, record.shards),
            shards.clone(),
            peers.clone(),
            record.members.iter().map(|m| (m.node, m.client_addr.clone())).collect(),
            Rc::new(NoHops),
        );
        service.open(router.clone());
        let front = NodeFront::new(router.clone(), record.clone(), metrics, SimClock);
        drop(SimRt::spawn(connections.clone().run_deadlines::<SimEnv>(SimClock)));
        serve_clients(doors.clients, connections.clone(), front.clone());
        let membership = Membership::new(shards[0].clone(), &router, peers.clone(), record);
        router.set_membership(membership.clone());
        drop(SimRt::spawn(membership.run()));
        self.watch_removal(&peers, &connections, &front);
        serve_peers(doors.peers, peers);
        let hosted = |shard: &Rc<Shard<SimEnv>>| Hosted {
            id: shard.id(),
            group: shard.group().clone(),
            state: shard.state().clone(),
            shard: shard.clone(),
        };
        Ok(Node { shards: shards.iter().map(hosted).collect(), wal, connections, front })
    }

    /// As it is configured.
    fn founding(&self) -> Rc<Founding> {
        let me = birth_member(self.node, self.wiped);
        let nodes = self.looks_for.iter().map(|node| NodeId(*node)).collect();
        Founding::new(me, Plan { nodes, ..self.born.plan() }, self.promised.clone())
    }

    async fn open(
        &self,
        record: &BirthRecord,
        peers: &Rc<Peers<SimEnv>>,
        metrics: CoreHandle,
    ) -> Result<(Wal<SimEnv>, Vec<Rc<Shard<SimEnv>>>), String> {
        let (wal, mut recovered) = self.open_wal(record.cluster).await?;
        self.watch_log(wal.clone());
        let wheel = CoreWheel::new(SimClock.now());
        let core = ShardCore {
            shards_total: record.shards,
            clock: SimClock,
            wheel: wheel.clone(),
            metrics,
            watch_sizes: self.watch_sizes,
        };
        let mut shards = Vec::new();
        for id in (0..record.shards).map(ShardId) {
            let recovered = recovered.remove(&id).unwrap_or_default();
            let spec = self.spec(record.cluster, id);
            shards.push(self.open_shard(spec, &wal, recovered, peers, core.clone()).await?);
        }
        for shard in &shards {
            drop(SimRt::spawn(shard.clone().run_leadership(Beginning::from(record))));
        }
        drop(SimRt::spawn(run_wheel(wheel, shards.clone(), SimClock)));
        let pinned = shards.clone();
        wal.on_pin(move |pinning, _bytes| {
            let group = pinned[pinning.0 as usize].group().clone();
            drop(SimRt::spawn(async move { group.trigger_snapshot().await }));
        });
        Ok((wal, shards))
    }

    async fn open_shard(
        &self,
        spec: GroupSpec,
        wal: &Wal<SimEnv>,
        recovered: Recovered,
        peers: &Rc<Peers<SimEnv>>,
        core: ShardCore<SimEnv>,
    ) -> Result<Rc<Shard<SimEnv>>, String> {
        let id = spec.shard;
        let state = Rc::new(RefCell::new(State::new(id)));
        let sink = Rc::new(Sink {
            node: self.node,
            id,
            ledger: self.ledger.clone(),
            violations: self.violations.clone(),
            coverage: self.coverage.clone(),
            tables: self.tables.clone(),
            lives: Cell::new(false),
            shard: RefCell::default(),
        });
        let group = Group::open(
            spec,
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
        drop(SimRt::spawn(shard.clone().run_watches()));
        drop(SimRt::spawn(shard.clone().run_freshness()));
        Ok(shard)
    }

    /// A node that its peers refuse as one that was removed serves nobody any more, and does not
    /// start again.
    fn watch_removal(
        &self,
        peers: &Rc<Peers<SimEnv>>,
        connections: &Rc<Connections>,
        front: &Rc<NodeFront<SimEnv>>,
    ) {
        let (peers, connections, front) = (peers.clone(), connections.clone(), front.clone());
        let mark = self.mark_removed.clone();
        drop(SimRt::spawn(async move {
            peers.until_outside().await;
            front.remove();
            connections.refuse_all(ErrorCode::NODE_REMOVED);
            mark();
        }));
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

    async fn open_wal(
        &self,
        cluster: ClusterId,
    ) -> Result<(Wal<SimEnv>, BTreeMap<ShardId, Recovered>), String> {
        let identity = WalIdentity {
            cluster,
            node: NodeId(self.node),
            disk: disk_id(self.node, self.wiped),
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
            cluster: ClusterId::UNKNOWN,
            node: NodeId(self.node),
            disk: disk_id(self.node, self.wiped),
            boot: self.boot,
            nonce: [self.boot as u8; 16],
            secret: b"the cluster's secret".as_slice().into(),
            peer_addr: peer_addr(self.node),
            client_addr: client_addr(self.node),
        }
    }

    fn spec(&self, cluster: ClusterId, shard: ShardId) -> GroupSpec {
        GroupSpec {
            snapshot_entries: self.snapshot_entries,
            log_keep: 2 * self.snapshot_entries,
            // The cluster may grow to five voters.
            probe_quorum_loss: true,
            ..GroupSpec::new(cluster, shard, NodeId(self.node))
        }
    }

    /// Waits for admission, serving peers meanwhile; clients are told that it is not ready.
    async fn admitted(
        &self,
        founding: &Rc<Founding>,
        peers: &Rc<Peers<SimEnv>>,
        connections: &Rc<Connections>,
        doors: &mut Doors,
    ) -> Result<BirthRecord, Outside> {
        let join = founding.join(peers.clone());
        let mut join = std::pin::pin!(join);
        loop {
            let comes = SimRt::select2(doors.peers.accept(), doors.clients.accept());
            match SimRt::select2(join.as_mut(), comes).await {
                Select2::First(record) => return record,
                Select2::Second(Select2::First(stream)) => serve_peer(peers, stream),
                Select2::Second(Select2::Second(stream)) => {
                    self.coverage.count(Seen::CameBeforeAdmission);
                    serve_client(connections, Rc::new(EarlyFront), stream);
                }
            }
        }
    }
}

/// Where peers and clients come to.
struct Doors {
    peers: SimListener,
    clients: SimListener,
}

/// Both halves of an accepted stream.
type Stream = (SimReader, SimWriter);

fn serve_client(connections: &Rc<Connections>, front: Rc<dyn Front>, (reader, writer): Stream) {
    let connections = connections.clone();
    drop(SimRt::spawn(connections.serve::<SimEnv>(front, reader, writer, SimClock)));
}

fn serve_clients(
    mut listener: SimListener,
    connections: Rc<Connections>,
    front: Rc<NodeFront<SimEnv>>,
) {
    drop(SimRt::spawn(async move {
        loop {
            serve_client(&connections, front.clone(), listener.accept().await);
        }
    }));
}

fn serve_peer(peers: &Rc<Peers<SimEnv>>, (reader, writer): Stream) {
    let peers = peers.clone();
    drop(SimRt::spawn(async move { peers.serve(reader, writer).await }));
}

fn serve_peers(mut listener: SimListener, peers: Rc<Peers<SimEnv>>) {
    drop(SimRt::spawn(async move {
        loop {
            serve_peer(&peers, listener.accept().await);
        }
    }));
}
