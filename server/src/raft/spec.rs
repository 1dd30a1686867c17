//! What a group is told when it is opened, and the engine's configuration that follows.

use std::time::Duration;

use leasehold_protocol::ids::{ClusterId, NodeId, ShardId};
use openraft::{Config, SnapshotPolicy};

/// The pace of a group. The same on every node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timings {
    /// From one heartbeat to the next. Default 30 ms.
    pub heartbeat: Duration,
    /// A follower stands for election after `election_max` without its leader and a random time
    /// between `election_min` and `election_max` more. More than `heartbeat`. Default 100 ms.
    pub election_min: Duration,
    /// See `election_min`; more than that. Default 150 ms.
    pub election_max: Duration,
}

impl Timings {
    /// A crashed leader is replaced within about this time: whatever must outlive that has to last
    /// longer.
    pub fn failover(&self) -> Duration {
        2 * self.election_max
    }
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(30),
            election_min: Duration::from_millis(100),
            election_max: Duration::from_millis(150),
        }
    }
}

/// Contradictory values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// See `Timings`.
    #[error(
        "heartbeat {heartbeat:?}, election {election_min:?} to {election_max:?}: each must be \
         greater than the one before, in whole milliseconds"
    )]
    Timings {
        /// The heartbeat.
        heartbeat: Duration,
        /// The shorter election time.
        election_min: Duration,
        /// The longer one.
        election_max: Duration,
    },
    /// See `GroupSpec`.
    #[error(
        "{log_keep} entries are kept behind a snapshot taken every {snapshot_entries}: at least \
         twice as many must stay, so that an older snapshot still connects to the log"
    )]
    LogKeep {
        /// Entries kept.
        log_keep: u64,
        /// Entries between snapshots.
        snapshot_entries: u64,
    },
    /// The engine refuses.
    #[error("{0}")]
    Engine(String),
}

/// One shard on this node.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// The cluster; snapshots of another one are refused.
    pub cluster: ClusterId,
    /// The shard.
    pub shard: ShardId,
    /// This node.
    pub node: NodeId,
    /// The pace.
    pub timings: Timings,
    /// A snapshot is taken after so many entries. Default 5,000.
    pub snapshot_entries: u64,
    /// ... or after so many bytes of batches, and then the log is cut regardless of `log_keep`.
    /// The log keeps about twice as many bytes in memory. Default 64 MiB.
    pub snapshot_bytes: u64,
    /// Entries that stay in the log though a snapshot covers them, for followers that lag a
    /// little. At least twice `snapshot_entries`. Default 10,000.
    pub log_keep: u64,
    /// Whether a leader without a quorum pauses its heartbeats now and then, so that voters whom
    /// it still reaches become free to elect another. Needed with five voters and more.
    pub probe_quorum_loss: bool,
}

impl GroupSpec {
    /// With every default.
    pub fn new(cluster: ClusterId, shard: ShardId, node: NodeId) -> Self {
        Self {
            cluster,
            shard,
            node,
            timings: Timings::default(),
            snapshot_entries: 5_000,
            snapshot_bytes: 64 * 1024 * 1024,
            log_keep: 10_000,
            probe_quorum_loss: false,
        }
    }

    /// The engine's configuration.
    pub(crate) fn config(&self) -> Result<Config, SpecError> {
        let Timings { heartbeat, election_min, election_max } = self.timings;
        let ms = |duration: Duration| duration.as_millis() as u64;
        if ms(heartbeat) == 0
            || ms(heartbeat) >= ms(election_min)
            || ms(election_min) >= ms(election_max)
        {
            return Err(SpecError::Timings { heartbeat, election_min, election_max });
        }
        let (log_keep, snapshot_entries) = (self.log_keep, self.snapshot_entries);
        if snapshot_entries == 0 || log_keep < 2 * snapshot_entries {
            return Err(SpecError::LogKeep { log_keep, snapshot_entries });
        }
        let config = Config {
            cluster_name: format!("shard {}", self.shard),
            heartbeat_interval: ms(heartbeat),
            election_timeout_min: ms(election_min),
            election_timeout_max: ms(election_max),
            enable_pre_vote: Some(true),
            // What was committed is saved lazily: a restarted leader must be elected anew.
            enable_leader_restore: Some(false),
            snapshot_policy: SnapshotPolicy::LogsSinceLast(snapshot_entries),
            // Only the compactor cuts: it may ask for more than `log_keep` would, and the engine
            // does not bear to be asked for less afterwards.
            max_in_snapshot_log_to_keep: u64::MAX,
            replication_lag_threshold: log_keep,
            install_snapshot_timeout: 60_000,
            quorum_loss_probe_interval: self.probe_quorum_loss.then(|| 4 * ms(election_max)),
            ..Config::default()
        };
        config.validate().map_err(|error| SpecError::Engine(error.to_string()))
    }
}
