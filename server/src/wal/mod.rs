//! The write-ahead log of one core, shared by its shards: entries, votes and marks as bytes, made
//! durable in groups.
//!
//! It knows bytes, not locks and not Raft. It owns the segment files `wal-….seg` of its directory
//! and touches no other. What it promises:
//!
//! - records count in the order in which they were staged, over all shards; a record is reported
//!   durable only after everything staged before it is (G5);
//! - after a crash every record that was reported durable is there, and so is a prefix of the
//!   others: never a later one without an earlier one;
//! - the first failed write or sync is final: nothing is reported durable afterwards, and nothing
//!   is tried again;
//! - what waits, and the disk space in use, are bounded (G9).
//!
//! Sections by module: `record`, `header`, `checkpoint` are the format; `scan`, `replay`,
//! `survey` read it; `ledger` knows what is durable and which segments that needs; `staging`,
//! `writer`, `flush` write; `spares` makes and deletes segments; `recover` opens. The format and
//! the reasons are in `docs/WAL.md`.

mod checkpoint;
mod config;
mod error;
mod flush;
#[cfg(test)]
mod golden;
mod header;
#[cfg(test)]
mod hostile;
mod inner;
mod ledger;
mod metrics;
mod record;
mod recover;
mod replay;
mod scan;
mod signal;
mod spares;
mod staging;
mod survey;
mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use leasehold_protocol::ids::ShardId;
use openraft::AsyncRuntime;

pub use self::config::{BLOB_LEN_MAX, WalConfig, WalIdentity};
pub use self::error::{Failure, TornTail, WalError, WalFailed};
pub use self::metrics::WalMetrics;

use self::checkpoint::ShardState;
use self::inner::Inner;
use self::record::Op;
use self::recover::Opened;
use self::replay::Replay;
use self::survey::Survey;
use crate::env::Env;

/// What the log holds of one shard when it is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The last vote that was saved.
    pub vote: Option<Vec<u8>>,
    /// The last purge point: index and log id.
    pub purged: Option<(u64, Vec<u8>)>,
    /// The newest commit position that reached the disk: that one or an earlier one than the last
    /// saved.
    pub committed: Option<Vec<u8>>,
    /// The last snapshot mark.
    pub snapshot: Option<Vec<u8>>,
    /// The entries, contiguous and ascending.
    pub entries: Vec<(u64, Rc<[u8]>)>,
}

/// A core's log. Clones are handles to the same log.
pub struct Wal<E: Env> {
    inner: Rc<Inner<E>>,
}

impl<E: Env> Wal<E> {
    /// Opens the log in `disk`'s directory, or begins one if there is none, and starts its tasks.
    /// What is returned is durable. `salts` yields random numbers.
    pub async fn open(
        config: WalConfig,
        identity: WalIdentity,
        disk: E::Disk,
        salts: impl FnMut() -> u64 + 'static,
    ) -> Result<(Self, BTreeMap<ShardId, Recovered>), WalError> {
        let Opened { inner, writer, mut entries } =
            recover::open::<E>(config, identity, disk, Box::new(salts)).await?;
        let states = inner.ledger.borrow().shards().clone();
        let recovered = states.iter().map(|(shard, state)| {
            let entries = entries.remove(shard).unwrap_or_default();
            (*shard, Recovered::new(state, entries.into()))
        });
        let recovered = recovered.collect();
        // Their handles are dropped: the tasks end with the log, or with the executor.
        drop(E::Rt::spawn(flush::run(inner.clone(), writer)));
        drop(E::Rt::spawn(spares::make_spares(inner.clone())));
        drop(E::Rt::spawn(spares::delete_segments(inner.clone())));
        Ok((Self { inner }, recovered))
    }

    /// What a log holds that nobody writes to any more, without opening it: nothing on the disk is
    /// changed, so what was never acknowledged is still among it and may vanish.
    pub async fn inspect(
        identity: &WalIdentity,
        disk: &E::Disk,
    ) -> Result<BTreeMap<ShardId, Recovered>, WalError> {
        // The length decides only which unused segments could be used.
        let survey = Survey::take(disk, identity, 0).await?;
        let Replay { ledger, mut entries } = survey::load(disk, &survey).await?.replay;
        let recovered = ledger.shards().iter().map(|(shard, state)| {
            let entries = entries.remove(shard).unwrap_or_default();
            (*shard, Recovered::new(state, entries.into()))
        });
        Ok(recovered.collect())
    }

    /// A shard's part of the log.
    pub fn shard(&self, shard: ShardId) -> WalShard<E> {
        WalShard { inner: self.inner.clone(), shard }
    }

    /// What was cut off the log's end when it was opened, if anything was.
    pub fn torn_tail(&self) -> Option<&TornTail> {
        self.inner.torn_tail.as_ref()
    }

    /// The failure that ended the log, if one did. The node must then exit with its own code.
    pub fn failed(&self) -> Option<Arc<Failure>> {
        self.inner.failure()
    }

    /// Resolves when the log has failed.
    pub async fn until_failed(&self) -> Arc<Failure> {
        self.inner.progress.until(|| self.inner.has_failed()).await;
        self.inner.failure().expect("waited for it")
    }

    /// Registers who is asked for a snapshot when a shard pins more than `pin_bytes_max`: it should
    /// snapshot and purge up to that snapshot. Called now, and after each segment switch while it
    /// is so.
    pub fn on_pin(&self, ask: impl Fn(ShardId, u64) + 'static) {
        *self.inner.on_pin.borrow_mut() = Some(Rc::new(ask));
        self.inner.report_pins();
    }

    /// Figures.
    pub fn metrics(&self) -> WalMetrics {
        self.inner.metrics()
    }

    /// Makes everything durable, writes a seal, and ends the log. Later calls answer `Closed`.
    pub async fn close(&self) -> Result<(), WalFailed> {
        self.inner.closing.set(true);
        self.inner.work.notify();
        let ended = || self.inner.closed.get() || self.inner.has_failed();
        self.inner.progress.until(ended).await;
        match self.inner.failure() {
            Some(failure) => Err(WalFailed::Failed(failure)),
            None => Ok(()),
        }
    }
}

impl Recovered {
    fn new(state: &ShardState, entries: Vec<(u64, Rc<[u8]>)>) -> Self {
        Self {
            vote: state.vote.as_deref().map(<[u8]>::to_vec),
            purged: state.purged.as_ref().map(|(index, log_id)| (*index, log_id.to_vec())),
            committed: state.committed.as_deref().map(<[u8]>::to_vec),
            snapshot: state.snapshot.as_deref().map(<[u8]>::to_vec),
            entries,
        }
    }
}

impl<E: Env> Clone for Wal<E> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<E: Env> fmt::Debug for Wal<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wal").field("failed", &self.failed()).finish_non_exhaustive()
    }
}

/// A shard's part of a log. Clones are handles to the same part.
///
/// All of a shard's records count in the order of the calls, whatever their kind.
pub struct WalShard<E: Env> {
    inner: Rc<Inner<E>>,
    shard: ShardId,
}

impl<E: Env> WalShard<E> {
    /// The shard.
    pub fn id(&self) -> ShardId {
        self.shard
    }

    /// Stages entries at once; `done` is called when all of them, and everything staged earlier,
    /// are durable, or with the failure. On an error nothing was staged and `done` is not called.
    ///
    /// The payloads are shared until they are copied into the segment; do not change them. Panics
    /// if the entries do not follow the shard's last one.
    pub fn append(
        &self,
        entries: impl IntoIterator<Item = (u64, Rc<[u8]>)>,
        done: impl FnOnce(Result<(), WalFailed>) + 'static,
    ) -> Result<(), WalFailed> {
        self.refuse()?;
        let len_max = self.inner.config.entry_len_max();
        let entries = entries.into_iter().map(|(index, payload)| match payload.len() {
            len if len > len_max => Err(WalFailed::TooLong { len, len_max }),
            _ => Ok(Op::Entry { index, payload }),
        });
        let ops = entries.collect::<Result<Vec<Op>, WalFailed>>()?;
        self.inner.staging.borrow_mut().append(self.shard, ops, Box::new(done))?;
        self.inner.work.notify();
        Ok(())
    }

    /// Resolves when entries with `payload_len` bytes of payload in all, in at most `entries_len`
    /// entries, may be staged (or the log has ended; `append` then says so). Nothing is reserved:
    /// call `append` before the next await.
    pub async fn room(&self, entries_len: usize, payload_len: usize) {
        let len = payload_len + entries_len * record::ENTRY_OVERHEAD_MAX;
        let has_room = || self.inner.staging.borrow().has_room(len as u64);
        self.inner.progress.until(|| has_room() || self.inner.refusal().is_some()).await;
    }

    /// Saves the shard's vote; it is durable on return.
    pub async fn save_vote(&self, vote: &[u8]) -> Result<(), WalFailed> {
        let ticket = self.control(Op::Vote(blob(vote)))?;
        self.inner.durable(ticket).await
    }

    /// Drops the entries above `last_kept`, or all of them.
    pub fn truncate_after(&self, last_kept: Option<u64>) -> Result<(), WalFailed> {
        self.control(Op::Truncate(last_kept)).map(drop)
    }

    /// Drops the entries up to `index`. Their segments are deleted once this is durable and no
    /// other shard needs them.
    pub fn purge(&self, index: u64, log_id: &[u8]) -> Result<(), WalFailed> {
        self.control(Op::Purge { index, log_id: blob(log_id) }).map(drop)
    }

    /// Remembers the shard's commit position. It is written with the next record, or after a quiet
    /// while with the seal; a crash may lose it.
    pub fn committed(&self, committed: &[u8]) -> Result<(), WalFailed> {
        self.refuse()?;
        let mut staging = self.inner.staging.borrow_mut();
        let first = !staging.has_committed();
        staging.set_committed(self.shard, blob(committed));
        drop(staging);
        if first {
            self.inner.work.notify();
        }
        Ok(())
    }

    /// Records which published snapshot is the shard's newest.
    pub fn snapshot_mark(&self, mark: &[u8]) -> Result<(), WalFailed> {
        self.control(Op::Snapshot(blob(mark))).map(drop)
    }

    /// Resolves when everything staged so far, commit positions included, is durable.
    pub async fn flush(&self) -> Result<(), WalFailed> {
        self.refuse()?;
        let ticket = {
            let mut staging = self.inner.staging.borrow_mut();
            staging.promote_committed();
            staging.issued()
        };
        self.inner.work.notify();
        self.inner.durable(ticket).await
    }

    /// Bytes of older segments that stay because of this shard.
    pub fn pinned_bytes(&self) -> u64 {
        self.inner.pinned_bytes_of(self.shard)
    }

    fn control(&self, op: Op) -> Result<u64, WalFailed> {
        self.refuse()?;
        let ticket = self.inner.staging.borrow_mut().control(self.shard, op)?;
        self.inner.work.notify();
        Ok(ticket)
    }

    fn refuse(&self) -> Result<(), WalFailed> {
        self.inner.refusal().map_or(Ok(()), Err)
    }
}

fn blob(bytes: &[u8]) -> Rc<[u8]> {
    assert!(bytes.len() <= BLOB_LEN_MAX, "votes, log ids and marks are short");
    bytes.into()
}

impl<E: Env> Clone for WalShard<E> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shard: self.shard }
    }
}

impl<E: Env> fmt::Debug for WalShard<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WalShard").field("shard", &self.shard).finish_non_exhaustive()
    }
}
