//! One core: its WAL, its Raft groups, its shards, its connections.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::State;
use leasehold_protocol::birth::BirthRecord;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{ClusterId, NodeId, ShardId};
use openraft::AsyncRuntime;

use super::birth::Founding;
use super::stop::{Barrier, die};
use super::{Production, ToCore, publish};
use crate::admin::{Metrics, Phase};
use crate::config::Config;
use crate::disk::linux::LinuxDisk;
use crate::env::{Clock, Env};
use crate::error::{Exit, NodeError};
use crate::identity::{DataDir, Owner};
use crate::lease::CoreWheel;
use crate::member::Membership;
use crate::net::{
    BirthService, Connections, CoreService, EarlyFront, Front, Hop, Hops, NodeFront, Router,
};
use crate::raft::{
    ApplySink, Group, GroupFailed, GroupSpec, Identity, Member, Peers, Timings, first_leader,
};
use crate::rt::clock::OsClock;
use crate::rt::executor::Core;
use crate::rt::hop::{Mailbox, Ports};
use crate::rt::inbox::{Inbox, Post};
use crate::rt::net::{TcpNet, adopt};
use crate::shard::{Beginning, Shard, ShardCore, run_wheel};
use crate::wal::{Wal, WalConfig, WalIdentity};
use crate::watch::Sizes;

type Rt = <Production as Env>::Rt;

/// Stopping takes at most this long; what is not handed over by then is found by an election.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
/// Ending the engines and sealing the log takes at most this long; a restart needs neither.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Who this process is.
#[derive(Clone, Debug)]
pub(super) struct Who {
    /// Whose data directory it uses.
    pub(super) owner: Owner,
    /// How often that directory was opened.
    pub(super) boot: u64,
    /// This process's own.
    pub(super) nonce: [u8; 16],
    /// The cluster secret; empty for a single node without one.
    pub(super) secret: Arc<[u8]>,
}

/// What a core needs to run.
pub(super) struct CoreInput {
    /// The configuration.
    pub(super) config: Arc<Config>,
    /// Who this process is.
    pub(super) who: Who,
    /// On core 0: the data directory.
    pub(super) dir: Option<DataDir>,
    /// This core's part of it.
    pub(super) core_dir: PathBuf,
    /// What other threads tell this core.
    pub(super) inbox: Inbox<ToCore>,
    /// To all cores' inboxes.
    pub(super) posts: Vec<Post<ToCore>>,
    /// The lanes to the other cores.
    pub(super) ports: Ports<Hop>,
    /// Where figures go.
    pub(super) metrics: Arc<Metrics>,
    /// Where the cores wait for each other before they stop.
    pub(super) handed_over: Arc<Barrier>,
    /// On the other cores: this node initialises the shards, as core 0 has told.
    pub(super) initialises: bool,
}

/// A core's main future. Returns after an orderly stop. A core that cannot run ends the process:
/// the others must not serve half of the shards.
pub(super) async fn run(core: Core, input: CoreInput) {
    if let Err(error) = serve(core, input).await {
        die(error.exit(), error);
    }
}

async fn serve(core: Core, mut input: CoreInput) -> Result<(), NodeError> {
    let peers = peers(&core, &input);
    let founding = match input.dir.take() {
        Some(dir) => Some(Founding::new(&input.config, &input.who, dir)?),
        None => None,
    };
    let service = CoreService::new(founding.clone().map(|birth| birth as Rc<dyn BirthService>));
    peers.set_service(Rc::clone(&service) as _);
    let connections =
        Connections::new(input.config.process.client_connections_max.div_ceil(core.count));
    let founded = founded(&mut input, founding.as_ref(), &peers, &connections).await?;
    let Some(record) = founded else { return Ok(()) };
    peers.set_cluster(record.cluster);
    for member in &record.members {
        peers.set_disk(member.node, member.disk);
    }
    let wheel = CoreWheel::new(OsClock.now());
    let (wal, shards) = open_shards(&core, &input, &record, &peers, &wheel).await?;
    let initialises = match &founding {
        Some(founding) => founding.birth.borrow().initialises(),
        None => input.initialises,
    };
    let (outbox, mailbox) = input.ports.connect().await;
    let hops: Rc<dyn Hops> = Rc::new(outbox);
    let router = Router::new(
        (core.id, core.count),
        (record.cluster, record.shards),
        shards.clone(),
        Rc::clone(&peers),
        record.members.iter().map(|m| (m.node, m.client_addr.clone())).collect(),
        hops,
    );
    let running = Running {
        wal,
        shards,
        router: Rc::clone(&router),
        peers,
        handed_over: Arc::clone(&input.handed_over),
        connections,
        front: NodeFront::new(
            Rc::clone(&router),
            Rc::clone(&record),
            input.metrics.handle(core.id as u32),
            OsClock,
        ),
        founding,
        health: Arc::clone(&input.metrics),
    };
    service.open(Rc::clone(&router));
    running.start(Beginning::from(&*record), wheel, mailbox);
    if initialises {
        running.initialise(&record).await?;
    }
    running.start_membership(&record, input.posts.clone());
    if core.id == 0 {
        input.metrics.health().enter(Phase::Running);
    }
    running.serve(&mut input.inbox).await?;
    running.stop().await
}

fn peers(core: &Core, input: &CoreInput) -> Rc<Peers<Production>> {
    let identity = Identity {
        cluster: ClusterId::UNKNOWN,
        node: input.who.owner.node,
        disk: input.who.owner.disk,
        boot: input.who.boot,
        nonce: input.who.nonce,
        secret: Rc::from(&*input.who.secret),
        peer_addr: input.config.peer_advertise().to_string(),
        client_addr: input.config.client_advertise().to_string(),
    };
    let peers = Peers::new(identity, TcpNet, OsClock, ShardId(core.id as u32));
    for (node, address) in &input.config.cluster.peers {
        peers.set_address(*node, address.to_string());
    }
    peers
}

/// Waits until the cluster is founded, serving peers meanwhile; clients are answered `not_ready`.
/// `None` if the process is asked to stop before.
async fn founded(
    input: &mut CoreInput,
    founding: Option<&Rc<Founding>>,
    peers: &Rc<Peers<Production>>,
    connections: &Rc<Connections>,
) -> Result<Option<Rc<BirthRecord>>, NodeError> {
    let config = Arc::clone(&input.config);
    let joins = |founding: &Rc<Founding>| founding.birth.borrow().record().is_none();
    if config.process.join && founding.is_some_and(joins) {
        input.metrics.health().enter(Phase::WaitingForAdmission);
    }
    let run = async {
        match founding {
            Some(founding) => founding.run(&config, Rc::clone(peers)).await,
            None => std::future::pending().await,
        }
    };
    let mut run = std::pin::pin!(run);
    loop {
        match Rt::select2(run.as_mut(), input.inbox.recv()).await {
            openraft_rt::Select2::First(record) => {
                let record = Arc::new(record?);
                let initialises =
                    founding.is_some_and(|founding| founding.birth.borrow().initialises());
                for post in &input.posts[1..] {
                    let told = post.try_send(ToCore::Founded(Arc::clone(&record), initialises));
                    told.map_err(|_| NodeError::internal("a core does not take messages"))?;
                }
                return Ok(Some(Rc::new((*record).clone())));
            }
            openraft_rt::Select2::Second(message) => match message {
                Some(ToCore::Founded(record, initialises)) => {
                    input.initialises = initialises;
                    return Ok(Some(Rc::new((*record).clone())));
                }
                Some(ToCore::Peer(socket)) => serve_peer(peers, socket),
                Some(ToCore::Client(socket)) => {
                    serve_client(connections, Rc::new(EarlyFront), socket);
                }
                Some(ToCore::Removed) => {}
                Some(ToCore::Stop) | None => return Ok(None),
            },
        }
        if founding.is_some_and(|founding| founding.birth.borrow().waits_for_admission()) {
            input.metrics.health().enter(Phase::WaitingForAdmission);
        }
    }
}

fn serve_client(connections: &Rc<Connections>, front: Rc<dyn Front>, socket: OwnedFd) {
    let (reader, writer) = adopt(socket);
    let connections = Rc::clone(connections);
    drop(Rt::spawn(connections.serve::<Production>(front, reader, writer, OsClock)));
}

fn serve_peer(peers: &Rc<Peers<Production>>, socket: OwnedFd) {
    let peers = Rc::clone(peers);
    let (reader, writer) = adopt(socket);
    drop(Rt::spawn(async move { peers.serve(reader, writer).await }));
}

async fn open_shards(
    core: &Core,
    input: &CoreInput,
    record: &BirthRecord,
    peers: &Rc<Peers<Production>>,
    wheel: &CoreWheel,
) -> Result<(Wal<Production>, Vec<Rc<Shard<Production>>>), NodeError> {
    let disk = LinuxDisk::open(&input.core_dir).map_err(|e| NodeError::Storage(e.to_string()))?;
    let identity = WalIdentity {
        cluster: record.cluster,
        node: input.who.owner.node,
        disk: input.who.owner.disk,
        core: core.id as u32,
        cores: core.count as u32,
        boot: input.who.boot,
    };
    let wal_config = WalConfig {
        segment_len: input.config.process.wal_segment_mib << 20,
        ..WalConfig::default()
    };
    let (wal, mut recovered) = Wal::open(wal_config, identity, disk.clone(), random)
        .await
        .map_err(|error| NodeError::Damaged(error.to_string()))?;
    let shard_core = ShardCore {
        shards_total: record.shards,
        clock: OsClock,
        wheel: wheel.clone(),
        metrics: input.metrics.handle(core.id as u32),
        watch_sizes: Sizes::of(record.shards),
    };
    let mut shards = Vec::new();
    for shard in (0..record.shards).filter(|shard| *shard as usize % core.count == core.id) {
        let id = ShardId(shard);
        let state = Rc::new(RefCell::new(State::new(id)));
        let sink = Rc::new(Sink::default());
        let spec = spec(&input.config, record.cluster, id, input.who.owner.node);
        let group = Group::open(
            spec,
            wal.shard(id),
            recovered.remove(&id).unwrap_or_default(),
            disk.clone(),
            Rc::clone(peers),
            Rc::clone(&state),
            Rc::clone(&sink) as _,
        )
        .await
        .map_err(|error| NodeError::Damaged(error.to_string()))?;
        let shard = Shard::new(id, group, state, Rc::clone(peers), shard_core.clone());
        sink.0.replace(Some(Rc::clone(&shard)));
        shards.push(shard);
    }
    Ok((wal, shards))
}

fn spec(config: &Config, cluster: ClusterId, shard: ShardId, node: NodeId) -> GroupSpec {
    let timings = Timings {
        heartbeat: Duration::from_millis(config.cluster.heartbeat_ms),
        election_min: Duration::from_millis(config.cluster.election_min_ms),
        election_max: Duration::from_millis(config.cluster.election_max_ms),
    };
    GroupSpec {
        timings,
        snapshot_entries: config.process.snapshot_entries,
        log_keep: config.snapshot_keep_entries(),
        // The cluster may grow to five voters.
        probe_quorum_loss: true,
        ..GroupSpec::new(cluster, shard, node)
    }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the kernel has random bytes");
    u64::from_ne_bytes(bytes)
}

/// Breaks the circle: a group needs its sink before the shard over the group exists.
#[derive(Default)]
struct Sink(RefCell<Option<Rc<Shard<Production>>>>);

impl ApplySink for Sink {
    fn counted(&self, commands: usize) {
        if let Some(shard) = &*self.0.borrow() {
            shard.counted(commands);
        }
    }

    fn applied(&self, _state: &State, events: &[Event]) {
        if let Some(shard) = &*self.0.borrow() {
            shard.applied(events);
        }
    }

    fn answered(&self) {
        if let Some(shard) = &*self.0.borrow() {
            shard.answered();
        }
    }

    fn installed(&self, _state: &State) {
        if let Some(shard) = &*self.0.borrow() {
            shard.installed();
        }
    }
}

/// A running core.
struct Running {
    wal: Wal<Production>,
    shards: Vec<Rc<Shard<Production>>>,
    router: Rc<Router<Production>>,
    peers: Rc<Peers<Production>>,
    connections: Rc<Connections>,
    front: Rc<NodeFront<Production>>,
    handed_over: Arc<Barrier>,
    /// On core 0.
    founding: Option<Rc<Founding>>,
    health: Arc<Metrics>,
}

impl Running {
    fn start(&self, beginning: Beginning, wheel: CoreWheel, mailbox: Mailbox<Hop>) {
        drop(Rt::spawn(end_on_failure(self.wal.clone())));
        for shard in &self.shards {
            drop(Rt::spawn(Rc::clone(shard).run_proposals()));
            drop(Rt::spawn(Rc::clone(shard).run_deadlines()));
            drop(Rt::spawn(Rc::clone(shard).run_watches()));
            drop(Rt::spawn(Rc::clone(shard).run_freshness()));
            drop(Rt::spawn(Rc::clone(shard).run_leadership(beginning)));
        }
        for shard in &self.shards {
            drop(Rt::spawn(end_on_engine_failure(Rc::clone(shard))));
        }
        drop(Rt::spawn(run_wheel(wheel, self.shards.clone(), OsClock)));
        drop(Rt::spawn(hops(Rc::clone(&self.router), mailbox)));
        let connections = Rc::clone(&self.connections);
        drop(Rt::spawn(connections.run_deadlines::<Production>(OsClock)));
        drop(Rt::spawn(publish::run(
            self.health.handle(self.router.core() as u32),
            Rc::clone(&self.router),
            Rc::clone(&self.connections),
            self.wal.clone(),
        )));
        let shards = self.shards.clone();
        self.wal.on_pin(move |pinning, _bytes| {
            let pinning = shards.iter().find(|shard| shard.id() == pinning);
            if let Some(group) = pinning.map(|shard| Rc::clone(shard.group())) {
                drop(Rt::spawn(async move { group.trigger_snapshot().await }));
            }
        });
    }

    /// Where shard 0 lives, the membership is followed; and any core may be told that this node was
    /// removed.
    fn start_membership(&self, record: &Rc<BirthRecord>, posts: Vec<Post<ToCore>>) {
        if let Some(shard) = self.shards.iter().find(|shard| shard.id() == ShardId(0)) {
            let (peers, record) = (Rc::clone(&self.peers), Rc::clone(record));
            let membership = Membership::new(Rc::clone(shard), &self.router, peers, record);
            self.router.set_membership(Rc::clone(&membership));
            drop(Rt::spawn(membership.run()));
        }
        let peers = Rc::clone(&self.peers);
        drop(Rt::spawn(async move {
            peers.until_outside().await;
            for post in posts {
                // A full inbox is emptied soon; without this the core would go on serving.
                while post.try_send(ToCore::Removed).is_err() {
                    Rt::sleep(Duration::from_millis(10)).await;
                }
            }
        }));
    }

    /// This node is no member any more. Its connections end; whoever comes again is told who is.
    fn removed(&self) -> Result<(), NodeError> {
        if !self.front.remove() {
            return Ok(());
        }
        self.health.health().enter(Phase::Removed);
        self.connections.refuse_all(ErrorCode::NODE_REMOVED);
        if let Some(founding) = &self.founding {
            tracing::error!("this node was removed from its cluster: it serves nobody any more");
            let marked = founding.dir.borrow().mark_removed();
            marked.map_err(|error| NodeError::Storage(error.to_string()))?;
        }
        Ok(())
    }

    async fn initialise(&self, record: &BirthRecord) -> Result<(), NodeError> {
        let members = record.members.iter().map(|member| {
            let value = Member {
                disk: member.disk,
                peer_addr: member.peer_addr.clone(),
                client_addr: member.client_addr.clone(),
            };
            (member.node.0, value)
        });
        let members: std::collections::BTreeMap<_, _> = members.collect();
        for shard in &self.shards {
            let formed = shard.group().initialize(members.clone()).await;
            if formed.map_err(NodeError::internal)? {
                let group = Rc::clone(shard.group());
                let leader = first_leader(shard.id(), &members);
                drop(Rt::spawn(async move { group.settle(leader).await }));
            }
        }
        Ok(())
    }

    async fn serve(&self, inbox: &mut Inbox<ToCore>) -> Result<(), NodeError> {
        while let Some(message) = inbox.recv().await {
            match message {
                ToCore::Stop => break,
                ToCore::Removed => self.removed()?,
                message => self.take(message),
            }
        }
        Ok(())
    }

    fn take(&self, message: ToCore) {
        match message {
            ToCore::Client(socket) => {
                serve_client(&self.connections, Rc::clone(&self.front) as _, socket);
            }
            ToCore::Peer(socket) => serve_peer(&self.peers, socket),
            ToCore::Founded(..) | ToCore::Removed | ToCore::Stop => {}
        }
    }

    /// Hands leadership over, seals the log. Requests are refused from the start, so that clients
    /// go on elsewhere.
    async fn stop(&self) -> Result<(), NodeError> {
        self.shards.iter().for_each(|shard| shard.stop());
        let hand_over = join_all(self.shards.iter().map(hand_over));
        if Rt::timeout(STOP_TIMEOUT, hand_over).await.is_err() {
            tracing::warn!("leadership not handed over in time");
        }
        self.handed_over.arrive().await;
        self.connections.refuse_all(ErrorCode::SHUTTING_DOWN);
        let close = async {
            join_all(self.shards.iter().map(|shard| shard.group().shutdown())).await;
            self.wal.close().await
        };
        match Rt::timeout(CLOSE_TIMEOUT, close).await {
            Ok(closed) => closed.map_err(|error| NodeError::Storage(error.to_string())),
            Err(_) => Err(NodeError::Storage("the log was not closed in time".to_owned())),
        }
    }
}

async fn hand_over(shard: &Rc<Shard<Production>>) {
    if shard.group().leadership().is_none() || shard.group().members().len() < 2 {
        return;
    }
    if let Err(error) = shard.group().transfer(None).await {
        tracing::warn!(shard = shard.id().0, "leadership not handed over: {error}");
    }
}

/// A failed log ends the process: nothing may be acknowledged, voted or renewed any more.
async fn end_on_failure(wal: Wal<Production>) {
    let failure = wal.until_failed().await;
    die(Exit::StorageFailed, format_args!("the write-ahead log failed: {failure}"));
}

/// A stopped engine answers nobody; a restart begins from what is on disk.
async fn end_on_engine_failure(shard: Rc<Shard<Production>>) {
    let reason = shard.group().failed().await;
    if shard.is_stopping() {
        return;
    }
    let exit = match reason {
        GroupFailed::Storage(_) => Exit::StorageFailed,
        _ => Exit::Internal,
    };
    die(exit, format_args!("shard {} stopped: {reason}", shard.id()));
}

async fn hops(router: Rc<Router<Production>>, mut mailbox: Mailbox<Hop>) {
    while let Some((_from, hop)) = mailbox.recv().await {
        router.hopped(hop);
    }
}
