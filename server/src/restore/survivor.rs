//! What the disk of one node says of its cluster.

use std::path::{Path, PathBuf};

use leasehold_core::backup::{Contents, ShardContents};
use leasehold_protocol::backup::BackupHeader;
use leasehold_protocol::ids::{ClusterId, ShardId};

use super::RestoreError;
use crate::disk::linux::LinuxDisk;
use crate::env::Clock as _;
use crate::error::Exit;
use crate::identity::Remains;
use crate::node::Production;
use crate::raft;
use crate::rt::clock::OsClock;
use crate::rt::executor::{self, ExecutorConfig};
use crate::wal::{Wal, WalIdentity};

/// Of one shard: its contents and the last entry's wall clock.
type Found = (ShardContents, u64);

/// One core's part of the directory.
struct Input {
    dir: PathBuf,
    identity: WalIdentity,
    shards: Vec<ShardId>,
}

/// Reads the data directory of a node that does not run.
pub(super) fn read(path: &Path) -> Result<Contents, RestoreError> {
    let remains = Remains::open(path)?;
    let (owner, record) = (&remains.owner, &remains.promise.record);
    let inputs: Vec<Input> = (0..owner.cores)
        .map(|core| Input {
            dir: remains.core_dir(core),
            identity: WalIdentity {
                cluster: record.cluster,
                node: owner.node,
                disk: owner.disk,
                core,
                cores: owner.cores,
                boot: 0,
            },
            shards: (0..record.shards).filter(|s| s % owner.cores == core).map(ShardId).collect(),
        })
        .collect();
    let failed = |shard: String, reason: String| RestoreError::Survivor {
        path: path.to_owned(),
        shard,
        reason,
    };
    let config = ExecutorConfig::new(i32::from(Exit::Watchdog.code()));
    let cluster = record.cluster;
    let started = executor::start(&config, inputs, move |_core, input| read_core(input, cluster));
    let started = started.map_err(|error| failed("of any core".to_owned(), error.to_string()))?;
    let mut found = Vec::new();
    for core in started.join() {
        let core = core.map_err(|error| failed("of a core".to_owned(), error.to_string()))?;
        found.extend(core.map_err(|(shard, reason)| failed(shard, reason))?);
    }
    found.sort_by_key(|(shard, _)| shard.about.shard);
    let wall_ms = last_sign_of_life(&found, OsClock.wall_ms());
    let header =
        BackupHeader { cluster, wall_ms, shards: record.shards, key_hash: record.key_hash };
    Ok(Contents { header, shards: found.into_iter().map(|(shard, _)| shard).collect() })
}

/// What the entries say. If all of them were cut from the log, the tokens: they begin at a clock's,
/// and rise slower. (A counter that was set ahead of the clock says nothing.)
fn last_sign_of_life(found: &[Found], now_ms: u64) -> u64 {
    let by_token = |(shard, _): &Found| (shard.about.last_token.0 >> 10).min(now_ms);
    match found.iter().map(|(_, wall_ms)| *wall_ms).max() {
        None | Some(0) => found.iter().map(by_token).max().unwrap_or(0),
        Some(wall_ms) => wall_ms,
    }
}

async fn read_core(input: Input, cluster: ClusterId) -> Result<Vec<Found>, (String, String)> {
    let Input { dir, identity, shards } = input;
    let of_core = |error: &dyn ToString| (format!("of core {}", identity.core), error.to_string());
    let disk = LinuxDisk::open(&dir).map_err(|error| of_core(&error))?;
    let inspected = Wal::<Production>::inspect(&identity, &disk).await;
    let mut logs = inspected.map_err(|error| of_core(&error))?;
    let mut found = Vec::new();
    for shard in shards {
        let log = logs.remove(&shard).unwrap_or_default();
        let remains = raft::remains(&disk, cluster, shard, log).await;
        let remains = remains.map_err(|error| (shard.to_string(), error.to_string()))?;
        found.push((remains.state.contents(), remains.wall_ms));
    }
    Ok(found)
}
