//! Proof that the checks bite: small histories, each with one fault made by hand, and a clean one.

use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Revision, Token};
use leasehold_protocol::outcome::{Grant, Outcome};

use crate::check::check;
use crate::history::{Acked, Held, History, Violations};
use crate::ledger::Ledger;

const KEY: &[u8] = b"k";

fn granted(lease: u64, token: u64) -> EventKind {
    let (lease, token) = (LeaseId(lease), Token(token));
    EventKind::Granted { key: KEY.to_vec(), lease, mode: Mode::EXCLUSIVE, token }
}

fn queued(lease: u64) -> EventKind {
    let (lease, number) = (LeaseId(lease), Number(1));
    EventKind::Queued { key: KEY.to_vec(), lease, number, wait_ms: u32::MAX }
}

fn served(lease: u64, token: u64) -> EventKind {
    let grant = Grant {
        lease: LeaseId(lease),
        token: Token(token),
        revision: Revision(0),
        version_before: HoldSetVersion(0),
        version_after: HoldSetVersion(1),
    };
    let (lease, number, outcome) = (LeaseId(lease), Number(1), Outcome::Granted(grant));
    EventKind::WaitEnded { key: KEY.to_vec(), lease, number, outcome }
}

fn ended(lease: u64, token: u64) -> EventKind {
    let (lease, token, reason) = (LeaseId(lease), Token(token), EndReason::Released);
    EventKind::Ended { key: KEY.to_vec(), lease, token, reason }
}

fn dead(lease: u64) -> EventKind {
    EventKind::LeaseEnded { lease: LeaseId(lease), reason: EndReason::SessionClosed }
}

/// A hold of `lease` that was granted at revision `at`, sure from `known_ns` to `released_ns`.
fn held(lease: u64, token: u64, at: u64, known_ns: u64, released_ns: u64) -> Held {
    Held {
        key: KEY.to_vec(),
        lease: LeaseId(lease),
        token: Token(token),
        grant: Revision(at),
        asked_ns: known_ns - 1,
        known_ns,
        released_ns,
    }
}

fn release(lease: u64, token: u64, at: u64) -> Acked {
    let (lease, token, revision) = (LeaseId(lease), Token(token), Revision(at));
    Acked::Released { key: KEY.to_vec(), lease, token, revision }
}

/// The guarantees that the checks find broken; element *i* of `steps` is revision *i* + 1.
fn findings(steps: Vec<Vec<EventKind>>, holds: Vec<Held>, acked: Vec<Acked>) -> Vec<String> {
    let (ledger, violations) = (Ledger::default(), Violations::default());
    let event = |(at, kind)| Event { revision: Revision(at), kind };
    let numbered = steps.into_iter().zip(1..);
    let events =
        numbered.map(|(step, at)| step.into_iter().map(|kind| event((at, kind))).collect());
    ledger.plant(events.collect());
    let history = History::default();
    *history.holds.borrow_mut() = holds;
    *history.acked.borrow_mut() = acked;
    check(&ledger, &history, &violations);
    let name = |line: &String| line.split(':').next().unwrap_or_default().to_owned();
    violations.list().iter().map(name).collect()
}

/// Two leases, one after the other, the second from the queue.
fn clean() -> Vec<Vec<EventKind>> {
    vec![
        vec![granted(1, 10)],
        vec![queued(2)],
        vec![queued(3)],
        vec![ended(1, 10), granted(2, 11), served(2, 11)],
        vec![ended(2, 11), granted(3, 12), served(3, 12)],
    ]
}

/// Panics if a check is blind.
pub(crate) fn prove() {
    let holds = || vec![held(1, 10, 1, 100, 200), held(2, 11, 4, 210, 300)];
    let none: Vec<String> = vec![];
    assert_eq!(findings(clean(), holds(), vec![release(1, 10, 4)]), none);

    // What clients saw.
    let early = vec![held(1, 10, 1, 100, 211), held(2, 11, 4, 210, 300)];
    assert_eq!(findings(clean(), early, vec![]), ["G1"], "two sure of one key");
    let swapped = vec![held(2, 11, 4, 100, 200), held(1, 10, 1, 210, 300)];
    assert_eq!(findings(clean(), swapped, vec![]), ["G2"], "a later grant, a lower token");
    let lost = vec![held(1, 10, 2, 100, 200)];
    assert_eq!(findings(clean(), lost, vec![]), ["G5"], "a grant that is not in the log");
    assert_eq!(findings(clean(), vec![], vec![release(1, 10, 5)]), ["G5"], "nor a release");

    // What was applied.
    let applied = |steps| findings(steps, vec![], vec![]);
    let twice = vec![vec![granted(1, 10)], vec![granted(2, 11)]];
    assert_eq!(applied(twice), ["G1"], "granted while held");
    let stale = vec![vec![granted(1, 10)], vec![ended(1, 10)], vec![granted(2, 10)]];
    assert_eq!(applied(stale), ["G2"], "a token used twice");
    let mut turn = clean();
    turn[3] = vec![ended(1, 10), granted(3, 11), served(3, 11)];
    turn[4] = vec![ended(3, 11), granted(2, 12), served(2, 12)];
    assert_eq!(applied(turn), ["G4", "G4"], "out of turn");
    let past = vec![vec![granted(1, 10)], vec![queued(2)], vec![ended(1, 10), granted(3, 11)]];
    assert_eq!(applied(past), ["G4"], "past the queue");
    let ghost = vec![vec![dead(1)], vec![granted(1, 10)]];
    assert_eq!(applied(ghost), ["G4"], "granted to a dead lease");
    let double = vec![vec![queued(2)], vec![queued(2)]];
    assert_eq!(applied(double), ["G5"], "one acquire executed twice");
}
