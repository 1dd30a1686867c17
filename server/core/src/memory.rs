//! A lease's retry memory (G5): which numbers were used, for what, and with which outcome.
//!
//! Two tables. `records` holds every number that was executed above the floor, and, below it, the
//! acquires that had to wait. `late` holds the few cancels and releases that were executed below
//! the floor, in the numbers their acquire reserved.
//!
//! Invariants:
//! - A record above the floor is never dropped, so no number is executed twice.
//! - An acquire that waited (`keep`) outlives the floor: its client may have moved the floor before
//!   it heard the outcome. It goes when its outcome is acknowledged: by `acks`, by the release of
//!   its hold (who names the token has read the grant), or together with the record of its cancel
//!   (which tells the same outcome).
//! - `kept` counts the records with `keep`; at most `OPEN_WAITS_MAX`.
//! - `late` has at most `OPEN_WAITS_MAX` records; the lowest number makes room, so a reserved
//!   cancel or release always fits. A client that acknowledges never loses one.
//! - Records above the floor are at most `WINDOW` many, because their numbers are.

use core::ops::Bound;

use leasehold_protocol::ids::{LeaseId, Number};
use leasehold_protocol::limits::{OPEN_WAITS_MAX, WINDOW};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::planted;

use crate::cow::Map;
use crate::digest;
use crate::hash::Sum;

/// What a number was used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// An acquire.
    Acquire,
    /// An acquire whose cancel arrived first: whatever its body, it is refused.
    Forestalled,
    /// A cancel.
    Cancel,
    /// A release.
    Release,
    /// A change of a hold's mode.
    Convert,
    /// A change of a hold's value.
    SetValue,
}

/// What a retry is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The acquire is queued; the answer is its present position.
    Waiting,
    Done(Outcome),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) kind: Kind,
    /// Hash of the request's body, without floor and acknowledgements.
    pub(crate) print: u64,
    pub(crate) answer: Answer,
    /// Outlives the floor.
    pub(crate) keep: bool,
}

impl Record {
    /// True if a request of this kind and body is a retry of the one remembered.
    pub(crate) fn is_retried_by(&self, kind: Kind, print: u64) -> bool {
        match self.kind {
            Kind::Forestalled => kind == Kind::Acquire,
            own => own == kind && self.print == print,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) floor: u64,
    pub(crate) records: Map<u64, Record>,
    pub(crate) late: Map<u64, Record>,
    pub(crate) kept: usize,
}

impl Memory {
    pub(crate) fn get(&self, number: Number) -> Option<&Record> {
        self.records.get(&number.0).or_else(|| self.late.get(&number.0))
    }

    /// True if a fresh number, and `reserved` more after it, lie within the window.
    pub(crate) fn in_window(&self, number: Number, reserved: u64) -> bool {
        let last = number.0.saturating_add(reserved);
        // Planted (G9): numbers may run ahead of the floor without limit.
        last <= self.floor.saturating_add(WINDOW) || planted!("window-without-bound")
    }

    /// True if another acquire may wait: its record will outlive the floor.
    pub(crate) fn has_room_to_wait(&self) -> bool {
        self.kept < OPEN_WAITS_MAX
    }

    /// Remembers an executed request.
    pub(crate) fn put(&mut self, lease: LeaseId, number: Number, record: Record, sum: &mut Sum) {
        if record.kind != Kind::Acquire && number.0 <= self.floor {
            return self.put_late(lease, number, record, sum);
        }
        sum.add(digest::record(lease, number.0, &record));
        self.kept += usize::from(record.keep);
        let former = self.records.insert(number.0, record);
        assert!(former.is_none(), "a number is executed once");
    }

    fn put_late(&mut self, lease: LeaseId, number: Number, record: Record, sum: &mut Sum) {
        if self.late.len() >= OPEN_WAITS_MAX {
            let lowest = self.late.first().map(|(number, _)| *number).expect("the table is full");
            let evicted = self.late.remove(&lowest).expect("it was there");
            sum.sub(digest::late_record(lease, lowest, &evicted));
        }
        sum.add(digest::late_record(lease, number.0, &record));
        let former = self.late.insert(number.0, record);
        assert!(former.is_none(), "a number is executed once");
    }

    /// A queued acquire got its outcome.
    pub(crate) fn settle(
        &mut self,
        lease: LeaseId,
        number: Number,
        outcome: Outcome,
        sum: &mut Sum,
    ) {
        let record = self.records.get_mut(&number.0).expect("a waiter has a record");
        assert!(record.answer == Answer::Waiting, "a wait ends once");
        sum.sub(digest::record(lease, number.0, record));
        record.answer = Answer::Done(outcome);
        sum.add(digest::record(lease, number.0, record));
    }

    /// Raises the floor and takes acknowledgements. Returns true if anything changed.
    pub(crate) fn acknowledge(
        &mut self,
        lease: LeaseId,
        floor: Number,
        acks: &[Number],
        sum: &mut Sum,
    ) -> bool {
        let mut changed = false;
        if floor.0 > self.floor {
            self.raise_floor(lease, floor.0, sum);
            changed = true;
        }
        for number in acks {
            let has_outcome = self.get(*number).is_some_and(|one| one.answer != Answer::Waiting);
            if has_outcome && number.0 <= self.floor {
                self.forget(lease, number.0, sum);
                changed = true;
            }
        }
        changed
    }

    /// Each record is looked at once in its life by this, so the cost is constant per command.
    fn raise_floor(&mut self, lease: LeaseId, floor: u64, sum: &mut Sum) {
        let mut cursor = core::mem::replace(&mut self.floor, floor);
        while let Some((&number, record)) = self.records.iter_from(Bound::Excluded(&cursor)).next()
            && number <= floor
        {
            cursor = number;
            // Planted (G5): the floor drops what its client has not heard yet.
            if !record.keep || planted!("floor-forgets-waits") {
                self.forget(lease, number, sum);
            }
        }
    }

    fn forget(&mut self, lease: LeaseId, number: u64, sum: &mut Sum) {
        let kind = if let Some(record) = self.records.remove(&number) {
            sum.sub(digest::record(lease, number, &record));
            self.kept -= usize::from(record.keep);
            record.kind
        } else if let Some(record) = self.late.remove(&number) {
            sum.sub(digest::late_record(lease, number, &record));
            record.kind
        } else {
            return;
        };
        if kind == Kind::Cancel {
            self.read_otherwise(lease, Number(number - 1), sum);
        }
    }

    /// The client knows the outcome of this acquire from another command's outcome: the floor may
    /// drop it like any other record.
    pub(crate) fn read_otherwise(&mut self, lease: LeaseId, number: Number, sum: &mut Sum) {
        match self.records.get(&number.0) {
            Some(record) if record.keep && record.answer != Answer::Waiting => {}
            _ => return,
        }
        if number.0 <= self.floor {
            return self.forget(lease, number.0, sum);
        }
        let record = self.records.get_mut(&number.0).expect("it was there");
        sum.sub(digest::record(lease, number.0, record));
        record.keep = false;
        self.kept -= 1;
        sum.add(digest::record(lease, number.0, record));
    }
}
