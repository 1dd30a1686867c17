//! The cluster's state, gathered from this node's cores and from the peers.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::reply::{NodeStatus, Reply, ShardStatus, StatusReply};
use leasehold_protocol::request::{Request, StatusRequest};
use openraft::AsyncRuntime;

use super::reply::{ReplySink, ReplyTo};
use super::router::Router;
use crate::env::Env;
use crate::raft::{Class, Peers};
use crate::rt::channels::{OneshotSender, oneshot};
use crate::shard::{FORWARD_KIND, Origin, Shard};

/// A peer that does not answer within this time counts as unreachable.
const PEER_TIMEOUT: Duration = Duration::from_millis(500);

/// Takes one reply and hands it to a waiting task.
pub(crate) struct OneReply(RefCell<Option<OneshotSender<Reply>>>);

impl OneReply {
    /// An address for one answer, and where it arrives.
    pub(crate) fn pair() -> (ReplyTo, crate::rt::channels::OneshotReceiver<Reply>) {
        let (sender, receiver) = oneshot();
        (ReplyTo::new(Rc::new(Self(RefCell::new(Some(sender)))), 0), receiver)
    }
}

impl ReplySink for OneReply {
    fn reply(&self, _id: u64, reply: &Reply) {
        if let Some(sender) = self.0.borrow_mut().take() {
            // The task that waited may be gone.
            let _ = sender.send(reply.clone());
        }
    }
}

impl<E: Env> Router<E> {
    /// Answers a `Status`: for a client of the whole cluster, for a peer of this node, for
    /// another core of this core.
    pub fn status(self: &Rc<Self>, request: StatusRequest, to: ReplyTo, origin: Origin) {
        let router = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            let mut own = router.own_status();
            if origin != Origin::Core {
                for core in (0..router.cores()).filter(|core| *core != router.core()) {
                    own.shards.extend(router.status_of_core(core, request).await);
                }
                own.shards.sort_by_key(|status| status.shard);
            }
            let mut nodes = vec![own];
            if origin == Origin::Client {
                nodes.extend(router.status_of_peers().await);
                nodes.sort_by_key(|status| status.node);
            }
            let (cluster, shards) = (router.cluster(), router.shards_total());
            to.send(&Reply::Status(StatusReply { cluster, shards, nodes }));
        });
    }

    fn own_status(&self) -> NodeStatus {
        NodeStatus {
            node: self.peers().node(),
            client_addr: self.members().remove(&self.peers().node()).unwrap_or_default(),
            reachable: true,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            shards: self.shards().map(|shard| shard_status(shard)).collect(),
        }
    }

    async fn status_of_core(&self, core: usize, request: StatusRequest) -> Vec<ShardStatus> {
        let (to, answer) = OneReply::pair();
        self.hop(core, Request::Status(request), to, Origin::Core);
        match E::Rt::timeout(PEER_TIMEOUT, answer).await {
            Ok(Ok(Reply::Status(reply))) => {
                reply.nodes.into_iter().flat_map(|node| node.shards).collect()
            }
            _ => Vec::new(),
        }
    }

    async fn status_of_peers(&self) -> Vec<NodeStatus> {
        let asked: Vec<_> = self
            .members()
            .into_iter()
            .filter(|(node, _)| *node != self.peers().node())
            .map(|(node, client_addr)| {
                let peers = Rc::clone(self.peers());
                let asked = E::Rt::spawn(async move { ask(&peers, node).await });
                (node, client_addr, asked)
            })
            .collect();
        let mut nodes = Vec::new();
        for (node, client_addr, asked) in asked {
            let unreachable = NodeStatus {
                node,
                client_addr,
                reachable: false,
                version: String::new(),
                shards: Vec::new(),
            };
            nodes.push(asked.await.ok().flatten().unwrap_or(unreachable));
        }
        nodes
    }
}

async fn ask<E: Env>(peers: &Rc<Peers<E>>, node: NodeId) -> Option<NodeStatus> {
    let timeout_ms = u32::try_from(PEER_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    let request = Request::Status(StatusRequest { timeout_ms });
    let mut body = vec![request.kind()];
    request.encode_body(&mut body);
    let answer = peers.call(node, Class::Forward, FORWARD_KIND, &body, PEER_TIMEOUT).await.ok()?;
    let (kind, body) = answer.split_first()?;
    match Reply::decode(*kind, body).ok()? {
        Reply::Status(reply) => reply.nodes.into_iter().next(),
        _ => None,
    }
}

fn shard_status<E: Env>(shard: &Rc<Shard<E>>) -> ShardStatus {
    let raft = shard.group().status();
    let state = shard.state().borrow();
    ShardStatus {
        shard: shard.id(),
        role: raft.role,
        term: raft.term,
        leader: shard.known_leader().unwrap_or(NodeId(0)),
        last_index: raft.last_index,
        applied_index: raft.applied_index,
        applied_revision: state.revision(),
        digest: state.digest(),
        snapshot_index: raft.snapshot_index,
    }
}
