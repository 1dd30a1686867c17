//! SIGTERM: each node leaves in order, exit 0 within 5 s, its leadership moved first so that
//! clients go on; the last ones too, although they are no majority any more.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use leasehold_bench::actor::Actor;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::history::Recorder;
use leasehold_bench::process;

/// The documented bound.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn every_node_leaves_in_order() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let stop = Arc::new(AtomicBool::new(false));
    let mut actor = Actor::new(1, cluster.endpoints(), Recorder::new(), stop);
    actor.open(60_000, PATIENCE).expect("a session");
    let held = actor.acquire("k", u32::MAX, PATIENCE).expect("granted");

    let first = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let status = cluster.terminate(first, LIMIT).expect("it ends");
    assert!(status.success(), "node {first} ended with {status}: {}", cluster.log(first));
    actor.release(&held, PATIENCE).expect("the lock outlived the move");

    let second = cluster.wait_leader(0, PATIENCE).expect("another leader");
    let third = cluster.ids().find(|id| *id != first && *id != second).expect("three nodes");
    for id in [second, third] {
        let status = cluster.terminate(id, LIMIT).expect("it ends without a majority");
        assert!(status.success(), "node {id} ended with {status}: {}", cluster.log(id));
    }
}
