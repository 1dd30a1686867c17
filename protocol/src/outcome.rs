//! What a command did: remembered by the state for retries and sent to the client as it is.
#![expect(missing_docs, reason = "rkyv gives an enum a resolver whose fields take no docs")]

use rkyv::{Archive, Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::ids::{HoldSetVersion, LeaseId, Revision, Token};

/// A grant, as its client gets it (G1, G2).
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The lease that holds: the caller's, or the hold's own.
    pub lease: LeaseId,
    /// The fencing token. Of several keys, that of the first; each further one has the next number.
    pub token: Token,
    /// The shard's revision of the grant.
    pub revision: Revision,
    /// The caller's hold-set version before this very grant...
    pub version_before: HoldSetVersion,
    /// ...and after it. A client adopts it only if it knew `version_before`.
    pub version_after: HoldSetVersion,
    /// What a checker may raise its own floor to when it sees this grant used: the token itself of
    /// an exclusive grant; else a token that is at least the key's last exclusive one and below
    /// that of every other present holder but a downgraded one, whose token it may be. Of several
    /// keys, that of the first; `Claim` tells the others'.
    pub floor: Token,
}

/// The outcome of one command.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// `Open`: the lease's deadline counts from the request's first send.
    Opened {
        /// The new lease.
        lease: LeaseId,
        /// The shard's revision after the command.
        revision: Revision,
    },
    /// `Acquire`, or a `Cancel` that came after the grant and did not ask to release.
    Granted(Grant),
    /// `Acquire`: waits; the final outcome follows under the same request id.
    Queued {
        /// Waiters before this one, at this revision. Of several keys, the largest.
        position: u32,
        /// The shard's revision after the command.
        revision: Revision,
    },
    /// A wait ended without a hold because its client cancelled.
    Cancelled {
        /// The shard's revision of the cancel.
        revision: Revision,
    },
    /// A wait ended without a hold because its time was over.
    TimedOut {
        /// The shard's revision of that end.
        revision: Revision,
    },
    /// A hold was given back, by `Release`, or by a `Cancel` with `release_if_granted`; or what was
    /// left of an acquire's, by the latter or by `ReleaseAll`.
    Released {
        /// Its token, or that of the first.
        token: Token,
        /// The shard's revision after the command.
        revision: Revision,
    },
    /// `Close`, `Expire`.
    Closed {
        /// The shard's revision after the command.
        revision: Revision,
    },
    /// `ForceRelease`, `EndForced`.
    Forced {
        /// The token of the ended hold.
        token: Token,
        /// False while the key waits for the hold's last possible validity to end.
        passed_on: bool,
        /// The shard's revision after the command.
        revision: Revision,
    },
    /// `Begin`.
    Begun {
        /// The shard's revision after the command.
        revision: Revision,
    },
    /// Nothing changed.
    Refused {
        /// Why.
        code: ErrorCode,
        /// `held`, `already_held`, `not_owner`: the present token where it helps;
        /// `upgrade_conflict`: the token of another holder; `delayed`: that of the loss;
        /// `limit_mismatch`, `permits_above_limit`: no token, but the present limit; else 0.
        token: Token,
        /// The shard's revision at which this was decided.
        revision: Revision,
    },
    /// `Convert` to a weaker mode or to the present one, a release of a hold that was entered more
    /// often than released: the hold goes on under its token. Also `SetValue`,
    /// `AskYield`, `SetLimit` and `EndDelay`.
    Changed {
        /// The token of the hold, or of the loss that began the delay; 0 for a limit.
        token: Token,
        /// The shard's revision after the command.
        revision: Revision,
    },
    /// `Member`: the member table has this version now; for `Fence`, this shard has seen it.
    Members {
        /// The version.
        version: u64,
        /// The operation that is, or was, meant; 0 if none.
        operation: u64,
        /// The shard's revision after the command.
        revision: Revision,
    },
}
