//! A follower that was away until the log was compacted comes back by snapshot while writes go
//! on, and ends with the others' digest.

use leasehold_bench::check::Needs;
use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::contention::{Contention, Plan};
use leasehold_bench::history::{FaultKind, Record, Recorder};
use leasehold_bench::judge::judge;
use leasehold_bench::{finals, process};
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::reply::ShardStatus;

/// Entries after which a shard takes a snapshot, and entries it keeps behind one.
const SNAPSHOT_ENTRIES: u64 = 50;
const KEPT_ENTRIES: u64 = 100;

fn own_status(cluster: &Cluster, id: u64) -> Option<ShardStatus> {
    let status = cluster.status_of(id).ok()?;
    let node = status.nodes.into_iter().find(|node| node.node == NodeId(id))?;
    node.shards.into_iter().next()
}

/// Waits for something that a node says about itself.
fn wait_for(cluster: &Cluster, id: u64, what: &str, fits: impl Fn(&ShardStatus) -> bool) {
    let deadline = Deadline::after(PATIENCE);
    loop {
        let status = own_status(cluster, id);
        if status.as_ref().is_some_and(&fits) {
            return;
        }
        assert!(!deadline.passed(), "node {id}: {what}; it says {status:?}");
        std::thread::sleep(process::POLL);
    }
}

#[test]
fn a_follower_past_compaction_returns_by_snapshot_under_load() {
    let _alone = process::alone();
    let spec = Spec::default()
        .flag("snapshot-entries", SNAPSHOT_ENTRIES)
        .flag("snapshot-keep-entries", KEPT_ENTRIES);
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let recorder = Recorder::new();
    let plan = Plan { clients: 8, keys: 4, hold_ms_max: 5, ..Plan::default() };
    let load = Contention::start(&cluster.endpoints(), &recorder, &plan);
    assert!(load.progress(50, PATIENCE), "no progress at first");

    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let follower = cluster.ids().find(|id| *id != leader).expect("there are three nodes");
    recorder.fault(FaultKind::FollowerKilled, follower);
    let before = own_status(&cluster, follower).expect("the follower answers").last_index;
    cluster.kill(follower).expect("killed");

    // What the follower needs must be gone from the leader's log, not only covered by a snapshot:
    // the log is cut later, once nobody is being sent what is to go.
    let gone = before + SNAPSHOT_ENTRIES;
    let cut = Deadline::after(PATIENCE);
    let purged = || cluster.metric(leader, "leasehold_shard_purged_index", "shard=\"0\"");
    while !purged().is_ok_and(|index| index > gone as f64) {
        assert!(!cut.passed(), "node {leader} cut nothing from its log");
        std::thread::sleep(process::POLL);
    }

    cluster.spawn(follower).expect("started again");
    wait_for(&cluster, follower, "did not install a snapshot", |status| {
        status.snapshot_index > before && status.applied_index > gone
    });
    let installed = cluster
        .metric(follower, "leasehold_snapshots_total", "kind=\"installed\"")
        .expect("metrics");
    assert!(installed >= 1.0, "the follower counts no installed snapshot");
    recorder.fault(FaultKind::SnapshotInstalled, follower);
    assert!(load.progress(100, PATIENCE), "writes stopped");

    load.freeze();
    let end = finals::read(&cluster.endpoints(), 0, PATIENCE).expect("a final state");
    recorder.push(Record::Final(end));
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!((load.lost(), load.stuck()), (0, 0), "lost sessions, calls without an answer");
    load.end();
    let needs = Needs {
        handovers: 100,
        acked: 200,
        ordered: 200,
        nodes: 3,
        faults: vec![(FaultKind::SnapshotInstalled, 1)],
        ..Needs::default()
    };
    let report = judge(&recorder, &needs).unwrap_or_else(|report| panic!("\n{report}"));
    println!("{report}");
}
