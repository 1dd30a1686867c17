//! What nodes applied: the log, as their state machines took it.
//!
//! Clients know only what they were answered; a node knows what happened. Where such records are
//! part of a history they settle what clients could not learn, and give the exact order.

use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::outcome::Outcome;
use serde::{Deserialize, Serialize};

/// All changes of one revision, as one node applied them. Revisions that changed nothing that a
/// client can see have none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The node.
    pub node: u64,
    /// The shard.
    pub shard: u32,
    /// The shard's revision.
    pub revision: u64,
    /// When it was first applied, on the history's clock, if known.
    pub at_ns: Option<u64>,
    /// What happened, in order.
    pub changes: Vec<Change>,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// A lease began.
    Opened {
        /// The lease.
        lease: u64,
    },
    /// A lease ended.
    LeaseEnded {
        /// The lease.
        lease: u64,
        /// Why.
        cause: Cause,
    },
    /// A hold began.
    Granted {
        /// The key.
        key: String,
        /// The lease that holds.
        lease: u64,
        /// The fencing token.
        token: u64,
    },
    /// A hold ended.
    Ended {
        /// The key.
        key: String,
        /// The lease that held.
        lease: u64,
        /// The fencing token.
        token: u64,
        /// Why.
        cause: Cause,
    },
    /// An operator forced a hold, which goes on until its client cannot be sure any more.
    Forced {
        /// The key.
        key: String,
        /// The fencing token.
        token: u64,
    },
    /// An acquire began to wait.
    Queued {
        /// The key.
        key: String,
        /// The waiting lease.
        lease: u64,
        /// The acquire's number.
        number: u64,
    },
    /// A wait ended.
    WaitEnded {
        /// The key.
        key: String,
        /// The waiting lease.
        lease: u64,
        /// The acquire's number.
        number: u64,
        /// The token, if it ended with a grant.
        token: Option<u64>,
    },
}

/// Why a lease or a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its client gave it back.
    Released,
    /// It was not renewed in time.
    Expired,
    /// Its client closed the lease.
    Closed,
    /// An operator ended it.
    Forced,
}

impl Applied {
    /// The record of one revision's events, which must all be of that revision.
    pub fn new(node: u64, shard: u32, at_ns: Option<u64>, events: &[Event]) -> Self {
        let revision = events.first().map_or(0, |event| event.revision.0);
        assert!(events.iter().all(|event| event.revision.0 == revision), "one revision a record");
        let changes = events.iter().filter_map(|event| Change::of(&event.kind)).collect();
        Self { node, shard, revision, at_ns, changes }
    }
}

impl Change {
    /// `None` for what follows from other changes.
    fn of(kind: &EventKind) -> Option<Self> {
        let text = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
        Some(match kind {
            EventKind::LeaseOpened { lease, .. } => Self::Opened { lease: lease.0 },
            EventKind::LeaseEnded { lease, reason } => {
                Self::LeaseEnded { lease: lease.0, cause: Cause::of(reason) }
            }
            EventKind::Granted { key, lease, token, .. } => {
                Self::Granted { key: text(key), lease: lease.0, token: token.0 }
            }
            EventKind::Ended { key, lease, token, reason } => Self::Ended {
                key: text(key),
                lease: lease.0,
                token: token.0,
                cause: Cause::of(reason),
            },
            EventKind::ForcedPending { key, token, .. } => {
                Self::Forced { key: text(key), token: token.0 }
            }
            EventKind::Queued { key, lease, number, .. } => {
                Self::Queued { key: text(key), lease: lease.0, number: number.0 }
            }
            EventKind::WaitEnded { key, lease, number, outcome } => {
                let token = match outcome {
                    Outcome::Granted(grant) => Some(grant.token.0),
                    _ => None,
                };
                Self::WaitEnded { key: text(key), lease: lease.0, number: number.0, token }
            }
            EventKind::Vacant { .. }
            | EventKind::Converted { .. }
            | EventKind::LimitChanged { .. }
            | EventKind::DelayBegan { .. }
            | EventKind::DelayEnded { .. }
            | EventKind::ValueChanged { .. }
            | EventKind::YieldAsked { .. }
            | EventKind::QuarantineBegan { .. }
            | EventKind::QuarantineEnded => return None,
        })
    }
}

impl Cause {
    const fn of(reason: &EndReason) -> Self {
        match reason {
            EndReason::LeaseExpired => Self::Expired,
            EndReason::SessionClosed => Self::Closed,
            EndReason::Forced { .. } => Self::Forced,
            // A cancel may give a hold back; waits that time out hold nothing; an upgrade gives up a
            // token for another.
            EndReason::Released
            | EndReason::Cancelled
            | EndReason::TimedOut
            | EndReason::Upgraded => Self::Released,
        }
    }
}
