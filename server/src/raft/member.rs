//! A group's members: who they are, how far they are, and how they are changed.
//!
//! Owns no decision: which nodes are to vote, and when, is said from above (`shard::member`). A
//! change is made by this very leadership, upon the membership that its caller looked at, or not at
//! all. One that was interrupted between its two steps is taken up by the next.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::peer;
use openraft::ChangeMembers;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::raft::Precondition;

use super::group::Group;
use super::peers::Class;
use super::types::{Leadership, LogId, Member};
use crate::env::Env;

/// Who belongs to a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupMembers {
    /// The sets of voters: one, or two while a change is under way.
    pub voters: Vec<BTreeSet<NodeId>>,
    /// Voters and learners.
    pub nodes: BTreeMap<NodeId, Member>,
    /// It is committed.
    pub committed: bool,
    at: Option<LogId>,
}

impl GroupMembers {
    /// Exactly these nodes vote, nobody else is a member, and that is settled.
    pub fn are(&self, voters: &BTreeSet<NodeId>) -> bool {
        self.committed && self.vote_alone(voters) && self.nodes.keys().eq(voters)
    }

    /// They vote, and no change of that is under way.
    pub fn vote_alone(&self, voters: &BTreeSet<NodeId>) -> bool {
        self.voters.as_slice() == std::slice::from_ref(voters)
    }

    /// The node votes in one of the sets.
    pub fn votes(&self, node: NodeId) -> bool {
        self.voters.iter().any(|set| set.contains(&node))
    }
}

/// Why members were not changed, or not as far as is known. Nothing is lost by trying again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemberError {
    /// This leadership is over.
    #[error("this node does not lead any more")]
    NotLeader,
    /// Another change came first or is not committed yet.
    #[error("{0}")]
    Again(String),
    /// The engine stopped.
    #[error("the engine stopped")]
    Stopped,
}

impl<E: Env> Group<E> {
    /// The effective membership.
    pub fn membership(&self) -> GroupMembers {
        let stored = self.log.membership();
        let membership = stored.membership();
        let set = |set: &BTreeSet<u64>| set.iter().map(|node| NodeId(*node)).collect();
        let metrics = self.raft.metrics();
        let committed = *metrics.borrow_watched().committed_membership_config.log_id();
        GroupMembers {
            voters: membership.get_joint_config().iter().map(set).collect(),
            nodes: membership.nodes().map(|(node, m)| (NodeId(*node), m.clone())).collect(),
            committed: committed == *stored.log_id(),
            at: *stored.log_id(),
        }
    }

    /// How many entries of this leader's log a follower or learner lacks; `None` if this node does
    /// not lead or has not heard from it.
    pub fn lag_of(&self, node: NodeId) -> Option<u64> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let matched = metrics.replication.as_ref()?.get(&node.0).copied().flatten()?;
        Some(metrics.last_log_index.unwrap_or(0).saturating_sub(matched.index))
    }

    /// The node answers within `patience`. True for this node itself.
    pub async fn answers(&self, node: NodeId, patience: Duration) -> bool {
        if node == self.spec.node {
            return true;
        }
        self.peers.call(node, Class::Heartbeat, peer::PING, &[], patience).await.is_ok()
    }

    /// Begins to send the log to a node, which does not vote.
    pub async fn add_learner(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        node: NodeId,
        member: Member,
    ) -> Result<(), MemberError> {
        let nodes = BTreeMap::from([(node.0, member)]);
        self.change(leadership, seen, ChangeMembers::AddNodes(nodes), true).await
    }

    /// Takes out a node that does not vote.
    pub async fn drop_learner(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        node: NodeId,
    ) -> Result<(), MemberError> {
        let nodes = BTreeSet::from([node.0]);
        self.change(leadership, seen, ChangeMembers::RemoveNodes(nodes), true).await
    }

    /// Makes these members the voters, through a joint membership; voters that are none of them are
    /// members no longer.
    pub async fn set_voters(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        voters: &BTreeSet<NodeId>,
    ) -> Result<(), MemberError> {
        let voters = voters.iter().map(|node| node.0).collect();
        self.change(leadership, seen, ChangeMembers::ReplaceAllVoters(voters), false).await
    }

    async fn change(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        change: ChangeMembers<u64, Member>,
        retain: bool,
    ) -> Result<(), MemberError> {
        let conditions = [
            Precondition::CommittedLeaderId { committed_leader_id: leadership.leader_id() },
            Precondition::LastMembershipLogId { last_membership_log_id: seen.at },
        ];
        match self.raft.change_membership_if(change, retain, conditions).await {
            Ok(_) => Ok(()),
            Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_))) => {
                Err(MemberError::NotLeader)
            }
            Err(RaftError::APIError(error)) => Err(MemberError::Again(error.to_string())),
            Err(RaftError::Fatal(_)) => Err(MemberError::Stopped),
        }
    }
}
