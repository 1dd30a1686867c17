//! What nodes say to each other: frame kinds and bodies of the peer port.
//!
//! The frame is the clients' (`frame`); the kinds are 192..=223. A request of a peer is answered
//! under its id by one `REPLY`, whose body the request's kind implies, or by one `ERROR`. The types
//! of the Raft log (`Position`, `Ballot`, `LogEntry`, `Members`) are also what the write-ahead log
//! and snapshots keep, each behind a version byte of its own.
#![expect(missing_docs, reason = "rkyv gives an enum a resolver whose fields take no docs")]

use alloc::string::String;
use alloc::vec::Vec;

use rkyv::{Archive, Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::ids::{ClusterId, DiskId, NodeId, ShardId};

/// First frame of the side that connected: a `PeerHello`.
pub const HELLO: u8 = 192;
/// Its answer: a `PeerWelcome`.
pub const WELCOME: u8 = 193;
/// The connecting side's proof of the cluster secret: a `PeerProof`.
pub const PROOF: u8 = 194;
/// Empty: the proof was accepted, requests may follow.
pub const READY: u8 = 195;
/// Instead of any frame of the handshake: a `PeerRefusal`; the connection closes.
pub const REFUSAL: u8 = 196;

/// An `AppendRequest`, answered by an `AppendAnswer`. Also a heartbeat, without entries.
pub const APPEND: u8 = 197;
/// A `VoteRequest`, answered by a `VoteAnswer`.
pub const VOTE: u8 = 198;
/// A `VoteRequest` that changes nothing, answered by a `VoteAnswer`.
pub const PRE_VOTE: u8 = 199;
/// A `TransferRequest`, answered by a `TransferAnswer`.
pub const TRANSFER: u8 = 200;
/// A `SnapshotBegin`, answered by a `SnapshotAnswer`.
pub const SNAPSHOT_BEGIN: u8 = 201;
/// A `SnapshotChunk`, answered by a `SnapshotAnswer`.
pub const SNAPSHOT_CHUNK: u8 = 202;
/// A `SnapshotEnd`, answered by a `SnapshotAnswer`.
pub const SNAPSHOT_END: u8 = 203;

/// Empty, from either side: are you there? Answered by an empty `REPLY`.
pub const PING: u8 = 204;
/// The answer to a request.
pub const REPLY: u8 = 206;
/// A `PeerRefusal` instead of an answer.
pub const ERROR: u8 = 207;

/// Lowest kind that the birth of a cluster uses; these alone pass while a side has no cluster.
pub const BIRTH_MIN: u8 = 208;
/// Highest kind that the birth of a cluster uses.
pub const BIRTH_MAX: u8 = 211;
/// Lowest kind of the services above Raft (forwarded requests, status).
pub const SERVICE_MIN: u8 = 212;
/// Highest kind of the services above Raft.
pub const SERVICE_MAX: u8 = 222;

/// True for the kinds that Raft itself answers.
pub const fn is_raft(kind: u8) -> bool {
    APPEND <= kind && kind <= SNAPSHOT_END
}

/// True for the kinds of a cluster's birth.
pub const fn is_birth(kind: u8) -> bool {
    (BIRTH_MIN <= kind && kind <= BIRTH_MAX) || kind == crate::birth::KIND_JOIN
}

/// Longest address that a hello or a membership may carry, in bytes.
pub const ADDR_LEN_MAX: usize = 255;
/// Longest body of a handshake's frame, in bytes: little is granted before the proof.
pub const HANDSHAKE_BODY_MAX: usize = 4 * 1024;
/// Most bytes of a snapshot in one frame.
pub const SNAPSHOT_CHUNK_MAX: usize = 256 * 1024;

/// Who a side of a peer connection is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Its cluster, `ClusterId::UNKNOWN` before its birth or admission.
    pub cluster: ClusterId,
    /// Its node id.
    pub node: NodeId,
    /// Its data directory.
    pub disk: DiskId,
    /// How often a server was started on that data directory.
    pub boot: u64,
    /// Random, drawn by this very process: tells a copied directory from a restart.
    pub nonce: [u8; 16],
    /// Its advertised peer address.
    pub peer_addr: String,
    /// Its advertised client address.
    pub client_addr: String,
}

/// First frame of a peer connection.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PeerHello {
    /// `crate::frame::MAGIC`.
    pub magic: u64,
    /// Lowest protocol version spoken.
    pub version_min: u8,
    /// Highest protocol version spoken.
    pub version_max: u8,
    /// What the connection is for: 0 bulk, 1 heartbeats and votes, 2 snapshots, 3 forwarding.
    pub lane: u8,
    /// A shard of the core that connected, so that the other side can place the connection.
    pub shard: ShardId,
    /// Who connects.
    pub from: PeerIdentity,
    /// Who is expected.
    pub to: NodeId,
    /// Random.
    pub challenge: [u8; 32],
}

/// The answer to a hello.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PeerWelcome {
    /// The protocol version of all further frames.
    pub version: u8,
    /// Who answers.
    pub from: PeerIdentity,
    /// Random.
    pub challenge: [u8; 32],
    /// Proves that this side knows the cluster secret.
    pub proof: [u8; 32],
}

/// The connecting side's proof.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PeerProof {
    /// Proves that the connecting side knows the cluster secret.
    pub proof: [u8; 32],
}

/// Why a handshake or a request failed.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PeerRefusal {
    /// The code.
    pub code: ErrorCode,
    /// For a person.
    pub message: String,
}

/// A position in a Raft log, with the leader that wrote it.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The leader's term.
    pub term: u64,
    /// The leader.
    pub leader: NodeId,
    /// The index.
    pub index: u64,
}

/// A Raft vote.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ballot {
    /// The term.
    pub term: u64,
    /// For whom.
    pub node: NodeId,
    /// A quorum granted it: that node leads.
    pub committed: bool,
}

/// One member.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct MemberEntry {
    /// The node.
    pub node: NodeId,
    /// Its data directory.
    pub disk: DiskId,
    /// Its advertised peer address.
    pub peer_addr: String,
    /// Its advertised client address.
    pub client_addr: String,
}

/// A group's membership.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// The sets of voters: one, or two while a change is under way.
    pub configs: Vec<Vec<u64>>,
    /// Voters and learners.
    pub nodes: Vec<MemberEntry>,
}

/// What a log entry carries.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum EntryBody {
    /// Nothing: a leader's first entry.
    Blank,
    /// An encoded batch of commands.
    Batch(Vec<u8>),
    /// A membership, in force from its append on.
    Membership(Members),
}

/// One log entry.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Where.
    pub position: Position,
    /// What.
    pub body: EntryBody,
}

/// Entries for a follower's log, or a heartbeat.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct AppendRequest {
    /// The shard.
    pub shard: ShardId,
    /// The leader's vote.
    pub vote: Ballot,
    /// The entry before the first of `entries`.
    pub previous: Option<Position>,
    /// What the leader knows to be committed.
    pub committed: Option<Position>,
    /// Consecutive entries.
    pub entries: Vec<LogEntry>,
}

/// The answer to an append.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendAnswer {
    /// The vote was accepted, all entries match and are durable.
    Accepted,
    /// As `Accepted`, up to this position only.
    Partly(Option<Position>),
    /// The log has no such entry before the first.
    Conflict,
    /// A higher vote was granted.
    HigherVote(Ballot),
}

/// Asks for a vote.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct VoteRequest {
    /// The shard.
    pub shard: ShardId,
    /// The vote asked for.
    pub vote: Ballot,
    /// The candidate's last entry.
    pub last: Option<Position>,
    /// The present leader asked the candidate to stand.
    pub transfer: bool,
}

/// The answer to a vote request.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct VoteAnswer {
    /// The answering node's vote.
    pub vote: Ballot,
    /// It is the one asked for.
    pub granted: bool,
    /// The answering node's last entry.
    pub last: Option<Position>,
}

/// A leader gives its leadership to a node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// The shard.
    pub shard: ShardId,
    /// The leader's vote.
    pub from: Ballot,
    /// To whom; all other members get the request too.
    pub to: NodeId,
    /// The leader's last entry, which the new leader must have.
    pub last: Option<Position>,
}

/// The answer to a transfer request.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferAnswer {
    /// Taken.
    Taken,
    /// The answering node's vote is another.
    VoteChanged {
        /// The vote of the request.
        expected: Ballot,
        /// The node's vote.
        actual: Ballot,
    },
    /// The answering node's log is not durable that far.
    NotFlushed {
        /// The last entry of the request.
        expected: Option<Position>,
        /// The node's.
        actual: Option<Position>,
    },
}

/// What a snapshot covers.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SnapshotCover {
    /// The last applied entry.
    pub last: Option<Position>,
    /// Where the membership was written.
    pub members_at: Option<Position>,
    /// The membership.
    pub members: Members,
}

/// Begins a snapshot's transfer; one that was under way for the shard is dropped.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SnapshotBegin {
    /// The shard.
    pub shard: ShardId,
    /// The leader's vote.
    pub vote: Ballot,
    /// What the snapshot covers.
    pub cover: SnapshotCover,
}

/// Bytes of the snapshot's file, in order.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SnapshotChunk {
    /// The shard.
    pub shard: ShardId,
    /// Where these bytes belong.
    pub offset: u64,
    /// At most `SNAPSHOT_CHUNK_MAX`.
    pub bytes: Vec<u8>,
}

/// All bytes were sent: verify and install.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotEnd {
    /// The shard.
    pub shard: ShardId,
    /// The leader's vote.
    pub vote: Ballot,
    /// Length of the file.
    pub len: u64,
}

/// The answer to each step of a transfer.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotAnswer {
    /// Send what follows.
    Continue,
    /// Installed, or not needed; the receiver's vote.
    Done(Ballot),
    /// The receiver's vote is higher: the sender does not lead.
    HigherVote(Ballot),
    /// The bytes do not fit what was sent before, or are damaged: begin again.
    Restart,
}
