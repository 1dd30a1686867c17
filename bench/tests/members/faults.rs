//! Faults in the middle of a change.

use std::time::Duration;

use leasehold::{Client, MemberOperation, MemberPhase, MembersReply};
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

/// A dead node is being replaced, and the new one dies too, while the voters change: the change can
/// be given up, and then another node takes the place. The new one's disk is gone, or it comes back
/// and hears that it is no member.
#[test]
fn a_change_whose_new_node_dies_in_the_vote_is_given_up() {
    let _alone = process::alone();
    let spec = Spec { shards: 4, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let load = Load::start(&cluster);
    let mut old = 2;
    loses_its_disk(&mut cluster, old);
    let (mut given_up, mut tries) = (0, 0);
    let wanted = scaled(2, 12);
    while given_up < wanted {
        assert!(tries < 4 * wanted, "INVALID: {given_up} of {tries} died in the vote");
        tries += 1;
        let new = rig::spare(&mut cluster);
        let rest: Vec<u64> = cluster.ids().filter(|id| *id != old && *id != new).collect();
        let later = Duration::from_millis(tries * 25 % 150);
        if !stands_still(&mut cluster, &rest, (old, new), later) {
            // It was a voter everywhere already.
            cluster.forget(old);
            loses_its_disk(&mut cluster, new);
            old = new;
            continue;
        }
        given_up += 1;
        let wiped = given_up % 2 == 1;
        if wiped {
            loses_its_disk(&mut cluster, new);
        }
        let members = rig::done(&cluster, &rest, &["member", "abort"]);
        assert_eq!(members["done"], true, "{members}");
        assert!(rig::standing(&members, "voter").contains(&old), "{members}");
        assert!(rig::standing(&members, "removed").contains(&new), "{members}");
        load.goes_on();
        if wiped {
            cluster.forget(new);
        } else {
            cluster.spawn(new).expect("started again");
            rig::bury(&mut cluster, new);
        }
        let next = rig::replace(&mut cluster, &rest, old);
        cluster.forget(old);
        cluster.wait_ready(PATIENCE).expect("all are ready");
        load.goes_on();
        if given_up < wanted {
            loses_its_disk(&mut cluster, next);
            old = next;
        }
    }
    println!("given up in the vote {given_up} of {tries}");
    load.end(&cluster);
}

fn loses_its_disk(cluster: &mut Cluster, node: u64) {
    if cluster.pid(node).is_some() {
        cluster.kill(node).expect("killed");
    }
    std::fs::remove_dir_all(cluster.data_dir(node)).expect("wiped");
}

/// Begins the replacement and kills the new node that long after the voters began to change. False
/// if it was carried out nevertheless.
fn stands_still(
    cluster: &mut Cluster,
    rest: &[u64],
    (old, new): (u64, u64),
    later: Duration,
) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let client = Client::connect(&cluster.endpoint(rest[0]).to_string()).await;
        let client = client.expect("a client");
        let peer = cluster.addresses(new).peer.to_string();
        let (gone, comes) = (old.to_string(), new.to_string());
        let args = ["member", "replace", &gone, &comes, "--peer", &peer, "--no-wait"];
        rig::done(cluster, rest, &args);
        let vote = |_: &MembersReply, now: MemberOperation| now.phase == MemberPhase::Vote;
        if !comes_to(&client, vote).await {
            return false;
        }
        tokio::time::sleep(later).await;
        cluster.kill(new).expect("killed");
        let dead = format!("node {new} does not answer");
        let waits = |members: &MembersReply, now: MemberOperation| {
            let waits = members.progress.iter().any(|shard| shard.waits == dead);
            now.phase == MemberPhase::Vote && waits
        };
        comes_to(&client, waits).await
    })
}

/// Looks until the operation under way is so; false if it is over.
async fn comes_to(client: &Client, fits: impl Fn(&MembersReply, MemberOperation) -> bool) -> bool {
    let looks = async {
        loop {
            let members = client.members().await.expect("two of three answer");
            let Some(now) = members.operation else { return false };
            if fits(&members, now) {
                let done = members.progress.iter().filter(|shard| shard.done).count();
                println!("{:?}, done in {done} shards", now.phase);
                return true;
            }
            tokio::time::sleep(process::POLL).await;
        }
    };
    tokio::time::timeout(PATIENCE, looks).await.expect("it goes on or stands still")
}
