//! G2 fencing: the tokens of one key strictly increase in grant order, one token is one grant,
//! and a store that checks tokens takes nothing below the highest it has seen.
//!
//! Grant order is known twice: by the shard's revisions where the client's interface shows them,
//! and in real time (a grant read before another was asked for is the earlier one). In the nodes'
//! logs each grant raises the shard's one counter.

use std::collections::BTreeMap;

use crate::history::{Change, History, Op, OpKind, Outcome, StoreWrite};

use super::log::{Log, logs};
use super::{Needs, Report};

struct Grant<'a> {
    op: &'a Op,
    token: u64,
    revision: Option<u64>,
    return_ns: u64,
}

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G2 fencing");
    let mut by_key: BTreeMap<(u32, &str), Vec<Grant<'_>>> = BTreeMap::new();
    for op in history.ops() {
        let OpKind::Acquire { .. } = op.kind else { continue };
        let (Outcome::Granted { token, revision, .. }, Some(return_ns)) =
            (&op.outcome, op.return_ns)
        else {
            continue;
        };
        let grant = Grant { op, token: *token, revision: *revision, return_ns };
        by_key.entry((op.shard, &op.key)).or_default().push(grant);
    }
    let mut tokens = 0;
    for ((_, key), grants) in &mut by_key {
        tokens += grants.len() as u64;
        one_grant_each(key, grants, &mut report);
        by_revision(key, grants, &mut report);
        in_real_time(key, grants, &mut report);
    }
    let refused = store(history, &mut report);
    report.cover("tokens", tokens, needs.tokens);
    report.cover("stale_refused", refused, needs.stale_refused);
    let logged: u64 = logs(history).values().map(|log| in_log(log, &mut report)).sum();
    report.cover("logged", logged, needs.logged);
    report
}

/// Returns the number of grants.
fn in_log(log: &Log<'_>, report: &mut Report) -> u64 {
    let (mut highest, mut grants) = (0, 0);
    for (step, change) in log.changes() {
        let Change::Granted { key, token, .. } = change else { continue };
        grants += 1;
        if *token <= highest {
            report.violation(format!(
                "key {key:?}, revision {}: token {token} after {highest} of the same shard",
                step.revision
            ));
        }
        highest = highest.max(*token);
    }
    grants
}

/// The same number of the same lease may be recorded twice (a retry that got the remembered
/// outcome); anything else under the same token is a second grant.
fn one_grant_each(key: &str, grants: &mut [Grant<'_>], report: &mut Report) {
    grants.sort_by_key(|grant| (grant.token, grant.return_ns));
    for pair in grants.windows(2) {
        let (a, b) = (pair[0].op, pair[1].op);
        let same_call = a.lease.is_some()
            && a.number.is_some()
            && (a.client, a.lease, a.number) == (b.client, b.lease, b.number);
        if pair[0].token == pair[1].token && !same_call {
            report.violation(format!(
                "key {key:?}: token {} was granted to client {} and to client {}",
                pair[0].token, a.client, b.client
            ));
        }
    }
}

fn by_revision(key: &str, grants: &mut [Grant<'_>], report: &mut Report) {
    grants.sort_by_key(|grant| (grant.revision, grant.token));
    let known = grants.iter().position(|grant| grant.revision.is_some()).unwrap_or(grants.len());
    for pair in grants[known..].windows(2) {
        if pair[0].token > pair[1].token {
            report.violation(format!(
                "key {key:?}: token {} at revision {:?}, but then {} at {:?}",
                pair[0].token, pair[0].revision, pair[1].token, pair[1].revision
            ));
        }
    }
}

fn in_real_time(key: &str, grants: &mut [Grant<'_>], report: &mut Report) {
    let mut returns: Vec<(u64, u64)> = grants.iter().map(|g| (g.return_ns, g.token)).collect();
    returns.sort_unstable();
    grants.sort_by_key(|grant| grant.op.invoke_ns);
    let mut returned = returns.into_iter().peekable();
    let mut highest = 0;
    for grant in grants.iter() {
        while let Some((_, token)) = returned.next_if(|(at, _)| *at < grant.op.invoke_ns) {
            highest = highest.max(token);
        }
        if grant.token <= highest {
            report.violation(format!(
                "key {key:?}: client {} asked after token {highest} was granted and got {}",
                grant.op.client, grant.token
            ));
        }
    }
}

/// Returns how many writes were refused. Records are in the store's own order where times tie.
fn store(history: &History, report: &mut Report) -> u64 {
    let mut writes: Vec<&StoreWrite> = history.store_writes().collect();
    writes.sort_by_key(|write| write.at_ns);
    let mut highest: BTreeMap<&str, u64> = BTreeMap::new();
    let mut refused = 0;
    for write in writes {
        let highest = highest.entry(&write.key).or_insert(0);
        if write.accepted && write.token < *highest {
            report.violation(format!(
                "key {:?}: the store took token {} of client {} after {highest}",
                write.key, write.token, write.client
            ));
        }
        if write.accepted {
            *highest = write.token.max(*highest);
        } else {
            refused += 1;
        }
    }
    refused
}

#[cfg(test)]
mod tests {
    use super::super::build::{Run, S, ended, granted};
    use super::super::{Needs, Verdict};
    use super::check;

    fn verdict(run: &Run) -> Verdict {
        check(&run.history(), &Needs { tokens: 2, ..Needs::default() }).verdict()
    }

    #[test]
    fn rising_tokens_are_fine() {
        let mut run = Run::new();
        run.grant(1, "k", 5, S, 2 * S);
        run.grant(2, "k", 6, 2 * S + 1, 3 * S);
        run.grant(3, "other", 1, 4 * S, 5 * S);
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_token_that_falls_in_real_time_is_caught() {
        let mut run = Run::new();
        run.grant(1, "k", 6, S, 2 * S);
        run.grant(2, "k", 5, 3 * S, 4 * S);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn concurrent_grants_may_come_back_in_any_order() {
        let mut run = Run::new();
        run.grant(1, "k", 6, S, 2 * S);
        run.grant(2, "k", 5, S, 4 * S);
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_token_that_falls_by_revision_is_caught() {
        let mut run = Run::new();
        run.grant_at((1, 1), "k", 6, (None, 10), (S, 9 * S));
        run.grant_at((2, 1), "k", 5, (None, 11), (S, 9 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn one_token_for_two_grants_is_caught() {
        let mut run = Run::new();
        run.grant(1, "k", 6, S, 9 * S);
        run.grant(2, "k", 6, S, 9 * S);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_remembered_outcome_is_not_a_second_grant() {
        let mut run = Run::new();
        run.grant_at((1, 4), "k", 6, (None, 10), (S, 9 * S));
        run.grant_at((1, 4), "k", 6, (None, 10), (S, 9 * S));
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_token_reset_by_a_new_key_is_caught() {
        let mut run = Run::new();
        run.grant(1, "k", 900, S, 2 * S);
        run.release(1, "k", 900, 3 * S, 4 * S);
        run.grant(1, "k", 1, 5 * S, 6 * S);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_token_of_the_log_that_does_not_rise_is_caught() {
        for token in [5, 6] {
            let mut run = Run::new();
            run.applied(10, vec![granted("k", 1, 6)]);
            run.applied(11, vec![ended("k", 1, 6)]);
            run.applied(12, vec![granted("k", 1, token)]);
            assert_eq!(check(&run.history(), &Needs::default()).verdict(), Verdict::Violation);
        }
    }

    #[test]
    fn a_store_that_takes_a_stale_write_is_caught() {
        let mut run = Run::new();
        run.store("k", 5, true, S);
        run.store("k", 6, true, 2 * S);
        run.store("k", 5, true, 3 * S);
        assert_eq!(check(&run.history(), &Needs::default()).verdict(), Verdict::Violation);
    }

    #[test]
    fn a_run_whose_store_never_refused_is_invalid_if_it_had_to() {
        let mut run = Run::new();
        run.store("k", 5, true, S);
        let needs = Needs { stale_refused: 1, ..Needs::default() };
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Invalid);
        run.store("k", 4, false, 2 * S);
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Ok);
    }
}
