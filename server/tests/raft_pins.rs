//! Who holds the log back, and what becomes of it: the disk use of a leader is bounded whatever a
//! follower or another shard does (DESIGN §6).

mod raft_support;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::{Batch, State};
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::ids::{LeaseId, Mode, NodeId, Number, Secret, ShardId};
use leasehold_protocol::limits::VALUE_LEN_MAX;
use leasehold_server::env::{Disk, Draft};
use leasehold_server::raft::types::EntryData;
use leasehold_server::raft::{Group, GroupSpec};
use leasehold_server::rt::sim::SimRt;
use leasehold_server::wal::{Recovered, WalConfig};
use openraft::AsyncRuntime;
use raft_support::{CLUSTER, Cluster, Seen, SimEnv, member, run, sleep_ms, until, wal_config};

const SEGMENT_LEN: u64 = 256 * 1024;
/// A shard that pins more segments is asked for a snapshot.
const PINNED_SEGMENTS: u64 = 8;
/// What a running log uses at most: what may be pinned, one segment until the snapshot is there,
/// one until a follower that is behind it is given up, and those being written and deleted.
const SEGMENTS_BOUND: usize = PINNED_SEGMENTS as usize + 5;

fn small_wal() -> WalConfig {
    WalConfig { pin_bytes_max: PINNED_SEGMENTS * SEGMENT_LEN, ..wal_config() }
}

/// A long entry that leaves no trace in the state: every command is refused.
fn bulk() -> EntryData {
    let refused = Command::Acquire {
        caller: Caller {
            lease: LeaseId(u64::MAX),
            secret: Secret([0; 16]),
            number: Number(1),
            floor: Number(0),
            acks: Vec::new(),
        },
        key: b"key".to_vec(),
        mode: Mode::EXCLUSIVE,
        own: None,
        value: vec![7; VALUE_LEN_MAX],
        wait_ms: 0,
    };
    Batch { wall_ms: 1, commands: vec![refused; 10] }.encode().into()
}

/// Proposes long entries until the leader's log took so many segments more; returns the most that
/// were in use at once.
async fn write_segments(cluster: &Cluster, leader: u64, segments: u64) -> usize {
    let running = cluster.running(leader);
    let leadership = running.group.leadership().expect("it leads");
    let before = running.wal.metrics().stored_bytes;
    let mut most = 0;
    while running.wal.metrics().stored_bytes < before + segments * SEGMENT_LEN {
        let proposed = running.group.propose(leadership, bulk());
        let proposed = SimRt::timeout(Duration::from_secs(5), proposed).await;
        match proposed.expect("a majority is fast") {
            Ok(_) => {}
            Err(error) => panic!("{error}, the WAL: {:?}", running.wal.failed()),
        }
        most = most.max(running.wal.metrics().segments);
    }
    most
}

/// A follower that is alive and answers heartbeats, on a link that carries less than is written.
#[test]
fn a_slow_follower_does_not_hold_the_leaders_log() {
    run(1, async {
        let cluster = Cluster { wal: small_wal(), ..Cluster::new(3) };
        cluster.form().await;
        cluster.agree().await;
        let (leader, leadership) = cluster.leader().await;
        let slow = leader % 3 + 1;
        let (from, to) = (cluster.machine(leader).domain, cluster.machine(slow).domain);
        // One window of the stream per 200 ms, whereas a segment is written in some 10 ms.
        let delay = Duration::from_millis(200);
        cluster.net.set_delay(from, to, delay, delay);
        let most = write_segments(&cluster, leader, 80).await;
        assert!(most > PINNED_SEGMENTS as usize, "INVALID: nothing was held back ({most})");
        assert!(most <= SEGMENTS_BOUND, "{most} segments in use");
        assert_eq!(cluster.leader_now(), Some((leader, leadership)), "the follower was never lost");
        cluster.net.reset_delays();
        cluster.agree().await;
        assert!(cluster.running(slow).seen.installed.get() > 0, "it got a snapshot");
    });
}

/// Opens a shard on a running node, on the same WAL, disk and connections.
async fn idle_shard(cluster: &Cluster, node: u64) -> Rc<Group<SimEnv>> {
    let shard = ShardId(1);
    let running = cluster.running(node);
    let disk = cluster.machine(node).disk.borrow().clone();
    let state = Rc::new(RefCell::new(State::new(shard)));
    let spec = GroupSpec::new(CLUSTER, shard, NodeId(node));
    let wal = running.wal.shard(shard);
    let seen = Rc::new(Seen::default());
    let recovered = Recovered::default();
    let opening = Group::open(spec, wal, recovered, disk, running.peers, state, seen);
    let opened = cluster.world.spawn_in(cluster.machine(node).domain, opening).await;
    let group = opened.expect("nobody kills it").expect("it is new");
    let pinning = [running.group, group.clone()];
    running.wal.on_pin(move |pinned, _bytes| {
        let group = pinning[pinned.0 as usize].clone();
        drop(SimRt::spawn(async move { group.trigger_snapshot().await }));
    });
    group
}

/// A shard with a handful of old entries and nothing to do, beside one that writes.
#[test]
fn an_idle_shard_does_not_hold_the_log_of_a_busy_one() {
    run(2, async {
        let cluster = Cluster { wal: small_wal(), ..Cluster::new(1) };
        cluster.form().await;
        let idle = idle_shard(&cluster, 1).await;
        idle.initialize([(1, member(1))].into()).await.expect("node 1 is a member");
        until("the idle shard has a leader", || idle.leadership().is_some()).await;
        let most = write_segments(&cluster, 1, 80).await;
        assert!(most > PINNED_SEGMENTS as usize, "INVALID: nothing was held back ({most})");
        assert!(most <= SEGMENTS_BOUND, "{most} segments in use");
        let status = idle.status();
        assert_eq!(status.purged_index, status.last_index, "nothing of it is left in the log");
        // It goes on from there.
        let leadership = idle.leadership().expect("it leads");
        assert!(idle.propose(leadership, bulk()).await.is_ok());
        sleep_ms(10).await;
    });
}

/// A shard that stands still has two snapshots, and either is enough when its whole log is cut.
#[test]
fn a_log_cut_to_its_end_is_gone_on_with_from_either_snapshot() {
    run(3, async {
        let cluster = Cluster::formed(1).await;
        for secret in 0..5 {
            cluster.open_lease(secret).await;
        }
        for _ in 0..3 {
            cluster.group(1).trigger_snapshot().await;
        }
        until("the log is cut", || {
            let status = cluster.group(1).status();
            status.purged_index == status.last_index
        })
        .await;
        let digest = cluster.running(1).state.borrow().digest();
        let disk = cluster.machine(1).disk.borrow().clone();
        let mut names = disk.list().await.expect("the disk works");
        names.retain(|name| name.starts_with("snapshot-"));
        assert_eq!(names.len(), 2, "{names:?}");
        for name in names {
            cluster.kill(1);
            let disk = cluster.machine(1).disk.borrow().clone();
            let sound = disk.read_at(&name, 0, 1 << 20).await.expect("the disk works");
            disk.rot(&name, 300, 4);
            cluster.start(1).await.expect("the other one will do");
            assert_eq!(cluster.running(1).state.borrow().digest(), digest);
            cluster.leader().await;
            let mut draft = disk.draft(&name).await.expect("the disk works");
            draft.write(&sound).await.expect("the disk works");
            draft.publish().await.expect("the disk works");
        }
        cluster.open_lease(6).await;
    });
}

/// A cut waits because what it takes is on its way, and the next snapshot alone would cut less.
#[test]
fn a_cut_that_waits_is_not_taken_back() {
    run(4, async {
        let small = |spec: &mut GroupSpec| (spec.snapshot_entries, spec.log_keep) = (20, 40);
        let cluster = Cluster::formed_with(3, small).await;
        cluster.agree().await;
        let (leader, leadership) = cluster.leader().await;
        let slow = leader % 3 + 1;
        let (from, to) = (cluster.machine(leader).domain, cluster.machine(slow).domain);
        cluster.net.set_delay(from, to, Duration::from_millis(80), Duration::from_millis(80));
        let status = || cluster.group(leader).status();
        while status().snapshot_index < 60 {
            cluster.open_lease(0).await;
        }
        let older = status().snapshot_index;
        cluster.open_lease(0).await;
        cluster.group(leader).trigger_snapshot().await;
        assert!(status().purged_index < older, "INVALID: the cut did not wait");
        let newest = status().snapshot_index;
        while status().snapshot_index == newest {
            cluster.open_lease(0).await;
        }
        let by_itself = status().snapshot_index - 40;
        assert!(by_itself < older, "INVALID: the new snapshot wants no smaller cut");
        assert_eq!(cluster.leader_now(), Some((leader, leadership)));
        cluster.net.reset_delays();
        cluster.agree().await;
        until("the first cut is made", || status().purged_index >= older).await;
    });
}
