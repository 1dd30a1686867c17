//! An event as the hub keeps it: with the label and the value that it is told with, which are the
//! state's own bytes and cost nothing to keep. Every event of the log becomes one, on every node,
//! whether anybody watches or not.

use std::mem::size_of;
use std::rc::Rc;

use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::Revision;
use leasehold_protocol::watch::WatchEvent;

/// What an event costs besides the bytes it carries: itself and the allocator's share.
const FIXED_COST: usize = size_of::<Told>() + 32;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) revision: Revision,
    pub(super) kind: EventKind,
    pub(super) label: Option<Rc<[u8]>>,
    pub(super) value: Option<Rc<[u8]>>,
}

impl Told {
    /// What it costs in memory and, near enough, on the wire.
    pub(super) fn cost(&self) -> usize {
        let carried = match &self.kind {
            EventKind::ForcedPending { who, why, .. } | EventKind::YieldAsked { who, why, .. } => {
                who.len() + why.len()
            }
            EventKind::LimitChanged { who, .. } => who.len(),
            EventKind::ValueChanged { value, .. } => value.len(),
            EventKind::Granted { slots, .. } => slots.len(),
            _ => 0,
        };
        let key = self.kind.key().map_or(0, <[u8]>::len);
        let label = self.label.as_ref().map_or(0, |label| label.len());
        let value = self.value.as_ref().map_or(0, |value| value.len());
        FIXED_COST + key + carried + label + value
    }

    /// As a client is told.
    pub(super) fn to_wire(&self) -> WatchEvent {
        let label = self.label.as_deref().unwrap_or_default();
        WatchEvent {
            revision: self.revision,
            kind: self.kind.clone(),
            label: String::from_utf8_lossy(label).into_owned(),
            value: self.value.as_deref().unwrap_or_default().to_vec(),
        }
    }
}
