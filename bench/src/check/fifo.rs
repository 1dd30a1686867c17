//! G4 FIFO: waiters of one key are granted in the order in which they were queued; nobody is
//! granted whose cancel, close or death was acknowledged at an earlier revision.
//!
//! An acquire that was granted at once counts as queued and granted at one revision, so that a
//! newcomer who overtakes the queue is an inversion too. Acquires whose place is not known (a
//! retry's answer, or an interface without revisions) are not judged.

use std::collections::BTreeMap;

use crate::history::{FinalState, History, Op, OpKind, Outcome};

use super::{Needs, Report};

/// An acquire whose place is known.
struct Place<'a> {
    op: &'a Op,
    queued: u64,
    granted: Option<u64>,
}

/// Places by shard and key.
type Places<'a> = BTreeMap<(u32, &'a str), Vec<Place<'a>>>;

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G4 FIFO");
    let mut places = Places::new();
    for op in history.ops() {
        if let Some(place) = place_of(op) {
            places.entry((op.shard, &op.key)).or_default().push(place);
        }
    }
    let mut queued_grants = 0;
    for ((_, key), list) in &mut places {
        list.sort_by_key(|place| place.queued);
        queued_grants += list.iter().filter(|p| p.granted.is_some_and(|g| g > p.queued)).count();
        inversions(key, list, &mut report);
    }
    for end in history.finals() {
        left_behind(end, &places, &mut report);
    }
    granted_to_ended(history, &mut report);
    report.cover("queued_grants", queued_grants as u64, needs.queued_grants);
    report
}

fn place_of(op: &Op) -> Option<Place<'_>> {
    let OpKind::Acquire { .. } = op.kind else { return None };
    let granted = match op.outcome {
        Outcome::Granted { revision, .. } => Some(revision?),
        _ => None,
    };
    match (op.queued, granted) {
        (Some(queued), _) => Some(Place { op, queued: queued.revision, granted }),
        (None, Some(revision)) if op.attempts == 1 => Some(Place { op, queued: revision, granted }),
        _ => None,
    }
}

/// `list` is in queue order: each grant must come after all grants before it.
fn inversions(key: &str, list: &[Place<'_>], report: &mut Report) {
    let mut latest: Option<(u64, &Place<'_>)> = None;
    for place in list {
        let Some(granted) = place.granted else { continue };
        if let Some((revision, before)) = latest.filter(|(revision, _)| *revision > granted) {
            report.violation(format!(
                "key {key:?}: client {} queued at {} was granted at {granted}, before client {} \
                 queued at {} was at {revision}",
                place.op.client, place.queued, before.op.client, before.queued
            ));
        } else {
            latest = Some((granted, place));
        }
    }
}

/// Nobody who still waits at the end was queued before somebody who was granted.
fn left_behind(end: &FinalState, places: &Places<'_>, report: &mut Report) {
    for key in &end.keys {
        let Some(list) = places.get(&(end.shard, key.key.as_str())) else { continue };
        let last = list.iter().filter(|place| place.granted.is_some()).map(|p| p.queued).max();
        let waits = |place: &&Place<'_>| {
            let name = place.op.lease.zip(place.op.number);
            name.is_some_and(|name| key.waiters.contains(&name))
        };
        for place in list.iter().filter(waits) {
            if last.is_some_and(|queued| queued > place.queued) {
                report.violation(format!(
                    "key {:?}: client {} has waited since revision {} and was passed over",
                    key.key, place.op.client, place.queued
                ));
            }
        }
    }
}

/// The revisions at which leases were known dead and waits were known cancelled.
fn granted_to_ended(history: &History, report: &mut Report) {
    let mut dead: BTreeMap<(u32, u64), u64> = BTreeMap::new();
    let mut told: BTreeMap<(u32, u64), u64> = BTreeMap::new();
    let mut cancelled: BTreeMap<(u32, u64, u64), u64> = BTreeMap::new();
    for op in history.ops() {
        let Some(lease) = op.lease else { continue };
        match (&op.kind, &op.outcome) {
            (OpKind::Close, Outcome::Done { revision: Some(revision) }) => {
                note(&mut dead, (op.shard, lease), *revision);
            }
            (_, Outcome::Refused { code, revision: Some(revision), .. })
                if code == "lease_dead" =>
            {
                note(&mut dead, (op.shard, lease), *revision);
            }
            (OpKind::Cancel { acquire, .. }, Outcome::Ended { revision }) => {
                note(&mut cancelled, (op.shard, lease, *acquire), revision.unwrap_or(0));
            }
            _ => {}
        }
    }
    for lost in history.losses() {
        if let (Some(lease), None) = (lost.lease, &lost.key) {
            note(&mut told, (lost.shard, lease), lost.at_ns);
        }
    }
    for op in history.ops() {
        let Outcome::Granted { token, revision, .. } = op.outcome else { continue };
        let Some(lease) = op.lease else { continue };
        let ended = dead.get(&(op.shard, lease)).is_some_and(|end| revision > Some(*end));
        let known = told.get(&(op.shard, lease)).is_some_and(|at| op.invoke_ns > *at);
        let withdrawn = op.number.is_some_and(|n| cancelled.contains_key(&(op.shard, lease, n)));
        if ended || known || withdrawn {
            let why = if withdrawn { "its cancel was confirmed" } else { "its lease was dead" };
            report.violation(format!(
                "key {:?}: client {} was granted token {token} though {why}",
                op.key, op.client
            ));
        }
    }
}

fn note<K: Ord>(map: &mut BTreeMap<K, u64>, key: K, value: u64) {
    let entry = map.entry(key).or_insert(value);
    *entry = value.min(*entry);
}

#[cfg(test)]
mod tests {
    use super::super::build::{Run, S};
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::{OpKind, Outcome};

    fn verdict(run: &Run) -> Verdict {
        check(&run.history(), &Needs { queued_grants: 1, ..Needs::default() }).verdict()
    }

    #[test]
    fn grants_in_queue_order_are_fine() {
        let mut run = Run::new();
        run.grant_at((1, 1), "k", 5, (None, 10), (S, 2 * S));
        run.grant_at((2, 1), "k", 6, (Some(11), 20), (S, 3 * S));
        run.grant_at((3, 1), "k", 7, (Some(12), 21), (S, 4 * S));
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_queue_served_from_the_back_is_caught() {
        let mut run = Run::new();
        run.grant_at((2, 1), "k", 7, (Some(11), 21), (S, 3 * S));
        run.grant_at((3, 1), "k", 6, (Some(12), 20), (S, 4 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_newcomer_who_overtakes_is_caught() {
        let mut run = Run::new();
        run.grant_at((2, 1), "k", 7, (Some(11), 21), (S, 3 * S));
        run.grant_at((3, 1), "k", 6, (None, 20), (S, 4 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_retry_without_a_known_place_is_not_judged() {
        let mut run = Run::new();
        run.grant_at((2, 1), "k", 7, (Some(11), 21), (S, 3 * S));
        run.grant_at((3, 1), "k", 6, (None, 20), (S, 4 * S));
        let mut history = run.history();
        let Some(crate::history::Record::Op(op)) = history.records.last_mut() else { panic!() };
        op.attempts = 2;
        assert_eq!(check(&history, &Needs::default()).verdict(), Verdict::Ok);
    }

    #[test]
    fn a_waiter_passed_over_until_the_end_is_caught() {
        let mut run = Run::new();
        run.waiting(2, 1, "k", 11, S);
        run.grant_at((3, 1), "k", 6, (Some(12), 20), (S, 4 * S));
        run.end(9 * S, 20, &[("k", &[(3, 6)], &[(2, 1)])], &[]);
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_grant_after_the_leases_end_is_caught() {
        let mut run = Run::new();
        let closed = Outcome::Done { revision: Some(15) };
        run.call(2, "", OpKind::Close, (S, 2 * S), closed);
        run.grant_at((2, 1), "k", 6, (Some(12), 20), (S, 4 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_grant_to_a_lease_that_was_told_its_death_is_caught() {
        let mut run = Run::new();
        run.lost_lease(2, S);
        run.grant_at((2, 1), "k", 6, (Some(12), 20), (2 * S, 4 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_grant_of_a_cancelled_wait_is_caught() {
        let mut run = Run::new();
        let kind = OpKind::Cancel { acquire: 1, release_if_granted: false };
        run.call(2, "", kind, (S, 2 * S), Outcome::Ended { revision: Some(15) });
        run.grant_at((2, 1), "k", 6, (Some(12), 20), (S, 4 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }
}
