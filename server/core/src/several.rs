//! Acquires of several keys at once: all of them or none.
//!
//! Such an acquire has a place in the queue of each of its keys, taken in one step. So of two of
//! them the same one is first wherever they meet, and they never wait for each other in a circle.
//! It is granted in one step when it is the first of every queue and every key admits it; until
//! then it holds nothing, and nobody overtakes it. What ends one of its waits ends all.
//!
//! Each hold is a hold of its own afterwards: it is released, forced or converted by itself, with a
//! token of its own. The tokens of one grant follow each other in the order of the request's keys,
//! so that the first tells all.

use alloc::rc::Rc;
use alloc::vec::Vec;

use leasehold_protocol::command::{Caller, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{EndReason, EventKind};
use leasehold_protocol::ids::{LeaseId, Number, Revision, Token};
use leasehold_protocol::limits::{LEASE_CLAIMS_MAX, QUEUE_LEN_MAX};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;

use crate::acquire::{Request, Verdict};
use crate::blob::{Blob, Key, KeyRef};
use crate::digest;
use crate::memory::Kind;
use crate::retry::{Ticket, check_acks, print_of_release_all};
use crate::state::{CLAIMS_MAX, State, Step, TOKEN_MAX};
use crate::table::{Claim, KeyState, Waiter};

impl State {
    /// The keys that an acquire holds or waits for, in the order of its request.
    pub(crate) fn keys_of(&self, lease: LeaseId, number: Number) -> Vec<Key> {
        let lease = self.leases.get(&lease);
        let claims = lease.iter().flat_map(|lease| lease.claims_of(number));
        claims.map(|(_, claim)| claim.key().clone()).collect()
    }

    /// The acquire of several keys; their form was checked.
    pub(crate) fn acquire_several(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        wants: &[Want],
        request: &Request<'_>,
        (wait_ms, print): (u32, u64),
    ) -> Outcome {
        let ticket = match self.admit(step, caller, Kind::Acquire, print) {
            Ok(ticket) => ticket,
            Err(outcome) => return outcome,
        };
        let verdict = self.judge_several(ticket.lease, wants, wait_ms);
        let parts = || {
            let all = (0..).zip(wants);
            all.map(|(part, want)| (want, self.part_of(ticket, (part, wants), request, wait_ms)))
        };
        match verdict {
            Verdict::Busy(code) => self.refusal(code, Token(0)),
            Verdict::Refuse(code, token) => self.remember_refusal(step, ticket, code, token),
            Verdict::Grant => {
                let parts =
                    parts().map(|(want, (key, waiter))| (key, want.limit, waiter)).collect();
                let grant = self.grant_all(step, parts);
                self.remember(step, ticket, Outcome::Granted(grant))
            }
            Verdict::Queue => {
                let parts =
                    parts().map(|(want, (key, waiter))| (key, want.limit, waiter)).collect();
                self.enqueue_all(step, ticket, parts)
            }
            Verdict::Reenter => unreachable!("of several keys none is re-entered"),
        }
    }

    /// One key of the request, and the waiter that stands for it.
    fn part_of(
        &self,
        ticket: Ticket,
        (part, wants): (u32, &[Want]),
        request: &Request<'_>,
        wait_ms: u32,
    ) -> (Key, Waiter) {
        let want = &wants[part as usize];
        let waiter = Waiter {
            lease: ticket.lease,
            number: ticket.number,
            part,
            parts: wants.len() as u32,
            mode: want.mode,
            own: None,
            value: Blob::new(request.value),
            wait_ms,
            delay_ms: request.delay_ms,
        };
        (self.shared_key(KeyRef::new(&want.key)), waiter)
    }

    fn judge_several(&self, caller: LeaseId, wants: &[Want], wait_ms: u32) -> Verdict {
        let keys = || wants.iter().map(|want| (want, self.keys.get(&KeyRef::new(&want.key))));
        let in_use = || keys().filter_map(|(want, key)| Some((want, &**key?)));
        for (want, key) in in_use() {
            if let Some(hold) = key.holds.get(&caller) {
                return Verdict::Refuse(ErrorCode::ALREADY_HELD, hold.token);
            }
            if key.places.get(&caller).is_some() {
                return Verdict::Refuse(ErrorCode::ALREADY_QUEUED, Token(0));
            }
            if let Err((code, token)) = key.check_limit(want.limit) {
                return Verdict::Refuse(code, token);
            }
        }
        if self.last_token > TOKEN_MAX - wants.len() as u64 {
            return Verdict::Refuse(ErrorCode::TOKENS_EXHAUSTED, Token(0));
        }
        let mut free = in_use().all(|(want, key)| key.is_free_for(want.mode));
        // Planted (G1): that one of several keys is free is enough.
        free |= planted!("several-for-one") && in_use().count() < wants.len();
        if !free && wait_ms == 0 {
            let taken = in_use().filter(|(want, key)| !key.is_free_for(want.mode));
            return refusal_of_try(taken);
        }
        if self.claims + wants.len() > CLAIMS_MAX {
            return Verdict::Busy(ErrorCode::BUSY);
        }
        let lease = self.leases.get(&caller).expect("the caller was admitted");
        if lease.claims.len() + wants.len() > LEASE_CLAIMS_MAX {
            return Verdict::Busy(ErrorCode::LEASE_FULL);
        }
        if free {
            return Verdict::Grant;
        }
        if in_use().any(|(_, key)| key.queue.len() >= QUEUE_LEN_MAX) {
            return Verdict::Busy(ErrorCode::QUEUE_FULL);
        }
        if !lease.memory.has_room_to_wait() {
            return Verdict::Busy(ErrorCode::WINDOW_FULL);
        }
        Verdict::Queue
    }

    fn enqueue_all(
        &mut self,
        step: &mut Step<'_>,
        ticket: Ticket,
        parts: Vec<(Key, u32, Waiter)>,
    ) -> Outcome {
        let revision = self.raise(step);
        let mut position = 0;
        for (key, limit, waiter) in parts {
            let event = EventKind::Queued {
                key: key.to_vec(),
                lease: ticket.lease,
                number: ticket.number,
                wait_ms: waiter.wait_ms,
                mode: waiter.mode,
            };
            self.entry_to_wait(&key, limit);
            position = position.max(self.line_up(&key, waiter));
            self.emit(step, event);
        }
        self.remember_waiting(step, ticket);
        Outcome::Queued { position, revision }
    }

    /// Makes the key's entry if there is none: it may be free while another of the keys is not.
    fn entry_to_wait(&mut self, key: &Key, limit: u32) {
        if self.keys.get(key).is_none() {
            let entry = KeyState { limit, ..KeyState::default() };
            self.sum.add(digest::own(key, &entry));
            self.keys.insert(key.clone(), Rc::new(entry));
            self.names.insert(key.name().clone(), ());
        }
    }

    /// Whether this head of a queue may be granted: of several keys it must be the head of all.
    pub(crate) fn is_satisfiable(&self, head: &Waiter) -> bool {
        let Some(lease) = self.leases.get(&head.lease) else { return false };
        lease.claims_of(head.number).all(|(_, claim)| {
            let entry = self.keys.get(claim.key()).expect("a claimed key is in the table");
            let place = entry.places.get(&head.lease).expect("a waiting lease has a place");
            let (first, _) = entry.queue.first().expect("a place has a waiter");
            let waiter = entry.queue.get(place).expect("a place has a waiter");
            // Planted (G4): it passes by who came before in the queues of its other keys.
            (first == place || planted!("several-past-a-queue")) && entry.admits(waiter.mode)
        })
    }

    /// Grants to a satisfiable waiter for several keys. `others` gets those keys, for the queues
    /// behind it to be looked at again.
    pub(crate) fn serve_several(
        &mut self,
        step: &mut Step<'_>,
        (lease, number): (LeaseId, Number),
        others: &mut Vec<Key>,
    ) {
        let keys = self.keys_of(lease, number);
        let mut parts = Vec::with_capacity(keys.len());
        for key in &keys {
            let waiter = self.take_waiter(key, lease);
            self.forget_wait(lease, (number.0, waiter.part));
            let limit = self.keys.get(key).map_or(0, |entry| entry.limit);
            parts.push((key.clone(), limit, waiter));
        }
        let outcome = if self.last_token <= TOKEN_MAX - parts.len() as u64 {
            Outcome::Granted(self.grant_all(step, parts))
        } else {
            self.refusal(ErrorCode::TOKENS_EXHAUSTED, Token(0))
        };
        self.settle_wait(step, &keys, lease, number, outcome);
        others.extend(keys);
    }

    pub(crate) fn release_all(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        acquire: Number,
    ) -> Outcome {
        if let Err(code) = check_acks(caller) {
            return self.refusal(code, Token(0));
        }
        let print = print_of_release_all(acquire);
        let ticket = match self.admit(step, caller, Kind::Release, print) {
            Ok(ticket) => ticket,
            Err(outcome) => return outcome,
        };
        let lease = self.leases.get(&ticket.lease).expect("the caller was admitted");
        let held = lease.claims_of(acquire).filter(|(_, claim)| !matches!(claim, Claim::Wait(_)));
        let held: Vec<Key> = held.map(|(_, claim)| claim.key().clone()).collect();
        if held.is_empty() {
            return self.remember_refusal(step, ticket, ErrorCode::NOT_OWNER, Token(0));
        }
        let outcome = self.give_back_all(step, held, ticket.lease, acquire);
        // Who gives it back knows that it was granted.
        let (memory, sum) = self.memory_of(ticket.lease);
        memory.read_otherwise(ticket.lease, acquire, sum);
        self.remember(step, ticket, outcome)
    }

    /// Gives up this acquire's entry of each of these holds; the outcome is the first one's.
    pub(crate) fn give_back_all(
        &mut self,
        step: &mut Step<'_>,
        keys: Vec<Key>,
        holder: LeaseId,
        acquire: Number,
    ) -> Outcome {
        let revision = self.raise(step);
        let mut first = None;
        for key in &keys {
            let outcome = self.give_back_one(step, key, holder, acquire, revision);
            first = first.or(Some(outcome));
        }
        self.hand_over_all(step, keys);
        first.expect("there is a key to give back")
    }

    fn give_back_one(
        &mut self,
        step: &mut Step<'_>,
        key: &Key,
        holder: LeaseId,
        acquire: Number,
        revision: Revision,
    ) -> Outcome {
        if let Some((_, outcome)) = self.leave(step, key, holder, acquire) {
            return outcome;
        }
        let hold = self.finish_hold(step, key, holder, (EndReason::Released, false));
        Outcome::Released { token: hold.token, revision }
    }
}

/// What an acquire that does not wait is told of the keys that keep it out.
fn refusal_of_try<'a>(taken: impl Iterator<Item = (&'a Want, &'a KeyState)>) -> Verdict {
    let mut delayed = None;
    for (want, key) in taken {
        match key.delayed_by(want.mode) {
            None => return Verdict::Refuse(ErrorCode::HELD, key.present_token()),
            Some(token) => delayed = delayed.or(Some(token)),
        }
    }
    Verdict::Refuse(ErrorCode::DELAYED, delayed.expect("a key keeps it out"))
}
