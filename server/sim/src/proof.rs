//! Proof that the simulator's own checks bite: each finds a fault made by hand. The shared checkers
//! have theirs beside them, in `bench/src/check`.

use leasehold_core::State;
use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{LeaseId, NodeId, Revision, ShardId};
use leasehold_protocol::member::{MemberOperation, MemberPhase};
use leasehold_server::raft::EntryPrint;
use leasehold_server::rt::sim::{SimRt, WorldConfig};
use openraft_rt::AsyncRuntime;

use crate::history::Violations;
use crate::ledger::Ledger;
use crate::logs::{Look, Nodes, Seen};
use crate::tables::Table;

const SHARD: ShardId = ShardId(0);

/// Panics if a check is blind.
pub(crate) fn prove() {
    SimRt::with_config(0, WorldConfig::default()).block_on(async { prove_ledger() });
    prove_logs();
    prove_votes();
    prove_tables();
}

fn prove_ledger() {
    let ended = |lease| {
        let reason = EndReason::LeaseExpired;
        let kind = EventKind::LeaseEnded { lease: LeaseId(lease), reason };
        vec![Event { revision: Revision(1), kind }]
    };
    let applied = |first: u64, second: u64| {
        let (ledger, violations) = (Ledger::default(), Violations::default());
        let state = State::new(SHARD);
        ledger.shard(SHARD).applied(1, &state, &ended(first), &violations);
        ledger.shard(SHARD).applied(2, &state, &ended(second), &violations);
        violations.list().len()
    };
    assert_eq!(applied(1, 1), 0, "two nodes that applied the same");
    assert_eq!(applied(1, 2), 1, "two nodes that applied different things");
}

/// A log of node `node` with entries of these (term, content), the first `applied` committed.
fn log(node: u64, term: u64, applied: u64, entries: &[(u64, u32)]) -> Look {
    let print = |(index, (term, crc)): (u64, &(u64, u32))| EntryPrint {
        index,
        leader: (*term, NodeId(1)),
        crc: *crc,
    };
    let entries: Vec<_> = (1..).zip(entries).map(print).collect();
    let voters = vec![[1, 2, 3].into()];
    let last = entries.len() as u64;
    Look { node, boot: 1, term, leads: false, applied, last, entries, voters, settled: true }
}

fn found(steps: &[&[&Look]]) -> usize {
    let whole = [1, 2, 3, 4].map(|node| (node, u64::MAX / 2));
    let nodes = Nodes { may_vote: [1, 2, 3, 4].into(), reached: whole.into() };
    found_with(&nodes, steps)
}

fn found_with(nodes: &Nodes, steps: &[&[&Look]]) -> usize {
    let (mut seen, violations) = (Seen::default(), Violations::default());
    for looks in steps {
        let looks: Vec<Look> = looks.iter().map(|look| (*look).clone()).collect();
        seen.take(SHARD, &looks, nodes, &violations);
    }
    violations.list().len()
}

fn prove_logs() {
    let whole = log(1, 3, 2, &[(1, 7), (1, 8), (2, 9)]);
    let tail = log(2, 3, 2, &[(1, 7), (1, 8), (3, 4)]);
    assert_eq!(found(&[&[&whole, &tail]]), 0, "tails may differ");
    let content = log(2, 3, 0, &[(1, 7), (1, 6)]);
    assert_eq!(found(&[&[&whole, &content]]), 1, "one name, two contents");
    let before = log(2, 3, 0, &[(1, 5), (1, 8)]);
    assert_eq!(found(&[&[&whole, &before]]), 1, "something else before a shared entry");
    let changed = log(1, 4, 2, &[(1, 7), (4, 1)]);
    assert_eq!(found(&[&[&whole], &[&changed]]), 1, "committed, then something else");
    let leader = Look { leads: true, ..log(2, 4, 1, &[(1, 7)]) };
    assert_eq!(found(&[&[&whole], &[&leader]]), 1, "a leader without it");
    let former = Look { term: 3, ..leader };
    assert_eq!(found(&[&[&whole], &[&former]]), 0, "one of the same term may lack it");
    let back = Look { applied: 1, ..whole.clone() };
    assert_eq!(found(&[&[&whole], &[&back]]), 1, "applied went back");
    let term = Look { term: 2, ..whole.clone() };
    assert_eq!(found(&[&[&whole], &[&term]]), 1, "the term went back");
    let reboot = Look { boot: 2, ..term };
    assert_eq!(found(&[&[&whole], &[&reboot]]), 0, "after a start it may, as far as is seen here");
    let leader = Look { leads: true, ..whole };
    let outside = Look { voters: vec![[2, 3].into()], ..leader.clone() };
    assert_eq!(found(&[&[&outside]]), 1, "a leader that does not vote");
    let on = log(1, 3, 4, &[(1, 7), (1, 8), (2, 9), (3, 1)]);
    let on = Look { leads: true, ..on };
    let (two, three) = (log(2, 3, 2, &[(1, 7), (1, 8)]), log(3, 3, 2, &[(1, 7), (1, 8)]));
    assert_eq!(found(&[&[&leader], &[&on, &two]]), 0, "one may lack what was applied");
    assert_eq!(found(&[&[&leader], &[&on, &two, &three]]), 1, "two of three lack it");
    let fresh = Look { voters: vec![[1, 2, 3, 4].into()], ..on };
    assert_eq!(found(&[&[&leader], &[&fresh, &two, &three]]), 0, "applied before they voted");
}

fn prove_votes() {
    let leader = Look { leads: true, last: 1_000, ..log(1, 3, 0, &[]) };
    let with = Look { voters: vec![[1, 2, 3].into(), [2, 3, 4].into()], ..leader.clone() };
    let nodes = |may_vote: &[u64], reached| Nodes {
        may_vote: may_vote.iter().copied().collect(),
        reached: [(4, reached)].into(),
    };
    let asked = nodes(&[1, 2, 3, 4], 900);
    assert_eq!(found_with(&asked, &[&[&leader], &[&with]]), 0, "it may vote, and has the log");
    let unasked = nodes(&[1, 2, 3], 900);
    assert_eq!(found_with(&unasked, &[&[&leader], &[&with], &[&with]]), 1, "no operation");
    let empty = nodes(&[1, 2, 3, 4], 0);
    assert_eq!(found_with(&empty, &[&[&leader], &[&with], &[&with]]), 1, "it has nothing");
    assert_eq!(found_with(&empty, &[&[&with], &[&with]]), 0, "a founder begins with nothing");
}

fn prove_tables() {
    let found = |next: &[Table]| {
        let first = Table { voters: [1, 2, 3].into(), ..Table::default() };
        let steps = [first].into_iter().chain(next.iter().cloned()).collect::<Vec<_>>();
        (1..).zip(steps.windows(2)).filter(|(at, w)| w[0].leads_to(at + 1, &w[1]).is_err()).count()
    };
    let under_way = |phase| {
        let operation = MemberOperation { operation: 2, phase, add: NodeId(4), remove: NodeId(1) };
        Table { voters: [1, 2, 3].into(), operation: Some(operation), ..Table::default() }
    };
    let with = |voters: [u64; 3]| Table { voters: voters.into(), ..Table::default() };
    let (learn, vote) = (under_way(MemberPhase::Learn), under_way(MemberPhase::Vote));
    let undo = under_way(MemberPhase::Undo);
    let (new, old) = (with([2, 3, 4]), with([1, 2, 3]));
    assert!(!learn.may_vote().contains(&4), "it only learns");
    assert!(
        vote.may_vote().contains(&4) && vote.may_vote().contains(&1),
        "the change is under way"
    );
    assert_eq!(found(&[learn.clone(), vote.clone(), new.clone()]), 0, "carried out");
    assert_eq!(found(&[learn.clone(), undo.clone(), old.clone()]), 0, "given up");
    let late = [learn.clone(), vote.clone(), undo.clone()];
    assert_eq!(found(&[&late[..], std::slice::from_ref(&old)].concat()), 0, "given up in the vote");
    assert_eq!(
        found(&[&late[..], std::slice::from_ref(&new)].concat()),
        1,
        "given up, and carried out"
    );
    assert_eq!(
        found(&[&late[..], std::slice::from_ref(&vote)].concat()),
        1,
        "given up, and gone on with"
    );
    assert_eq!(found(&[learn.clone(), new.clone()]), 1, "carried out without a vote");
    assert_eq!(found(&[learn.clone(), vote, old]), 1, "not what was asked for");
    assert_eq!(found(&[new]), 1, "without an operation");
    let second = learn.operation.map(|first| MemberOperation { operation: 3, ..first });
    let second = Table { operation: second, ..learn.clone() };
    assert_eq!(found(&[learn, second]), 1, "a second operation");
}
