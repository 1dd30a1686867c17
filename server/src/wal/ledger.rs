//! What is durable, and which segments it needs: the bookkeeping behind checkpoints, deletion and
//! pinning.
//!
//! Fed with records in log order *after* they became durable, never before: a segment deleted on
//! the strength of a purge that a crash then forgets would be a hole in the log. Recovery feeds
//! the same code, so both agree on what a record means. Holds no payload of an entry.

use std::collections::BTreeMap;

use leasehold_protocol::ids::ShardId;
use leasehold_protocol::planted;

use super::checkpoint::{Checkpoint, ShardState};
use super::header::Cut;
use super::record::Op;

/// Indexes of one shard's live entries in one segment: first and last.
type Span = (u64, u64);

/// One segment that is on disk and counts.
#[derive(Clone, Debug, Default)]
struct Segment {
    /// Where its durable records end; `number` and `base` are its own.
    end: u64,
    next_seq: u64,
    base: u64,
    live: BTreeMap<ShardId, Span>,
}

/// Durable state of all shards, and of the segments.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    shards: BTreeMap<ShardId, ShardState>,
    segments: BTreeMap<u64, Segment>,
    /// The newest segment. Nothing is deleted while its opening is not durable.
    active: u64,
    opening_durable: bool,
}

impl Ledger {
    /// A new segment is in use; the records fed from now on are in it.
    pub(crate) fn begin_segment(&mut self, number: u64, base: Cut) {
        assert!(number > self.active, "segment numbers rise");
        let segment = Segment { base: base.number, ..Segment::default() };
        self.segments.insert(number, segment);
        self.active = number;
        self.opening_durable = false;
    }

    /// The active segment's records up to `end` are durable and were fed.
    pub(crate) fn advance(&mut self, end: u64, next_seq: u64) {
        let segment = self.segments.get_mut(&self.active).expect("the active segment is known");
        assert!(end >= segment.end && next_seq >= segment.next_seq, "a log only grows");
        (segment.end, segment.next_seq) = (end, next_seq);
        self.opening_durable = true;
    }

    /// A segment that is on disk and counts for nothing; it is deleted in its turn.
    pub(crate) fn add_void_segment(&mut self, number: u64) {
        self.segments.entry(number).or_default();
    }

    /// True if the segment is on disk, as far as this knows.
    pub(crate) fn has_segment(&self, number: u64) -> bool {
        self.segments.contains_key(&number)
    }

    /// One durable record of the active segment. Errors if it contradicts what came before.
    pub(crate) fn apply(&mut self, shard: ShardId, op: &Op) -> Result<(), String> {
        if let Op::Checkpoint(checkpoint) = op {
            return self.apply_checkpoint(checkpoint);
        }
        if matches!(op, Op::Seal) {
            return Ok(());
        }
        let state = self.shards.entry(shard).or_default();
        match op {
            Op::Entry { index, .. } => return self.add_entry(shard, *index),
            Op::Vote(blob) => state.vote = Some(blob.clone()),
            Op::Committed(blob) => state.committed = Some(blob.clone()),
            Op::Snapshot(blob) => state.snapshot = Some(blob.clone()),
            Op::Truncate(last_kept) => {
                let next = last_kept.map_or(0, |index| index.saturating_add(1));
                self.keep(shard, 0, next);
            }
            Op::Purge { index, log_id } => {
                state.purged = Some((*index, log_id.clone()));
                self.keep(shard, index.saturating_add(1), u64::MAX);
            }
            Op::Seal | Op::Checkpoint(_) => unreachable!("handled above"),
        }
        Ok(())
    }

    fn add_entry(&mut self, shard: ShardId, index: u64) -> Result<(), String> {
        let range = &mut self.shards.get_mut(&shard).expect("inserted by the caller").range;
        if !range.push(index) {
            return Err(format!("shard {shard} has entry {index} where {} comes next", range.next));
        }
        let segment = self.segments.get_mut(&self.active).expect("the active segment is known");
        segment.live.entry(shard).and_modify(|span| span.1 = index).or_insert((index, index));
        Ok(())
    }

    /// The checkpoint is the whole truth: what older segments said beyond it was void or carried.
    fn apply_checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<(), String> {
        if let Some(lost) = self.shards.keys().find(|shard| !checkpoint.shards.contains_key(shard))
        {
            return Err(format!("the checkpoint does not know shard {lost}"));
        }
        for (shard, state) in &checkpoint.shards {
            self.keep(*shard, state.range.first, state.range.next);
        }
        self.shards.clone_from(&checkpoint.shards);
        Ok(())
    }

    /// Entries outside `first..next` are dead.
    fn keep(&mut self, shard: ShardId, first: u64, next: u64) {
        if let Some(state) = self.shards.get_mut(&shard) {
            state.range.keep(first, next);
        }
        for segment in self.segments.values_mut() {
            let Some(span) = segment.live.get_mut(&shard) else { continue };
            *span = (span.0.max(first), span.1.min(next.saturating_sub(1)));
            if span.0 > span.1 || next == 0 {
                segment.live.remove(&shard);
            }
        }
    }

    /// Every shard's state, as a checkpoint says it.
    pub(crate) fn shards(&self) -> &BTreeMap<ShardId, ShardState> {
        &self.shards
    }

    /// Where the active segment ends.
    pub(crate) fn active_cut(&self) -> Cut {
        self.cut(self.active)
    }

    /// The newest segment, the active one included, that holds an entry still needed.
    pub(crate) fn newest_needed_cut(&self) -> Cut {
        let needed = self.segments.iter().rev().find(|(_, segment)| !segment.live.is_empty());
        needed.map_or_else(Cut::default, |(number, _)| self.cut(*number))
    }

    fn cut(&self, number: u64) -> Cut {
        let segment = self.segments.get(&number);
        segment.map_or_else(Cut::default, |segment| Cut {
            number,
            end: segment.end,
            next_seq: segment.next_seq,
        })
    }

    /// The segments from the newest to the oldest that hold live entries, each with its base and
    /// its spans.
    pub(crate) fn chain_of_needed(&self) -> impl Iterator<Item = (Cut, &BTreeMap<ShardId, Span>)> {
        let needed = self.segments.iter().rev().filter(|(_, segment)| !segment.live.is_empty());
        needed.map(|(number, segment)| (self.cut(*number), &segment.live))
    }

    /// The oldest segment that may be deleted now.
    ///
    /// Its entries must be dead, the active segment's opening durable, and no older segment may be
    /// needed that is reached through it. Deleting oldest first keeps "a base is missing, yet
    /// something older is there" a proof of loss.
    pub(crate) fn deletable(&self) -> Option<u64> {
        // Planted (G5): old segments go before what replaces them is durable.
        if !self.opening_durable && !planted!("segment-deleted-too-early") {
            return None;
        }
        let needed_min = self.segments.iter().find(|(_, segment)| !segment.live.is_empty());
        let needed_min = needed_min.map_or(u64::MAX, |(number, _)| *number);
        let mut linked = vec![self.active];
        while let Some(segment) = linked.last().and_then(|number| self.segments.get(number))
            && segment.base != 0
        {
            linked.push(segment.base);
        }
        let is_free = |number: &u64| {
            *number != self.active && (*number < needed_min || !linked.contains(number))
        };
        let free = self.segments.keys().copied().find(is_free)?;
        assert!(self.segments[&free].live.is_empty(), "a needed segment is always linked");
        Some(free)
    }

    /// The segment is gone.
    pub(crate) fn forget_segment(&mut self, number: u64) {
        assert_ne!(number, self.active, "the active segment stays");
        self.segments.remove(&number);
    }

    /// Segments on disk that count.
    pub(crate) fn segments_len(&self) -> usize {
        self.segments.len()
    }

    /// Segments on disk that count, up to and with `number`.
    pub(crate) fn segments_up_to(&self, number: u64) -> usize {
        self.segments.range(..=number).count()
    }

    /// Segments that stay because of the shard: from the oldest that holds an entry of its to the
    /// newest, the active one excluded, which stays anyway.
    pub(crate) fn pinned_segments(&self, shard: ShardId) -> usize {
        let mut numbers = self.segments.iter();
        let oldest = numbers.find(|(_, segment)| segment.live.contains_key(&shard));
        oldest.map_or(0, |(oldest, _)| self.segments.range(oldest..&self.active).count())
    }
}
