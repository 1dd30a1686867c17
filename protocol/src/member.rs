//! The membership of the cluster: its table, the one change that may be under way, and the
//! requests that read and change it.
//!
//! The table is part of shard 0's state. A change of the membership is an *operation* over all
//! shards; every change of the table raises its *version*, and what is done to a shard names the
//! version for which it is done (`docs/decisions/006-membership.md`).
#![expect(missing_docs, reason = "rkyv gives an enum a resolver whose fields take no docs")]

use alloc::string::String;
use alloc::vec::Vec;

use rkyv::{Archive, Deserialize, Serialize};

use crate::ids::{NodeId, Revision, ShardId};
use crate::peer::MemberEntry;

/// A change of the member table, or of what a shard has seen of it. Leaders alone propose these.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum MemberCommand {
    /// First: the nodes that founded the cluster, ascending. Refused when there is a table.
    Found(Vec<MemberEntry>),
    /// Begins an operation; refused while another is under way. The same again changes nothing.
    Start {
        /// The node that comes, with the data directory it was found with.
        add: Option<MemberEntry>,
        /// The node that goes.
        remove: Option<NodeId>,
    },
    /// The coming node has caught up in every shard: from now on the voters change.
    Promote {
        /// The operation.
        operation: u64,
    },
    /// Gives the operation up: from now on every shard becomes again what it was before it.
    Abort {
        /// The operation.
        operation: u64,
    },
    /// The operation was carried out, or undone, in every shard. Refused if that was done for an
    /// older version of the table: it was given up since.
    Finish {
        /// The operation.
        operation: u64,
        /// The version for which it was done.
        version: u64,
    },
    /// In each shard, before its group is changed for a version of the table: from now on nothing
    /// is done there for an older one.
    Fence {
        /// The version.
        version: u64,
    },
}

/// What a node is to the cluster.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Votes in every shard; if an operation takes it out, no longer in some.
    Voter,
    /// Receives the log; if its operation was promoted, it votes in some shards.
    Joining,
    /// Was a member or was to be one. Its id and its data directory are used up.
    Removed,
}

/// How far an operation is.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemberPhase {
    /// The coming node catches up, without a vote.
    Learn,
    /// The voters change, shard by shard.
    Vote,
    /// It was given up; in each shard the voters become again those from before it, and the coming
    /// node is taken out.
    Undo,
}

/// One node that is or was a member.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// The node, its data directory and its addresses.
    pub entry: MemberEntry,
    /// What it is to the cluster.
    pub standing: Standing,
}

/// The operation under way.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberOperation {
    /// Its number: the version of the table that it began with.
    pub operation: u64,
    /// How far it is.
    pub phase: MemberPhase,
    /// The node that comes, `NodeId(0)` if none.
    pub add: NodeId,
    /// The node that goes, `NodeId(0)` if none.
    pub remove: NodeId,
}

/// Reads the member table, linearizably.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct MembersRequest {
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// The member table and how far the operation is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct MembersReply {
    /// Shard 0's revision at which it was read.
    pub revision: Revision,
    /// The table's version.
    pub version: u64,
    /// Every node that is or was a member, ascending; at most `MEMBERS_EVER_MAX`.
    pub members: Vec<MemberInfo>,
    /// The operation under way.
    pub operation: Option<MemberOperation>,
    /// How far the operation's present phase is in each shard, as its driver last saw it; empty
    /// until it has looked.
    pub progress: Vec<ShardProgress>,
}

/// How far the present phase is in one shard.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ShardProgress {
    /// The shard.
    pub shard: ShardId,
    /// Done.
    pub done: bool,
    /// Entries that the coming node lacks.
    pub behind: u64,
    /// What it waits for, for a person; empty if done.
    pub waits: String,
}

/// What an operator asks for.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// A node comes.
    Add(NewMember),
    /// A node goes.
    Remove {
        /// Which.
        node: NodeId,
    },
    /// A node comes and another goes, in one step of each shard.
    Replace {
        /// The node that goes.
        old: NodeId,
        /// The node that comes.
        new: NewMember,
    },
    /// Gives up an operation that is not over.
    Abort {
        /// The operation.
        operation: u64,
    },
}

/// A node that waits for admission.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct NewMember {
    /// Its id, never used in this cluster.
    pub node: NodeId,
    /// Where peers reach it, `HOST:PORT`.
    pub peer_addr: String,
    /// Where clients reach it, `HOST:PORT`; empty for what it advertises itself.
    pub client_addr: String,
}

/// Asks for a change of the membership. It is begun, and goes on by itself; `Members` tells how far
/// it is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct MemberChangeRequest {
    /// The change.
    pub change: MemberChange,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}

/// The change was begun, was under way already, or is given up.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberChangeReply {
    /// The operation.
    pub operation: u64,
}

/// What a group is to become for a version of the table.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum GroupGoal {
    /// This node receives the log and has caught up.
    Learner(MemberEntry),
    /// These nodes vote, and no others are members.
    Voters(Vec<MemberEntry>),
    /// These nodes vote as they did before the operation, and no others are members. One of them that
    /// does not answer votes again as well, if a majority of them answers and has the log.
    Undone(Vec<MemberEntry>),
}

/// Between nodes: brings one shard's group nearer to a goal. Sent by the operation's driver to the
/// shard's leader, again and again until it is done. Refused from clients.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct GroupStepRequest {
    /// The shard.
    pub shard: ShardId,
    /// The version of the table that has this goal.
    pub version: u64,
    /// The goal.
    pub goal: GroupGoal,
    /// See `CommandRequest::timeout_ms`.
    pub timeout_ms: u32,
}
