//! What a node answers: one body type per frame kind. A reply carries its request's id.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use rkyv::{Archive, Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::event::EndReason;
use crate::ids::{
    ClusterId, HoldSetVersion, LeaseId, Mode, NodeId, Number, Revision, ShardId, Token,
};
use crate::limits::MESSAGE_LEN_MAX;
use crate::member::{MemberChangeReply, MembersReply, ShardProgress};
use crate::outcome::Outcome;
use crate::watch::{WatchEnd, WatchEvents, WatchNotice, WatchState};

/// Who leads a shard, as far as the answering node knows.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LeaderHint {
    /// The shard.
    pub shard: ShardId,
    /// The leader, `NodeId(0)` if unknown.
    pub leader: NodeId,
}

/// One node of the cluster.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    /// The node.
    pub node: NodeId,
    /// Its advertised client address, `HOST:PORT`.
    pub client_addr: String,
}

/// The answer to a `ClientHello`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ServerHello {
    /// The protocol version of all further frames.
    pub version: u8,
    /// The cluster.
    pub cluster: ClusterId,
    /// The answering node.
    pub node: NodeId,
    /// Number of shards; a key's shard is `shard_of(key, shards)`.
    pub shards: u32,
    /// Which key hash is in force: 1 is CRC-32C (see `crate::shard`).
    pub key_hash: u8,
    /// Optional features granted.
    pub features: u64,
    /// Every node's client address.
    pub nodes: Vec<NodeAddress>,
    /// Every shard's leader.
    pub leaders: Vec<LeaderHint>,
    /// The server's version, for people.
    pub server_version: String,
}

/// The outcome of a command.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct OutcomeReply {
    /// The outcome. After `Queued` another reply follows under the same request id.
    pub outcome: Outcome,
    /// The node that leads the shard, if it is not the answering one; else `NodeId(0)`.
    pub leader: NodeId,
}

/// What became of one lease of a `Renew`.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewResult {
    /// The lease.
    pub lease: LeaseId,
    /// `None`: renewed. Else `lease_dead`, `bad_secret`, `lease_expiring`.
    pub error: Option<ErrorCode>,
    /// The lease's time to live, in milliseconds, counted from the request's send.
    pub ttl_ms: u32,
    /// The version of its hold set.
    pub version: HoldSetVersion,
}

/// The answer to a `Renew`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RenewReply {
    /// In the request's order.
    pub results: Vec<RenewResult>,
    /// See `OutcomeReply::leader`.
    pub leader: NodeId,
}

/// One holder of a key.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The lease that holds.
    pub lease: LeaseId,
    /// The fencing token.
    pub token: Token,
    /// The mode.
    pub mode: Mode,
    /// See `Grant::floor`.
    pub floor: Token,
    /// The label of the session that acquired.
    pub label: String,
    /// The hold's value.
    pub value: Vec<u8>,
    /// The proposer's wall time of the grant, in Unix milliseconds; for display only.
    pub since_ms: u64,
    /// Until the server may end the lease, in milliseconds; `None` in a stale read.
    pub remaining_ms: Option<u32>,
    /// The acquire's number.
    pub number: Number,
    /// The hold has a lease of its own.
    pub own_lease: bool,
    /// An operator forced its end, which waits for its last possible validity.
    pub forced: bool,
    /// The slots of its permits, see `EventKind::Granted`.
    pub slots: Vec<u8>,
    /// How often it was entered and not released.
    pub entries: u32,
    /// The lock-delay that follows its loss, in milliseconds.
    pub delay_ms: u32,
    /// The last request to give up.
    pub asked: Option<YieldRequest>,
}

/// A request to a holder to give up.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct YieldRequest {
    /// Who asks.
    pub who: String,
    /// Why.
    pub why: String,
    /// How soon, in milliseconds from when it was asked.
    pub within_ms: u32,
}

/// A lock-delay of a key: the place of a lost hold that is not given away yet.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Delay {
    /// The lost hold's token.
    pub token: Token,
    /// The lost hold's mode.
    pub mode: Mode,
    /// How long it lasts in all, in milliseconds.
    pub delay_ms: u32,
    /// What is left of it, in milliseconds; `None` in a stale read.
    pub remaining_ms: Option<u32>,
}

/// One waiter of a key.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The waiting lease.
    pub lease: LeaseId,
    /// The acquire's number.
    pub number: Number,
    /// The mode.
    pub mode: Mode,
    /// Waiters before it.
    pub position: u32,
    /// The session's label.
    pub label: String,
}

/// One key that is held or waited for.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct KeyInfo {
    /// The key.
    pub key: String,
    /// Its holders by lease, those above the lease that was asked for; at most `PAGE_LEN_MAX`.
    pub holders: Vec<Holder>,
    /// All holders.
    pub holders_total: u32,
    /// The first waiters, in queue order; at most `PAGE_LEN_MAX`.
    pub waiters: Vec<Waiter>,
    /// All waiters.
    pub waiters_total: u32,
    /// A semaphore's number of permits; 0 for a lock.
    pub limit: u32,
    /// How many of a semaphore's permits are taken, by holds and by lock-delays; 0 for a lock.
    pub taken: u32,
    /// Its lock-delays, at most `PAGE_LEN_MAX`.
    pub delays: Vec<Delay>,
    /// All lock-delays.
    pub delays_total: u32,
    /// How its last hold that ended did, if the shard still knows: it remembers those of the latest
    /// `LAST_ENDS_MAX` / 2 keys at least.
    pub last_end: Option<LastEnd>,
}

/// How a hold ended.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LastEnd {
    /// The lease that held.
    pub lease: LeaseId,
    /// The label of the session that acquired.
    pub label: String,
    /// The hold's token.
    pub token: Token,
    /// Its mode.
    pub mode: Mode,
    /// Why it ended; of a forced end, who forced it and why.
    pub reason: EndReason,
    /// The revision of the end.
    pub revision: Revision,
    /// The proposer's wall time of the end, in Unix milliseconds; for display only.
    pub at_ms: u64,
}

/// The answer to a `Get` (one key, also if vacant) and to a `List`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct KeysReply {
    /// The shard.
    pub shard: ShardId,
    /// The revision at which all of the page was read.
    pub revision: Revision,
    /// True if the answer may lag behind acknowledged changes.
    pub stale: bool,
    /// Of a stale answer, its age at most, in milliseconds: it has every change that was
    /// acknowledged longer ago than that before it was given. `None` if the node does not know.
    pub age_ms: Option<u32>,
    /// The keys.
    pub keys: Vec<KeyInfo>,
    /// More keys follow; ask again with `after` = the last key.
    pub more: bool,
}

/// One live lease.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The lease.
    pub lease: LeaseId,
    /// Its label.
    pub label: String,
    /// Its time to live, in milliseconds.
    pub ttl_ms: u32,
    /// Until the server may end it, in milliseconds.
    pub remaining_ms: Option<u32>,
    /// Keys it holds.
    pub holds: u32,
    /// Keys it waits for.
    pub waits: u32,
    /// It was made for one hold.
    pub own_lease: bool,
}

/// The answer to a `Sessions`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SessionsReply {
    /// The revision of the page.
    pub revision: Revision,
    /// The leases.
    pub sessions: Vec<SessionInfo>,
    /// More follow.
    pub more: bool,
}

/// One hold of a lease.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct HeldKey {
    /// The key.
    pub key: Vec<u8>,
    /// The token.
    pub token: Token,
    /// The mode.
    pub mode: Mode,
    /// The acquire's number.
    pub number: Number,
    /// Its end is forced and pending: it must not be extended any more.
    pub forced: bool,
    /// The slots of its permits, see `EventKind::Granted`.
    pub slots: Vec<u8>,
    /// How often it was entered and not released.
    pub entries: u32,
    /// Somebody asks for it; `Holder::asked` says who.
    pub asked: bool,
    /// See `Grant::floor`.
    pub floor: Token,
}

/// An acquire that waits.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The key.
    pub key: Vec<u8>,
    /// Waiters before it.
    pub position: u32,
    /// All waiters.
    pub waiters_total: u32,
    /// Whom it waits for: the first holders, at most `CLAIM_HOLDERS_MAX`.
    pub holders: Vec<Holder>,
}

/// What has become of an acquire.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// It neither holds nor waits.
    Over,
    /// It waits.
    Waits(Waiting),
    /// It holds. An acquire that re-entered has the number of its own and the hold's token.
    Holds(HeldKey),
    /// It waits for several keys: each one's queue and holders, in the request's order. Of the
    /// holders, at most `CLAIM_HOLDERS_MAX` for all keys together, but one for each.
    WaitsAll(Vec<Waiting>),
    /// It holds several keys, in the request's order.
    HoldsAll(Vec<HeldKey>),
}

/// The answer to a `Claim`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ClaimReply {
    /// The revision at which it was read.
    pub revision: Revision,
    /// What was found.
    pub claim: Claimed,
}

/// The answer to a `Holds`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct HoldsReply {
    /// The revision at which it was read.
    pub revision: Revision,
    /// The version of the hold set at that revision.
    pub version: HoldSetVersion,
    /// All holds of the lease.
    pub holds: Vec<HeldKey>,
    /// The numbers of its waiting acquires.
    pub waits: Vec<Number>,
}

/// A node's part in a shard.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Leads.
    Leader,
    /// Follows.
    Follower,
    /// Campaigns.
    Candidate,
    /// Receives the log without a vote.
    Learner,
    /// Is not a member (yet).
    Outside,
}

/// One shard of one node.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ShardStatus {
    /// The shard.
    pub shard: ShardId,
    /// The node's role in it.
    pub role: Role,
    /// The Raft term.
    pub term: u64,
    /// The leader it knows, `NodeId(0)` if none; a leader that no majority follows names none.
    pub leader: NodeId,
    /// Raft's last log index.
    pub last_index: u64,
    /// Raft's applied index.
    pub applied_index: u64,
    /// The applied revision.
    pub applied_revision: Revision,
    /// The digest of the applied state.
    pub digest: u64,
    /// Raft index of the newest snapshot, 0 if none.
    pub snapshot_index: u64,
}

/// One node.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct NodeStatus {
    /// The node.
    pub node: NodeId,
    /// Its advertised client address.
    pub client_addr: String,
    /// It answered.
    pub reachable: bool,
    /// Its version.
    pub version: String,
    /// Its shards.
    pub shards: Vec<ShardStatus>,
}

/// The answer to a `Status`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct StatusReply {
    /// The cluster.
    pub cluster: ClusterId,
    /// Number of shards.
    pub shards: u32,
    /// All nodes.
    pub nodes: Vec<NodeStatus>,
}

/// What a backup says of a shard beside its state.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupShard {
    /// The shard.
    pub shard: ShardId,
    /// The revision at which its state was frozen.
    pub revision: Revision,
    /// The token of its last grant.
    pub last_token: Token,
    /// The last lease that it minted.
    pub last_lease: LeaseId,
    /// Live leases.
    pub leases: u64,
    /// Keys that are held or waited for.
    pub keys: u64,
}

/// A part of a shard's state for a backup.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BackupReply {
    /// What all parts are of.
    pub about: BackupShard,
    /// To be named when the next part is asked for.
    pub ticket: u64,
    /// Which part this is.
    pub part: u32,
    /// No part follows.
    pub last: bool,
    /// Its bytes: a piece of a snapshot without secrets.
    pub bytes: Vec<u8>,
}

/// An error instead of an answer.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ErrorReply {
    /// The code; its class tells what may be concluded.
    pub code: ErrorCode,
    /// For a person: names the thing and the allowed range.
    pub message: String,
    /// Who leads the shard in question, `NodeId(0)` if unknown.
    pub leader: NodeId,
    /// Wait at least this long before a retry, in milliseconds.
    pub retry_after_ms: u32,
}

impl ErrorReply {
    /// An error that knows no leader and no time to wait. A message over `MESSAGE_LEN_MAX` is cut.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let mut message = message.into();
        message.truncate(message.floor_char_boundary(MESSAGE_LEN_MAX));
        Self { code, message, leader: NodeId(0), retry_after_ms: 0 }
    }
}

impl fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

/// Any answer of a node, named by its frame's kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Kind 129.
    Hello(ServerHello),
    /// Kind 130.
    Outcome(OutcomeReply),
    /// Kind 131.
    Renewed(RenewReply),
    /// Kind 132: to `Get` and `List`.
    Keys(KeysReply),
    /// Kind 134.
    Sessions(SessionsReply),
    /// Kind 135.
    Holds(HoldsReply),
    /// Kind 136.
    Status(StatusReply),
    /// Kind 139.
    Claim(ClaimReply),
    /// Kind 150.
    Members(MembersReply),
    /// Kind 151.
    MemberChanged(MemberChangeReply),
    /// Kind 152: to `GroupStep`.
    GroupStepped(ShardProgress),
    /// Kind 155.
    Backup(BackupReply),
    /// Kind 137: an empty body, leadership moved.
    Transferred,
    /// Kind 138: an empty body.
    Pong,
    /// Kind 140.
    WatchEvents(WatchEvents),
    /// Kind 141.
    WatchState(WatchState),
    /// Kind 142.
    WatchNotice(WatchNotice),
    /// Kind 143: the last answer to a `Watch`.
    WatchEnd(WatchEnd),
    /// Kind 144: an empty body, to `Unwatch`.
    Unwatched,
    /// Kind 255.
    Error(ErrorReply),
}

impl Reply {
    /// True unless another reply follows under the same request id, as after `Queued`.
    pub const fn is_final(&self) -> bool {
        !matches!(
            self,
            Self::Outcome(OutcomeReply { outcome: Outcome::Queued { .. }, .. })
                | Self::WatchEvents(_)
                | Self::WatchState(_)
                | Self::WatchNotice(_)
        )
    }
}
