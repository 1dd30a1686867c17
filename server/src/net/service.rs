//! The receiving end of what peers forward: one request in, its first answer back.

use std::rc::Rc;

use leasehold_protocol::codec::DecodeError;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;

use super::router::Router;
use super::status::OneReply;
use crate::env::Env;
use crate::raft::{PeerInfo, message_shard};
use crate::shard::Origin;

/// Answers forwarded requests on one core.
pub struct ForwardService<E: Env>(Rc<Router<E>>);

impl<E: Env> ForwardService<E> {
    /// A service over the core's router.
    pub fn new(router: Rc<Router<E>>) -> Self {
        Self(router)
    }

    /// Passes a Raft message on to the core of its shard.
    pub async fn elsewhere(
        &self,
        peer: PeerInfo,
        kind: u8,
        body: Vec<u8>,
    ) -> Result<Vec<u8>, ErrorCode> {
        let shard = message_shard(kind, &body).ok_or(ErrorCode::UNKNOWN_KIND)?;
        self.0.hop_peer(shard, peer, kind, body).await
    }

    /// Handles the body of one forwarded request: its kind, then its own body. A wait's end is
    /// not reported here: the node that forwarded sees it in its own `apply`.
    pub async fn forwarded(&self, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let (kind, body) = body.split_first().ok_or(ErrorCode::MALFORMED)?;
        let request = Request::decode(*kind, body).map_err(DecodeError::code)?;
        let (to, answer) = OneReply::pair();
        match request {
            Request::Status(request) => self.0.status(request, to, Origin::Peer),
            request => self.0.route(request, to, Origin::Peer),
        }
        let reply: Reply = answer.await.map_err(|_| ErrorCode::OUTCOME_UNKNOWN)?;
        let mut out = vec![reply.kind()];
        reply.encode_body(&mut out);
        Ok(out)
    }
}
