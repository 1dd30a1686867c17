//! Placeholder of the composition root: holds the data directory and serves operators.

use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::ids::NodeId;

use crate::admin::{self, Metrics, Phase, ShardReport};
use crate::config::Config;
use crate::error::NodeError;
use crate::identity::DataDir;
use crate::shutdown::Shutdown;

/// Runs until the shutdown.
pub fn run(config: Config, shutdown: Shutdown, metrics: Arc<Metrics>) -> Result<(), NodeError> {
    let dir = DataDir::open(&config)?;
    if let Some(address) = config.process.admin_listen {
        admin::start(address, metrics.clone())?;
    }
    tracing::info!(node = %dir.owner().node, boot = dir.boot(), "started");
    metrics.health().enter(Phase::Running);
    let report = ShardReport { leader: Some(NodeId(1)), begun: true, ..ShardReport::default() };
    while !shutdown.wait_timeout(Duration::from_millis(200)) {
        (0..config.cluster.shards).for_each(|shard| metrics.health().report(shard, &report));
    }
    metrics.health().enter(Phase::Stopping);
    Ok(())
}
