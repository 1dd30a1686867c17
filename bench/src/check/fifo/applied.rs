//! G4 in the nodes' logs: every queue, entry by entry.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::Report;
use super::super::log::{Log, logs};
use crate::history::{Applied, Change, History};

/// Returns how many waiters were granted.
pub(super) fn check(history: &History, report: &mut Report) -> u64 {
    logs(history).values().map(|log| Replay::default().run(log, report)).sum()
}

/// A waiter: its lease and number.
type Waiter = (u64, u64);

#[derive(Default)]
struct Replay<'a> {
    queues: BTreeMap<&'a str, VecDeque<Waiter>>,
    held: BTreeSet<&'a str>,
    dead: BTreeSet<u64>,
    granted: u64,
}

impl<'a> Replay<'a> {
    fn run(mut self, log: &Log<'a>, report: &mut Report) -> u64 {
        for step in log.steps() {
            let mut wrong = |text: String| {
                report.violation(format!("revision {}: {text}", step.revision));
            };
            for change in &step.changes {
                self.change(step, change, &mut wrong);
            }
            self.no_key_is_free_while_somebody_waits(step, &mut wrong);
        }
        self.granted
    }

    fn change(&mut self, step: &Applied, change: &'a Change, wrong: &mut impl FnMut(String)) {
        match change {
            Change::Opened { lease } if self.dead.contains(lease) => {
                wrong(format!("lease {lease} was revived"));
            }
            Change::LeaseEnded { lease, .. } => {
                self.dead.insert(*lease);
            }
            Change::Queued { key, lease, number } => {
                self.queues.entry(key).or_default().push_back((*lease, *number));
            }
            Change::WaitEnded { key, lease, number, token } => {
                self.wait_ended(key, (*lease, *number), *token, wrong);
            }
            Change::Granted { key, lease, token } => {
                self.held.insert(key);
                if self.dead.contains(lease) {
                    wrong(format!("key {key:?}: token {token} was granted to dead lease {lease}"));
                }
                let first = self.queues.get(key.as_str()).and_then(VecDeque::front);
                if let Some(first) = first.filter(|first| served(step, *token) != Some(**first)) {
                    wrong(format!("key {key:?}: token {token} was granted past waiter {first:?}"));
                }
            }
            Change::Ended { key, .. } => {
                self.held.remove(key.as_str());
            }
            Change::Opened { .. } | Change::Forced { .. } => {}
        }
    }

    fn wait_ended(
        &mut self,
        key: &'a str,
        waiter: Waiter,
        token: Option<u64>,
        wrong: &mut impl FnMut(String),
    ) {
        let queue = self.queues.entry(key).or_default();
        let Some(place) = queue.iter().position(|other| *other == waiter) else {
            return wrong(format!("key {key:?}: {waiter:?} ended its wait and did not wait"));
        };
        queue.remove(place);
        let Some(token) = token else { return };
        self.granted += 1;
        if place > 0 {
            wrong(format!("key {key:?}: {waiter:?} was granted token {token} from place {place}"));
        }
        if self.dead.contains(&waiter.0) {
            wrong(format!("key {key:?}: {waiter:?} was granted token {token} after its end"));
        }
    }

    fn no_key_is_free_while_somebody_waits(
        &self,
        step: &'a Applied,
        wrong: &mut impl FnMut(String),
    ) {
        for change in &step.changes {
            let (Change::Ended { key, .. }
            | Change::WaitEnded { key, .. }
            | Change::Queued { key, .. }) = change
            else {
                continue;
            };
            let waits = self.queues.get(key.as_str()).is_some_and(|queue| !queue.is_empty());
            if waits && !self.held.contains(key.as_str()) {
                wrong(format!("key {key:?}: somebody waits though nobody holds"));
            }
        }
    }
}

/// The waiter whose wait this very token ended.
fn served(step: &Applied, token: u64) -> Option<Waiter> {
    step.changes.iter().find_map(|change| match change {
        Change::WaitEnded { lease, number, token: Some(own), .. } if *own == token => {
            Some((*lease, *number))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::build::{Run, ended, granted, queued, wait_ended};
    use super::super::super::{Needs, Verdict};
    use crate::history::{Cause, Change};

    fn verdict(steps: Vec<Vec<Change>>) -> Verdict {
        let mut run = Run::new();
        (1..).zip(steps).for_each(|(revision, changes)| run.applied(revision, changes));
        super::super::check(&run.history(), &Needs::default()).verdict()
    }

    fn two_waiters(last: Vec<Change>) -> Vec<Vec<Change>> {
        vec![vec![granted("k", 1, 10)], vec![queued("k", 2, 1)], vec![queued("k", 3, 1)], last]
    }

    /// Also to a lease of the hold's own, which is not the waiter's.
    #[test]
    fn the_first_waiter_is_served() {
        for lease in [2, 9] {
            let last =
                vec![ended("k", 1, 10), granted("k", lease, 11), wait_ended("k", 2, 1, Some(11))];
            assert_eq!(verdict(two_waiters(last)), Verdict::Ok);
        }
    }

    #[test]
    fn the_second_waiter_served_first_is_caught() {
        let last = vec![ended("k", 1, 10), granted("k", 3, 11), wait_ended("k", 3, 1, Some(11))];
        assert_eq!(verdict(two_waiters(last)), Verdict::Violation);
    }

    #[test]
    fn a_newcomer_served_past_the_queue_is_caught() {
        let last = vec![ended("k", 1, 10), granted("k", 4, 11)];
        assert_eq!(verdict(two_waiters(last)), Verdict::Violation);
    }

    #[test]
    fn a_free_key_with_waiters_is_caught() {
        assert_eq!(verdict(two_waiters(vec![ended("k", 1, 10)])), Verdict::Violation);
    }

    #[test]
    fn grants_to_the_dead_and_revived_leases_are_caught() {
        let dead = vec![Change::LeaseEnded { lease: 1, cause: Cause::Closed }];
        assert_eq!(verdict(vec![dead.clone(), vec![granted("k", 1, 10)]]), Verdict::Violation);
        assert_eq!(verdict(vec![dead, vec![Change::Opened { lease: 1 }]]), Verdict::Violation);
    }

    #[test]
    fn an_end_of_a_wait_that_never_began_is_caught() {
        assert_eq!(verdict(vec![vec![wait_ended("k", 2, 1, None)]]), Verdict::Violation);
    }
}
