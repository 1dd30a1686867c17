//! What the handles and the tasks of one WAL share.
//!
//! No `RefCell` is borrowed across an await or while a callback runs. The failure is latched here:
//! set once, never cleared, checked by everything.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use leasehold_protocol::ids::ShardId;

use super::config::{WalConfig, WalIdentity};
use super::error::{Failure, TornTail, WalFailed};
use super::ledger::Ledger;
use super::metrics::{Counters, WalMetrics};
use super::signal::Signal;
use super::spares::Spares;
use super::staging::Staging;
use crate::env::{Disk, Env};

/// Called with a shard that pins too much and the bytes that it pins.
pub(crate) type OnPin = Rc<dyn Fn(ShardId, u64)>;

/// Shared state.
pub(crate) struct Inner<E: Env> {
    pub(crate) config: WalConfig,
    pub(crate) identity: WalIdentity,
    pub(crate) disk: E::Disk,
    salts: RefCell<Box<dyn FnMut() -> u64>>,
    pub(crate) staging: RefCell<Staging>,
    pub(crate) ledger: RefCell<Ledger>,
    pub(crate) spares: RefCell<Spares<<E::Disk as Disk>::Segment>>,
    pub(crate) counters: RefCell<Counters>,
    /// What was cut off when the log was opened.
    pub(crate) torn_tail: Option<TornTail>,
    failure: RefCell<Option<Arc<Failure>>>,
    pub(crate) on_pin: RefCell<Option<OnPin>>,
    pub(crate) closing: Cell<bool>,
    pub(crate) closed: Cell<bool>,
    /// Something was staged, or the log is closing: for the flush task.
    pub(crate) work: Signal,
    /// Something became durable or failed: for callers that wait.
    pub(crate) progress: Signal,
    /// Spares or deletable segments changed: for the upkeep tasks and the segment switch.
    pub(crate) upkeep: Signal,
}

impl<E: Env> Inner<E> {
    pub(crate) fn new(
        config: WalConfig,
        identity: WalIdentity,
        disk: E::Disk,
        salts: Box<dyn FnMut() -> u64>,
        ledger: Ledger,
        spares: Spares<<E::Disk as Disk>::Segment>,
    ) -> Self {
        let ranges = ledger.shards().iter().map(|(shard, state)| (*shard, state.range)).collect();
        Self {
            staging: RefCell::new(Staging::new(config.staged_len_max, ranges)),
            counters: RefCell::new(Counters::new(disk.written_bytes())),
            config,
            identity,
            disk,
            salts: RefCell::new(salts),
            ledger: RefCell::new(ledger),
            spares: RefCell::new(spares),
            torn_tail: None,
            failure: RefCell::new(None),
            on_pin: RefCell::new(None),
            closing: Cell::new(false),
            closed: Cell::new(false),
            work: Signal::default(),
            progress: Signal::default(),
            upkeep: Signal::default(),
        }
    }

    pub(crate) fn new_salt(&self) -> u64 {
        (*self.salts.borrow_mut())()
    }

    pub(crate) fn failure(&self) -> Option<Arc<Failure>> {
        self.failure.borrow().clone()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Why nothing can be staged any more, if so.
    pub(crate) fn refusal(&self) -> Option<WalFailed> {
        let failed = self.failure().map(WalFailed::Failed);
        failed.or_else(|| self.closing.get().then_some(WalFailed::Closed))
    }

    /// Latches the first failure: whoever waits is told, and nothing is acknowledged any more.
    pub(crate) fn fail(&self, failure: Failure) {
        if self.has_failed() {
            return;
        }
        tracing::error!(%failure, "the WAL failed; this node acknowledges nothing any more");
        let failure = Arc::new(failure);
        *self.failure.borrow_mut() = Some(failure.clone());
        let abandoned = self.staging.borrow_mut().abandon();
        for done in abandoned {
            done(Err(WalFailed::Failed(failure.clone())));
        }
        self.notify_all();
    }

    pub(crate) fn notify_all(&self) {
        self.work.notify();
        self.progress.notify();
        self.upkeep.notify();
    }

    /// Waits until everything up to the ticket is durable.
    pub(crate) async fn durable(&self, ticket: u64) -> Result<(), WalFailed> {
        let is_durable = || self.staging.borrow().is_durable(ticket);
        self.progress.until(|| is_durable() || self.has_failed()).await;
        match self.failure() {
            Some(failure) if !is_durable() => Err(WalFailed::Failed(failure)),
            _ => Ok(()),
        }
    }

    /// Errors if the log may not have another segment.
    pub(crate) fn demand_free_segment(&self) -> Result<(), Failure> {
        let segments = self.ledger.borrow().segments_len();
        if segments < self.config.segments_max {
            return Ok(());
        }
        let pinned = self.pinned_bytes();
        let message = format!("{segments} segments are in use; bytes pinned by shard: {pinned:?}");
        Err(Failure::new("add a segment to", "the log", &std::io::Error::other(message)))
    }

    pub(crate) fn pinned_bytes_of(&self, shard: ShardId) -> u64 {
        self.ledger.borrow().pinned_segments(shard) as u64 * self.config.segment_len
    }

    fn pinned_bytes(&self) -> Vec<(ShardId, u64)> {
        let shards: Vec<ShardId> = self.ledger.borrow().shards().keys().copied().collect();
        shards.into_iter().map(|shard| (shard, self.pinned_bytes_of(shard))).collect()
    }

    /// Asks every shard that pins too much for a snapshot.
    pub(crate) fn report_pins(&self) {
        let Some(on_pin) = self.on_pin.borrow().clone() else { return };
        for (shard, bytes) in self.pinned_bytes() {
            if bytes > self.config.pin_bytes_max {
                on_pin(shard, bytes);
            }
        }
    }

    pub(crate) fn metrics(&self) -> WalMetrics {
        let counters = self.counters.borrow();
        WalMetrics {
            syncs: counters.syncs,
            sync_micros: counters.sync_micros.clone(),
            records: counters.records,
            stored_bytes: counters.stored_bytes,
            seals: counters.seals,
            segments: self.ledger.borrow().segments_len(),
            segments_made: counters.segments_made,
            staged_bytes: self.staging.borrow().staged_len(),
            pinned_bytes: self.pinned_bytes(),
            write_amplification: counters.write_amplification(self.disk.written_bytes()),
        }
    }
}
