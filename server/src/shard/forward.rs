//! Requests for a shard that another node leads: sent on once, under the client's own bytes.

use std::rc::Rc;
use std::time::Duration;

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

/// How long a deposed leader's answers are still waited for.
const LAST_WORDS: Duration = Duration::from_millis(50);

impl<E: Env> Shard<E> {
    /// Sends a command to the leader and answers its slot.
    pub(super) fn forward_command(
        self: &Rc<Self>,
        leader: NodeId,
        request: CommandRequest,
        slot: Slot,
    ) {
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            let timeout = slot.deadline.since(shard.clock.now());
            match shard.ask(leader, &Request::Command(request), timeout).await {
                Ok(Reply::Outcome(reply)) => shard.finish(slot, reply.outcome, leader),
                Ok(Reply::Error(reply)) => shard.refuse_with(slot, reply),
                Ok(_) => shard.refuse(slot, ErrorCode::INTERNAL),
                Err(code) => shard.refuse(slot, code),
            }
        });
    }

    /// Sends any other request to the leader and passes its reply on.
    pub(super) fn forward(
        self: &Rc<Self>,
        leader: NodeId,
        request: Request,
        timeout_ms: u32,
        to: ReplyTo,
    ) {
        let Some(room) = self.room() else { return self.busy(&to) };
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            match shard.ask(leader, &request, Self::timeout(timeout_ms)).await {
                Ok(Reply::Renewed(mut reply)) => {
                    reply.leader = leader;
                    to.send(&Reply::Renewed(reply));
                }
                Ok(reply) => to.send(&reply),
                Err(code) => to.error(code, shard.leader()),
            }
            drop(room);
        });
    }

    pub(super) async fn ask(
        &self,
        leader: NodeId,
        request: &Request,
        timeout: Duration,
    ) -> Result<Reply, ErrorCode> {
        self.metrics.count(Counter::Forwarded);
        let mut body = vec![request.kind()];
        request.encode_body(&mut body);
        let asked = self.peers.call(leader, Class::Forward, FORWARD_KIND, &body, timeout);
        let answer = match E::Rt::select2(asked, self.led_by_another(leader)).await {
            openraft_rt::Select2::First(answer) => answer,
            // A leader that fell silent may still have taken it.
            openraft_rt::Select2::Second(()) => return Err(ErrorCode::OUTCOME_UNKNOWN),
        };
        match answer {
            Ok(bytes) => match bytes.split_first() {
                Some((kind, body)) => Reply::decode(*kind, body).map_err(|_| ErrorCode::INTERNAL),
                None => Err(ErrorCode::INTERNAL),
            },
            Err(PeerError::Refused { code, .. }) => Err(code),
            Err(PeerError::Busy) => Err(ErrorCode::BUSY),
            Err(error) if error.not_sent() => Err(ErrorCode::UNREACHABLE),
            Err(_) => Err(ErrorCode::OUTCOME_UNKNOWN),
        }
    }

    /// Resolves when this node knows another leader than `leader`, and has had a moment to hear
    /// the old one's answers that were under way.
    async fn led_by_another(&self, leader: NodeId) {
        loop {
            let changed = self.group.leadership_changed();
            if self.group.leader_hint().is_some_and(|hint| hint != leader) {
                return E::Rt::sleep(LAST_WORDS).await;
            }
            changed.await;
        }
    }
}
