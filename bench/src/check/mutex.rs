//! G1 exclusion: the sure intervals of the holds of one key never overlap.
//!
//! A hold is sure from the moment its client read the grant until the first of: its own release,
//! cancel or close was called; the send of the last acknowledged renewal of its lease + TTL −
//! margin; the validity that the client library stated; its client learned of its loss; an
//! operator forced it. A hold of which nothing states a validity is not judged, and not counted.

use crate::clock::to_ms;
use crate::history::History;

use super::holds::{Hold, Holds, collect};
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
    if gap_min_ns != u64::MAX {
        report.figure("smallest_gap_ms", format!("{:.3}", to_ms(gap_min_ns)));
    }
    report
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
    use super::super::build::{Run, S};
    use super::super::{Needs, Verdict};
    use super::check;

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
    fn holds_without_any_stated_validity_prove_nothing() {
        let mut run = Run::new();
        run.grant(1, "k", 5, 0, S);
        run.grant(2, "k", 6, 0, 2 * S);
        assert_eq!(check(&run.history(), &needs()).verdict(), Verdict::Invalid);
    }
}
