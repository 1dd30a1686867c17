//! The items of format version 2, as they were: read, never written.
//!
//! What that version did not know yet (acquires of several keys) is filled in with what it meant.

use alloc::vec::Vec;

use leasehold_protocol::codec::{self, NotAnArchive};
use leasehold_protocol::command::OwnLease;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Token};
use rkyv::{Archive, Deserialize, Serialize};

use super::item::{
    AskedItem, End, ForcedItem, GhostItem, Header, HoldItem, Item, KeyItem, LeaseItem, RecordItem,
    WaiterItem,
};

/// Reads an item of version 2.
pub(super) fn decode(archive: &[u8]) -> Result<Item, NotAnArchive> {
    codec::decode::<FormerItem>(archive).map(Item::from)
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) enum FormerItem {
    Header(Header),
    Lease(LeaseItem),
    Record(RecordItem),
    Key(KeyItem),
    Ghost(GhostItem),
    Hold(FormerHold),
    Waiter(FormerWaiter),
    End(End),
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
    pub(super) slots: Vec<u8>,
    pub(super) delay_ms: u32,
    pub(super) again: Vec<u64>,
    pub(super) asked: Option<AskedItem>,
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
    pub(super) delay_ms: u32,
}

impl From<FormerItem> for Item {
    fn from(item: FormerItem) -> Self {
        match item {
            FormerItem::Header(item) => Self::Header(item),
            FormerItem::Lease(item) => Self::Lease(item),
            FormerItem::Record(item) => Self::Record(item),
            FormerItem::Key(item) => Self::Key(item),
            FormerItem::Ghost(item) => Self::Ghost(item),
            FormerItem::Hold(item) => Self::Hold(item.into()),
            FormerItem::Waiter(item) => Self::Waiter(item.into()),
            FormerItem::End(item) => Self::End(item),
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
            slots: item.slots,
            delay_ms: item.delay_ms,
            again: item.again,
            asked: item.asked,
            part: 0,
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
            delay_ms: item.delay_ms,
            part: 0,
            parts: 1,
        }
    }
}
