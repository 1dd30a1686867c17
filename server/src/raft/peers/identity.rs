//! Who a node is to its peers, and who is connected.
//!
//! Owns the rule that one data directory is one process: while a process that uses a directory is
//! connected, another process with the same directory (a copy) is refused. A restarted process
//! looks the same as a copy, so the old connections are asked first whether anybody is there.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

use leasehold_protocol::ids::{ClusterId, DiskId, NodeId};
use leasehold_protocol::peer::PeerIdentity;

use super::link::Outbox;

/// This node, as its peers get to know it.
#[derive(Clone)]
pub struct Identity {
    /// The cluster, `ClusterId::UNKNOWN` before birth or admission.
    pub cluster: ClusterId,
    /// The node.
    pub node: NodeId,
    /// The data directory.
    pub disk: DiskId,
    /// How often a server was started on that directory.
    pub boot: u64,
    /// Drawn at random by this process.
    pub nonce: [u8; 16],
    /// The cluster secret, which both sides of a connection prove to know.
    pub secret: Rc<[u8]>,
    /// The advertised peer address, `HOST:PORT`.
    pub peer_addr: String,
    /// The advertised client address, `HOST:PORT`.
    pub client_addr: String,
}

impl Identity {
    pub(super) fn public(&self) -> PeerIdentity {
        PeerIdentity {
            cluster: self.cluster,
            node: self.node,
            disk: self.disk,
            boot: self.boot,
            nonce: self.nonce,
            peer_addr: self.peer_addr.clone(),
            client_addr: self.client_addr.clone(),
        }
    }
}

impl fmt::Debug for Identity {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.public().fmt(f)
    }
}

/// What a connection is for. Each has connections of its own, so that a heartbeat never queues
/// behind bulk data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Log entries.
    Bulk,
    /// Heartbeats, votes, transfers of leadership.
    Heartbeat,
    /// Snapshots.
    Snapshot,
    /// Requests of clients and of the services above Raft.
    Forward,
}

impl Class {
    pub(super) fn lane(self) -> u8 {
        match self {
            Self::Bulk => 0,
            Self::Heartbeat => 1,
            Self::Snapshot => 2,
            Self::Forward => 3,
        }
    }

    /// For log lines and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bulk => "bulk",
            Self::Heartbeat => "heartbeat",
            Self::Snapshot => "snapshot",
            Self::Forward => "forward",
        }
    }

    pub(super) fn of_lane(lane: u8) -> Option<Self> {
        [Self::Bulk, Self::Heartbeat, Self::Snapshot, Self::Forward]
            .into_iter()
            .find(|class| class.lane() == lane)
    }
}

/// The other side of a connection, after it proved the cluster secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// What it said of itself.
    pub identity: PeerIdentity,
    /// What the connection is for.
    pub class: Class,
    /// Both sides belong to the same cluster. Else only the kinds of a cluster's birth pass.
    pub joined: bool,
}

impl PeerInfo {
    /// The node.
    pub fn node(&self) -> NodeId {
        self.identity.node
    }

    /// Its data directory.
    pub fn disk(&self) -> DiskId {
        self.identity.disk
    }
}

/// The processes that are connected, by data directory.
#[derive(Default)]
pub(super) struct Connected {
    by_disk: BTreeMap<DiskId, Process>,
}

struct Process {
    nonce: [u8; 16],
    links: Vec<Rc<Outbox>>,
}

/// Another live process uses the same data directory; its connections.
pub(super) struct Copied(pub(super) Vec<Rc<Outbox>>);

impl Connected {
    /// Whether `identity` may connect.
    pub(super) fn check(&mut self, identity: &PeerIdentity) -> Result<(), Copied> {
        let Some(process) = self.by_disk.get_mut(&identity.disk) else { return Ok(()) };
        process.links.retain(|link| !link.is_closed());
        if process.nonce == identity.nonce || process.links.is_empty() {
            return Ok(());
        }
        Err(Copied(process.links.clone()))
    }

    pub(super) fn close_all(&self) {
        self.by_disk.values().flat_map(|process| &process.links).for_each(|link| link.close());
    }

    /// Ends the connections of one data directory.
    pub(super) fn close(&self, disk: DiskId) {
        let process = self.by_disk.get(&disk);
        process.iter().flat_map(|process| &process.links).for_each(|link| link.close());
    }

    /// Adds a connection that was checked.
    pub(super) fn add(&mut self, identity: &PeerIdentity, link: Rc<Outbox>) {
        self.by_disk.retain(|_, process| {
            process.links.retain(|link| !link.is_closed());
            !process.links.is_empty()
        });
        let process = self
            .by_disk
            .entry(identity.disk)
            .or_insert_with(|| Process { nonce: identity.nonce, links: Vec::new() });
        process.nonce = identity.nonce;
        process.links.push(link);
    }
}
