//! What peers and clients see of a simulated node besides Raft: as `node::{service, front}` of the
//! server have it, for one core.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, ready};
use leasehold_protocol::birth::{BirthMember, KIND_JOIN};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{ClusterId, NodeId, ShardId};
use leasehold_protocol::reply::{NodeAddress, Reply, ServerHello};
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::KEY_HASH;
use leasehold_protocol::watch::WatchRequest;
use leasehold_protocol::{codec, peer};
use leasehold_server::net::{ForwardService, Front, Hop, Hops, ReplyTo, Router};
use leasehold_server::raft::{PeerInfo, PeerService};
use leasehold_server::shard::{FORWARD_KIND, Origin};
use leasehold_server::watch::WatchName;

use crate::birth::Founding;
use crate::node::SimEnv;

/// There is one core.
pub(crate) struct NoHops;

impl Hops for NoHops {
    fn send(&self, _core: usize, hop: Hop) -> Result<(), Hop> {
        Err(hop)
    }
}

/// What peers ask besides Raft.
pub(crate) struct Service {
    founding: Rc<Founding>,
    router: RefCell<Option<Rc<Router<SimEnv>>>>,
}

impl Service {
    /// Serves what comes before a cluster only, until `open`.
    pub(crate) fn new(founding: Rc<Founding>) -> Rc<Self> {
        Rc::new(Self { founding, router: RefCell::default() })
    }

    /// The shards run.
    pub(crate) fn open(&self, router: Rc<Router<SimEnv>>) {
        self.router.replace(Some(router));
    }

    fn join(&self, from: &PeerInfo, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let node: BirthMember = codec::decode(body).map_err(|_| ErrorCode::MALFORMED)?;
        if node.node != from.node() || node.disk != from.disk() {
            return Err(ErrorCode::MALFORMED);
        }
        let router = self.router.borrow();
        let membership = router.as_ref().and_then(|router| router.membership());
        let answer = membership.ok_or(ErrorCode::NOT_READY)?.admit(&node);
        Ok(codec::encode(&answer))
    }
}

impl PeerService for Service {
    fn handle(
        &self,
        from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        if kind == KIND_JOIN {
            return ready(self.join(from, body)).boxed_local();
        }
        if peer::is_birth(kind) {
            return ready(self.founding.serve(kind, body)).boxed_local();
        }
        let Some(router) = self.router.borrow().clone() else {
            return ready(Err(ErrorCode::NOT_READY)).boxed_local();
        };
        if kind != FORWARD_KIND {
            return ready(Err(ErrorCode::UNKNOWN_KIND)).boxed_local();
        }
        let (forward, body) = (ForwardService::new(router), body.to_vec());
        async move { forward.forwarded(&body).await }.boxed_local()
    }
}

/// What connections see of the node.
pub(crate) struct Door {
    pub(crate) cluster: ClusterId,
    pub(crate) node: u64,
    pub(crate) router: Rc<Router<SimEnv>>,
    /// The node was removed: it names the others and does nothing else.
    pub(crate) removed: Rc<Cell<bool>>,
}

impl Front for Door {
    fn cluster(&self) -> ClusterId {
        self.cluster
    }

    fn hello(&self) -> Result<ServerHello, ErrorCode> {
        let address = |(node, client_addr)| NodeAddress { node, client_addr };
        Ok(ServerHello {
            version: 0,
            cluster: self.cluster,
            node: NodeId(self.node),
            shards: self.router.shards_total(),
            key_hash: KEY_HASH,
            features: 0,
            nodes: self.router.members().into_iter().map(address).collect(),
            leaders: self.router.leaders(),
            server_version: String::new(),
        })
    }

    fn request(&self, request: Request, to: ReplyTo) {
        if self.removed.get() {
            return to.error(ErrorCode::NODE_REMOVED, NodeId(0));
        }
        match request {
            Request::GroupStep(_) => to.error(ErrorCode::INTERNAL_COMMAND, NodeId(0)),
            request => self.router.route(request, to, Origin::Client),
        }
    }

    fn watch(&self, request: WatchRequest, to: ReplyTo) -> Option<WatchName> {
        if self.removed.get() {
            to.error(ErrorCode::NODE_REMOVED, NodeId(0));
            return None;
        }
        self.router.watch(request, to)
    }

    fn unwatch(&self, shard: ShardId, name: WatchName) {
        self.router.unwatch(shard, name);
    }

    fn answered(&self, _reply: &Reply) {}
}
