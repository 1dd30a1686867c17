//! The connections between nodes: one `Peers` per core.
//!
//! Owns the address book, the connections this core makes (one per peer and class, made anew with
//! back-off when they break) and the serving of those it accepted. Knows Raft only as "a group
//! answers these kinds"; never decides anything about it. Before a peer is heard it proves the
//! cluster secret (`handshake`); a peer whose data directory is not the one the cluster knows is
//! refused on both sides, loudly.

mod ask;
mod handshake;
mod identity;
mod lane;
mod link;
mod serve;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use leasehold_protocol::peer::PeerIdentity;
use leasehold_protocol::planted;
use openraft::AsyncRuntime;
use rand::Rng;

pub use handshake::HandshakeError;
use handshake::Refusal;
use identity::Connected;
pub use identity::{Class, Identity, PeerInfo};
use lane::Lane;
pub(crate) use link::Answer;

use crate::env::{Clock, Env, MonoTime};
use crate::raft::message::RaftMessage;
use crate::raft::rounds::Stamp;
use crate::raft::signal::Signal;
use crate::raft::types::Membership;

/// Why a peer gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// No address is known for the node.
    #[error("no address is known for the node")]
    UnknownNode,
    /// Not sent: there is no connection, and none could be made just now.
    #[error("no connection to the node: {0}")]
    Unreachable(String),
    /// Not sent: too much is queued on the connection or waits for an answer.
    #[error("too much is queued for the node")]
    Busy,
    /// Not sent: it is longer than a frame between nodes may be.
    #[error("longer than a frame between nodes may be")]
    TooLarge,
    /// Not sent: the leadership it was queued under is over.
    #[error("the leadership it was queued under is over")]
    Superseded,
    /// Whether it was received is not known: the connection closed.
    #[error("the connection closed")]
    Closed,
    /// Whether it was received is not known: no answer came in time.
    #[error("no answer came in time")]
    TimedOut,
    /// The peer answered with an error, or one side refused the other in the handshake of `ask_at`.
    #[error("{message} [{code}]")]
    Refused {
        /// Its code.
        code: ErrorCode,
        /// Its sentence.
        message: String,
    },
    /// The answer is not understood.
    #[error("the answer is malformed")]
    Malformed,
}

impl PeerError {
    /// The request was certainly not handed to the peer.
    pub fn not_sent(&self) -> bool {
        match self {
            Self::Closed | Self::TimedOut | Self::Refused { .. } | Self::Malformed => false,
            Self::UnknownNode
            | Self::Unreachable(_)
            | Self::Busy
            | Self::TooLarge
            | Self::Superseded => true,
        }
    }
}

/// Answers requests of peers that are not Raft's, and Raft's for shards of other cores.
pub trait PeerService {
    /// Answers one request with a body, or with a code. `body` is unchecked.
    fn handle(
        &self,
        from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>>;
}

/// A group answers Raft's requests.
pub(crate) trait RaftService {
    fn handle(
        self: Rc<Self>,
        from: &PeerInfo,
        message: RaftMessage,
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>>;
}

/// What is known of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    /// As configured; else as a membership names it.
    peer_addr: Option<String>,
    /// As it told last. Counts while nothing else is known.
    advertised: Option<String>,
    client_addr: Option<String>,
    disk: Option<DiskId>,
}

impl Known {
    fn address(&self) -> Option<String> {
        self.peer_addr.as_ref().or(self.advertised.as_ref()).cloned()
    }
}

/// The connections of one core. Shared by its groups.
pub struct Peers<E: Env> {
    net: E::Net,
    clock: E::Clock,
    identity: RefCell<Identity>,
    /// The first shard of this core, told to peers so that they can place a connection.
    shard: ShardId,
    book: RefCell<BTreeMap<NodeId, Known>>,
    lanes: RefCell<BTreeMap<(NodeId, Class), Rc<Lane>>>,
    connected: RefCell<Connected>,
    groups: RefCell<BTreeMap<ShardId, Weak<dyn RaftService>>>,
    service: RefCell<Option<Rc<dyn PeerService>>>,
    said: RefCell<BTreeMap<(NodeId, ErrorCode), MonoTime>>,
    served: Cell<usize>,
    /// Nodes that are no longer members; refused.
    removed: RefCell<BTreeSet<NodeId>>,
    /// Raised when a peer refused this node as one that is no longer a member.
    outside: Signal,
    /// Accepted connections that have not proved the secret, oldest first; raised to end one.
    greeting: RefCell<VecDeque<Rc<Signal>>>,
}

/// The same refusal of the same node is logged at most this often.
const SAY_AGAIN_AFTER: Duration = Duration::from_mins(1);

impl<E: Env> Peers<E> {
    /// Without addresses, groups and service: those are told later. `shard` is any shard of this
    /// core.
    pub fn new(identity: Identity, net: E::Net, clock: E::Clock, shard: ShardId) -> Rc<Self> {
        Rc::new(Self {
            net,
            clock,
            identity: RefCell::new(identity),
            shard,
            book: RefCell::default(),
            lanes: RefCell::default(),
            connected: RefCell::default(),
            groups: RefCell::default(),
            service: RefCell::default(),
            said: RefCell::default(),
            served: Cell::new(0),
            removed: RefCell::default(),
            outside: Signal::default(),
            greeting: RefCell::default(),
        })
    }

    /// This node's id.
    pub fn node(&self) -> NodeId {
        self.identity.borrow().node
    }

    /// This node's data directory.
    pub fn disk(&self) -> DiskId {
        self.identity.borrow().disk
    }

    /// This node now belongs to a cluster; connections made before are closed and made anew.
    pub fn set_cluster(&self, cluster: ClusterId) {
        self.identity.borrow_mut().cluster = cluster;
        self.disconnect();
    }

    /// Where a node is reached. Resolved anew at each connect.
    pub fn set_address(&self, node: NodeId, peer_addr: impl Into<String>) {
        self.book.borrow_mut().entry(node).or_default().peer_addr = Some(peer_addr.into());
    }

    /// The data directory the cluster knows for a node; another one is refused.
    pub fn set_disk(&self, node: NodeId, disk: DiskId) {
        self.book.borrow_mut().entry(node).or_default().disk = Some(disk);
    }

    /// A node is a member no longer: its connections end, and it is refused from now on.
    pub fn set_removed(&self, node: NodeId, disk: DiskId) {
        if self.removed.borrow_mut().insert(node) {
            self.connected.borrow().close(disk);
            let lanes = self.lanes.borrow();
            lanes.iter().filter(|((of, _), _)| *of == node).for_each(|(_, lane)| lane.close());
        }
    }

    /// Resolves when a peer has refused this node as one that was removed from the cluster.
    pub async fn until_outside(&self) {
        self.outside.since(0).await;
    }

    /// A node's advertised client address, as it told last.
    pub fn client_address(&self, node: NodeId) -> Option<String> {
        self.book.borrow().get(&node)?.client_addr.clone()
    }

    /// Takes what a membership says of the nodes. Configured addresses stay, advertised ones count no
    /// more.
    pub(crate) fn learn(&self, membership: &Membership) {
        let mut book = self.book.borrow_mut();
        for (node, member) in membership.nodes() {
            let known = book.entry(NodeId(*node)).or_default();
            known.disk = Some(member.disk);
            if !member.peer_addr.is_empty() {
                known.peer_addr.get_or_insert_with(|| member.peer_addr.clone());
            }
            if !member.client_addr.is_empty() {
                known.client_addr.get_or_insert_with(|| member.client_addr.clone());
            }
        }
    }

    /// Who answers the kinds that are not Raft's.
    pub fn set_service(&self, service: Rc<dyn PeerService>) {
        self.service.replace(Some(service));
    }

    pub(crate) fn register(&self, shard: ShardId, group: Weak<dyn RaftService>) {
        self.groups.borrow_mut().insert(shard, group);
    }

    pub(crate) fn unregister(&self, shard: ShardId) {
        self.groups.borrow_mut().remove(&shard);
    }

    /// Asks a node and waits for its answer, connecting first if need be.
    pub async fn call(
        self: &Rc<Self>,
        node: NodeId,
        class: Class,
        kind: u8,
        body: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>, PeerError> {
        let ask = async {
            let answer =
                self.send(node, None, class, kind, None, |out| out.extend_from_slice(body)).await?;
            answer.await
        };
        E::Rt::timeout(timeout, ask).await.unwrap_or(Err(PeerError::TimedOut))
    }

    /// Queues a request, connecting first if need be; only to the data directory `disk` if one is
    /// named. A stamped request is stamped when it is written.
    pub(crate) async fn send(
        self: &Rc<Self>,
        node: NodeId,
        disk: Option<DiskId>,
        class: Class,
        kind: u8,
        stamp: Option<Rc<Stamp>>,
        write_body: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Answer, PeerError> {
        let connection = self.connection(node, class).await?;
        // Planted (G5), here and where else a disk id is compared: a wiped voter votes.
        let foreign = disk.is_some_and(|disk| disk != connection.info.disk());
        if foreign && !planted!("wiped-voter-votes") {
            let code = ErrorCode::FOREIGN_DISK;
            return Err(PeerError::Refused { code, message: code.text().to_owned() });
        }
        connection.request(kind, self.clock.now(), stamp, write_body)
    }

    /// How often this core tried to connect to a node.
    pub fn connects(&self, node: NodeId, class: Class) -> u64 {
        self.lanes.borrow().get(&(node, class)).map_or(0, |lane| lane.connects())
    }

    /// Connections that peers made to this core.
    pub fn accepted_len(&self) -> usize {
        self.served.get()
    }

    /// Open connections that this core made to peers.
    pub fn links_len(&self) -> usize {
        self.lanes.borrow().values().filter(|lane| lane.is_live()).count()
    }

    /// Closes every connection. They are made anew when needed.
    pub fn disconnect(&self) {
        self.lanes.borrow().values().for_each(|lane| lane.close());
        self.connected.borrow().close_all();
    }

    /// What a side says to an identity that proved the secret.
    fn judge(&self, other: &PeerIdentity) -> Result<(), Refusal> {
        if self.removed.borrow().contains(&other.node) {
            let text = format!("node {} was removed from the cluster", other.node);
            return Err(Refusal::new(ErrorCode::NODE_REMOVED, text));
        }
        let known = self.book.borrow().get(&other.node).and_then(|known| known.disk);
        if let Some(known) = known.filter(|known| *known != other.disk)
            && !planted!("wiped-voter-votes")
        {
            let text = format!(
                "the cluster knows node {} by the data directory {known}, not {}: a wiped or \
                 foreign directory takes no part until it is admitted",
                other.node, other.disk
            );
            return Err(Refusal::new(ErrorCode::FOREIGN_DISK, text));
        }
        let Err(copied) = self.connected.borrow_mut().check(other) else { return Ok(()) };
        self.probe(copied);
        let text = format!(
            "another live process uses the data directory {}: one of the two is a copy",
            other.disk
        );
        Err(Refusal::new(ErrorCode::FOREIGN_DISK, text))
    }

    /// Logs a failed handshake; the same thing once in a while only. Nobody proved that it is
    /// `node`, so ids that no cluster told of count as one: what is kept stays small.
    fn say(&self, node: NodeId, error: &HandshakeError) {
        let code = match error {
            HandshakeError::Refused { code, .. } | HandshakeError::RefusedByPeer { code, .. } => {
                *code
            }
            HandshakeError::Malformed(_) => ErrorCode::MALFORMED,
            HandshakeError::Broken(_) => return,
        };
        if matches!(error, HandshakeError::RefusedByPeer { .. }) && code == ErrorCode::NODE_REMOVED
        {
            self.outside.raise();
        }
        let now = self.clock.now();
        let known = self.book.borrow().contains_key(&node);
        let key = (if known { node } else { NodeId(0) }, code);
        let mut said = self.said.borrow_mut();
        if said.get(&key).is_none_or(|at| now.since(*at) >= SAY_AGAIN_AFTER) {
            said.insert(key, now);
            tracing::warn!(peer = node.0, "peer connection: {error}");
        }
    }

    fn challenge() -> [u8; 32] {
        let mut challenge = [0; 32];
        E::Rt::thread_rng().fill_bytes(&mut challenge);
        challenge
    }
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
