//! Reads (G7): at the leader, after a confirmed round; or here and now, marked stale.
//!
//! Linearizable reads go to the leader, whatever node was asked, because only the leader knows
//! how long a lease may still run. A stale one is answered by the node that was asked; the first
//! for a while waits a little, so that it can tell its age (see `freshness`).

use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, NodeId, Secret};
use leasehold_protocol::limits::PAGE_LEN_MAX;
use leasehold_protocol::planted;
use leasehold_protocol::reply::{KeyInfo, KeysReply, Reply, SessionsReply};
use leasehold_protocol::request::{Freshness, Request, TransferRequest};
use leasehold_protocol::shard::check_key;
use openraft::AsyncRuntime;

use super::{Origin, Shard};
use crate::env::{Clock, Env};
use crate::net::ReplyTo;
use crate::raft::TransferError;

impl<E: Env> Shard<E> {
    pub(super) fn read(self: &Rc<Self>, request: Request, to: ReplyTo, origin: Origin) {
        let (freshness, timeout_ms) = match &request {
            Request::Get(get) => (get.freshness, get.timeout_ms),
            Request::List(list) => (list.freshness, list.timeout_ms),
            Request::Sessions(sessions) => (Freshness::Linearizable, sessions.timeout_ms),
            Request::Holds(holds) => (Freshness::Linearizable, holds.timeout_ms),
            Request::Claim(claim) => (Freshness::Linearizable, claim.timeout_ms),
            Request::Members(members) => (Freshness::Linearizable, members.timeout_ms),
            _ => return to.error(ErrorCode::UNKNOWN_KIND, NodeId(0)),
        };
        if freshness == Freshness::Stale {
            return self.read_stale(request, to);
        }
        let Some(leadership) = self.leads() else {
            if let Some(leader) = self.elsewhere(origin) {
                return self.forward(leader, request, timeout_ms, to);
            }
            return to.error(ErrorCode::NOT_LEADER, self.leader());
        };
        let Some(room) = self.room() else { return self.busy(&to) };
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            // Planted (G7): whoever believes to lead answers at once.
            let confirmed = if planted!("read-without-barrier") {
                Ok(())
            } else {
                shard.confirmed(leadership, timeout_ms).await
            };
            match confirmed {
                Ok(()) => to.send(&shard.look(&request, false)),
                Err(code) => to.error(code, shard.leader()),
            }
            drop(room);
        });
    }

    /// Reads what is here, as soon as it is known how old that is, or else soon.
    fn read_stale(self: &Rc<Self>, request: Request, to: ReplyTo) {
        let room = if self.begin_stale_read() { None } else { self.room() };
        let Some(room) = room else { return to.send(&self.look(&request, true)) };
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            shard.await_age().await;
            to.send(&shard.look(&request, true));
            drop(room);
        });
    }

    /// Reads the applied state.
    fn look(&self, request: &Request, stale: bool) -> Reply {
        let state = self.state.borrow();
        match request {
            Request::Get(get) => match check_key(&get.key) {
                Err(code) => refusal(code),
                Ok(_) => self.keys(vec![state.key_info_after(&get.key, get.holders_after)], false, stale),
            },
            Request::List(list)
                // Planted (G7): a page goes on after a key of another query.
                if !list.after.is_empty()
                    && !list.after.starts_with(&list.prefix)
                    && !planted!("page-of-any-query") =>
            {
                refusal(ErrorCode::PAGE_OF_OTHER_QUERY)
            }
            Request::List(list) => {
                let limit = list.limit.clamp(1, PAGE_LEN_MAX);
                let (keys, more) = state.list(&list.prefix, &list.after, limit as usize);
                self.keys(keys, more, stale)
            }
            Request::Sessions(request) => {
                let limit = request.limit.clamp(1, PAGE_LEN_MAX);
                let (mut sessions, more) = state.sessions(request.after, limit as usize);
                for session in &mut sessions {
                    session.remaining_ms = Some(self.remaining_ms(session.lease, session.ttl_ms));
                }
                Reply::Sessions(SessionsReply { revision: state.revision(), sessions, more })
            }
            Request::Holds(request) => match Self::may_read(&state, request.lease, &request.secret)
            {
                Err(code) => refusal(code),
                Ok(()) => state
                    .holds(request.lease)
                    .map_or_else(|| refusal(ErrorCode::LEASE_DEAD), Reply::Holds),
            },
            Request::Claim(request) => match Self::may_read(&state, request.lease, &request.secret)
            {
                Err(code) => refusal(code),
                Ok(()) => state
                    .claim(request.lease, request.number)
                    .map_or_else(|| refusal(ErrorCode::LEASE_DEAD), Reply::Claim),
            },
            Request::Members(_) => Reply::Members(self.members_reply()),
            _ => refusal(ErrorCode::UNKNOWN_KIND),
        }
    }

    /// The lease is live and this is its secret.
    fn may_read(state: &State, lease: LeaseId, secret: &Secret) -> Result<(), ErrorCode> {
        match state.lease(lease) {
            None => Err(ErrorCode::LEASE_DEAD),
            Some(lease) if !lease.secret_matches(secret) => Err(ErrorCode::BAD_SECRET),
            Some(_) => Ok(()),
        }
    }

    fn keys(&self, mut keys: Vec<KeyInfo>, more: bool, stale: bool) -> Reply {
        let state = self.state.borrow();
        if !stale {
            for key in &mut keys {
                for delay in &mut key.delays {
                    delay.remaining_ms = self.delay_left_ms(&key.key, delay.token);
                }
            }
            for holder in keys.iter_mut().flat_map(|key| &mut key.holders) {
                let ttl_ms = state.lease(holder.lease).map(|lease| lease.ttl_ms());
                holder.remaining_ms = ttl_ms.map(|ttl_ms| self.remaining_ms(holder.lease, ttl_ms));
            }
        }
        let (shard, revision) = (self.id, state.revision());
        let age_ms = if stale { self.age_ms() } else { None };
        Reply::Keys(KeysReply { shard, revision, stale, age_ms, keys, more })
    }

    fn remaining_ms(&self, lease: LeaseId, ttl_ms: u32) -> u32 {
        self.leases.borrow().remaining_ms(lease, ttl_ms, self.clock.now())
    }

    pub(super) fn transfer(self: &Rc<Self>, request: TransferRequest, to: ReplyTo, origin: Origin) {
        if self.leads().is_none() {
            if let Some(leader) = self.elsewhere(origin) {
                return self.forward(leader, Request::Transfer(request), request.timeout_ms, to);
            }
            return to.error(ErrorCode::NOT_LEADER, self.leader());
        }
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            let target = (request.to != NodeId(0)).then_some(request.to);
            if target.is_some_and(|node| !shard.group.members().contains_key(&node)) {
                return to.error(ErrorCode::NO_SUCH_NODE, NodeId(0));
            }
            if target == Some(shard.leader()) {
                return to.send(&Reply::Transferred);
            }
            let moved = shard.group.transfer(target);
            match E::Rt::timeout(Self::timeout(request.timeout_ms), moved).await {
                Ok(Ok(_)) => to.send(&Reply::Transferred),
                Ok(Err(TransferError::NoSuchVoter)) => {
                    to.error(ErrorCode::NO_SUCH_NODE, shard.leader());
                }
                Ok(Err(TransferError::NotLeader { .. })) => {
                    to.error(ErrorCode::NOT_LEADER, shard.leader());
                }
                Ok(Err(TransferError::Unreachable(_))) => {
                    to.error(ErrorCode::UNREACHABLE, shard.leader());
                }
                Ok(Err(_)) | Err(_) => to.error(ErrorCode::DEADLINE, shard.leader()),
            }
        });
    }
}

fn refusal(code: ErrorCode) -> Reply {
    crate::net::error(code, code.text().to_owned(), NodeId(0), 0)
}
