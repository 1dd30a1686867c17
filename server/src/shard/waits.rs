//! Acquires that wait, on the node to which their client is attached.
//!
//! An acquire is registered here before it is sent to the leader, so the end of its wait, seen in
//! this node's own `apply`, cannot be missed: either it is applied after the registration, or the
//! command's outcome itself tells it. The newest registration of a (lease, number) wins.

use std::collections::BTreeMap;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, NodeId, Number};
use leasehold_protocol::outcome::Outcome;

use crate::net::ReplyTo;

/// Most registered waits of a shard on one node; above it the answer is `busy`.
pub(super) const WAITS_MAX: usize = 500_000;

/// Names one registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    lease: LeaseId,
    number: Number,
    /// Tells a registration from a later one of the same acquire, sent again by its client.
    generation: u64,
}

/// The registered waits.
#[derive(Default)]
pub(super) struct Waits {
    by_number: BTreeMap<(LeaseId, Number), (u64, ReplyTo)>,
    generation: u64,
}

impl Waits {
    /// Registers; `None` if there is no room. A registration of the same acquire that this one
    /// replaces is answered with `resync`: if its client is still there, it sends again, and then
    /// the newest connection is the living one.
    pub(super) fn register(&mut self, lease: LeaseId, number: Number, to: ReplyTo) -> Option<Wait> {
        if self.by_number.len() >= WAITS_MAX {
            return None;
        }
        self.generation += 1;
        let generation = self.generation;
        let replaced = self.by_number.insert((lease, number), (generation, to));
        if let Some((_, replaced)) = replaced {
            replaced.error(ErrorCode::RESYNC, NodeId(0));
        }
        Some(Wait { lease, number, generation })
    }

    /// The outcome of the acquire command itself arrived (`None`: an error did). Says whether its
    /// client still waits for it, and forgets the wait unless it goes on in the queue.
    pub(super) fn settle(&mut self, wait: Wait, outcome: Option<&Outcome>) -> bool {
        let name = (wait.lease, wait.number);
        match self.by_number.get(&name) {
            None => false,
            // Replaced, and told so.
            Some((generation, _)) if *generation != wait.generation => false,
            Some(_) => {
                if !matches!(outcome, Some(Outcome::Queued { .. })) {
                    self.by_number.remove(&name);
                }
                true
            }
        }
    }

    /// Tells the clients whose waits end with `events`.
    pub(super) fn applied(&mut self, events: &[Event]) {
        for event in events {
            if let EventKind::WaitEnded { lease, number, outcome, .. } = &event.kind
                && let Some((_, to)) = self.by_number.remove(&(*lease, *number))
            {
                to.outcome(*outcome, NodeId(0));
            }
        }
    }

    /// Events may have been skipped: every client must ask again under its number.
    pub(super) fn resync(&mut self) {
        for (_, to) in std::mem::take(&mut self.by_number).into_values() {
            to.error(ErrorCode::RESYNC, NodeId(0));
        }
    }
}
