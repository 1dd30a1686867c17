//! Faults that no group may be harmed by: wiped disks, power cuts, impossible messages.

mod raft_support;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use leasehold_protocol::codec;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{DiskId, LeaseId, NodeId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::{
    self, AppendAnswer, AppendRequest, Ballot, EntryBody, LogEntry, MemberEntry, Members, Position,
    SnapshotAnswer, SnapshotBegin, SnapshotChunk, SnapshotCover, VoteAnswer,
};
use leasehold_server::disk::sim::{Io, Tear};
use leasehold_server::raft::peers::{Class, PeerError, PeerInfo, PeerService, Peers};
use leasehold_server::raft::types::EntryData;
use leasehold_server::raft::{ConfirmError, GroupFailed, GroupSpec};
use leasehold_server::rt::sim::{SimClock, SimRt};
use openraft::AsyncRuntime;
use raft_support::{Cluster, SHARD, SimEnv, addr, disk, disk_id, member, opening, run, sleep_ms};

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
        let reason = reason.expect("the engine stops");
        assert!(matches!(reason, GroupFailed::Storage(_)), "{reason}");
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
        assert!(matches!(reason, GroupFailed::Storage(_)), "{reason}");
        assert!(reason.to_string().contains("a snapshot: "), "{reason}");
        cluster.kill(away);
        cluster.start(away).await.expect("the disk works again");
        cluster.agree().await;
    });
}

#[test]
fn a_disk_that_fails_under_an_own_snapshot_is_told_as_such() {
    run(7, async {
        let cluster = Cluster::formed(1).await;
        cluster.open_lease(0).await;
        let group = cluster.group(1);
        cluster.machine(1).disk.borrow().fail(Io::Write, 0, io::ErrorKind::StorageFull);
        group.trigger_snapshot().await;
        let reason = SimRt::timeout(Duration::from_secs(5), group.failed()).await;
        let reason = reason.expect("the group stops");
        assert!(matches!(reason, GroupFailed::Storage(_)), "{reason}");
    });
}

#[test]
fn an_entry_that_is_not_understood_is_no_failure_of_the_disk() {
    run(8, async {
        let cluster = Cluster::formed(1).await;
        let (_, leadership) = cluster.leader().await;
        let group = cluster.group(1);
        let _unknown = group.propose(leadership, EntryData::from(vec![0xff; 9])).await;
        let reason = SimRt::timeout(Duration::from_secs(5), group.failed()).await;
        let reason = reason.expect("the group stops");
        assert!(matches!(reason, GroupFailed::NotUnderstood(_)), "{reason}");
    });
}

/// Answers a leader's and a candidate's requests with impossible votes and positions, in turn.
struct Liar {
    node: u64,
    appends: Cell<u64>,
    votes: Cell<u64>,
}

impl PeerService for Liar {
    fn handle(
        &self,
        _from: &PeerInfo,
        kind: u8,
        _body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        let far = ballot(u64::MAX, self.node, true);
        let answer = if kind == peer::APPEND {
            self.appends.set(self.appends.get() + 1);
            codec::encode(&match self.appends.get() % 4 {
                0 => AppendAnswer::HigherVote(far),
                // Beyond what was sent.
                1 => AppendAnswer::Partly(Some(at(1, 1, 1 << 40))),
                // Not higher.
                2 => AppendAnswer::HigherVote(ballot(0, 1, false)),
                // Before what was sent.
                _ => AppendAnswer::Partly(None),
            })
        } else {
            self.votes.set(self.votes.get() + 1);
            let last = Some(at(u64::MAX, 1, u64::MAX));
            let vote = if self.votes.get().is_multiple_of(2) { far } else { ballot(0, 0, false) };
            codec::encode(&VoteAnswer { vote, granted: false, last })
        };
        std::future::ready(Ok(answer)).boxed_local()
    }
}

/// Runs a liar in the place of a node that does not run.
fn impersonate(cluster: &Cluster, node: u64) -> Rc<Liar> {
    let machine = cluster.machine(node);
    machine.boot.set(machine.boot.get() + 1);
    let host = cluster.net.host(machine.domain);
    let peers = Peers::<SimEnv>::new(cluster.identity(node), host.clone(), SimClock, SHARD);
    let liar = Rc::new(Liar { node, appends: Cell::new(0), votes: Cell::new(0) });
    peers.set_service(liar.clone());
    let mut listener = host.listen(&addr(node)).expect("the address is free");
    let accept = async move {
        loop {
            let (reader, writer) = listener.accept().await;
            let peers = peers.clone();
            drop(SimRt::spawn(async move { peers.serve(reader, writer).await }));
        }
    };
    drop(cluster.world.spawn_in(machine.domain, accept));
    liar
}

#[test]
fn impossible_answers_of_a_member_are_not_believed() {
    run(5, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        let (leader, before) = cluster.leader().await;
        let node = leader % 3 + 1;
        let third = node % 3 + 1;
        cluster.kill(node);
        let liar = impersonate(&cluster, node);
        for secret in 0..20 {
            cluster.open_lease(secret).await;
            sleep_ms(100).await;
        }
        assert!(liar.appends.get() > 8, "{} answers only", liar.appends.get());
        assert_eq!(cluster.leader().await, (leader, before), "nobody was disturbed");
        // Nor does a candidate adopt what it is told.
        cluster.kill(leader);
        sleep_ms(3_000).await;
        assert!(liar.votes.get() > 2, "{} votes only", liar.votes.get());
        assert!(cluster.group(third).status().term < 1_000);
        cluster.start(leader).await.unwrap();
        cluster.open_lease(1).await;
        cluster.kill(node);
        cluster.start(node).await.unwrap();
        cluster.agree().await;
    });
}

async fn snapshot_step(
    cluster: &Cluster,
    from: u64,
    to: u64,
    kind: u8,
    body: Vec<u8>,
) -> SnapshotAnswer {
    let peers = cluster.running(from).peers;
    let call = async move {
        let patience = Duration::from_secs(2);
        peers.call(NodeId(to), Class::Snapshot, kind, &body, patience).await
    };
    let answer = cluster.world.spawn_in(cluster.machine(from).domain, call).await;
    let answer = answer.expect("nobody kills the node");
    codec::decode(&answer.expect("it is answered")).expect("as a snapshot's step")
}

#[test]
fn only_the_sender_of_a_snapshot_goes_on_with_it() {
    run(6, async {
        let cluster = Cluster::formed(3).await;
        cluster.open_lease(0).await;
        let (deposed, _) = cluster.leader().await;
        let to = deposed % 3 + 1;
        let present = to % 3 + 1;
        let node = |node| {
            let member = member(node);
            let (peer_addr, client_addr) = (member.peer_addr, member.client_addr);
            MemberEntry { node: NodeId(node), disk: disk_id(node), peer_addr, client_addr }
        };
        let members = Members { configs: vec![vec![1, 2, 3]], nodes: (1..=3).map(node).collect() };
        let begin = |vote: Ballot| {
            let last = Some(at(vote.term, vote.node.0, 500));
            let cover = SnapshotCover { last, members_at: None, members: members.clone() };
            codec::encode(&SnapshotBegin { shard: SHARD, vote, cover })
        };
        let chunk =
            |offset| codec::encode(&SnapshotChunk { shard: SHARD, offset, bytes: Vec::new() });
        let step = |from, kind, body| snapshot_step(&cluster, from, to, kind, body);
        let begun = begin(ballot(99, present, true));
        assert_eq!(step(present, peer::SNAPSHOT_BEGIN, begun).await, SnapshotAnswer::Continue);
        // What a deposed leader still had under way.
        let late = step(deposed, peer::SNAPSHOT_CHUNK, chunk(4_096)).await;
        assert_eq!(late, SnapshotAnswer::Restart);
        let late = step(deposed, peer::SNAPSHOT_BEGIN, begin(ballot(98, deposed, true))).await;
        assert!(matches!(late, SnapshotAnswer::HigherVote(_)), "{late:?}");
        let next = step(present, peer::SNAPSHOT_CHUNK, chunk(0)).await;
        assert_eq!(next, SnapshotAnswer::Continue);
        cluster.open_lease(1).await;
        cluster.agree().await;
    });
}
