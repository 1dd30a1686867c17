//! The bytes of one record: encoding into pieces, decoding with every check.
//!
//! Pure: no file, no clock. Decoding never panics and never trusts a length before it is bounded;
//! what is not a valid record is simply not one, and `scan` decides what that means. Layout in
//! `docs/WAL.md`; a golden file keeps it.

use std::rc::Rc;

use leasehold_protocol::ids::ShardId;

use super::checkpoint::Checkpoint;

/// Records start at multiples of this.
pub(crate) const ALIGN: u64 = 16;
/// Bytes before a record's payload.
pub(crate) const HEAD_LEN: usize = 32;

const KIND_ENTRY: u16 = 1;
const KIND_VOTE: u16 = 2;
const KIND_TRUNCATE: u16 = 3;
const KIND_PURGE: u16 = 4;
const KIND_COMMITTED: u16 = 5;
const KIND_SNAPSHOT: u16 = 6;
const KIND_SEAL: u16 = 7;
const KIND_CHECKPOINT: u16 = 8;

/// Opaque bytes of the layer above.
pub(crate) type Blob = Rc<[u8]>;

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// One log entry.
    Entry { index: u64, payload: Blob },
    /// The shard's vote.
    Vote(Blob),
    /// Entries above the index, or all of them, are void.
    Truncate(Option<u64>),
    /// Entries up to the index are no longer needed.
    Purge { index: u64, log_id: Blob },
    /// The shard's commit position, saved lazily.
    Committed(Blob),
    /// Names the shard's newest published snapshot.
    Snapshot(Blob),
    /// Proves that everything before it was durable.
    Seal,
    /// Opens a segment: every shard's state.
    Checkpoint(Checkpoint),
}

impl Op {
    fn kind(&self) -> u16 {
        match self {
            Self::Entry { .. } => KIND_ENTRY,
            Self::Vote(_) => KIND_VOTE,
            Self::Truncate(_) => KIND_TRUNCATE,
            Self::Purge { .. } => KIND_PURGE,
            Self::Committed(_) => KIND_COMMITTED,
            Self::Snapshot(_) => KIND_SNAPSHOT,
            Self::Seal => KIND_SEAL,
            Self::Checkpoint(_) => KIND_CHECKPOINT,
        }
    }

    /// The part of the payload that is built here; `body` follows it.
    fn prefix(&self) -> Vec<u8> {
        match self {
            Self::Entry { index, .. } | Self::Purge { index, .. } | Self::Truncate(Some(index)) => {
                index.to_le_bytes().to_vec()
            }
            Self::Checkpoint(checkpoint) => checkpoint.encode(),
            Self::Vote(_)
            | Self::Truncate(None)
            | Self::Committed(_)
            | Self::Snapshot(_)
            | Self::Seal => Vec::new(),
        }
    }

    /// The part of the payload that is copied straight from the caller's bytes.
    fn body(&self) -> &[u8] {
        match self {
            Self::Entry { payload: bytes, .. }
            | Self::Purge { log_id: bytes, .. }
            | Self::Vote(bytes)
            | Self::Committed(bytes)
            | Self::Snapshot(bytes) => bytes,
            Self::Truncate(_) | Self::Seal | Self::Checkpoint(_) => &[],
        }
    }

    fn decode(kind: u16, payload: &[u8]) -> Option<Self> {
        let indexed = || {
            let (index, rest) = payload.split_first_chunk::<8>()?;
            Some((u64::from_le_bytes(*index), rest))
        };
        Some(match kind {
            KIND_ENTRY => {
                let (index, rest) = indexed()?;
                Self::Entry { index, payload: rest.into() }
            }
            KIND_VOTE => Self::Vote(payload.into()),
            KIND_TRUNCATE if payload.is_empty() => Self::Truncate(None),
            KIND_TRUNCATE if payload.len() == 8 => Self::Truncate(Some(indexed()?.0)),
            KIND_PURGE => {
                let (index, rest) = indexed()?;
                Self::Purge { index, log_id: rest.into() }
            }
            KIND_COMMITTED => Self::Committed(payload.into()),
            KIND_SNAPSHOT => Self::Snapshot(payload.into()),
            KIND_SEAL if payload.is_empty() => Self::Seal,
            KIND_CHECKPOINT => Self::Checkpoint(Checkpoint::decode(payload)?),
            _ => return None,
        })
    }

    /// Bytes that a record of this takes in a segment.
    pub(crate) fn stored_len(&self) -> u64 {
        let prefix_len = match self {
            Self::Entry { .. } | Self::Purge { .. } | Self::Truncate(Some(_)) => 8,
            Self::Checkpoint(checkpoint) => checkpoint.encoded_len(),
            _ => 0,
        };
        stored_len(prefix_len + self.body().len())
    }
}

/// Bytes that a record with a payload of `payload_len` takes in a segment.
fn stored_len(payload_len: usize) -> u64 {
    ((HEAD_LEN + payload_len) as u64).next_multiple_of(ALIGN)
}

/// Bytes that an entry's record takes beside the payload, at most.
pub(crate) const ENTRY_OVERHEAD_MAX: usize = HEAD_LEN + 8 + ALIGN as usize - 1;
/// Bytes that a seal takes.
pub(crate) const SEAL_LEN: u64 = HEAD_LEN as u64;

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Its shard; 0 for seal and checkpoint.
    pub(crate) shard: ShardId,
    /// Its position in the log, one more than its predecessor's.
    pub(crate) seq: u64,
    /// The newest position that was durable when this record was copied into the map.
    pub(crate) durable_seq: u64,
    /// What it says.
    pub(crate) op: Op,
}

impl Record {
    /// The record as two pieces to store one after the other: head with the prefix of the payload,
    /// and the caller's bytes, not copied. Padding is left out: a segment's unused bytes are zero.
    pub(crate) fn encode(&self, salt: u64) -> (Vec<u8>, &[u8]) {
        assert!(self.durable_seq < self.seq, "a record cannot be durable before it is stored");
        let prefix = self.op.prefix();
        let body = self.op.body();
        let payload_len = u32::try_from(prefix.len() + body.len()).expect("bounded by the segment");
        let mut head = vec![0; HEAD_LEN];
        head[4..8].copy_from_slice(&payload_len.to_le_bytes());
        head[8..10].copy_from_slice(&self.op.kind().to_le_bytes());
        head[12..16].copy_from_slice(&self.shard.0.to_le_bytes());
        head[16..24].copy_from_slice(&self.seq.to_le_bytes());
        head[24..32].copy_from_slice(&self.durable_seq.to_le_bytes());
        head.extend_from_slice(&prefix);
        let crc = crc32c::crc32c_append(crc32c::crc32c_append(seed(salt), &head[4..]), body);
        head[0..4].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(stored_len(payload_len as usize), self.op.stored_len());
        (head, body)
    }

    /// The record at the start of `bytes`, if there is a valid one, and the bytes that it takes.
    pub(crate) fn decode(bytes: &[u8], salt: u64) -> Option<(Self, u64)> {
        let view = View::at(bytes)?;
        if !view.is_authentic(salt) {
            return None;
        }
        let op = Op::decode(view.kind, view.payload)?;
        let record = Self { shard: view.shard, seq: view.seq, durable_seq: view.durable_seq, op };
        Some((record, stored_len(view.payload.len())))
    }
}

/// A record's head and payload in place, not yet authenticated: cheap enough to try at every
/// aligned offset of a damaged segment.
pub(crate) struct View<'a> {
    bytes: &'a [u8],
    kind: u16,
    shard: ShardId,
    payload: &'a [u8],
    /// See `Record::seq`.
    pub(crate) seq: u64,
    /// See `Record::durable_seq`.
    pub(crate) durable_seq: u64,
}

impl<'a> View<'a> {
    /// Splits `bytes` as a record's; `None` if they cannot be one.
    pub(crate) fn at(bytes: &'a [u8]) -> Option<Self> {
        let head = bytes.first_chunk::<HEAD_LEN>()?;
        let payload_len = u32::from_le_bytes(*head[4..].first_chunk()?) as usize;
        let kind = u16::from_le_bytes(*head[8..].first_chunk()?);
        let reserved = u16::from_le_bytes(*head[10..].first_chunk()?);
        let seq = u64::from_le_bytes(*head[16..].first_chunk()?);
        let durable_seq = u64::from_le_bytes(*head[24..].first_chunk()?);
        let known = (KIND_ENTRY..=KIND_CHECKPOINT).contains(&kind) && reserved == 0;
        if !known || durable_seq >= seq {
            return None;
        }
        let record_len = HEAD_LEN.checked_add(payload_len)?;
        let bytes = bytes.get(..record_len)?;
        Some(Self {
            bytes,
            kind,
            shard: ShardId(u32::from_le_bytes(*head[12..].first_chunk()?)),
            payload: &bytes[HEAD_LEN..],
            seq,
            durable_seq,
        })
    }

    /// True if the checksum is right under this segment's salt.
    pub(crate) fn is_authentic(&self, salt: u64) -> bool {
        let (stored, covered) = self.bytes.split_first_chunk::<4>().expect("a head is longer");
        u32::from_le_bytes(*stored) == crc32c::crc32c_append(seed(salt), covered)
    }
}

/// Where the checksum starts, so that a record copied from another segment never fits.
fn seed(salt: u64) -> u32 {
    crc32c::crc32c(&salt.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wal::checkpoint::{Range, ShardState};

    const SALT: u64 = 0x1122_3344_5566_7788;

    fn bytes_of(record: &Record, salt: u64) -> Vec<u8> {
        let (mut bytes, body) = record.encode(salt);
        bytes.extend_from_slice(body);
        bytes.resize(record.op.stored_len() as usize, 0);
        bytes
    }

    fn ops() -> Vec<Op> {
        let state = ShardState {
            vote: Some(b"vote"[..].into()),
            purged: Some((6, b"log id"[..].into())),
            committed: None,
            snapshot: Some(b"snapshot-6"[..].into()),
            range: Range { first: 7, next: 9 },
        };
        let shards = [(ShardId(3), state), (ShardId(5), ShardState::default())].into();
        vec![
            Op::Checkpoint(Checkpoint { carried: 2, shards }),
            Op::Entry { index: 7, payload: b"first entry"[..].into() },
            Op::Entry { index: 8, payload: b""[..].into() },
            Op::Vote(b"a vote"[..].into()),
            Op::Truncate(Some(7)),
            Op::Truncate(None),
            Op::Purge { index: 8, log_id: b"log id 8"[..].into() },
            Op::Committed(b"committed"[..].into()),
            Op::Snapshot(b"a snapshot's name"[..].into()),
            Op::Seal,
        ]
    }

    fn records() -> Vec<Record> {
        let numbered = ops().into_iter().zip(1u64..);
        numbered
            .map(|(op, seq)| Record { shard: ShardId(3), seq, durable_seq: seq / 2, op })
            .collect()
    }

    #[test]
    fn every_kind_survives_the_round_trip() {
        for record in records() {
            let bytes = bytes_of(&record, SALT);
            let (decoded, len) = Record::decode(&bytes, SALT).expect("valid");
            assert_eq!(decoded, record);
            assert_eq!(len, bytes.len() as u64);
            assert_eq!(len % ALIGN, 0);
        }
    }

    #[test]
    fn any_flipped_bit_and_any_other_salt_is_refused() {
        for record in records() {
            let bytes = bytes_of(&record, SALT);
            assert!(Record::decode(&bytes, SALT ^ 1).is_none());
            let covered_len = bytes_of(&record, SALT).len()
                - (record.op.stored_len() as usize - record.encode(SALT).0.len())
                + record.op.body().len();
            for bit in 0..covered_len * 8 {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert!(Record::decode(&damaged, SALT).is_none(), "{record:?} bit {bit}");
            }
        }
    }

    #[test]
    fn a_record_cut_short_is_refused() {
        for record in records() {
            let (head, body) = record.encode(SALT);
            let exact = [&head[..], body].concat();
            for len in 0..exact.len() {
                assert!(Record::decode(&exact[..len], SALT).is_none());
            }
            assert!(Record::decode(&exact, SALT).is_some());
        }
    }

    #[test]
    fn the_format_is_the_committed_one() {
        let bytes: Vec<u8> = records().iter().flat_map(|record| bytes_of(record, SALT)).collect();
        crate::wal::golden::check("records-v1.bin", &bytes);
    }
}
