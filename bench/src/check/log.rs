//! The log of each shard, merged from the records of the nodes that applied it.
//!
//! A history has the whole log of a shard, from its first revision on, or nothing of it.

use std::collections::BTreeMap;

use crate::history::{Applied, Change, History};

/// One shard's log.
#[derive(Default)]
pub(super) struct Log<'a> {
    steps: BTreeMap<u64, &'a Applied>,
    /// Where two nodes applied different things at one revision.
    pub(super) contradictions: Vec<(&'a Applied, &'a Applied)>,
}

/// The logs of a history by shard; none of a shard that no node told of.
pub(super) fn logs(history: &History) -> BTreeMap<u32, Log<'_>> {
    let mut logs: BTreeMap<u32, Log<'_>> = BTreeMap::new();
    for applied in history.applied() {
        let log = logs.entry(applied.shard).or_default();
        let first = *log.steps.entry(applied.revision).or_insert(applied);
        if first.changes != applied.changes {
            log.contradictions.push((first, applied));
        }
    }
    logs
}

impl<'a> Log<'a> {
    /// All steps in order.
    pub(super) fn steps(&self) -> impl Iterator<Item = &'a Applied> {
        self.steps.values().copied()
    }

    /// All changes in order, with their steps.
    pub(super) fn changes(&self) -> impl Iterator<Item = (&'a Applied, &'a Change)> {
        self.steps().flat_map(|step| step.changes.iter().map(move |change| (step, change)))
    }

    /// One revision's step.
    pub(super) fn at(&self, revision: u64) -> Option<&'a Applied> {
        self.steps.get(&revision).copied()
    }

    /// The last revision that changed anything.
    pub(super) fn last(&self) -> u64 {
        self.steps.keys().next_back().copied().unwrap_or(0)
    }
}
