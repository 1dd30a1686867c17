//! Events as figures.

use std::cell::Cell;

use leasehold_protocol::event::{EndReason, Event, EventKind};

use leasehold_core::State;

use crate::admin::{CoreHandle, Counter};

/// Counts what was applied.
pub(super) fn count_events(metrics: &CoreHandle, events: &[Event]) {
    for event in events {
        match &event.kind {
            EventKind::Granted { .. } => metrics.count(Counter::Grants),
            EventKind::Queued { .. } => metrics.count(Counter::Queued),
            EventKind::LeaseEnded { reason: EndReason::LeaseExpired, .. } => {
                metrics.count(Counter::Expiries);
            }
            EventKind::Ended { reason, .. } => metrics.count(match reason {
                EndReason::LeaseExpired => Counter::EndExpired,
                EndReason::SessionClosed => Counter::EndClosed,
                EndReason::Forced { .. } => Counter::EndForced,
                _ => Counter::EndReleased,
            }),
            _ => {}
        }
    }
}

/// How much a shard's state holds, kept from its events.
#[derive(Debug, Default)]
pub(super) struct Totals {
    holds: Cell<usize>,
    waiters: Cell<usize>,
}

impl Totals {
    pub(super) fn holds(&self) -> usize {
        self.holds.get()
    }

    pub(super) fn waiters(&self) -> usize {
        self.waiters.get()
    }

    /// Events were applied.
    pub(super) fn follow(&self, events: &[Event]) {
        for event in events {
            match &event.kind {
                EventKind::Granted { .. } => self.holds.set(self.holds.get() + 1),
                EventKind::Ended { .. } => self.holds.set(self.holds.get().saturating_sub(1)),
                EventKind::Queued { .. } => self.waiters.set(self.waiters.get() + 1),
                EventKind::WaitEnded { .. } => {
                    self.waiters.set(self.waiters.get().saturating_sub(1));
                }
                _ => {}
            }
        }
    }

    /// Events were skipped: counts what `state` has. O(leases).
    pub(super) fn recount(&self, state: &State) {
        let leases = || state.leases().filter_map(|(id, _)| state.lease(id));
        self.holds.set(leases().map(|lease| lease.holds()).sum());
        self.waiters.set(leases().map(|lease| lease.waits()).sum());
    }
}
