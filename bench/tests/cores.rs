//! Two cores and four shards a node: requests that arrive on one core for a shard of the other,
//! Raft messages too, a change of leader, and an orderly stop of all cores together.

use std::time::Duration;

use leasehold::{Client, Guard, HoldState, Session};
use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;

const SHARDS: u32 = 4;
const KEYS: u32 = 32;
const TTL: Duration = Duration::from_secs(10);
/// The documented bound of a stop.
const LIMIT: Duration = Duration::from_secs(5);

async fn lock_all(session: &Session) -> Vec<Guard> {
    let mut guards = Vec::new();
    for key in 0..KEYS {
        let lock = session.lock(format!("key/{key}")).wait(PATIENCE);
        guards.push(lock.acquire().await.expect("granted"));
    }
    guards
}

async fn release_all(guards: Vec<Guard>) {
    for guard in guards {
        assert_eq!(guard.state(), HoldState::Held);
        guard.release().await.expect("still held");
    }
}

/// Every answered acquire was measured, wherever it arrived; every node has peers.
fn check_metrics(cluster: &Cluster) {
    let sum = |name: &str, label: &str| -> f64 {
        cluster.ids().map(|id| cluster.metric(id, name, label).expect("a page")).sum()
    };
    let asked = sum("leasehold_requests_total", "kind=\"acquire\"");
    let took = sum("leasehold_request_seconds_count", "kind=\"acquire\"");
    assert!(asked >= f64::from(KEYS) && asked.to_bits() == took.to_bits(), "{took} of {asked}");
    assert!(sum("leasehold_request_seconds_sum", "kind=\"acquire\"") > 0.0);
    assert!(sum("leasehold_commands_applied_total", "") >= f64::from(KEYS));
    assert!(sum("leasehold_reactor_stall_max_seconds", "") > 0.0);
    let deadline = Deadline::after(PATIENCE);
    for (name, label) in [("leasehold_connections", "peer"), ("leasehold_peer_links", "")] {
        for id in cluster.ids() {
            while cluster.metric(id, name, label).expect("a page") < 2.0 {
                assert!(!deadline.passed(), "node {id} shows too few {name}");
            }
        }
    }
}

#[test]
fn shards_of_all_cores_serve_survive_a_leader_and_stop_in_order() {
    let _alone = process::alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(two_cores());
}

async fn two_cores() {
    let spec = Spec { shards: SHARDS, ..Spec::default() }.flag("cores", 2);
    let mut cluster = Cluster::start(spec).expect("a cluster");
    // Each node leads a shard of a new cluster before any leads two.
    for shard in 0..SHARDS {
        let first = 1 + u64::from(shard) % 3;
        let deadline = Deadline::after(PATIENCE);
        while cluster.leader(shard) != Some(first) {
            assert!(!deadline.passed(), "shard {shard} is led by {:?}", cluster.leader(shard));
            tokio::task::yield_now().await;
        }
    }
    let client = Client::connect(&cluster.endpoint_list()).await.expect("a client");
    assert_eq!(client.shards(), SHARDS);
    let session = client.session(TTL).expect("a session");
    let guards = lock_all(&session).await;
    let mut used: Vec<_> =
        guards.iter().map(|guard| client.shard_of(guard.key().as_bytes())).collect();
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), SHARDS as usize, "every shard, so both cores, has keys");

    check_metrics(&cluster);

    // A client that was told only of a node that leads nothing.
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let follower = cluster.ids().find(|id| *id != leader).expect("three nodes");
    let other = Client::connect(&cluster.addresses(follower).client.to_string()).await;
    let read = other.expect("a client").get("key/0").await.expect("read");
    let token = read.info.holders.first().expect("held").token;
    assert_eq!(token, guards[0].token());

    cluster.kill(leader).expect("killed");
    let tokens: Vec<_> = guards.iter().map(Guard::token).collect();
    release_all(guards).await;
    let guards = lock_all(&session).await;
    for (guard, former) in guards.iter().zip(tokens) {
        assert!(guard.token() > former, "{}", guard.key());
    }
    release_all(guards).await;

    let rest: Vec<_> = cluster.ids().filter(|id| *id != leader).collect();
    for id in rest {
        let status = cluster.terminate(id, LIMIT).expect("it ends");
        assert!(status.success(), "node {id} ended with {status}: {}", cluster.log(id));
    }
}
