//! Cutting the log: after every snapshot what is older than followers that lag a little need, and
//! when it has become long, everything before the snapshot before.
//!
//! Bounds what the log takes on disk and in memory (DESIGN §6). Nobody else asks the engine for
//! cuts, and none asks for less than before. The engine keeps entries that are
//! on their way to a follower, however long they are: a follower that is alive but slower than what
//! is written would hold the log until the disk is full. So a cut that the engine has not made by
//! the next time is **forced**: replication streams that still begin before it end, and the engine
//! sends a snapshot instead. Decides nothing but that; what is cut is always in a snapshot.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::planted;
use openraft::AsyncRuntime;
use openraft::errors::Fatal;

use super::group::Engine;
use super::signal::Signal;
use super::snapshot::Snapshots;
use super::storage::Log;
use super::types::{RaftTypes, SnapshotMeta};
use crate::env::Env;

/// Longest wait for a snapshot before its log is cut; it goes on by itself.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_mins(1);

/// The last cut that was forced; shared with the replication streams.
#[derive(Default)]
pub(crate) struct Cuts {
    /// Entries up to this index go, whoever still wants them.
    upto: Cell<u64>,
    forced: Signal,
}

impl Cuts {
    fn force(&self, upto: u64) {
        self.upto.set(self.upto.get().max(upto));
        self.forced.raise();
    }

    /// How often a cut was forced. A stream notes it when it begins.
    pub(crate) fn version(&self) -> u64 {
        self.forced.version()
    }

    /// Waits until the version differs.
    pub(crate) fn since(&self, version: u64) -> impl Future<Output = ()> + '_ {
        self.forced.since(version)
    }

    /// Whether a stream that began at `version` and waits for the answer to entries from `first` on
    /// must end. Only a cut forced after it began ends it: the engine knows of earlier ones, so
    /// that no stream is ended for ever.
    pub(crate) fn overtook(&self, version: u64, first: u64) -> bool {
        self.version() != version && first <= self.upto.get()
    }
}

/// Cuts one group's log.
pub(crate) struct Compactor<E: Env> {
    raft: Engine<E>,
    snapshots: Rc<Snapshots<E>>,
    log: Log<E>,
    cuts: Rc<Cuts>,
    /// See `GroupSpec`.
    log_keep: u64,
    /// The last cut that a long log was asked for.
    asked: Cell<Option<u64>>,
}

impl<E: Env> Compactor<E> {
    pub(crate) fn new(
        raft: Engine<E>,
        snapshots: Rc<Snapshots<E>>,
        log: Log<E>,
        cuts: Rc<Cuts>,
        log_keep: u64,
    ) -> Rc<Self> {
        Rc::new(Self { raft, snapshots, log, cuts, log_keep, asked: Cell::new(None) })
    }

    /// Cuts the log after each snapshot, whoever asked for that: what stays connects to the one
    /// before it too. Ends with the engine.
    pub(crate) async fn follow(&self) -> Result<(), Fatal<RaftTypes<E>>> {
        loop {
            let published = self.snapshots.published.version();
            if let Some(upto) = self.spare() {
                self.raft.trigger().purge_log(upto).await?;
            }
            self.snapshots.published.since(published).await;
        }
    }

    /// The last entry that neither the older snapshot nor a follower that lags a little needs.
    fn spare(&self) -> Option<u64> {
        let last = |meta: SnapshotMeta| Some(meta.last_log_id?.index);
        let older = last(self.snapshots.previous()?)?;
        let newest = last(self.snapshots.current()?.meta)?;
        Some(older.min(newest.checked_sub(self.log_keep)?))
    }

    /// Takes a snapshot that covers what is applied now, and cuts the log after the one before it.
    pub(crate) async fn run(&self) -> Result<(), Fatal<RaftTypes<E>>> {
        self.force_overdue();
        let published = self.snapshots.published.version();
        self.raft.trigger().snapshot().await?;
        let taken = self.snapshots.published.since(published);
        if E::Rt::timeout(SNAPSHOT_TIMEOUT, taken).await.is_ok()
            && let Some(upto) = self.snapshots.previous().and_then(|meta| meta.last_log_id)
        {
            self.raft.trigger().purge_log(upto.index).await?;
            self.asked.set(self.asked.get().max(Some(upto.index)));
        }
        Ok(())
    }

    /// The cut that was asked for last is not made yet: somebody still wants those entries.
    fn force_overdue(&self) {
        let purged = self.log.purged().map(|purged| purged.index);
        // Planted (G8): whoever is slower than what is written holds the log until it is full.
        if self.asked.get() > purged && !planted!("cut-never-forced") {
            let upto = self.asked.get().expect("it is more than something");
            self.cuts.force(upto);
        }
    }
}
