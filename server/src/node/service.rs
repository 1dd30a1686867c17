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

use super::Production;
use super::birth::Founding;
use super::stop::die;
use crate::net::{ForwardService, Router};
use crate::raft::{PeerInfo, PeerService};
use crate::shard::FORWARD_KIND;

/// One core's service.
pub(super) struct CoreService {
    /// On core 0 only.
    founding: Option<Rc<Founding>>,
    forward: RefCell<Option<Rc<ForwardService<Production>>>>,
    router: RefCell<Option<Rc<Router<Production>>>>,
}

impl CoreService {
    /// Serves the birth only, until `open`.
    pub(super) fn new(founding: Option<Rc<Founding>>) -> Rc<Self> {
        Rc::new(Self { founding, forward: RefCell::default(), router: RefCell::default() })
    }

    /// The shards run: forwarded requests are taken from now on.
    pub(super) fn open(&self, router: Rc<Router<Production>>) {
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
        let founding = self.founding.as_ref().ok_or(ErrorCode::UNKNOWN_KIND)?;
        let mut dir = founding.dir.borrow_mut();
        let served = founding.birth.borrow_mut().serve(kind, body, &mut *dir);
        served.unwrap_or_else(|error| {
            // The promise may or may not be on disk: only a restart can tell.
            die(error.exit(), format_args!("birth: {error}"))
        })
    }
}

impl PeerService for CoreService {
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
