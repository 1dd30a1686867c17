//! G7 linear reads: each key behaves as one lock that is changed and read at single moments.
//!
//! Every answer carries its shard's revision, so the order is given and only verified: no
//! operation was asked for after one of a higher revision was answered; each revision was caused
//! by one command; and every read and every `held` agrees with the grants and releases around it.
//! Reads that were asked for as stale are left out. With the nodes' logs every read is compared with
//! what was, and no effect comes before its request or after its answer.

use std::collections::{BTreeMap, BTreeSet};

use crate::history::{History, Op, OpKind, Outcome};

use super::{Needs, Report};

mod applied;

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G7 linear");
    let mut shards: BTreeMap<u32, Vec<(&Op, u64)>> = BTreeMap::new();
    for op in history.ops() {
        if let Some(revision) = revision_of(op) {
            shards.entry(op.shard).or_default().push((op, revision));
        }
    }
    let mut ordered = 0;
    for list in shards.values_mut() {
        ordered += list.len() as u64;
        in_real_time(list, &mut report);
        one_cause_each(list, &mut report);
    }
    let reads = agree(history, &mut report);
    report.cover("ordered", ordered, needs.ordered);
    report.cover("reads", reads, needs.reads);
    let logged = applied::check(history, &mut report);
    report.cover("logged", logged, needs.logged);
    report
}

/// The revision at which the operation took effect. A refusal that a state remembered for a retry
/// has the revision of its first decision, which lies after the first send as well.
fn revision_of(op: &Op) -> Option<u64> {
    match op.outcome {
        Outcome::Read { stale: true, .. } => None,
        // A cancel is told how its acquire ended, which may be long ago, also if it was refused.
        Outcome::Ended { .. } | Outcome::Granted { .. } | Outcome::Refused { .. }
            if matches!(op.kind, OpKind::Cancel { .. }) =>
        {
            None
        }
        _ => op.outcome.revision(),
    }
}

fn in_real_time(list: &mut [(&Op, u64)], report: &mut Report) {
    let mut returns: Vec<(u64, u64)> =
        list.iter().filter_map(|(op, revision)| Some((op.return_ns?, *revision))).collect();
    returns.sort_unstable();
    list.sort_by_key(|(op, _)| op.invoke_ns);
    let mut returned = returns.into_iter().peekable();
    let mut highest = 0;
    for (op, revision) in list.iter() {
        while let Some((_, other)) = returned.next_if(|(at, _)| *at < op.invoke_ns) {
            highest = highest.max(other);
        }
        // A change made a revision that nobody can have seen before it was asked for.
        let changed = op.outcome.is_ok() && changes_the_state(op.kind);
        if *revision < highest + u64::from(changed && highest > 0) {
            report.violation(format!(
                "client {} asked {:?} on {:?} after revision {highest} was answered and got {revision}",
                op.client, op.kind, op.key
            ));
        }
    }
}

/// If it succeeds. A second forced end of one hold changes nothing.
const fn changes_the_state(kind: OpKind) -> bool {
    !matches!(kind, OpKind::Get | OpKind::ForceRelease { now: false, .. })
}

/// Commands that changed the state by themselves; a grant after a wait is caused by another.
fn one_cause_each(list: &[(&Op, u64)], report: &mut Report) {
    let cause = |&(op, revision): &(&'_ Op, u64)| match op.queued {
        Some(queued) => Some(queued.revision),
        None => causes_its_revision(op).then_some(revision),
    };
    let mut causes: Vec<(u64, &Op)> =
        list.iter().filter_map(|item| Some((cause(item)?, item.0))).collect();
    causes.sort_by_key(|(revision, op)| (*revision, op.invoke_ns));
    for pair in causes.windows(2) {
        let ((revision, a), (other, b)) = (pair[0], pair[1]);
        let same = a.number.is_some() && (a.lease, a.number) == (b.lease, b.number);
        if revision == other && !same {
            report.violation(format!(
                "revision {revision} was caused by {:?} of client {} and by {:?} of client {}",
                a.kind, a.client, b.kind, b.client
            ));
        }
    }
}

fn causes_its_revision(op: &Op) -> bool {
    // A grant to a waiter was caused by whoever ended the hold before; that an acquire was granted
    // at once is certain only of one that would not have waited.
    let changes = matches!(
        (&op.kind, &op.outcome),
        (OpKind::Acquire { wait_ms: 0 }, Outcome::Granted { .. })
            | (OpKind::Open { .. }, Outcome::Opened { .. })
            | (OpKind::Release { .. }, Outcome::Released { .. })
            | (OpKind::Close, Outcome::Done { .. })
    );
    changes && op.attempts == 1
}

/// A hold of which both ends are known by revision, or only its beginning.
struct Span {
    from: u64,
    /// The revision of its acknowledged release.
    to: Option<u64>,
    token: u64,
}

/// Returns how many reads were compared.
fn agree(history: &History, report: &mut Report) -> u64 {
    let spans = spans(history);
    let known = Known::collect(history);
    for ((_, key), list) in &spans {
        granted_while_held(key, list, report);
    }
    let mut compared = 0;
    for op in history.ops() {
        let (revision, token) = match &op.outcome {
            Outcome::Read { token, revision, stale: false } => (*revision, *token),
            Outcome::Refused { code, token: Some(token), revision: Some(revision) }
                if code == "held" =>
            {
                (*revision, Some(*token))
            }
            _ => continue,
        };
        compared += 1;
        if let Some(token) = token.filter(|token| !known.may_hold(op, *token)) {
            report.violation(format!(
                "key {:?}: client {} read token {token}, which nobody was granted",
                op.key, op.client
            ));
            continue;
        }
        let Some(list) = spans.get(&(op.shard, op.key.as_str())) else { continue };
        if let Some(text) = contradiction(list, revision, token) {
            report.violation(format!(
                "key {:?}: client {} read {token:?} at revision {revision}, but {text}",
                op.key, op.client
            ));
        }
    }
    compared
}

fn spans(history: &History) -> BTreeMap<(u32, &str), Vec<Span>> {
    let mut releases: BTreeMap<(u32, &str, u64), u64> = BTreeMap::new();
    for op in history.ops() {
        if let Outcome::Released { token, revision: Some(revision) } = op.outcome {
            releases.insert((op.shard, &op.key, token), revision);
        }
    }
    let mut spans: BTreeMap<(u32, &str), Vec<Span>> = BTreeMap::new();
    for op in history.ops() {
        if let Outcome::Granted { token, revision: Some(from), .. } = op.outcome {
            let to = releases.get(&(op.shard, op.key.as_str(), token)).copied();
            spans.entry((op.shard, &op.key)).or_default().push(Span { from, to, token });
        }
    }
    for list in spans.values_mut() {
        list.sort_by_key(|span| span.from);
    }
    spans
}

/// Who may hold: a history has all clients of its keys, so each holder asked in it.
#[derive(Default)]
struct Known<'a> {
    granted: BTreeSet<(u32, &'a str, u64)>,
    /// Keys with acquires whose first outcome did not arrive.
    open: BTreeSet<(u32, &'a str)>,
}

impl<'a> Known<'a> {
    fn collect(history: &'a History) -> Self {
        let mut known = Self::default();
        for op in history.ops() {
            match (&op.kind, &op.outcome) {
                (_, Outcome::Granted { token, .. }) => {
                    known.granted.insert((op.shard, &op.key, *token));
                }
                (OpKind::Acquire { .. }, Outcome::Unknown) => {
                    known.open.insert((op.shard, &op.key));
                }
                // Its first attempt may have been granted, and the lease have ended since.
                (OpKind::Acquire { .. }, Outcome::Refused { .. }) if op.attempts > 1 => {
                    known.open.insert((op.shard, &op.key));
                }
                _ => {}
            }
        }
        known
    }

    fn may_hold(&self, op: &Op, token: u64) -> bool {
        self.open.contains(&(op.shard, op.key.as_str()))
            || self.granted.contains(&(op.shard, op.key.as_str(), token))
    }
}

/// A hold whose release was acknowledged lasted until that revision.
fn granted_while_held(key: &str, list: &[Span], report: &mut Report) {
    for pair in list.windows(2) {
        let (hold, next) = (&pair[0], &pair[1]);
        if hold.token != next.token && hold.to.is_some_and(|to| to > next.from) {
            report.violation(format!(
                "key {key:?}: token {} was granted at {} while {} was held until {:?}",
                next.token, next.from, hold.token, hold.to
            ));
        }
    }
}

/// What the grants and releases say against a read of `token` at `revision`.
fn contradiction(list: &[Span], revision: u64, token: Option<u64>) -> Option<String> {
    let after = list.partition_point(|span| span.from <= revision);
    // The newest grant at or before the read: nobody before it can hold any more.
    if let Some(last) = after.checked_sub(1).map(|index| &list[index]) {
        // One command is one revision: at its own, the grant is what there is.
        let certain = revision == last.from || last.to.is_some_and(|to| revision < to);
        if certain && token != Some(last.token) {
            let (token, from, to) = (last.token, last.from, last.to);
            return Some(format!("token {token} was granted at {from} and held until {to:?}"));
        }
        if token == Some(last.token) && last.to.is_some_and(|to| revision >= to) {
            return Some(format!("token {} was released at {:?}", last.token, last.to));
        }
        if token.is_some_and(|token| token < last.token) {
            return Some(format!("token {} was granted at {}", last.token, last.from));
        }
    }
    let next = list.get(after)?;
    token
        .filter(|token| *token >= next.token)
        .map(|_| format!("token {} was granted only at {}", next.token, next.from))
}

#[cfg(test)]
mod tests {
    use super::super::build::{Run, S};
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::{OpKind, Outcome};

    fn verdict(run: &Run) -> Verdict {
        check(&run.history(), &Needs { ordered: 1, ..Needs::default() }).verdict()
    }

    fn read(run: &mut Run, token: Option<u64>, revision: u64, times: (u64, u64)) {
        run.call(9, "k", OpKind::Get, times, Outcome::Read { token, revision, stale: false });
    }

    /// Token 5 is held at revisions 10..20, token 6 from 20 on.
    fn two_holds() -> Run {
        let mut run = Run::new();
        run.grant_at((1, 1), "k", 5, (None, 10), (S, 2 * S));
        run.grant_at((2, 1), "k", 6, (Some(11), 20), (2 * S, 5 * S));
        run.release_at(1, "k", 5, 20, (3 * S, 4 * S));
        run
    }

    #[test]
    fn reads_that_fit_are_fine() {
        let mut run = two_holds();
        read(&mut run, None, 9, (S, 9 * S));
        read(&mut run, Some(5), 15, (2 * S + 1, 9 * S));
        read(&mut run, Some(6), 20, (6 * S, 9 * S));
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_read_that_goes_back_in_time_is_caught() {
        let mut run = two_holds();
        read(&mut run, Some(5), 15, (6 * S, 9 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_holder_whose_retry_found_its_lease_dead_is_not_unknown() {
        let read_after = |attempts| {
            let mut run = Run::new();
            let kind = OpKind::Acquire { wait_ms: 0 };
            run.refused(1, "k", kind, "lease_dead", (S, 9 * S)).attempts = attempts;
            read(&mut run, Some(5), 10, (2 * S, 3 * S));
            verdict(&run)
        };
        assert_eq!(read_after(2), Verdict::Ok);
        assert_eq!(read_after(1), Verdict::Violation);
    }

    #[test]
    fn a_cancel_that_is_told_of_its_acquires_old_refusal_goes_not_back_in_time() {
        let told = |kind| {
            let mut run = two_holds();
            read(&mut run, Some(6), 25, (6 * S, 7 * S));
            let (code, token, revision) = ("held".to_owned(), Some(6), Some(21));
            run.call(3, "k", kind, (8 * S, 9 * S), Outcome::Refused { code, token, revision });
            verdict(&run)
        };
        assert_eq!(told(OpKind::Cancel { acquire: 1, release_if_granted: false }), Verdict::Ok);
        assert_eq!(told(OpKind::Acquire { wait_ms: 0 }), Verdict::Violation);
    }

    #[test]
    fn a_read_of_nobody_while_somebody_holds_is_caught() {
        let mut run = two_holds();
        read(&mut run, None, 15, (2 * S + 1, 9 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_read_of_a_released_or_future_holder_is_caught() {
        for (token, revision) in [(5, 20), (5, 25), (6, 15)] {
            let mut run = two_holds();
            read(&mut run, Some(token), revision, (2 * S + 1, 9 * S));
            assert_eq!(verdict(&run), Verdict::Violation, "token {token} at {revision}");
        }
    }

    #[test]
    fn a_read_asked_for_as_stale_is_left_out() {
        let mut run = two_holds();
        let old = Outcome::Read { token: Some(5), revision: 15, stale: true };
        run.call(9, "k", OpKind::Get, (6 * S, 9 * S), old);
        assert_eq!(verdict(&run), Verdict::Ok);
    }

    #[test]
    fn a_refusal_that_names_a_wrong_holder_is_caught() {
        let mut run = two_holds();
        let kind = OpKind::Acquire { wait_ms: 0 };
        let op = run.refused(3, "k", kind, "held", (2 * S + 1, 9 * S));
        let code = "held".into();
        op.outcome = Outcome::Refused { code, token: Some(6), revision: Some(15) };
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn a_grant_while_the_key_is_held_is_caught() {
        let mut run = Run::new();
        run.grant_at((1, 1), "k", 5, (None, 10), (S, 9 * S));
        run.grant_at((2, 1), "k", 6, (None, 12), (S, 9 * S));
        run.release_at(1, "k", 5, 14, (S, 9 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
    }

    #[test]
    fn one_revision_for_two_commands_is_caught() {
        let mut run = Run::new();
        run.release_at(1, "k", 5, 10, (S, 9 * S));
        run.release_at(2, "other", 6, 10, (S, 9 * S));
        assert_eq!(verdict(&run), Verdict::Violation);
        // A release and the grant that it makes share theirs.
        let mut run = Run::new();
        run.release_at(1, "k", 5, 10, (S, 9 * S));
        run.grant_at((2, 1), "k", 6, (None, 10), (S, 9 * S));
        assert_eq!(verdict(&run), Verdict::Ok);
    }
}
