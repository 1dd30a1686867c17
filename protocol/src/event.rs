//! What happened, with its reason: the one event type that feeds watches, wake-ups, metrics, the
//! trace log and the simulator's run hash (G6).
#![expect(missing_docs, reason = "rkyv gives an enum a resolver whose fields take no docs")]

use alloc::vec::Vec;

use rkyv::{Archive, Deserialize, Serialize};

use crate::ids::{LeaseId, Mode, Number, Revision, Token};
use crate::outcome::Outcome;

/// Why a hold or a wait ended.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Its client released it.
    Released,
    /// Its lease's deadline passed without a renewal.
    LeaseExpired,
    /// Its client closed the session.
    SessionClosed,
    /// An operator forced it.
    Forced {
        /// Who.
        who: Vec<u8>,
        /// Why.
        why: Vec<u8>,
    },
    /// Its client cancelled the wait.
    Cancelled,
    /// Its wait limit passed.
    TimedOut,
    /// Its client made it exclusive: a grant with a new token follows in the same step.
    Upgraded,
}

/// One event. All events of one command carry the same revision and travel together.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The shard's revision.
    pub revision: Revision,
    /// What happened.
    pub kind: EventKind,
}

/// What happened.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A lease was minted, by `Open` or by a grant to an own lease.
    LeaseOpened {
        /// The lease.
        lease: LeaseId,
        /// Its time to live, in milliseconds.
        ttl_ms: u32,
    },
    /// A lease ended; nothing revives it.
    LeaseEnded {
        /// The lease.
        lease: LeaseId,
        /// Why.
        reason: EndReason,
    },
    /// A hold began.
    Granted {
        /// The key.
        key: Vec<u8>,
        /// The lease that holds.
        lease: LeaseId,
        /// The mode.
        mode: Mode,
        /// The fencing token.
        token: Token,
        /// The slots that its permits took: bit `i` of the bytes, lowest first, is slot `i`. Empty
        /// for other modes.
        slots: Vec<u8>,
        /// How many permits the semaphore has; 0 for a lock.
        limit: u32,
    },
    /// An acquire entered the queue. One of several keys has such an event for each.
    Queued {
        /// The key.
        key: Vec<u8>,
        /// The waiting lease.
        lease: LeaseId,
        /// The acquire's number.
        number: Number,
        /// Its wait limit, in milliseconds.
        wait_ms: u32,
        /// What it waits for.
        mode: Mode,
    },
    /// A wait ended; `outcome` is what its client must hear. One for several keys has such an event
    /// for each, with the same outcome.
    WaitEnded {
        /// The key.
        key: Vec<u8>,
        /// The waiting lease.
        lease: LeaseId,
        /// The acquire's number.
        number: Number,
        /// Granted, cancelled, timed out, or refused because the lease ended.
        outcome: Outcome,
    },
    /// A hold ended.
    Ended {
        /// The key.
        key: Vec<u8>,
        /// The lease that held.
        lease: LeaseId,
        /// Its token.
        token: Token,
        /// Why.
        reason: EndReason,
    },
    /// An operator forced a hold that is not passed on yet; the leader ends it with `EndForced`.
    ForcedPending {
        /// The key.
        key: Vec<u8>,
        /// The lease that holds.
        lease: LeaseId,
        /// Its token.
        token: Token,
        /// Who.
        who: Vec<u8>,
        /// Why.
        why: Vec<u8>,
    },
    /// Nobody holds the key and nobody waits.
    Vacant {
        /// The key.
        key: Vec<u8>,
    },
    /// A hold changed its mode and keeps its token.
    Converted {
        /// The key.
        key: Vec<u8>,
        /// The lease that holds.
        lease: LeaseId,
        /// Its token.
        token: Token,
        /// The mode from now on.
        mode: Mode,
    },
    /// A semaphore's number of permits changed.
    LimitChanged {
        /// The key.
        key: Vec<u8>,
        /// The number from now on.
        limit: u32,
        /// Who changed it.
        who: Vec<u8>,
    },
    /// A hold that asked for a lock-delay was lost: its place stays taken until `DelayEnded`.
    DelayBegan {
        /// The key.
        key: Vec<u8>,
        /// The lost hold's token.
        token: Token,
        /// How long, in milliseconds.
        delay_ms: u32,
    },
    /// A lock-delay is over.
    DelayEnded {
        /// The key.
        key: Vec<u8>,
        /// The lost hold's token.
        token: Token,
    },
    /// A hold has another value.
    ValueChanged {
        /// The key.
        key: Vec<u8>,
        /// The lease that holds.
        lease: LeaseId,
        /// Its token.
        token: Token,
        /// The value from now on.
        value: Vec<u8>,
    },
    /// Somebody asks the holder to give up.
    YieldAsked {
        /// The key.
        key: Vec<u8>,
        /// The lease that holds.
        lease: LeaseId,
        /// Its token.
        token: Token,
        /// Who asks.
        who: Vec<u8>,
        /// Why.
        why: Vec<u8>,
        /// How soon, in milliseconds.
        within_ms: u32,
    },
    /// The shard of a restored cluster began: no key is granted until `QuarantineEnded`.
    QuarantineBegan {
        /// How long, in milliseconds.
        for_ms: u32,
    },
    /// Keys are granted from now on.
    QuarantineEnded,
}

impl EventKind {
    /// The key that it is about; `None` for what happens to a lease.
    pub fn key(&self) -> Option<&[u8]> {
        match self {
            Self::LeaseOpened { .. }
            | Self::LeaseEnded { .. }
            | Self::QuarantineBegan { .. }
            | Self::QuarantineEnded => None,
            Self::Granted { key, .. }
            | Self::Queued { key, .. }
            | Self::WaitEnded { key, .. }
            | Self::Ended { key, .. }
            | Self::ForcedPending { key, .. }
            | Self::Vacant { key }
            | Self::Converted { key, .. }
            | Self::LimitChanged { key, .. }
            | Self::DelayBegan { key, .. }
            | Self::DelayEnded { key, .. }
            | Self::ValueChanged { key, .. }
            | Self::YieldAsked { key, .. } => Some(key),
        }
    }
}
