//! Acquire and cancel.

use alloc::vec::Vec;

use leasehold_protocol::command::{Caller, OwnLease, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Token};
use leasehold_protocol::limits::{LEASE_CLAIMS_MAX, QUEUE_LEN_MAX};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::planted;
use leasehold_protocol::shard::{
    check_delay_ms, check_key, check_mode, check_ttl_ms, check_value, check_wants,
};

use crate::blob::{Blob, Key, KeyRef};
use crate::digest;
use crate::memory::{Answer, Kind};
use crate::retry::{Ticket, check_acks, print_of_acquire, print_of_acquire_all, print_of_cancel};
use crate::state::{CLAIMS_MAX, State, Step, TOKEN_MAX};
use crate::table::{Claim, Hold, Waiter};

/// What an acquire asks for.
pub(crate) struct Request<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) mode: Mode,
    /// A semaphore's number of permits; 0 for a lock.
    pub(crate) limit: u32,
    pub(crate) reentrant: bool,
    pub(crate) own: Option<OwnLease>,
    pub(crate) value: &'a [u8],
    pub(crate) delay_ms: u32,
}

impl<'a> Request<'a> {
    /// An exclusive hold without options.
    pub(crate) fn plain(key: &'a [u8], own: Option<OwnLease>, value: &'a [u8]) -> Self {
        let (mode, limit, reentrant, delay_ms) = (Mode::EXCLUSIVE, 0, false, 0);
        Self { key, mode, limit, reentrant, own, value, delay_ms }
    }
}

/// What an admitted acquire gets.
pub(crate) enum Verdict {
    Grant,
    Queue,
    /// The lease holds it, and enters once more.
    Reenter,
    /// Refused for good.
    Refuse(ErrorCode, Token),
    /// Refused for now: not remembered, so that the same number may be sent again.
    Busy(ErrorCode),
}

fn check(request: &Request<'_>, caller: &Caller) -> Result<(), ErrorCode> {
    check_acks(caller)?;
    check_value(request.value)?;
    check_delay_ms(request.delay_ms)?;
    if let Some(own) = request.own {
        check_ttl_ms(own.ttl_ms.into())?;
    }
    Ok(())
}

impl State {
    /// The acquire of one lock, without options.
    pub(crate) fn acquire(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        request: &Request<'_>,
        wait_ms: u32,
    ) -> Outcome {
        let checked = check_key(request.key).and(check_mode(request.mode));
        if let Err(code) = checked.and(check(request, caller)) {
            return self.refusal(code, Token(0));
        }
        let print = print_of_acquire(request, wait_ms);
        self.acquire_checked(step, caller, request, (wait_ms, print))
    }

    /// The acquire with options, of one key or several.
    pub(crate) fn acquire_all(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        wants: &[Want],
        request: &Request<'_>,
        wait_ms: u32,
    ) -> Outcome {
        let own = request.own.is_some();
        if let Err(code) = check_wants(wants, own).and(check(request, caller)) {
            return self.refusal(code, Token(0));
        }
        let print = print_of_acquire_all(wants, request, wait_ms);
        let [Want { key, mode, limit, reentrant }] = wants else {
            return self.acquire_several(step, caller, wants, request, (wait_ms, print));
        };
        let request =
            Request { key, mode: *mode, limit: *limit, reentrant: *reentrant, ..*request };
        self.acquire_checked(step, caller, &request, (wait_ms, print))
    }

    fn acquire_checked(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        request: &Request<'_>,
        (wait_ms, print): (u32, u64),
    ) -> Outcome {
        let ticket = match self.admit(step, caller, Kind::Acquire, print) {
            Ok(ticket) => ticket,
            Err(outcome) => return outcome,
        };
        let key = KeyRef::new(request.key);
        match self.judge(ticket.lease, key, request, wait_ms) {
            Verdict::Busy(code) => self.refusal(code, Token(0)),
            Verdict::Refuse(code, token) => self.remember_refusal(step, ticket, code, token),
            Verdict::Grant => {
                self.raise(step);
                let key = self.shared_key(key);
                let waiter = waiter(ticket, request, wait_ms);
                let grant = self.grant(step, &key, request.limit, waiter);
                // Planted (G5): a grant at once is not remembered, so a retry is executed.
                if planted!("retry-applied-twice") {
                    return Outcome::Granted(grant);
                }
                self.remember(step, ticket, Outcome::Granted(grant))
            }
            Verdict::Reenter => {
                let key = self.shared_key(key);
                let grant = self.reenter(step, &key, ticket.lease, ticket.number);
                self.remember(step, ticket, Outcome::Granted(grant))
            }
            Verdict::Queue => {
                let key = self.shared_key(key);
                self.enqueue(step, ticket, &key, waiter(ticket, request, wait_ms))
            }
        }
    }

    fn judge(
        &self,
        caller: LeaseId,
        key: KeyRef<'_>,
        request: &Request<'_>,
        wait_ms: u32,
    ) -> Verdict {
        let key = self.keys.get(&key);
        if let Some(hold) = key.and_then(|key| key.holds.get(&caller)) {
            return self.judge_entry(caller, hold, request);
        }
        if key.is_some_and(|key| key.places.get(&caller).is_some()) {
            return Verdict::Refuse(ErrorCode::ALREADY_QUEUED, Token(0));
        }
        if self.last_token >= TOKEN_MAX {
            return Verdict::Refuse(ErrorCode::TOKENS_EXHAUSTED, Token(0));
        }
        if let Err((code, token)) = key.map_or(Ok(()), |key| key.check_limit(request.limit)) {
            return Verdict::Refuse(code, token);
        }
        let free = key.is_none_or(|key| key.is_free_for(request.mode));
        if !free && wait_ms == 0 {
            if let Some(token) = key.and_then(|key| key.delayed_by(request.mode)) {
                return Verdict::Refuse(ErrorCode::DELAYED, token);
            }
            let token = key.map_or(Token(0), |key| key.present_token());
            return Verdict::Refuse(ErrorCode::HELD, token);
        }
        if self.claims >= CLAIMS_MAX {
            return Verdict::Busy(ErrorCode::BUSY);
        }
        let lease = self.leases.get(&caller).expect("the caller was admitted");
        if lease.claims.len() >= LEASE_CLAIMS_MAX {
            return Verdict::Busy(ErrorCode::LEASE_FULL);
        }
        if request.own.is_some() && !self.has_room_for_lease() {
            return Verdict::Busy(ErrorCode::LEASES_FULL);
        }
        if free {
            return Verdict::Grant;
        }
        if key.is_some_and(|key| key.queue.len() >= QUEUE_LEN_MAX) {
            return Verdict::Busy(ErrorCode::QUEUE_FULL);
        }
        if !lease.memory.has_room_to_wait() {
            return Verdict::Busy(ErrorCode::WINDOW_FULL);
        }
        Verdict::Queue
    }

    /// What an acquire of a key gets that its own lease holds.
    fn judge_entry(&self, caller: LeaseId, hold: &Hold, request: &Request<'_>) -> Verdict {
        let covers = hold.mode == request.mode
            || (hold.mode == Mode::EXCLUSIVE && request.mode == Mode::SHARED);
        let lease = self.leases.get(&caller).expect("the caller was admitted");
        if !request.reentrant || request.own.is_some() || !covers {
            Verdict::Refuse(ErrorCode::ALREADY_HELD, hold.token)
        } else if hold.forced.is_some() {
            Verdict::Refuse(ErrorCode::HOLD_FORCED, hold.token)
        } else if self.claims >= CLAIMS_MAX {
            Verdict::Busy(ErrorCode::BUSY)
        } else if lease.claims.len() >= LEASE_CLAIMS_MAX {
            Verdict::Busy(ErrorCode::LEASE_FULL)
        } else {
            Verdict::Reenter
        }
    }

    /// The key's one shared copy, or a new one for a key that is not in the table yet.
    pub(crate) fn shared_key(&self, key: KeyRef<'_>) -> Key {
        self.keys.get_entry(&key).map_or_else(|| key.to_key(), |(key, _)| key.clone())
    }

    fn enqueue(
        &mut self,
        step: &mut Step<'_>,
        ticket: Ticket,
        key: &Key,
        waiter: Waiter,
    ) -> Outcome {
        let revision = self.raise(step);
        let event = EventKind::Queued {
            key: key.to_vec(),
            lease: ticket.lease,
            number: ticket.number,
            wait_ms: waiter.wait_ms,
            mode: waiter.mode,
        };
        let position = self.line_up(key, waiter);
        self.remember_waiting(step, ticket);
        self.emit(step, event);
        Outcome::Queued { position, revision }
    }

    /// Puts a waiter at the end of a queue; returns how many are before it.
    pub(crate) fn line_up(&mut self, key: &Key, waiter: Waiter) -> u32 {
        self.own_waiters += usize::from(waiter.own.is_some());
        self.claims += 1;
        let (lease, id) = (waiter.lease, (waiter.number.0, waiter.part));
        let entry = self.keys.entry_mut(key).expect("a key with a waiter is in the table");
        let position = entry.queue.len() as u32;
        let place = entry.queue.last().map_or(0, |(place, _)| *place + 1);
        self.sum.add(digest::waiter(key, place, &waiter));
        entry.queue.insert(place, waiter);
        entry.places.insert(lease, place);
        let lease = self.leases.lease_mut(lease).expect("the caller was admitted");
        lease.claims.insert(id, Claim::Wait(key.clone()));
        lease.waits += 1;
        position
    }

    pub(crate) fn cancel(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        release_if_granted: bool,
    ) -> Outcome {
        if let Err(code) = check_acks(caller) {
            return self.refusal(code, Token(0));
        }
        let print = print_of_cancel(release_if_granted);
        let ticket = match self.admit(step, caller, Kind::Cancel, print) {
            Ok(ticket) => ticket,
            Err(outcome) => return outcome,
        };
        let revision = self.raise(step);
        let acquire = Number(ticket.number.0 - 1);
        let lease = self.leases.get(&ticket.lease).expect("the caller was admitted");
        let outcome = match lease.memory.get(acquire) {
            None if acquire.0 > lease.memory.floor => {
                // Planted (G5): the acquire that comes after its cancel is executed.
                if !planted!("early-cancel-forgotten") {
                    self.forestall(step, ticket.lease, acquire);
                }
                Outcome::Cancelled { revision }
            }
            Some(record) if record.kind == Kind::Acquire => match record.answer {
                Answer::Waiting => {
                    let outcome = Outcome::Cancelled { revision };
                    self.end_wait(step, ticket.lease, acquire, outcome);
                    outcome
                }
                Answer::Done(Outcome::Granted(grant)) => {
                    self.cancel_grant(step, acquire, grant, release_if_granted)
                }
                Answer::Done(outcome) => outcome,
            },
            _ => self.refusal(ErrorCode::NOT_QUEUED, Token(0)),
        };
        self.remember(step, ticket, outcome)
    }

    /// The cancel came after the grant. If the hold is over, nothing is left of the acquire.
    fn cancel_grant(
        &mut self,
        step: &mut Step<'_>,
        acquire: Number,
        grant: Grant,
        release: bool,
    ) -> Outcome {
        let lease = self.leases.get(&grant.lease);
        // Whoever made it a hold with another token has read this grant.
        let same = |(part, key): &(u32, &Key)| {
            self.token_of(key, grant.lease).0 == grant.token.0 + u64::from(*part)
        };
        let claims = lease.iter().flat_map(|lease| lease.claims_of(acquire));
        let held = claims.map(|(part, claim)| (part, claim.key())).filter(same);
        let held: Vec<Key> = held.map(|(_, key)| key.clone()).collect();
        if held.is_empty() {
            return self.refusal(ErrorCode::NOT_QUEUED, Token(0));
        }
        if !release {
            return Outcome::Granted(grant);
        }
        self.give_back_all(step, held, grant.lease, acquire)
    }
}

fn waiter(ticket: Ticket, request: &Request<'_>, wait_ms: u32) -> Waiter {
    Waiter {
        lease: ticket.lease,
        number: ticket.number,
        part: 0,
        parts: 1,
        mode: request.mode,
        own: request.own,
        value: Blob::new(request.value),
        wait_ms,
        delay_ms: request.delay_ms,
    }
}
