//! An operation on the members that is given up: each shard is put back to who voted before, from
//! wherever it is, without the dead, and without a late step of what was given up.

use std::collections::BTreeSet;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::member::{
    GroupGoal, GroupStepRequest, MemberChange, MemberOperation, MemberPhase, ShardProgress,
    Standing,
};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{Request, TransferRequest};
use leasehold_server::rt::sim::SimRng;

use super::TIMEOUT_MS;
use super::members::{SEEDS, World, entry, new_member};
use super::raft_support::{SHARD, run, sleep_ms, until};

const OLD: [u64; 3] = [1, 2, 3];
const NEW: [u64; 3] = [1, 2, 4];

fn ids(nodes: [u64; 3]) -> BTreeSet<NodeId> {
    nodes.into_iter().map(NodeId).collect()
}

fn voters(nodes: [u64; 3]) -> GroupGoal {
    GroupGoal::Voters(nodes.into_iter().map(entry).collect())
}

fn undone() -> GroupGoal {
    GroupGoal::Undone(OLD.into_iter().map(entry).collect())
}

impl World {
    /// One step at the shard's leader, as a driver asks for it; how far it came, or the refusal.
    async fn step(&self, version: u64, goal: &GroupGoal) -> Result<ShardProgress, ErrorCode> {
        let (leader, _) = self.cluster.leader().await;
        let (goal, timeout_ms) = (goal.clone(), TIMEOUT_MS);
        let step = GroupStepRequest { shard: SHARD, version, goal, timeout_ms };
        let replies = self.submit(leader, Request::GroupStep(step));
        until("an answer to the step", || replies.last().is_some()).await;
        match replies.last() {
            Some(Reply::GroupStepped(progress)) => Ok(progress),
            Some(Reply::Error(error)) => Err(error.code),
            other => panic!("{other:?}"),
        }
    }

    /// Steps until the shard is there.
    async fn becomes(&self, version: u64, goal: &GroupGoal) {
        for _ in 0..100 {
            if self.step(version, goal).await.is_ok_and(|progress| progress.done) {
                return;
            }
            sleep_ms(50).await;
        }
        panic!("it never becomes {goal:?}: {:?}", self.step(version, goal).await);
    }

    /// The shard has node 4 in node 3's place.
    async fn replaced(&self) {
        self.becomes(50, &GroupGoal::Learner(entry(4))).await;
        self.becomes(51, &voters(NEW)).await;
    }

    async fn is_put_back(&self) {
        let (leader, _) = self.cluster.leader().await;
        let group = self.cluster.group(leader);
        assert!(group.membership().are(&ids(OLD)), "{:?}", group.membership());
        let late = self.step(51, &voters(NEW)).await;
        assert_eq!(late.expect_err("refused"), ErrorCode::MEMBER_CHANGE_OVER, "a late step");
        assert!(group.membership().are(&ids(OLD)), "{:?}", group.membership());
    }

    async fn lead(&self, to: u64) {
        let transfer = || {
            Request::Transfer(TransferRequest {
                shard: SHARD,
                to: NodeId(to),
                timeout_ms: TIMEOUT_MS,
            })
        };
        for _ in 0..20 {
            let (leader, _) = self.cluster.leader().await;
            if leader == to {
                return;
            }
            let replies = self.submit(leader, transfer());
            until("an answer to the transfer", || replies.last().is_some()).await;
        }
        panic!("INVALID: node {to} never leads");
    }
}

#[test]
fn a_shard_that_has_not_changed_only_loses_the_learner() {
    run(1, async {
        let world = World::new().await;
        world.becomes(50, &GroupGoal::Learner(entry(4))).await;
        world.becomes(52, &undone()).await;
        world.is_put_back().await;
    });
}

#[test]
fn a_shard_comes_back_from_the_lead_of_the_node_that_goes_out() {
    run(2, async {
        let world = World::new().await;
        world.replaced().await;
        world.lead(4).await;
        world.becomes(52, &undone()).await;
        world.is_put_back().await;
        let back = || world.cluster.group(3).membership().are(&ids(OLD));
        until("the node that was out hears of it", back).await;
        assert_ne!(world.cluster.leader().await.0, 4);
    });
}

/// The node that was replaced because it is dead is a voter again, and still dead.
#[test]
fn a_shard_comes_back_while_both_nodes_of_the_replacement_are_dead() {
    run(3, async {
        let mut world = World::new().await;
        world.kill(3);
        world.replaced().await;
        world.kill(4);
        world.becomes(52, &undone()).await;
        world.is_put_back().await;
        world.start(3).await;
        let back = || world.cluster.group(3).membership().are(&ids(OLD));
        until("the node that was dead follows again", back).await;
    });
}

/// It keeps the voters with whom it can commit until a majority of those of before is there.
#[test]
fn a_shard_is_not_put_back_to_voters_without_a_majority() {
    run(4, async {
        let mut world = World::new().await;
        world.kill(3);
        world.replaced().await;
        world.lead(4).await;
        world.kill(2);
        for _ in 0..20 {
            let progress = world.step(52, &undone()).await.expect("nodes 1 and 4 commit the fence");
            assert!(!progress.done);
            let voters = world.cluster.group(4).membership().voters;
            assert_eq!(voters, [ids(NEW)], "{progress:?}");
            sleep_ms(50).await;
        }
        world.start(2).await;
        world.becomes(52, &undone()).await;
        world.is_put_back().await;
    });
}

#[test]
fn an_operation_is_given_up_in_the_vote_whoever_dies() {
    let (mut in_vote, mut changed) = (0, 0);
    for seed in 0..2 * SEEDS {
        let (vote, group) = run(seed, given_up(seed));
        in_vote += u64::from(vote);
        changed += u64::from(group);
    }
    println!("given up in the vote {in_vote}, after the group had changed {changed}");
    assert!(in_vote >= SEEDS, "INVALID: {in_vote} were given up in the vote");
    assert!(changed >= 3, "INVALID: {changed} were given up after the group had changed");
}

impl World {
    /// The operation under way, as the newest table of the old members says.
    fn under_way(&self) -> Option<MemberOperation> {
        let old = self.nodes.iter().filter(|(node, _)| OLD.contains(node));
        let newest = old.max_by_key(|(node, _)| self.version(**node))?;
        newest.1.0.state().borrow().members().operation()
    }

    /// Node 4 votes, by the membership of the shard's leader.
    fn has_changed(&self) -> bool {
        let leader = self.cluster.leader_now();
        leader.is_some_and(|(node, _)| self.cluster.group(node).membership().votes(NodeId(4)))
    }

    async fn driver_dies(&mut self, dice: &SimRng) {
        let driver = self.cluster.leader_now().map(|(node, _)| node);
        let Some(driver) = driver.filter(|node| OLD.contains(node)) else { return };
        self.kill(driver);
        sleep_ms(dice.next() % 400).await;
        self.start(driver).await;
    }
}

/// Whether it was given up in the vote, and whether the group had changed by then.
async fn given_up(seed: u64) -> (bool, bool) {
    let dice = SimRng::new(seed ^ 0x756e_646f);
    let mut world = World::new().await;
    let dead = seed.is_multiple_of(3);
    if dead {
        world.kill(3);
    }
    let replace = MemberChange::Replace { old: NodeId(3), new: new_member(4) };
    let operation = world.begin(&replace).await;
    let learnt = || world.under_way().is_none_or(|now| now.phase != MemberPhase::Learn);
    until("the voters are to change", learnt).await;
    if seed.is_multiple_of(2) {
        // Where it is too early for its vote, the operation stands still from here.
        sleep_ms(dice.next() % 130).await;
        world.kill(4);
    } else {
        until("the group changes", || world.has_changed()).await;
    }
    let (vote, changed) = (world.under_way().is_some(), world.has_changed());
    if world.try_begin(&MemberChange::Abort { operation }).await.is_err() {
        return (false, false);
    }
    if !dead && dice.next().is_multiple_of(2) {
        world.driver_dies(&dice).await;
    }
    let alive: Vec<u64> = world.nodes.keys().copied().filter(|node| OLD.contains(node)).collect();
    let undone = || alive.iter().all(|node| world.is_over(*node, &ids(OLD)));
    until("it is undone everywhere", undone).await;
    let state = world.nodes[&1].0.state().borrow();
    let standing = state.members().node(NodeId(4)).map(|info| info.standing);
    assert_eq!(standing, Some(Standing::Removed), "its id is used up");
    (vote, vote && changed)
}
