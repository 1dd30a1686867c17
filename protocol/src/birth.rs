//! The messages of a cluster's birth, between peers (kinds 208..=211 of the peer frames).
//!
//! They pass before the peers share a cluster id, under the proof of the cluster secret alone.
//! `server/src/identity/birth.rs` holds the rules.

use alloc::string::String;
use alloc::vec::Vec;

use rkyv::{Archive, Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::ids::{ClusterId, DiskId, NodeId};

/// Kind of a query: who are you, and what have you promised? Its body is empty.
pub const KIND_QUERY: u8 = 208;
/// Kind of a `BirthAnswer`, the reply to a query.
pub const KIND_ANSWER: u8 = 209;
/// Kind of a `BirthPropose`.
pub const KIND_PROPOSE: u8 = 210;
/// Kind of a `BirthReply`, the reply to a proposal.
pub const KIND_REPLY: u8 = 211;

/// Kind of a `BirthMember` that asks to be admitted to a cluster; answered by a `JoinAnswer`. Not
/// next to the others, whose range was full.
pub const KIND_JOIN: u8 = 223;

/// Most members of a birth record; a longer list is malformed.
pub const MEMBERS_MAX: usize = 16;
/// Longest name or address in these messages, in bytes; a longer one is malformed.
pub const TEXT_LEN_MAX: usize = 300;

/// What nodes must have configured alike to be born together.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The cluster's name.
    pub name: String,
    /// The nodes, ascending.
    pub nodes: Vec<NodeId>,
    /// Number of shards.
    pub shards: u32,
    /// Which key hash is in force (see `ServerHello::key_hash`).
    pub key_hash: u8,
}

/// One founding node.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BirthMember {
    /// The node.
    pub node: NodeId,
    /// Its data directory.
    pub disk: DiskId,
    /// Where peers reach it, `HOST:PORT`.
    pub peer_addr: String,
    /// Where clients reach it, `HOST:PORT`.
    pub client_addr: String,
}

/// What a cluster is: minted once by its lowest node, promised to by every other.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BirthRecord {
    /// The cluster's random identity.
    pub cluster: ClusterId,
    /// The cluster's name.
    pub name: String,
    /// The founding nodes, ascending.
    pub members: Vec<BirthMember>,
    /// Number of shards.
    pub shards: u32,
    /// Which key hash is in force.
    pub key_hash: u8,
    /// Every shard's tokens start above this.
    pub token_base: u64,
    /// What the cluster was restored from; `None` for a new one.
    pub restored: Option<Restored>,
}

/// What a cluster takes over from the one that it replaces, beside `BirthRecord::token_base`.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restored {
    /// The old cluster.
    pub from: ClusterId,
    /// Every shard's lease ids start above this.
    pub lease_base: u64,
    /// Every shard's revisions start above this.
    pub revision_base: u64,
    /// How long no key is granted, in milliseconds from the first leader's beginning, and from
    /// each later leader's as long as it is not over.
    pub quarantine_ms: u32,
}

impl BirthRecord {
    /// The founding node of that number.
    pub fn member(&self, node: NodeId) -> Option<&BirthMember> {
        self.members.iter().find(|member| member.node == node)
    }

    /// What the founding nodes had configured.
    pub fn plan(&self) -> Plan {
        Plan {
            name: self.name.clone(),
            nodes: self.members.iter().map(|member| member.node).collect(),
            shards: self.shards,
            key_hash: self.key_hash,
        }
    }

    /// True if members ascend without a repeat and every bound is kept: what a reader must see
    /// before it believes a record.
    pub fn is_well_formed(&self) -> bool {
        let texts = |member: &BirthMember| {
            member.peer_addr.len() <= TEXT_LEN_MAX && member.client_addr.len() <= TEXT_LEN_MAX
        };
        (1..=MEMBERS_MAX).contains(&self.members.len())
            && self.name.len() <= TEXT_LEN_MAX
            && self.members.iter().all(texts)
            && self.members.windows(2).all(|pair| pair[0].node < pair[1].node)
            && self.cluster != ClusterId::UNKNOWN
            && self.shards > 0
    }
}

/// The answer to a query.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BirthAnswer {
    /// The answering node, as it would stand in a record.
    pub member: BirthMember,
    /// What the answering node has configured.
    pub plan: Plan,
    /// The record that it has promised itself to; `None` if its directory is fresh.
    pub promised: Option<BirthRecord>,
}

/// Asks a peer to promise itself to a record.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BirthPropose {
    /// The record, durable at its sender.
    pub record: BirthRecord,
}

/// The reply to a `BirthPropose`.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum BirthReply {
    /// The node has promised itself to this record, durably.
    Promised,
    /// The node has promised itself to another record.
    OtherRecord,
    /// The node is configured with another name, node list, shard count or key hash.
    OtherPlan,
    /// The record names another data directory for this node, or does not name the node at all.
    OtherDisk,
    /// The record is malformed.
    Malformed,
}

/// The answer of a member to a node that asks to be admitted.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum JoinAnswer {
    /// No operation adds this node, as far as the answering one knows: ask again.
    Unknown,
    /// The node belongs to the cluster. The record is the cluster's, with its present members and
    /// the asking node.
    Admitted(BirthRecord),
    /// Never: the id was used with another data directory, or the node was removed.
    Refused(ErrorCode),
}
