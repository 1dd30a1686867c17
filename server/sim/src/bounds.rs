//! How full the nodes' bounded things get (G9), looked at again and again.

use std::cell::RefCell;
use std::collections::BTreeMap;

use leasehold_bench::history::Peak;
use leasehold_protocol::limits::QUEUE_LEN_MAX;
use leasehold_server::shard::UNDER_WAY_MAX;

use crate::cluster::Cluster;
use crate::node::{CONNECTIONS_MAX, Hosted, wal_config};

/// The most that was ever seen, by node and thing, with the thing's limit.
#[derive(Debug, Default)]
pub(crate) struct Bounds {
    peaks: RefCell<BTreeMap<Thing, (u64, u64)>>,
}

/// A node, and what of it is bounded.
type Thing = (u64, &'static str);

impl Bounds {
    /// Looks at all nodes now.
    pub(crate) fn look(&self, cluster: &Cluster) {
        let waiters_max = cluster.params.keys as usize * QUEUE_LEN_MAX;
        for machine in &cluster.machines() {
            let Some(node) = machine.running() else { continue };
            let saw = |what, seen, limit| self.saw(machine.node, what, seen, limit);
            saw("connections", node.connections.len(), CONNECTIONS_MAX);
            let (config, wal) = (wal_config(), node.wal.metrics());
            // As docs/WAL.md says; spares are not among them.
            saw("segments of the log", wal.segments, config.segments_max + 6);
            // Votes and marks have 1 MiB more.
            let staged_max = config.staged_len_max as usize + (1 << 20);
            saw("bytes that wait for the log", wal.staged_bytes as usize, staged_max);
            for Hosted { shard, .. } in &*node.shards {
                saw("requests under way", shard.under_way_len(), UNDER_WAY_MAX);
                saw("waiters of a shard", shard.waiters_len(), waiters_max);
            }
        }
    }

    fn saw(&self, node: u64, what: &'static str, seen: usize, limit: usize) {
        let mut peaks = self.peaks.borrow_mut();
        let peak = peaks.entry((node, what)).or_insert((0, limit as u64));
        peak.0 = peak.0.max(seen as u64);
    }

    /// Everything, for the checker.
    pub(crate) fn peaks(&self) -> Vec<Peak> {
        let peak = |(&(node, name), &(seen, limit)): (&Thing, &(u64, u64))| Peak {
            node,
            name: name.to_owned(),
            seen,
            limit,
        };
        self.peaks.borrow().iter().map(peak).collect()
    }
}
