//! The queue at work: granting, ending holds and waits, and passing keys on.
//!
//! Every function here that takes a hold or a waiter away is followed by `hand_over` of its key in
//! the same step, so that a key's queue never has a satisfiable head between two commands. The
//! order of a step's events is: what ended, then what was granted because of it.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Revision, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::planted;

use crate::blob::{Blob, Key};
use crate::digest;
use crate::state::{State, Step, TOKEN_MAX};
use crate::table::{Claim, Hold, KeyState, Lease, Waiter};

impl State {
    /// Makes an acquire a hold. The key admits it; it is in no queue (any more). `limit` is the key's
    /// number of permits, 0 for a lock.
    pub(crate) fn grant(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        limit: u32,
        acquire: Waiter,
    ) -> Grant {
        let revision = self.raise(step);
        assert!(self.last_token < TOKEN_MAX, "the caller checked the counter");
        self.last_token += 1;
        // Planted (G2): a counter of this process, not of the replicated state.
        if planted!("token-from-leader-memory") {
            static MEMORY: AtomicU64 = AtomicU64::new(1);
            self.last_token = MEMORY.fetch_add(1, Ordering::Relaxed);
        }
        let mut token = Token(self.last_token);
        // Planted (G2): a key that comes back counts from the beginning.
        if planted!("token-reset-on-recreation") && self.keys.get(key).is_none() {
            token = Token(1);
        }
        let floor = self.floor_for(key, acquire.mode, token);
        let Waiter { lease: session, number, mode, own, value, delay_ms, .. } = acquire;

        let (before, label) = self.edit_lease(session, |lease, _| {
            lease.version += 1;
            if own.is_none() {
                lease.claims.insert(number.0, Claim::Hold(key.clone()));
            }
            (lease.version - 1, lease.label.clone())
        });
        let holder = match own {
            None => session,
            Some(own) => {
                let mut lease = Lease::new(own.ttl_ms, own.secret, label, true);
                lease.version = 1;
                lease.claims.insert(number.0, Claim::Hold(key.clone()));
                self.mint(step, lease)
            }
        };
        self.claims += 1;
        let entry = self.entry_to_grant(key);
        assert!(!entry.is_taken() || entry.limit == limit, "a semaphore has one limit at a time");
        entry.limit = limit;
        assert!(entry.admits(mode), "incompatible holds never meet (G1)");
        let permits = mode.permit_count().unwrap_or(0);
        let slots = entry.taken.take_lowest(permits, limit);
        entry.floor = if mode == Mode::EXCLUSIVE { 0 } else { floor.0 };
        let hold = Hold {
            token,
            mode,
            number,
            value,
            since_ms: step.wall_ms,
            forced: None,
            slots: Blob::new(&slots),
            delay_ms,
            again: Vec::new(),
            asked: None,
        };
        let hash = digest::hold(key, holder, &hold).wrapping_add(digest::own(key, entry));
        entry.holds.insert(holder, hold);
        self.sum.add(hash);
        let event = EventKind::Granted { key: key.to_vec(), lease: holder, mode, token, slots };
        self.emit(step, event);
        Grant {
            lease: holder,
            token,
            revision,
            version_before: HoldSetVersion(before),
            version_after: HoldSetVersion(before + 1),
            floor,
        }
    }

    /// The floor of a grant about to be made. The first of several holds that go together fixes it
    /// for all: every token given before is over for this key, so the highest of them will do.
    fn floor_for(&self, key: &Key, mode: Mode, token: Token) -> Token {
        match self.keys.get(key).filter(|entry| entry.is_taken()) {
            _ if mode == Mode::EXCLUSIVE => token,
            Some(entry) => Token(entry.floor),
            None => Token(token.0.saturating_sub(1).max(1)),
        }
    }

    /// The key's entry, made if there is none, without the hash of its own part in the digest.
    fn entry_to_grant(&mut self, key: &Key) -> &mut KeyState {
        if self.keys.get(key).is_none() {
            self.keys.insert(key.clone(), Rc::default());
            self.names.insert(key.name().clone(), ());
        }
        let entry = self.keys.entry_mut(key).expect("it is there or was made");
        self.sum.sub(digest::own(key, entry));
        entry
    }

    /// Sets a key's floor and limit and keeps the digest in step.
    pub(crate) fn set_own(&mut self, key: &Key, floor: u64, limit: u32) {
        let entry = self.keys.entry_mut(key).expect("a held key is in the table");
        self.sum.sub(digest::own(key, entry));
        (entry.floor, entry.limit) = (floor, limit);
        self.sum.add(digest::own(key, entry));
    }

    /// Grants the longest satisfiable prefix of the key's queue, or forgets the key if nobody
    /// holds it and nobody waits (G4).
    pub(crate) fn hand_over(&mut self, step: &mut Step<'_>, key: &Key) {
        loop {
            let Some(entry) = self.keys.get(key) else { return };
            if entry.is_vacant() {
                self.sum.sub(digest::own(key, entry));
                self.keys.remove(key);
                self.names.remove(key.name());
                // Planted (G6): nobody hears that the key is free.
                if !planted!("vacancy-untold") {
                    self.emit(step, EventKind::Vacant { key: key.to_vec() });
                }
                return;
            }
            let mut head = entry.queue.first();
            // Planted (G4): who came last is served first.
            if planted!("waiters-from-the-back") {
                head = entry.queue.last();
            }
            let Some((_, head)) = head else { return };
            if !entry.admits(head.mode) {
                return;
            }
            let (lease, number, limit) = (head.lease, head.number, entry.limit);
            let waiter = self.take_waiter(key, lease);
            self.forget_wait(lease, number);
            let outcome = if self.last_token < TOKEN_MAX {
                Outcome::Granted(self.grant(step, key, limit, waiter))
            } else {
                self.refusal(ErrorCode::TOKENS_EXHAUSTED, Token(0))
            };
            self.settle_wait(step, key, lease, number, outcome);
        }
    }

    /// Ends a live lease's wait and passes the key on if that lets anybody in.
    pub(crate) fn end_wait(
        &mut self,
        step: &mut Step<'_>,
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
    ) {
        let key = self.drop_wait(step, lease, number, outcome);
        // Planted (G4): shared waiters behind a cancelled writer wait on.
        if !planted!("cancelled-writer-blocks") {
            self.hand_over(step, &key);
        }
    }

    /// Ends a live lease's wait; passing the key on is the caller's to do.
    pub(crate) fn drop_wait(
        &mut self,
        step: &mut Step<'_>,
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
    ) -> Key {
        let key = self.forget_wait(lease, number);
        self.take_waiter(&key, lease);
        self.settle_wait(step, &key, lease, number, outcome);
        key
    }

    /// Ends a live lease's hold and passes the key on. An own lease ends with its hold. `lost` is
    /// whether its client has not agreed, so that its lock-delay begins.
    pub(crate) fn end_hold(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        holder: LeaseId,
        (reason, lost): (EndReason, bool),
    ) -> Hold {
        let hold = self.take_hold(step, key, holder, (reason.clone(), lost));
        let lease = self.leases.lease_mut(holder).expect("a holder is live");
        let claim = lease.claims.remove(&hold.number.0);
        assert!(matches!(claim, Some(Claim::Hold(_))), "a lease knows its holds");
        for number in &hold.again {
            lease.claims.remove(number).expect("a lease knows its entries");
        }
        lease.again -= hold.again.len();
        if lease.own {
            self.forget_lease(holder);
            self.emit(step, EventKind::LeaseEnded { lease: holder, reason });
        }
        self.hand_over(step, key);
        hold
    }

    /// Takes a hold out of its key.
    pub(crate) fn take_hold(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        holder: LeaseId,
        (reason, lost): (EndReason, bool),
    ) -> Hold {
        self.raise(step);
        let entry = self.keys.entry_mut(key).expect("a held key is in the table");
        let hold = entry.holds.remove(&holder).expect("the caller knows the hold");
        entry.taken.give_back(hold.slots.as_slice());
        self.sum.sub(digest::hold(key, holder, &hold));
        self.claims -= 1 + hold.again.len();
        if hold.forced.is_some() {
            self.forced.remove(&hold.token.0);
        }
        let token = hold.token;
        self.emit(step, EventKind::Ended { key: key.to_vec(), lease: holder, token, reason });
        if lost && hold.delay_ms > 0 {
            self.begin_delay(step, key, &hold);
        }
        hold
    }

    /// Takes a waiter out of its key's queue.
    pub(crate) fn take_waiter(&mut self, key: &Key, lease: LeaseId) -> Waiter {
        let entry = self.keys.entry_mut(key).expect("a key with a waiter is in the table");
        let place = entry.places.remove(&lease).expect("a waiting lease has a place");
        let waiter = entry.queue.remove(&place).expect("a place has a waiter");
        self.sum.sub(digest::waiter(key, place, &waiter));
        self.own_waiters -= usize::from(waiter.own.is_some());
        self.claims -= 1;
        waiter
    }

    /// Takes a wait out of its live lease's claims.
    fn forget_wait(&mut self, lease: LeaseId, number: Number) -> Key {
        let lease = self.leases.lease_mut(lease).expect("a waiter's lease is live");
        lease.waits -= 1;
        match lease.claims.remove(&number.0) {
            Some(Claim::Wait(key)) => key,
            _ => unreachable!("a lease knows its waits"),
        }
    }

    fn settle_wait(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
    ) {
        let (memory, sum) = self.memory_of(lease);
        memory.settle(lease, number, outcome, sum);
        self.emit_wait_ended(step, key, lease, number, outcome);
    }

    pub(crate) fn emit_wait_ended(
        &self,
        step: &mut Step<'_>,
        key: &Key,
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
    ) {
        self.emit(step, EventKind::WaitEnded { key: key.to_vec(), lease, number, outcome });
    }

    pub(crate) fn time_out(
        &mut self,
        step: &mut Step<'_>,
        lease: LeaseId,
        number: Number,
    ) -> Outcome {
        let Some(found) = self.leases.get(&lease) else {
            return self.refusal(ErrorCode::LEASE_DEAD, Token(0));
        };
        if !matches!(found.claims.get(&number.0), Some(Claim::Wait(_))) {
            return self.refusal(ErrorCode::NOT_QUEUED, Token(0));
        }
        let revision: Revision = self.raise(step);
        let outcome = Outcome::TimedOut { revision };
        self.end_wait(step, lease, number, outcome);
        outcome
    }
}
