//! The cluster's membership: read and changed by operators.

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_protocol::member::{
    MemberChange, MemberChangeReply, MemberChangeRequest, MembersReply, MembersRequest,
};
use leasehold_protocol::reply::{Reply, Role};
use leasehold_protocol::request::Request;

use crate::client::{Client, misfit};
use crate::config::check_endpoint;
use crate::error::{CallError, Failure};

/// Shard 0 keeps the member table.
const TABLE: Option<ShardId> = Some(ShardId(0));

impl Client {
    /// The member table, and how far the operation under way is.
    pub async fn members(&self) -> Result<MembersReply, CallError> {
        match self.inner.call(TABLE, Request::Members(MembersRequest { timeout_ms: 0 })).await? {
            Reply::Members(reply) => Ok(reply),
            _ => Err(misfit().into()),
        }
    }

    /// Begins a change of the membership, or gives one up, and returns its operation's number. It
    /// goes on by itself; `members` tells how far it is. The number is 0 if the reply was lost, and
    /// the member table shows that the change was made and is over.
    pub async fn change_members(&self, change: MemberChange) -> Result<u64, CallError> {
        if let MemberChange::Add(new) | MemberChange::Replace { new, .. } = &change {
            check_address("peer", &new.peer_addr)?;
            // Without one, the node's own word counts.
            if !new.client_addr.is_empty() {
                check_address("client", &new.client_addr)?;
            }
        }
        let request = Request::MemberChange(MemberChangeRequest { change, timeout_ms: 0 });
        match self.inner.call(TABLE, request).await? {
            Reply::MemberChanged(MemberChangeReply { operation }) => Ok(operation),
            _ => Err(misfit().into()),
        }
    }

    /// Spreads the leaders: each voter that answers leads its share of the shards. A shard whose
    /// leader is where it should be is left alone; a move that fails holds up no other.
    pub async fn spread_leaders(&self) -> Result<Spread, CallError> {
        let status = self.status().await?;
        let reachable = status.nodes.iter().filter(|node| node.reachable);
        let votes = |shard: ShardId, role: Role| {
            let part = move |part: &leasehold_protocol::reply::ShardStatus| {
                part.shard == shard && part.role == role
            };
            reachable.clone().filter(move |node| node.shards.iter().any(part)).map(|n| n.node)
        };
        let shards = (0..status.shards).map(ShardId);
        let leaders: Vec<_> =
            shards.map(|shard| (shard, votes(shard, Role::Leader).next())).collect();
        let nodes: Vec<NodeId> = reachable.clone().map(|node| node.node).collect();
        let moves = spread(&leaders, &nodes, |shard, node| {
            votes(shard, Role::Leader).chain(votes(shard, Role::Follower)).any(|it| it == node)
        });
        let mut done = Spread::default();
        for (shard, node) in moves {
            match self.transfer_leader(shard, Some(node)).await {
                Ok(()) => done.moved.push((shard, node)),
                Err(error) => done.failed.push((shard, node, error)),
            }
        }
        Ok(done)
    }
}

fn check_address(what: &str, addr: &str) -> Result<(), Failure> {
    check_endpoint(addr).map_err(|why| {
        let text = format!("the {what} address {addr:?} is not HOST:PORT: {why}");
        Failure::new(ErrorCode::MALFORMED, text)
    })
}

/// What `Client::spread_leaders` did.
#[derive(Debug, Default)]
#[must_use = "some moves may have failed"]
pub struct Spread {
    /// Shards that moved, each with its new leader.
    pub moved: Vec<(ShardId, NodeId)>,
    /// Shards that should have moved, where to, and why they did not, as far as is known.
    pub failed: Vec<(ShardId, NodeId, CallError)>,
}

/// Which shards must move, and where to, so that no node leads more than its share: moves go from
/// who leads too many to who leads fewest.
fn spread(
    leaders: &[(ShardId, Option<NodeId>)],
    nodes: &[NodeId],
    votes: impl Fn(ShardId, NodeId) -> bool,
) -> Vec<(ShardId, NodeId)> {
    let mut led: Vec<(NodeId, usize)> = nodes
        .iter()
        .map(|node| (*node, leaders.iter().filter(|(_, leader)| *leader == Some(*node)).count()))
        .collect();
    let mut moves = Vec::new();
    for (shard, leader) in leaders {
        let of = |node: NodeId| led.iter().position(|(it, _)| *it == node);
        let Some(from) = leader.and_then(of) else { continue };
        let fewest =
            (0..led.len()).filter(|at| votes(*shard, led[*at].0)).min_by_key(|at| led[*at].1);
        let Some(to) = fewest.filter(|to| led[from].1 > led[*to].1 + 1) else { continue };
        led[from].1 -= 1;
        led[to].1 += 1;
        moves.push((*shard, led[to].0));
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(leaders: &[u64], nodes: &[u64]) -> Vec<u64> {
        let mut now: Vec<(ShardId, Option<NodeId>)> =
            leaders.iter().zip(0..).map(|(node, s)| (ShardId(s), Some(NodeId(*node)))).collect();
        let nodes: Vec<NodeId> = nodes.iter().map(|node| NodeId(*node)).collect();
        for (shard, node) in spread(&now, &nodes, |_, _| true) {
            now[shard.0 as usize].1 = Some(node);
        }
        let led = nodes.iter().map(|node| now.iter().filter(|(_, l)| *l == Some(*node)).count());
        led.map(|led| led as u64).collect()
    }

    #[test]
    fn leaders_are_spread_evenly_and_no_further() {
        assert_eq!(after(&[1, 1, 1, 1, 1, 1], &[1, 2, 3]), [2, 2, 2]);
        assert_eq!(after(&[1, 1, 1, 1, 1], &[1, 2, 3]), [2, 2, 1]);
        assert_eq!(after(&[2], &[1, 2, 3]), [0, 1, 0]);
        let even = [(ShardId(0), Some(NodeId(1))), (ShardId(1), Some(NodeId(2)))];
        assert_eq!(spread(&even, &[NodeId(1), NodeId(2)], |_, _| true), []);
    }

    #[test]
    fn a_shard_moves_only_to_a_node_that_votes_in_it() {
        let leaders = [(ShardId(0), Some(NodeId(1))), (ShardId(1), Some(NodeId(1)))];
        let votes = |shard: ShardId, node: NodeId| node == NodeId(1) || shard == ShardId(1);
        let moves = spread(&leaders, &[NodeId(1), NodeId(2)], votes);
        assert_eq!(moves, [(ShardId(1), NodeId(2))]);
    }
}
