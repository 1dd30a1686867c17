//! All nodes are killed with kill -9 and started again: every hold, token and place in a queue is
//! there (G5, G2, G4), and a session that died with its client still expires.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold_bench::actor::{Actor, Held};
use leasehold_bench::check::Needs;
use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::history::{FaultKind, FinalKey, Record, Recorder};
use leasehold_bench::judge::judge;
use leasehold_bench::{finals, process};

const TTL_MS: u32 = 30_000;
const SHORT_TTL_MS: u32 = 2_000;

struct Bench {
    cluster: Cluster,
    recorder: Recorder,
    stop: Arc<AtomicBool>,
}

impl Bench {
    fn actor(&self, client: u32, ttl_ms: u32) -> Actor {
        let (endpoints, recorder) = (self.cluster.endpoints(), self.recorder.clone());
        let mut actor = Actor::new(client, endpoints, recorder, Arc::clone(&self.stop));
        actor.open(ttl_ms, PATIENCE).expect("a session");
        actor
    }

    fn key(&self, name: &str) -> FinalKey {
        let state = finals::read(&self.cluster.endpoints(), 0, PATIENCE).expect("a state");
        state.keys.into_iter().find(|key| key.key == name).unwrap_or_default()
    }

    /// Starts a client that waits for a key, and waits until it is queued.
    fn waiter(&self, client: u32, name: &'static str, place: usize) -> JoinHandle<(Actor, Held)> {
        let mut actor = self.actor(client, TTL_MS);
        let thread = std::thread::spawn(move || {
            let held = actor.acquire(name, u32::MAX, PATIENCE * 4).expect("granted in the end");
            (actor, held)
        });
        let deadline = Deadline::after(PATIENCE);
        while self.key(name).waiters.len() < place {
            assert!(!deadline.passed(), "client {client} was not queued");
            std::thread::sleep(process::POLL);
        }
        thread
    }
}

#[test]
fn everything_is_there_after_all_nodes_were_killed() {
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let stop = Arc::new(AtomicBool::new(false));
    let mut bench = Bench { cluster, recorder: Recorder::new(), stop };

    let mut holder = bench.actor(1, TTL_MS);
    let held = holder.acquire("queue", u32::MAX, PATIENCE).expect("granted");
    let waiters: Vec<_> = (1..=3).map(|n| bench.waiter(1 + n, "queue", n as usize)).collect();
    let mut other = bench.actor(5, TTL_MS);
    let other_held = other.acquire("other", u32::MAX, PATIENCE).expect("granted");
    let mut dying = bench.actor(6, SHORT_TTL_MS);
    let dead_held = dying.acquire("orphan", u32::MAX, PATIENCE).expect("granted");
    let queue = bench.key("queue");
    assert_eq!(queue.holders, [(holder.lease(), held.token)]);
    assert_eq!(queue.waiters.len(), 3);

    dying.abandon();
    bench.recorder.fault(FaultKind::AllKilled, 0);
    bench.cluster.kill_all().expect("all killed");
    for id in bench.cluster.ids() {
        bench.cluster.spawn(id).expect("started again");
    }
    bench.cluster.wait_ready(PATIENCE).expect("ready again");

    assert_eq!(bench.key("queue"), queue, "holder and queue are as they were");
    assert_eq!(bench.key("other").holders, [(other.lease(), other_held.token)]);

    // The dead session still expires, and its key gets a higher token.
    let mut heir = bench.actor(7, TTL_MS);
    let inherited = heir.acquire("orphan", u32::MAX, PATIENCE).expect("granted after expiry");
    assert!(inherited.token > dead_held.token, "{inherited:?} after {dead_held:?}");

    // The queue is served in its old order. Waiters run on threads and renew by themselves.
    holder.release(&held, PATIENCE).expect("released");
    let mut token = held.token;
    for (waiter, (lease, _)) in waiters.into_iter().zip(queue.waiters) {
        let (mut actor, held) = waiter.join().expect("no panic");
        assert_eq!(actor.lease(), lease, "the next in the queue is granted");
        assert!(held.token > token, "{} after {token}", held.token);
        token = held.token;
        actor.release(&held, PATIENCE).expect("released");
    }
    other.idle(Duration::from_millis(50));
    other.release(&other_held, PATIENCE).expect("still its own");

    let end = finals::read(&bench.cluster.endpoints(), 0, PATIENCE).expect("a final state");
    bench.recorder.push(Record::Final(end));
    let needs = Needs {
        tokens: 7,
        expiries: 1,
        queued_grants: 3,
        acked: 10,
        nodes: 3,
        faults: vec![(FaultKind::AllKilled, 1)],
        ..Needs::default()
    };
    let report = judge(&bench.recorder, &needs).unwrap_or_else(|report| panic!("\n{report}"));
    println!("{report}");
}
