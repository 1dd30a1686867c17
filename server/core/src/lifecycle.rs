//! How leases begin and end.
//!
//! A lease that ends takes its waits and holds with it and passes its keys on in the same step
//! (one revision). It is out of the tables, and all it held and waited for out of their keys, before
//! the first key is passed on, so a waiter of a dead lease is never granted (G4). An own lease lives and ends with its one hold; its session's end
//! does not touch it.

use alloc::rc::Rc;
use alloc::vec::Vec;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{LeaseId, Number, Secret, Token};
use leasehold_protocol::limits::LEASES_MAX;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;
use leasehold_protocol::shard::{check_label, check_ttl_ms};

use crate::blob::Blob;
use crate::digest;
use crate::state::{State, Step};
use crate::table::{Claim, Lease};

impl State {
    pub(crate) fn open(
        &mut self,
        step: &mut Step<'_>,
        ttl_ms: u32,
        secret: &Secret,
        label: &[u8],
    ) -> Outcome {
        if let Err(code) = check_ttl_ms(ttl_ms.into()).and(check_label(label).map(|_| 0)) {
            return self.refusal(code, Token(0));
        }
        if !self.has_room_for_lease() {
            return self.refusal(ErrorCode::LEASES_FULL, Token(0));
        }
        let revision = self.raise(step);
        let lease = self.mint(step, Lease::new(ttl_ms, *secret, Blob::new(label), false));
        Outcome::Opened { lease, revision }
    }

    /// Room for one more lease, with every queued acquire's own lease counted as if it were
    /// there: so a hand-over never fails for want of room.
    pub(crate) fn has_room_for_lease(&self) -> bool {
        self.leases.len() + self.own_waiters < LEASES_MAX && self.last_lease < i64::MAX as u64
    }

    pub(crate) fn mint(&mut self, step: &mut Step<'_>, mut lease: Lease) -> LeaseId {
        self.last_lease += 1;
        let id = LeaseId(self.last_lease);
        lease.base = digest::lease_base(id, &lease);
        self.emit(step, EventKind::LeaseOpened { lease: id, ttl_ms: lease.ttl_ms });
        self.sum.add(digest::lease(&lease));
        let former = self.leases.insert(id, Rc::new(lease));
        assert!(former.is_none(), "the counter never gives an id twice");
        id
    }

    pub(crate) fn close(
        &mut self,
        step: &mut Step<'_>,
        lease: LeaseId,
        secret: &Secret,
    ) -> Outcome {
        if let Err(code) = self.authenticate(lease, secret) {
            return self.refusal(code, Token(0));
        }
        self.end_lease(step, lease, &EndReason::SessionClosed)
    }

    pub(crate) fn expire(&mut self, step: &mut Step<'_>, lease: LeaseId) -> Outcome {
        if self.leases.get(&lease).is_none() {
            return self.refusal(ErrorCode::LEASE_DEAD, Token(0));
        }
        self.end_lease(step, lease, &EndReason::LeaseExpired)
    }

    /// The lease is live and this is its secret.
    pub(crate) fn authenticate(&self, lease: LeaseId, secret: &Secret) -> Result<(), ErrorCode> {
        match self.leases.get(&lease) {
            None => Err(ErrorCode::LEASE_DEAD),
            Some(lease) if !same_secret(&lease.secret, secret) => Err(ErrorCode::BAD_SECRET),
            Some(_) => Ok(()),
        }
    }

    fn end_lease(&mut self, step: &mut Step<'_>, id: LeaseId, reason: &EndReason) -> Outcome {
        let revision = self.raise(step);
        // Planted (G4): a lease that waits only seems to end; its turn still comes.
        if planted!("dead-waiter-granted")
            && self.leases.get(&id).is_some_and(|dead| dead.waits > 0)
        {
            self.emit(step, EventKind::LeaseEnded { lease: id, reason: reason.clone() });
            return Outcome::Closed { revision };
        }
        let lease = self.forget_lease(id);
        let lost = *reason == EndReason::LeaseExpired;
        let mut keys = Vec::with_capacity(lease.claims.len());
        for ((number, _), claim) in lease.claims.iter() {
            match claim {
                Claim::Hold(key) => {
                    let hold = self.take_hold(step, key, id, (reason.clone(), lost));
                    self.remember_end(step, (key, id, &lease.label), &hold, reason);
                    // Planted (G4): the end of a lease wakes nobody.
                    if !planted!("expiry-hands-nothing-over") {
                        keys.push(key.clone());
                    }
                }
                // It went with the hold.
                Claim::Again(_) => {}
                Claim::Wait(key) => {
                    self.take_waiter(key, id);
                    let outcome = self.refusal(ErrorCode::LEASE_LOST, Token(0));
                    self.emit_wait_ended(step, key, id, Number(*number), outcome);
                    keys.push(key.clone());
                }
            }
        }
        self.hand_over_all(step, keys);
        self.emit(step, EventKind::LeaseEnded { lease: id, reason: reason.clone() });
        Outcome::Closed { revision }
    }

    /// Takes a lease and its memory out of the tables; its claims are the caller's to end.
    pub(crate) fn forget_lease(&mut self, id: LeaseId) -> Rc<Lease> {
        let lease = self.leases.remove(&id).expect("the caller knows the lease to be live");
        self.sum.sub(digest::lease_and_memory(id, &lease).0);
        lease
    }
}

/// Compares without stopping at the first difference, so that time tells nothing.
pub(crate) fn same_secret(a: &Secret, b: &Secret) -> bool {
    let difference = a.0.iter().zip(b.0).fold(0, |all, (a, b)| all | (a ^ b));
    core::hint::black_box(difference) == 0
}
