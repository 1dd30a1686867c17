//! What an operator does, under load.

use std::time::Duration;

use leasehold::{Client, HoldState};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;

use super::bare;
use super::rig::{self, Load};

#[test]
fn one_node_grows_to_five_and_shrinks_to_three_under_load() {
    let _alone = process::alone();
    let spec = Spec { nodes: 1, shards: 2, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let load = Load::start(&cluster);
    for ask in [1, 1, 2, 3] {
        rig::add(&mut cluster, &[ask]);
        load.goes_on();
    }
    let members = rig::done(&cluster, &[5], &["member", "list"]);
    assert_eq!(rig::standing(&members, "voter"), [1, 2, 3, 4, 5]);
    cluster.wait_ready(PATIENCE).expect("all are ready");
    for node in [1, 2] {
        rig::remove(&mut cluster, &[3, 4], node);
        load.goes_on();
    }
    let members = rig::done(&cluster, &[3], &["member", "list"]);
    assert_eq!(rig::standing(&members, "voter"), [3, 4, 5]);
    assert_eq!(rig::standing(&members, "removed"), [1, 2]);
    load.end(&cluster);
    // A restart of all of them: who they are is on disk, whatever their list of peers says.
    cluster.kill_all().expect("killed");
    for node in cluster.ids() {
        cluster.spawn(node).expect("started again");
    }
    cluster.wait_ready(PATIENCE).expect("ready again");
}

#[test]
fn all_three_nodes_are_replaced_under_load_and_no_session_is_lost() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let load = Load::start(&cluster);
    for old in [1, 2, 3] {
        let ask: Vec<u64> = cluster.ids().filter(|id| *id != old).collect();
        rig::replace(&mut cluster, &ask, old);
        rig::bury(&mut cluster, old);
        load.goes_on();
    }
    let members = rig::done(&cluster, &[4, 5, 6], &["member", "list"]);
    assert_eq!(rig::standing(&members, "voter"), [4, 5, 6]);
    load.end(&cluster);
}

/// A client that has been on one node since before the others came is not lost when that one goes.
#[test]
fn a_client_hears_of_new_nodes_where_it_is() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec { nodes: 1, ..Spec::default() }).expect("a cluster");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let endpoint = cluster.endpoint(1).to_string();
        let client = Client::connect(&endpoint).await.expect("a client");
        let session = client.session(Duration::from_secs(30)).expect("a session");
        let first = session.lock("before").acquire().await.expect("granted");
        // So that its other connection is made before, too.
        first.renew().await.expect("renewed");
        for _ in 0..2 {
            rig::add(&mut cluster, &[1]);
        }
        let known = || client.nodes().iter().map(|(node, _)| node.0).eq([1, 2, 3]);
        bare::until("the client was told of three nodes", known);
        cluster.kill(1).expect("killed");
        let second = session.lock("after").acquire().await.expect("granted");
        assert!(second.token() > first.token());
        assert_eq!(first.state(), HoldState::Held, "the session lives");
    });
}

#[test]
fn the_leader_is_removed_under_load() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let load = Load::start(&cluster);
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let ask: Vec<u64> = cluster.ids().filter(|id| *id != leader).collect();
    rig::remove(&mut cluster, &ask, leader);
    load.goes_on();
    load.end(&cluster);
}

#[test]
fn a_node_whose_disk_is_gone_is_replaced() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let load = Load::start(&cluster);
    cluster.kill(2).expect("killed");
    std::fs::remove_dir_all(cluster.data_dir(2)).expect("wiped");
    let new = rig::replace(&mut cluster, &[1, 3], 2);
    cluster.forget(2);
    load.goes_on();
    cluster.wait_ready(PATIENCE).expect("all are ready");
    assert_eq!(new, 4);
    load.end(&cluster);
}

#[test]
fn five_nodes_with_two_killed_go_on_and_leaders_are_spread_again() {
    let _alone = process::alone();
    let spec = Spec { nodes: 5, shards: 4, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let load = Load::start(&cluster);
    for node in [1, 2] {
        cluster.kill(node).expect("killed");
    }
    load.goes_on();
    for node in [1, 2] {
        cluster.spawn(node).expect("started again");
    }
    cluster.wait_ready(PATIENCE).expect("ready again");
    rig::done(&cluster, &[3], &["spread-leaders"]);
    bare::until("no node leads two of four shards", || {
        let leaders: Vec<_> = (0..4).filter_map(|shard| cluster.leader(shard)).collect();
        let distinct: std::collections::BTreeSet<_> = leaders.iter().collect();
        leaders.len() == 4 && distinct.len() == 4
    });
    load.end(&cluster);
}
