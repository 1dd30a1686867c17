//! What a segment's first record says: the state of every shard of this WAL, complete, so that
//! older segments matter only for the entries they hold.

use std::collections::BTreeMap;

use leasehold_protocol::ids::ShardId;
use leasehold_protocol::planted;

use super::record::Blob;

/// The indexes of a shard's entries: contiguous, `first` to `next - 1`; none if both are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Range {
    /// Index of the first entry.
    pub(crate) first: u64,
    /// One more than the index of the last entry.
    pub(crate) next: u64,
}

impl Range {
    /// True if there is no entry.
    pub(crate) fn is_empty(self) -> bool {
        self.first == self.next
    }

    /// Adds an entry; false if it does not follow the last one.
    #[must_use]
    pub(crate) fn push(&mut self, index: u64) -> bool {
        let follows = self.is_empty() || index == self.next;
        if !follows || index == u64::MAX {
            return false;
        }
        if self.is_empty() {
            self.first = index;
        }
        self.next = index + 1;
        true
    }

    /// Drops the entries outside `first..next`.
    pub(crate) fn keep(&mut self, first: u64, next: u64) {
        (self.first, self.next) = (self.first.max(first), self.next.min(next));
        if self.first >= self.next {
            *self = Self::default();
        }
    }
}

/// A shard's durable state without its entries' payloads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShardState {
    /// The newest vote.
    pub(crate) vote: Option<Blob>,
    /// The newest purge point.
    pub(crate) purged: Option<(u64, Blob)>,
    /// The newest saved commit position.
    pub(crate) committed: Option<Blob>,
    /// The newest snapshot mark.
    pub(crate) snapshot: Option<Blob>,
    /// The entries kept.
    pub(crate) range: Range,
}

/// Every shard's state when the segment was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// How many entry records, copied forward by recovery, follow and belong to the opening.
    pub(crate) carried: u32,
    /// The shards, each with the entries that are *not* carried.
    pub(crate) shards: BTreeMap<ShardId, ShardState>,
}

const HAS_VOTE: u32 = 1;
const HAS_PURGED: u32 = 2;
const HAS_COMMITTED: u32 = 4;
const HAS_SNAPSHOT: u32 = 8;
const FLAGS_ALL: u32 = 15;

impl Checkpoint {
    /// The payload.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_len());
        out.extend_from_slice(&self.carried.to_le_bytes());
        out.extend_from_slice(&(self.shards.len() as u32).to_le_bytes());
        for (shard, state) in &self.shards {
            state.encode(*shard, &mut out);
        }
        assert_eq!(out.len(), self.encoded_len());
        out
    }

    /// The payload's length.
    pub(crate) fn encoded_len(&self) -> usize {
        8 + self.shards.values().map(ShardState::encoded_len).sum::<usize>()
    }

    /// Reads a payload; `None` if it is not exactly one checkpoint.
    pub(crate) fn decode(payload: &[u8]) -> Option<Self> {
        let mut input = Input(payload);
        let carried = input.u32()?;
        let count = input.u32()?;
        let mut shards = BTreeMap::new();
        for _ in 0..count {
            let (shard, state) = ShardState::decode(&mut input)?;
            shards.insert(shard, state);
        }
        let whole = input.0.is_empty() && shards.len() == count as usize;
        whole.then_some(Self { carried, shards })
    }
}

impl ShardState {
    fn blobs(&self) -> [(u32, Option<&Blob>); 4] {
        [
            // Planted (G5): the vote of a shard that is quiet goes with its segment.
            (HAS_VOTE, self.vote.as_ref().filter(|_| !planted!("checkpoint-forgets-votes"))),
            (HAS_PURGED, self.purged.as_ref().map(|(_, log_id)| log_id)),
            (HAS_COMMITTED, self.committed.as_ref()),
            (HAS_SNAPSHOT, self.snapshot.as_ref()),
        ]
    }

    fn encoded_len(&self) -> usize {
        32 + self.blobs().iter().filter_map(|(_, blob)| *blob).map(|b| 4 + b.len()).sum::<usize>()
    }

    fn encode(&self, shard: ShardId, out: &mut Vec<u8>) {
        let blobs = self.blobs();
        let flags = blobs.iter().filter(|(_, blob)| blob.is_some()).map(|(flag, _)| flag).sum();
        let purged_index = self.purged.as_ref().map_or(0, |(index, _)| *index);
        out.extend_from_slice(&shard.0.to_le_bytes());
        out.extend_from_slice(&u32::to_le_bytes(flags));
        out.extend_from_slice(&self.range.first.to_le_bytes());
        out.extend_from_slice(&self.range.next.to_le_bytes());
        out.extend_from_slice(&purged_index.to_le_bytes());
        for blob in blobs.into_iter().filter_map(|(_, blob)| blob) {
            out.extend_from_slice(&(blob.len() as u32).to_le_bytes());
            out.extend_from_slice(blob);
        }
    }

    fn decode(input: &mut Input<'_>) -> Option<(ShardId, Self)> {
        let shard = ShardId(input.u32()?);
        let flags = input.u32()?;
        let (first, next, purged_index) = (input.u64()?, input.u64()?, input.u64()?);
        if flags & !FLAGS_ALL != 0 || first > next {
            return None;
        }
        let mut blob = |flag| -> Option<Option<Blob>> {
            if flags & flag == 0 { Some(None) } else { Some(Some(input.blob()?)) }
        };
        let vote = blob(HAS_VOTE)?;
        let purged = blob(HAS_PURGED)?.map(|log_id| (purged_index, log_id));
        let committed = blob(HAS_COMMITTED)?;
        let snapshot = blob(HAS_SNAPSHOT)?;
        Some((shard, Self { vote, purged, committed, snapshot, range: Range { first, next } }))
    }
}

/// A reader that never runs past its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*bytes))
    }

    fn u64(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    fn blob(&mut self) -> Option<Blob> {
        let len = self.u32()? as usize;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes.into())
    }
}
