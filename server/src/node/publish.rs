//! Figures and health: what a core and its shards show, copied out a few times a second.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_protocol::ids::NodeId;
use openraft::AsyncRuntime;

use super::Production;
use crate::admin::{CoreHandle, Counter, Distribution, Gauge, Metrics, ShardReport};
use crate::env::Env;
use crate::net::{Connections, Router};
use crate::rt::executor::CoreGauges;
use crate::rt::net::AcceptCounters;
use crate::shard::Shard;
use crate::wal::Wal;

/// How often a core reports.
const EVERY: Duration = Duration::from_millis(250);

const NS_PER_US: u64 = 1_000;

/// Reports, as long as the core lives. One task.
pub(super) async fn run(
    metrics: CoreHandle,
    router: Rc<Router<Production>>,
    connections: Rc<Connections>,
    wal: Wal<Production>,
) {
    // The last known leader of each shard.
    let mut leaders = Vec::new();
    loop {
        let shards: Vec<_> = router.shards().cloned().collect();
        shards.iter().for_each(Shard::probe);
        publish_shards(&metrics, &shards, &mut leaders);
        publish_wal(&metrics, &wal);
        metrics.set(Gauge::ConnectionsClient, connections.len() as i64);
        let peers = router.peers();
        metrics.set(Gauge::ConnectionsPeer, peers.accepted_len() as i64);
        metrics.set(Gauge::PeerLinks, peers.links_len() as i64);
        metrics.follow(Counter::AcceptedClient, connections.accepted());
        router.tell_cores();
        <Production as Env>::Rt::sleep(EVERY).await;
    }
}

fn publish_shards(
    metrics: &CoreHandle,
    shards: &[Rc<Shard<Production>>],
    leaders: &mut Vec<NodeId>,
) {
    let (mut leases, mut holds, mut waiters) = (0, 0, 0);
    let (mut watches, mut history) = (0, 0);
    leaders.resize(shards.len(), NodeId(0));
    for (shard, last_leader) in shards.iter().zip(leaders.iter_mut()) {
        let raft = shard.group().status();
        let leader = shard.known_leader();
        let state = shard.state().borrow();
        leases += state.leases_len();
        holds += shard.holds_len();
        waiters += shard.waiters_len();
        watches += shard.watches_len();
        history += shard.history_len().0;
        let report = ShardReport {
            leader,
            leads: leader.is_some() && shard.group().leadership().is_some(),
            term: raft.term,
            applied_revision: state.revision().0,
            behind: raft.last_index.saturating_sub(raft.applied_index),
            begun: state.begun(),
            purged_index: raft.purged_index,
        };
        metrics.health().report(shard.id().0, &report);
        if let Some(leader) = leader.filter(|leader| leader != last_leader) {
            if *last_leader != NodeId(0) {
                metrics.count(Counter::LeaderChanges);
            }
            *last_leader = leader;
        }
    }
    metrics.set(Gauge::Leases, leases as i64);
    metrics.set(Gauge::Holds, holds as i64);
    metrics.set(Gauge::Waiters, waiters as i64);
    metrics.set(Gauge::Watches, watches as i64);
    metrics.set(Gauge::WatchHistory, history as i64);
}

fn publish_wal(metrics: &CoreHandle, wal: &Wal<Production>) {
    let wal = wal.metrics();
    metrics.follow(Counter::WalSyncs, wal.syncs);
    metrics.follow(Counter::WalBytes, wal.stored_bytes);
    metrics.follow_distribution(Distribution::WalSync, &wal.sync_micros, NS_PER_US);
    metrics.set(Gauge::WalSegments, wal.segments as i64);
    if let Some(amplification) = wal.write_amplification {
        metrics.set(Gauge::WalWriteAmplification, (amplification * 1_000.0) as i64);
    }
}

/// What the accepting threads count.
pub(super) struct Accepts {
    /// On the client port.
    pub(super) client: Arc<AcceptCounters>,
    /// On the peer port.
    pub(super) peer: Arc<AcceptCounters>,
}

/// Publishes what other threads count, and each core's longest gap between two turns of its loop;
/// a thread of its own, because a stalled core cannot.
pub(super) fn watch_threads(gauges: Vec<Arc<CoreGauges>>, accepts: Accepts, metrics: Arc<Metrics>) {
    std::thread::spawn(move || {
        let first = metrics.handle(0);
        let mut longest = vec![Duration::ZERO; gauges.len()];
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let failed = |counters: &AcceptCounters| counters.failed.load(Ordering::Relaxed);
            first.follow(Counter::AcceptErrors, failed(&accepts.client) + failed(&accepts.peer));
            let accepted = accepts.peer.accepted.load(Ordering::Relaxed);
            first.follow(Counter::AcceptedPeer, accepted);
            for (core, gauges) in gauges.iter().enumerate() {
                let gap = gauges.take_longest_gap();
                longest[core] = longest[core].max(gap);
                let metrics = metrics.handle(core as u32);
                metrics.set(Gauge::ReactorStall, gap.as_nanos() as i64);
                metrics.set(Gauge::ReactorStallMax, longest[core].as_nanos() as i64);
            }
        }
    });
}
