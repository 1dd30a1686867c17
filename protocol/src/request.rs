//! What a client sends: one body type per frame kind.

use alloc::vec::Vec;

use rkyv::{Archive, Deserialize, Serialize};

use crate::command::Command;
use crate::ids::{ClusterId, HoldSetVersion, LeaseId, NodeId, Number, Secret, ShardId};
use crate::member::{GroupStepRequest, MemberChangeRequest, MembersRequest};
use crate::watch::{UnwatchRequest, WatchRequest};

/// First frame of a client connection.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// `crate::frame::MAGIC`.
    pub magic: u64,
    /// Lowest protocol version spoken.
    pub version_min: u8,
    /// Highest protocol version spoken.
    pub version_max: u8,
    /// The cluster that is expected, or `ClusterId::UNKNOWN` for any.
    pub cluster: ClusterId,
    /// Optional features wanted, a bit each; none is defined yet.
    pub features: u64,
    /// Proof of authority; empty where the cluster asks for none.
    pub auth: Vec<u8>,
}

/// A command for one shard.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct CommandRequest {
    /// The shard; checked against the command's key.
    pub shard: ShardId,
    /// The server answers an error within this time, in milliseconds; a `Queued` reply counts as
    /// an answer.
    pub timeout_ms: u32,
    /// The command.
    pub command: Command,
}

/// One lease of a `Renew`.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewItem {
    /// The lease.
    pub lease: LeaseId,
    /// Its secret.
    pub secret: Secret,
    /// The version of the lease's hold set that the client knows.
    pub version: HoldSetVersion,
}

/// Restarts the TTL of leases (DESIGN §5). The client counts each TTL from before its send.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RenewRequest {
    /// The shard of all items.
    pub shard: ShardId,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
    /// At most `RENEW_BATCH_MAX`.
    pub items: Vec<RenewItem>,
}

/// How fresh a read must be (G7).
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Sees every change acknowledged before the read was sent.
    Linearizable,
    /// What the asked node has applied; the reply is marked stale.
    Stale,
}

/// Reads one key.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct GetRequest {
    /// The key.
    pub key: Vec<u8>,
    /// Of its holders only those whose lease is above this; 0 for the first page.
    pub holders_after: LeaseId,
    /// How fresh.
    pub freshness: Freshness,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Reads a page of the keys of one shard that are held or waited for, in byte order.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ListRequest {
    /// The shard.
    pub shard: ShardId,
    /// Only keys that start with this; empty for all.
    pub prefix: Vec<u8>,
    /// Only keys above this; empty for the first page.
    pub after: Vec<u8>,
    /// Most keys of the page, `1..=PAGE_LEN_MAX`.
    pub limit: u32,
    /// How fresh.
    pub freshness: Freshness,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Reads a page of the live leases of one shard, in id order.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SessionsRequest {
    /// The shard.
    pub shard: ShardId,
    /// Only leases above this.
    pub after: LeaseId,
    /// Most leases of the page, `1..=PAGE_LEN_MAX`.
    pub limit: u32,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Reads what one lease holds and waits for, linearizably: how a client settles a hold-set
/// version that it did not expect.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct HoldsRequest {
    /// The shard.
    pub shard: ShardId,
    /// The lease.
    pub lease: LeaseId,
    /// Its secret.
    pub secret: Secret,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Reads what has become of one acquire, linearizably: its place in the queue and whom it waits
/// for, or its hold with the slots of its permits.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ClaimRequest {
    /// The shard.
    pub shard: ShardId,
    /// The lease that holds or waits: an own lease's hold is under its own.
    pub lease: LeaseId,
    /// Its secret.
    pub secret: Secret,
    /// The acquire's number.
    pub number: Number,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Asks for the cluster's state as this node sees it; it asks its peers.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusRequest {
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Moves a shard's leadership.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// The shard.
    pub shard: ShardId,
    /// To this node; `NodeId(0)` lets the leader choose.
    pub to: NodeId,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Reads the next part of a shard's state for a backup. The leader freezes the state at the first
/// request, linearizably, and gives it out part by part.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupRequest {
    /// The shard.
    pub shard: ShardId,
    /// 0 begins; afterwards what the first reply said.
    pub ticket: u64,
    /// Which part: 0 to begin, then one more than the last. The last one may be asked for again.
    pub part: u32,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// Any request of a client, named by its frame's kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Kind 1.
    Hello(ClientHello),
    /// Kind 2.
    Command(CommandRequest),
    /// Kind 3.
    Renew(RenewRequest),
    /// Kind 4.
    Get(GetRequest),
    /// Kind 5.
    List(ListRequest),
    /// Kind 6.
    Sessions(SessionsRequest),
    /// Kind 7.
    Holds(HoldsRequest),
    /// Kind 8.
    Status(StatusRequest),
    /// Kind 9.
    Transfer(TransferRequest),
    /// Kind 10: an empty body.
    Ping,
    /// Kind 11.
    Claim(ClaimRequest),
    /// Kind 12.
    Watch(WatchRequest),
    /// Kind 13.
    Unwatch(UnwatchRequest),
    /// Kind 20.
    Members(MembersRequest),
    /// Kind 21.
    MemberChange(MemberChangeRequest),
    /// Kind 22.
    GroupStep(GroupStepRequest),
    /// Kind 25.
    Backup(BackupRequest),
}
