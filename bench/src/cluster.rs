//! A cluster of real `leaseholdd` processes on loopback, in a temporary directory of its own.
//!
//! Owns the processes, their ports and their files. Invariants: processes are ended by recorded
//! process group when the cluster is dropped, stopped ones too; the directory goes with the
//! cluster unless the test is panicking or asked to keep it, and then its path is printed.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::reply::{Reply, Role, StatusReply};
use leasehold_protocol::request::{Request, StatusRequest};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::clock::Deadline;
use crate::links::Links;
use crate::process::{POLL, Process, binary};
use crate::proxy::Proxy;
use crate::wire::{Wire, error_of};
use crate::{http, ports};

/// Within this time a healthy cluster starts, elects, or catches up, on a busy two-core machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The documented exit code of a node that cannot have its port.
const PORT_IN_USE: i32 = 3;
/// How often a cluster is started anew because a port was lost.
const STARTS_MAX: usize = 4;

/// What kind of cluster to start.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Its name.
    pub name: String,
    /// Number of nodes; their ids start at 1.
    pub nodes: u64,
    /// Number of shards.
    pub shards: u32,
    /// Further flags of every node, such as `("snapshot-entries", "100")`; later ones win.
    pub flags: Vec<(String, String)>,
    /// Clients reach the nodes through proxies.
    pub proxied_clients: bool,
    /// Nodes reach each other through proxies.
    pub proxied_peers: bool,
}

impl Default for Spec {
    /// Three nodes, one shard, and timings for tests that load both cores.
    fn default() -> Self {
        let spec = Self {
            name: "bench".into(),
            nodes: 3,
            shards: 1,
            flags: Vec::new(),
            proxied_clients: false,
            proxied_peers: false,
        };
        spec.flag("heartbeat-ms", 50).flag("election-min-ms", 300).flag("election-max-ms", 500)
    }
}

impl Spec {
    /// The server's own default timings.
    pub fn with_default_timings() -> Self {
        Self { flags: Vec::new(), ..Self::default() }
    }

    /// One more flag.
    #[expect(clippy::needless_pass_by_value, reason = "numbers and texts read alike")]
    #[must_use]
    pub fn flag(mut self, name: &str, value: impl ToString) -> Self {
        self.flags.retain(|flag| flag.0 != name);
        self.flags.push((name.to_owned(), value.to_string()));
        self
    }
}

/// The addresses of one node.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// For clients.
    pub client: SocketAddr,
    /// For peers.
    pub peer: SocketAddr,
    /// For HTTP.
    pub admin: SocketAddr,
}

struct Node {
    addresses: Addresses,
    process: Option<Process>,
    /// Whom it is configured with: all nodes of the start, or those that may admit it.
    peers: BTreeMap<u64, SocketAddr>,
    /// It waits for admission.
    joins: bool,
}

/// A running cluster.
pub struct Cluster {
    spec: Spec,
    dir: Option<TempDir>,
    path: PathBuf,
    nodes: BTreeMap<u64, Node>,
    /// The highest id that any node had: a cluster takes none twice.
    last_id: u64,
    links: Links,
    keep: bool,
}

impl Cluster {
    /// Starts all nodes and waits until they are ready.
    pub fn start(spec: Spec) -> io::Result<Self> {
        for _ in 1..STARTS_MAX {
            let mut cluster = Self::prepare(spec.clone())?;
            match cluster.start_all() {
                Ok(()) => return Ok(cluster),
                // Another program of this machine took one of the ports before the node did.
                Err(_) if cluster.lost_a_port() => cluster.keep = false,
                Err(error) => return Err(error),
            }
        }
        let mut cluster = Self::prepare(spec)?;
        cluster.start_all().map(|()| cluster)
    }

    fn start_all(&mut self) -> io::Result<()> {
        for id in self.ids() {
            self.spawn(id)?;
        }
        self.wait_ready(PATIENCE)
    }

    /// A node ended because a port was in use.
    fn lost_a_port(&mut self) -> bool {
        let mut processes = self.nodes.values_mut().filter_map(|node| node.process.as_mut());
        processes.any(|process| {
            let status = process.try_wait().ok().flatten();
            status.is_some_and(|status| status.code() == Some(PORT_IN_USE))
        })
    }

    /// Directory, secret and ports, without a process.
    pub fn prepare(spec: Spec) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("leasehold-").tempdir()?;
        let path = dir.path().to_owned();
        write_secret(&path.join("secret"))?;
        let mut nodes = BTreeMap::new();
        let mut taken = Vec::new();
        for id in 1..=spec.nodes {
            let mut next = || ports::free(&mut taken);
            let addresses = Addresses { client: next()?, peer: next()?, admin: next()? };
            let peers = BTreeMap::new();
            nodes.insert(id, Node { addresses, process: None, peers, joins: false });
        }
        let peers: BTreeMap<u64, SocketAddr> =
            nodes.iter().map(|(id, node)| (*id, node.addresses.peer)).collect();
        for node in nodes.values_mut() {
            node.peers.clone_from(&peers);
        }
        let links = links(&spec, &nodes)?;
        let last_id = spec.nodes;
        Ok(Self { spec, dir: Some(dir), path, nodes, last_id, links, keep: false })
    }

    /// The node ids.
    pub fn ids(&self) -> impl Iterator<Item = u64> + use<> {
        self.nodes.keys().copied().collect::<Vec<_>>().into_iter()
    }

    /// Takes in one more node, which is not started: it will wait to be admitted by the others.
    pub fn add_joining(&mut self) -> io::Result<u64> {
        self.last_id += 1;
        let id = self.last_id;
        let taken = self.nodes.values().flat_map(|node| {
            let Addresses { client, peer, admin } = node.addresses;
            [client.port(), peer.port(), admin.port()]
        });
        let mut taken: Vec<u16> = taken.collect();
        let mut next = || ports::free(&mut taken);
        let addresses = Addresses { client: next()?, peer: next()?, admin: next()? };
        let others = self.nodes.iter().map(|(id, node)| (*id, node.addresses.peer));
        let peers = others.chain([(id, addresses.peer)]).collect();
        self.nodes.insert(id, Node { addresses, process: None, peers, joins: true });
        Ok(id)
    }

    /// Forgets a node that does not run: it was removed.
    pub fn forget(&mut self, id: u64) {
        self.nodes.remove(&id);
    }

    /// A node's addresses.
    pub fn addresses(&self, id: u64) -> Addresses {
        self.node(id).addresses
    }

    /// All client addresses, in the order of the ids; those of the proxies, if there are any.
    pub fn endpoints(&self) -> Vec<SocketAddr> {
        self.ids().map(|id| self.endpoint(id)).collect()
    }

    /// Where clients reach a node: its proxy, if there is one.
    pub fn endpoint(&self, id: u64) -> SocketAddr {
        self.links.client(id).map_or(self.addresses(id).client, Proxy::addr)
    }

    /// The proxies that its spec asked for.
    pub const fn links(&self) -> &Links {
        &self.links
    }

    /// The same as a list that the clients take.
    pub fn endpoint_list(&self) -> String {
        let list: Vec<String> = self.endpoints().iter().map(ToString::to_string).collect();
        list.join(",")
    }

    /// The cluster's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A node's data directory.
    pub fn data_dir(&self, id: u64) -> PathBuf {
        self.path.join(format!("node{id}"))
    }

    /// What a node has logged so far.
    pub fn log(&self, id: u64) -> String {
        fs::read_to_string(self.log_path(id)).unwrap_or_default()
    }

    /// Keeps the directory when the cluster is dropped.
    pub fn keep_files(&mut self) {
        self.keep = true;
    }

    /// The process id of a running node.
    pub fn pid(&self, id: u64) -> Option<u32> {
        self.node(id).process.as_ref().map(Process::pid)
    }

    /// The command that starts a node; a test may change it before it spawns it itself.
    pub fn command(&self, id: u64) -> io::Result<Command> {
        let node = self.node(id);
        let reached =
            |peer: &u64, addr: &SocketAddr| self.links.peer_addr(id, *peer).unwrap_or(*addr);
        let peers: Vec<String> =
            node.peers.iter().map(|(id, addr)| format!("{id}={}", reached(id, addr))).collect();
        let mut command = Command::new(binary("leaseholdd")?);
        command.arg("start");
        command.arg(format!("--node-id={id}"));
        command.arg(format!("--cluster={}", self.spec.name));
        command.arg(format!("--data-dir={}", self.data_dir(id).display()));
        command.arg(format!("--client-listen={}", node.addresses.client));
        command.arg(format!("--peer-listen={}", node.addresses.peer));
        command.arg(format!("--admin-listen={}", node.addresses.admin));
        command.arg(format!("--peers={}", peers.join(",")));
        if let Some(proxy) = self.links.client(id) {
            command.arg(format!("--client-advertise={}", proxy.addr()));
        }
        if node.joins {
            command.arg("--join=true");
        }
        command.arg(format!("--shards={}", self.spec.shards));
        command.arg(format!("--secret-file={}", self.path.join("secret").display()));
        for (name, value) in &self.spec.flags {
            command.arg(format!("--{name}={value}"));
        }
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// Starts a node's process and does not wait for it. Its output goes to its log.
    pub fn spawn(&mut self, id: u64) -> io::Result<()> {
        let command = self.command(id)?;
        self.spawn_as(id, command)
    }

    /// The same with a command that a test has made of the node's.
    pub fn spawn_as(&mut self, id: u64, mut command: Command) -> io::Result<()> {
        let log = self.open_log(id)?;
        command.stdout(log.try_clone()?).stderr(log);
        self.node_mut(id).process = Some(Process::spawn(command)?);
        Ok(())
    }

    /// Sends a signal to a node.
    pub fn signal(&mut self, id: u64, signal: Signal) -> io::Result<()> {
        self.process(id)?.signal(signal)
    }

    /// kill -9.
    pub fn kill(&mut self, id: u64) -> io::Result<()> {
        self.process(id)?.kill()?;
        self.node_mut(id).process = None;
        Ok(())
    }

    /// kill -9 of all running nodes, as close together as possible.
    pub fn kill_all(&mut self) -> io::Result<()> {
        for node in self.nodes.values_mut() {
            if let Some(process) = &mut node.process {
                process.signal(Signal::KILL)?;
            }
        }
        self.nodes.values_mut().try_for_each(|node| match node.process.take() {
            Some(mut process) => process.kill().map(|_| ()),
            None => Ok(()),
        })
    }

    /// SIGTERM, and the exit status.
    pub fn terminate(&mut self, id: u64, limit: Duration) -> io::Result<ExitStatus> {
        let process = self.process(id)?;
        process.signal(Signal::TERM)?;
        let status = process.wait(limit)?;
        self.node_mut(id).process = None;
        Ok(status)
    }

    /// The exit status of a node that ends by itself.
    pub fn wait_exit(&mut self, id: u64, limit: Duration) -> io::Result<ExitStatus> {
        let status = self.process(id)?.wait(limit)?;
        self.node_mut(id).process = None;
        Ok(status)
    }

    /// Waits until every running node says it is ready and all of them know one leader per shard.
    pub fn wait_ready(&mut self, limit: Duration) -> io::Result<()> {
        let running: Vec<u64> = self
            .nodes
            .iter()
            .filter(|(_, node)| node.process.is_some())
            .map(|(id, _)| *id)
            .collect();
        let deadline = Deadline::after(limit);
        for id in running.iter().copied() {
            loop {
                if self.is_ready(id) {
                    break;
                }
                // Whichever it is: the others may wait for it for ever.
                for other in &running {
                    if let Some(status) = self.process(*other)?.try_wait()? {
                        return Err(self.failed(*other, &format!("ended with {status}")));
                    }
                }
                if deadline.passed() {
                    return Err(self.failed(id, &format!("was not ready within {limit:?}")));
                }
                std::thread::sleep(POLL);
            }
        }
        for shard in 0..self.spec.shards {
            self.wait_leader(shard, deadline.left().max(Duration::from_secs(1)))?;
        }
        Ok(())
    }

    fn is_ready(&self, id: u64) -> bool {
        let addr = self.addresses(id).admin;
        matches!(http::get(addr, "/readyz", Duration::from_secs(1)), Ok((200, _)))
    }

    /// A page of a node's admin port.
    pub fn admin(&self, id: u64, path: &str) -> io::Result<(u16, String)> {
        http::get(self.addresses(id).admin, path, Duration::from_secs(5))
    }

    /// The sum of a metric's samples whose labels contain a text.
    pub fn metric(&self, id: u64, name: &str, label: &str) -> io::Result<f64> {
        let (_, page) = self.admin(id, "/metrics")?;
        let samples = page.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let labels = series.strip_prefix(name).filter(|rest| !rest.starts_with('_'))?;
            labels.contains(label).then(|| value.parse::<f64>().ok())?
        });
        Ok(samples.sum())
    }

    /// What one node says about the cluster.
    pub fn status_of(&self, id: u64) -> io::Result<StatusReply> {
        let limit = Duration::from_secs(2);
        let mut wire = Wire::connect(self.addresses(id).client, limit)?;
        let reply = wire.call(&Request::Status(StatusRequest { timeout_ms: 1_000 }), limit)?;
        match reply {
            Reply::Status(status) => Ok(status),
            reply => Err(io::Error::other(match error_of(&reply) {
                Some(error) => format!("node {id}: {}: {}", error.code, error.message),
                None => format!("node {id} answered a status with {reply:?}"),
            })),
        }
    }

    /// What each running node says about itself, by id; nodes that do not answer are left out.
    pub fn statuses(&self) -> BTreeMap<u64, StatusReply> {
        let running = self.nodes.iter().filter(|(_, node)| node.process.is_some());
        running.filter_map(|(id, _)| Some((*id, self.status_of(*id).ok()?))).collect()
    }

    /// The leader of a shard: the one of the highest term that itself says so.
    pub fn leader(&self, shard: u32) -> Option<u64> {
        let statuses = self.statuses();
        let own = |(id, status): (&u64, &StatusReply)| {
            let node = status.nodes.iter().find(|node| node.node == NodeId(*id))?;
            let part = node.shards.iter().find(|part| part.shard.0 == shard)?;
            (part.role == Role::Leader).then_some((part.term, *id))
        };
        statuses.iter().filter_map(own).max().map(|(_, id)| id)
    }

    /// Waits for a shard's leader.
    pub fn wait_leader(&self, shard: u32, limit: Duration) -> io::Result<u64> {
        let deadline = Deadline::after(limit);
        loop {
            if let Some(leader) = self.leader(shard) {
                return Ok(leader);
            }
            if deadline.passed() {
                let text = format!("shard {shard} has no leader within {limit:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            std::thread::sleep(POLL);
        }
    }

    fn failed(&mut self, id: u64, what: &str) -> io::Error {
        self.keep = true;
        let log = self.log(id);
        let tail: Vec<&str> = log.lines().rev().take(20).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        io::Error::other(format!("node {id} {what}; its log ends:\n{}", tail.join("\n")))
    }

    fn log_path(&self, id: u64) -> PathBuf {
        self.path.join(format!("node{id}.log"))
    }

    /// A node's log, for appending.
    pub fn open_log(&self, id: u64) -> io::Result<File> {
        OpenOptions::new().create(true).append(true).open(self.log_path(id))
    }

    fn node(&self, id: u64) -> &Node {
        self.nodes.get(&id).expect("the cluster has this node")
    }

    fn node_mut(&mut self, id: u64) -> &mut Node {
        self.nodes.get_mut(&id).expect("the cluster has this node")
    }

    fn process(&mut self, id: u64) -> io::Result<&mut Process> {
        let none = || io::Error::other(format!("node {id} does not run"));
        self.node_mut(id).process.as_mut().ok_or_else(none)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in self.nodes.values_mut() {
            node.process = None;
        }
        if (self.keep || std::thread::panicking())
            && let Some(dir) = self.dir.take()
        {
            eprintln!("logs and data are kept in {}", dir.keep().display());
        }
    }
}

fn links(spec: &Spec, nodes: &BTreeMap<u64, Node>) -> io::Result<Links> {
    let mut links = Links::default();
    for (id, node) in nodes {
        if spec.proxied_clients {
            links.add_client(*id, node.addresses.client)?;
        }
        for from in nodes.keys().filter(|from| spec.proxied_peers && *from != id) {
            links.add_peer(*from, *id, node.addresses.peer)?;
        }
    }
    Ok(links)
}

fn write_secret(path: &Path) -> io::Result<()> {
    let bytes: [u8; 24] = crate::random::bytes();
    // 192 bits, as the digits of three numbers.
    let digits = bytes.chunks_exact(8).map(|part| {
        let part = part.try_into().expect("eight bytes");
        format!("{:016x}", u64::from_le_bytes(part))
    });
    fs::write(path, digits.collect::<Vec<_>>().concat())
}

/// A listener that keeps a port from others, for tests of a taken one.
pub fn occupy(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port))
}
