//! The shared checkers' verdict on a run: what the clients saw and what the nodes applied, as one
//! history.

use std::fmt;
use std::rc::Rc;

use leasehold_bench::check::modes::{self, ModeNeeds};
use leasehold_bench::check::{self, Needs, Report, watch};
use leasehold_bench::history::{
    FinalKey, FinalNode, FinalState, History as Records, OpKind, Peak, Record,
};
use leasehold_protocol::ids::ShardId;
use leasehold_protocol::limits::LEASES_MAX;
use leasehold_protocol::shard::shard_of;
use leasehold_server::rt::sim::SimWorld;

use crate::client::MODE_KEYS;
use crate::cluster::Cluster;
use crate::feed::Feed;
use crate::history::History;
use crate::params::RATE_PPM_MAX;

/// What every run must have at least.
const SEEN_MIN: u64 = 10;

/// Keys that every shard with keys must grant after the storm.
pub(crate) const SERVED_MIN: u64 = 15;

/// What the runs of an invocation must have together, by the checkers' own counters.
pub(crate) const JUDGED: [&str; 36] = [
    "G1.handovers",
    "G1.logged",
    "G2.tokens",
    "G2.logged",
    "G3.expiries",
    "G4.queued_grants",
    "G5.acked",
    "G5.logged",
    "G5.nodes",
    "G5.retries",
    "G6.changes",
    "G6.events",
    "G6.states",
    "G6.progress",
    "G6.no_quorum",
    "G7.ordered",
    "G7.reads",
    "G7.logged",
    "G8.served_each",
    "G9.peaks",
    "modes.grants",
    "modes.pairs",
    "modes.shared",
    "modes.permits",
    "modes.several",
    "modes.waited_for_several",
    "modes.downgrades",
    "modes.upgrades",
    "modes.limits",
    "modes.delays_begun",
    "modes.delays_ended",
    "modes.values",
    "modes.requests",
    "modes.expired",
    "modes.forced",
    "modes.closed",
];

/// A checker's counter, as `Coverage` takes it.
pub(crate) struct Judged(String);

impl fmt::Debug for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Shards that own at least one of the run's keys.
pub(crate) fn used_shards(cluster: &Cluster) -> Vec<ShardId> {
    let params = &cluster.params;
    let of_key = |key| shard_of(format!("key/{key}").as_bytes(), params.shards);
    let used: std::collections::BTreeSet<ShardId> = (0..params.keys).map(of_key).collect();
    used.into_iter().collect()
}

/// The state of all shards at the end, as records.
pub(crate) fn look(cluster: &Cluster, history: &History) {
    for shard in cluster.shards() {
        if let Some(end) = final_state(cluster, shard) {
            history.push(Record::Final(end));
        }
    }
    for (node, leases) in cluster.ledger.leases_peaks() {
        let (name, limit) = ("leases of a shard".to_owned(), LEASES_MAX as u64);
        history.push(Record::Peak(Peak { node, name, seen: leases, limit }));
    }
    for peak in cluster.bounds.peaks() {
        history.push(Record::Peak(peak));
    }
}

/// As the shard's leader has it; `None` if nobody leads.
fn final_state(cluster: &Cluster, shard: ShardId) -> Option<FinalState> {
    let leader = cluster.leader(shard)?.running()?;
    let now_ns = SimWorld::current().now_ns();
    let state = leader.shard(shard).state.borrow();
    let (keys, more) = state.list(b"", b"", usize::MAX);
    assert!(!more, "a run has few keys");
    let keys = keys.into_iter().filter(|info| !info.key.as_bytes().starts_with(MODE_KEYS));
    let keys = keys.map(|info| FinalKey {
        key: info.key,
        holders: info.holders.iter().map(|holder| (holder.lease.0, holder.token.0)).collect(),
        waiters: info.waiters.iter().map(|waiter| (waiter.lease.0, waiter.number.0)).collect(),
    });
    let (mut nodes, mut leaders) = (vec![], vec![]);
    for machine in cluster.members() {
        let Some(node) = machine.running() else { continue };
        let hosted = node.shard(shard);
        let state = hosted.state.borrow();
        let (revision, digest) = (state.revision().0, state.digest());
        nodes.push(FinalNode { node: machine.node, revision, digest });
        if hosted.group.leadership().is_some() {
            leaders.push(machine.node);
        }
    }
    Some(FinalState {
        invoke_ns: now_ns,
        return_ns: now_ns,
        shard: shard.0,
        revision: state.revision().0,
        keys: keys.collect(),
        nodes,
        leaders,
    })
}

/// All reports. Where clocks did what no clock may do, nothing is concluded from TTLs.
pub(crate) fn judge(
    cluster: &Cluster,
    history: &History,
    feeds: &[Rc<Feed>],
    clocks_lie: bool,
) -> Vec<Report> {
    let mut records = history.records(cluster.ledger.records());
    if clocks_lie {
        let timed = |record: &Record| {
            matches!(record, Record::Claim(_) | Record::Renewal(_) | Record::Lost(_))
        };
        records.records.retain(|record| !timed(record));
    }
    let all_used = used_shards(cluster).len() == cluster.params.shards as usize;
    let needs = Needs {
        tokens: SEEN_MIN,
        acked: SEEN_MIN,
        ordered: SEEN_MIN,
        logged: SEEN_MIN,
        reads: 1,
        nodes: cluster.members().len() as u64,
        served: if all_used { SERVED_MIN } else { 0 },
        peaks: 1,
        rate_ppm: RATE_PPM_MAX,
        ..Needs::default()
    };
    let mut reports = check::all(&records, &needs);
    let sure = if clocks_lie { Vec::new() } else { history.sure() };
    let mode_needs = ModeNeeds { clocks_lie, ..ModeNeeds::default() };
    reports.push(modes::check(&cluster.ledger.mode_steps(), &sure, &mode_needs));
    let watched: Vec<_> = feeds.iter().flat_map(|feed| feed.lives()).collect();
    reports.push(watch::judge(&watched, &cluster.ledger.keyed()));
    for report in &reports {
        let name = report.guarantee.split_whitespace().next().unwrap_or_default();
        for counter in &report.coverage {
            cluster.coverage.add(Judged(format!("{name}.{}", counter.name)), counter.seen);
        }
    }
    reports
}

/// Cancels that found out how their acquires ended.
pub(crate) fn cancels(records: &Records) -> u64 {
    let is_one = |op: &&leasehold_bench::history::Op| {
        matches!(op.kind, OpKind::Cancel { .. }) && op.outcome.is_ok()
    };
    records.ops().filter(is_one).count() as u64
}
