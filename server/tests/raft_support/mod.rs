//! What the tests of Raft share: a cluster of simulated machines, each with its disk, its WAL, its
//! peers and its groups, and short names for what a test does to it.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

#[path = "../sim_env/mod.rs"]
mod sim_env;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::{Batch, State};
use leasehold_protocol::command::Command;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, Secret, ShardId};
use leasehold_protocol::outcome::Outcome;
use leasehold_server::disk::sim::{SimDisk, SimDiskConfig};
use leasehold_server::env::Clock;
use leasehold_server::raft::peers::{Identity, Peers};
use leasehold_server::raft::types::{EntryData, Leadership, Member};
use leasehold_server::raft::{ApplySink, Group, GroupError, GroupSpec, ProposeError};
use leasehold_server::rt::sim::{DomainId, SimClock, SimRng, SimRt, SimWorld};
use leasehold_server::rt::sim_net::{SimHost, SimNet, SimNetConfig};
use leasehold_server::wal::{Wal, WalConfig, WalIdentity};
use openraft::AsyncRuntime;
pub use sim_env::{SimEnv, run, sleep_ms};

pub const CLUSTER: ClusterId = ClusterId([1; 16]);
pub const SHARD: ShardId = ShardId(0);
pub const SECRET: &[u8] = b"the cluster's secret";

/// Polls `condition` until it holds; panics with `what` after ten simulated seconds.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..10_000 {
        if condition() {
            return;
        }
        sleep_ms(1).await;
    }
    panic!("ten seconds passed: {what}");
}

/// What a group told its sink.
#[derive(Default)]
pub struct Seen {
    pub events: RefCell<Vec<Event>>,
    pub installed: Cell<u64>,
    /// Told the same.
    pub other: RefCell<Option<Rc<dyn ApplySink>>>,
}

impl ApplySink for Seen {
    fn applied(&self, state: &State, events: &[Event]) {
        self.events.borrow_mut().extend_from_slice(events);
        if let Some(other) = &*self.other.borrow() {
            other.applied(state, events);
        }
    }

    fn answered(&self) {
        if let Some(other) = &*self.other.borrow() {
            other.answered();
        }
    }

    fn installed(&self, state: &State) {
        self.installed.set(self.installed.get() + 1);
        if let Some(other) = &*self.other.borrow() {
            other.installed(state);
        }
    }
}

/// The parts of one running node.
#[derive(Clone)]
pub struct Running {
    pub peers: Rc<Peers<SimEnv>>,
    pub wal: Wal<SimEnv>,
    pub group: Rc<Group<SimEnv>>,
    pub state: Rc<RefCell<State>>,
    pub seen: Rc<Seen>,
}

/// One machine.
pub struct Machine {
    pub node: NodeId,
    pub domain: DomainId,
    pub disk_id: Cell<DiskId>,
    pub disk: RefCell<SimDisk>,
    pub boot: Cell<u64>,
    pub running: RefCell<Option<Running>>,
}

pub struct Cluster {
    pub world: SimWorld,
    pub net: SimNet,
    pub machines: BTreeMap<u64, Machine>,
    pub spec: Box<dyn Fn(&mut GroupSpec)>,
    pub wal: WalConfig,
    /// The nodes whose addresses every node is configured with: `1..=configured`.
    pub configured: u64,
}

pub fn addr(node: u64) -> String {
    format!("node{node}:7001")
}

pub fn disk_id(node: u64) -> DiskId {
    DiskId([node as u8; 16])
}

pub fn member(node: u64) -> Member {
    let client_addr = format!("node{node}:7000");
    Member { disk: disk_id(node), peer_addr: addr(node), client_addr }
}

pub fn disk(seed: u64) -> SimDisk {
    let sync_max = Duration::from_micros(300);
    SimDisk::new(seed, SimDiskConfig { sync_max, ..SimDiskConfig::default() })
}

/// A WAL of small segments.
pub fn wal_config() -> WalConfig {
    WalConfig { segment_len: 256 * 1024, ..WalConfig::default() }
}

impl Cluster {
    /// Machines `1..=nodes`, none of them running.
    pub fn new(nodes: u64) -> Self {
        let world = SimWorld::current();
        let net = SimNet::new(&world, SimNetConfig::default());
        let machine = |node| Machine {
            node: NodeId(node),
            domain: world.add_domain(Duration::from_secs(1000 + node), 0),
            disk_id: Cell::new(disk_id(node)),
            disk: RefCell::new(disk(node)),
            boot: Cell::new(0),
            running: RefCell::default(),
        };
        let machines = (1..=nodes).map(|node| (node, machine(node))).collect();
        let (spec, wal) = (Box::new(|_: &mut _| {}), wal_config());
        Self { world, net, machines, spec, wal, configured: nodes }
    }

    /// All machines run, form a group and have a leader.
    pub async fn formed(nodes: u64) -> Self {
        Self::formed_with(nodes, |_| {}).await
    }

    pub async fn formed_with(nodes: u64, spec: impl Fn(&mut GroupSpec) + 'static) -> Self {
        let cluster = Self { spec: Box::new(spec), ..Self::new(nodes) };
        cluster.form().await;
        cluster
    }

    /// Starts all machines, which form a group and elect a leader.
    pub async fn form(&self) {
        for node in self.machines.keys() {
            self.start(*node).await.expect("an empty disk opens");
        }
        let members = self.machines.keys().map(|node| (*node, member(*node))).collect();
        self.group(1).initialize(members).await.expect("node 1 is a member");
        self.leader().await;
    }

    pub fn machine(&self, node: u64) -> &Machine {
        &self.machines[&node]
    }

    pub fn running(&self, node: u64) -> Running {
        self.machine(node).running.borrow().clone().expect("the node runs")
    }

    pub fn group(&self, node: u64) -> Rc<Group<SimEnv>> {
        self.running(node).group
    }

    pub fn identity(&self, node: u64) -> Identity {
        let machine = self.machine(node);
        Identity {
            cluster: CLUSTER,
            node: machine.node,
            disk: machine.disk_id.get(),
            boot: machine.boot.get(),
            nonce: [machine.boot.get() as u8; 16],
            secret: SECRET.into(),
            peer_addr: addr(node),
            client_addr: member(node).client_addr,
        }
    }

    /// Starts a node on what its disk holds.
    pub async fn start(&self, node: u64) -> Result<(), GroupError> {
        let machine = self.machine(node);
        machine.boot.set(machine.boot.get() + 1);
        let parts = Parts {
            identity: self.identity(node),
            disk: machine.disk.borrow().clone(),
            host: self.net.host(machine.domain),
            configured: self.configured,
            wal: self.wal.clone(),
            spec: {
                let mut spec = GroupSpec::new(CLUSTER, SHARD, NodeId(node));
                (self.spec)(&mut spec);
                spec
            },
        };
        let started = self.world.spawn_in(machine.domain, parts.start());
        let running = started.await.expect("nobody kills it meanwhile")?;
        machine.running.replace(Some(running));
        Ok(())
    }

    /// Kills a node's process; its machine and its disk live on.
    pub fn kill(&self, node: u64) {
        let machine = self.machine(node);
        machine.running.take();
        self.world.kill(machine.domain);
        machine.disk.borrow().kill_process();
        self.world.revive(machine.domain);
    }

    /// The one node that leads and applied its first entry.
    pub async fn leader(&self) -> (u64, Leadership) {
        for _ in 0..10_000 {
            if let Some(leader) = self.leader_now() {
                return leader;
            }
            sleep_ms(1).await;
        }
        panic!("no leader in ten seconds");
    }

    /// The leader of the highest term.
    pub fn leader_now(&self) -> Option<(u64, Leadership)> {
        let leads = |(node, machine): (&u64, &Machine)| {
            let running = machine.running.borrow().clone()?;
            Some((*node, running.group.leadership()?))
        };
        self.machines.iter().filter_map(leads).max_by_key(|(_, leadership)| *leadership)
    }

    /// Waits until some node but `old` leads.
    pub async fn leader_but(&self, old: u64) -> (u64, Leadership) {
        for _ in 0..10_000 {
            if let Some(leader) = self.leader_now().filter(|(node, _)| *node != old) {
                return leader;
            }
            sleep_ms(1).await;
        }
        panic!("no other leader in ten seconds");
    }

    /// Opens a lease through the present leader; retries where nothing was applied.
    pub async fn open_lease(&self, secret: u8) -> Outcome {
        loop {
            let (node, leadership) = self.leader().await;
            match self.group(node).propose(leadership, opening(secret)).await {
                Ok(outcomes) => return outcomes[0],
                Err(ProposeError::NotLeader { .. } | ProposeError::NoQuorum) => sleep_ms(5).await,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits until all running nodes have applied the same.
    pub async fn agree(&self) {
        let applied = |machine: &Machine| {
            let running = machine.running.borrow().clone()?;
            let state = running.state.borrow();
            Some((running.group.status().applied_index, state.revision(), state.digest()))
        };
        until("all nodes agree", || {
            let mut all = self.machines.values().filter_map(applied);
            let first = all.next().expect("one runs");
            all.all(|other| other == first)
        })
        .await;
    }
}

struct Parts {
    identity: Identity,
    disk: SimDisk,
    host: SimHost,
    configured: u64,
    wal: WalConfig,
    spec: GroupSpec,
}

impl Parts {
    async fn start(self) -> Result<Running, GroupError> {
        let node = self.identity.node;
        let wal_identity = WalIdentity {
            cluster: CLUSTER,
            node,
            disk: self.identity.disk,
            core: 0,
            cores: 1,
            boot: self.identity.boot,
        };
        let salts = SimRng::new(self.identity.boot << 8 | node.0);
        let opened =
            Wal::open(self.wal, wal_identity, self.disk.clone(), move || salts.next()).await;
        let (wal, mut recovered) = opened.expect("a sound log opens");
        let peers = Peers::<SimEnv>::new(self.identity, self.host.clone(), SimClock, SHARD);
        (1..=self.configured).for_each(|node| peers.set_address(NodeId(node), addr(node)));
        let state = Rc::new(RefCell::new(State::new(SHARD)));
        let seen = Rc::new(Seen::default());
        let recovered = recovered.remove(&SHARD).unwrap_or_default();
        let group = Group::open(
            self.spec,
            wal.shard(SHARD),
            recovered,
            self.disk,
            peers.clone(),
            state.clone(),
            seen.clone(),
        )
        .await?;
        let pinning = group.clone();
        wal.on_pin(move |shard, _bytes| {
            if shard == SHARD {
                let group = pinning.clone();
                drop(SimRt::spawn(async move { group.trigger_snapshot().await }));
            }
        });
        let mut listener = self.host.listen(&addr(node.0)).expect("the address is free");
        let serving = peers.clone();
        drop(SimRt::spawn(async move {
            loop {
                let (reader, writer) = listener.accept().await;
                let serving = serving.clone();
                drop(SimRt::spawn(async move { serving.serve(reader, writer).await }));
            }
        }));
        Ok(Running { peers, wal, group, state, seen })
    }
}

/// A batch of one command that opens a lease.
pub fn opening(secret: u8) -> EntryData {
    let open = Command::Open {
        ttl_ms: 5_000,
        secret: Secret([secret; 16]),
        label: vec![b'a' + secret % 26; 20],
    };
    let begin = Command::Begin { token_base: leasehold_protocol::ids::Token(1) };
    Batch { wall_ms: SimClock.wall_ms(), commands: vec![open, begin] }.encode().into()
}
