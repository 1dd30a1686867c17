//! Events as figures.

use leasehold_protocol::event::{EndReason, Event, EventKind};

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
