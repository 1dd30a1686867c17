//! G3 never early: a hold that nobody ended is passed on, and a lease that nobody closed is
//! reported dead, no earlier than TTL after the send of its last acknowledged renewal.
//!
//! On one machine all clocks run at one rate, so the full TTL is demanded; the simulator, whose
//! clocks differ, states their difference. Where only the client library's own statement of a
//! validity is known, that is demanded. Lateness is a figure, not a verdict: it depends on faults.
//! The nodes' logs tell the very moment at which a lease or a forced hold was ended.

use std::collections::{BTreeMap, BTreeSet};

use crate::clock::to_ms;
use crate::history::{Applied, Cause, Change, History, Lost, Op, OpKind};

use super::holds::{Hold, Holds, collect, to_ns};
use super::log::logs;
use super::{Needs, Report};

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let rate_ppm = needs.rate_ppm;
    let mut report = Report::new("G3 never early");
    let holds = collect(history);
    let expiries = passed_on(&holds, rate_ppm, &mut report);
    let losses = reported_dead(history, &holds, rate_ppm, &mut report);
    let logged = in_log(history, &holds, rate_ppm, &mut report);
    report.cover("expiries", expiries.max(logged), needs.expiries);
    report.figure("losses", losses.to_string());
    report
}

/// The first moment at which the hold may be somebody else's; `None` if nothing is known.
fn earliest(hold: &Hold, rate_ppm: u64) -> Option<u64> {
    let by_lease = hold.lease_until_ns.map(|until| until - tolerance(hold, until, rate_ppm));
    by_lease.max(hold.claimed_until_ns)
}

/// The part of the lease's life that a fast clock may cut off. A TTL is at most 600 s, whatever
/// the hold's age.
fn tolerance(hold: &Hold, until_ns: u64, rate_ppm: u64) -> u64 {
    let ttl_ns = until_ns.saturating_sub(hold.invoke_ns).min(to_ns(600_000));
    ttl_ns / 1_000_000 * rate_ppm
}

/// Compares each hold that nobody ended with the next grant of its key.
fn passed_on(holds: &Holds<'_>, rate_ppm: u64, report: &mut Report) -> u64 {
    let mut slack_min_ns = u64::MAX;
    let mut lateness: Vec<u64> = Vec::new();
    let mut expiries = 0;
    for ((_, key), list) in holds {
        for pair in list.windows(2) {
            let (hold, next) = (&pair[0], &pair[1]);
            let ended = hold.given_up_ns.is_some_and(|at| at <= next.granted_ns);
            let Some(earliest) = earliest(hold, rate_ppm) else { continue };
            if ended || hold.token == next.token {
                continue;
            }
            expiries += 1;
            let Some(slack) = next.granted_ns.checked_sub(earliest) else {
                report.violation(format!(
                    "key {key:?}: token {} of client {} was passed on (token {}) {:.3} ms early",
                    hold.token,
                    hold.client,
                    next.token,
                    to_ms(earliest - next.granted_ns)
                ));
                continue;
            };
            slack_min_ns = slack_min_ns.min(slack);
            if next.invoke_ns < earliest {
                lateness.push(slack);
            }
        }
    }
    if slack_min_ns != u64::MAX {
        report.figure("smallest_slack_ms", format!("{:.1}", to_ms(slack_min_ns)));
    }
    lateness.sort_unstable();
    if let (Some(middle), Some(last)) = (lateness.get(lateness.len() / 2), lateness.last()) {
        let text = format!("{:.0}/{:.0}", to_ms(*middle), to_ms(*last));
        report.figure("lateness_ms_p50/max", text);
    }
    expiries
}

/// Compares each reported loss with the last acknowledged renewal. Returns how many were compared.
fn reported_dead(history: &History, holds: &Holds<'_>, rate_ppm: u64, report: &mut Report) -> u64 {
    let leases = lease_ends(history, rate_ppm);
    let mut compared = 0;
    for lost in history.losses() {
        let of_hold = hold_of(holds, lost);
        if of_hold.is_some_and(|hold| hold.given_up_ns.is_some_and(|at| at <= lost.at_ns)) {
            continue;
        }
        let of_lease = lost.lease.and_then(|lease| leases.get(&(lost.shard, lease)));
        let closed = of_lease.and_then(|lease| lease.closed_ns);
        if closed.is_some_and(|at| at <= lost.at_ns) {
            continue;
        }
        let until = of_lease.map(|lease| lease.until_ns);
        let until = until.max(of_hold.and_then(|hold| earliest(hold, rate_ppm)));
        let Some(until) = until else { continue };
        compared += 1;
        if lost.at_ns < until {
            report.violation(format!(
                "client {} lost {} ({}) {:.3} ms before its TTL was over",
                lost.client,
                lost.key.as_deref().unwrap_or("its lease"),
                lost.cause,
                to_ms(until - lost.at_ns)
            ));
        }
    }
    compared
}

/// Leases and holds that a node ended for want of renewals, or because an operator forced them but
/// not at once. Returns how many were compared.
fn in_log(history: &History, holds: &Holds<'_>, rate_ppm: u64, report: &mut Report) -> u64 {
    let leases = lease_ends(history, rate_ppm);
    let now: BTreeSet<(u32, u64)> = history.ops().filter_map(forced_at_once).collect();
    let mut compared = 0;
    for (shard, log) in logs(history) {
        for (step, change) in log.changes() {
            let Some(at_ns) = step.at_ns else { continue };
            let (what, until) = match change {
                Change::LeaseEnded { lease, cause: Cause::Expired } => {
                    let until = leases.get(&(shard, *lease)).map(|lease| lease.until_ns);
                    (format!("lease {lease}"), until)
                }
                Change::Ended { key, token, cause: Cause::Expired | Cause::Forced, .. }
                    if !now.contains(&(shard, *token)) =>
                {
                    (format!("key {key:?}: token {token}"), claimed(holds, step, key, *token))
                }
                _ => continue,
            };
            let Some(until) = until else { continue };
            compared += u64::from(matches!(change, Change::LeaseEnded { .. }));
            if at_ns < until {
                report.violation(format!(
                    "{what} was ended {:.3} ms early, at revision {}",
                    to_ms(until - at_ns),
                    step.revision
                ));
            }
        }
    }
    compared
}

fn forced_at_once(op: &Op) -> Option<(u32, u64)> {
    match op.kind {
        OpKind::ForceRelease { token, now: true } if !op.had_no_effect() => Some((op.shard, token)),
        _ => None,
    }
}

/// Until when the hold's client was sure, as it says.
fn claimed(holds: &Holds<'_>, step: &Applied, key: &str, token: u64) -> Option<u64> {
    let list = holds.get(&(step.shard, key))?;
    list.iter().filter(|hold| hold.token == token).filter_map(|hold| hold.claimed_until_ns).max()
}

fn hold_of<'h>(holds: &'h Holds<'_>, lost: &'h Lost) -> Option<&'h Hold> {
    let key = lost.key.as_deref()?;
    let list = holds.get(&(lost.shard, key))?;
    list.iter().find(|hold| Some(hold.token) == lost.token && hold.client == lost.client)
}

#[derive(Default)]
struct LeaseEnd {
    until_ns: u64,
    closed_ns: Option<u64>,
}

fn lease_ends(history: &History, rate_ppm: u64) -> BTreeMap<(u32, u64), LeaseEnd> {
    let mut leases: BTreeMap<(u32, u64), LeaseEnd> = BTreeMap::new();
    for renewal in history.renewals().filter(|renewal| renewal.ack_ns.is_some()) {
        let ttl_ns = to_ns(renewal.ttl_ms);
        let until = renewal.send_ns + ttl_ns - ttl_ns / 1_000_000 * rate_ppm;
        let lease = leases.entry((renewal.shard, renewal.lease)).or_default();
        lease.until_ns = lease.until_ns.max(until);
    }
    for op in history.ops().filter(|op| op.kind == OpKind::Close) {
        let Some(lease) = op.lease else { continue };
        let end = leases.entry((op.shard, lease)).or_default();
        end.closed_ns = Some(end.closed_ns.map_or(op.invoke_ns, |at| at.min(op.invoke_ns)));
    }
    leases
}

#[cfg(test)]
mod tests {
    use super::super::build::{Run, S};
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::{Cause, Change, OpKind, Outcome};

    fn verdict(run: &Run) -> Verdict {
        check(&run.history(), &Needs::default()).verdict()
    }

    /// Client 1 holds with 5 s, renewed at 2 s; client 2 is granted at `at`.
    fn silent_holder(at: u64) -> Run {
        let mut run = Run::new();
        run.renew(1, 5 * S, 0, 1);
        run.renew(1, 5 * S, 2 * S, 2 * S + 1);
        run.grant(1, "k", 5, S / 2, S);
        run.grant(2, "k", 6, S, at);
        run
    }

    #[test]
    fn an_expiry_after_the_ttl_is_fine_and_counted() {
        let run = silent_holder(7 * S);
        let needs = Needs { expiries: 1, ..Needs::default() };
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Ok);
    }

    #[test]
    fn an_expiry_one_millisecond_early_is_caught() {
        assert_eq!(verdict(&silent_holder(7 * S - 1_000_000)), Verdict::Violation);
    }

    #[test]
    fn clocks_that_may_differ_get_their_tolerance_and_no_more() {
        let needs = Needs { rate_ppm: 500, ..Needs::default() };
        let early = |ns| check(&silent_holder(7 * S - ns).history(), &needs);
        assert_eq!(early(2_000_000).verdict(), Verdict::Ok);
        assert_eq!(early(4_000_000).verdict(), Verdict::Violation);
    }

    #[test]
    fn a_release_that_was_called_excuses_even_without_an_answer() {
        let mut run = silent_holder(4 * S);
        let kind = OpKind::Release { token: 5 };
        run.call(1, "k", kind, (3 * S, 3 * S), Outcome::Unknown).return_ns = None;
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_release_called_only_after_the_next_grant_excuses_nothing() {
        let mut run = silent_holder(4 * S);
        run.release(1, "k", 5, 5 * S, 6 * S);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_lease_reported_dead_while_renewed_is_caught() {
        let mut run = Run::new();
        run.renew(1, 5 * S, 0, 1);
        run.lost_lease(1, 4 * S);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_lease_that_the_log_ends_early_is_caught_though_nobody_noticed() {
        let expired = |revision| {
            let mut run = Run::new();
            run.renew(1, 5 * S, 2 * S, 2 * S + 1);
            run.applied(revision, vec![Change::LeaseEnded { lease: 1, cause: Cause::Expired }]);
            check(&run.history(), &Needs { expiries: 1, ..Needs::default() }).verdict()
        };
        assert_eq!(expired(6), Verdict::Violation);
        assert_eq!(expired(7), Verdict::Ok);
    }

    #[test]
    fn a_forced_hold_that_the_log_ends_while_its_client_is_sure_is_caught() {
        let done = Outcome::Done { revision: None };
        assert_eq!(forced(false, done.clone(), 1), Verdict::Violation);
        assert_eq!(forced(true, done, 1), Verdict::Ok);
    }

    /// A forced release has no number: a copy that finds the hold gone does not say who ended it.
    #[test]
    fn a_refused_forced_release_excuses_only_if_an_earlier_copy_may_have_done_it() {
        let gone = Outcome::Refused { code: "not_owner".to_owned(), token: None, revision: None };
        assert_eq!(forced(true, gone.clone(), 2), Verdict::Ok);
        assert_eq!(forced(true, gone, 1), Verdict::Violation);
    }

    /// Client 1 is sure of its hold until 10 s, the log ends it as forced before, and this is what
    /// the operator heard.
    fn forced(now: bool, outcome: Outcome, attempts: u32) -> Verdict {
        let mut run = Run::new();
        run.grant(1, "k", 5, 0, S);
        run.claim(1, "k", 5, S, 9 * S);
        let kind = OpKind::ForceRelease { token: 5, now };
        run.call(3, "k", kind, (2 * S, 3 * S), outcome).attempts = attempts;
        let (key, cause) = ("k".into(), Cause::Forced);
        run.applied(8, vec![Change::Ended { key, lease: 1, token: 5, cause }]);
        verdict(&run)
    }

    #[test]
    fn a_lease_reported_dead_after_silence_or_close_is_fine() {
        let mut run = Run::new();
        run.renew(1, 5 * S, 0, 1);
        run.lost_lease(1, 6 * S);
        run.renew(2, 5 * S, 0, 1);
        run.call(2, "", OpKind::Close, (S, 2 * S), Outcome::Done { revision: None });
        run.lost_lease(2, 3 * S);
        assert_eq!(verdict(&run), Verdict::Ok);
    }
}
