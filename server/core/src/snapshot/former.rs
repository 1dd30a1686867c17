//! The items of format version 1, as they were: read, never written.
//!
//! What that version did not know yet (shared holds, semaphores and all that came with them) is
//! filled in with what it meant.

use alloc::vec::Vec;

use leasehold_protocol::codec::{self, NotAnArchive};
use leasehold_protocol::command::OwnLease;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Revision, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use rkyv::{Archive, Deserialize, Serialize};

use super::item::WaiterItem;
use super::item::{End, ForcedItem, Header, HoldItem, Item, ItemKind, LeaseItem, RecordItem};

/// Reads an item of version 1.
pub(super) fn decode(archive: &[u8]) -> Result<Item, NotAnArchive> {
    codec::decode::<FormerItem>(archive).map(Item::from)
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) enum FormerItem {
    Header(Header),
    Lease(LeaseItem),
    Record(FormerRecord),
    Hold(FormerHold),
    Waiter(FormerWaiter),
    End(End),
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct FormerRecord {
    pub(super) lease: LeaseId,
    pub(super) number: Number,
    pub(super) late: bool,
    pub(super) kind: FormerKind,
    pub(super) print: u64,
    pub(super) keep: bool,
    pub(super) outcome: Option<FormerOutcome>,
}

#[derive(Archive, Serialize, Deserialize, Clone, Copy)]
pub(super) enum FormerKind {
    Acquire,
    Forestalled,
    Cancel,
    Release,
}

#[derive(Archive, Serialize, Deserialize, Clone, Copy)]
pub(super) enum FormerOutcome {
    Opened { lease: LeaseId, revision: Revision },
    Granted(FormerGrant),
    Queued { position: u32, revision: Revision },
    Cancelled { revision: Revision },
    TimedOut { revision: Revision },
    Released { token: Token, revision: Revision },
    Closed { revision: Revision },
    Forced { token: Token, passed_on: bool, revision: Revision },
    Begun { revision: Revision },
    Refused { code: ErrorCode, token: Token, revision: Revision },
}

#[derive(Archive, Serialize, Deserialize, Clone, Copy)]
pub(super) struct FormerGrant {
    pub(super) lease: LeaseId,
    pub(super) token: Token,
    pub(super) revision: Revision,
    pub(super) version_before: HoldSetVersion,
    pub(super) version_after: HoldSetVersion,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct FormerHold {
    pub(super) key: Vec<u8>,
    pub(super) lease: LeaseId,
    pub(super) token: Token,
    pub(super) mode: Mode,
    pub(super) number: Number,
    pub(super) value: Vec<u8>,
    pub(super) since_ms: u64,
    pub(super) forced: Option<ForcedItem>,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct FormerWaiter {
    pub(super) key: Vec<u8>,
    pub(super) place: u64,
    pub(super) lease: LeaseId,
    pub(super) number: Number,
    pub(super) mode: Mode,
    pub(super) own: Option<OwnLease>,
    pub(super) value: Vec<u8>,
    pub(super) wait_ms: u32,
}

impl From<FormerItem> for Item {
    fn from(item: FormerItem) -> Self {
        match item {
            FormerItem::Header(item) => Self::Header(item),
            FormerItem::Lease(item) => Self::Lease(item),
            FormerItem::Record(item) => Self::Record(item.into()),
            FormerItem::Hold(item) => Self::Hold(item.into()),
            FormerItem::Waiter(item) => Self::Waiter(item.into()),
            FormerItem::End(item) => Self::End(item),
        }
    }
}

impl From<FormerRecord> for RecordItem {
    fn from(item: FormerRecord) -> Self {
        Self {
            lease: item.lease,
            number: item.number,
            late: item.late,
            kind: match item.kind {
                FormerKind::Acquire => ItemKind::Acquire,
                FormerKind::Forestalled => ItemKind::Forestalled,
                FormerKind::Cancel => ItemKind::Cancel,
                FormerKind::Release => ItemKind::Release,
            },
            print: item.print,
            keep: item.keep,
            outcome: item.outcome.map(Outcome::from),
        }
    }
}

impl From<FormerOutcome> for Outcome {
    fn from(outcome: FormerOutcome) -> Self {
        match outcome {
            FormerOutcome::Opened { lease, revision } => Self::Opened { lease, revision },
            FormerOutcome::Granted(grant) => Self::Granted(Grant {
                lease: grant.lease,
                token: grant.token,
                revision: grant.revision,
                version_before: grant.version_before,
                version_after: grant.version_after,
                floor: grant.token,
            }),
            FormerOutcome::Queued { position, revision } => Self::Queued { position, revision },
            FormerOutcome::Cancelled { revision } => Self::Cancelled { revision },
            FormerOutcome::TimedOut { revision } => Self::TimedOut { revision },
            FormerOutcome::Released { token, revision } => Self::Released { token, revision },
            FormerOutcome::Closed { revision } => Self::Closed { revision },
            FormerOutcome::Forced { token, passed_on, revision } => {
                Self::Forced { token, passed_on, revision }
            }
            FormerOutcome::Begun { revision } => Self::Begun { revision },
            FormerOutcome::Refused { code, token, revision } => {
                Self::Refused { code, token, revision }
            }
        }
    }
}

impl From<FormerHold> for HoldItem {
    fn from(item: FormerHold) -> Self {
        Self {
            key: item.key,
            lease: item.lease,
            token: item.token,
            mode: item.mode,
            number: item.number,
            value: item.value,
            since_ms: item.since_ms,
            forced: item.forced,
            slots: Vec::new(),
            delay_ms: 0,
            again: Vec::new(),
            asked: None,
        }
    }
}

impl From<FormerWaiter> for WaiterItem {
    fn from(item: FormerWaiter) -> Self {
        Self {
            key: item.key,
            place: item.place,
            lease: item.lease,
            number: item.number,
            mode: item.mode,
            own: item.own,
            value: item.value,
            wait_ms: item.wait_ms,
            delay_ms: 0,
        }
    }
}
