//! What a new leader inherits ends under it: more waits and leases than it handles in one go.

mod raft_support;

use std::rc::Rc;

use leasehold_core::Batch;
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::ids::{LeaseId, Mode, NodeId, Number, Secret, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_server::admin::Metrics;
use leasehold_server::env::Clock;
use leasehold_server::lease::CoreWheel;
use leasehold_server::rt::sim::{SimClock, SimRt};
use leasehold_server::shard::{Shard, ShardCore, run_wheel};
use leasehold_server::wal::WalConfig;
use leasehold_server::watch::Sizes;
use openraft::AsyncRuntime;
use raft_support::{Cluster, Running, SHARD, SimEnv, run, sleep_ms, until, wal_config};

const SECRET: Secret = Secret([3; 16]);
const KEY: &[u8] = b"wanted";
const WAITERS: usize = 1_500;
const WAIT_MS: u32 = 2_000;
/// Of the waiters' sessions: they outlive their waits.
const LONG_MS: u32 = 60_000;
const SHORT_MS: u32 = 6_000;

/// Runs the shard over a node's group.
fn start_shard(cluster: &Cluster, node: u64) -> impl Future<Output = Rc<Shard<SimEnv>>> + use<> {
    let running = cluster.running(node);
    async move { shard_of(running) }
}

fn shard_of(running: Running) -> Rc<Shard<SimEnv>> {
    let wheel = CoreWheel::new(SimClock.now());
    let metrics = Metrics::new(1, 1).handle(0);
    let core = ShardCore {
        shards_total: 1,
        clock: SimClock,
        wheel: wheel.clone(),
        metrics,
        watch_sizes: Sizes::of(1),
    };
    let shard = Shard::new(SHARD, running.group, running.state, running.peers, core);
    drop(SimRt::spawn(shard.clone().run_proposals()));
    drop(SimRt::spawn(shard.clone().run_deadlines()));
    drop(SimRt::spawn(shard.clone().run_leadership(Token(1))));
    drop(SimRt::spawn(run_wheel(wheel, vec![shard.clone()], SimClock)));
    shard
}

async fn propose(cluster: &Cluster, commands: Vec<Command>) -> Vec<Outcome> {
    let (node, leadership) = cluster.leader().await;
    let mut outcomes = Vec::new();
    for commands in commands.chunks(200) {
        let batch = Batch { wall_ms: 0, commands: commands.to_vec() };
        let proposed = cluster.group(node).propose(leadership, batch.encode().into()).await;
        outcomes.extend(proposed.expect("it leads"));
    }
    outcomes
}

fn open(ttl_ms: u32) -> Command {
    Command::Open { ttl_ms, secret: SECRET, label: vec![] }
}

async fn sessions(cluster: &Cluster, ttl_ms: u32, len: usize) -> Vec<LeaseId> {
    let opened = propose(cluster, vec![open(ttl_ms); len]).await;
    let lease = |outcome: &Outcome| match outcome {
        Outcome::Opened { lease, .. } => *lease,
        outcome => panic!("no lease: {outcome:?}"),
    };
    opened.iter().map(lease).collect()
}

fn acquire(lease: LeaseId) -> Command {
    let (number, floor, acks) = (Number(1), Number(0), vec![]);
    let caller = Caller { lease, secret: SECRET, number, floor, acks };
    let (mode, own, value) = (Mode::EXCLUSIVE, None, vec![]);
    Command::Acquire { caller, key: KEY.to_vec(), mode, own, value, wait_ms: WAIT_MS }
}

#[test]
fn a_new_leader_ends_the_waits_and_leases_it_inherited() {
    run(1, async {
        // Segments that take the longest entries.
        let wal = WalConfig { segment_len: 1 << 20, ..wal_config() };
        let cluster = Cluster { wal, ..Cluster::new(3) };
        cluster.form().await;
        propose(&cluster, vec![Command::Begin { token_base: Token(1) }]).await;
        let holder = sessions(&cluster, LONG_MS, 1).await[0];
        let waiters = sessions(&cluster, LONG_MS, WAITERS).await;
        sessions(&cluster, SHORT_MS, WAITERS).await;
        assert!(matches!(propose(&cluster, vec![acquire(holder)]).await[0], Outcome::Granted(_)));
        let queued = propose(&cluster, waiters.iter().map(|lease| acquire(*lease)).collect()).await;
        assert!(queued.iter().all(|outcome| matches!(outcome, Outcome::Queued { .. })));
        cluster.agree().await;

        let (former, _) = cluster.leader().await;
        let next = former % 3 + 1;
        let domain = cluster.machine(next).domain;
        let starting = start_shard(&cluster, next);
        let shard = cluster.world.spawn_in(domain, starting).await.expect("nobody kills it");
        assert_eq!(cluster.group(former).transfer(Some(NodeId(next))).await, Ok(NodeId(next)));
        let state = shard.state().clone();
        let left = || {
            let state = state.borrow();
            (state.walk_waits().flatten().count(), state.leases_len())
        };
        sleep_ms(u64::from(WAIT_MS)).await;
        assert_eq!(left(), (WAITERS, 2 * WAITERS + 1), "nothing ends before its time");
        until("the waits are over", || left().0 == 0).await;
        assert_eq!(left().1, 2 * WAITERS + 1, "the leases are not");
        until("the short leases are over", || left().1 == WAITERS + 1).await;
    });
}
