//! Three nodes on the real parts, each with a core of its own: `io_uring`, TCP on loopback, mapped
//! segments on the disk. Needs `io_uring`. `LOAD=n` proposes `n` batches and prints what that took.

use std::cell::{Cell, RefCell};
use std::net::TcpListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use leasehold_core::{Batch, State};
use leasehold_protocol::command::Command;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, Secret, ShardId, Token};
use leasehold_server::disk::linux::LinuxDisk;
use leasehold_server::env::{Clock, Env};
use leasehold_server::raft::peers::{Identity, Peers};
use leasehold_server::raft::types::{EntryData, Leadership, Member};
use leasehold_server::raft::{ApplySink, Group, GroupSpec, Timings};
use leasehold_server::rt::clock::OsClock;
use leasehold_server::rt::executor::{self, ExecutorConfig};
use leasehold_server::rt::glommio::GlommioRt;
use leasehold_server::rt::inbox::inbox;
use leasehold_server::rt::net::{Acceptor, Listener, TcpNet, adopt};
use leasehold_server::wal::{Wal, WalConfig, WalIdentity};
use openraft::AsyncRuntime;

/// The real parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct RealEnv;

impl Env for RealEnv {
    type Rt = GlommioRt;
    type Clock = OsClock;
    type Disk = LinuxDisk;
    type Net = TcpNet;
}

const CLUSTER: ClusterId = ClusterId([1; 16]);
const SHARD: ShardId = ShardId(0);

/// What a node's core is given.
struct Node {
    id: u64,
    dir: PathBuf,
    addrs: Vec<String>,
    /// Batches to propose.
    load: u64,
    /// The digest that the leader reached, 0 until then; and how many nodes reached it.
    digest: Arc<AtomicU64>,
    arrived: Arc<AtomicU64>,
}

struct Deaf;

impl ApplySink for Deaf {
    fn applied(&self, _state: &State, _events: &[Event]) {}
    fn answered(&self) {}
    fn installed(&self, _state: &State) {}
}

fn disk_id(node: u64) -> DiskId {
    DiskId([node as u8; 16])
}

fn member(node: &Node, id: u64) -> Member {
    let peer_addr = node.addrs[id as usize - 1].clone();
    Member { disk: disk_id(id), peer_addr, client_addr: String::new() }
}

fn batch(command: Command, times: usize) -> EntryData {
    let commands = vec![command; times];
    Batch { wall_ms: OsClock.wall_ms(), commands }.encode().into()
}

fn opening() -> Command {
    let (secret, label) = (Secret([7; 16]), b"a label of some length".to_vec());
    Command::Open { ttl_ms: 5_000, secret, label }
}

#[test]
fn three_real_nodes_agree() {
    let load = std::env::var("LOAD").ok().and_then(|load| load.parse().ok()).unwrap_or(200);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a place for files");
    // Ports that were free a moment ago.
    let held: Vec<TcpListener> =
        (0..3).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let addr = |socket: &TcpListener| socket.local_addr().expect("bound").to_string();
    let addrs: Vec<String> = held.iter().map(addr).collect();
    drop(held);
    let digest = Arc::new(AtomicU64::new(0));
    let arrived = Arc::new(AtomicU64::new(0));
    let node = |id: u64| {
        let dir = dir.path().join(id.to_string());
        std::fs::create_dir(&dir).expect("a fresh directory");
        let (addrs, digest, arrived) = (addrs.clone(), digest.clone(), arrived.clone());
        Node { id, dir, addrs, load, digest, arrived }
    };
    let nodes = (1..=3).map(node).collect();
    let running =
        executor::start(&ExecutorConfig::new(99), nodes, |_, node| run(node)).expect("io_uring");
    for ended in running.join() {
        ended.expect("no core panicked");
    }
    assert_eq!(arrived.load(Ordering::SeqCst), 3);
}

async fn run(node: Node) {
    let (peers, group, state) = start(&node).await;
    if node.id == 1 {
        let members = (1..=3).map(|id| (id, member(&node, id))).collect();
        group.initialize(members).await.expect("node 1 is a member");
    }
    let mut done = false;
    let mut waited = Duration::ZERO;
    while node.arrived.load(Ordering::SeqCst) < 3 {
        if let Some(leadership) = group.leadership().filter(|_| !done) {
            done = true;
            if node.digest.load(Ordering::SeqCst) == 0 {
                propose(&node, &group, leadership).await;
                node.digest.store(state.borrow().digest(), Ordering::SeqCst);
            }
        }
        let digest = state.borrow().digest();
        if waited < Duration::MAX && digest == node.digest.load(Ordering::SeqCst) && digest != 0 {
            waited = Duration::MAX;
            node.arrived.fetch_add(1, Ordering::SeqCst);
        }
        GlommioRt::sleep(Duration::from_millis(2)).await;
    }
    group.shutdown().await;
    peers.disconnect();
}

type Started = (Rc<Peers<RealEnv>>, Rc<Group<RealEnv>>, Rc<RefCell<State>>);

async fn start(node: &Node) -> Started {
    let disk = LinuxDisk::open(&node.dir).expect("a directory");
    let id = NodeId(node.id);
    let identity = WalIdentity {
        cluster: CLUSTER,
        node: id,
        disk: disk_id(node.id),
        core: 0,
        cores: 1,
        boot: 1,
    };
    let config = WalConfig { segment_len: 4 << 20, ..WalConfig::default() };
    let salt = Cell::new(node.id);
    let salts = move || salt.replace(salt.get() + 1);
    let (wal, _) = Wal::open(config, identity, disk.clone(), salts).await.expect("a fresh log");
    let identity = Identity {
        cluster: CLUSTER,
        node: id,
        disk: disk_id(node.id),
        boot: 1,
        nonce: [node.id as u8; 16],
        secret: b"secret".as_slice().into(),
        peer_addr: node.addrs[node.id as usize - 1].clone(),
        client_addr: String::new(),
    };
    let peers = Peers::<RealEnv>::new(identity, TcpNet, OsClock, SHARD);
    (1..=3).for_each(|id| peers.set_address(NodeId(id), node.addrs[id as usize - 1].clone()));
    let mut spec = GroupSpec::new(CLUSTER, SHARD, id);
    // The machine may be busy with other tests.
    spec.timings = Timings {
        heartbeat: Duration::from_millis(100),
        election_min: Duration::from_secs(1),
        election_max: Duration::from_secs(2),
    };
    let state = Rc::new(RefCell::new(State::new(SHARD)));
    let shard = wal.shard(SHARD);
    let recovered = leasehold_server::wal::Recovered::default();
    let group =
        Group::open(spec, shard, recovered, disk, peers.clone(), state.clone(), Rc::new(Deaf))
            .await
            .expect("a fresh group");
    accept(node, peers.clone());
    (peers, group, state)
}

fn accept(node: &Node, peers: Rc<Peers<RealEnv>>) {
    let listener = Listener::bind(&node.addrs[node.id as usize - 1]).expect("the port is free");
    let (post, mut sockets) = inbox(16);
    let deliver = move |socket, _peer| drop(post.try_send(socket));
    let acceptor = Acceptor::start(listener, "peers", deliver).expect("a thread");
    drop(GlommioRt::spawn(async move {
        let _acceptor = acceptor;
        while let Some(socket) = sockets.recv().await {
            let (reader, writer) = adopt(socket);
            let peers = peers.clone();
            drop(GlommioRt::spawn(async move { peers.serve(reader, writer).await }));
        }
    }));
}

/// Four proposals under way, and a confirmation now and then.
async fn propose(node: &Node, group: &Group<RealEnv>, leadership: Leadership) {
    let begin = batch(Command::Begin { token_base: Token(1) }, 1);
    group.propose(leadership, begin).await.expect("nobody else stands for election");
    let started = OsClock.now();
    let mut under_way = FuturesUnordered::new();
    let mut slowest = Duration::ZERO;
    for number in 0..node.load {
        if under_way.len() == 4 {
            slowest = slowest.max(under_way.next().await.expect("four are under way"));
        }
        under_way.push(async move {
            let before = OsClock.now();
            let outcomes = group.propose(leadership, batch(opening(), 8)).await;
            assert_eq!(outcomes.expect("a quorum is there").len(), 8);
            OsClock.now().since(before)
        });
        if number % 50 == 0 {
            group.confirm(leadership).await.expect("still the leader");
        }
    }
    while let Some(took) = under_way.next().await {
        slowest = slowest.max(took);
    }
    let took = OsClock.now().since(started);
    let each = took.checked_div(node.load as u32).unwrap_or_default();
    println!("{} batches of 8 in {took:?}: {each:?} each, slowest {slowest:?}", node.load);

    // Alone: one at a time, and confirmations alone.
    let (mut writes, mut rounds) = (Vec::new(), Vec::new());
    for _ in 0..node.load.min(500) {
        let before = OsClock.now();
        group.propose(leadership, batch(opening(), 1)).await.expect("a quorum is there");
        writes.push(OsClock.now().since(before));
        let before = OsClock.now();
        group.confirm(leadership).await.expect("still the leader");
        rounds.push(OsClock.now().since(before));
    }
    for (what, mut took) in [("write", writes), ("confirmation", rounds)] {
        took.sort_unstable();
        let at = |permille: usize| took[(took.len() * permille / 1000).min(took.len() - 1)];
        println!("{what} alone: p50 {:?}, p99 {:?}", at(500), at(990));
    }
}
