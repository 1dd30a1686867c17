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

#[cfg(test)]
mod tests {
    use leasehold_protocol::ids::DiskId;

    use super::*;

    fn at(index: u64) -> LogId {
        LogId::new(LeaderId { term: 3, node_id: 2 }, index)
    }

    fn membership() -> Membership {
        let member = |node: u64| Member {
            disk: DiskId([node as u8; 16]),
            peer_addr: format!("node{node}:1"),
            client_addr: format!("node{node}:2"),
        };
        let nodes: BTreeMap<u64, Member> = (1..=4).map(|node| (node, member(node))).collect();
        let sets = vec![[1, 2, 3].into(), [2, 3, 4].into()];
        Membership::new(sets, nodes).expect("voters are nodes")
    }

    fn entries() -> Vec<Entry> {
        let payloads = [
            EntryPayload::Blank,
            EntryPayload::Normal(EntryData::from(b"a batch".as_slice())),
            EntryPayload::Membership(membership()),
        ];
        let entry = |(index, payload)| Entry { log_id: at(index), payload };
        (5..).zip(payloads).map(entry).collect()
    }

    #[test]
    fn records_read_back() {
        for entry in entries() {
            assert_eq!(read_entry(&entry_record(&entry)), Ok(entry));
        }
        let vote = Vote { leader_id: LeaderId { term: 9, node_id: 4 }, committed: true };
        assert_eq!(read_vote(&vote_record(&vote)), Ok(vote));
        assert_eq!(read_log_id(&log_id_record(&at(8))), Ok(at(8)));
        let last_membership = StoredMembership::new(Some(at(7)), membership());
        let meta = SnapshotMeta { last_log_id: Some(at(9)), last_membership };
        assert_eq!(read_meta(&meta_record(&meta)), Ok(meta));
    }

    /// What earlier builds wrote must stay readable: these bytes never change.
    #[test]
    fn the_formats_are_what_they_were() {
        let hex = |bytes: &[u8]| {
            bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
        };
        let vote = Vote { leader_id: LeaderId { term: 0x0102, node_id: 3 }, committed: true };
        assert_eq!(hex(&vote_record(&vote)), "010201000000000000030000000000000001");
        let id = "01030000000000000002000000000000000800000000000000";
        assert_eq!(hex(&log_id_record(&at(8))), id);
        let batch = "016120626174636803000000000000000200000000000000060000000000000001e0ffffff07\
                     0000000000000000000000";
        assert_eq!(hex(&entry_record(&entries()[1])), batch);
    }

    #[test]
    fn other_bytes_are_errors() {
        assert_eq!(read_vote(&[]), Err(RecordError::Empty));
        assert_eq!(read_vote(&[2, 0, 0]), Err(RecordError::Version(2)));
        assert_eq!(read_vote(&[1, 0, 0]), Err(RecordError::Malformed));
        for record in entries().iter().map(entry_record) {
            // The WAL's checksum finds such bytes; here they must only do no harm.
            for at in 1..record.len() {
                let mut changed = record.clone();
                changed[at] ^= 0x80;
                let _read = (read_entry(&record[..at]), read_entry(&changed));
            }
        }
        let mut members = members(&membership());
        members.configs.push(vec![1]);
        assert_eq!(membership_of(members.clone()), None, "three sets of voters");
        members.configs = vec![vec![1, 9]];
        assert_eq!(membership_of(members), None, "a voter that is no node");
    }

    fn membership_of(members: Members) -> Option<Membership> {
        super::membership(members)
    }
}
