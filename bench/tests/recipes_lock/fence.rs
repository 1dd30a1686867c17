//! Tokens: what a lock without them loses, and locks of a cluster that is gone.

use std::path::Path;
use std::time::Duration;

use leasehold::{Client, Config};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::history::Recorder;
use leasehold_bench::process;
use leasehold_bench::store::{self, Answer, SlowRoad, Store};
use leasehold_bench::wire::Wire;
use leasehold_bench::worker::{Event, Order, Settings, Worker};
use leasehold_protocol::error::ErrorCode;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::Signal;

use crate::bare::{LIMIT, scaled};

const KEY: &str = "counter";
/// Writes to the unguarded counter all carry this token, so the store takes every one.
const NO_TOKEN: u64 = 0;

/// Two counters under one lock: one in a store that looks at tokens, one in a store that does not.
struct Counters {
    guarded: Store,
    unguarded: Store,
    road: SlowRoad,
    endpoints: String,
    /// Additions to the guarded one that the store took, and those it refused.
    taken: u64,
    refused: u64,
    additions: u64,
}

impl Counters {
    fn start(cluster: &Cluster) -> Self {
        Self {
            guarded: Store::start(Recorder::new()).expect("a store"),
            unguarded: Store::start(Recorder::new()).expect("a store"),
            road: SlowRoad::open().expect("a road"),
            endpoints: cluster.endpoint_list(),
            taken: 0,
            refused: 0,
            additions: 0,
        }
    }

    fn worker(&self, ttl_ms: u64, number: usize) -> Worker {
        let settings = Settings {
            name: format!("worker {number}"),
            endpoints: self.endpoints.clone(),
            key: KEY.to_owned(),
            ttl_ms,
            store: self.guarded.addr(),
            slow_road: self.road.addr().expect("an address"),
        };
        let worker = Worker::start(Path::new(env!("CARGO_BIN_EXE_demo")), &settings);
        let worker = worker.expect("a worker");
        assert_eq!(worker.event(PATIENCE).expect("an event"), Event::Asked);
        worker
    }

    fn read(store: &Store) -> u64 {
        store.newest(KEY).map_or(0, |taken| taken.text.parse().expect("a number"))
    }

    /// What a holder reads before it adds one.
    fn seen(&self) -> (u64, u64) {
        (Self::read(&self.guarded), Self::read(&self.unguarded))
    }

    /// The worker writes one more than what was `seen`, to both. It may be a stopped one, which
    /// writes when it goes on; its orders wait in its pipe.
    fn order(worker: &mut Worker, seen: (u64, u64)) {
        worker.order(&Order::Write((seen.0 + 1).to_string())).expect("ordered");
        worker.order(&Order::Post((seen.1 + 1).to_string())).expect("ordered");
    }

    /// Both writes have come; returns whether the guarded store took its own.
    fn settle(&mut self, worker: &Worker) -> bool {
        let taken = loop {
            match worker.event(PATIENCE).expect("it writes") {
                Event::Wrote { taken, .. } => break taken,
                Event::Lost { .. } | Event::Posted { .. } => {}
                other => panic!("it did not write: {other:?}"),
            }
        };
        let late = self.road.take().expect("handed over");
        let answer = store::put(self.unguarded.addr(), KEY, NO_TOKEN, &late.text);
        assert_eq!(answer.expect("it answers"), Answer::Taken);
        self.additions += 1;
        *(if taken { &mut self.taken } else { &mut self.refused }) += 1;
        taken
    }
}

fn granted(worker: &Worker) -> u64 {
    match worker.event(PATIENCE).expect("an event") {
        Event::Granted { token } => token,
        other => panic!("no grant, but {other:?}"),
    }
}

/// B43: holders that are stopped between reading and writing. With tokens nothing is lost; the
/// same writes without them lose additions, which shows that the test can tell.
#[test]
fn a_guarded_counter_loses_nothing_to_stopped_holders() {
    const TTL_MS: u64 = 2_000;
    let rounds = scaled(4, 60);
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let mut counters = Counters::start(&cluster);
    let mut rng = SmallRng::seed_from_u64(43);
    let (mut stopped, mut short) = (0, 0);
    let mut holder = counters.worker(TTL_MS, 0);
    let mut token = granted(&holder);
    for round in 1..=rounds {
        // A pause that nobody notices: the write is as good as without it.
        let heir = counters.worker(TTL_MS, round);
        let seen = counters.seen();
        let pause_ms = rng.random_range(0..200);
        holder.signal(Signal::STOP).expect("stopped");
        Counters::order(&mut holder, seen);
        std::thread::sleep(Duration::from_millis(pause_ms));
        holder.signal(Signal::CONT).expect("continued");
        // On a very busy machine a short pause may turn out long, and then this is refused: both
        // are counted, and the sums must agree with that.
        counters.settle(&holder);
        short += 1;

        // A pause past the TTL, with other holders meanwhile.
        let seen = counters.seen();
        holder.signal(Signal::STOP).expect("stopped");
        let next = granted(&heir);
        assert!(next > token, "{next} after {token}");
        let mut heir = heir;
        for _ in 0..rng.random_range(1..4) {
            let fresh = counters.seen();
            Counters::order(&mut heir, fresh);
            counters.settle(&heir);
        }
        Counters::order(&mut holder, seen);
        holder.signal(Signal::CONT).expect("continued");
        let taken = counters.settle(&holder);
        assert!(!taken, "the guarded store took a write with token {token} after {next}");
        stopped += 1;
        holder.kill().expect("killed");
        (holder, token) = (heir, next);
    }
    let (guarded, unguarded) = counters.seen();
    println!(
        "{stopped} long and {short} short stops: {} of {} additions refused, the guarded counter has lost {} of the \
         {} it took, the unguarded one {} of {}",
        counters.refused,
        counters.additions,
        counters.taken - guarded,
        counters.taken,
        counters.additions - unguarded,
        counters.additions
    );
    assert_eq!(guarded, counters.taken, "additions that were taken are lost");
    assert!(counters.refused >= stopped, "INVALID: no stale write came");
    assert!(unguarded < counters.additions, "INVALID: without tokens nothing was lost either");
}

/// Long enough that a call only meets it if it has waited for it.
const CALL_LIMIT: Duration = Duration::from_secs(5);

/// B50: all nodes lose their disks and found a new cluster on the old addresses: old handles get an
/// error that says so, at once, and never a success.
#[test]
fn handles_of_a_cluster_that_is_gone_succeed_in_nothing() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let (client, session, guards) = runtime.block_on(async {
        let config = Config::new(&cluster.endpoint_list()).expect("addresses");
        let client = Client::with_config(config.call_timeout(CALL_LIMIT)).await.expect("connected");
        let session = client.session(Duration::from_mins(5)).expect("in range");
        let first = session.lock("old/1").acquire().await.expect("free");
        let own = session.lock("old/2").own_lease(Duration::from_mins(5)).acquire().await;
        (client, session, (first, own.expect("free")))
    });
    let any = cluster.addresses(1).client;
    let old = Wire::connect(any, LIMIT).expect("connected").hello().cluster;

    cluster.kill_all().expect("killed");
    for id in cluster.ids() {
        std::fs::remove_dir_all(cluster.data_dir(id)).expect("wiped");
        cluster.spawn(id).expect("started");
    }
    cluster.wait_ready(PATIENCE).expect("a new cluster");
    let new = Wire::connect(any, LIMIT).expect("connected").hello().cluster;
    assert_ne!(new, old, "INVALID: not a new cluster");

    let wrong = ErrorCode::WRONG_CLUSTER;
    runtime.block_on(async {
        let (first, own) = guards;
        let renewed = own.renew().await.expect_err("there is no such hold");
        assert_eq!(renewed.failure().code, wrong, "a renewal: {renewed}");
        let read = client.get("old/1").await.expect_err("another cluster");
        assert_eq!(read.failure().code, wrong, "a read: {read}");
        let more = session.lock("old/3").acquire().await.expect_err("another cluster");
        assert_eq!(more.failure().code, wrong, "an acquire: {more}");
        // It goes on in the background as long as its lease may live, in case that the old cluster
        // comes back to these addresses; whoever waits for it hears at the deadline.
        let gone = first.release().await.expect_err("there is nothing to release");
        println!("a release: {gone}");
    });

    let refused = Wire::connect_to(any, old, LIMIT).expect_err("another cluster").to_string();
    assert!(refused.contains("another cluster") || refused.contains("wrong_cluster"), "{refused}");
    runtime.block_on(async {
        let client = Client::connect(&cluster.endpoint_list()).await.expect("connected");
        assert!(client.list("old/", 10).await.expect("readable").is_empty(), "a stranger's holds");
    });
}
