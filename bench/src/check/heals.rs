//! G8 heals: after the last fault was lifted each shard has one leader and serves.
//!
//! How long it took is a figure; it is judged only where a run states a limit.

use std::collections::BTreeMap;

use crate::clock::to_ms;
use crate::history::{FaultKind, FinalState, History};

use super::{Needs, Report};

/// What a shard did after the last fault.
#[derive(Default)]
struct Healed {
    served: u64,
    first_ns: Option<u64>,
}

/// Judges a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("G8 heals");
    let mut shards: BTreeMap<u32, Healed> = BTreeMap::new();
    for end in history.finals() {
        shards.entry(end.shard).or_default();
        one_leader(end, &mut report);
    }
    let lifted = history.faults().filter(|fault| fault.kind == FaultKind::Healed);
    if let Some(lifted_ns) = lifted.map(|fault| fault.at_ns).max() {
        for op in history.ops().filter(|op| op.outcome.is_ok()) {
            let Some(returned) = op.return_ns.filter(|at| *at >= lifted_ns) else { continue };
            let shard = shards.entry(op.shard).or_default();
            shard.first_ns = Some(shard.first_ns.map_or(returned, |first| first.min(returned)));
            shard.served += u64::from(op.invoke_ns >= lifted_ns);
        }
        limits(&shards, lifted_ns, needs, &mut report);
    }
    let served = shards.values().map(|shard| shard.served).min().unwrap_or(0);
    report.cover("served_each", served, needs.served);
    report
}

/// Nodes that could not be asked make a run poorer, not wrong.
fn one_leader(end: &FinalState, report: &mut Report) {
    if end.leaders.len() > 1 {
        report.violation(format!("shard {}: nodes {:?} all lead", end.shard, end.leaders));
    }
    if end.leaders.is_empty() && !end.nodes.is_empty() {
        report.violation(format!("shard {}: nobody leads", end.shard));
    }
}

fn limits(shards: &BTreeMap<u32, Healed>, lifted_ns: u64, needs: &Needs, report: &mut Report) {
    let took = |shard: &Healed| shard.first_ns.map(|first| to_ms(first - lifted_ns));
    let limit = needs.heal_ms_max;
    for (id, shard) in shards.iter().filter(|_| limit > 0) {
        if took(shard).is_none_or(|took| took > limit as f64) {
            report.violation(format!("shard {id}: nothing was served for {limit} ms"));
        }
    }
    let slowest = shards.values().filter_map(took).fold(0.0, f64::max);
    report.figure("slowest_first_ok_ms", format!("{slowest:.0}"));
}

#[cfg(test)]
mod tests {
    use super::super::build::{Run, S};
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::{Fault, FaultKind, FinalNode, FinalState, Record};

    /// Healed at 5 s; a call is served until `served` s.
    fn verdict(served: u64, leaders: &[u64]) -> Verdict {
        let mut run = Run::new();
        let kind = FaultKind::Healed;
        run.record(Record::Fault(Fault { at_ns: 5 * S, kind, node: 0 }));
        run.grant(1, "k", 5, S, 2 * S);
        run.grant(1, "l", 6, 5 * S + 1, served * S);
        run.record(Record::Final(FinalState {
            nodes: vec![FinalNode { node: 1, revision: 1, digest: 1 }],
            leaders: leaders.to_vec(),
            ..FinalState::default()
        }));
        let needs = Needs { served: 1, heal_ms_max: 3_000, ..Needs::default() };
        check(&run.history(), &needs).verdict()
    }

    #[test]
    fn one_leader_that_serves_is_fine() {
        assert_eq!(verdict(7, &[2]), Verdict::Ok);
    }

    #[test]
    fn silence_no_leader_and_two_leaders_are_caught() {
        assert_eq!(verdict(9, &[2]), Verdict::Violation);
        assert_eq!(verdict(7, &[]), Verdict::Violation);
        assert_eq!(verdict(7, &[1, 2]), Verdict::Violation);
    }

    #[test]
    fn a_run_that_asked_nothing_after_its_faults_proves_nothing() {
        let mut run = Run::new();
        run.grant(1, "k", 5, S, 2 * S);
        let needs = Needs { served: 1, ..Needs::default() };
        assert_eq!(check(&run.history(), &needs).verdict(), Verdict::Invalid);
    }
}
