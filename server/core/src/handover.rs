//! The queue at work: granting, ending holds and waits, and passing keys on.
//!
//! Every function here that takes a hold or a waiter away is followed by `hand_over` of its key in
//! the same step, so that a key's queue never has a satisfiable head between two commands. The
//! order of a step's events is: what ended, then what was granted because of it.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::slice::from_ref;
use core::sync::atomic::{AtomicU64, Ordering};

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Revision, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::planted;

use crate::blob::{Blob, Key};
use crate::digest;
use crate::state::{State, Step, TOKEN_MAX};
use crate::table::{Claim, ClaimId, Hold, KeyState, Lease, Waiter};

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
        let (before, holder) = self.begin_grant(step, &acquire);
        let (token, floor) = self.take_place(step, key, limit, holder, acquire);
        self.told_grant(holder, (token, floor), before)
    }

    /// The same for an acquire of several keys: their limits and waiters.
    pub(crate) fn grant_all(
        &mut self,
        step: &mut Step<'_>,
        parts: Vec<(Key, u32, Waiter)>,
    ) -> Grant {
        let (before, holder) = self.begin_grant(step, &parts[0].2);
        let mut first = None;
        for (key, limit, waiter) in parts {
            let place = self.take_place(step, &key, limit, holder, waiter);
            first = first.or(Some(place));
        }
        self.told_grant(holder, first.expect("a grant is of some key"), before)
    }

    /// Raises the hold-set version of the session that asked and mints the lease that the hold is to
    /// have of its own. Returns the version before, and who holds.
    fn begin_grant(&mut self, step: &mut Step<'_>, acquire: &Waiter) -> (u64, LeaseId) {
        self.raise(step);
        let (before, label) = self.edit_lease(acquire.lease, |lease, _| {
            lease.version += 1;
            (lease.version - 1, lease.label.clone())
        });
        let Some(own) = acquire.own else { return (before, acquire.lease) };
        let mut lease = Lease::new(own.ttl_ms, own.secret, label, true);
        lease.version = 1;
        (before, self.mint(step, lease))
    }

    fn told_grant(&self, lease: LeaseId, (token, floor): (Token, Token), before: u64) -> Grant {
        Grant {
            lease,
            token,
            revision: Revision(self.revision),
            version_before: HoldSetVersion(before),
            version_after: HoldSetVersion(before + 1),
            floor,
        }
    }

    /// Makes the hold. Returns its token and floor.
    fn take_place(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        limit: u32,
        holder: LeaseId,
        acquire: Waiter,
    ) -> (Token, Token) {
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
        let Waiter { number, part, mode, value, delay_ms, .. } = acquire;
        let lease = self.leases.lease_mut(holder).expect("who is granted to is live");
        lease.claims.insert((number.0, part), Claim::Hold(key.clone()));
        self.claims += 1;
        let entry = self.entry_to_grant(key);
        assert!(!entry.is_taken() || entry.limit == limit, "a semaphore has one limit at a time");
        entry.limit = limit;
        assert!(entry.admits(mode), "incompatible holds never meet (G1)");
        let permits = mode.permit_count().unwrap_or(0);
        let room = entry.room();
        let slots = entry.taken.take_lowest(permits, room);
        entry.floor = if mode == Mode::EXCLUSIVE { 0 } else { floor.0 };
        let hold = Hold {
            token,
            mode,
            number,
            part,
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
        let key = key.to_vec();
        let event = EventKind::Granted { key, lease: holder, mode, token, slots, limit };
        self.emit(step, event);
        (token, floor)
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
    /// holds it and nobody waits (G4). A grant of several keys has all their queues looked at.
    pub(crate) fn hand_over(&mut self, step: &mut Step<'_>, key: &Key) {
        let mut others = Vec::new();
        self.serve(step, key, &mut others);
        self.hand_over_all(step, others);
    }

    /// The same for several keys, one after the other.
    pub(crate) fn hand_over_all(&mut self, step: &mut Step<'_>, mut keys: Vec<Key>) {
        let mut next = 0;
        while let Some(key) = keys.get(next).cloned() {
            next += 1;
            self.serve(step, &key, &mut keys);
        }
    }

    /// Serves one queue. `others` gets the keys whose queues may have become satisfiable by that.
    fn serve(&mut self, step: &mut Step<'_>, key: &Key, others: &mut Vec<Key>) {
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
            if head.parts > 1 {
                if !self.is_satisfiable(head) {
                    return;
                }
                self.serve_several(step, (lease, number), others);
                continue;
            }
            let waiter = self.take_waiter(key, lease);
            self.forget_wait(lease, (number.0, 0));
            let outcome = if self.last_token < TOKEN_MAX {
                Outcome::Granted(self.grant(step, key, limit, waiter))
            } else {
                self.refusal(ErrorCode::TOKENS_EXHAUSTED, Token(0))
            };
            self.settle_wait(step, from_ref(key), lease, number, outcome);
        }
    }

    /// Ends a live lease's wait and passes its keys on if that lets anybody in.
    pub(crate) fn end_wait(
        &mut self,
        step: &mut Step<'_>,
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
    ) {
        let keys = self.drop_wait(step, lease, number, outcome);
        // Planted (G4): shared waiters behind a cancelled writer wait on.
        if !planted!("cancelled-writer-blocks") {
            self.hand_over_all(step, keys);
        }
    }

    /// Ends a live lease's wait; passing its keys on is the caller's to do.
    pub(crate) fn drop_wait(
        &mut self,
        step: &mut Step<'_>,
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
    ) -> Vec<Key> {
        let keys = self.keys_of(lease, number);
        for key in &keys {
            let waiter = self.take_waiter(key, lease);
            self.forget_wait(lease, (number.0, waiter.part));
        }
        self.settle_wait(step, &keys, lease, number, outcome);
        keys
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
        let hold = self.finish_hold(step, key, holder, (reason, lost));
        self.hand_over(step, key);
        hold
    }

    /// The same without passing the key on, which is the caller's to do.
    pub(crate) fn finish_hold(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        holder: LeaseId,
        (reason, lost): (EndReason, bool),
    ) -> Hold {
        let hold = self.take_hold(step, key, holder, (reason.clone(), lost));
        let label = self.leases.get(&holder).map(|lease| lease.label.clone());
        self.remember_end(step, (key, holder, &label.unwrap_or_default()), &hold, &reason);
        let lease = self.leases.lease_mut(holder).expect("a holder is live");
        let claim = lease.claims.remove(&(hold.number.0, hold.part));
        assert!(matches!(claim, Some(Claim::Hold(_))), "a lease knows its holds");
        for number in &hold.again {
            lease.claims.remove(&(*number, 0)).expect("a lease knows its entries");
        }
        lease.again -= hold.again.len();
        if lease.own {
            self.forget_lease(holder);
            self.emit(step, EventKind::LeaseEnded { lease: holder, reason });
        }
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
        // Planted (G3): a hold that its client gave back leaves its delay behind.
        if (lost || planted!("delay-after-a-release")) && hold.delay_ms > 0 {
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
    pub(crate) fn forget_wait(&mut self, lease: LeaseId, id: ClaimId) {
        let lease = self.leases.lease_mut(lease).expect("a waiter's lease is live");
        lease.waits -= 1;
        let claim = lease.claims.remove(&id);
        assert!(matches!(claim, Some(Claim::Wait(_))), "a lease knows its waits");
    }

    pub(crate) fn settle_wait(
        &mut self,
        step: &mut Step<'_>,
        keys: &[Key],
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
    ) {
        let (memory, sum) = self.memory_of(lease);
        memory.settle(lease, number, outcome, sum);
        for key in keys {
            self.emit_wait_ended(step, key, lease, number, outcome);
        }
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
        if !matches!(found.claims_of(number).next(), Some((_, Claim::Wait(_)))) {
            return self.refusal(ErrorCode::NOT_QUEUED, Token(0));
        }
        let revision: Revision = self.raise(step);
        let outcome = Outcome::TimedOut { revision };
        self.end_wait(step, lease, number, outcome);
        outcome
    }
}
