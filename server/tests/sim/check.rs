//! The checks at the end of a run: G1, G2, G4 and G5 over the ledger and the clients' history.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Number, Token};
use leasehold_protocol::outcome::Outcome;

use crate::history::{Acked, Held, History, Violations};
use crate::ledger::Ledger;

pub(crate) fn check(ledger: &Ledger, history: &History, violations: &Violations) {
    replay(&ledger.events(), violations);
    let holds = history.holds.borrow();
    exclusion(&holds, violations);
    token_order(&holds, violations);
    for held in holds.iter() {
        durable_grant(ledger, held, violations);
    }
    for acked in history.acked.borrow().iter() {
        durable_change(ledger, acked, violations);
    }
}

/// G1: sure intervals of one key never overlap.
fn exclusion(holds: &[Held], violations: &Violations) {
    let mut by_key: BTreeMap<&[u8], Vec<&Held>> = BTreeMap::new();
    for held in holds {
        by_key.entry(&held.key).or_default().push(held);
    }
    for holds in by_key.values_mut() {
        holds.sort_by_key(|held| held.known_ns);
        for pair in holds.windows(2) {
            if pair[1].known_ns < pair[0].released_ns {
                violations.add("G1", format!("{:?} and {:?} overlap", pair[0], pair[1]));
            }
        }
    }
}

/// G2 in real time: a grant that was known before another was asked for has a lower token.
fn token_order(holds: &[Held], violations: &Violations) {
    for early in holds {
        for late in holds.iter().filter(|late| late.key == early.key) {
            if early.known_ns < late.asked_ns && early.token >= late.token {
                violations.add("G2", format!("{early:?} came before {late:?}"));
            }
        }
    }
}

/// G5: what a client was told is what was applied.
fn durable_grant(ledger: &Ledger, held: &Held, violations: &Violations) {
    let is_it = |event: &Event| {
        matches!(&event.kind, EventKind::Granted { key, lease, token, .. }
            if *key == held.key && *lease == held.lease && *token == held.token)
    };
    if !ledger.at(held.grant.0).iter().any(is_it) {
        violations.add("G5", format!("{held:?} was acknowledged and is not in the log"));
    }
}

fn durable_change(ledger: &Ledger, acked: &Acked, violations: &Violations) {
    let (revision, is_it): (_, Box<dyn Fn(&EventKind) -> bool>) = match acked.clone() {
        Acked::Released { key, lease, token, revision } => (
            revision,
            Box::new(move |kind| {
                *kind
                    == EventKind::Ended {
                        key: key.clone(),
                        lease,
                        token,
                        reason: EndReason::Released,
                    }
            }),
        ),
        Acked::Cancelled { lease, number, revision } => (
            revision,
            Box::new(move |kind| {
                matches!(kind, EventKind::WaitEnded { lease: l, number: n, .. }
                    if (*l, *n) == (lease, number))
            }),
        ),
        Acked::Opened { lease, revision } => (
            revision,
            Box::new(
                move |kind| matches!(kind, EventKind::LeaseOpened { lease: l, .. } if *l == lease),
            ),
        ),
        Acked::Closed { lease, revision } => (
            revision,
            Box::new(
                move |kind| matches!(kind, EventKind::LeaseEnded { lease: l, .. } if *l == lease),
            ),
        ),
    };
    if !ledger.at(revision.0).iter().any(|event| is_it(&event.kind)) {
        violations.add("G5", format!("{acked:?} was acknowledged and is not in the log"));
    }
}

/// One key, as a naive reader of the events sees it.
#[derive(Default)]
struct Key {
    holder: Option<(LeaseId, Token)>,
    last_token: Option<Token>,
    queue: VecDeque<(LeaseId, Number)>,
}

/// G1, G2, G4 and single execution at the level of the log.
fn replay(events: &[Event], violations: &Violations) {
    let mut keys: BTreeMap<Vec<u8>, Key> = BTreeMap::new();
    let mut queued = BTreeSet::new();
    let mut dead = BTreeSet::new();
    for event in events {
        let wrong = |guarantee, what: &str| {
            violations.add(guarantee, format!("{what}: {event:?}"));
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
                let key = keys.entry(key.clone()).or_default();
                if key.holder.take() != Some((*lease, *token)) {
                    wrong("G1", "ended a hold of nobody");
                }
            }
            _ => {}
        }
    }
}
