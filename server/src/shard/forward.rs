//! Requests for a shard that another node leads: sent on once, under the client's own bytes.

use std::rc::Rc;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{CommandRequest, Request};
use openraft::AsyncRuntime;

use super::Shard;
use super::batch::Slot;
use crate::admin::Counter;
use crate::env::{Clock, Env};
use crate::net::ReplyTo;
use crate::raft::{Class, PeerError};

/// The peer frame kind of a forwarded request: its body is the request's kind, then its body.
pub const FORWARD_KIND: u8 = 212;

impl<E: Env> Shard<E> {
    /// Sends a command to the leader and answers its slot.
    pub(super) fn forward_command(self: &Rc<Self>, request: CommandRequest, slot: Slot) {
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            let leader = shard.leader();
            let timeout = slot.deadline.since(shard.clock.now());
            match shard.ask(leader, &Request::Command(request), timeout).await {
                Ok(Reply::Outcome(reply)) => shard.finish(slot, reply.outcome, leader),
                Ok(Reply::Error(reply)) => shard.refuse_with(slot, reply.code, reply.leader),
                Ok(_) => shard.refuse(slot, ErrorCode::INTERNAL),
                Err(code) => shard.refuse(slot, code),
            }
        });
    }

    /// Sends any other request to the leader and passes its reply on.
    pub(super) fn forward(self: &Rc<Self>, request: Request, timeout_ms: u32, to: ReplyTo) {
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            let leader = shard.leader();
            match shard.ask(leader, &request, Self::timeout(timeout_ms)).await {
                Ok(Reply::Renewed(mut reply)) => {
                    reply.leader = leader;
                    to.send(&Reply::Renewed(reply));
                }
                Ok(reply) => to.send(&reply),
                Err(code) => to.error(code, leader),
            }
        });
    }

    async fn ask(
        &self,
        leader: NodeId,
        request: &Request,
        timeout: std::time::Duration,
    ) -> Result<Reply, ErrorCode> {
        self.metrics.count(Counter::Forwarded);
        let mut body = vec![request.kind()];
        request.encode_body(&mut body);
        let answer = self.peers.call(leader, Class::Forward, FORWARD_KIND, &body, timeout).await;
        match answer {
            Ok(bytes) => match bytes.split_first() {
                Some((kind, body)) => Reply::decode(*kind, body).map_err(|_| ErrorCode::INTERNAL),
                None => Err(ErrorCode::INTERNAL),
            },
            Err(PeerError::Refused { code, .. }) => Err(code),
            Err(error) if error.not_sent() => Err(ErrorCode::UNREACHABLE),
            Err(_) => Err(ErrorCode::OUTCOME_UNKNOWN),
        }
    }
}
