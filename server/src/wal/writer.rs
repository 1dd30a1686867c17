//! The active segment: stores records, syncs them, goes on to the next segment.
//!
//! Owned by one task (recovery, then the flush task), which is what makes "never store while a
//! sync is in flight" true: both need `&mut Writer`.

use std::rc::Rc;

use leasehold_protocol::ids::ShardId;
use leasehold_protocol::planted;
use openraft::AsyncRuntime;
use openraft_rt::Instant;

use super::checkpoint::Checkpoint;
use super::error::Failure;
use super::header::{Cut, HEADER_LEN, Header, segment_name};
use super::inner::Inner;
use super::record::{Op, Record, SEAL_LEN};
use crate::env::{Disk, Env, Segment};

type SegmentOf<E> = <<E as Env>::Disk as Disk>::Segment;

/// See the module.
pub(crate) struct Writer<E: Env> {
    inner: Rc<Inner<E>>,
    segment: SegmentOf<E>,
    number: u64,
    salt: u64,
    /// Where the next record goes.
    offset: u64,
    /// Everything before is durable.
    synced_offset: u64,
    next_seq: u64,
    durable_seq: u64,
    unsynced: Vec<(ShardId, Op)>,
    sealed: bool,
}

impl<E: Env> Writer<E> {
    /// Takes a blank segment into use: stores its header and makes it durable, alone. The header
    /// says where the log so far ends, so all of that must be durable already.
    pub(crate) async fn begin(
        inner: Rc<Inner<E>>,
        (number, mut segment): (u64, SegmentOf<E>),
        prev: Cut,
        base: Cut,
    ) -> Result<Self, Failure> {
        let salt = inner.new_salt();
        let first_seq = prev.next_seq.max(1);
        let identity = inner.identity;
        let segment_len = segment.len();
        let header = Header { identity, number, segment_len, salt, first_seq, prev, base };
        segment.store(0, &header.encode());
        timed_sync(&inner, &segment, number, 0..HEADER_LEN).await?;
        inner.ledger.borrow_mut().begin_segment(number, base);
        Ok(Self {
            inner,
            segment,
            number,
            salt,
            offset: HEADER_LEN,
            synced_offset: HEADER_LEN,
            next_seq: first_seq,
            durable_seq: first_seq - 1,
            unsynced: Vec::new(),
            sealed: false,
        })
    }

    /// True if the record fits and leaves room for a seal.
    pub(crate) fn fits(&self, op: &Op) -> bool {
        self.offset + op.stored_len() + SEAL_LEN <= self.segment.len()
    }

    /// True if something is stored and not synced.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.unsynced.is_empty()
    }

    /// True if the newest record is a seal.
    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// Copies a record into the map.
    pub(crate) fn store(&mut self, shard: ShardId, op: Op) {
        let len = op.stored_len();
        assert!(self.offset + len <= self.segment.len(), "the caller checks that it fits");
        // Planted (G8): a record says that it is durable itself, so a torn tail looks like damage.
        if planted!("durable-seq-at-staging") {
            self.durable_seq = self.next_seq;
        }
        let record = Record { shard, seq: self.next_seq, durable_seq: self.durable_seq, op };
        let (head, body) = record.encode(self.salt);
        self.segment.store(self.offset, &head);
        if !body.is_empty() {
            self.segment.store(self.offset + head.len() as u64, body);
        }
        self.offset += len;
        self.next_seq += 1;
        self.sealed = matches!(record.op, Op::Seal);
        let mut counters = self.inner.counters.borrow_mut();
        counters.records += 1;
        counters.seals += u64::from(self.sealed);
        self.unsynced.push((shard, record.op));
    }

    /// Makes everything stored durable, and only then lets it count.
    pub(crate) async fn sync(&mut self) -> Result<(), Failure> {
        let range = self.synced_offset..self.offset;
        timed_sync(&self.inner, &self.segment, self.number, range).await?;
        self.synced_offset = self.offset;
        self.durable_seq = self.next_seq - 1;
        let mut ledger = self.inner.ledger.borrow_mut();
        for (shard, op) in self.unsynced.drain(..) {
            ledger.apply(shard, &op).expect("staging admits no record that contradicts the log");
        }
        ledger.advance(self.offset, self.next_seq);
        drop(ledger);
        self.inner.upkeep.notify();
        Ok(())
    }

    /// Goes on to the next segment and stores its checkpoint, which the next sync makes durable.
    pub(crate) async fn switch(&mut self) -> Result<(), Failure> {
        assert!(!self.is_dirty(), "the next header says that this segment is durable");
        self.inner.demand_free_segment()?;
        let spare = self.inner.take_spare().await?;
        let (prev, base, shards) = {
            let ledger = self.inner.ledger.borrow();
            (ledger.active_cut(), ledger.newest_needed_cut(), ledger.shards().clone())
        };
        *self = Self::begin(self.inner.clone(), spare, prev, base).await?;
        self.store_opening(Checkpoint { carried: 0, shards })
    }

    /// Stores a segment's first record.
    pub(crate) fn store_opening(&mut self, checkpoint: Checkpoint) -> Result<(), Failure> {
        assert_eq!(self.offset, HEADER_LEN, "a checkpoint opens a segment");
        let op = Op::Checkpoint(checkpoint);
        if !self.fits(&op) {
            let error = std::io::Error::other("segment_len is too small for the shards' state");
            return Err(Failure::new("write the checkpoint of", &self.name(), &error));
        }
        self.store(ShardId(0), op);
        Ok(())
    }

    /// The active segment's file name.
    pub(crate) fn name(&self) -> String {
        segment_name(self.number)
    }
}

async fn timed_sync<E: Env>(
    inner: &Inner<E>,
    segment: &SegmentOf<E>,
    number: u64,
    range: std::ops::Range<u64>,
) -> Result<(), Failure> {
    let start = <E::Rt as AsyncRuntime>::Instant::now();
    let mut synced = segment.sync().await;
    // Planted (G5): the second sync succeeds, because the kernel has dropped the pages.
    if planted!("failed-sync-retried") && synced.is_err() {
        synced = segment.sync().await;
    }
    synced.map_err(|error| Failure::new("sync", &segment_name(number), &error))?;
    inner.counters.borrow_mut().synced(range.start, range.end, start.elapsed());
    Ok(())
}
