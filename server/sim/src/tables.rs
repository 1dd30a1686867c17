//! The member table as the nodes applied it, version by version, and what may follow what.
//!
//! - A version is the same on every node (the states' digests say that already).
//! - One operation at a time: the next begins when none is under way, and each goes the way
//!   learn, vote, over, or begins with the vote if nobody comes; given up, it goes on to undo, over.
//! - The voters change at its end alone, by the node that came and the node that went.
//!
//! A node may vote in a shard once a version says so: as a voter, or as the one that an operation
//! adds, from when it votes on (`logs.rs` looks whether it does before).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use leasehold_core::Members;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::member::{MemberOperation, MemberPhase, Standing};

use crate::coverage::{Coverage, Seen};
use crate::history::Violations;

/// One version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) voters: BTreeSet<u64>,
    /// Used up.
    pub(crate) removed: BTreeSet<u64>,
    pub(crate) operation: Option<MemberOperation>,
}

impl Table {
    /// The nodes that may have a vote in any shard by this version.
    pub(crate) fn may_vote(&self) -> BTreeSet<u64> {
        let coming = self.operation.filter(|operation| operation.phase == MemberPhase::Vote);
        let coming = coming.map(|operation| operation.add.0).filter(|node| *node > 0);
        self.voters.iter().copied().chain(coming).collect()
    }

    pub(crate) fn of(members: &Members) -> Self {
        let with = |standing| {
            let some = members.nodes().filter(move |info| info.standing == standing);
            some.map(|info| info.entry.node.0).collect()
        };
        Self {
            voters: with(Standing::Voter),
            removed: with(Standing::Removed),
            operation: members.operation(),
        }
    }

    /// What is wrong with `next` coming after this.
    pub(crate) fn leads_to(&self, version: u64, next: &Self) -> Result<(), &'static str> {
        let stays = next.voters == self.voters;
        match (self.operation, next.operation) {
            (None, Some(begun)) => {
                let first =
                    if begun.add == NodeId(0) { MemberPhase::Vote } else { MemberPhase::Learn };
                let fresh = begun.operation == version && begun.phase == first;
                if fresh && stays { Ok(()) } else { Err("an operation that begins wrongly") }
            }
            (Some(old), Some(new)) => {
                if old.operation != new.operation {
                    return Err("a second operation beside the first");
                }
                let on = matches!(
                    (old.phase, new.phase),
                    (MemberPhase::Learn, MemberPhase::Vote | MemberPhase::Undo)
                        | (MemberPhase::Vote, MemberPhase::Undo)
                );
                let same = MemberOperation { phase: old.phase, ..new } == old;
                if on && same && stays { Ok(()) } else { Err("an operation that goes on wrongly") }
            }
            (Some(over), None) => {
                let mut voters = self.voters.clone();
                match over.phase {
                    MemberPhase::Learn => return Err("an operation that ends while it learns"),
                    MemberPhase::Undo => {}
                    MemberPhase::Vote => {
                        voters.remove(&over.remove.0);
                        voters.extend(Some(over.add.0).filter(|node| *node > 0));
                    }
                }
                if voters == next.voters { Ok(()) } else { Err("other voters than were asked for") }
            }
            (None, None) => Err("a change of the table without an operation"),
        }
    }
}

/// All versions that any node applied.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    known: RefCell<BTreeMap<u64, Table>>,
    /// Operations under way when the leadership of shard 0 moved.
    handed_over: RefCell<BTreeSet<u64>>,
    /// The nodes that any version lets vote.
    may_vote: RefCell<BTreeSet<u64>>,
}

impl Tables {
    /// A node has this table now.
    pub(crate) fn applied(&self, members: &Members, coverage: &Coverage, violations: &Violations) {
        let version = members.version();
        let mut known = self.known.borrow_mut();
        if version == 0 || known.contains_key(&version) {
            return;
        }
        let table = Table::of(members);
        let before = version.checked_sub(1).and_then(|before| Some((version, known.get(&before)?)));
        for (version, before, after) in [
            before.map(|(version, before)| (version, before, &table)),
            known.get(&(version + 1)).map(|after| (version + 1, &table, after)),
        ]
        .into_iter()
        .flatten()
        {
            if let Err(what) = before.leads_to(version, after) {
                violations.add("members", &format!("{what}: {before:?}, then {after:?}"));
            }
            if let Some(over) = before.operation.filter(|_| after.operation.is_none()) {
                self.count(over, coverage);
            }
        }
        self.may_vote.borrow_mut().extend(table.may_vote());
        known.insert(version, table);
    }

    /// The nodes that any version so far lets vote.
    pub(crate) fn may_vote(&self) -> BTreeSet<u64> {
        self.may_vote.borrow().clone()
    }

    fn count(&self, over: MemberOperation, coverage: &Coverage) {
        let none = NodeId(0);
        coverage.count(match (over.phase, over.add == none, over.remove == none) {
            (MemberPhase::Undo, ..) => Seen::OperationAborted,
            (_, true, _) => Seen::MemberRemoved,
            (_, _, true) => Seen::MemberAdded,
            _ => Seen::MemberReplaced,
        });
        if self.handed_over.borrow().contains(&over.operation) {
            coverage.count(Seen::OperationResumed);
        }
    }

    /// Another node leads shard 0 now, and drives what is under way.
    pub(crate) fn driver_changed(&self) {
        if let Some(operation) = self.latest().and_then(|table| table.operation) {
            self.handed_over.borrow_mut().insert(operation.operation);
        }
    }

    /// The newest that any node has; `None` before the first.
    pub(crate) fn latest(&self) -> Option<Table> {
        self.known.borrow().last_key_value().map(|(_, table)| table.clone())
    }
}
