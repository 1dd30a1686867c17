//! G7 with the nodes' logs: who held what at which revision is known, so every read is compared
//! with the truth; and what was applied when, so no effect precedes its request and no answer
//! precedes its effect.

use std::collections::BTreeMap;

use super::super::Report;
use super::super::log::{Log, logs};
use crate::history::{Change, History, Op, OpKind, Outcome};

/// Who held each key, from which revision on.
type Holders<'a> = BTreeMap<&'a str, Vec<(u64, Option<u64>)>>;

/// Returns how many calls were compared.
pub(super) fn check(history: &History, report: &mut Report) -> u64 {
    let logs = logs(history);
    let holders: BTreeMap<u32, Holders<'_>> =
        logs.iter().map(|(shard, log)| (*shard, holders(log))).collect();
    let mut compared = 0;
    for op in history.ops() {
        let Some(log) = logs.get(&op.shard) else { continue };
        compared += u64::from(in_time(op, log, report));
        if let Some((revision, token)) = seen(op) {
            compared += 1;
            let truth = at(&holders[&op.shard], &op.key, revision);
            if token != truth {
                report.violation(format!(
                    "key {:?}: client {} was told of token {token:?} at revision {revision}, \
                     but it was {truth:?}",
                    op.key, op.client
                ));
            }
        }
    }
    compared
}

fn holders<'a>(log: &Log<'a>) -> Holders<'a> {
    let mut holders = Holders::new();
    for (step, change) in log.changes() {
        let (key, token) = match change {
            Change::Granted { key, token, .. } => (key, Some(*token)),
            Change::Ended { key, .. } => (key, None),
            _ => continue,
        };
        holders.entry(key).or_default().push((step.revision, token));
    }
    holders
}

fn at(holders: &Holders<'_>, key: &str, revision: u64) -> Option<u64> {
    let changes = holders.get(key)?;
    let upto = changes.partition_point(|(from, _)| *from <= revision);
    upto.checked_sub(1).and_then(|last| changes[last].1)
}

/// What an answer says about the holder, and at which revision.
fn seen(op: &Op) -> Option<(u64, Option<u64>)> {
    match &op.outcome {
        Outcome::Read { token, revision, stale: false } => Some((*revision, *token)),
        Outcome::Refused { code, token: Some(token), revision: Some(revision) }
            if code == "held" =>
        {
            Some((*revision, Some(*token)))
        }
        _ => None,
    }
}

/// True if the call's own effect has a time.
fn in_time(op: &Op, log: &Log<'_>, report: &mut Report) -> bool {
    let own = matches!(
        (op.kind, &op.outcome),
        (OpKind::Open { .. }, Outcome::Opened { .. })
            | (OpKind::Acquire { .. }, Outcome::Granted { .. })
            | (OpKind::Release { .. }, Outcome::Released { .. })
            | (OpKind::Close, Outcome::Done { .. })
    );
    let step = op.outcome.revision().and_then(|revision| log.at(revision));
    let Some(at_ns) = step.filter(|_| own).and_then(|step| step.at_ns) else { return false };
    if at_ns < op.invoke_ns || op.return_ns.is_some_and(|returned| returned < at_ns) {
        report.violation(format!(
            "key {:?}: {:?} of client {} was called at {} and answered at {:?}, but applied at \
             {at_ns}",
            op.key, op.kind, op.client, op.invoke_ns, op.return_ns
        ));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::super::build::{Run, S, ended, granted};
    use super::super::super::{Needs, Verdict};
    use crate::history::{OpKind, Outcome};

    /// Token 5 is granted at revision and second 10 and ends at 20.
    fn read(token: Option<u64>, revision: u64) -> Verdict {
        let mut run = Run::new();
        run.applied(10, vec![granted("k", 1, 5)]);
        run.applied(20, vec![ended("k", 1, 5)]);
        let outcome = Outcome::Read { token, revision, stale: false };
        run.call(9, "k", OpKind::Get, (S, 30 * S), outcome);
        // Somebody whose outcome did not arrive: without the log anything could be held.
        let kind = OpKind::Acquire { wait_ms: 0 };
        run.call(1, "k", kind, (S, S), Outcome::Unknown).return_ns = None;
        super::super::check(&run.history(), &Needs::default()).verdict()
    }

    #[test]
    fn a_read_is_compared_with_the_truth() {
        assert_eq!(read(Some(5), 15), Verdict::Ok);
        assert_eq!(read(None, 9), Verdict::Ok);
        assert_eq!(read(None, 15), Verdict::Violation);
        assert_eq!(read(Some(5), 20), Verdict::Violation);
        assert_eq!(read(Some(4), 15), Verdict::Violation);
    }

    #[test]
    fn effects_before_the_call_or_after_the_answer_are_caught() {
        let granted_in = |times| {
            let mut run = Run::new();
            run.applied(10, vec![granted("k", 1, 5)]);
            run.grant_at((1, 1), "k", 5, (None, 10), times);
            super::super::check(&run.history(), &Needs::default()).verdict()
        };
        assert_eq!(granted_in((9 * S, 11 * S)), Verdict::Ok);
        assert_eq!(granted_in((11 * S, 12 * S)), Verdict::Violation);
        assert_eq!(granted_in((8 * S, 9 * S)), Verdict::Violation);
    }
}
