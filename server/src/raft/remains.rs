//! The state that one node's disk adds up to when no majority is left to say what was committed:
//! the newest sound snapshot, and every entry of the log behind it.
//!
//! Entries that were never committed are applied too. So the counters are never below those of any
//! state that this node can have taken part in, which is all that a forced recovery takes from it;
//! who holds what by this state may never have been so.

use std::io;

use leasehold_core::{Batch, State};
use leasehold_protocol::ids::{ClusterId, ShardId};
use openraft::EntryPayload;

use super::convert::{self, RecordError};
use super::snapshot::{LoadError, Owner, newest};
use crate::env::Disk;
use crate::wal::Recovered;

/// What is left of a shard.
#[derive(Debug)]
pub struct Remains {
    /// The state.
    pub state: State,
    /// The latest wall clock of an entry's proposer, in Unix milliseconds; 0 if the log is empty.
    pub wall_ms: u64,
}

/// Why a shard's remains are of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemainsError {
    /// The disk.
    #[error("the snapshots: {0}")]
    Disk(#[from] io::Error),
    /// The log does not reach down to the snapshot.
    #[error("the log begins after index {begins}, and the newest sound snapshot covers {covered}")]
    SnapshotMissing {
        /// What is missing from the log.
        begins: u64,
        /// What the snapshot covers; 0 if there is none.
        covered: u64,
    },
    /// An entry is not understood.
    #[error("entry {index} of the log: {reason}")]
    Entry {
        /// Its place.
        index: u64,
        /// Why.
        reason: String,
    },
    /// The log's purge point is not understood.
    #[error("the purge point of the log: {0}")]
    Purged(RecordError),
}

/// Reads a shard's snapshots on `disk`, and applies what its log holds beyond.
pub async fn remains<D: Disk>(
    disk: &D,
    cluster: ClusterId,
    shard: ShardId,
    log: Recovered,
) -> Result<Remains, RemainsError> {
    let loaded = newest(disk, Owner { cluster, shard }).await.map_err(|error| match error {
        LoadError::Io(error) => error,
        LoadError::Bad(error) => io::Error::new(io::ErrorKind::InvalidData, error),
    })?;
    let (mut state, covered) = match loaded {
        None => (State::new(shard), None),
        Some(loaded) => (loaded.state, loaded.meta.last_log_id),
    };
    let purged = log.purged.map(|(_, bytes)| convert::read_log_id(&bytes));
    let purged = purged.transpose().map_err(RemainsError::Purged)?.map(|purged| purged.index);
    let covered = covered.map(|covered| covered.index);
    if purged > covered {
        let (begins, covered) = (purged.unwrap_or(0), covered.unwrap_or(0));
        return Err(RemainsError::SnapshotMissing { begins, covered });
    }
    let mut wall_ms = 0;
    for (index, bytes) in log.entries {
        let failed = |reason: String| RemainsError::Entry { index, reason };
        let entry = convert::read_entry(&bytes).map_err(|error| failed(error.to_string()))?;
        let EntryPayload::Normal(data) = entry.payload else { continue };
        let batch = Batch::decode(data.bytes()).map_err(|error| failed(error.to_string()))?;
        wall_ms = wall_ms.max(batch.wall_ms);
        if covered.is_some_and(|covered| index <= covered) {
            continue;
        }
        let mut events = Vec::new();
        for command in &batch.commands {
            state.apply(batch.wall_ms, command, &mut events);
            events.clear();
        }
    }
    Ok(Remains { state, wall_ms })
}
