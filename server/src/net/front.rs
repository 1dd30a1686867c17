//! What client connections see of a node: before it belongs to a cluster, as a member, and after it
//! was removed. Counts what comes and what is refused; decides nothing else.

use std::cell::Cell;
use std::rc::Rc;

use leasehold_protocol::birth::BirthRecord;
use leasehold_protocol::command::Command;
use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{ClusterId, NodeId, ShardId};
use leasehold_protocol::reply::{NodeAddress, Reply, ServerHello};
use leasehold_protocol::request::Request;
use leasehold_protocol::watch::WatchRequest;

use super::connection::{Asked, Front};
use super::reply::ReplyTo;
use super::router::Router;
use crate::admin::{CoreHandle, Counter, Distribution};
use crate::env::{Clock, Env};
use crate::shard::Origin;
use crate::watch::WatchName;

/// The front of a node whose cluster is not founded, or has not admitted it.
pub struct EarlyFront;

impl Front for EarlyFront {
    fn cluster(&self) -> ClusterId {
        ClusterId::UNKNOWN
    }

    fn hello(&self) -> Result<ServerHello, ErrorCode> {
        Err(ErrorCode::NOT_READY)
    }

    fn request(&self, _request: Request, to: ReplyTo) {
        to.error(ErrorCode::NOT_READY, NodeId(0));
    }

    fn answered(&self, _reply: &Reply) {}
}

/// What connections see of the node.
pub struct NodeFront<E: Env> {
    router: Rc<Router<E>>,
    record: Rc<BirthRecord>,
    metrics: CoreHandle,
    clock: E::Clock,
    /// The node was removed from the cluster: it names the others and does nothing else.
    removed: Cell<bool>,
}

impl<E: Env> NodeFront<E> {
    /// The front of a member of the cluster of this record.
    pub fn new(
        router: Rc<Router<E>>,
        record: Rc<BirthRecord>,
        metrics: CoreHandle,
        clock: E::Clock,
    ) -> Rc<Self> {
        Rc::new(Self { router, record, metrics, clock, removed: Cell::new(false) })
    }

    /// The node is no member any more; false if that was known.
    pub fn remove(&self) -> bool {
        !self.removed.replace(true)
    }

    /// It is known that the node was removed.
    pub fn is_removed(&self) -> bool {
        self.removed.get()
    }
}

impl<E: Env> Front for NodeFront<E> {
    fn cluster(&self) -> ClusterId {
        self.record.cluster
    }

    fn hello(&self) -> Result<ServerHello, ErrorCode> {
        let address = |(node, client_addr)| NodeAddress { node, client_addr };
        Ok(ServerHello {
            version: 0,
            cluster: self.record.cluster,
            node: self.router.peers().node(),
            shards: self.record.shards,
            key_hash: self.record.key_hash,
            features: 0,
            nodes: self.router.members().into_iter().map(address).collect(),
            leaders: self.router.leaders(),
            server_version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    fn request(&self, request: Request, to: ReplyTo) {
        self.metrics.count(figures_of(&request).0);
        if self.removed.get() {
            return to.error(ErrorCode::NODE_REMOVED, NodeId(0));
        }
        match request {
            Request::GroupStep(_) => to.error(ErrorCode::INTERNAL_COMMAND, NodeId(0)),
            Request::Status(request) => self.router.status(request, to, Origin::Client),
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

    fn asked(&self, request: &Request) -> Option<Asked> {
        if matches!(request, Request::Watch(_) | Request::Unwatch(_)) {
            self.metrics.count(Counter::RequestOther);
            return None;
        }
        Some(Asked { kind: figures_of(request).1, at: self.clock.now() })
    }

    fn took(&self, asked: Asked) {
        self.metrics.record(asked.kind, self.clock.now().since(asked.at).as_nanos() as u64);
    }

    fn answered(&self, reply: &Reply) {
        if let Reply::Error(error) = reply {
            self.metrics.count(match error.code.class() {
                ErrorClass::Retryable => Counter::ErrorRetryable,
                ErrorClass::NotApplied => Counter::ErrorNotApplied,
                ErrorClass::Unknown => Counter::ErrorUnknown,
            });
        }
    }
}

/// Where a request counts, and where its duration belongs.
fn figures_of(request: &Request) -> (Counter, Distribution) {
    let other = (Counter::RequestOther, Distribution::TookOther);
    match request {
        Request::Command(request) => match &request.command {
            Command::Open { .. } => (Counter::RequestOpen, Distribution::TookOpen),
            Command::Acquire { .. } | Command::AcquireAll { .. } => {
                (Counter::RequestAcquire, Distribution::TookAcquire)
            }
            Command::Cancel { .. } => (Counter::RequestCancel, Distribution::TookCancel),
            Command::Release { .. } | Command::ReleaseAll { .. } | Command::ReleaseOwn { .. } => {
                (Counter::RequestRelease, Distribution::TookRelease)
            }
            Command::Close { .. } => (Counter::RequestClose, Distribution::TookClose),
            Command::ForceRelease { .. } => {
                (Counter::RequestForceRelease, Distribution::TookForceRelease)
            }
            _ => other,
        },
        Request::Renew(_) => (Counter::RequestRenew, Distribution::TookRenew),
        Request::Get(_) => (Counter::RequestGet, Distribution::TookGet),
        Request::List(_) => (Counter::RequestList, Distribution::TookList),
        _ => other,
    }
}
