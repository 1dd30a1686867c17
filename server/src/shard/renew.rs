//! Renewals: no log write, but a confirmed round (DESIGN §5, G1, G3).
//!
//! Why a renewal is safe: a quorum of voters accepted a message of this leader that left after the
//! renewal was read from its socket. Each of them had, when it accepted, granted no other leader.
//! So any later leader is elected after the client's send, and starts the lease at its full TTL,
//! while the client counts the same TTL from before its send.

use std::rc::Rc;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::limits::RENEW_BATCH_MAX;
use leasehold_protocol::planted;
use leasehold_protocol::reply::{RenewReply, RenewResult, Reply};
use leasehold_protocol::request::{RenewItem, RenewRequest, Request};
use openraft::AsyncRuntime;

use super::{Origin, Shard};
use crate::admin::Distribution;
use crate::env::{Clock, Env};
use crate::net::ReplyTo;
use crate::raft::Leadership;

impl<E: Env> Shard<E> {
    pub(super) fn renew(self: &Rc<Self>, request: RenewRequest, to: ReplyTo, origin: Origin) {
        if request.items.len() > RENEW_BATCH_MAX {
            return to.error(ErrorCode::TOO_MANY_ITEMS, NodeId(0));
        }
        let Some(leadership) = self.leads() else {
            // Planted (G3): a node that lags behind says which leases are dead.
            if planted!("dead-lease-from-a-lagging-apply")
                && request.items.iter().all(|item| self.state.borrow().lease(item.lease).is_none())
            {
                return to.send(&Reply::Renewed(self.extend(&request.items)));
            }
            if let Some(leader) = self.elsewhere(origin) {
                let timeout_ms = request.timeout_ms;
                return self.forward(leader, Request::Renew(request), timeout_ms, to);
            }
            return to.error(ErrorCode::NOT_LEADER, self.leader());
        };
        let Some(room) = self.room() else { return self.busy(&to) };
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            // Planted (G1, G3): who was deposed and does not know it yet still renews.
            let confirmed = if planted!("deposed-leader-renews") {
                Ok(())
            } else {
                shard.confirmed(leadership, request.timeout_ms).await
            };
            match confirmed {
                Ok(()) => to.send(&Reply::Renewed(shard.extend(&request.items))),
                Err(code) => to.error(code, shard.leader()),
            }
            drop(room);
        });
    }

    /// A confirmed round that begins now, under this very leadership.
    pub(super) async fn confirmed(
        &self,
        leadership: Leadership,
        timeout_ms: u32,
    ) -> Result<(), ErrorCode> {
        let round = self.group.confirm(leadership);
        let began = self.clock.now();
        let round = E::Rt::timeout(Self::timeout(timeout_ms), round).await;
        let took = self.clock.now().since(began);
        self.metrics.record(Distribution::Confirm, took.as_nanos() as u64);
        match round {
            Ok(Ok(())) if self.leads() == Some(leadership) => Ok(()),
            Ok(_) => Err(ErrorCode::NOT_LEADER),
            Err(_) => Err(ErrorCode::NO_QUORUM),
        }
    }

    /// Restarts the TTLs. Deadline and hold-set version are read and set in this one step, so
    /// that no grant can come between them.
    fn extend(&self, items: &[RenewItem]) -> RenewReply {
        let now = self.clock.now();
        let results = items.iter().map(|item| self.extend_one(item, now)).collect();
        RenewReply { results, leader: NodeId(0) }
    }

    fn extend_one(&self, item: &RenewItem, now: crate::env::MonoTime) -> RenewResult {
        let refused = |error| RenewResult {
            lease: item.lease,
            error: Some(error),
            ttl_ms: 0,
            version: item.version,
        };
        let state = self.state.borrow();
        let Some(lease) = state.lease(item.lease) else {
            return refused(ErrorCode::LEASE_DEAD);
        };
        if !lease.secret_matches(&item.secret) {
            return refused(ErrorCode::BAD_SECRET);
        }
        let mut leases = self.leases.borrow_mut();
        if leases.is_expiring(item.lease) {
            return refused(ErrorCode::LEASE_EXPIRING);
        }
        let ttl_ms = lease.ttl_ms();
        leases.extend(item.lease, now);
        RenewResult { lease: item.lease, error: None, ttl_ms, version: lease.version() }
    }
}
