//! Faults in the middle of a change.

use std::time::Duration;

use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;

use super::bare::{self, scaled};
use super::rig::{self, Load};

/// Whoever drives the change is killed, at another moment each time; another node finishes it.
#[test]
fn a_change_is_finished_by_another_node_when_its_driver_dies() {
    let _alone = process::alone();
    let spec = Spec { shards: 3, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let load = Load::start(&cluster);
    for round in 0..scaled(3_u64, 20) {
        let driver = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let old = cluster.ids().find(|id| *id != driver).expect("another node");
        let ask: Vec<u64> = cluster.ids().collect();
        let new = rig::spare(&mut cluster);
        let peer = cluster.addresses(new).peer.to_string();
        let (gone, comes) = (old.to_string(), new.to_string());
        let args = ["member", "replace", &gone, &comes, "--peer", &peer, "--no-wait"];
        rig::done(&cluster, &ask, &args);
        std::thread::sleep(Duration::from_millis(round * 150));
        cluster.kill(driver).expect("killed");
        load.goes_on();
        cluster.spawn(driver).expect("started again");
        let rest: Vec<u64> = cluster.ids().filter(|id| *id != old && *id != driver).collect();
        bare::until("the change is over", || {
            let members = rig::done(&cluster, &rest, &["member", "list"]);
            members["operation"].is_null() && rig::standing(&members, "voter").contains(&new)
        });
        rig::bury(&mut cluster, old);
        cluster.wait_ready(PATIENCE).expect("ready again");
        load.goes_on();
    }
    load.end(&cluster);
}

/// B101: the leader is removed under load and killed in the window, again and again; afterwards
/// there is a leader, and the members are those that were asked for.
#[test]
fn a_leader_that_is_killed_while_it_is_removed_leaves_a_leader() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let load = Load::start(&cluster);
    for round in 0..scaled(3_u64, 30) {
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let rest: Vec<u64> = cluster.ids().filter(|id| *id != leader).collect();
        let gone = leader.to_string();
        rig::done(&cluster, &rest, &["member", "remove", &gone, "--no-wait"]);
        std::thread::sleep(Duration::from_millis(round * 40 % 400));
        cluster.kill(leader).expect("killed");
        cluster.spawn(leader).expect("started again");
        bare::until("it is removed", || {
            let members = rig::done(&cluster, &rest, &["member", "list"]);
            members["operation"].is_null() && rig::standing(&members, "removed").contains(&leader)
        });
        load.goes_on();
        rig::bury(&mut cluster, leader);
        rig::add(&mut cluster, &rest);
        load.goes_on();
    }
    load.end(&cluster);
}

/// B100: one node isolated, one being removed, others killed, in quick order under load: what was
/// acknowledged is there at the end.
#[test]
fn faults_around_a_removal_lose_nothing_acknowledged() {
    let _alone = process::alone();
    for round in 0..scaled(1, 10) {
        faults_around_a_removal(Duration::from_millis(round * 50));
    }
}

/// The nodes are killed that long after the removal began.
fn faults_around_a_removal(later: Duration) {
    let spec = Spec { nodes: 5, proxied_peers: true, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let load = Load::start(&cluster);
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let others: Vec<u64> = cluster.ids().filter(|id| *id != leader).collect();
    let (isolated, removed, killed) = (others[0], others[1], others[2]);
    cluster.links().isolate(isolated);
    load.goes_on();
    let gone = removed.to_string();
    // Three of the four that are left answer: it is begun.
    rig::done(&cluster, &[leader], &["member", "remove", &gone, "--no-wait"]);
    std::thread::sleep(later);
    cluster.kill(leader).expect("killed");
    cluster.kill(killed).expect("killed");
    // Two of five, or of four, are up and together: no majority, so nothing may be granted.
    cluster.links().heal();
    cluster.spawn(leader).expect("started again");
    cluster.spawn(killed).expect("started again");
    let rest: Vec<u64> = cluster.ids().filter(|id| *id != removed).collect();
    bare::until("it is removed", || {
        let members = rig::done(&cluster, &rest, &["member", "list"]);
        members["operation"].is_null() && rig::standing(&members, "removed") == [removed]
    });
    rig::bury(&mut cluster, removed);
    load.goes_on();
    load.end_after_an_outage(&cluster);
}
