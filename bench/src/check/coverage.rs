//! Coverage: a run whose faults did not happen proves nothing about them.

use std::collections::BTreeMap;

use crate::history::{FaultKind, History, Outcome};

use super::{Needs, Report};

/// Counts the faults and the retries of a history.
pub fn check(history: &History, needs: &Needs) -> Report {
    let mut report = Report::new("coverage");
    let mut seen: BTreeMap<FaultKind, u64> = BTreeMap::new();
    history.faults().for_each(|fault| *seen.entry(fault.kind).or_insert(0) += 1);
    for (kind, needed) in &needs.faults {
        report.cover(name(*kind), seen.get(kind).copied().unwrap_or(0), *needed);
    }
    let unknown = history.ops().filter(|op| op.outcome == Outcome::Unknown).count();
    report.figure("operations", history.ops().count().to_string());
    report.figure("unknown_outcomes", unknown.to_string());
    report
}

const fn name(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::LeaderKilled => "leader_killed",
        FaultKind::FollowerKilled => "follower_killed",
        FaultKind::AllKilled => "all_killed",
        FaultKind::LeaderStopped => "leader_stopped",
        FaultKind::Restarted => "restarted",
        FaultKind::SnapshotInstalled => "snapshot_installed",
        FaultKind::ClientStopped => "client_stopped",
        FaultKind::ClientKilled => "client_killed",
        FaultKind::Partitioned => "partitioned",
        FaultKind::Healed => "healed",
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Needs, Verdict};
    use super::check;
    use crate::history::{Fault, FaultKind, History, Record};

    #[test]
    fn a_fault_that_did_not_happen_makes_the_run_invalid() {
        let needs = Needs { faults: vec![(FaultKind::LeaderKilled, 1)], ..Needs::default() };
        let mut history = History::default();
        assert_eq!(check(&history, &needs).verdict(), Verdict::Invalid);
        let kind = FaultKind::LeaderKilled;
        history.records.push(Record::Fault(Fault { at_ns: 1, kind, node: 1 }));
        assert_eq!(check(&history, &needs).verdict(), Verdict::Ok);
    }
}
