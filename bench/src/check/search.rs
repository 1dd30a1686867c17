//! Checks the checker of G7 without trusting revisions: on small random histories of one lock a
//! search over all orders decides whether any explains what the clients saw. Where none does, the
//! checker must report a violation; where the history is a true one, it must not.

use std::collections::BTreeSet;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::{Needs, Verdict, linear};
use crate::history::{History, Op, OpKind, Outcome, Record};

/// Operations of one history.
const OPS: usize = 9;
/// Histories tried.
const HISTORIES: u64 = 20_000;

/// The lock: its holder's token, and the last token granted.
type Lock = (Option<u64>, u64);

/// The lock after an operation; `None` if it could not have answered like that.
fn step((holder, last): Lock, op: &Op) -> Option<Lock> {
    match op.outcome {
        Outcome::Granted { token, .. } => {
            (holder.is_none() && token > last).then_some((Some(token), token))
        }
        Outcome::Released { token, .. } => (holder == Some(token)).then_some((None, last)),
        Outcome::Read { token, .. } => (holder == token).then_some((holder, last)),
        Outcome::Refused { token, .. } => {
            (holder.is_some() && holder == token).then_some((holder, last))
        }
        _ => unreachable!("no other outcomes are made here"),
    }
}

/// True if some order that respects real time explains all answers.
fn explained(ops: &[Op]) -> bool {
    fn go(ops: &[Op], done: u32, lock: Lock, seen: &mut BTreeSet<(u32, Lock)>) -> bool {
        if done.count_ones() as usize == ops.len() {
            return true;
        }
        if !seen.insert((done, lock)) {
            return false;
        }
        let open = || (0..ops.len()).filter(|index| done & (1 << index) == 0);
        let first_return = open().filter_map(|index| ops[index].return_ns).min();
        open().filter(|index| first_return.is_none_or(|at| ops[*index].invoke_ns <= at)).any(
            |index| {
                step(lock, &ops[index]).is_some_and(|next| go(ops, done | (1 << index), next, seen))
            },
        )
    }
    go(ops, 0, (None, 0), &mut BTreeSet::new())
}

fn op(kind: OpKind, moment: u64, rng: &mut SmallRng, outcome: Outcome) -> Op {
    Op {
        client: 0,
        shard: 0,
        lease: None,
        number: None,
        key: "k".into(),
        kind,
        invoke_ns: moment - rng.random_range(1..40),
        return_ns: Some(moment + rng.random_range(1..40)),
        attempts: 1,
        queued: None,
        outcome,
    }
}

/// What clients of a right lock see: each operation takes effect at one moment between its ends.
fn true_history(rng: &mut SmallRng) -> Vec<Op> {
    let (mut holder, mut last, mut revision) = (None, 0, 0);
    let mut ops = Vec::new();
    for index in 0..OPS {
        let moment = 100 + index as u64 * 10;
        let (kind, outcome) = match (rng.random_range(0..3), holder) {
            (0, _) => (OpKind::Get, Outcome::Read { token: holder, revision, stale: false }),
            (1, Some(token)) => {
                (holder, revision) = (None, revision + 1);
                let revision = Some(revision);
                (OpKind::Release { token }, Outcome::Released { token, revision })
            }
            (_, Some(token)) => {
                let (code, revision) = ("held".into(), Some(revision));
                let refused = Outcome::Refused { code, token: Some(token), revision };
                (OpKind::Acquire { wait_ms: 0 }, refused)
            }
            (_, None) => {
                (last, revision) = (last + 1, revision + 1);
                holder = Some(last);
                let granted =
                    Outcome::Granted { token: last, own_lease: None, revision: Some(revision) };
                (OpKind::Acquire { wait_ms: 0 }, granted)
            }
        };
        ops.push(op(kind, moment, rng, outcome));
    }
    ops
}

/// Makes one answer wrong, or one operation early or late. Releases stay as they are: that a
/// holder's release is believed is what the checker stands on.
fn spoil(ops: &mut [Op], rng: &mut SmallRng) {
    let index = rng.random_range(0..ops.len());
    let other = rng.random_range(0..4);
    let op = &mut ops[index];
    match &mut op.outcome {
        Outcome::Read { token, .. } if rng.random_bool(0.5) => {
            *token = (other > 0).then_some(other);
        }
        Outcome::Refused { token, .. } if rng.random_bool(0.5) => *token = Some(other.max(1)),
        _ => {
            let shift = rng.random_range(0..120);
            let back = rng.random_bool(0.5);
            let moved = |at: u64| if back { at.saturating_sub(shift) } else { at + shift };
            let ends = (moved(op.invoke_ns), op.return_ns.map(moved));
            (op.invoke_ns, op.return_ns) = ends;
        }
    }
}

/// A line per operation.
fn show(ops: &[Op]) -> String {
    let line = |op: &Op| format!("\n{:?}..{:?} {:?}", op.invoke_ns, op.return_ns, op.outcome);
    ops.iter().map(line).collect::<Vec<_>>().concat()
}

fn verdict(ops: &[Op]) -> Verdict {
    let records = ops.iter().cloned().map(Record::Op).collect();
    linear::check(&History { records }, &Needs::default()).verdict()
}

#[test]
fn true_histories_are_never_accused() {
    let mut rng = SmallRng::seed_from_u64(1);
    for number in 0..HISTORIES {
        let ops = true_history(&mut rng);
        assert!(explained(&ops), "history {number}: the search is wrong: {}", show(&ops));
        assert_eq!(verdict(&ops), Verdict::Ok, "history {number}: {}", show(&ops));
    }
}

#[test]
fn what_no_order_explains_is_reported() {
    let mut rng = SmallRng::seed_from_u64(2);
    let mut unexplained = 0;
    for number in 0..HISTORIES {
        let mut ops = true_history(&mut rng);
        spoil(&mut ops, &mut rng);
        if !explained(&ops) {
            unexplained += 1;
            assert_eq!(verdict(&ops), Verdict::Violation, "history {number}: {}", show(&ops));
        }
    }
    assert!(unexplained > HISTORIES / 10, "only {unexplained} histories were really spoiled");
}
