//! Holds with a lease of their own that change hands: one client lets go of such a hold without
//! giving it back, another goes on with it.
//!
//! Nothing is told to the cluster: whoever knows the lease's secret may renew it and give the hold
//! back, by token, so a release by both is done once. The one that takes over believes nothing
//! before a renewal of its own is acknowledged.

use std::sync::Arc;

use leasehold_protocol::command::OwnLease;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Revision, Secret, Token};
use leasehold_protocol::limits::PERMITS_MAX;
use leasehold_protocol::outcome::Grant;
use leasehold_protocol::shard::{check_key, check_mode};

use super::acquire::{AcquireRequest, Wait, ttl};
use super::settle::OWN_GRANT;
use super::{Core, OPS_MAX, OpId, Options, SessionId};
use crate::clock::BootTime;
use crate::error::Failure;

/// Whoever acquired a hold that is taken over has a session that is not known here.
pub(super) const NO_SESSION: SessionId = SessionId(0);

/// All that another client needs to know of a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    pub(crate) key: Vec<u8>,
    pub(crate) mode: Mode,
    pub(crate) token: Token,
    pub(crate) floor: Token,
    /// The acquire's.
    pub(crate) number: Number,
    pub(crate) lease: LeaseId,
    pub(crate) secret: Secret,
    pub(crate) ttl_ms: u32,
}

impl Core {
    /// Lets go of a hold without giving it back; `None` if it has no lease of its own or is over.
    pub(crate) fn hand_over(&mut self, now: BootTime, id: OpId) -> Option<Passed> {
        self.tick(now);
        let op = self.ops.get(&id).filter(|op| op.release.is_none() && !op.is_latched())?;
        let lease = self.leases.get(&op.own_lease?)?;
        let (cell, grant) = (Arc::clone(op.cell.as_ref()?), op.grant?);
        let passed = Passed {
            key: op.key.clone(),
            mode: op.options.mode,
            token: grant.token,
            floor: grant.floor,
            number: op.number?,
            lease: grant.lease,
            secret: lease.secret,
            ttl_ms: lease.ttl.as_millis() as u32,
        };
        cell.release();
        // Lost by the clock in this very moment.
        let lost = cell.lost();
        if let Some(cause) = lost {
            self.lose_hold(id, cause);
            return None;
        }
        self.remove_op(id);
        Some(passed)
    }

    /// Goes on with a hold; `Event::Acquired` follows when a renewal has shown that it lives.
    pub(crate) fn take_over(&mut self, now: BootTime, passed: Passed) -> Result<OpId, Failure> {
        self.tick(now);
        check_key(&passed.key).map_err(Failure::of)?;
        let permits = passed.mode.permit_count().is_some_and(|count| count <= PERMITS_MAX);
        if !permits {
            check_mode(passed.mode).map_err(Failure::of)?;
        }
        let own = OwnLease { ttl_ms: ttl(u64::from(passed.ttl_ms))?, secret: passed.secret };
        let shard = self.shard_of(&passed.key)?;
        if self.ops.len() >= OPS_MAX {
            let text = format!("this client has {OPS_MAX} acquires and holds already");
            return Err(Failure::new(ErrorCode::BUSY, text));
        }
        let grant = Grant {
            lease: passed.lease,
            token: passed.token,
            floor: passed.floor,
            revision: Revision(0),
            version_before: OWN_GRANT,
            version_after: OWN_GRANT,
        };
        let request = AcquireRequest {
            session: NO_SESSION,
            key: passed.key,
            more: Vec::new(),
            value: Vec::new(),
            wait: Wait::Try,
            own: None,
            options: Options { mode: passed.mode, ..Options::PLAIN },
        };
        let id = OpId(self.fresh());
        let op = self.taken_op(request, own, (passed.number, grant));
        self.ops.insert(id, op);
        let holder = self.make_own_lease(id, own, &grant, shard);
        let lease = self.leases.get_mut(&holder).expect("just made");
        lease.holds.insert((grant.token, id));
        lease.verifying.insert(id);
        self.arm_op(id);
        self.renew_soon(holder);
        self.arm(holder);
        Ok(id)
    }
}
