//! The checks at the end of a run: G1 to G5 and G7 over the ledger and the clients' history.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Number, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

use crate::history::{Acked, Change, Held, History, Read, Validity, Violations};
use crate::ledger::{Ledger, ShardLedger};

/// A leader's clock may run so much fast (G3), in parts per million.
const FAST_PPM: u64 = 500;

pub(crate) fn check(ledger: &Ledger, history: &History, violations: &Violations) {
    let holds = history.holds.borrow();
    exclusion(&holds, violations);
    token_order(&holds, violations);
    for shard in ledger.shards() {
        check_shard(shard, &ledger.shard(shard), history, violations);
    }
}

fn check_shard(shard: ShardId, ledger: &ShardLedger, history: &History, violations: &Violations) {
    let events = ledger.events();
    let holders = replay(&events, violations);
    let sessions = history.sessions.borrow();
    let sessions = sessions.iter().filter(|session| session.shard == shard).collect::<Vec<_>>();
    never_early(ledger, &events, &sessions, violations);
    for held in history.holds.borrow().iter().filter(|held| held.shard() == shard) {
        durable_grant(ledger, held, violations);
    }
    for acked in history.acked.borrow().iter().filter(|acked| acked.shard == shard) {
        durable_change(ledger, acked, violations);
    }
    let known = known_revisions(shard, history);
    for read in history.reads.borrow().iter().filter(|read| read.shard == shard) {
        linear(read, &holders, &known, violations);
    }
}

/// Leases that ended for want of renewals.
pub(crate) fn expiries(ledger: &Ledger) -> usize {
    let of_shard = |shard| {
        let events = ledger.shard(shard).events();
        events.iter().filter(|event| expired(event).is_some()).count()
    };
    ledger.shards().into_iter().map(of_shard).sum()
}

fn expired(event: &Event) -> Option<LeaseId> {
    match event.kind {
        EventKind::LeaseEnded { lease, reason: EndReason::LeaseExpired } => Some(lease),
        _ => None,
    }
}

/// G1: sure intervals of one key never overlap.
fn exclusion(holds: &[Rc<Held>], violations: &Violations) {
    let mut by_key: BTreeMap<&[u8], Vec<&Rc<Held>>> = BTreeMap::new();
    for held in holds.iter().filter(|held| held.known_ns < held.sure_until_ns()) {
        by_key.entry(&held.key).or_default().push(held);
    }
    for holds in by_key.values_mut() {
        holds.sort_by_key(|held| held.known_ns);
        for pair in holds.windows(2) {
            if pair[1].known_ns < pair[0].sure_until_ns() {
                violations.add("G1", &format!("{:?} and {:?} overlap", pair[0], pair[1]));
            }
        }
    }
}

/// G2 in real time: a grant that was known before another was asked for has a lower token.
fn token_order(holds: &[Rc<Held>], violations: &Violations) {
    for early in holds {
        for late in holds.iter().filter(|late| late.key == early.key) {
            if early.known_ns < late.asked_ns && early.token >= late.token {
                violations.add("G2", &format!("{early:?} came before {late:?}"));
            }
        }
    }
}

/// G3: no lease expires before its TTL has passed since the send of its last acknowledged renewal.
fn never_early(
    ledger: &ShardLedger,
    events: &[Event],
    sessions: &[&Rc<Validity>],
    violations: &Violations,
) {
    let sessions: BTreeMap<_, _> = sessions.iter().map(|s| (s.lease, s)).collect();
    for event in events {
        let Some(session) = expired(event).and_then(|lease| sessions.get(&lease)) else { continue };
        let ended_ns = ledger.applied_ns(event.revision.0).expect("it was applied");
        let lasts_ns = session.ttl_ns - session.ttl_ns / 1_000_000 * FAST_PPM;
        if ended_ns < session.renewed_ns.get() + lasts_ns {
            violations.add("G3", &format!("{session:?} expired at {ended_ns}"));
        }
    }
}

/// G5: what a client was told is what was applied.
fn durable_grant(ledger: &ShardLedger, held: &Held, violations: &Violations) {
    let is_it = |event: &Event| {
        matches!(&event.kind, EventKind::Granted { key, lease, token, .. }
            if *key == held.key && *lease == held.lease && *token == held.token)
    };
    if !ledger.at(held.grant.0).iter().any(is_it) {
        violations.add("G5", &format!("{held:?} was acknowledged and is not in the log"));
    }
}

fn durable_change(ledger: &ShardLedger, acked: &Acked, violations: &Violations) {
    let is_it = |event: &Event| match (&acked.change, &event.kind) {
        (
            Change::Released { key, token },
            EventKind::Ended { key: k, lease, token: t, reason: EndReason::Released },
        ) => (key, token, &acked.lease) == (k, t, lease),
        (Change::WaitEnded { number }, EventKind::WaitEnded { lease, number: n, .. }) => {
            (number, &acked.lease) == (n, lease)
        }
        (Change::Opened, EventKind::LeaseOpened { lease, .. })
        | (Change::Closed, EventKind::LeaseEnded { lease, .. }) => *lease == acked.lease,
        _ => false,
    };
    if !ledger.at(acked.revision.0).iter().any(is_it) {
        violations.add("G5", &format!("{acked:?} was acknowledged and is not in the log"));
    }
}

/// When a client knew of which revision, with the highest known by then; in order of time.
fn known_revisions(shard: ShardId, history: &History) -> Vec<(u64, u64)> {
    let acked = history.acked.borrow();
    let holds = history.holds.borrow();
    let grants = holds.iter().filter(|held| held.shard() == shard);
    let grants = grants.map(|held| (held.known_ns, held.grant.0));
    let acked = acked.iter().filter(|acked| acked.shard == shard);
    let acked = acked.map(|acked| (acked.heard_ns, acked.revision.0));
    let mut known: Vec<_> = acked.chain(grants).collect();
    known.sort_unstable();
    let mut highest = 0;
    for (_, revision) in &mut known {
        highest = highest.max(*revision);
        *revision = highest;
    }
    known
}

/// G7: a read sees everything acknowledged before it was asked, and the truth at its revision.
fn linear(read: &Read, holders: &Holders, known: &[(u64, u64)], violations: &Violations) {
    let before = known.partition_point(|(at_ns, _)| *at_ns < read.asked_ns);
    let due = before.checked_sub(1).map_or(0, |last| known[last].1);
    if read.revision.0 < due {
        violations.add("G7", &format!("{read:?} is older than revision {due}"));
    }
    let changes = holders.get(&read.key).map_or(&[][..], Vec::as_slice);
    let upto = changes.partition_point(|(revision, _)| *revision <= read.revision.0);
    let holder = upto.checked_sub(1).and_then(|last| changes[last].1);
    if holder != read.holder {
        violations.add("G7", &format!("{read:?}, but the holder was {holder:?}"));
    }
}

/// Who held each key from which revision on.
type Holders = BTreeMap<Vec<u8>, Vec<(u64, Option<(LeaseId, Token)>)>>;

/// One key, as a naive reader of the events sees it.
#[derive(Default)]
struct Key {
    holder: Option<(LeaseId, Token)>,
    last_token: Option<Token>,
    queue: VecDeque<(LeaseId, Number)>,
}

/// G1, G2, G4 and single execution at the level of the log; returns who held what.
fn replay(events: &[Event], violations: &Violations) -> Holders {
    let mut holders = Holders::new();
    let mut keys: BTreeMap<Vec<u8>, Key> = BTreeMap::new();
    let mut queued = BTreeSet::new();
    let mut dead = BTreeSet::new();
    for event in events {
        let wrong = |guarantee, what: &str| {
            violations.add(guarantee, &format!("{what}: {event:?}"));
        };
        match &event.kind {
            EventKind::LeaseEnded { lease, .. } => {
                dead.insert(*lease);
            }
            EventKind::Queued { key, lease, number, .. } => {
                keys.entry(key.clone()).or_default().queue.push_back((*lease, *number));
                if !queued.insert((*lease, *number)) {
                    wrong("G5", "queued twice");
                }
            }
            EventKind::WaitEnded { key, lease, number, outcome } => {
                let queue = &mut keys.entry(key.clone()).or_default().queue;
                let place = queue.iter().position(|waiter| *waiter == (*lease, *number));
                match place {
                    None => wrong("G4", "ended a wait of nobody"),
                    Some(0) => {}
                    Some(_) if matches!(outcome, Outcome::Granted(_)) => {
                        wrong("G4", "granted out of turn");
                    }
                    Some(_) => {}
                }
                place.and_then(|place| queue.remove(place));
            }
            EventKind::Granted { key, lease, token, .. } => {
                let now = (event.revision.0, Some((*lease, *token)));
                holders.entry(key.clone()).or_default().push(now);
                let key = keys.entry(key.clone()).or_default();
                if key.holder.is_some() {
                    wrong("G1", "granted while held");
                }
                if key.queue.front().is_some_and(|(first, _)| first != lease) {
                    wrong("G4", "granted past the queue");
                }
                if key.last_token.is_some_and(|last| last >= *token) {
                    wrong("G2", "token did not rise");
                }
                if dead.contains(lease) {
                    wrong("G4", "granted to a dead lease");
                }
                key.holder = Some((*lease, *token));
                key.last_token = Some(*token);
            }
            EventKind::Ended { key, lease, token, .. } => {
                holders.entry(key.clone()).or_default().push((event.revision.0, None));
                let key = keys.entry(key.clone()).or_default();
                if key.holder.take() != Some((*lease, *token)) {
                    wrong("G1", "ended a hold of nobody");
                }
            }
            _ => {}
        }
    }
    holders
}
