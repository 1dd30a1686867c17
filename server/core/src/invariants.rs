//! What must be true of every state between two commands.
//!
//! Tests call `check` after each command; a snapshot is checked before it is taken over. It walks
//! everything, so it is not for the data path.

use alloc::format;
use alloc::string::String;

use leasehold_protocol::command::OwnLease;
use leasehold_protocol::ids::{LeaseId, Mode, Number};
use leasehold_protocol::limits::{LEASES_MAX, OPEN_WAITS_MAX, QUEUE_LEN_MAX};
use leasehold_protocol::shard::{check_key, check_label, check_reason, check_ttl_ms, check_value};

use crate::digest;
use crate::memory::{Answer, Kind};
use crate::state::{State, TOKEN_MAX};
use crate::table::{Claim, Hold, KeyState, Lease, Waiter};

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

/// Checks everything; the error says what is wrong, for a person.
pub fn check(state: &State) -> Result<(), String> {
    check_counters(state)?;
    state.leases.iter().try_for_each(|(id, lease)| check_lease(state, *id, lease))?;
    state.keys.iter().try_for_each(|(key, entry)| check_entry(state, key, entry))?;
    let names = state.keys.iter().filter(|(key, _)| state.names.get(key.name()).is_some()).count();
    ensure!(
        names == state.keys.len() && names == state.names.len(),
        "{} keys, {} names, {names} in common",
        state.keys.len(),
        state.names.len()
    );
    check_sums(state)
}

fn check_counters(state: &State) -> Result<(), String> {
    ensure!(state.begun == (state.revision > 0), "begun and revision {} differ", state.revision);
    ensure!(state.last_token <= TOKEN_MAX, "token {} is too high", state.last_token);
    ensure!(state.leases.len() + state.own_waiters <= LEASES_MAX, "too many leases");
    let last = state.leases.last().map_or(0, |(id, _)| id.0);
    let first = state.leases.first().map_or(1, |(id, _)| id.0);
    ensure!(last <= state.last_lease && first > 0, "lease {last} was never minted");
    Ok(())
}

fn check_lease(state: &State, id: LeaseId, lease: &Lease) -> Result<(), String> {
    ensure!(check_ttl_ms(lease.ttl_ms.into()).is_ok(), "lease {id}: TTL {}", lease.ttl_ms);
    ensure!(lease.base == digest::lease_base(id, lease), "lease {id}: the hash of its base");
    ensure!(check_label(lease.label.as_slice()).is_ok(), "lease {id}: label");
    let waits = lease.claims.iter().filter(|(_, claim)| matches!(claim, Claim::Wait(_))).count();
    ensure!(waits == lease.waits, "lease {id}: {waits} waits, {} counted", lease.waits);
    for (number, claim) in lease.claims.iter() {
        let entry = state.keys.get(claim.key());
        let known = entry.is_some_and(|entry| match claim {
            Claim::Hold(_) => entry.holds.get(&id).is_some_and(|hold| hold.number.0 == *number),
            Claim::Wait(_) => entry.places.get(&id).is_some(),
        });
        ensure!(known, "lease {id}: claim {number} is not in its key");
    }
    if lease.own {
        ensure!(lease.claims.len() == 1 && waits == 0, "own lease {id} has not one hold");
        let memory = &lease.memory;
        let used = memory.floor > 0 || !memory.records.is_empty() || !memory.late.is_empty();
        ensure!(!used, "own lease {id} has a retry memory");
    }
    check_memory(id, lease)
}

fn check_memory(id: LeaseId, lease: &Lease) -> Result<(), String> {
    let memory = &lease.memory;
    let mut kept = 0;
    for (number, record) in memory.records.iter() {
        let waits = matches!(lease.claims.get(number), Some(Claim::Wait(_)));
        ensure!(
            waits == (record.answer == Answer::Waiting),
            "lease {id}: record {number} and its wait differ"
        );
        ensure!(!waits || record.keep, "lease {id}: the floor would drop wait {number}");
        ensure!(
            *number > memory.floor || record.keep,
            "lease {id}: record {number} should be gone"
        );
        ensure!(
            !record.keep || record.kind == Kind::Acquire,
            "lease {id}: record {number} is kept and no acquire"
        );
        ensure!(*number > 0, "lease {id}: a record of number 0");
        let number = Number(*number);
        ensure!(memory.in_window(number, 0), "lease {id}: record {number} beyond the window");
        kept += usize::from(record.keep);
    }
    ensure!(kept == memory.kept, "lease {id}: {kept} kept, {} counted", memory.kept);
    ensure!(kept <= OPEN_WAITS_MAX, "lease {id}: {kept} open waits");
    ensure!(memory.late.len() <= OPEN_WAITS_MAX, "lease {id}: too many late records");
    for (number, record) in memory.late.iter() {
        let in_range = (1..=memory.floor).contains(number);
        ensure!(in_range, "lease {id}: late record {number} above the floor");
        ensure!(
            matches!(record.kind, Kind::Cancel | Kind::Release)
                && record.answer != Answer::Waiting
                && !record.keep,
            "lease {id}: late record {number} is of a wrong kind"
        );
    }
    for (number, claim) in lease.claims.iter() {
        let remembered = memory.records.get(number).is_some();
        ensure!(
            matches!(claim, Claim::Hold(_)) || remembered,
            "lease {id}: wait {number} is not remembered"
        );
    }
    Ok(())
}

fn check_entry(state: &State, key: &[u8], entry: &KeyState) -> Result<(), String> {
    let name = String::from_utf8_lossy(key);
    ensure!(check_key(key).is_ok(), "key {name:?} is out of range");
    ensure!(!entry.is_vacant(), "key {name:?} is vacant and takes memory");
    ensure!(entry.holds.len() <= 1, "key {name:?} has two holders (G1)");
    ensure!(entry.queue.len() <= QUEUE_LEN_MAX, "key {name:?} has too many waiters");
    ensure!(entry.queue.len() == entry.places.len(), "key {name:?}: queue and places differ");
    for (lease, hold) in entry.holds.iter() {
        check_hold(state, key, *lease, hold).map_err(|text| format!("key {name:?}: {text}"))?;
    }
    for (place, waiter) in entry.queue.iter() {
        ensure!(
            entry.places.get(&waiter.lease) == Some(place),
            "key {name:?}: lease {} is not at its place {place}",
            waiter.lease
        );
        check_waiter(state, key, waiter).map_err(|text| format!("key {name:?}: {text}"))?;
    }
    if let Some((_, head)) = entry.queue.first() {
        ensure!(!entry.admits(head.mode), "key {name:?}: the head could be granted (G4)");
    }
    Ok(())
}

fn check_hold(state: &State, key: &[u8], id: LeaseId, hold: &Hold) -> Result<(), String> {
    let claim = state.leases.get(&id).and_then(|lease| lease.claims.get(&hold.number.0));
    let known = matches!(claim, Some(Claim::Hold(held)) if **held == *key);
    ensure!(known, "its holder {id} does not know it");
    ensure!(hold.mode == Mode::EXCLUSIVE, "an unknown mode");
    ensure!(check_value(hold.value.as_slice()).is_ok(), "its value is too large");
    let token = hold.token.0;
    ensure!(token > 0 && token <= state.last_token, "token {token} was never given (G2)");
    if let Some(forced) = &hold.forced {
        let listed = state.forced.get(&token);
        let listed = listed.is_some_and(|(held, lease)| **held == *key && *lease == id);
        ensure!(listed, "forced token {token} is not listed");
        let texts = check_label(forced.who.as_slice()).and(check_reason(forced.why.as_slice()));
        ensure!(texts.is_ok(), "forced token {token}: texts out of range");
    }
    Ok(())
}

fn check_waiter(state: &State, key: &[u8], waiter: &Waiter) -> Result<(), String> {
    let lease = waiter.lease;
    let claim = state.leases.get(&lease).and_then(|lease| lease.claims.get(&waiter.number.0));
    let known = matches!(claim, Some(Claim::Wait(wanted)) if **wanted == *key);
    ensure!(known, "its waiter {lease} does not know it (G4)");
    ensure!(waiter.mode == Mode::EXCLUSIVE, "waiter {lease}: an unknown mode");
    ensure!(check_value(waiter.value.as_slice()).is_ok(), "waiter {lease}: value too large");
    let ttl_ok = |own: &OwnLease| check_ttl_ms(own.ttl_ms.into()).is_ok();
    ensure!(waiter.own.as_ref().is_none_or(ttl_ok), "waiter {lease}: TTL of its own lease");
    Ok(())
}

/// What is kept along equals what follows from the items.
fn check_sums(state: &State) -> Result<(), String> {
    let (mut claims, mut own_waiters, mut forced) = (0, 0, 0);
    for (_, entry) in state.keys.iter() {
        claims += entry.holds.len() + entry.queue.len();
        own_waiters += entry.queue.iter().filter(|(_, waiter)| waiter.own.is_some()).count();
        forced += entry.holds.iter().filter(|(_, hold)| hold.forced.is_some()).count();
    }
    let of_leases: usize = state.leases.iter().map(|(_, lease)| lease.claims.len()).sum();
    ensure!(claims == state.claims, "{claims} claims, {} counted", state.claims);
    ensure!(claims == of_leases, "{claims} claims, {of_leases} known to leases");
    ensure!(own_waiters == state.own_waiters, "{own_waiters} waiters with own leases");
    ensure!(forced == state.forced.len(), "{forced} forced, {} listed", state.forced.len());
    ensure!(digest::recompute(state) == state.sum, "the digest drifted");
    Ok(())
}
