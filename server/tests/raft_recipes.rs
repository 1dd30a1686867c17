//! Reports of faults whose schedule must be exact, tried on simulated nodes (docs/TESTING.md names
//! each).

mod raft_support;

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::LeaseId;
use leasehold_protocol::outcome::Outcome;

use leasehold_server::disk::sim::Tear;
use leasehold_server::raft::GroupSpec;
use leasehold_server::raft::types::Leadership;
use leasehold_server::rt::sim::{DomainId, SimRt};
use openraft::AsyncRuntime;
use raft_support::{Cluster, opening, run, until};

/// The leadership of one of these nodes, above any that was before.
async fn leader_of(cluster: &Cluster, nodes: &[u64], above: Leadership) -> (u64, Leadership) {
    let found = || {
        let leads = |node: &u64| Some((*node, cluster.group(*node).leadership()?));
        nodes.iter().filter_map(leads).find(|(_, leadership)| *leadership > above)
    };
    until("one of them leads", || found().is_some()).await;
    found().expect("just seen")
}

/// Opens leases through a leader, and returns what was acknowledged.
async fn write(
    cluster: &Cluster,
    leader: (u64, Leadership),
    secrets: std::ops::Range<u8>,
) -> Vec<LeaseId> {
    let mut acknowledged = Vec::new();
    for secret in secrets {
        let outcomes = cluster.group(leader.0).propose(leader.1, opening(secret)).await;
        let Outcome::Opened { lease, .. } = outcomes.expect("a majority is there")[0] else {
            panic!("no lease");
        };
        acknowledged.push(lease);
    }
    acknowledged
}

/// B24: two of five nodes are away; one of the three that acknowledge loses power and all that it
/// had not synced; then the other two of those are away, and the first two back. What the one
/// remembers decides alone: nothing that was acknowledged is lost, and nothing has two leaders.
#[test]
fn a_vote_and_a_tail_outlive_the_power_on_the_one_node_that_has_them() {
    for seed in 0..8 {
        run(300 + seed, async {
            let cluster = Cluster::formed(5).await;
            cluster.open_lease(0).await;
            let first = cluster.leader().await;
            let others: Vec<u64> = (1..=5).filter(|node| *node != first.0).collect();
            let (away, near) = others.split_at(2);
            // The one that loses power: the leader itself, or a follower of it.
            let weak = if seed % 2 == 0 { first.0 } else { near[0] };
            let strong: Vec<u64> =
                near.iter().copied().chain([first.0]).filter(|node| *node != weak).collect();
            let domains = |nodes: &[u64]| -> Vec<DomainId> {
                nodes.iter().map(|node| cluster.machine(*node).domain).collect()
            };
            let three: Vec<u64> = strong.iter().copied().chain([weak]).collect();

            cluster.net.partition(&domains(away), &domains(&three));
            let mut acknowledged = write(&cluster, first, 0..20).await;
            let machine = cluster.machine(weak);
            machine.running.take();
            cluster.world.kill(machine.domain);
            if seed < 4 {
                machine.disk.borrow().lose_power(&[], 0);
            } else {
                machine.disk.borrow().lose_power_at_random(Tear::Sector);
            }
            cluster.world.revive(machine.domain);
            cluster.net.partition(&domains(&strong), &domains(&[away, &[weak]].concat()));
            cluster.start(weak).await.expect("a lost tail is no damage");
            cluster.net.heal_all();
            cluster.net.partition(&domains(&strong), &domains(&[away, &[weak]].concat()));

            let back = [away, &[weak]].concat();
            let second = leader_of(&cluster, &back, first.1).await;
            assert_eq!(second.0, weak, "seed {seed}: only this one has what was acknowledged");
            acknowledged.extend(write(&cluster, second, 20..40).await);
            cluster.net.heal_all();
            cluster.agree().await;
            let distinct: BTreeSet<_> = acknowledged.iter().collect();
            assert_eq!(distinct.len(), 40, "seed {seed}: one lease was given twice");
            for node in 1..=5 {
                let state = cluster.running(node).state;
                let state = state.borrow();
                let lost: Vec<_> =
                    acknowledged.iter().filter(|id| state.lease(**id).is_none()).collect();
                assert!(lost.is_empty(), "seed {seed}: node {node} lost {lost:?}");
                assert_eq!(state.leases_len(), 40, "seed {seed}: node {node}");
            }
        });
    }
}

/// B92: a leader that was cut off has a tail that nobody else has; the others go on past what they
/// keep of their logs. When it is back it is sent a snapshot, over entries that conflict with it, and
/// loses its power before, while or after it installs it.
#[test]
fn a_snapshot_over_a_conflicting_log_survives_the_power_at_any_moment() {
    const ROUNDS: u64 = 16;
    let (mut before, mut after) = (0, 0);
    for round in 0..ROUNDS {
        let installed = run(400 + round, async {
            let small = |spec: &mut GroupSpec| {
                spec.snapshot_entries = 20;
                spec.log_keep = 40;
            };
            let cluster = Cluster::formed_with(3, small).await;
            cluster.open_lease(0).await;
            let old = cluster.leader().await;
            write(&cluster, old, 1..10).await;
            let others: Vec<u64> = (1..=3).filter(|node| *node != old.0).collect();
            let domain = |node: u64| cluster.machine(node).domain;
            cluster.net.partition(&[domain(old.0)], &[domain(others[0]), domain(others[1])]);
            let alone = cluster.group(old.0);
            // Shorter than the snapshot will be, or longer.
            for secret in 10..if round % 4 < 2 { 40 } else { 250 } {
                let group = Rc::clone(&alone);
                drop(SimRt::spawn(async move { group.propose(old.1, opening(secret)).await }));
            }
            let new = leader_of(&cluster, &others, old.1).await;
            let last = alone.status().last_index;
            write(&cluster, new, 40..200).await;
            assert!(last >= 40, "INVALID: the tail never reached the log, which ends at {last}");
            until("the others cut their logs", || cluster.group(new.0).status().purged_index > 20)
                .await;

            cluster.net.heal_all();
            let machine = cluster.machine(old.0);
            if round % 2 == 0 {
                SimRt::sleep(Duration::from_micros(200 * round)).await;
            } else {
                // The snapshot is in force; the log that it replaces is on the disk still.
                let installed = || cluster.running(old.0).seen.installed.get() > 0;
                while !installed() {
                    SimRt::sleep(Duration::from_micros(10)).await;
                }
                SimRt::sleep(Duration::from_micros(40 * (round / 2))).await;
            }
            let had = machine.running.take().expect("it runs").seen.installed.get();
            cluster.world.kill(machine.domain);
            machine.disk.borrow().lose_power_at_random(Tear::Sector);
            cluster.world.revive(machine.domain);
            cluster.start(old.0).await.expect("what was lost is no damage");
            cluster.agree().await;
            assert_eq!(cluster.running(old.0).state.borrow().leases_len(), 169, "round {round}");
            had > 0
        });
        if installed {
            after += 1;
        } else {
            before += 1;
        }
    }
    assert!(
        before > 2 && after > 2,
        "INVALID: the power went {before} times before, {after} after"
    );
}
