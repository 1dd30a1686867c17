//! G5 durable: what was acknowledged is there after the last fault, on every node, once.
//!
//! Compares the history with the cluster's final state: no acknowledged revision above it; every
//! hold and every wait whose lease was certainly alive when it was read, and which nobody ended,
//! is there; no hold is there whose end was acknowledged; no holder's token is below one that was
//! granted; all nodes have one digest. A request under one number has one outcome. What the nodes'
//! logs hold is what clients were answered, and nothing that nobody asked for.

use std::collections::BTreeMap;

use crate::history::{FinalKey, FinalState, History, Op, OpKind, Outcome};

use super::holds::{Hold, Holds, collect, to_ns};
use super::{Needs, Report};

mod applied;

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G5 durable");
    let holds = collect(history);
    let mut acked = 0;
    let mut nodes_min = u64::MAX;
    for end in history.finals() {
        acked += revisions(history, end, &mut report);
        acked += compare_holds(&holds, end, &mut report);
        acked += compare_waits(history, end, &mut report);
        nodes_min = nodes_min.min(digests(end, &mut report));
    }
    let retries = one_outcome_each(history, &mut report);
    report.cover("acked", acked, needs.acked);
    let logged = applied::check(history, &mut report);
    report.cover("logged", logged, needs.logged);
    report.cover("nodes", if nodes_min == u64::MAX { 0 } else { nodes_min }, needs.nodes);
    report.cover("retries", retries, needs.retries);
    report
}

fn revisions(history: &History, end: &FinalState, report: &mut Report) -> u64 {
    let mut acked = 0;
    for op in history.ops().filter(|op| op.shard == end.shard && op.outcome.is_ok()) {
        let Some(revision) = op.outcome.revision() else { continue };
        acked += 1;
        if revision > end.revision && op.return_ns.is_some_and(|at| at <= end.invoke_ns) {
            report.violation(format!(
                "shard {}: client {} was acknowledged revision {revision}, but the state ends at {}",
                end.shard, op.client, end.revision
            ));
        }
    }
    acked
}

fn compare_holds(holds: &Holds<'_>, end: &FinalState, report: &mut Report) -> u64 {
    let keys: BTreeMap<&str, &FinalKey> = end.keys.iter().map(|k| (k.key.as_str(), k)).collect();
    let mut compared = 0;
    for ((shard, key), list) in holds {
        if *shard != end.shard {
            continue;
        }
        let last = keys.get(key);
        let held = |token| last.is_some_and(|k| k.holders.iter().any(|h| h.1 == token));
        for hold in list {
            let present = held(hold.token);
            if must_be_held(hold, end) {
                compared += 1;
                if !present {
                    report.violation(format!(
                        "key {key:?}: token {} of client {} was acknowledged and is gone",
                        hold.token, hold.client
                    ));
                }
            } else if hold.end_acked {
                compared += 1;
                if present {
                    report.violation(format!(
                        "key {key:?}: token {} of client {} was given back and is held again",
                        hold.token, hold.client
                    ));
                }
            }
        }
        token_not_below(key, list, last.copied(), end, report);
    }
    for key in end.keys.iter().filter(|key| key.holders.len() > 1) {
        report.violation(format!("key {:?} has {} holders", key.key, key.holders.len()));
    }
    compared
}

/// Nobody ended it, and its lease outlived the reading of the final state.
fn must_be_held(hold: &Hold, end: &FinalState) -> bool {
    let until = hold.lease_until_ns.max(hold.claimed_until_ns);
    hold.granted_ns <= end.invoke_ns
        && hold.given_up_ns.is_none()
        && until.is_some_and(|until| until > end.return_ns)
}

fn token_not_below(
    key: &str,
    list: &[Hold],
    last: Option<&FinalKey>,
    end: &FinalState,
    report: &mut Report,
) {
    let before = |hold: &&Hold| hold.granted_ns <= end.invoke_ns;
    let highest = list.iter().filter(before).map(|hold| hold.token).max().unwrap_or(0);
    for (lease, token) in last.map(|key| key.holders.as_slice()).unwrap_or_default() {
        if *token < highest {
            report.violation(format!(
                "key {key:?}: lease {lease} holds with token {token}, but {highest} was granted"
            ));
        }
    }
}

/// Waits that were acknowledged with `queued`, that nobody ended and whose lease lives.
fn compare_waits(history: &History, end: &FinalState, report: &mut Report) -> u64 {
    let mut until: BTreeMap<u64, u64> = BTreeMap::new();
    for renewal in history.renewals().filter(|r| r.shard == end.shard && r.ack_ns.is_some()) {
        let lease = until.entry(renewal.lease).or_insert(0);
        *lease = (renewal.send_ns + to_ns(renewal.ttl_ms)).max(*lease);
    }
    let ended = |op: &Op| match op.kind {
        OpKind::Cancel { acquire, .. } => Some((op.lease?, Some(acquire))),
        OpKind::Close => Some((op.lease?, None)),
        _ => None,
    };
    let ends: std::collections::BTreeSet<(u64, Option<u64>)> =
        history.ops().filter(|op| op.shard == end.shard).filter_map(ended).collect();
    let mut compared = 0;
    for op in history.ops().filter(|op| op.shard == end.shard && op.return_ns.is_none()) {
        let (OpKind::Acquire { wait_ms: u32::MAX }, Some(queued)) = (op.kind, op.queued) else {
            continue;
        };
        let Some((lease, number)) = op.lease.zip(op.number) else { continue };
        let alive = until.get(&lease).is_some_and(|until| *until > end.return_ns);
        if !alive
            || queued.revision > end.revision
            || ends.contains(&(lease, None))
            || ends.contains(&(lease, Some(number)))
        {
            continue;
        }
        compared += 1;
        let last = end.keys.iter().find(|key| key.key == op.key);
        let waits = last.is_some_and(|key| key.waiters.contains(&(lease, number)));
        let holds = last.is_some_and(|key| key.holders.iter().any(|holder| holder.0 == lease));
        if !waits && !holds {
            report.violation(format!(
                "key {:?}: client {} was queued as number {number} and waits no more",
                op.key, op.client
            ));
        }
    }
    compared
}

/// Returns how many nodes agree.
fn digests(end: &FinalState, report: &mut Report) -> u64 {
    let differs = |pair: &[crate::history::FinalNode]| {
        (pair[0].revision, pair[0].digest) != (pair[1].revision, pair[1].digest)
    };
    if end.nodes.windows(2).any(differs) {
        let text: Vec<String> = end
            .nodes
            .iter()
            .map(|node| format!("node {}: {:016x} at {}", node.node, node.digest, node.revision))
            .collect();
        report.violation(format!("shard {}: digests differ: {}", end.shard, text.join(", ")));
    }
    end.nodes.len() as u64
}

/// Returns how many requests were sent more than once and settled.
fn one_outcome_each(history: &History, report: &mut Report) -> u64 {
    let mut outcomes: BTreeMap<(u32, u64, u64), (&Op, &Outcome)> = BTreeMap::new();
    let mut retries = 0;
    for op in history.ops().filter(|op| op.outcome != Outcome::Unknown) {
        retries += u64::from(op.attempts > 1);
        let Some((lease, number)) = op.lease.zip(op.number) else { continue };
        if says_nothing(&op.outcome) {
            continue;
        }
        let first = outcomes.entry((op.shard, lease, number)).or_insert((op, &op.outcome));
        if first.1 != &op.outcome {
            report.violation(format!(
                "lease {lease}, number {number} (client {}): first {:?}, then {:?}",
                first.0.client, first.1, op.outcome
            ));
        }
    }
    retries
}

/// A refusal of the number or of the lease: what the first copy of the request did, it does not say.
fn says_nothing(outcome: &Outcome) -> bool {
    const CODES: [&str; 4] =
        ["number_below_floor", "number_beyond_window", "lease_dead", "lease_lost"];
    matches!(outcome, Outcome::Refused { code, .. } if CODES.contains(&code.as_str()))
}

#[cfg(test)]
mod tests {
    use super::super::build::{Key, Run, S};
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::OpKind;

    fn verdict(run: &Run) -> Verdict {
        check(&run.history(), &Needs { acked: 1, ..Needs::default() }).verdict()
    }

    /// Client 1 holds "k" with token 5 from revision 10 and renews; client 2 waits from 11.
    fn held() -> Run {
        let mut run = Run::new();
        run.renew(1, 50 * S, 0, 1);
        run.renew(2, 50 * S, 0, 1);
        run.grant_at((1, 1), "k", 5, (None, 10), (S, 2 * S));
        run.waiting(2, 1, "k", 11, 2 * S);
        run
    }

    #[test]
    fn what_was_acknowledged_and_is_there_is_fine() {
        let mut run = held();
        run.end(9 * S, 11, &[("k", &[(1, 5)], &[(2, 1)])], &[(11, 7), (11, 7), (11, 7)]);
        let needs = Needs { acked: 3, nodes: 3, ..Needs::default() };
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Ok);
    }

    #[test]
    fn a_lost_hold_is_caught() {
        let mut run = held();
        run.end(9 * S, 11, &[("k", &[], &[(2, 1)])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_lost_wait_is_caught() {
        let mut run = held();
        run.end(9 * S, 11, &[("k", &[(1, 5)], &[])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_wait_that_began_after_the_final_state_is_not_missed() {
        let mut run = held();
        run.waiting(3, 1, "k", 12, 8 * S);
        run.renew(3, 50 * S, 0, 1);
        run.end(9 * S, 11, &[("k", &[(1, 5)], &[(2, 1)])], &[]);
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_lost_revision_is_caught() {
        let mut run = held();
        run.end(9 * S, 9, &[("k", &[(1, 5)], &[(2, 1)])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_hold_that_came_back_is_caught() {
        let mut run = held();
        run.release_at(1, "k", 5, 12, (3 * S, 4 * S));
        run.end(9 * S, 12, &[("k", &[(1, 5)], &[(2, 1)])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_hold_that_may_have_expired_is_not_missed() {
        let mut run = Run::new();
        run.renew(1, 5 * S, 0, 1);
        run.grant_at((1, 1), "k", 5, (None, 10), (S, 2 * S));
        run.end(9 * S, 11, &[], &[]);
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_final_token_below_a_granted_one_is_caught() {
        let mut run = held();
        run.grant_at((3, 1), "k", 9, (None, 20), (S, 2 * S));
        run.end(9 * S, 20, &[("k", &[(1, 5)], &[(2, 1)])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn different_digests_are_caught_and_missing_nodes_are_invalid() {
        let keys: &[Key<'_>] = &[("k", &[(1, 5)], &[(2, 1)])];
        let mut run = held();
        run.end(9 * S, 11, keys, &[(11, 7), (11, 8)]);
        assert_eq!(verdict(&run), Verdict::Violation);
        let mut run = held();
        run.end(9 * S, 11, keys, &[(11, 7), (11, 7)]);
        let needs = Needs { nodes: 3, ..Needs::default() };
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Invalid);
    }

    #[test]
    fn a_late_copy_that_finds_its_number_or_lease_over_contradicts_nothing() {
        let answered = |code| {
            let mut run = held();
            run.grant_at((3, 4), "a", 8, (None, 12), (S, 2 * S));
            let kind = OpKind::Acquire { wait_ms: 0 };
            run.refused(3, "a", kind, code, (S, 3 * S)).number = Some(4);
            run.end(9 * S, 12, &[("k", &[(1, 5)], &[(2, 1)])], &[]);
            verdict(&run)
        };
        assert_eq!(answered("number_below_floor"), Verdict::Ok);
        assert_eq!(answered("lease_dead"), Verdict::Ok);
        assert_eq!(answered("held"), Verdict::Violation);
    }

    #[test]
    fn a_retry_applied_twice_is_caught() {
        let mut run = held();
        run.grant_at((3, 4), "a", 8, (None, 12), (S, 2 * S));
        run.grant_at((3, 4), "a", 9, (None, 13), (S, 3 * S));
        run.end(9 * S, 13, &[("k", &[(1, 5)], &[(2, 1)])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }
}
