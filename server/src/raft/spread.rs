//! Who leads a group that was just formed: leaders are spread over the nodes (DESIGN §7).
//!
//! Happens once, after the formation, by the node that formed the group and leads it first.
//! Afterwards leadership is where elections and transfers put it. Only an attempt: where the chosen
//! node does not come up in time, the first leader stays.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_protocol::ids::{NodeId, ShardId};
use openraft::AsyncRuntime;
use openraft::async_runtime::WatchReceiver;

use super::group::Group;
use super::types::{Leadership, Member};
use crate::env::Env;

/// Longest wait for the chosen node to have the log.
const PATIENCE: Duration = Duration::from_secs(10);

/// Which of `members` leads a new shard: they take turns.
pub fn first_leader(shard: ShardId, members: &BTreeMap<u64, Member>) -> NodeId {
    assert!(!members.is_empty(), "a group has members");
    let turn = shard.0 as usize % members.len();
    members.keys().nth(turn).map(|node| NodeId(*node)).expect("the turn is below the number")
}

impl<E: Env> Group<E> {
    /// Hands the leadership of a new group on to `leader` as soon as this node leads and `leader`
    /// has its log. Gives up if anybody else leads, or if it takes long.
    pub async fn settle(&self, leader: NodeId) {
        if leader == self.spec.node {
            return;
        }
        match E::Rt::timeout(PATIENCE, self.may_hand_on(leader)).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                let (shard, node) = (self.spec.shard.0, leader.0);
                tracing::warn!(shard, node, "leads no shard yet: it is behind or down");
                return;
            }
        }
        if let Err(error) = self.transfer(Some(leader)).await {
            tracing::warn!(shard = self.spec.shard.0, "leadership not spread: {error}");
        }
    }

    /// Waits until this node leads and `to` has all of the log: true; or until that is pointless.
    async fn may_hand_on(&self, to: NodeId) -> bool {
        let mut metrics = self.raft.metrics();
        loop {
            {
                let now = metrics.borrow_and_update();
                if now.current_leader.is_some_and(|leader| leader != self.spec.node.0) {
                    return false;
                }
                let replication = now.replication.as_ref();
                let matched = replication.and_then(|all| all.get(&to.0).copied().flatten());
                let first = self.leadership().map(Leadership::leader_id);
                if matched.is_some_and(|matched| Some(matched.leader_id) == first) {
                    return true;
                }
            }
            if metrics.changed().await.is_err() {
                return false;
            }
        }
    }
}
