//! The labels of live leases, kept beside the state, because an event is told with the label of a
//! session that may have ended in the very step of the event. Shares the state's bytes.

use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::LeaseId;

/// See the module. Leases without a label take no place.
#[derive(Debug, Default)]
pub(super) struct Labels(BTreeMap<LeaseId, Rc<[u8]>>);

impl Labels {
    /// Of all live leases.
    pub(super) fn of(state: &State) -> Self {
        let labelled =
            |(id, _)| state.lease(id).and_then(|lease| Some((id, lease.shared_label()?)));
        Self(state.leases().filter_map(labelled).collect())
    }

    /// Learns the leases that `events` opened; before the events are told.
    pub(super) fn opened(&mut self, state: &State, events: &[Event]) {
        for event in events {
            if let EventKind::LeaseOpened { lease, .. } = event.kind
                && let Some(label) = state.lease(lease).and_then(|lease| lease.shared_label())
            {
                self.0.insert(lease, label);
            }
        }
    }

    /// Forgets the leases that `events` ended; after the events are told.
    pub(super) fn ended(&mut self, events: &[Event]) {
        for event in events {
            if let EventKind::LeaseEnded { lease, .. } = event.kind {
                self.0.remove(&lease);
            }
        }
    }

    /// The label of a lease.
    pub(super) fn get(&self, lease: LeaseId) -> Option<Rc<[u8]>> {
        self.0.get(&lease).cloned()
    }
}

/// Whose label an event is told with.
pub(super) fn lease_of(kind: &EventKind) -> Option<LeaseId> {
    match kind {
        EventKind::LeaseOpened { lease, .. }
        | EventKind::LeaseEnded { lease, .. }
        | EventKind::Granted { lease, .. }
        | EventKind::Queued { lease, .. }
        | EventKind::WaitEnded { lease, .. }
        | EventKind::Ended { lease, .. }
        | EventKind::ForcedPending { lease, .. }
        | EventKind::Converted { lease, .. }
        | EventKind::ValueChanged { lease, .. }
        | EventKind::YieldAsked { lease, .. } => Some(*lease),
        EventKind::Vacant { .. }
        | EventKind::LimitChanged { .. }
        | EventKind::DelayBegan { .. }
        | EventKind::DelayEnded { .. }
        | EventKind::QuarantineBegan { .. }
        | EventKind::QuarantineEnded => None,
    }
}
