//! Raft's requests between nodes, decoded.

use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::ids::ShardId;
use leasehold_protocol::peer::{
    self, AppendRequest, SnapshotBegin, SnapshotChunk, SnapshotEnd, TransferRequest, VoteRequest,
};

/// A request of one of the kinds for which `peer::is_raft` holds.
pub(crate) enum RaftMessage {
    Append(AppendRequest),
    Vote(VoteRequest),
    PreVote(VoteRequest),
    Transfer(TransferRequest),
    SnapshotBegin(SnapshotBegin),
    SnapshotChunk(SnapshotChunk),
    SnapshotEnd(SnapshotEnd),
}

impl RaftMessage {
    /// `None`: the bytes are not a body of this kind.
    pub(crate) fn decode(kind: u8, body: &[u8]) -> Option<Self> {
        Some(match kind {
            peer::APPEND => Self::Append(read(body)?),
            peer::VOTE => Self::Vote(read(body)?),
            peer::PRE_VOTE => Self::PreVote(read(body)?),
            peer::TRANSFER => Self::Transfer(read(body)?),
            peer::SNAPSHOT_BEGIN => Self::SnapshotBegin(read(body)?),
            peer::SNAPSHOT_CHUNK => Self::SnapshotChunk(read(body)?),
            peer::SNAPSHOT_END => Self::SnapshotEnd(read(body)?),
            _ => return None,
        })
    }

    pub(crate) fn shard(&self) -> ShardId {
        match self {
            Self::Append(request) => request.shard,
            Self::Vote(request) | Self::PreVote(request) => request.shard,
            Self::Transfer(request) => request.shard,
            Self::SnapshotBegin(request) => request.shard,
            Self::SnapshotChunk(request) => request.shard,
            Self::SnapshotEnd(request) => request.shard,
        }
    }
}

fn read<T: Body>(body: &[u8]) -> Option<T> {
    codec::decode(body).ok()
}
