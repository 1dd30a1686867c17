//! Admission of numbered commands: who may act, what is a retry, what is remembered (G5).
//!
//! The order is fixed: the body is validated first (a malformed one is refused the same way for
//! ever, so it needs no memory); then lease and secret; then floor and acknowledgements take
//! effect, whatever becomes of the command itself; then the number decides. A command that was
//! executed is remembered with its outcome, refusals included, except those of the class
//! `Retryable` (queue or table full): the same number may be sent again and then be executed.

use alloc::rc::Rc;

use leasehold_protocol::command::{Caller, OwnLease, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Revision, Token};
use leasehold_protocol::limits::ACKS_MAX;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;

use crate::acquire::Request;
use crate::blob::Blob;
use crate::digest;
use crate::hash::{Mix, Sum};
use crate::lifecycle::same_secret;
use crate::memory::{Answer, Kind, Memory, Record};
use crate::state::{State, Step};
use crate::table::{Claim, Lease};

/// Numbers that an acquire reserves after its own: its cancel and its release.
pub(crate) const RESERVED: u64 = 2;

/// What came of a number.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) lease: LeaseId,
    pub(crate) number: Number,
    kind: Kind,
    print: u64,
}

pub(crate) fn check_acks(caller: &Caller) -> Result<(), ErrorCode> {
    if caller.acks.len() > ACKS_MAX { Err(ErrorCode::TOO_MANY_ITEMS) } else { Ok(()) }
}

impl State {
    /// Lets a numbered command pass to its execution, or says what it is answered instead.
    pub(crate) fn admit(
        &mut self,
        step: &mut Step<'_>,
        caller: &Caller,
        kind: Kind,
        print: u64,
    ) -> Result<Ticket, Outcome> {
        // Planted (G1): a command brings the dead lease that it names back to life.
        if planted!("revived-lease")
            && caller.lease.0 <= self.last_lease
            && self.leases.get(&caller.lease).is_none()
        {
            self.raise(step);
            let mut lease = Lease::new(5_000, caller.secret, Blob::new(b""), false);
            lease.base = digest::lease_base(caller.lease, &lease);
            self.sum.add(digest::lease(&lease));
            self.leases.insert(caller.lease, Rc::new(lease));
        }
        let Some(lease) = self.leases.lease_mut(caller.lease) else {
            return Err(self.refusal(ErrorCode::LEASE_DEAD, Token(0)));
        };
        if !same_secret(&lease.secret, &caller.secret) {
            return Err(self.refusal(ErrorCode::BAD_SECRET, Token(0)));
        }
        if lease.own {
            // Numbered commands belong to sessions: an own lease is a hold's and has no memory.
            return Err(self.refusal(ErrorCode::LEASE_DEAD, Token(0)));
        }
        let acknowledged = acknowledge(lease, caller, &mut self.sum);
        let remembered = lease.memory.get(caller.number).copied();
        let allowed = check_number(lease, caller.number, kind);
        if acknowledged {
            self.raise(step);
        }
        match remembered {
            Some(record) if record.is_retried_by(kind, print) => {
                Err(self.present(caller.lease, caller.number, &record))
            }
            Some(_) => Err(self.refusal(ErrorCode::NUMBER_CONFLICT, Token(0))),
            None => match allowed {
                Ok(()) => Ok(Ticket { lease: caller.lease, number: caller.number, kind, print }),
                Err(code) => Err(self.refusal(code, Token(0))),
            },
        }
    }

    /// What a retry of a remembered command is told now.
    pub(crate) fn present(&self, lease: LeaseId, number: Number, record: &Record) -> Outcome {
        match record.answer {
            Answer::Done(outcome) => outcome,
            Answer::Waiting => {
                let position = self.position(lease, number).expect("a waiting acquire is queued");
                Outcome::Queued { position, revision: Revision(self.revision) }
            }
        }
    }

    /// Waiters before this one; of several keys, the largest number.
    fn position(&self, lease: LeaseId, number: Number) -> Option<u32> {
        let claims = self.leases.get(&lease)?.claims_of(number);
        let positions = claims.filter_map(|(_, claim)| {
            let key = self.keys.get(claim.key())?;
            Some(key.queue.rank(key.places.get(&lease)?) as u32)
        });
        positions.max()
    }

    /// Remembers an executed command and returns its outcome.
    pub(crate) fn remember(
        &mut self,
        step: &mut Step<'_>,
        ticket: Ticket,
        outcome: Outcome,
    ) -> Outcome {
        self.record(step, ticket, Answer::Done(outcome), false);
        outcome
    }

    /// Remembers a refusal that belongs to this number for ever.
    pub(crate) fn remember_refusal(
        &mut self,
        step: &mut Step<'_>,
        ticket: Ticket,
        code: ErrorCode,
        token: Token,
    ) -> Outcome {
        self.raise(step);
        let refusal = self.refusal(code, token);
        self.remember(step, ticket, refusal)
    }

    /// Remembers that an acquire waits.
    pub(crate) fn remember_waiting(&mut self, step: &mut Step<'_>, ticket: Ticket) {
        self.record(step, ticket, Answer::Waiting, true);
    }

    /// Writes the memory of an acquire whose cancel came first.
    pub(crate) fn forestall(&mut self, step: &mut Step<'_>, lease: LeaseId, number: Number) {
        self.raise(step);
        let answer = Answer::Done(self.refusal(ErrorCode::CANCELLED, Token(0)));
        let ticket = Ticket { lease, number, kind: Kind::Forestalled, print: 0 };
        self.record(step, ticket, answer, false);
    }

    fn record(&mut self, step: &mut Step<'_>, ticket: Ticket, answer: Answer, keep: bool) {
        self.raise(step);
        let record = Record { kind: ticket.kind, print: ticket.print, answer, keep };
        let memory = self.memory_of(ticket.lease);
        memory.0.put(ticket.lease, ticket.number, record, memory.1);
    }

    /// A session's memory, which is no part of the lease's own digest item, and the sum to keep.
    pub(crate) fn memory_of(&mut self, lease: LeaseId) -> (&mut Memory, &mut Sum) {
        let lease = self.leases.lease_mut(lease).expect("the caller knows the lease to be live");
        (&mut lease.memory, &mut self.sum)
    }
}

/// Raises the floor and takes acknowledgements. Returns true if anything changed.
fn acknowledge(lease: &mut Lease, caller: &Caller, sum: &mut Sum) -> bool {
    if caller.floor.0 <= lease.memory.floor && caller.acks.is_empty() {
        return false;
    }
    sum.sub(digest::lease(lease));
    let changed = lease.memory.acknowledge(caller.lease, caller.floor, &caller.acks, sum);
    sum.add(digest::lease(lease));
    changed
}

/// Whether a number without a memory may be executed.
fn check_number(lease: &Lease, number: Number, kind: Kind) -> Result<(), ErrorCode> {
    let memory = &lease.memory;
    if number.0 > memory.floor {
        let reserved = if kind == Kind::Acquire { RESERVED } else { 0 };
        return if memory.in_window(number, reserved) {
            Ok(())
        } else {
            Err(ErrorCode::NUMBER_BEYOND_WINDOW)
        };
    }
    let below = |distance| number.0.checked_sub(distance);
    let is_reserved = match kind {
        Kind::Cancel => below(1)
            .and_then(|acquire| memory.records.get(&acquire))
            .is_some_and(|record| record.kind == Kind::Acquire),
        Kind::Release => below(RESERVED)
            .and_then(|acquire| lease.claims_of(Number(acquire)).next())
            .is_some_and(|(_, claim)| matches!(claim, Claim::Hold(_) | Claim::Again(_))),
        Kind::Acquire | Kind::Forestalled | Kind::Convert | Kind::SetValue => false,
    };
    if is_reserved { Ok(()) } else { Err(ErrorCode::NUMBER_BELOW_FLOOR) }
}

/// Hash of an acquire's body.
pub(crate) fn print_of_acquire(request: &Request<'_>, wait_ms: u32) -> u64 {
    let mix = Mix::new(1).bytes(request.key).word(request.mode.0.into());
    let mix = mix.word(wait_ms.into()).bytes(request.value);
    match request.own {
        None => mix.done(),
        Some(OwnLease { ttl_ms, secret }) => mix.word(ttl_ms.into()).bytes(&secret.0).done(),
    }
}

/// Hash of a cancel's body.
pub(crate) fn print_of_cancel(release_if_granted: bool) -> u64 {
    Mix::new(2).word(release_if_granted.into()).done()
}

/// Hash of a release's body.
pub(crate) fn print_of_release(key: &[u8], token: Token) -> u64 {
    Mix::new(3).bytes(key).word(token.0).done()
}

/// Hash of the body of a release of all that an acquire holds.
pub(crate) fn print_of_release_all(acquire: Number) -> u64 {
    Mix::new(7).word(acquire.0).done()
}

/// Hash of a change of mode.
pub(crate) fn print_of_convert(key: &[u8], token: Token, mode: Mode) -> u64 {
    Mix::new(4).bytes(key).word(token.0).word(mode.0.into()).done()
}

/// Hash of the body of an acquire with options.
pub(crate) fn print_of_acquire_all(wants: &[Want], request: &Request<'_>, wait_ms: u32) -> u64 {
    let mix = wants.iter().fold(Mix::new(5), |mix, want| {
        let mix = mix.bytes(&want.key).word(want.mode.0.into());
        mix.word(want.limit.into()).word(want.reentrant.into())
    });
    let mix = mix.word(wait_ms.into()).word(request.delay_ms.into()).bytes(request.value);
    match request.own {
        None => mix.done(),
        Some(OwnLease { ttl_ms, secret }) => mix.word(ttl_ms.into()).bytes(&secret.0).done(),
    }
}

/// Hash of a change of value.
pub(crate) fn print_of_set_value(key: &[u8], token: Token, value: &[u8]) -> u64 {
    Mix::new(6).bytes(key).word(token.0).bytes(value).done()
}
