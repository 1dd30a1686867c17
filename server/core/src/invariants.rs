//! What must be true of every state between two commands.
//!
//! Tests call `check` after each command; a snapshot is checked before it is taken over. It walks
//! everything, so it is not for the data path.

use alloc::format;
use alloc::rc::Rc;
use alloc::string::String;

use leasehold_protocol::command::OwnLease;
use leasehold_protocol::event::EndReason;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Token};
use leasehold_protocol::limits::{
    LAST_ENDS_MAX, LEASES_MAX, OPEN_WAITS_MAX, PERMITS_MAX, QUEUE_LEN_MAX, WANTS_MAX,
};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::shard::{
    check_delay_ms, check_key, check_label, check_mode, check_reason, check_ttl_ms, check_value,
};

use crate::blob::Key;
use crate::cow::IntoIter;
use crate::digest;
use crate::ends::{self, GENERATION_LEN};
use crate::hash::Sum;
use crate::memory::{Answer, Kind};
use crate::slots::{self, Taken};
use crate::state::{State, TOKEN_MAX};
use crate::table::{Claim, End, Hold, KeyState, Lease, Waiter};

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

/// No counter of an honest state gets anywhere near; above it, additions could overflow.
const COUNTER_MAX: u64 = i64::MAX as u64;

/// Checks everything; the error says what is wrong, for a person.
pub fn check(state: &State) -> Result<(), String> {
    let mut checker = Checker::new(state)?;
    while !checker.step(usize::MAX)? {}
    ensure!(checker.sum() == state.sum, "the digest drifted");
    Ok(())
}

/// The check in slices, so that a large state can be checked without holding the core.
pub(crate) struct Checker {
    state: State,
    leases: IntoIter<LeaseId, Rc<Lease>>,
    keys: IntoIter<Key, Rc<KeyState>>,
    ends: ends::Iter,
    totals: Totals,
}

/// What the state keeps along, counted from its items.
#[derive(Default)]
struct Totals {
    claims: usize,
    claims_of_leases: usize,
    own_waiters: usize,
    forced: usize,
    ghosts: usize,
    names: usize,
    sum: Sum,
}

impl Checker {
    /// Begins a check of the state as it is now.
    pub(crate) fn new(state: &State) -> Result<Self, String> {
        check_counters(state)?;
        let leases = state.leases.clone().into_iter();
        let keys = state.keys.clone().into_iter();
        let ends = state.ends.iter();
        Ok(Self { state: state.clone(), leases, keys, ends, totals: Totals::default() })
    }

    /// Checks up to so many leases and keys; true when everything was found right.
    pub(crate) fn step(&mut self, items: usize) -> Result<bool, String> {
        for _ in 0..items {
            if let Some((id, lease)) = self.leases.next() {
                check_lease(&self.state, id, &lease)?;
                self.totals.claims_of_leases += lease.claims.len();
                self.totals.sum.add(digest::lease_and_memory(id, &lease).0);
            } else if let Some((key, entry)) = self.keys.next() {
                check_entry(&self.state, &key, &entry)?;
                self.totals.add_entry(&self.state, &key, &entry);
            } else if let Some((key, end, _)) = self.ends.next() {
                check_end(&self.state, &key, &end).map_err(|text| format!("last end: {text}"))?;
                self.totals.sum.add(digest::end(&key, &end));
            } else {
                self.totals.compare(&self.state)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The sum over all items so far.
    pub(crate) fn sum(&self) -> Sum {
        self.totals.sum
    }
}

impl Totals {
    fn add_entry(&mut self, state: &State, key: &Key, entry: &KeyState) {
        let again: usize = entry.holds.iter().map(|(_, hold)| hold.again.len()).sum();
        self.claims += entry.holds.len() + again + entry.ghosts.len() + entry.queue.len();
        self.ghosts += entry.ghosts.len();
        self.own_waiters += entry.queue.iter().filter(|(_, waiter)| waiter.own.is_some()).count();
        self.forced += entry.holds.iter().filter(|(_, hold)| hold.forced.is_some()).count();
        self.names += usize::from(state.names.get(key.name()).is_some());
        self.sum.add(digest::key(key, entry).0);
    }

    fn compare(&self, state: &State) -> Result<(), String> {
        let Self { claims, claims_of_leases, own_waiters, forced, ghosts, names, .. } = self;
        ensure!(*claims == state.claims, "{claims} claims, {} counted", state.claims);
        ensure!(*ghosts == state.delays.len(), "{ghosts} ghosts, {} listed", state.delays.len());
        ensure!(
            *claims == claims_of_leases + ghosts,
            "{claims} claims, {claims_of_leases} known to leases"
        );
        ensure!(*own_waiters == state.own_waiters, "{own_waiters} waiters with own leases");
        ensure!(*forced == state.forced.len(), "{forced} forced, {} listed", state.forced.len());
        ensure!(
            *names == state.keys.len() && *names == state.names.len(),
            "{names} of {} keys are named, by {} names",
            state.keys.len(),
            state.names.len()
        );
        Ok(())
    }
}

fn check_counters(state: &State) -> Result<(), String> {
    ensure!(state.begun == (state.revision > 0), "begun and revision {} differ", state.revision);
    ensure!(state.revision <= COUNTER_MAX, "revision {}", state.revision);
    ensure!(state.last_lease <= COUNTER_MAX, "last lease {}", state.last_lease);
    ensure!(state.ends.len() < LAST_ENDS_MAX, "too many last ends");
    ensure!(state.ends.young_len() < GENERATION_LEN, "too many young last ends");
    ensure!(state.last_token <= TOKEN_MAX, "token {} is too high", state.last_token);
    ensure!(state.leases.len() + state.own_waiters <= LEASES_MAX, "too many leases");
    ensure!(
        state.quarantine_ms == 0 || state.claims == 0,
        "{} claims, though nothing may be granted yet",
        state.claims
    );
    let last = state.leases.last().map_or(0, |(id, _)| id.0);
    let first = state.leases.first().map_or(1, |(id, _)| id.0);
    ensure!(last <= state.last_lease && first > 0, "lease {last} was never minted");
    let members = state.members.check();
    ensure!(members.is_ok(), "{}", members.err().unwrap_or_default());
    Ok(())
}

fn check_end(state: &State, key: &Key, end: &End) -> Result<(), String> {
    let token = end.token.0;
    ensure!(check_key(key).is_ok(), "a key out of range");
    ensure!(end.revision > 0 && end.revision <= state.revision, "revision {}", end.revision);
    ensure!(token > 0 && token <= state.last_token, "token {token} was never given (G2)");
    ensure!(end.lease.0 > 0 && end.lease.0 <= state.last_lease, "lease {}", end.lease);
    ensure!(check_label(end.label.as_slice()).is_ok(), "label");
    match &end.reason {
        EndReason::Released | EndReason::LeaseExpired | EndReason::SessionClosed => {}
        EndReason::Forced { who, why } => {
            ensure!(check_label(who).and(check_reason(why)).is_ok(), "texts out of range");
        }
        other => return Err(format!("{other:?} ends no hold for good")),
    }
    Ok(())
}

fn check_lease(state: &State, id: LeaseId, lease: &Lease) -> Result<(), String> {
    ensure!(check_ttl_ms(lease.ttl_ms.into()).is_ok(), "lease {id}: TTL {}", lease.ttl_ms);
    ensure!(lease.base == digest::lease_base(id, lease), "lease {id}: the hash of its base");
    ensure!(check_label(lease.label.as_slice()).is_ok(), "lease {id}: label");
    ensure!(lease.version <= COUNTER_MAX, "lease {id}: version {}", lease.version);
    let waits = lease.claims.iter().filter(|(_, claim)| matches!(claim, Claim::Wait(_))).count();
    ensure!(waits == lease.waits, "lease {id}: {waits} waits, {} counted", lease.waits);
    let again = lease.claims.iter().filter(|(_, claim)| matches!(claim, Claim::Again(_))).count();
    ensure!(again == lease.again, "lease {id}: {again} entries, {} counted", lease.again);
    for ((number, part), claim) in lease.claims.iter() {
        let entry = state.keys.get(claim.key());
        ensure!((*part as usize) < WANTS_MAX, "lease {id}: claim {number} is for key {part}");
        let known = entry.is_some_and(|entry| match claim {
            Claim::Hold(_) => {
                let hold = entry.holds.get(&id);
                hold.is_some_and(|hold| (hold.number.0, hold.part) == (*number, *part))
            }
            Claim::Wait(_) => {
                let waiter = entry.places.get(&id).and_then(|place| entry.queue.get(place));
                waiter.is_some_and(|waiter| (waiter.number.0, waiter.part) == (*number, *part))
            }
            Claim::Again(_) => entry.holds.get(&id).is_some_and(|hold| hold.again.contains(number)),
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
        let first = lease.claims_of(Number(*number)).next();
        let waits = matches!(first, Some((_, Claim::Wait(_))));
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
    for ((number, _), claim) in lease.claims.iter().filter(|_| !lease.own) {
        let record = memory.records.get(number);
        let fits = match (claim, record.map(|record| record.answer)) {
            (Claim::Wait(_), Some(Answer::Waiting)) => true,
            (Claim::Hold(_) | Claim::Again(_), Some(Answer::Done(Outcome::Granted(grant)))) => {
                grant.lease == id
            }
            (Claim::Hold(_) | Claim::Again(_), None) => *number <= memory.floor,
            _ => false,
        };
        ensure!(fits, "lease {id}: claim {number} and its record differ");
    }
    Ok(())
}

fn check_entry(state: &State, key: &[u8], entry: &KeyState) -> Result<(), String> {
    let name = String::from_utf8_lossy(key);
    ensure!(check_key(key).is_ok(), "key {name:?} is out of range");
    ensure!(!entry.is_vacant(), "key {name:?} is vacant and takes memory");
    ensure!(entry.queue.len() <= QUEUE_LEN_MAX, "key {name:?} has too many waiters");
    ensure!(entry.queue.len() == entry.places.len(), "key {name:?}: queue and places differ");
    for (lease, hold) in entry.holds.iter() {
        check_hold(state, key, *lease, hold).map_err(|text| format!("key {name:?}: {text}"))?;
    }
    check_modes(state, key, entry).map_err(|text| format!("key {name:?}: {text}"))?;
    for (place, waiter) in entry.queue.iter() {
        ensure!(*place <= COUNTER_MAX, "key {name:?}: place {place}");
        ensure!(
            entry.places.get(&waiter.lease) == Some(place),
            "key {name:?}: lease {} is not at its place {place}",
            waiter.lease
        );
        check_waiter(state, key, waiter)
            .and(check_any_mode(waiter.mode, entry.limit))
            .map_err(|text| format!("key {name:?}: {text}"))?;
    }
    if let Some((_, head)) = entry.queue.first() {
        let stuck = !entry.admits(head.mode) || !state.is_satisfiable(head);
        ensure!(stuck, "key {name:?}: the head could be granted (G4)");
    }
    Ok(())
}

/// What is there goes together, and its floor lies below it.
fn check_modes(state: &State, key: &[u8], entry: &KeyState) -> Result<(), String> {
    let holds = entry.holds.iter().map(|(_, hold)| (hold.token, hold.mode, &hold.slots));
    let ghosts = entry.ghosts.iter();
    let ghosts = ghosts.map(|(token, ghost)| (Token(*token), ghost.mode, &ghost.slots));
    let places = entry.holds.len() + entry.ghosts.len();
    let mut taken = Taken::default();
    ensure!(entry.floor <= state.last_token, "floor {} was never given", entry.floor);
    for (token, mode, slots) in holds.chain(ghosts) {
        let slots = slots.as_slice();
        if mode == Mode::EXCLUSIVE {
            ensure!(places == 1, "an exclusive hold beside others (G1)");
            ensure!(entry.floor == 0, "an exclusive hold has a floor of its own");
        } else {
            ensure!(entry.floor > 0, "a shared hold without a floor");
            ensure!(token.0 >= entry.floor, "token {token} is below the floor (G2)");
        }
        let permits = mode.permit_count();
        ensure!(permits.is_some() == (entry.limit > 0), "a lock and a semaphore at once");
        ensure!(slots::is_sound(slots), "slots that cannot be");
        ensure!(slots::count(slots) == permits.unwrap_or(0), "not as many slots as permits");
        ensure!(taken.put(slots), "a slot is taken twice (G1)");
    }
    ensure!(entry.limit <= PERMITS_MAX, "{} permits", entry.limit);
    ensure!(taken == entry.taken, "other slots are taken than its holds have");
    for (token, ghost) in entry.ghosts.iter() {
        let listed = state.delays.get(token);
        let listed = listed.is_some_and(|(at, ms)| **at == *key && *ms == ghost.delay_ms);
        ensure!(listed, "the delay of token {token} is not listed");
        ensure!(*token > 0 && *token <= state.last_token, "token {token} was never given (G2)");
        let in_range = check_delay_ms(ghost.delay_ms).is_ok() && ghost.delay_ms > 0;
        ensure!(in_range, "a delay of {}", ghost.delay_ms);
    }
    Ok(())
}

fn check_any_mode(mode: Mode, limit: u32) -> Result<(), String> {
    let known = match mode.permit_count() {
        None => check_mode(mode).is_ok() && limit == 0,
        Some(permits) => permits >= 1 && limit > 0,
    };
    ensure!(known, "an unknown mode");
    Ok(())
}

fn check_hold(state: &State, key: &[u8], id: LeaseId, hold: &Hold) -> Result<(), String> {
    let claim =
        state.leases.get(&id).and_then(|lease| lease.claims.get(&(hold.number.0, hold.part)));
    let known = matches!(claim, Some(Claim::Hold(held)) if **held == *key);
    ensure!(known, "its holder {id} does not know it");
    ensure!(check_mode(hold.mode).is_ok() || hold.mode.permit_count().is_some(), "an unknown mode");
    ensure!(check_delay_ms(hold.delay_ms).is_ok(), "a delay of {}", hold.delay_ms);
    let token = hold.token.0;
    if let Some(asked) = &hold.asked {
        let texts = check_label(asked.who.as_slice()).and(check_reason(asked.why.as_slice()));
        ensure!(texts.is_ok(), "asked for token {token}: texts out of range");
    }
    for number in &hold.again {
        let claim = state.leases.get(&id).and_then(|lease| lease.claims.get(&(*number, 0)));
        let known = matches!(claim, Some(Claim::Again(held)) if **held == *key);
        ensure!(known, "its holder {id} does not know the entry {number}");
    }
    ensure!(check_value(hold.value.as_slice()).is_ok(), "its value is too large");
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
    let owner = state.leases.get(&lease);
    let claim = owner.and_then(|owner| owner.claims.get(&(waiter.number.0, waiter.part)));
    let known = matches!(claim, Some(Claim::Wait(wanted)) if **wanted == *key);
    ensure!(known, "its waiter {lease} does not know it (G4)");
    let all = || owner.iter().flat_map(|owner| owner.claims_of(waiter.number));
    let whole = all().map(|(part, _)| part).eq(0..waiter.parts);
    let whole = whole && all().all(|(_, claim)| matches!(claim, Claim::Wait(_)));
    ensure!(whole, "waiter {lease}: not all of {} keys are waited for", waiter.parts);
    ensure!(waiter.own.is_none() || waiter.parts == 1, "waiter {lease}: one lease, several keys");
    ensure!(check_delay_ms(waiter.delay_ms).is_ok(), "waiter {lease}: a delay out of range");
    ensure!(check_value(waiter.value.as_slice()).is_ok(), "waiter {lease}: value too large");
    let ttl_ok = |own: &OwnLease| check_ttl_ms(own.ttl_ms.into()).is_ok();
    ensure!(waiter.own.as_ref().is_none_or(ttl_ok), "waiter {lease}: TTL of its own lease");
    Ok(())
}
