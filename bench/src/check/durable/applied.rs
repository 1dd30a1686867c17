//! G5 against the nodes' logs: all nodes applied the same; what was acknowledged is there, as it
//! was acknowledged; nothing is there that no client of the history asked for; no acquire was
//! executed twice; and the final state is what the log leads to.

use std::collections::{BTreeMap, BTreeSet};

use super::super::Report;
use super::super::log::{Log, logs};
use crate::history::{Applied, Cause, Change, FinalState, History, Op, OpKind, Outcome};

/// Returns how many acknowledgements were found.
pub(super) fn check(history: &History, report: &mut Report) -> u64 {
    let mut found = 0;
    for (shard, log) in logs(history) {
        for (a, b) in &log.contradictions {
            report.violation(format!(
                "shard {shard}, revision {}: node {} applied {:?}, node {} {:?}",
                a.revision, a.node, a.changes, b.node, b.changes
            ));
        }
        let ops: Vec<&Op> = history.ops().filter(|op| op.shard == shard).collect();
        let waits = waits(&log, report);
        for op in &ops {
            found += u64::from(acknowledged(op, &log, &waits, report));
        }
        Asked::collect(&ops).compare(&log, report);
        for end in history.finals().filter(|end| end.shard == shard) {
            final_state(end, &log, report);
        }
    }
    found
}

/// How each wait ended: at which revision, and with which token.
type Waits = BTreeMap<(u64, u64), Option<(u64, Option<u64>)>>;

fn waits(log: &Log<'_>, report: &mut Report) -> Waits {
    let mut waits = Waits::new();
    for (step, change) in log.changes() {
        match change {
            Change::Queued { key, lease, number }
                if waits.insert((*lease, *number), None).is_some() =>
            {
                report.violation(format!(
                    "key {key:?}, revision {}: lease {lease}, number {number} was queued twice",
                    step.revision
                ));
            }
            Change::WaitEnded { lease, number, token, .. } => {
                waits.insert((*lease, *number), Some((step.revision, *token)));
            }
            _ => {}
        }
    }
    waits
}

/// Looks for what a client was told. False if it was told of no change.
fn acknowledged(op: &Op, log: &Log<'_>, waits: &Waits, report: &mut Report) -> bool {
    let there = match &op.outcome {
        Outcome::Ended { revision: Some(revision) } => {
            let number = match op.kind {
                OpKind::Cancel { acquire, .. } => Some(acquire),
                _ => op.number,
            };
            // A cancel that came before its acquire ended no wait.
            let wait = op.lease.zip(number).and_then(|name| waits.get(&name));
            wait.is_none_or(|end| *end == Some((*revision, None)))
        }
        // A hold that was forced before may have been forced at any revision.
        Outcome::Done { .. } if matches!(op.kind, OpKind::ForceRelease { .. }) => {
            log.steps().any(|step| holds_effect(op, step))
        }
        Outcome::Opened { revision: Some(revision) }
        | Outcome::Granted { revision: Some(revision), .. }
        | Outcome::Released { revision: Some(revision), .. }
        | Outcome::Done { revision: Some(revision) } => {
            log.at(*revision).is_some_and(|step| holds_effect(op, step))
        }
        _ => return false,
    };
    if !there {
        report.violation(format!(
            "key {:?}: client {} was answered {:?} to {:?}, which the log does not have",
            op.key, op.client, op.outcome, op.kind
        ));
    }
    true
}

fn holds_effect(op: &Op, step: &Applied) -> bool {
    step.changes.iter().any(|change| match (&op.outcome, change) {
        (Outcome::Opened { .. }, Change::Opened { lease }) => op.lease == Some(*lease),
        (Outcome::Granted { token, own_lease, .. }, Change::Granted { key, lease, token: t }) => {
            (key, Some(*lease), t) == (&op.key, own_lease.or(op.lease), token)
        }
        (Outcome::Released { token, .. }, Change::Ended { key, token: t, cause, .. }) => {
            (key, t, *cause) == (&op.key, token, Cause::Released)
        }
        (Outcome::Done { .. }, Change::LeaseEnded { lease, cause }) => {
            op.kind == OpKind::Close && op.lease == Some(*lease) && *cause == Cause::Closed
        }
        (Outcome::Done { .. }, Change::Ended { key, token, .. } | Change::Forced { key, token }) => {
            matches!(op.kind, OpKind::ForceRelease { token: t, .. } if (&op.key, t) == (key, *token))
        }
        _ => false,
    })
}

/// An acquire: its lease and number, or its place in the history if they are not shown.
type Name = (Option<u64>, Option<u64>, usize);

/// All that the clients of a shard may have caused.
#[derive(Default)]
struct Asked<'a> {
    opens: u64,
    /// Acquires by key; copies under one number are one.
    acquires: BTreeMap<&'a str, BTreeSet<Name>>,
    releases: BTreeSet<u64>,
    /// Leases with a cancel that gives back.
    cancels: BTreeSet<u64>,
    /// The keys of these cancels, and the leases under whose names acquires were sent: what such a
    /// cancel gives back may have a lease of its own.
    cancelled: BTreeSet<&'a str>,
    sessions: BTreeSet<u64>,
    closes: BTreeSet<u64>,
    forced: BTreeSet<u64>,
    /// Acquires for leases of their own, each of which opens one.
    own: u64,
}

impl<'a> Asked<'a> {
    fn collect(ops: &[&'a Op]) -> Self {
        let mut asked = Self::default();
        for (index, op) in ops.iter().enumerate().filter(|(_, op)| !op.had_no_effect()) {
            match op.kind {
                // Each copy of an open makes a lease.
                OpKind::Open { .. } => asked.opens += u64::from(op.attempts.max(1)),
                OpKind::Acquire { .. } => {
                    // An acquire without a name is told apart by its place.
                    let place = if op.number.is_some() { 0 } else { index };
                    asked.sessions.extend(op.lease);
                    let acquires = asked.acquires.entry(&op.key).or_default();
                    acquires.insert((op.lease, op.number, place));
                }
                OpKind::Release { token } => {
                    asked.releases.insert(token);
                }
                OpKind::Cancel { release_if_granted: true, .. } => {
                    asked.cancels.extend(op.lease);
                    asked.cancelled.insert(&op.key);
                }
                OpKind::Close => asked.closes.extend(op.lease),
                OpKind::ForceRelease { token, .. } => {
                    asked.forced.insert(token);
                }
                OpKind::Cancel { .. } | OpKind::Get => {}
            }
        }
        asked.own = asked.acquires.values().map(|acquires| acquires.len() as u64).sum();
        asked
    }

    /// A cancel may have given the hold back.
    fn gives_back(&self, key: &str, lease: u64) -> bool {
        let own = !self.sessions.contains(&lease);
        self.cancels.contains(&lease) || (own && self.cancelled.contains(key))
    }

    fn compare(&self, log: &Log<'_>, report: &mut Report) {
        let mut opened = 0;
        let mut granted: BTreeMap<&str, usize> = BTreeMap::new();
        for (step, change) in log.changes() {
            let unasked = match change {
                Change::Opened { .. } => {
                    opened += 1;
                    opened > self.opens + self.own
                }
                Change::Granted { key, .. } => {
                    let granted = granted.entry(key).or_default();
                    *granted += 1;
                    *granted > self.acquires.get(key.as_str()).map_or(0, BTreeSet::len)
                }
                Change::Ended { key, lease, token, cause } => match cause {
                    Cause::Released => {
                        !self.releases.contains(token) && !self.gives_back(key, *lease)
                    }
                    Cause::Forced => !self.forced.contains(token),
                    Cause::Closed => !self.closes.contains(lease),
                    Cause::Expired => false,
                },
                Change::LeaseEnded { lease, cause: Cause::Closed } => !self.closes.contains(lease),
                Change::Forced { token, .. } => !self.forced.contains(token),
                _ => false,
            };
            if unasked {
                report.violation(format!(
                    "revision {}: {change:?}, which nobody asked for (any more)",
                    step.revision
                ));
            }
        }
    }
}

/// Holders (lease, token) and waiters (lease, number) by key.
type Keys<'a> = BTreeMap<&'a str, (Vec<(u64, u64)>, Vec<(u64, u64)>)>;

fn final_state(end: &FinalState, log: &Log<'_>, report: &mut Report) {
    if log.last() > end.revision {
        let at_ns = log.at(log.last()).and_then(|step| step.at_ns);
        if at_ns.is_some_and(|at_ns| at_ns < end.invoke_ns) {
            let last = log.last();
            report.violation(format!(
                "the log has revision {last}, the state ends at {}",
                end.revision
            ));
        }
        return;
    }
    let expected = replay(log);
    let read: Keys<'_> = end
        .keys
        .iter()
        .map(|key| (key.key.as_str(), (key.holders.clone(), key.waiters.clone())))
        .collect();
    for key in expected.keys().chain(read.keys()).collect::<BTreeSet<_>>() {
        let (expected, read) = (expected.get(*key), read.get(*key));
        if expected != read {
            report.violation(format!(
                "key {key:?}: the final state has {read:?}, the log {expected:?}"
            ));
        }
    }
}

fn replay<'a>(log: &Log<'a>) -> Keys<'a> {
    let mut keys = Keys::new();
    for (_, change) in log.changes() {
        match change {
            Change::Granted { key, lease, token } => {
                keys.entry(key).or_default().0.push((*lease, *token));
            }
            Change::Ended { key, lease, token, .. } => {
                keys.entry(key).or_default().0.retain(|holder| *holder != (*lease, *token));
            }
            Change::Queued { key, lease, number } => {
                keys.entry(key).or_default().1.push((*lease, *number));
            }
            Change::WaitEnded { key, lease, number, .. } => {
                keys.entry(key).or_default().1.retain(|waiter| *waiter != (*lease, *number));
            }
            _ => {}
        }
    }
    keys.retain(|_, (holders, waiters)| !holders.is_empty() || !waiters.is_empty());
    keys
}

#[cfg(test)]
mod tests {
    use super::super::super::build::{Run, S, ended, granted, queued, wait_ended};
    use super::super::super::{Needs, Verdict};
    use crate::history::{Cause, Change, OpKind, Outcome};

    fn verdict(run: &Run) -> Verdict {
        super::super::check(&run.history(), &Needs::default()).verdict()
    }

    /// Client 1 is granted "k" with token 5 at 10 and gives it back at 20.
    fn told() -> Run {
        let mut run = Run::new();
        run.grant_at((1, 1), "k", 5, (None, 10), (S, 11 * S));
        run.release_at(1, "k", 5, 20, (12 * S, 21 * S));
        run
    }

    #[test]
    fn what_was_acknowledged_and_applied_is_fine() {
        let mut run = told();
        run.applied(10, vec![granted("k", 1, 5)]);
        run.applied(20, vec![ended("k", 1, 5)]);
        run.end(30 * S, 20, &[], &[]);
        let needs = Needs { logged: 2, ..Needs::default() };
        let report = super::super::check(&run.history(), &needs);
        assert_eq!(report.verdict(), Verdict::Ok, "{report}");
    }

    #[test]
    fn an_acknowledgement_that_the_log_lacks_is_caught() {
        let mut run = told();
        run.applied(10, vec![granted("k", 1, 5)]);
        assert_eq!(verdict(&run), Verdict::Violation, "the release");
        let mut run = told();
        run.applied(10, vec![granted("k", 2, 5)]);
        run.applied(20, vec![ended("k", 2, 5)]);
        assert_eq!(verdict(&run), Verdict::Violation, "another lease");
        let mut run = told();
        run.applied(11, vec![granted("k", 1, 5)]);
        run.applied(20, vec![ended("k", 1, 5)]);
        assert_eq!(verdict(&run), Verdict::Violation, "another revision");
    }

    #[test]
    fn nodes_that_applied_different_things_are_caught() {
        let mut run = told();
        run.applied_by(1, 10, vec![granted("k", 1, 5)]);
        run.applied_by(2, 10, vec![granted("k", 2, 5)]);
        run.applied(20, vec![ended("k", 1, 5)]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn what_nobody_asked_for_is_caught() {
        let unasked = [
            vec![granted("k", 1, 6)],
            vec![ended("k", 1, 4)],
            vec![Change::LeaseEnded { lease: 1, cause: Cause::Closed }],
            vec![Change::Forced { key: "k".into(), token: 5 }],
        ];
        for changes in unasked {
            let mut run = told();
            run.applied(10, vec![granted("k", 1, 5)]);
            run.applied(20, vec![ended("k", 1, 5)]);
            assert_eq!(verdict(&run), Verdict::Ok);
            run.applied(30, changes.clone());
            assert_eq!(verdict(&run), Verdict::Violation, "{changes:?}");
        }
    }

    #[test]
    fn a_cancel_may_give_back_what_has_a_lease_of_its_own_and_nothing_else() {
        let given_back = |release_if_granted, lease| {
            let mut run = Run::new();
            let acquire = OpKind::Acquire { wait_ms: 9 };
            run.call(1, "k", acquire, (S, 9 * S), Outcome::Unknown).number = Some(1);
            run.call(2, "other", acquire, (S, 9 * S), Outcome::Unknown).number = Some(1);
            let kind = OpKind::Cancel { acquire: 1, release_if_granted };
            run.call(1, "k", kind, (S, 9 * S), Outcome::Unknown);
            run.applied(5, vec![granted("k", lease, 5)]);
            run.applied(6, vec![ended("k", lease, 5)]);
            verdict(&run)
        };
        assert_eq!(given_back(true, 1), Verdict::Ok);
        assert_eq!(given_back(true, 7), Verdict::Ok, "a lease of its own");
        assert_eq!(given_back(true, 2), Verdict::Violation, "another session's");
        assert_eq!(given_back(false, 7), Verdict::Violation, "the cancel gives nothing back");
    }

    #[test]
    fn an_effect_of_a_refused_request_is_caught_and_of_an_unknown_one_is_not() {
        let granted_after = |outcome, attempts| {
            let mut run = Run::new();
            let op = run.call(1, "k", OpKind::Acquire { wait_ms: 0 }, (S, 9 * S), outcome);
            (op.number, op.attempts) = (Some(1), attempts);
            run.applied(5, vec![granted("k", 1, 5)]);
            verdict(&run)
        };
        let refused = Outcome::Refused { code: "key_empty".into(), token: None, revision: None };
        assert_eq!(granted_after(refused, 1), Verdict::Violation);
        assert_eq!(granted_after(Outcome::Unknown, 1), Verdict::Ok);
    }

    #[test]
    fn an_acquire_that_was_queued_twice_is_caught() {
        let mut run = Run::new();
        run.applied(10, vec![queued("k", 2, 1)]);
        run.applied(11, vec![wait_ended("k", 2, 1, None)]);
        run.applied(12, vec![queued("k", 2, 1)]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_wait_that_was_reported_over_and_was_granted_is_caught() {
        let ended_with = |token| {
            let mut run = Run::new();
            let kind = OpKind::Cancel { acquire: 1, release_if_granted: false };
            run.call(2, "k", kind, (S, 12 * S), Outcome::Ended { revision: Some(11) });
            run.applied(10, vec![queued("k", 2, 1)]);
            run.applied(11, vec![wait_ended("k", 2, 1, token)]);
            verdict(&run)
        };
        assert_eq!(ended_with(None), Verdict::Ok);
        assert_eq!(ended_with(Some(5)), Verdict::Violation);
    }

    #[test]
    fn a_final_state_that_the_log_does_not_lead_to_is_caught() {
        let mut run = told();
        run.applied(10, vec![granted("k", 1, 5)]);
        run.applied(20, vec![ended("k", 1, 5)]);
        run.end(30 * S, 25, &[("other", &[(3, 9)], &[])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
        let mut run = Run::new();
        run.grant_at((1, 1), "k", 5, (None, 10), (S, 11 * S));
        run.applied(10, vec![granted("k", 1, 5)]);
        run.applied(20, vec![queued("k", 2, 1)]);
        run.end(30 * S, 15, &[("k", &[(1, 5)], &[])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation, "the end of the log is gone");
    }
}
