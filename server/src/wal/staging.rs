//! What waits for a flush: records in order, their callbacks, and tickets to wait on.
//!
//! Pure bookkeeping on the heap; payloads are shared with the caller, not copied. The front of the
//! queue is the batch in flight, the rest grows behind it. A lazily saved commit position is not
//! queued until a batch takes everything before it, so it never runs ahead of its entries.

use std::collections::{BTreeMap, VecDeque};

use leasehold_protocol::ids::ShardId;

use super::checkpoint::Range;
use super::error::WalFailed;
use super::record::{Blob, Op};

/// Called once: durable, or not.
pub(crate) type Done = Box<dyn FnOnce(Result<(), WalFailed>)>;

/// Bytes that votes, truncations, purges and marks may stage beyond the bound of entries, so that a
/// full queue of entries does not refuse a vote.
const CONTROL_RESERVE: u64 = 1024 * 1024;

struct Staged {
    shard: ShardId,
    /// `None` is a callback without a record of its own.
    op: Option<Op>,
    done: Option<Done>,
}

impl Staged {
    fn stored_len(&self) -> u64 {
        self.op.as_ref().map_or(0, Op::stored_len)
    }
}

/// The queue.
pub(crate) struct Staging {
    queue: VecDeque<Staged>,
    in_flight: usize,
    staged_len: u64,
    staged_len_max: u64,
    committed: BTreeMap<ShardId, Blob>,
    /// The entries that each shard will have once all of the queue is durable.
    ranges: BTreeMap<ShardId, Range>,
    issued: u64,
    durable: u64,
}

impl Staging {
    /// An empty queue; `ranges` are the entries that each shard has.
    pub(crate) fn new(staged_len_max: u64, ranges: BTreeMap<ShardId, Range>) -> Self {
        Self {
            queue: VecDeque::new(),
            in_flight: 0,
            staged_len: 0,
            staged_len_max,
            committed: BTreeMap::new(),
            ranges,
            issued: 0,
            durable: 0,
        }
    }

    /// True if `len` more bytes of entries may be staged. A single append always may when nothing
    /// waits, however long it is.
    pub(crate) fn has_room(&self, len: u64) -> bool {
        self.staged_len == 0 || self.staged_len + len <= self.staged_len_max
    }

    fn busy(&self) -> WalFailed {
        WalFailed::Busy { staged_len: self.staged_len, staged_len_max: self.staged_len_max }
    }

    /// Stages entries; `done` is called when the last is durable. Panics if they do not follow the
    /// shard's last entry: that would be a log that recovery refuses.
    pub(crate) fn append(
        &mut self,
        shard: ShardId,
        ops: Vec<Op>,
        done: Done,
    ) -> Result<u64, WalFailed> {
        if !self.has_room(ops.iter().map(Op::stored_len).sum()) {
            return Err(self.busy());
        }
        let range = self.ranges.entry(shard).or_default();
        for op in &ops {
            let Op::Entry { index, .. } = op else { unreachable!("only entries are appended") };
            assert!(range.push(*index), "shard {shard}: entry {index} does not follow {range:?}");
        }
        for op in ops {
            self.push(shard, Some(op), None);
        }
        match self.queue.back_mut() {
            // The last staged record may be older than this call if there was no entry: the
            // callback still must not come before it.
            Some(last) if last.done.is_none() => last.done = Some(done),
            _ => self.push(shard, None, Some(done)),
        }
        Ok(self.issued)
    }

    /// Stages any record that is not an entry; returns its ticket.
    pub(crate) fn control(&mut self, shard: ShardId, op: Op) -> Result<u64, WalFailed> {
        if self.staged_len > self.staged_len_max + CONTROL_RESERVE {
            return Err(self.busy());
        }
        let range = self.ranges.entry(shard).or_default();
        match &op {
            Op::Truncate(kept) => range.keep(0, kept.map_or(0, |index| index.saturating_add(1))),
            Op::Purge { index, .. } => range.keep(index.saturating_add(1), u64::MAX),
            _ => {}
        }
        self.push(shard, Some(op), None);
        Ok(self.issued)
    }

    fn push(&mut self, shard: ShardId, op: Option<Op>, done: Option<Done>) {
        let staged = Staged { shard, op, done };
        self.staged_len += staged.stored_len();
        self.issued += 1;
        self.queue.push_back(staged);
    }

    /// Remembers a commit position for the next record that is written.
    pub(crate) fn set_committed(&mut self, shard: ShardId, blob: Blob) {
        self.committed.insert(shard, blob);
    }

    /// True if a commit position waits for a record to ride on.
    pub(crate) fn has_committed(&self) -> bool {
        !self.committed.is_empty()
    }

    /// Queues the commit positions that wait.
    pub(crate) fn promote_committed(&mut self) {
        for (shard, blob) in std::mem::take(&mut self.committed) {
            self.push(shard, Some(Op::Committed(blob)), None);
        }
    }

    /// The next batch: at least one record if there is one, and no more than `len_max` bytes.
    pub(crate) fn begin_batch(&mut self, len_max: u64) -> Vec<(ShardId, Option<Op>)> {
        assert_eq!(self.in_flight, 0, "one flush at a time");
        let mut len = 0;
        let fits = |staged: &&Staged| {
            let first = len == 0;
            len += staged.stored_len();
            first || len <= len_max
        };
        self.in_flight = self.queue.iter().take_while(fits).count();
        if self.in_flight == self.queue.len() {
            self.promote_committed();
            self.in_flight = self.queue.len();
        }
        let batch = self.queue.iter().take(self.in_flight);
        batch.map(|staged| (staged.shard, staged.op.clone())).collect()
    }

    /// The first `count` records of the batch are durable: their callbacks, to be called in order.
    #[must_use]
    pub(crate) fn complete(&mut self, count: usize) -> Vec<Done> {
        assert!(count <= self.in_flight, "only what is in flight becomes durable");
        self.in_flight -= count;
        self.durable += count as u64;
        let durable: Vec<Staged> = self.queue.drain(..count).collect();
        self.staged_len -= durable.iter().map(Staged::stored_len).sum::<u64>();
        durable.into_iter().filter_map(|staged| staged.done).collect()
    }

    /// Everything is lost: the callbacks, to be called in order.
    #[must_use]
    pub(crate) fn abandon(&mut self) -> Vec<Done> {
        self.in_flight = 0;
        self.staged_len = 0;
        self.committed.clear();
        self.queue.drain(..).filter_map(|staged| staged.done).collect()
    }

    /// True if nothing waits for a flush.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The ticket of the newest staged record.
    pub(crate) fn issued(&self) -> u64 {
        self.issued
    }

    /// True if everything up to the ticket is durable.
    pub(crate) fn is_durable(&self, ticket: u64) -> bool {
        ticket <= self.durable
    }

    /// Bytes that wait or are in flight.
    pub(crate) fn staged_len(&self) -> u64 {
        self.staged_len
    }
}
