//! G1 exclusion: the sure intervals of the holds of one key never overlap.
//!
//! A hold is sure from the moment its client read the grant until the first of: its own release,
//! cancel or close was called; the send of the last acknowledged renewal of its lease + TTL −
//! margin; the validity that the client library stated; its client learned of its loss; an
//! operator forced it at once. A hold of which nothing states a validity is not judged, and not
//! counted. In the nodes' logs no key is granted while it is held, and nothing ends that did not
//! begin.

use std::collections::BTreeMap;

use crate::clock::to_ms;
use crate::history::{Change, History};

use super::holds::{Hold, Holds, collect};
use super::log::{Log, logs};
use super::{Needs, Report};

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G1 exclusion");
    let mut pairs = 0;
    let mut gap_min_ns = u64::MAX;
    for ((_, key), list) in &collect(history) as &Holds<'_> {
        let mut intervals: Vec<(u64, u64, &Hold)> = list.iter().filter_map(sure).collect();
        intervals.sort_by_key(|&(start, end, hold)| (start, end, hold.token));
        let mut latest: Option<(u64, &Hold)> = None;
        for (start, end, hold) in intervals {
            if let Some((until, before)) = latest {
                pairs += 1;
                if start < until {
                    report.violation(overlap(key, before, hold, until - start));
                } else {
                    gap_min_ns = gap_min_ns.min(start - until);
                }
            }
            if latest.is_none_or(|(until, _)| end > until) {
                latest = Some((end, hold));
            }
        }
    }
    report.cover("handovers", pairs, needs.handovers);
    let logged: u64 = logs(history).values().map(|log| in_log(log, &mut report)).sum();
    report.cover("logged", logged, needs.logged);
    if gap_min_ns != u64::MAX {
        report.figure("smallest_gap_ms", format!("{:.3}", to_ms(gap_min_ns)));
    }
    report
}

/// One holder at a time, and only holders end. Returns the number of grants.
fn in_log(log: &Log<'_>, report: &mut Report) -> u64 {
    let mut holders: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let mut grants = 0;
    for (step, change) in log.changes() {
        match change {
            Change::Granted { key, lease, token } => {
                grants += 1;
                if let Some((_, before)) = holders.insert(key, (*lease, *token)) {
                    report.violation(format!(
                        "key {key:?}, revision {}: token {token} was granted while {before} was held",
                        step.revision
                    ));
                }
            }
            Change::Ended { key, lease, token, .. }
                if holders.remove(key.as_str()) != Some((*lease, *token)) =>
            {
                report.violation(format!(
                    "key {key:?}, revision {}: token {token} ended, but lease {lease} did not hold it",
                    step.revision
                ));
            }
            _ => {}
        }
    }
    grants
}

/// The interval in which the client was sure; `None` if there was none.
fn sure(hold: &Hold) -> Option<(u64, u64, &Hold)> {
    let stated = hold.sure_until_ns.max(hold.claimed_until_ns)?;
    let end = [Some(stated), hold.given_up_ns, hold.lost_ns].into_iter().flatten().min()?;
    (end > hold.granted_ns).then_some((hold.granted_ns, end, hold))
}

fn overlap(key: &str, before: &Hold, hold: &Hold, by_ns: u64) -> String {
    format!(
        "key {key:?}: client {} with token {} was sure for {:.3} ms more when client {} got token {}",
        before.client,
        before.token,
        to_ms(by_ns),
        hold.client,
        hold.token
    )
}

#[cfg(test)]
mod tests {
    use super::super::build::{Run, S, ended, granted};
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::{OpKind, Outcome};

    fn needs() -> Needs {
        Needs { handovers: 1, ..Needs::default() }
    }

    #[test]
    fn a_handover_by_release_is_fine() {
        let mut run = Run::new();
        run.renew(1, 10 * S, 0, S / 10);
        run.renew(2, 10 * S, 0, S / 10);
        run.grant(1, "k", 5, S, 2 * S);
        run.release(1, "k", 5, 3 * S, 4 * S);
        run.grant(2, "k", 6, 2 * S, 3 * S + 1);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Ok);
    }

    #[test]
    fn two_holders_at_once_are_caught() {
        let mut run = Run::new();
        run.renew(1, 10 * S, 0, S / 10);
        run.renew(2, 10 * S, 0, S / 10);
        run.grant(1, "k", 5, S, 2 * S);
        run.release(1, "k", 5, 3 * S, 4 * S);
        run.grant(2, "k", 6, 2 * S, 3 * S - 1);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Violation);
    }

    #[test]
    fn a_grant_while_a_renewed_holder_is_silent_is_caught() {
        let mut run = Run::new();
        run.renew(1, 5 * S, 4 * S, 4 * S + 1);
        run.renew(2, 50 * S, 0, 1);
        run.grant(1, "k", 5, S, 2 * S);
        run.grant(2, "k", 6, 2 * S, 8 * S);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Violation);
    }

    #[test]
    fn an_unacknowledged_renewal_extends_nothing() {
        let mut run = Run::new();
        run.renew(1, 5 * S, 0, 1);
        run.renew_unanswered(1, 5 * S, 4 * S);
        run.renew(2, 50 * S, 0, 1);
        run.grant(1, "k", 5, S, 2 * S);
        run.grant(2, "k", 6, 2 * S, 6 * S);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Ok);
    }

    #[test]
    fn what_a_library_claims_is_held_against_it() {
        let mut run = Run::new();
        run.grant(1, "k", 5, S, 2 * S);
        run.claim(1, "k", 5, 3 * S, 9 * S);
        run.claim(2, "k", 6, 8 * S, 12 * S);
        run.grant(2, "k", 6, 2 * S, 8 * S);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Violation);
    }

    #[test]
    fn a_long_hold_is_compared_with_every_later_one() {
        let mut run = Run::new();
        for client in 1..=3 {
            run.renew(client, 60 * S, 0, 1);
        }
        run.grant(1, "k", 5, 0, S);
        run.grant(2, "k", 6, 0, 2 * S);
        run.release(2, "k", 6, 3 * S, 3 * S + 1);
        run.grant(3, "k", 7, 0, 4 * S);
        assert_eq!(check(&run.history(), &needs()).violations_total, 2);
    }

    #[test]
    fn a_refused_release_of_somebody_else_excuses_nothing() {
        let mut run = Run::new();
        run.renew(1, 50 * S, 0, 1);
        run.renew(2, 50 * S, 0, 1);
        run.grant(1, "k", 5, 0, S);
        run.release_refused(3, "k", 5, 2 * S, 3 * S);
        run.grant(2, "k", 6, 0, 4 * S);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Violation);
    }

    #[test]
    fn a_grant_that_was_answered_on_two_connections_is_one_hold() {
        let mut run = Run::new();
        run.renew(1, 50 * S, 0, 1);
        run.grant(1, "k", 5, 0, S);
        run.grant(1, "k", 5, 0, 2 * S);
        assert_eq!(check(&run.history(), &Needs::default()).verdict(), Verdict::Ok);
    }

    #[test]
    fn a_forced_hold_is_sure_as_long_as_its_client_says_unless_it_was_forced_at_once() {
        let forced = |now, outcome, attempts| {
            let mut run = Run::new();
            run.renew(1, 50 * S, 0, 1);
            run.renew(2, 50 * S, 0, 1);
            run.grant(1, "k", 5, 0, S);
            run.claim(1, "k", 5, S, 6 * S);
            let kind = OpKind::ForceRelease { token: 5, now };
            run.call(3, "k", kind, (2 * S, 3 * S), outcome).attempts = attempts;
            run.grant(2, "k", 6, 0, 5 * S);
            check(&run.history(), &needs()).verdict()
        };
        let done = Outcome::Done { revision: None };
        assert_eq!(forced(false, done.clone(), 1), Verdict::Violation);
        assert_eq!(forced(true, done, 1), Verdict::Ok);
        // A copy that finds the hold gone does not say that no earlier one ended it.
        let gone = Outcome::Refused { code: "not_owner".to_owned(), token: None, revision: None };
        assert_eq!(forced(true, gone.clone(), 2), Verdict::Ok);
        assert_eq!(forced(true, gone, 1), Verdict::Violation);
    }

    #[test]
    fn a_log_that_grants_what_is_held_is_caught() {
        let mut run = Run::new();
        run.applied(10, vec![granted("k", 1, 5)]);
        run.applied(11, vec![granted("k", 2, 6)]);
        assert_eq!(check(&run.history(), &Needs::default()).violations_total, 1);
    }

    #[test]
    fn a_log_that_ends_what_is_not_held_is_caught() {
        let mut run = Run::new();
        run.applied(10, vec![granted("k", 1, 5)]);
        run.applied(11, vec![ended("k", 1, 4)]);
        assert_eq!(check(&run.history(), &Needs::default()).violations_total, 1);
    }

    #[test]
    fn a_log_of_handovers_is_fine_and_a_missing_one_is_invalid() {
        let needs = Needs { logged: 2, ..Needs::default() };
        let mut run = Run::new();
        run.applied(10, vec![granted("k", 1, 5)]);
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Invalid);
        run.applied(11, vec![ended("k", 1, 5), granted("k", 2, 6)]);
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Ok);
    }

    #[test]
    fn holds_without_any_stated_validity_prove_nothing() {
        let mut run = Run::new();
        run.grant(1, "k", 5, 0, S);
        run.grant(2, "k", 6, 0, 2 * S);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Invalid);
    }
}
