//! The composition root: what a node is made of, in which order it starts and stops.
//!
//! Start: data directory (whose is it, is it free), sockets, cores; then on core 0 the cluster's
//! birth; then on every core its WAL, its Raft groups, its shards; only then connections are
//! taken. Stop: no new requests, leadership handed over, logs sealed, exit.
//! A failure of storage on any core ends the process at once with its own exit code.

mod birth;
mod core;
mod lanes;
mod publish;
mod stop;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_protocol::birth::BirthRecord;

use self::core::CoreInput;
use crate::admin::{self, Metrics, Phase};
use crate::config::Config;
use crate::disk::linux::LinuxDisk;
use crate::disk::sigbus;
use crate::env::Env;
use crate::error::{Exit, NodeError};
use crate::identity::DataDir;
use crate::rt::clock::OsClock;
use crate::rt::executor::{self, CorePlacement, ExecutorConfig, StartError};
use crate::rt::glommio::GlommioRt;
use crate::rt::hop;
use crate::rt::inbox::{Post, PostError, inbox};
use crate::rt::net::{Acceptor, ListenError, Listener, TcpNet};
use crate::shutdown::Shutdown;

/// Messages that wait for a core from other threads.
const INBOX_LEN: usize = 4096;
/// Messages that wait on a lane between two cores.
const LANE_LEN: usize = 16 * 1024;

/// The real world: glommio, Linux, TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Production;

impl Env for Production {
    type Rt = GlommioRt;
    type Clock = OsClock;
    type Disk = LinuxDisk;
    type Net = TcpNet;
}

/// What other threads tell a core.
#[derive(Debug)]
enum ToCore {
    /// A client connected.
    Client(OwnedFd),
    /// A peer connected.
    Peer(OwnedFd),
    /// The cluster is founded; core 0 tells the others, and whether this node forms the shards.
    Founded(Arc<BirthRecord>, bool),
    /// A peer has refused this node as one that was removed from the cluster.
    Removed,
    /// The process is asked to stop.
    Stop,
}

/// Runs a node until it is asked to stop.
pub fn run(config: Config, shutdown: Shutdown, metrics: Arc<Metrics>) -> Result<(), NodeError> {
    let cores = config.process.cores as usize;
    let dir = DataDir::open(&config)?;
    let client_addr = config.process.client_listen.to_string();
    let clients = listen("client-listen", &client_addr)?;
    let peers = listen("peer-listen", &config.process.peer_listen.to_string())?;
    if let Some(address) = config.process.admin_listen {
        admin::start(address, Arc::clone(&metrics))?;
    }
    let secret: Arc<[u8]> = config.secret()?.unwrap_or_else(unguessable).into();
    sigbus::install(i32::from(Exit::StorageFailed.code())).map_err(NodeError::internal)?;
    let config = Arc::new(config);
    let (posts, inboxes): (Vec<_>, Vec<_>) = (0..cores).map(|_| inbox(INBOX_LEN)).unzip();
    let core_dirs =
        (0..config.process.cores).map(|core| dir.core_dir(core)).collect::<Result<Vec<_>, _>>()?;
    let who =
        core::Who { owner: dir.owner().clone(), boot: dir.boot(), nonce: dir.nonce(), secret };
    let handed_over = Arc::new(stop::Barrier::new(cores));
    let mut dir = Some(dir);
    let inputs = inboxes
        .into_iter()
        .zip(hop::lanes(cores, LANE_LEN))
        .zip(core_dirs)
        .map(|((inbox, ports), core_dir)| CoreInput {
            config: Arc::clone(&config),
            who: who.clone(),
            // Core 0 keeps the directory, for the promise at the cluster's birth.
            dir: dir.take(),
            core_dir,
            inbox,
            posts: posts.clone(),
            ports,
            metrics: Arc::clone(&metrics),
            handed_over: Arc::clone(&handed_over),
            initialises: false,
        })
        .collect();
    let executors = executor::start(&executors(&config), inputs, core::run).map_err(start_error)?;
    let gauges: Vec<_> = executors.gauges().to_vec();
    let clients = accept(clients, "client", &posts, ToCore::Client)?;
    let peers = accept(peers, "peer", &posts[..1], ToCore::Peer)?;
    let accepts = publish::Accepts { client: clients.counters(), peer: peers.counters() };
    publish::watch_threads(gauges, accepts, Arc::clone(&metrics));
    tracing::info!(
        node = config.process.node_id.0, boot = who.boot, disk = %who.owner.disk,
        clients = %client_addr, "started"
    );
    let stopper = std::thread::spawn(move || {
        shutdown.wait();
        metrics.health().enter(Phase::Stopping);
        for post in &posts {
            while let Err(PostError::Full(_)) = post.try_send(ToCore::Stop) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    for ended in executors.join() {
        ended.map_err(NodeError::internal)?;
    }
    stopper.join().map_err(|_| NodeError::internal("the shutdown thread failed"))?;
    tracing::info!("stopped");
    Ok(())
}

/// A single node without a secret of its own has no peers, so none may prove one.
fn unguessable() -> Vec<u8> {
    let mut secret = vec![0; 32];
    getrandom::fill(&mut secret).expect("the kernel has random bytes");
    secret
}

fn executors(config: &Config) -> ExecutorConfig {
    let placement =
        if config.process.pin_cores { CorePlacement::Fixed } else { CorePlacement::Unbound };
    ExecutorConfig {
        placement,
        stall_limit: Duration::from_millis(config.process.watchdog_ms),
        ..ExecutorConfig::new(i32::from(Exit::Watchdog.code()))
    }
}

fn start_error(error: StartError) -> NodeError {
    match error {
        StartError::Probe(error) => NodeError::IoUring(error.to_string()),
        error => NodeError::internal(error),
    }
}

fn listen(key: &'static str, address: &str) -> Result<Listener, NodeError> {
    Listener::bind(address).map_err(|error| {
        let source = match error {
            ListenError::InUse { .. } => std::io::ErrorKind::AddrInUse.into(),
            ListenError::Unresolved { reason, .. } | ListenError::Failed { reason, .. } => reason,
        };
        let address = address.parse().expect("the configuration holds a socket address");
        NodeError::Listen { key, address, source }
    })
}

/// Hands accepted sockets to the cores in turn. A core whose inbox is full gets none: the
/// connection is closed, and its client tries again.
fn accept(
    listener: Listener,
    name: &str,
    posts: &[Post<ToCore>],
    wrap: fn(OwnedFd) -> ToCore,
) -> Result<Acceptor, NodeError> {
    let posts = posts.to_vec();
    let next = AtomicUsize::new(0);
    let deliver = move |socket, _from| {
        let core = next.fetch_add(1, Ordering::Relaxed) % posts.len();
        let _refused = posts[core].try_send(wrap(socket));
    };
    Acceptor::start(listener, name, deliver).map_err(NodeError::internal)
}
