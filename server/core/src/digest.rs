//! What of the state enters its digest: one hash per item, summed.
//!
//! Left out are indexes that follow from the items (a lease's claims, a key's places, the table of
//! forced holds, counters), which `invariants::check` compares instead.

use leasehold_protocol::event::EndReason;
use leasehold_protocol::ids::{LeaseId, Token};
use leasehold_protocol::outcome::{Grant, Outcome};

use crate::hash::{Mix, Sum};
use crate::memory::{Answer, Kind, Record};
use crate::state::State;
use crate::table::{End, Ghost, Hold, KeyState, Lease, Waiter};

const STATE: u64 = 1;
const LEASE: u64 = 2;
const RECORD: u64 = 3;
const LATE_RECORD: u64 = 4;
const HOLD: u64 = 5;
const WAITER: u64 = 6;
const KEY: u64 = 7;
const GHOST: u64 = 8;
const END: u64 = 9;
/// Marks within an item, of parts that most items do not have.
const SLOTS: u64 = 0x51;
const DELAY: u64 = 0x52;
const AGAIN: u64 = 0x53;
const ASKED: u64 = 0x54;
const PART: u64 = 0x55;
const QUARANTINE: u64 = 0x58;

pub(crate) fn whole(state: &State, items: Sum) -> u64 {
    let mix = Mix::new(STATE)
        .word(state.shard.0.into())
        .word(state.revision)
        .word(state.begun.into())
        .word(state.last_token)
        .word(state.last_lease)
        .word(items.0);
    let mix = match state.quarantine_ms {
        0 => mix,
        quarantine_ms => mix.word(QUARANTINE).word(quarantine_ms.into()),
    };
    match state.members.print() {
        0 => mix.done(),
        print => mix.word(print).done(),
    }
}

/// The sum over a lease and its retry memory.
pub(crate) fn lease_and_memory(id: LeaseId, item: &Lease) -> Sum {
    let mut sum = Sum::default();
    sum.add(lease(item));
    for (number, item) in item.memory.records.iter() {
        sum.add(record(id, *number, item));
    }
    for (number, item) in item.memory.late.iter() {
        sum.add(late_record(id, *number, item));
    }
    sum
}

/// The sum over a key, its ghosts, holds and waiters.
pub(crate) fn key(key: &[u8], item: &KeyState) -> Sum {
    let mut sum = Sum::default();
    sum.add(own(key, item));
    for (token, item) in item.ghosts.iter() {
        sum.add(ghost(key, Token(*token), item));
    }
    for (lease, item) in item.holds.iter() {
        sum.add(hold(key, *lease, item));
    }
    for (place, item) in item.queue.iter() {
        sum.add(waiter(key, *place, item));
    }
    sum
}

fn secret(mix: Mix, secret: &leasehold_protocol::ids::Secret) -> Mix {
    let whole = u128::from_le_bytes(secret.0);
    mix.word(whole as u64).word((whole >> 64) as u64)
}

/// The part of a lease's hash that never changes; kept in `Lease::base`.
pub(crate) fn lease_base(id: LeaseId, lease: &Lease) -> u64 {
    secret(Mix::new(LEASE), &lease.secret)
        .word(id.0)
        .word(u64::from(lease.ttl_ms) << 1 | u64::from(lease.own))
        .bytes(lease.label.as_slice())
        .done()
}

pub(crate) fn lease(lease: &Lease) -> u64 {
    Mix::new(lease.base).word(lease.version).word(lease.memory.floor).done()
}

pub(crate) fn record(lease: LeaseId, number: u64, record: &Record) -> u64 {
    remembered(Mix::new(RECORD), lease, number, record)
}

pub(crate) fn late_record(lease: LeaseId, number: u64, record: &Record) -> u64 {
    remembered(Mix::new(LATE_RECORD), lease, number, record)
}

fn remembered(mix: Mix, lease: LeaseId, number: u64, record: &Record) -> u64 {
    let kind = match record.kind {
        Kind::Acquire => 1,
        Kind::Forestalled => 2,
        Kind::Cancel => 3,
        Kind::Release => 4,
        Kind::Convert => 5,
        Kind::SetValue => 6,
    };
    let mix = mix.word(lease.0).word(number).word(record.print);
    let mix = mix.word(kind << 1 | u64::from(record.keep));
    match &record.answer {
        Answer::Waiting => mix.word(0).done(),
        Answer::Done(done) => outcome(mix, done).done(),
    }
}

fn outcome(mix: Mix, outcome: &Outcome) -> Mix {
    match *outcome {
        Outcome::Opened { lease, revision } => mix.word(1).word(lease.0).word(revision.0),
        Outcome::Granted(Grant {
            lease,
            token,
            revision,
            version_before,
            version_after,
            floor,
        }) => {
            let mix = mix.word(2).word(lease.0).word(token.0).word(revision.0);
            let mix = mix.word(version_before.0).word(version_after.0);
            // That of an exclusive grant says nothing new, and was no part of older digests.
            if floor == token { mix } else { mix.word(floor.0) }
        }
        Outcome::Queued { position, revision } => {
            mix.word(3).word(position.into()).word(revision.0)
        }
        Outcome::Cancelled { revision } => mix.word(4).word(revision.0),
        Outcome::TimedOut { revision } => mix.word(5).word(revision.0),
        Outcome::Released { token, revision } => mix.word(6).word(token.0).word(revision.0),
        Outcome::Closed { revision } => mix.word(7).word(revision.0),
        Outcome::Forced { token, passed_on, revision } => {
            mix.word(8).word(token.0).word(passed_on.into()).word(revision.0)
        }
        Outcome::Begun { revision } => mix.word(9).word(revision.0),
        Outcome::Refused { code, token, revision } => {
            mix.word(10).word(code.0.into()).word(token.0).word(revision.0)
        }
        Outcome::Members { version, operation, revision } => {
            mix.word(12).word(version).word(operation).word(revision.0)
        }
        Outcome::Changed { token, revision } => mix.word(11).word(token.0).word(revision.0),
    }
}

/// The key's own part: nothing for a lock that is held exclusively.
pub(crate) fn own(key: &[u8], item: &KeyState) -> u64 {
    if item.floor == 0 && item.limit == 0 {
        return 0;
    }
    Mix::new(KEY).bytes(key).word(item.floor).word(item.limit.into()).done()
}

pub(crate) fn ghost(key: &[u8], token: Token, ghost: &Ghost) -> u64 {
    Mix::new(GHOST)
        .bytes(key)
        .word(token.0)
        .word(u64::from(ghost.mode.0) << 32 | u64::from(ghost.delay_ms))
        .bytes(ghost.slots.as_slice())
        .done()
}

pub(crate) fn end(key: &[u8], end: &End) -> u64 {
    let mix = Mix::new(END)
        .bytes(key)
        .word(end.lease.0)
        .bytes(end.label.as_slice())
        .word(end.token.0)
        .word(end.mode.0.into())
        .word(end.revision)
        .word(end.at_ms);
    match &end.reason {
        EndReason::Released => mix.word(1),
        EndReason::LeaseExpired => mix.word(2),
        EndReason::SessionClosed => mix.word(3),
        EndReason::Forced { who, why } => mix.word(4).bytes(who).bytes(why),
        EndReason::Cancelled => mix.word(5),
        EndReason::TimedOut => mix.word(6),
        EndReason::Upgraded => mix.word(7),
    }
    .done()
}

pub(crate) fn hold(key: &[u8], lease: LeaseId, hold: &Hold) -> u64 {
    let mix = Mix::new(HOLD)
        .bytes(key)
        .word(lease.0)
        .word(hold.token.0)
        .word(hold.mode.0.into())
        .word(hold.number.0)
        .word(hold.since_ms)
        .bytes(hold.value.as_slice());
    let mix = match &hold.forced {
        None => mix,
        Some(forced) => mix.bytes(forced.who.as_slice()).bytes(forced.why.as_slice()),
    };
    let slots = hold.slots.as_slice();
    let mix = if slots.is_empty() { mix } else { mix.word(SLOTS).bytes(slots) };
    let mix = hold.again.iter().fold(mix, |mix, number| mix.word(AGAIN).word(*number));
    let mix = match &hold.asked {
        None => mix,
        Some(asked) => mix
            .word(ASKED)
            .bytes(asked.who.as_slice())
            .bytes(asked.why.as_slice())
            .word(asked.within_ms.into()),
    };
    let mix = if hold.part == 0 { mix } else { mix.word(PART).word(hold.part.into()) };
    delay(mix, hold.delay_ms).done()
}

fn delay(mix: Mix, delay_ms: u32) -> Mix {
    if delay_ms == 0 { mix } else { mix.word(DELAY).word(delay_ms.into()) }
}

pub(crate) fn waiter(key: &[u8], place: u64, waiter: &Waiter) -> u64 {
    let mix = Mix::new(WAITER)
        .bytes(key)
        .word(place)
        .word(waiter.lease.0)
        .word(waiter.number.0)
        .word(u64::from(waiter.mode.0) << 32 | u64::from(waiter.wait_ms))
        .bytes(waiter.value.as_slice());
    let mix = match &waiter.own {
        None => mix,
        Some(own) => secret(mix, &own.secret).word(own.ttl_ms.into()),
    };
    let parts = u64::from(waiter.part) << 32 | u64::from(waiter.parts);
    let mix = if waiter.parts == 1 { mix } else { mix.word(PART).word(parts) };
    delay(mix, waiter.delay_ms).done()
}
