//! G4 FIFO: waiters of one key are granted in the order in which they were queued; nobody is
//! granted whose cancel, close or death was acknowledged at an earlier revision.
//!
//! Where an acquire was queued is known exactly from the answer `queued` to its first attempt.
//! Without it (the outcome may overtake that answer, or a retry fetch it) it is known to lie above
//! every revision that anybody had been answered before the acquire was sent, and at or below the
//! revision of its grant. Only what is certain by these bounds is called an inversion. The nodes'
//! logs show every queue as it was.

use std::collections::BTreeMap;

use crate::history::{FinalState, History, Op, OpKind, Outcome};

use super::{Needs, Report};

mod applied;

/// An acquire and the bounds of its place in the queue.
struct Place<'a> {
    op: &'a Op,
    /// It was queued at this revision or later...
    from: u64,
    /// ...and at this one or earlier.
    to: u64,
    granted: Option<u64>,
}

/// Places by shard and key.
type Places<'a> = BTreeMap<(u32, &'a str), Vec<Place<'a>>>;

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G4 FIFO");
    let answered = Answered::collect(history);
    let mut places = Places::new();
    for op in history.ops() {
        if let Some(place) = place_of(op, &answered) {
            places.entry((op.shard, &op.key)).or_default().push(place);
        }
    }
    let mut queued_grants = 0;
    for ((_, key), list) in &places {
        queued_grants += list.iter().filter(|p| p.granted.is_some_and(|g| g > p.to)).count();
        inversions(key, list, &mut report);
    }
    for end in history.finals() {
        left_behind(end, &places, &mut report);
    }
    granted_to_ended(history, &mut report);
    let logged = applied::check(history, &mut report);
    report.cover("queued_grants", logged.max(queued_grants as u64), needs.queued_grants);
    report
}

fn place_of<'a>(op: &'a Op, answered: &Answered) -> Option<Place<'a>> {
    let OpKind::Acquire { wait_ms } = op.kind else { return None };
    let granted = match op.outcome {
        Outcome::Granted { revision, .. } => Some(revision?),
        _ => None,
    };
    let (from, to) = match (op.queued, granted) {
        (Some(queued), _) => (queued.revision, queued.revision),
        // One that would not have waited was granted where it was asked.
        (None, Some(revision)) if wait_ms == 0 => (revision, revision),
        (None, Some(revision)) => (answered.before(op) + 1, revision),
        (None, None) => return None,
    };
    Some(Place { op, from, to, granted })
}

/// The highest revision that anybody had been answered, over time, by shard.
struct Answered(BTreeMap<u32, Vec<(u64, u64)>>);

impl Answered {
    fn collect(history: &History) -> Self {
        let mut shards: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
        for op in history.ops() {
            let queued = op.queued.map(|queued| (queued.at_ns, queued.revision));
            let answer = op.return_ns.zip(op.outcome.revision());
            shards.entry(op.shard).or_default().extend(queued.into_iter().chain(answer));
        }
        for answers in shards.values_mut() {
            answers.sort_unstable();
            let mut highest = 0;
            for (_, revision) in answers {
                highest = highest.max(*revision);
                *revision = highest;
            }
        }
        Self(shards)
    }

    fn before(&self, op: &Op) -> u64 {
        let answers = self.0.get(&op.shard).map(Vec::as_slice).unwrap_or_default();
        let count = answers.partition_point(|(at, _)| *at < op.invoke_ns);
        count.checked_sub(1).map_or(0, |last| answers[last].1)
    }
}

/// Whoever was certainly queued later must be granted later.
fn inversions(key: &str, list: &[Place<'_>], report: &mut Report) {
    let granted = || list.iter().filter_map(|place| Some((place, place.granted?)));
    let mut later: Vec<(&Place<'_>, u64)> = granted().collect();
    later.sort_by_key(|(place, _)| place.from);
    let mut earlier: Vec<(&Place<'_>, u64)> = granted().collect();
    earlier.sort_by_key(|(place, _)| place.to);
    let mut earlier = earlier.into_iter().peekable();
    let mut latest: Option<(&Place<'_>, u64)> = None;
    for (place, granted) in later {
        while let Some(next) = earlier.next_if(|(other, _)| other.to < place.from) {
            latest = if latest.is_none_or(|(_, at)| at < next.1) { Some(next) } else { latest };
        }
        if let Some((before, at)) = latest.filter(|(_, at)| *at > granted) {
            report.violation(format!(
                "key {key:?}: client {} queued at {} or later was granted at {granted}, before \
                 client {} queued at {} or earlier was at {at}",
                place.op.client, place.from, before.op.client, before.to
            ));
        }
    }
}

/// Nobody who still waits at the end was queued before somebody who was granted.
fn left_behind(end: &FinalState, places: &Places<'_>, report: &mut Report) {
    for key in &end.keys {
        let Some(list) = places.get(&(end.shard, key.key.as_str())) else { continue };
        let granted = list.iter().filter(|place| place.granted.is_some());
        let last = granted.map(|place| place.from).max();
        let waits = |place: &&Place<'_>| {
            let name = place.op.lease.zip(place.op.number);
            name.is_some_and(|name| key.waiters.contains(&name))
        };
        for place in list.iter().filter(waits) {
            if last.is_some_and(|from| from > place.to) {
                report.violation(format!(
                    "key {:?}: client {} has waited since revision {} and was passed over",
                    key.key, place.op.client, place.to
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

    /// Client 2 waits from revision 11 and is granted at 21; client 3 asks at `from`, perhaps
    /// without waiting, and is granted at 20 after any number of attempts.
    fn overtaken(from: u64, wait_ms: u32, attempts: u32) -> Run {
        let mut run = Run::new();
        run.release_at(1, "other", 1, 11, (S, 3 * S));
        run.grant_at((2, 1), "k", 7, (Some(11), 21), (S, 9 * S));
        run.grant_at((3, 1), "k", 6, (None, 20), (from, 8 * S));
        let op = run.last_op();
        op.kind = OpKind::Acquire { wait_ms };
        op.attempts = attempts;
        run
    }

    #[test]
    fn a_newcomer_who_does_not_wait_and_overtakes_is_caught() {
        assert_eq!(verdict(&overtaken(2 * S, 0, 1)), Verdict::Violation);
    }

    #[test]
    fn one_who_certainly_came_later_and_overtakes_is_caught_even_by_retry() {
        assert_eq!(verdict(&overtaken(4 * S, u32::MAX, 1)), Verdict::Violation);
        assert_eq!(verdict(&overtaken(4 * S, u32::MAX, 3)), Verdict::Violation);
    }

    #[test]
    fn one_who_may_have_been_queued_before_is_not_accused() {
        assert_eq!(verdict(&overtaken(S, u32::MAX, 1)), Verdict::Ok);
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
