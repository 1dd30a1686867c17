//! Leaders are killed while 32 clients want 8 keys (TTL 5 s): no acknowledged grant is lost,
//! tokens rise, sure intervals never overlap, no session is lost, the queue is served in order,
//! and all nodes end with one digest. `LEASEHOLD_ROUNDS` sets the number of kills.

use std::time::Duration;

use leasehold_bench::check::Needs;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::contention::{Contention, Plan};
use leasehold_bench::history::{FaultKind, Record, Recorder};
use leasehold_bench::judge::judge;
use leasehold_bench::{finals, process};
use rustix::process::Signal;

/// Grants that show that the cluster serves again.
const PROGRESS: u64 = 100;
/// Longer than a third of every TTL here: by then every lease was renewed once more.
const ONE_RENEWAL: Duration = Duration::from_secs(2);

fn rounds() -> u32 {
    match std::env::var("LEASEHOLD_ROUNDS") {
        Ok(text) => text.parse().expect("LEASEHOLD_ROUNDS is a number"),
        Err(_) => 3,
    }
}

fn progress(load: &Contention, what: &str) {
    assert!(load.progress(PROGRESS, PATIENCE), "no {PROGRESS} grants within {PATIENCE:?} {what}");
}

/// The plan's clients twice: over the bare protocol, whose answers show revisions, and over the
/// client library.
fn start(cluster: &Cluster, recorder: &Recorder, plan: &Plan) -> Contention {
    let mut load = Contention::start(&cluster.endpoints(), recorder, plan);
    let library = Plan { first_client: plan.clients, ..plan.clone() };
    load.add_library_clients(&cluster.endpoints(), recorder, &library);
    load
}

/// Freezes the load, reads the final state, and ends the load.
fn finish(cluster: &Cluster, load: Contention, recorder: &Recorder) {
    load.freeze();
    let end = finals::read(&cluster.endpoints(), 0, PATIENCE).expect("a final state");
    recorder.push(Record::Final(end));
    std::thread::sleep(ONE_RENEWAL);
    assert_eq!(load.lost(), 0, "sessions were lost");
    assert_eq!(load.stuck(), 0, "calls had no answer in two minutes");
    load.end();
}

#[test]
fn leaders_killed_under_contention() {
    let _alone = process::alone();
    let rounds = rounds();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let recorder = Recorder::new();
    let plan = Plan { clients: 16, abandon_in: 200, ..Plan::default() };
    let load = start(&cluster, &recorder, &plan);
    progress(&load, "at first");
    for round in 1..=rounds {
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        recorder.fault(FaultKind::LeaderKilled, leader);
        cluster.kill(leader).expect("killed");
        progress(&load, &format!("after kill {round}"));
        recorder.fault(FaultKind::Restarted, leader);
        cluster.spawn(leader).expect("started again");
        cluster.wait_ready(PATIENCE).expect("ready again");
        recorder.fault(FaultKind::Healed, 0);
        progress(&load, &format!("after restart {round}"));
    }
    finish(&cluster, load, &recorder);
    let needs = Needs {
        handovers: 200,
        tokens: 200,
        expiries: 1,
        queued_grants: 100,
        acked: 500,
        ordered: 500,
        reads: 20,
        served: 100,
        nodes: 3,
        retries: u64::from(rounds),
        faults: vec![(FaultKind::LeaderKilled, u64::from(rounds))],
        ..Needs::default()
    };
    let report = judge(&recorder, &needs).unwrap_or_else(|report| panic!("\n{report}"));
    println!("{rounds} leaders killed\n{report}");
}

#[test]
fn a_leader_stopped_for_twice_the_ttl_expires_nobody() {
    let _alone = process::alone();
    let ttl_ms = 2_000;
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let recorder = Recorder::new();
    let plan = Plan { clients: 6, keys: 4, ttl_ms, ..Plan::default() };
    let load = start(&cluster, &recorder, &plan);
    progress(&load, "at first");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    recorder.fault(FaultKind::LeaderStopped, leader);
    cluster.signal(leader, Signal::STOP).expect("stopped");
    std::thread::sleep(Duration::from_millis(2 * u64::from(ttl_ms)));
    progress(&load, "while the old leader is stopped");
    cluster.signal(leader, Signal::CONT).expect("continued");
    recorder.fault(FaultKind::Healed, 0);
    progress(&load, "after the old leader woke");
    std::thread::sleep(Duration::from_millis(u64::from(ttl_ms)));
    finish(&cluster, load, &recorder);
    let needs = Needs {
        handovers: 100,
        tokens: 100,
        queued_grants: 50,
        acked: 200,
        ordered: 200,
        served: 100,
        nodes: 3,
        faults: vec![(FaultKind::LeaderStopped, 1)],
        ..Needs::default()
    };
    let report = judge(&recorder, &needs).unwrap_or_else(|report| panic!("\n{report}"));
    println!("a leader stopped for {} ms\n{report}", 2 * ttl_ms);
}
