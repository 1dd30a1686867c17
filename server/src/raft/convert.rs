//! The engine's types and their encoded forms, for the wire and for the disk alike.
//!
//! Nothing here panics on bytes from outside. On disk each record opens with a version byte; the
//! body is the archive of the wire's type (`leasehold_protocol::peer`), so the engine's own
//! unstable derives are never a format.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_protocol::codec::{self, Body, NotAnArchive};
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::peer::{
    Ballot, EntryBody, LogEntry, MemberEntry, Members, Position, SnapshotCover,
};
use openraft::EntryPayload;

use super::types::{
    Entry, EntryData, LeaderId, LogId, Member, Membership, SnapshotMeta, StoredMembership, Vote,
};

/// The version of this build's records in the WAL and in snapshots.
const VERSION: u8 = 1;

/// Why a record of the disk was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Not a byte.
    #[error("the record is empty")]
    Empty,
    /// Written by another version.
    #[error("the record has version {0}, this build reads version {VERSION}")]
    Version(u8),
    /// Not an archive of the record's type, or one that contradicts itself.
    #[error("the record is malformed")]
    Malformed,
}

impl From<NotAnArchive> for RecordError {
    fn from(_: NotAnArchive) -> Self {
        Self::Malformed
    }
}

fn record<T: Body>(body: &T) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    codec::encode_into(body, &mut bytes);
    bytes
}

fn read<T: Body>(bytes: &[u8]) -> Result<T, RecordError> {
    match bytes {
        [] => Err(RecordError::Empty),
        [VERSION, body @ ..] => Ok(codec::decode(body)?),
        [version, ..] => Err(RecordError::Version(*version)),
    }
}

/// A vote as the WAL keeps it.
pub(super) fn vote_record(vote: &Vote) -> Vec<u8> {
    record(&ballot(vote))
}

/// See `vote_record`.
pub(super) fn read_vote(bytes: &[u8]) -> Result<Vote, RecordError> {
    Ok(vote(&read(bytes)?))
}

/// A log id as the WAL keeps it.
pub(super) fn log_id_record(id: &LogId) -> Vec<u8> {
    record(&position(id))
}

/// See `log_id_record`.
pub(super) fn read_log_id(bytes: &[u8]) -> Result<LogId, RecordError> {
    Ok(log_id(&read(bytes)?))
}

/// An entry as the WAL keeps it.
pub(super) fn entry_record(entry: &Entry) -> Vec<u8> {
    record(&log_entry(entry))
}

/// See `entry_record`.
pub(super) fn read_entry(bytes: &[u8]) -> Result<Entry, RecordError> {
    entry(read(bytes)?).ok_or(RecordError::Malformed)
}

/// What a snapshot covers, as its file keeps it.
pub(super) fn meta_record(meta: &SnapshotMeta) -> Vec<u8> {
    record(&cover(meta))
}

/// See `meta_record`.
pub(super) fn read_meta(bytes: &[u8]) -> Result<SnapshotMeta, RecordError> {
    snapshot_meta(read(bytes)?).ok_or(RecordError::Malformed)
}

pub(super) fn ballot(vote: &Vote) -> Ballot {
    Ballot {
        term: vote.leader_id.term,
        node: NodeId(vote.leader_id.node_id),
        committed: vote.committed,
    }
}

pub(super) fn vote(ballot: &Ballot) -> Vote {
    Vote {
        leader_id: LeaderId { term: ballot.term, node_id: ballot.node.0 },
        committed: ballot.committed,
    }
}

pub(super) fn position(id: &LogId) -> Position {
    Position { term: id.leader_id.term, leader: NodeId(id.leader_id.node_id), index: id.index }
}

pub(super) fn log_id(position: &Position) -> LogId {
    let leader = LeaderId { term: position.term, node_id: position.leader.0 };
    LogId::new(leader, position.index)
}

pub(super) fn log_entry(entry: &Entry) -> LogEntry {
    let body = match &entry.payload {
        EntryPayload::Blank => EntryBody::Blank,
        EntryPayload::Normal(data) => EntryBody::Batch(data.bytes().to_vec()),
        EntryPayload::Membership(membership) => EntryBody::Membership(members(membership)),
    };
    LogEntry { position: position(&entry.log_id), body }
}

/// `None`: the membership contradicts itself.
pub(super) fn entry(entry: LogEntry) -> Option<Entry> {
    let payload = match entry.body {
        EntryBody::Blank => EntryPayload::Blank,
        EntryBody::Batch(bytes) => EntryPayload::Normal(EntryData::from(bytes)),
        EntryBody::Membership(members) => EntryPayload::Membership(membership(members)?),
    };
    Some(Entry { log_id: log_id(&entry.position), payload })
}

pub(super) fn members(membership: &Membership) -> Members {
    let configs = membership.get_joint_config().iter();
    let nodes = membership.nodes().map(|(node, member)| MemberEntry {
        node: NodeId(*node),
        disk: member.disk,
        peer_addr: member.peer_addr.clone(),
        client_addr: member.client_addr.clone(),
    });
    Members {
        configs: configs.map(|set| set.iter().copied().collect()).collect(),
        nodes: nodes.collect(),
    }
}

/// `None`: a voter is missing among the nodes, or there are more than two sets of voters.
pub(super) fn membership(members: Members) -> Option<Membership> {
    let nodes: BTreeMap<u64, Member> = members
        .nodes
        .into_iter()
        .map(|entry| {
            let MemberEntry { node, disk, peer_addr, client_addr } = entry;
            (node.0, Member { disk, peer_addr, client_addr })
        })
        .collect();
    let configs: Vec<BTreeSet<u64>> =
        members.configs.into_iter().map(|set| set.into_iter().collect()).collect();
    if configs.len() > 2 {
        return None;
    }
    Membership::new(configs, nodes).ok()
}

pub(super) fn cover(meta: &SnapshotMeta) -> SnapshotCover {
    SnapshotCover {
        last: meta.last_log_id.as_ref().map(position),
        members_at: meta.last_membership.log_id().as_ref().map(position),
        members: members(meta.last_membership.membership()),
    }
}

/// `None`: the membership contradicts itself or is newer than what the snapshot covers.
pub(super) fn snapshot_meta(cover: SnapshotCover) -> Option<SnapshotMeta> {
    let last_log_id = cover.last.as_ref().map(log_id);
    let members_at = cover.members_at.as_ref().map(log_id);
    if members_at > last_log_id {
        return None;
    }
    let last_membership = StoredMembership::new(members_at, membership(cover.members)?);
    Some(SnapshotMeta { last_log_id, last_membership })
}
