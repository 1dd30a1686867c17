//! A client that is stopped past its TTL: no call that starts after it wakes reports the lock
//! held, and its stale token is refused by the store (G1, G2).

#[path = "support/fake.rs"]
mod fake;

use std::path::Path;
use std::time::Duration;

use fake::{FakeNode, Faults};
use leasehold_bench::check::{Needs, Verdict, fence};
use leasehold_bench::clock::now_ns;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::history::{FaultKind, Recorder};
use leasehold_bench::process;
use leasehold_bench::store::{SlowRoad, Store};
use leasehold_bench::worker::{Event, Order, Settings, Worker};
use rustix::process::Signal;

const TTL_MS: u64 = 2_000;
const ROUNDS: usize = 2;

fn granted(worker: &Worker) -> u64 {
    match worker.event(PATIENCE).expect("an event") {
        Event::Granted { token } => token,
        other => panic!("no grant, but {other:?}"),
    }
}

/// Writes, and returns whether the store took it.
fn write(worker: &mut Worker, text: &str) -> bool {
    let order = Order::Write(text.into());
    let wrote = worker.ask(&order, PATIENCE, |event| match event {
        Event::Wrote { taken, .. } => Some(*taken),
        _ => None,
    });
    wrote.expect("the store answers")
}

#[test]
fn a_client_stopped_past_its_ttl_knows_it_when_it_wakes() {
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    stop_clients(&cluster.endpoint_list());
}

/// The same on a node in this process: what fails here is the client's or the harness's fault.
#[test]
fn a_client_stopped_past_its_ttl_knows_it_on_a_fake_node() {
    let _alone = process::alone();
    let node = FakeNode::start(Faults::default());
    stop_clients(&node.addr().to_string());
}

fn stop_clients(endpoints: &str) {
    let recorder = Recorder::new();
    let store = Store::start(recorder.clone()).expect("a store");
    let road = SlowRoad::open().expect("a road");
    let start = |name: &str| {
        let settings = Settings {
            name: name.to_owned(),
            endpoints: endpoints.to_owned(),
            key: "stopped".to_owned(),
            ttl_ms: TTL_MS,
            store: store.addr(),
            slow_road: road.addr().expect("an address"),
        };
        let program = Path::new(env!("CARGO_BIN_EXE_demo"));
        let worker = Worker::start(program, &settings).expect("a worker");
        assert_eq!(worker.event(PATIENCE).expect("an event"), Event::Asked);
        worker
    };

    let mut holder = start("first");
    let mut token = granted(&holder);
    assert!(write(&mut holder, "before"));
    for round in 0..ROUNDS {
        let mut heir = start("next");
        // A renewal may be under way at any moment of the stop.
        std::thread::sleep(Duration::from_millis(300 * round as u64));
        recorder.fault(FaultKind::ClientStopped, 0);
        holder.signal(Signal::STOP).expect("stopped");
        let stopped_ns = now_ns();
        let next = granted(&heir);
        assert!(next > token, "{next} after {token}");
        assert!(write(&mut heir, "by the heir"));
        let past_ttl = Duration::from_millis(TTL_MS + 100);
        std::thread::sleep(past_ttl.saturating_sub(Duration::from_nanos(now_ns() - stopped_ns)));

        // Orders that wait for it when it wakes: the first thing it does is to look.
        holder.order(&Order::Check).expect("ordered");
        holder.signal(Signal::CONT).expect("continued");
        let held = holder.ask(&Order::Check, PATIENCE, |event| match event {
            Event::State { held, remaining_ms, .. } => Some(*held || *remaining_ms > 0),
            _ => None,
        });
        assert!(!held.expect("it answers"), "a woken client reports the lock held");
        assert!(!write(&mut holder, "too late"), "the store took a stale token");
        assert_eq!(store.newest("stopped").expect("written").text, "by the heir");
        (holder, token) = (heir, next);
    }
    let report = fence::check(
        &recorder.history(),
        &Needs { stale_refused: ROUNDS as u64, ..Needs::default() },
    );
    assert_eq!(report.verdict(), Verdict::Ok, "{report}");
    println!("{report}");
}
