//! Groups of simulated nodes: election, replication, failover, restart, snapshots, transfer.

mod raft_support;

use futures_util::stream::FuturesOrdered;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use futures_util::{FutureExt, StreamExt};
use leasehold_core::State;
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_protocol::outcome::Outcome;
use leasehold_server::env::Disk;
use leasehold_server::raft::types::{Leadership, Member};
use leasehold_server::raft::{
    Group, GroupError, GroupSpec, ProposeError, TransferError, first_leader,
};
use leasehold_server::rt::sim::SimRt;
use leasehold_server::wal::Recovered;
use openraft::AsyncRuntime;
use raft_support::{CLUSTER, Cluster, Seen, SimEnv, member, opening, run, until};

#[test]
fn three_nodes_elect_and_replicate() {
    run(1, async {
        let cluster = Cluster::formed(3).await;
        for secret in 0..20 {
            cluster.open_lease(secret).await;
        }
        cluster.agree().await;
        let state = cluster.running(2).state;
        assert_eq!(state.borrow().leases_len(), 19, "the first open comes before begin");
    });
}

#[test]
fn another_node_takes_over_and_the_old_leader_catches_up() {
    run(2, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        cluster.open_lease(1).await;
        let (old, before) = cluster.leader().await;
        cluster.kill(old);
        let (new, after) = cluster.leader_but(old).await;
        assert_ne!(new, old);
        assert!(after > before);
        assert!(matches!(cluster.open_lease(2).await, Outcome::Opened { .. }));
        cluster.start(old).await.unwrap();
        cluster.agree().await;
        assert_eq!(cluster.running(old).state.borrow().leases_len(), 2);
    });
}

#[test]
fn a_follower_behind_the_purged_log_gets_a_snapshot() {
    run(3, async {
        let small = |spec: &mut GroupSpec| {
            spec.snapshot_entries = 20;
            spec.log_keep = 40;
        };
        let cluster = Cluster::formed_with(3, small).await;
        let (leader, _) = cluster.leader().await;
        let away = (1..=3).find(|node| *node != leader).unwrap();
        cluster.kill(away);
        for secret in 0..150 {
            cluster.open_lease(secret).await;
        }
        until("the leader took snapshots", || cluster.group(leader).status().snapshot_index >= 100)
            .await;
        cluster.start(away).await.unwrap();
        for secret in 150..170 {
            cluster.open_lease(secret).await;
        }
        cluster.agree().await;
        assert_eq!(cluster.running(away).seen.installed.get(), 1, "it came by snapshot");
        assert_eq!(snapshots_of(&cluster, leader).await.len(), 2);
        // It restarts from the snapshot it was sent.
        cluster.kill(away);
        cluster.start(away).await.unwrap();
        cluster.agree().await;
    });
}

#[test]
fn all_nodes_restart_with_everything_that_was_acknowledged() {
    run(4, async {
        let small = |spec: &mut GroupSpec| {
            spec.snapshot_entries = 20;
            spec.log_keep = 40;
        };
        let cluster = Cluster::formed_with(3, small).await;
        let mut revision = 0;
        for secret in 0..100 {
            if let Outcome::Opened { revision: at, .. } = cluster.open_lease(secret).await {
                revision = at.0;
            }
        }
        (1..=3).for_each(|node| cluster.kill(node));
        for node in 1..=3 {
            cluster.start(node).await.unwrap();
        }
        cluster.leader().await;
        cluster.agree().await;
        for node in 1..=3 {
            assert!(cluster.running(node).state.borrow().revision().0 >= revision);
            assert_eq!(cluster.running(node).state.borrow().leases_len(), 99);
        }
    });
}

#[test]
fn a_damaged_snapshot_is_passed_over() {
    run(5, async {
        let small = |spec: &mut GroupSpec| {
            spec.snapshot_entries = 20;
            spec.log_keep = 40;
        };
        let cluster = Cluster::formed_with(3, small).await;
        for secret in 0..200 {
            cluster.open_lease(secret).await;
        }
        cluster.agree().await;
        let names = snapshots_of(&cluster, 2).await;
        cluster.kill(2);
        cluster.machine(2).disk.borrow().rot(names.last().unwrap(), 300, 4);
        cluster.start(2).await.expect("the older snapshot and the log will do");
        for secret in 0..30 {
            cluster.open_lease(secret).await;
        }
        cluster.agree().await;
        until("the damaged file is gone", || {
            let kept = snapshots_of(&cluster, 2).now_or_never().unwrap();
            kept.len() == 2 && kept.last() != names.last()
        })
        .await;

        // With all of them damaged, the node says so instead of inventing a state.
        let names = snapshots_of(&cluster, 2).await;
        cluster.kill(2);
        for name in &names {
            cluster.machine(2).disk.borrow().rot(name, 310, 8);
        }
        let error = cluster.start(2).await.unwrap_err();
        assert!(matches!(error, GroupError::SnapshotMissing { covered: 0, .. }), "{error}");
    });
}

async fn snapshots_of(cluster: &Cluster, node: u64) -> Vec<String> {
    let disk = cluster.machine(node).disk.borrow().clone();
    let mut names = disk.list().await.expect("the disk works");
    names.retain(|name| name.starts_with("snapshot-"));
    names
}

#[test]
fn leadership_moves_when_asked() {
    run(6, async {
        let cluster = Cluster::formed(3).await;
        for target in [1, 2, 3, 1] {
            let (leader, before) = cluster.leader().await;
            let to = if target == leader { target % 3 + 1 } else { target };
            let moved = cluster.group(leader).transfer(Some(NodeId(to))).await;
            assert_eq!(moved, Ok(NodeId(to)));
            let (now, after) = cluster.leader_but(leader).await;
            assert_eq!(now, to);
            assert!(after > before);
            cluster.open_lease(target as u8).await;
        }
        let (leader, _) = cluster.leader().await;
        let to = cluster.group(leader).transfer(None).await.unwrap();
        assert_ne!(to.0, leader);
        cluster.leader_but(leader).await;
        cluster.agree().await;
    });
}

#[test]
fn a_new_groups_leadership_goes_to_its_node_once() {
    let members: BTreeMap<u64, Member> = (1..=3).map(|node| (node, member(node))).collect();
    let turns: Vec<_> = (0..4).map(|shard| first_leader(ShardId(shard), &members).0).collect();
    assert_eq!(turns, [1, 2, 3, 1]);
    for first in 1..=3 {
        run(60 + first, async {
            let cluster = Cluster::new(3);
            for node in 1..=3 {
                cluster.start(node).await.expect("an empty disk opens");
            }
            let group = cluster.group(1);
            assert_eq!(group.initialize(members.clone()).await, Ok(true));
            group.settle(NodeId(first)).await;
            assert_eq!(cluster.leader().await.0, first);
            cluster.open_lease(1).await;
            assert_eq!(group.initialize(members.clone()).await, Ok(false), "it was formed before");
            cluster.kill(first);
            cluster.leader_but(first).await;
        });
    }
}

#[test]
fn a_new_group_is_led_though_its_node_does_not_come_up() {
    run(64, async {
        let cluster = Cluster::new(3);
        for node in 1..=2 {
            cluster.start(node).await.expect("an empty disk opens");
        }
        let members = (1..=3).map(|node| (node, member(node))).collect();
        let group = cluster.group(1);
        assert_eq!(group.initialize(members).await, Ok(true));
        group.settle(NodeId(3)).await;
        assert_eq!(cluster.leader().await.0, 1);
        cluster.open_lease(1).await;
    });
}

#[test]
fn a_transfer_to_a_node_that_is_down_is_refused_and_nothing_stops() {
    run(7, async {
        let cluster = Cluster::formed(3).await;
        let (leader, leadership) = cluster.leader().await;
        let down = leader % 3 + 1;
        cluster.kill(down);
        let moved = cluster.group(leader).transfer(Some(NodeId(down))).await;
        assert_eq!(moved, Err(TransferError::Unreachable(NodeId(down))));
        assert_eq!(cluster.group(leader).leadership(), Some(leadership));
        cluster.open_lease(1).await;
        let moved = cluster.group(leader).transfer(Some(NodeId(9))).await;
        assert_eq!(moved, Err(TransferError::NoSuchVoter));
    });
}

#[test]
fn a_transfer_to_anybody_passes_over_a_node_that_is_down() {
    run(17, async {
        let cluster = Cluster::formed(3).await;
        for highest in [true, false] {
            cluster.agree().await;
            let (leader, _) = cluster.leader().await;
            let mut others = (1..=3).filter(|node| *node != leader);
            let (low, high) = (others.next().unwrap(), others.next().unwrap());
            let (down, healthy) = if highest { (high, low) } else { (low, high) };
            cluster.kill(down);
            let moved = cluster.group(leader).transfer(None).await;
            assert_eq!(moved, Ok(NodeId(healthy)));
            cluster.leader_but(leader).await;
            cluster.start(down).await.unwrap();
        }
        cluster.agree().await;
    });
}

#[test]
fn a_transfer_to_anybody_fails_where_nobody_answers() {
    run(18, async {
        let cluster = Cluster::formed(3).await;
        let (leader, leadership) = cluster.leader().await;
        (1..=3).filter(|node| *node != leader).for_each(|node| cluster.kill(node));
        let moved = cluster.group(leader).transfer(None).await;
        assert!(matches!(moved, Err(TransferError::Unreachable(_))), "{moved:?}");
        assert_eq!(cluster.group(leader).leadership(), Some(leadership), "it leads on");
    });
}

/// Whoever waits for the group's end sleeps while the group works.
#[test]
fn waiting_for_the_end_costs_nothing_meanwhile() {
    run(19, async {
        let cluster = Cluster::formed(3).await;
        let (leader, _) = cluster.leader().await;
        let polls = Rc::new(Cell::new(0));
        let (group, polled) = (cluster.group(leader), polls.clone());
        drop(SimRt::spawn(async move {
            let mut end = Box::pin(group.failed());
            std::future::poll_fn(|cx| {
                polled.set(polled.get() + 1);
                end.as_mut().poll(cx).map(drop)
            })
            .await;
        }));
        for secret in 0..100 {
            cluster.open_lease(secret).await;
        }
        assert!(polls.get() >= 1, "it waits");
        assert!(polls.get() <= 3, "woken {} times in 100 proposals", polls.get());
    });
}

#[test]
fn proposals_enter_the_log_in_the_order_of_their_calls() {
    run(8, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        let (leader, leadership) = cluster.leader().await;
        let group = cluster.group(leader);
        let mut proposals = FuturesOrdered::new();
        for secret in 1..30 {
            proposals.push_back(group.propose(leadership, opening(secret)));
        }
        let outcomes: Vec<_> = proposals.collect().await;
        let leases: Vec<u64> = outcomes
            .into_iter()
            .map(|outcomes| match outcomes.unwrap()[0] {
                Outcome::Opened { lease, .. } => lease.0,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(leases.is_sorted() && leases.len() == 29);
        // A proposal under a leadership that never was is refused.
        let wrong = Leadership { term: leadership.term + 1, ..leadership };
        let refused = group.propose(wrong, opening(1)).await;
        assert_eq!(refused, Err(ProposeError::NotLeader { hint: Some(NodeId(leader)) }));
    });
}

#[test]
fn a_single_node_is_its_own_quorum() {
    run(9, async {
        let cluster = Cluster::formed(1).await;
        cluster.open_lease(0).await;
        let (_, leadership) = cluster.leader().await;
        assert_eq!(cluster.group(1).confirm(leadership).await, Ok(()));
        cluster.kill(1);
        cluster.start(1).await.unwrap();
        let (_, again) = cluster.leader().await;
        assert!(again > leadership, "a restarted leader is elected anew");
        cluster.group(1).initialize([(1, member(1))].into()).await.unwrap();
        cluster.group(1).trigger_snapshot().await;
        until("the snapshot is there", || cluster.group(1).status().snapshot_index > 0).await;
    });
}

#[test]
fn many_bytes_cut_the_log_however_many_entries_it_may_keep() {
    run(10, async {
        let cluster = Cluster::formed_with(3, |spec| spec.snapshot_bytes = 4 * 1024).await;
        let (leader, _) = cluster.leader().await;
        let away = leader % 3 + 1;
        cluster.kill(away);
        for secret in 0..150 {
            cluster.open_lease(secret).await;
        }
        cluster.start(away).await.unwrap();
        cluster.agree().await;
        assert_eq!(cluster.running(away).seen.installed.get(), 1, "its entries were gone");
        // Each node restarts from its own snapshot and what is left of its log.
        (1..=3).for_each(|node| cluster.kill(node));
        for node in 1..=3 {
            cluster.start(node).await.unwrap();
            assert_eq!(cluster.running(node).seen.installed.get(), 1);
        }
        cluster.leader().await;
        cluster.agree().await;
    });
}

#[test]
fn a_deposed_leaders_proposals_all_end_and_it_follows_again() {
    for seed in 0..3 {
        run(20 + seed, async {
            let small = |spec: &mut GroupSpec| {
                spec.snapshot_entries = 20;
                spec.log_keep = 40;
            };
            let cluster = Cluster::formed_with(3, small).await;
            cluster.open_lease(0).await;
            let (old, leadership) = cluster.leader().await;
            let others: Vec<_> = cluster.machines.values().filter(|m| m.node.0 != old).collect();
            let others: Vec<_> = others.iter().map(|machine| machine.domain).collect();
            cluster.net.partition(&[cluster.machine(old).domain], &others);
            let group = cluster.group(old);
            let pending = (0..50).map(|secret| group.propose(leadership, opening(secret)));
            let mut pending = Box::pin(futures_util::future::join_all(pending));
            assert_eq!((&mut pending).now_or_never(), None);
            cluster.leader_but(old).await;
            for secret in 0..150 {
                cluster.open_lease(secret).await;
            }
            cluster.net.heal_all();
            for ended in pending.await {
                assert!(
                    matches!(ended, Err(ProposeError::Unknown | ProposeError::NotLeader { .. })),
                    "seed {seed}: {ended:?}"
                );
            }
            cluster.agree().await;
            let state = cluster.running(old).state;
            assert_eq!(state.borrow().leases_len(), 150, "seed {seed}");
        });
    }
}

/// Five voters: the old leader reaches one bridge, which reaches two more; the fifth is alone.
#[test]
fn a_connected_majority_elects_a_leader_past_the_old_one() {
    run(30, async {
        let cluster = Cluster::formed_with(5, |spec| spec.probe_quorum_loss = true).await;
        cluster.open_lease(0).await;
        let (old, _) = cluster.leader().await;
        let others: Vec<u64> = (1..=5).filter(|node| *node != old).collect();
        let (bridge, majority, alone) = (others[0], &others[..3], others[3]);
        let domain = |node: u64| cluster.machine(node).domain;
        for node in (1..=5).filter(|node| *node != alone) {
            cluster.net.partition(&[domain(alone)], &[domain(node)]);
        }
        for node in majority.iter().filter(|node| **node != bridge) {
            cluster.net.partition(&[domain(old)], &[domain(*node)]);
        }
        let before = cluster.world.now_ns();
        let (new, leadership) = cluster.leader_but(old).await;
        assert!(majority.contains(&new));
        let opened = cluster.group(new).propose(leadership, opening(1)).await;
        assert!(opened.is_ok(), "{opened:?}");
        let took = (cluster.world.now_ns() - before) / 1_000_000;
        assert!(took < 10_000, "{took} ms");
        cluster.net.heal_all();
        cluster.agree().await;
    });
}

/// A second shard of a running node, on the same WAL, disk and connections.
async fn second_shard(cluster: &Cluster, node: u64) -> (Rc<Group<SimEnv>>, Rc<RefCell<State>>) {
    let shard = ShardId(1);
    let running = cluster.running(node);
    let disk = cluster.machine(node).disk.borrow().clone();
    let state = Rc::new(RefCell::new(State::new(shard)));
    let spec = GroupSpec::new(CLUSTER, shard, NodeId(node));
    let wal = running.wal.shard(shard);
    let seen = Rc::new(Seen::default());
    let recovered = Recovered::default();
    let opening = Group::open(spec, wal, recovered, disk, running.peers, state.clone(), seen);
    let opened = cluster.world.spawn_in(cluster.machine(node).domain, opening).await;
    (opened.expect("nobody kills it").expect("it is new"), state)
}

#[test]
fn shards_share_a_log_and_connections_and_nothing_else() {
    run(11, async {
        let cluster = Cluster::formed(3).await;
        let mut second = Vec::new();
        for node in 1..=3 {
            second.push(second_shard(&cluster, node).await);
        }
        let members = (1..=3).map(|node| (node, member(node))).collect();
        second[1].0.initialize(members).await.expect("node 2 is a member");
        until("the second shard has a leader", || {
            second.iter().any(|(group, _)| group.leadership().is_some())
        })
        .await;
        let leads = |(group, _): &&(Rc<Group<SimEnv>>, _)| group.leadership().is_some();
        let (group, state) = second.iter().find(leads).expect("there is one");
        let leadership = group.leadership().expect("it leads");
        for secret in 0..50 {
            let both = (cluster.open_lease(secret), group.propose(leadership, opening(secret)));
            let (first, second) = futures_util::future::join(both.0, both.1).await;
            assert!(second.is_ok() && (secret == 0) == matches!(first, Outcome::Refused { .. }));
        }
        assert_eq!(group.confirm(leadership).await, Ok(()));
        cluster.agree().await;
        until("the second shard agrees", || {
            second.iter().all(|(_, other)| other.borrow().digest() == state.borrow().digest())
        })
        .await;
        assert_eq!(state.borrow().leases_len(), 49);
        // One shard moves its leadership, the other stays where it is.
        let (leader, before) = cluster.leader().await;
        let moved = second.iter().find(leads).expect("there is one").0.transfer(None).await;
        assert!(moved.is_ok(), "{moved:?}");
        assert_eq!(cluster.leader().await, (leader, before));
    });
}

#[test]
fn a_group_that_is_shut_down_answers_nobody_and_harms_nobody() {
    run(12, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        let (leader, leadership) = cluster.leader().await;
        let group = cluster.group(leader);
        let mut pending = Box::pin(group.propose(leadership, opening(1)));
        assert!((&mut pending).now_or_never().is_none());
        group.shutdown().await;
        let ended = pending.await;
        assert!(ended.is_ok() || ended == Err(ProposeError::Unknown), "{ended:?}");
        assert_eq!(group.leadership(), None);
        let refused = group.propose(leadership, opening(2)).await;
        assert!(matches!(refused, Err(ProposeError::NotLeader { .. })), "{refused:?}");
        cluster.leader_but(leader).await;
        cluster.kill(leader);
        cluster.open_lease(3).await;
        cluster.start(leader).await.unwrap();
        cluster.agree().await;
    });
}
