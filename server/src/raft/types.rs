//! The types that openraft is instantiated with, and the few that the rest of the server sees.
//!
//! Owns no behaviour. Everything is generic in `E: Env`, so that the production runtime and the
//! simulator compile side by side.

use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;

use leasehold_protocol::ids::{DiskId, NodeId};
use leasehold_protocol::outcome::Outcome;
use openraft::impls::leader_id_adv;
use openraft::{EntryPayload, RaftTypeConfig};

use crate::env::Env;

/// openraft's type configuration over one environment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RaftTypes<E>(PhantomData<E>);

/// Who leads: a term and a node. Several nodes may lead in one term, so both count.
pub type LeaderId = leader_id_adv::LeaderId<u64, u64>;
/// A vote for a leader, committed once a quorum granted it.
pub type Vote = openraft::Vote<LeaderId>;
/// A position in a log: the leader that wrote it and the index.
pub type LogId = openraft::LogId<LeaderId>;
/// An entry's identity and what tells its content from another's, to compare logs of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryPrint {
    /// Its place.
    pub index: u64,
    /// The term and the node of the leader that wrote it.
    pub leader: (u64, NodeId),
    /// CRC-32C of its record.
    pub crc: u32,
}

/// What an entry carries.
pub type Payload = EntryPayload<EntryData, u64, Member>;
/// One entry of a group's log.
pub type Entry = openraft::impls::Entry<LeaderId, Payload>;
/// The members of a group, two sets of voters while a change is under way.
pub type Membership = openraft::Membership<u64, Member>;
/// A membership and where in the log it was written.
pub type StoredMembership = openraft::StoredMembership<LeaderId, u64, Member>;
/// What a snapshot covers.
pub type SnapshotMeta = openraft::storage::SnapshotMeta<LeaderId, u64, Member>;

impl<E: Env> RaftTypeConfig for RaftTypes<E> {
    type D = EntryData;
    type R = Applied;
    type NodeId = u64;
    type Node = Member;
    type Term = u64;
    type LeaderId = LeaderId;
    type Vote = Vote;
    type Payload = Payload;
    type Entry = Entry;
    type AsyncRuntime = E::Rt;
    type Responder<T>
        = openraft::impls::OneshotResponder<Self, T>
    where
        T: 'static;
    type Batch<T>
        = openraft::impls::InlineBatch<T>
    where
        T: 'static;
    type ErrorSource = openraft::AnyError;
}

/// An encoded `leasehold_core` batch. Cheap to clone: the engine clones entries per follower.
#[derive(Clone, PartialEq, Eq)]
pub struct EntryData(Rc<[u8]>);

impl EntryData {
    /// The encoded batch.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for EntryData {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl From<&[u8]> for EntryData {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Display for EntryData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl fmt::Debug for EntryData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EntryData({self})")
    }
}

/// The outcomes of one entry's commands, in their order; empty for entries of the engine itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied(pub Vec<Outcome>);

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} outcomes", self.0.len())
    }
}

/// What the membership says of one node. Part of the replicated log: a node whose data directory
/// is not `disk` takes no part, so that a wiped voter cannot vote (DESIGN §7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Its data directory.
    pub disk: DiskId,
    /// Its advertised peer address, `HOST:PORT`.
    pub peer_addr: String,
    /// Its advertised client address, `HOST:PORT`.
    pub client_addr: String,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (disk {})", self.peer_addr, self.disk)
    }
}

/// One leadership of one node: the committed vote that made it. Two leaderships of the same node
/// differ in their term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Leadership {
    /// The Raft term.
    pub term: u64,
    /// The leading node.
    pub node: NodeId,
}

impl Leadership {
    pub(crate) fn of(id: &LeaderId) -> Self {
        Self { term: id.term, node: NodeId(id.node_id) }
    }

    pub(crate) fn leader_id(self) -> LeaderId {
        LeaderId { term: self.term, node_id: self.node.0 }
    }
}

impl fmt::Display for Leadership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "term {} of node {}", self.term, self.node)
    }
}
