//! Faults that no group may be harmed by: wiped disks, power cuts, impossible messages.

mod raft_support;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::codec;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{DiskId, LeaseId, NodeId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::{self, AppendRequest, Ballot, EntryBody, LogEntry, Position};
use leasehold_server::disk::sim::{Io, Tear};
use leasehold_server::raft::peers::{Class, PeerError};
use leasehold_server::raft::{ConfirmError, GroupSpec};
use leasehold_server::rt::sim::SimRt;
use openraft::AsyncRuntime;
use raft_support::{Cluster, SHARD, disk, opening, run, sleep_ms};

#[test]
fn a_wiped_voter_does_not_vote() {
    run(1, async {
        let cluster = Cluster::formed(3).await;
        for secret in 0..10 {
            cluster.open_lease(secret).await;
        }
        let (leader, _) = cluster.leader().await;
        let wiped = leader % 3 + 1;
        let third = wiped % 3 + 1;
        cluster.kill(wiped);
        let machine = cluster.machine(wiped);
        machine.disk.replace(disk(99));
        machine.disk_id.set(DiskId([0xee; 16]));
        cluster.start(wiped).await.unwrap();
        sleep_ms(500).await;
        cluster.open_lease(10).await;
        assert_eq!(cluster.running(wiped).state.borrow().revision().0, 0, "it gets no entries");

        let term = cluster.group(third).status().term;
        // With the leader gone, the third node and the wiped one are no quorum.
        cluster.kill(leader);
        sleep_ms(3_000).await;
        assert_eq!(cluster.leader_now(), None);
        assert_eq!(cluster.group(third).status().term, term, "nobody even tries: pre-votes fail");
        cluster.start(leader).await.unwrap();
        cluster.leader().await;
        assert!(matches!(cluster.open_lease(11).await, Outcome::Opened { .. }));
    });
}

/// A write that was acknowledged, and nothing else, is on every disk in the end.
#[test]
fn acknowledged_writes_survive_power_cuts() {
    let mut acknowledged = 0;
    for seed in 0..3 {
        run(10 + seed, async {
            let small = |spec: &mut GroupSpec| {
                spec.snapshot_entries = 100;
                spec.log_keep = 200;
            };
            let cluster = Rc::new(Cluster::formed_with(3, small).await);
            let leases = Rc::new(RefCell::new(BTreeSet::new()));
            cluster.open_lease(0).await;
            for _ in 0..4 {
                drop(SimRt::spawn(write(cluster.clone(), leases.clone())));
            }
            let rng = cluster.world.rng().clone();
            for _ in 0..12 {
                sleep_ms(rng.below(600)).await;
                let all = rng.chance(250);
                let one = rng.below(3) + 1;
                let victims: Vec<u64> = (1..=3).filter(|node| all || *node == one).collect();
                for node in &victims {
                    let machine = cluster.machine(*node);
                    machine.running.take();
                    cluster.world.kill(machine.domain);
                    machine.disk.borrow().lose_power_at_random(Tear::Sector);
                    cluster.world.revive(machine.domain);
                }
                sleep_ms(rng.below(400)).await;
                for node in &victims {
                    cluster.start(*node).await.expect("a torn tail is no damage");
                }
            }
            cluster.leader().await;
            cluster.open_lease(1).await;
            cluster.agree().await;
            let leases = leases.borrow();
            acknowledged += leases.len();
            for node in 1..=3 {
                let state = cluster.running(node).state;
                let state = state.borrow();
                let lost: Vec<_> = leases.iter().filter(|id| state.lease(**id).is_none()).collect();
                assert!(lost.is_empty(), "seed {seed}: node {node} lost {lost:?}");
            }
        });
    }
    assert!(acknowledged > 300, "{acknowledged} writes: the cluster hardly ran");
}

/// Opens leases as fast as they are acknowledged.
async fn write(cluster: Rc<Cluster>, leases: Rc<RefCell<BTreeSet<LeaseId>>>) {
    loop {
        sleep_ms(10).await;
        let Some((node, leadership)) = cluster.leader_now() else { continue };
        let group = cluster.group(node);
        let proposed =
            SimRt::timeout(Duration::from_secs(1), group.propose(leadership, opening(node as u8)));
        if let Ok(Ok(outcomes)) = proposed.await
            && let Outcome::Opened { lease, .. } = outcomes[0]
        {
            leases.borrow_mut().insert(lease);
        }
    }
}

fn ballot(term: u64, node: u64, committed: bool) -> Ballot {
    Ballot { term, node: NodeId(node), committed }
}

fn at(term: u64, leader: u64, index: u64) -> Position {
    Position { term, leader: NodeId(leader), index }
}

fn append(vote: Ballot, previous: Option<Position>, entries: &[Position]) -> Vec<u8> {
    let entry = |position: &Position| LogEntry { position: *position, body: EntryBody::Blank };
    codec::encode(&AppendRequest {
        shard: SHARD,
        vote,
        previous,
        committed: previous,
        entries: entries.iter().map(entry).collect(),
    })
}

#[test]
fn impossible_messages_of_a_member_are_refused() {
    run(2, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        let (leader, _) = cluster.leader().await;
        let liar = leader % 3 + 1;
        let vote = |vote, last, transfer| {
            codec::encode(&peer::VoteRequest { shard: SHARD, vote, last, transfer })
        };
        let lies: Vec<(u8, Vec<u8>)> = vec![
            (peer::APPEND, vec![1, 2, 3]),
            (peer::APPEND, append(ballot(u64::MAX, liar, true), None, &[])),
            (peer::APPEND, append(ballot(99, leader, true), None, &[])),
            (peer::APPEND, append(ballot(99, liar, false), None, &[])),
            (peer::APPEND, append(ballot(99, liar, true), Some(at(100, liar, 5)), &[])),
            (peer::APPEND, append(ballot(99, liar, true), Some(at(1, 1, u64::MAX)), &[])),
            (peer::APPEND, append(ballot(99, liar, true), Some(at(1, 1, 5)), &[at(99, liar, 9)])),
            (peer::APPEND, append(ballot(99, liar, true), Some(at(9, 1, 5)), &[at(8, 1, 6)])),
            (peer::VOTE, vote(ballot(u64::MAX, liar, false), None, false)),
            (peer::VOTE, vote(ballot(99, liar, true), None, false)),
            (peer::VOTE, vote(ballot(99, leader, false), None, false)),
            (peer::PRE_VOTE, vote(ballot(99, liar, false), Some(at(100, 1, 1)), false)),
            (peer::SNAPSHOT_CHUNK, vec![]),
        ];
        let peers = cluster.running(liar).peers;
        for (kind, body) in lies {
            let peers = peers.clone();
            let patience = Duration::from_secs(2);
            let lie = async move {
                peers.call(NodeId(leader), Class::Forward, kind, &body, patience).await
            };
            let answer = cluster.world.spawn_in(cluster.machine(liar).domain, lie).await.unwrap();
            match answer {
                Err(PeerError::Refused { code: ErrorCode::MALFORMED, .. }) => {}
                other => panic!("kind {kind}: {other:?}"),
            }
        }
        cluster.open_lease(1).await;
        cluster.agree().await;
        assert_eq!(cluster.leader().await.0, leader, "nobody was disturbed");
    });
}

#[test]
fn a_failing_disk_ends_leadership_and_the_others_go_on() {
    run(3, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        let (old, leadership) = cluster.leader().await;
        let group = cluster.group(old);
        cluster.machine(old).disk.borrow().fail(Io::Sync, 0, io::ErrorKind::Other);
        // The others are a quorum: the write may well succeed, but nothing after the failure does.
        let _either = group.propose(leadership, opening(1)).await;
        let reason = SimRt::timeout(Duration::from_secs(5), group.failed()).await;
        assert!(reason.expect("the engine stops").contains("failed"));
        assert_eq!(group.leadership(), None);
        assert_eq!(group.confirm(leadership).await, Err(ConfirmError::NotLeader));
        assert!(cluster.running(old).wal.failed().is_some());
        cluster.leader_but(old).await;
        cluster.kill(old);
        assert!(matches!(cluster.open_lease(2).await, Outcome::Opened { .. }));
        cluster.start(old).await.expect("the disk works again");
        cluster.agree().await;
    });
}

#[test]
fn a_disk_that_fails_under_an_arriving_snapshot_stops_the_node() {
    run(4, async {
        // Node 3 takes none of its own.
        let away = 3;
        let spec = |spec: &mut GroupSpec| {
            if spec.node.0 != 3 {
                spec.snapshot_entries = 20;
                spec.log_keep = 40;
            }
        };
        let cluster = Cluster::formed_with(3, spec).await;
        assert_ne!(cluster.leader().await.0, away);
        cluster.kill(away);
        for secret in 0..150 {
            cluster.open_lease(secret).await;
        }
        let disk = cluster.machine(away).disk.borrow().clone();
        disk.fail(Io::Write, 0, io::ErrorKind::StorageFull);
        cluster.start(away).await.expect("nothing is written to a draft at start");
        let group = cluster.group(away);
        let reason = SimRt::timeout(Duration::from_secs(5), group.failed()).await;
        let reason = reason.expect("the group stops");
        assert!(reason.starts_with("a snapshot: "), "{reason}");
        cluster.kill(away);
        cluster.start(away).await.expect("the disk works again");
        cluster.agree().await;
    });
}
