//! The timing wheel against a sorted map.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_core::wheel::{Handle, TICK_NS, Wheel};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Insert(u64),
    Renew(usize, u64),
    Cancel(usize),
    Advance(u64),
    /// To just before, at, or just after what `next_deadline` says.
    AdvanceToNext(u64),
}

/// Deadlines from now: within a tick, some ticks, and across every level.
fn distance() -> impl Strategy<Value = u64> {
    (0_u32..50, 0_u64..1 << 20).prop_map(|(shift, low)| (low << shift) >> 16)
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        5 => distance().prop_map(Op::Insert),
        2 => (any::<usize>(), distance()).prop_map(|(which, at)| Op::Renew(which, at)),
        2 => any::<usize>().prop_map(Op::Cancel),
        3 => distance().prop_map(Op::Advance),
        2 => (0_u64..3).prop_map(Op::AdvanceToNext),
    ];
    prop::collection::vec(op, 1..200)
}

/// Entries by the tick in which they fire, and by number.
type Model = BTreeSet<(u64, usize)>;

fn tick(deadline_ns: u64) -> u64 {
    deadline_ns.div_ceil(TICK_NS).min(u64::MAX / TICK_NS)
}

fn advance(wheel: &mut Wheel<usize>, model: &mut Model, now: u64) {
    let mut due = Vec::new();
    wheel.advance(now, &mut due);
    let later = model.split_off(&(now / TICK_NS + 1, 0));
    let mut expected: Vec<_> = std::mem::replace(model, later).into_iter().collect();
    // In tick order; within one tick in any order.
    let ticks: BTreeMap<_, _> = expected.iter().map(|(tick, number)| (*number, *tick)).collect();
    let mut fired: Vec<_> = due.iter().map(|number| (ticks[number], *number)).collect();
    fired.sort_unstable();
    expected.sort_unstable();
    assert_eq!(fired, expected);
}

fn run(start: u64, ops: Vec<Op>) {
    let mut now = start;
    let mut wheel = Wheel::new(now);
    let mut model = Model::new();
    // By number: the handle, and the deadline's tick while it waits.
    let mut entries: Vec<(Handle, u64)> = Vec::new();
    for op in ops {
        match op {
            Op::Insert(distance) => {
                let number = entries.len();
                let deadline = now.saturating_add(distance);
                let handle = wheel.insert(deadline, number);
                entries.push((handle, tick(deadline)));
                model.insert((tick(deadline), number));
            }
            Op::Renew(which, distance) if !entries.is_empty() => {
                let number = which % entries.len();
                let (handle, old) = entries[number];
                let deadline = now.saturating_add(distance);
                let waits = model.remove(&(old, number));
                assert_eq!(wheel.renew(handle, deadline), waits);
                if waits {
                    entries[number].1 = tick(deadline);
                    model.insert((tick(deadline), number));
                }
            }
            Op::Cancel(which) if !entries.is_empty() => {
                let number = which % entries.len();
                let (handle, old) = entries[number];
                let waits = model.remove(&(old, number));
                assert_eq!(wheel.cancel(handle), waits.then_some(number));
            }
            Op::Renew(..) | Op::Cancel(_) => {}
            Op::Advance(distance) => {
                now = now.saturating_add(distance);
                advance(&mut wheel, &mut model, now);
            }
            Op::AdvanceToNext(offset) => {
                if let Some(next) = wheel.next_deadline() {
                    now = now.max((next + offset).saturating_sub(1));
                    advance(&mut wheel, &mut model, now);
                }
            }
        }
        assert_eq!(wheel.len(), model.len());
        assert_eq!(wheel.is_empty(), model.is_empty());
        let first = model.first().map(|(tick, _)| tick.saturating_mul(TICK_NS));
        let next = wheel.next_deadline();
        assert_eq!(next.is_some(), first.is_some());
        if let (Some(next), Some(first)) = (next, first) {
            assert!(next <= first.max(now), "{next} is after {first} (now {now})");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..Default::default() })]

    #[test]
    fn fires_what_a_sorted_map_would_and_nothing_early(start in 0_u64..1 << 62, ops in ops()) {
        run(start, ops);
    }
}

/// `next_deadline` leads to every entry in a bounded number of steps.
#[test]
fn following_next_deadline_reaches_the_furthest_entry() {
    let mut wheel = Wheel::new(12_345);
    for level in 0..7 {
        wheel.insert(12_345 + (1_u64 << (20 + 6 * level)) * 63, level);
    }
    wheel.insert(u64::MAX, 99);
    let mut due = Vec::new();
    let mut steps = 0;
    while let Some(next) = wheel.next_deadline() {
        wheel.advance(next, &mut due);
        steps += 1;
        assert!(steps < 100, "no progress");
    }
    assert_eq!(due, [0, 1, 2, 3, 4, 5, 6, 99]);
}

#[test]
fn a_handle_never_names_another_entry() {
    let mut wheel = Wheel::new(0);
    let first = wheel.insert(5, 'a');
    assert_eq!(wheel.cancel(first), Some('a'));
    let second = wheel.insert(5, 'b');
    assert_eq!(wheel.cancel(first), None);
    assert!(!wheel.renew(first, 9));
    let mut due = Vec::new();
    wheel.advance(TICK_NS, &mut due);
    assert_eq!(due, ['b']);
    assert_eq!(wheel.cancel(second), None);
}

#[test]
fn a_million_entries() {
    const ENTRIES: u64 = 1_000_000;
    let mut wheel = Wheel::new(0);
    let handles: Vec<_> = (0..ENTRIES).map(|n| wheel.insert(n * 1_000, n)).collect();
    for (n, handle) in handles.iter().enumerate().step_by(2) {
        assert!(wheel.renew(*handle, (ENTRIES + n as u64) * 1_000));
    }
    let mut due = Vec::new();
    wheel.advance(ENTRIES * 1_000, &mut due);
    assert!(due.iter().all(|n| n % 2 == 1));
    let slack = (TICK_NS / 1_000) as usize;
    assert!(due.len() + slack >= ENTRIES as usize / 2 && due.len() <= ENTRIES as usize / 2);
    wheel.advance(3 * ENTRIES * 1_000, &mut due);
    assert_eq!(due.len() as u64, ENTRIES);
    assert!(wheel.is_empty());
}
