//! What clients are told, compared at once with what the nodes know.
//!
//! The shared checkers judge what a history proves: a renewal that a deposed leader acknowledged shows
//! only when the lease ends too early, a read that it answered only when somebody had heard of
//! something newer. The simulator sees all nodes, so it asks for more:
//!
//! - a read sees whatever any node had applied when it was asked for (`raft/rounds.rs`);
//! - after an acknowledged renewal the newest leader, if it led before the renewal was sent, grants
//!   the lease its TTL from then on: nobody else may have acknowledged it;
//! - a hold's value is the one that its acquire gave;
//! - a node that has applied the end of a wait tells it, on the connection that waits (G4).

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::{LeaseId, ShardId};
use leasehold_protocol::reply::{KeysReply, Reply};
use leasehold_server::rt::sim::SimWorld;

use crate::client::{Wait, value_of};
use crate::cluster::Cluster;
use crate::coverage::Seen;
use crate::params::RATE_PPM_MAX;

/// What rounding to whole milliseconds may take.
const ROUNDING: Duration = Duration::from_millis(2);

/// See the module.
pub(crate) struct Witness {
    cluster: Rc<Cluster>,
    /// Nothing is concluded from TTLs.
    clocks_lie: bool,
}

impl Witness {
    pub(crate) fn new(cluster: &Rc<Cluster>, clocks_lie: bool) -> Rc<Self> {
        Rc::new(Self { cluster: cluster.clone(), clocks_lie })
    }

    /// Something happened that a run is to have.
    pub(crate) fn saw(&self, seen: Seen) {
        self.cluster.coverage.count(seen);
    }

    /// A client saw what may not be.
    pub(crate) fn broken(&self, guarantee: &str, what: &str) {
        self.cluster.violations.add(guarantee, what);
    }

    /// The newest revision that any node has applied.
    pub(crate) fn latest(&self, shard: ShardId) -> u64 {
        self.cluster.ledger.shard(shard).latest()
    }

    /// A client's linearizable read, asked for when the newest revision was `latest`.
    pub(crate) fn read(&self, latest: u64, reply: &KeysReply) {
        if reply.revision.0 < latest {
            let what = format!("a read after revision {latest} was applied: {reply:?}");
            self.cluster.violations.add("G7", &what);
        }
        for info in &reply.keys {
            for holder in &info.holders {
                let value = value_of(holder.label.as_bytes(), info.key.as_bytes(), holder.number);
                if holder.value != value {
                    let what = format!("token {} has another value: {info:?}", holder.token.0);
                    self.cluster.violations.add("G7", &what);
                }
                self.cluster.coverage.add(Seen::ValueCompared, u64::from(!value.is_empty()));
            }
        }
    }

    /// What a lease holds, asked for when the newest revision was `latest`.
    pub(crate) fn holds(&self, latest: u64, reply: &Reply) {
        if let Reply::Holds(holds) = reply
            && holds.revision.0 < latest
        {
            let what = format!("holds read after revision {latest} was applied: {holds:?}");
            self.cluster.violations.add("G7", &what);
        }
    }

    /// The node has applied the end of the wait; and nothing has been wrong for a while.
    pub(crate) fn is_untold(&self, node: u64, wait: &Wait) -> bool {
        let machine = self.cluster.machine(node);
        let Some(node) = machine.running().filter(|_| self.cluster.storm_is_over()) else {
            return false;
        };
        let state = node.shard(wait.shard).state.borrow();
        state.holds(wait.lease).is_some_and(|holds| !holds.waits.contains(&wait.number))
    }

    /// It kept silent too long.
    pub(crate) fn lost_wake_up(&self, node: u64, wait: &Wait) {
        let (shard, lease, number) = (wait.shard, wait.lease.0, wait.number.0);
        let what =
            format!("shard {shard}: node {node} tells nobody how wait {number} of {lease} ended");
        self.cluster.violations.add("G4", &what);
    }

    /// A renewal that was sent at `sent_ns` is acknowledged.
    pub(crate) fn renewed(&self, (shard, lease): (ShardId, LeaseId), ttl_ms: u32, sent_ns: u64) {
        let Some(leader) = self.cluster.led_since(shard, sent_ns).filter(|_| !self.clocks_lie)
        else {
            return;
        };
        let Some(node) = leader.running() else { return };
        // It does not lead any more, or the lease ended since.
        let Some(left) = node.shard(shard).shard.lease_left(lease) else { return };
        let ttl = Duration::from_millis(ttl_ms.into());
        let passed = Duration::from_nanos(SimWorld::current().now_ns() - sent_ns);
        let by_clocks = passed.mul_f64(RATE_PPM_MAX as f64 / 1e6);
        if left + passed + by_clocks + ROUNDING < ttl {
            let what = format!(
                "shard {shard}: a renewal of lease {} sent at sent_ns: {sent_ns} was acknowledged, \
                 but node {}, which led before, gives it {left:?} of {ttl:?}",
                lease.0, leader.node
            );
            self.cluster.violations.add("G3", &what);
        }
        self.cluster.coverage.count(Seen::RenewalCompared);
    }
}
