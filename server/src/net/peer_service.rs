//! What peers ask of this node besides Raft: the birth, forwarded requests, and Raft messages for
//! shards of other cores.

use std::cell::RefCell;
use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use leasehold_protocol::birth::{BirthMember, KIND_JOIN};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::peer;
use rkyv::rancor;

use super::router::Router;
use super::service::ForwardService;
use crate::env::Env;
use crate::raft::{PeerInfo, PeerService};
use crate::shard::FORWARD_KIND;

/// Answers what nodes ask each other before they are a cluster. It ends the process where its own
/// promise may be lost, so it has no error but the code for the peer.
pub trait BirthService {
    /// Handles one question.
    fn serve(&self, kind: u8, body: &[u8]) -> Result<Vec<u8>, ErrorCode>;
}

/// One core's service.
pub struct CoreService<E: Env> {
    /// On core 0 only.
    birth: Option<Rc<dyn BirthService>>,
    forward: RefCell<Option<Rc<ForwardService<E>>>>,
    router: RefCell<Option<Rc<Router<E>>>>,
}

impl<E: Env> CoreService<E> {
    /// Serves the birth only, until `open`.
    pub fn new(birth: Option<Rc<dyn BirthService>>) -> Rc<Self> {
        Rc::new(Self { birth, forward: RefCell::default(), router: RefCell::default() })
    }

    /// The shards run: forwarded requests are taken from now on.
    pub fn open(&self, router: Rc<Router<E>>) {
        self.router.replace(Some(Rc::clone(&router)));
        self.forward.replace(Some(Rc::new(ForwardService::new(router))));
    }

    /// A node asks to be admitted.
    fn join(&self, from: &PeerInfo, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let node = rkyv::from_bytes::<BirthMember, rancor::Error>(body);
        let node = node.map_err(|_| ErrorCode::MALFORMED)?;
        if node.node != from.node() || node.disk != from.disk() {
            return Err(ErrorCode::MALFORMED);
        }
        let router = self.router.borrow();
        let membership = router.as_ref().and_then(|router| router.membership());
        let answer = membership.ok_or(ErrorCode::NOT_READY)?.admit(&node);
        Ok(rkyv::to_bytes::<rancor::Error>(&answer).expect("an answer is plain data").to_vec())
    }

    fn birth(&self, kind: u8, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        self.birth.as_ref().ok_or(ErrorCode::UNKNOWN_KIND)?.serve(kind, body)
    }
}

impl<E: Env> PeerService for CoreService<E> {
    fn handle(
        &self,
        from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        if kind == KIND_JOIN {
            return futures_util::future::ready(self.join(from, body)).boxed_local();
        }
        if peer::is_birth(kind) {
            return futures_util::future::ready(self.birth(kind, body)).boxed_local();
        }
        let Some(forward) = self.forward.borrow().clone() else {
            return futures_util::future::ready(Err(ErrorCode::NOT_READY)).boxed_local();
        };
        let body = body.to_vec();
        if kind == FORWARD_KIND {
            return async move { forward.forwarded(&body).await }.boxed_local();
        }
        let from = from.clone();
        async move { forward.elsewhere(from, kind, body).await }.boxed_local()
    }
}
