//! What a snapshot is made of.

use alloc::vec::Vec;

use leasehold_protocol::command::OwnLease;
use leasehold_protocol::event::EndReason;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::member::{MemberInfo, MemberOperation};
use leasehold_protocol::outcome::Outcome;
use rkyv::{Archive, Deserialize, Serialize};

/// In this order: header; each lease followed by its records, ascending; each key, if there is
/// anything to say of it, followed by its ghosts, holds and waiters, ascending; the last ends by
/// revision and token; the member table; end.
#[derive(Archive, Serialize, Deserialize)]
pub(super) enum Item {
    Header(Header),
    Lease(LeaseItem),
    Record(RecordItem),
    Key(KeyItem),
    Ghost(GhostItem),
    Hold(HoldItem),
    Waiter(WaiterItem),
    End(End),
    LastEnd(LastEndItem),
    /// Before the end, if there is a member table or a fence: first this...
    Members(MembersItem),
    /// ...then each node, ascending.
    Member(MemberInfo),
    /// Directly after the header, of a restored cluster that waits.
    Quarantine(QuarantineItem),
}

#[derive(Archive, Serialize, Deserialize, Clone, Copy)]
pub(super) struct QuarantineItem {
    pub(super) quarantine_ms: u32,
}

#[derive(Archive, Serialize, Deserialize, Clone, Copy)]
pub(super) struct Header {
    pub(super) shard: ShardId,
    pub(super) revision: u64,
    pub(super) begun: bool,
    pub(super) last_token: u64,
    pub(super) last_lease: u64,
    pub(super) digest: u64,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct LeaseItem {
    pub(super) lease: LeaseId,
    pub(super) ttl_ms: u32,
    pub(super) secret: Secret,
    pub(super) label: Vec<u8>,
    pub(super) own: bool,
    pub(super) version: u64,
    pub(super) floor: u64,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct RecordItem {
    /// The lease whose record it is: the last lease item's.
    pub(super) lease: LeaseId,
    pub(super) number: Number,
    pub(super) late: bool,
    pub(super) kind: ItemKind,
    pub(super) print: u64,
    pub(super) keep: bool,
    /// `None`: waiting.
    pub(super) outcome: Option<Outcome>,
}

#[derive(Archive, Serialize, Deserialize, Clone, Copy)]
pub(super) enum ItemKind {
    Acquire,
    Forestalled,
    Cancel,
    Release,
    Convert,
    SetValue,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct KeyItem {
    pub(super) key: Vec<u8>,
    pub(super) floor: u64,
    pub(super) limit: u32,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct GhostItem {
    pub(super) key: Vec<u8>,
    pub(super) token: u64,
    pub(super) mode: Mode,
    pub(super) slots: Vec<u8>,
    pub(super) delay_ms: u32,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct HoldItem {
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
    pub(super) part: u32,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct AskedItem {
    pub(super) who: Vec<u8>,
    pub(super) why: Vec<u8>,
    pub(super) within_ms: u32,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct ForcedItem {
    pub(super) who: Vec<u8>,
    pub(super) why: Vec<u8>,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct WaiterItem {
    pub(super) key: Vec<u8>,
    pub(super) place: u64,
    pub(super) lease: LeaseId,
    pub(super) number: Number,
    pub(super) mode: Mode,
    pub(super) own: Option<OwnLease>,
    pub(super) value: Vec<u8>,
    pub(super) wait_ms: u32,
    pub(super) delay_ms: u32,
    pub(super) part: u32,
    pub(super) parts: u32,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct LastEndItem {
    pub(super) key: Vec<u8>,
    pub(super) lease: LeaseId,
    pub(super) label: Vec<u8>,
    pub(super) token: Token,
    pub(super) mode: Mode,
    pub(super) reason: EndReason,
    pub(super) revision: u64,
    pub(super) at_ms: u64,
    /// Of the old generation.
    pub(super) old: bool,
}

#[derive(Archive, Serialize, Deserialize, Clone, Copy)]
pub(super) struct MembersItem {
    pub(super) version: u64,
    pub(super) fence: u64,
    pub(super) operation: Option<MemberOperation>,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct End {
    /// Items before this one.
    pub(super) items: u64,
}
