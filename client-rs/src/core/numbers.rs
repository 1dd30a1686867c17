//! The numbers of one lease's commands: what is given out, what is settled, and what the cluster
//! may forget (G5).
//!
//! An acquire takes three numbers: `n` for itself, `n + 1` for its cancel, `n + 2` for its
//! release. A change of a hold takes one. The floor is the highest number such that everything at or below it has reached this
//! client, except acquires that are known to wait in a queue: those the floor may pass, and their
//! results are acknowledged one by one. The floor never goes back.

use std::collections::BTreeSet;

use leasehold_protocol::ids::Number;
use leasehold_protocol::limits::{ACKS_MAX, OPEN_WAITS_MAX, WINDOW};
use leasehold_protocol::planted;

/// Numbers that one acquire reserves.
const STRIDE: u64 = 3;

/// See the module.
#[derive(Debug)]
pub(crate) struct Numbers {
    next: u64,
    floor: u64,
    /// Sent, and without any answer yet.
    open: BTreeSet<u64>,
    /// Acquires that answered `queued` and have no final result yet.
    waiting: BTreeSet<u64>,
    /// Commands whose result reached us and may be kept for us until we say so.
    unacknowledged: BTreeSet<u64>,
}

impl Numbers {
    pub(crate) fn new() -> Self {
        Self {
            next: 1,
            floor: 0,
            open: BTreeSet::new(),
            waiting: BTreeSet::new(),
            unacknowledged: BTreeSet::new(),
        }
    }

    /// The number of a new acquire; `None` while the window or the open waits are full.
    pub(crate) fn take(&mut self) -> Option<Number> {
        let number = self.next;
        let beyond = number + STRIDE - 1 > self.floor + WINDOW;
        if beyond || self.waiting.len() >= OPEN_WAITS_MAX {
            return None;
        }
        self.next += STRIDE;
        self.open.insert(number);
        Some(Number(number))
    }

    /// The number of a change of a hold; `None` while the window is full.
    pub(crate) fn take_single(&mut self) -> Option<Number> {
        let number = self.next;
        if number > self.floor + WINDOW {
            return None;
        }
        self.next += 1;
        self.open.insert(number);
        Some(Number(number))
    }

    /// A cancel or a release is about to be sent: the floor stays below it until it is settled.
    pub(crate) fn begin(&mut self, number: Number) {
        assert!(number.0 < self.next, "a cancel or release belongs to an acquire");
        if number.0 > self.floor {
            self.open.insert(number.0);
        }
    }

    /// The acquire waits: its result will come later.
    pub(crate) fn queued(&mut self, number: Number) {
        if self.open.remove(&number.0) {
            self.waiting.insert(number.0);
            self.raise();
        }
    }

    /// The command's final outcome is known.
    ///
    /// The cluster keeps some results until they are acknowledged: of acquires that waited, or may
    /// have waited without our knowing (`kept`), and of what was executed below the floor.
    pub(crate) fn settle(&mut self, number: Number, kept: bool) {
        self.open.remove(&number.0);
        let waited = self.waiting.remove(&number.0);
        if kept || waited || number.0 <= self.floor {
            self.unacknowledged.insert(number.0);
        }
        self.raise();
    }

    fn raise(&mut self) {
        let mut settled = self.open.first().map_or(self.next - 1, |lowest| lowest - 1);
        // Planted (G5): the cluster may forget what this client has not heard.
        if planted!("floor-passes-the-unanswered") {
            settled = self.next - 1;
        }
        self.floor = self.floor.max(settled);
    }

    /// What the next command carries: the floor, and results to forget.
    pub(crate) fn stamp(&self) -> (Number, Vec<Number>) {
        let acks = self.unacknowledged.range(..=self.floor).take(ACKS_MAX);
        (Number(self.floor), acks.copied().map(Number).collect())
    }

    /// A command that carried these acknowledgements was answered.
    pub(crate) fn acknowledged(&mut self, acks: &[Number]) {
        for number in acks {
            self.unacknowledged.remove(&number.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_stays_below_the_lowest_unanswered_number() {
        let mut numbers = Numbers::new();
        let first = numbers.take().expect("room");
        let second = numbers.take().expect("room");
        assert_eq!((first, second), (Number(1), Number(4)));
        numbers.settle(second, false);
        assert_eq!(numbers.stamp(), (Number(0), vec![]));
        numbers.settle(first, false);
        assert_eq!(numbers.stamp(), (Number(6), vec![]));
    }

    #[test]
    fn the_floor_passes_a_wait_and_its_result_is_acknowledged_until_confirmed() {
        let mut numbers = Numbers::new();
        let wait = numbers.take().expect("room");
        numbers.queued(wait);
        assert_eq!(numbers.stamp(), (Number(3), vec![]));
        numbers.settle(wait, false);
        assert_eq!(numbers.stamp(), (Number(3), vec![wait]));
        assert_eq!(numbers.stamp().1, vec![wait], "repeated until a reply confirms it");
        numbers.acknowledged(&[wait]);
        assert_eq!(numbers.stamp(), (Number(3), vec![]));
    }

    #[test]
    fn a_result_above_the_floor_is_not_acknowledged_yet() {
        let mut numbers = Numbers::new();
        let blocked = numbers.take().expect("room");
        let wait = numbers.take().expect("room");
        numbers.queued(wait);
        numbers.settle(wait, false);
        assert_eq!(numbers.stamp(), (Number(0), vec![]));
        numbers.settle(blocked, false);
        assert_eq!(numbers.stamp(), (Number(6), vec![wait]));
    }

    #[test]
    fn a_release_holds_the_floor_only_while_it_is_above_it() {
        let mut numbers = Numbers::new();
        let acquire = numbers.take().expect("room");
        let other = numbers.take().expect("room");
        let release = Number(acquire.0 + 2);
        numbers.settle(acquire, false);
        assert_eq!(numbers.stamp().0, Number(3), "up to the unanswered one");
        numbers.begin(release);
        numbers.settle(other, false);
        assert_eq!(numbers.stamp().0, Number(6), "the floor never goes back");
        numbers.settle(release, false);
        assert_eq!(numbers.stamp().1, [release], "executed below the floor");
        numbers.acknowledged(&[release]);
        let third = numbers.take().expect("room");
        numbers.begin(Number(third.0 + 1));
        numbers.settle(third, false);
        assert_eq!(numbers.stamp().0, third, "held by the cancel above it");
        numbers.settle(Number(third.0 + 1), false);
        assert_eq!(numbers.stamp().0, Number(9));
    }

    #[test]
    fn the_window_is_a_bound() {
        let mut numbers = Numbers::new();
        let first = numbers.take().expect("room");
        let mut taken = 1;
        while numbers.take().is_some() {
            taken += 1;
        }
        assert_eq!(taken, WINDOW / STRIDE);
        numbers.settle(first, false);
        assert!(numbers.take().is_some(), "a settled number makes room");
        assert!(numbers.take().is_none());
    }
}
