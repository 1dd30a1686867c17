//! Proof that the checks bite: small histories, each with one fault made by hand, and a clean one.

use std::cell::Cell;
use std::rc::Rc;

use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Revision, Token};
use leasehold_protocol::outcome::{Grant, Outcome};

use crate::check::check;
use crate::history::{Acked, Change, Held, History, Read, Validity, Violations};
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
        floor: Token(token),
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

fn lapsed(lease: u64) -> EventKind {
    EventKind::LeaseEnded { lease: LeaseId(lease), reason: EndReason::LeaseExpired }
}

/// A session that was renewed at `renewed_ns` for 1000 ns.
fn session(lease: u64, renewed_ns: u64) -> Rc<Validity> {
    Rc::new(Validity {
        lease: LeaseId(lease),
        ttl_ns: 1_000,
        renewed_ns: Cell::new(renewed_ns),
        sure_until_ns: Cell::new(renewed_ns + 1_000),
    })
}

/// A hold of `lease` that was granted at revision `at`, known and released at these times.
fn held(lease: u64, token: u64, at: u64, known_ns: u64, released_ns: Option<u64>) -> Held {
    Held {
        key: KEY.to_vec(),
        lease: LeaseId(lease),
        token: Token(token),
        grant: Revision(at),
        asked_ns: known_ns - 1,
        known_ns,
        validity: session(lease, 0),
        released: Cell::new(released_ns.map(|released_ns| (released_ns, 1_000))),
    }
}

fn acked(lease: u64, at: u64, change: Change) -> Acked {
    Acked { lease: LeaseId(lease), revision: Revision(at), heard_ns: 50, change }
}

fn release(token: u64) -> Change {
    Change::Released { key: KEY.to_vec(), token: Token(token) }
}

fn read(asked_ns: u64, at: u64, holder: Option<(u64, u64)>) -> Read {
    let holder = holder.map(|(lease, token)| (LeaseId(lease), Token(token)));
    Read { key: KEY.to_vec(), asked_ns, revision: Revision(at), holder }
}

/// A case: what was applied, revision by revision, and what the clients saw.
#[derive(Default)]
struct Case {
    steps: Vec<Vec<EventKind>>,
    holds: Vec<Held>,
    acked: Vec<Acked>,
    reads: Vec<Read>,
    sessions: Vec<Rc<Validity>>,
}

impl Case {
    /// The guarantees that the checks find broken. Revision *i* was applied at *i* times 100 ns.
    fn findings(self) -> Vec<String> {
        let (ledger, violations) = (Ledger::default(), Violations::default());
        let step = |(at, step): (u64, Vec<EventKind>)| {
            let event = |kind| Event { revision: Revision(at), kind };
            (at * 100, step.into_iter().map(event).collect())
        };
        ledger.plant((1..).zip(self.steps).map(step).collect());
        let history = History::default();
        history.holds.replace(self.holds.into_iter().map(Rc::new).collect());
        history.acked.replace(self.acked);
        history.reads.replace(self.reads);
        history.sessions.replace(self.sessions);
        check(&ledger, &history, &violations);
        let name = |line: &String| line.split(':').next().unwrap_or_default().to_owned();
        violations.list().iter().map(name).collect()
    }
}

/// The checks find these broken in a log.
fn applied(steps: Vec<Vec<EventKind>>) -> Vec<String> {
    Case { steps, ..Case::default() }.findings()
}

/// And these in what clients saw of the clean log.
fn seen(case: Case) -> Vec<String> {
    Case { steps: clean(), ..case }.findings()
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
    prove_clean();
    prove_seen();
    prove_applied();
}

fn prove_clean() {
    let none: Vec<String> = vec![];
    let clean = Case {
        holds: vec![held(1, 10, 1, 100, Some(200)), held(2, 11, 4, 210, None)],
        acked: vec![acked(1, 4, release(10))],
        reads: vec![read(60, 4, Some((2, 11))), read(10, 3, Some((1, 10)))],
        ..Case::default()
    };
    assert_eq!(seen(clean), none);
    let filler = (1..10).map(|lease| vec![dead(100 + lease)]);
    let late = Case {
        // Revision 10 is applied at 1000 ns, exactly the TTL after the last renewal.
        steps: filler.chain([vec![lapsed(1)]]).collect(),
        sessions: vec![session(1, 0)],
        ..Case::default()
    };
    assert_eq!(late.findings(), none);
}

fn prove_seen() {
    let two =
        |first: Held, second: Held| seen(Case { holds: vec![first, second], ..Case::default() });
    let overlap = two(held(1, 10, 1, 100, Some(211)), held(2, 11, 4, 210, None));
    assert_eq!(overlap, ["G1"], "two sure of one key");
    let silent = two(held(1, 10, 1, 100, None), held(2, 11, 4, 999, None));
    assert_eq!(silent, ["G1"], "one of them without a release");
    let order = two(held(2, 11, 4, 100, Some(200)), held(1, 10, 1, 210, None));
    assert_eq!(order, ["G2"], "a later grant, a lower token");
    let lost = Case { holds: vec![held(1, 10, 2, 100, None)], ..Case::default() };
    assert_eq!(seen(lost), ["G5"], "a grant that is not in the log");
    let lost = Case { acked: vec![acked(1, 5, release(10))], ..Case::default() };
    assert_eq!(seen(lost), ["G5"], "nor a release");
    let acked = vec![acked(1, 4, release(10))];
    let stale = Case { acked, reads: vec![read(60, 3, Some((1, 10)))], ..Case::default() };
    assert_eq!(seen(stale), ["G7"], "a read older than what was acknowledged before it");
    let wrong = Case { reads: vec![read(60, 4, Some((1, 10)))], ..Case::default() };
    assert_eq!(seen(wrong), ["G7"], "a read that is not the truth at its revision");
}

fn prove_applied() {
    let twice = vec![vec![granted(1, 10)], vec![granted(2, 11)]];
    assert_eq!(applied(twice), ["G1"], "granted while held");
    let stale = vec![vec![granted(1, 10)], vec![ended(1, 10)], vec![granted(2, 10)]];
    assert_eq!(applied(stale), ["G2"], "a token used twice");
    let early =
        Case { steps: vec![vec![lapsed(1)]], sessions: vec![session(1, 50)], ..Case::default() };
    assert_eq!(early.findings(), ["G3"], "expired 50 ns after a renewal for 1000");
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
