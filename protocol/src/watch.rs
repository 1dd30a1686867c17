//! Watches: what a client asks for, what a node tells it, and the cursor with which a watch goes on
//! at another time or another node (G6).
//!
//! A watch on the wire concerns one shard; a watch over a prefix is one per shard, which the client
//! opens and joins. The node pushes under the request's id: first the position from which it
//! watches, then events as they are applied. Catching up is the client's to pace: a node that has
//! more to tell than fits one answer ends the watch with `WatchEndReason::Continue`, and the client
//! asks again from where it is.
#![expect(missing_docs, reason = "rkyv gives an enum a resolver whose fields take no docs")]

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use rkyv::{Archive, Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::event::EventKind;
use crate::ids::{ClusterId, RequestId, Revision, ShardId};
use crate::limits::{CURSOR_LEN_MAX, SHARDS_MAX};
use crate::reply::KeyInfo;

/// Where a watch begins.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum WatchFrom {
    /// At what the asked node has applied.
    Now,
    /// With the present state of what is watched, then the events after it.
    State,
    /// After a position: a `Cursor` that has the shard.
    Cursor {
        /// Its bytes.
        cursor: Vec<u8>,
    },
    /// With the next page of a state whose former page was at this position.
    Page {
        /// The position of the state, as a `Cursor` that has the shard.
        cursor: Vec<u8>,
        /// The last key of the former page.
        after: Vec<u8>,
    },
}

/// Watches one key, or all keys with a prefix, of one shard. Answered by any number of
/// `WatchEvents`, `WatchState` and `WatchNotice` and at last by a `WatchEnd` or an error.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct WatchRequest {
    /// The shard.
    pub shard: ShardId,
    /// `key` is the beginning of the keys that are watched; all of them if it is empty.
    pub prefix: bool,
    /// The key.
    pub key: Vec<u8>,
    /// Where to begin.
    pub from: WatchFrom,
}

/// Ends a watch of the same connection: its `WatchEnd` comes, then the answer to this.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnwatchRequest {
    /// The id of the watch's request. If there is no such watch, the answer is the same.
    pub id: RequestId,
}

/// An event of a key, as watchers get it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// The shard's revision. All watched events of one revision are told together.
    pub revision: Revision,
    /// What happened; never an event without a key.
    pub kind: EventKind,
    /// The label of the session that holds, waits, held or waited; empty for events without one.
    pub label: String,
    /// Of `Granted`: the hold's value, unless the hold ended in the same step of the log.
    pub value: Vec<u8>,
}

/// Events in order. None at all is a progress mark.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct WatchEvents {
    /// The shard.
    pub shard: ShardId,
    /// Every watched event up to and including this revision has been told, with these; but see
    /// `more`.
    pub revision: Revision,
    /// The events.
    pub events: Vec<WatchEvent>,
    /// The last event's revision has further events, which the next frame brings: too many for
    /// one. `revision` is below it.
    pub more: bool,
}

/// A page of the state of what is watched: asked for, or told instead of events that the node does
/// not have any more.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct WatchState {
    /// The shard.
    pub shard: ShardId,
    /// The revision of the whole state, all its pages.
    pub revision: Revision,
    /// The first page: what was told of another state, if any, is void.
    pub first: bool,
    /// The watched keys that are held or waited for, in byte order.
    pub keys: Vec<KeyInfo>,
    /// More pages follow; else the events after `revision` do.
    pub more: bool,
}

/// Whether the node knows that it is up to date.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchNotice {
    /// The shard.
    pub shard: ShardId,
    /// True: what was told is all that had happened a moment ago. False: the node cannot reach a
    /// majority, or lags far behind; what follows may be late.
    pub quorum: bool,
}

/// Why a watch ended.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEndReason {
    /// There is more to tell than fits: ask again from the last position told.
    Continue,
    /// As asked.
    Cancelled,
    /// The client did not take what it was told.
    TooSlow,
}

/// The end of a watch; no error.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchEnd {
    /// The shard.
    pub shard: ShardId,
    /// Why.
    pub reason: WatchEndReason,
}

const VERSION: u8 = 1;
const COUNT_AT: usize = 17;
const POSITIONS_AT: usize = COUNT_AT + 2;
const POSITION_LEN: usize = 12;
const SUM_LEN: usize = 4;

const _: () = assert!(
    CURSOR_LEN_MAX == POSITIONS_AT + SHARDS_MAX as usize * POSITION_LEN + SUM_LEN,
    "a cursor of all shards is the longest"
);

/// A position in a cluster: a revision for each shard of a watch. Clients keep it as bytes that
/// they do not look into:
///
/// ```text
/// offset  size  field
///      0     1  version     1
///      1    16  cluster
///     17     2  count       u16, number of positions
///     19  12 n  positions   shard u32, revision u64; shards ascend
///      -     4  checksum    CRC-32C of all before
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// The cluster.
    pub cluster: ClusterId,
    /// The positions.
    pub positions: BTreeMap<ShardId, Revision>,
}

impl Cursor {
    /// A position in one shard.
    pub fn of(cluster: ClusterId, shard: ShardId, revision: Revision) -> Self {
        Self { cluster, positions: BTreeMap::from([(shard, revision)]) }
    }

    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let count = u16::try_from(self.positions.len()).expect("a cluster's shards fit");
        let mut out = Vec::with_capacity(POSITIONS_AT + self.positions.len() * POSITION_LEN + 4);
        out.push(VERSION);
        out.extend(self.cluster.0);
        out.extend(count.to_le_bytes());
        for (shard, revision) in &self.positions {
            out.extend(shard.0.to_le_bytes());
            out.extend(revision.0.to_le_bytes());
        }
        out.extend(crc32c::crc32c(&out).to_le_bytes());
        out
    }

    /// Reads bytes that `encode` wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, ErrorCode> {
        Self::read(bytes).ok_or(ErrorCode::CURSOR_MALFORMED)
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > CURSOR_LEN_MAX {
            return None;
        }
        let (body, sum) = bytes.split_last_chunk::<SUM_LEN>()?;
        if crc32c::crc32c(body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let (version, body) = body.split_first()?;
        let (cluster, body) = body.split_first_chunk::<16>()?;
        let (count, mut body) = body.split_first_chunk::<2>()?;
        let count = usize::from(u16::from_le_bytes(*count));
        if *version != VERSION || body.len() != count * POSITION_LEN {
            return None;
        }
        let mut positions = BTreeMap::new();
        while let Some((shard, rest)) = body.split_first_chunk::<4>() {
            let (revision, rest) = rest.split_first_chunk::<8>()?;
            let shard = ShardId(u32::from_le_bytes(*shard));
            if positions.last_key_value().is_some_and(|(last, _)| *last >= shard) {
                return None;
            }
            positions.insert(shard, Revision(u64::from_le_bytes(*revision)));
            body = rest;
        }
        Some(Self { cluster: ClusterId(*cluster), positions })
    }

    /// The position in `shard`, for a node of `cluster`.
    pub fn position(&self, cluster: ClusterId, shard: ShardId) -> Result<Revision, ErrorCode> {
        // Planted (G6): a position in another cluster is taken for one here.
        if self.cluster != cluster && !crate::planted!("cursor-of-any-cluster") {
            return Err(ErrorCode::CURSOR_OF_OTHER_CLUSTER);
        }
        self.positions.get(&shard).copied().ok_or(ErrorCode::CURSOR_MALFORMED)
    }

    /// Reads the text that `Display` writes.
    pub fn parse(text: &str) -> Result<Self, ErrorCode> {
        let digits = text.as_bytes();
        if !digits.len().is_multiple_of(2) || digits.len() > 2 * CURSOR_LEN_MAX {
            return Err(ErrorCode::CURSOR_MALFORMED);
        }
        let nibble = |digit: u8| char::from(digit).to_digit(16);
        let bytes: Option<Vec<u8>> = digits
            .chunks_exact(2)
            .map(|pair| Some((nibble(pair[0])? * 16 + nibble(pair[1])?) as u8))
            .collect();
        Self::decode(&bytes.ok_or(ErrorCode::CURSOR_MALFORMED)?)
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.encode().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::ToString;

    use super::*;

    fn cursor() -> Cursor {
        let positions = [(ShardId(0), Revision(7)), (ShardId(3), Revision(u64::MAX))];
        Cursor { cluster: ClusterId(*b"example-cluster!"), positions: positions.into() }
    }

    #[test]
    fn a_cursor_survives_its_bytes_and_its_text() {
        let cursor = cursor();
        assert_eq!(Cursor::decode(&cursor.encode()), Ok(cursor.clone()));
        assert_eq!(Cursor::parse(&cursor.to_string()), Ok(cursor.clone()));
        let all = (0..SHARDS_MAX).map(|shard| (ShardId(shard), Revision(1)));
        let all = Cursor { positions: all.collect(), ..cursor };
        assert_eq!(all.encode().len(), CURSOR_LEN_MAX);
        assert_eq!(Cursor::decode(&all.encode()), Ok(all));
    }

    #[test]
    fn any_other_bytes_are_refused() {
        let bytes = cursor().encode();
        let malformed = Err(ErrorCode::CURSOR_MALFORMED);
        for at in 0..bytes.len() {
            assert_eq!(Cursor::decode(&bytes[..at]), malformed, "cut at {at}");
            for bit in 0..8 {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << bit;
                assert_eq!(Cursor::decode(&flipped), malformed, "bit {bit} of {at}");
            }
        }
        assert_eq!(Cursor::decode(&[bytes.clone(), bytes].concat()), malformed);
        let text = cursor().to_string();
        for text in ["", "0", "zz", &text[1..], &format!("{text}00"), "é"] {
            assert_eq!(Cursor::parse(text), malformed, "{text}");
        }
    }

    #[test]
    fn sealed_bytes_that_no_node_writes_are_refused() {
        let seal = |mut body: Vec<u8>| {
            body.extend(crc32c::crc32c(&body).to_le_bytes());
            body
        };
        let whole = cursor().encode();
        let body = &whole[..whole.len() - SUM_LEN];
        assert_eq!(seal(body.to_vec()), whole);
        let with = |at: usize, value: u8| {
            let mut body = body.to_vec();
            body[at] = value;
            Cursor::decode(&seal(body))
        };
        let malformed = Err(ErrorCode::CURSOR_MALFORMED);
        assert_eq!(with(0, 2), malformed, "another version");
        assert_eq!(with(COUNT_AT, 1), malformed, "another count");
        assert_eq!(with(POSITIONS_AT, 3), malformed, "one shard twice");
        assert_eq!(with(POSITIONS_AT, 4), malformed, "shards out of order");
    }

    #[test]
    fn a_position_is_of_one_cluster_and_of_known_shards() {
        let (cursor, here) = (cursor(), ClusterId(*b"example-cluster!"));
        assert_eq!(cursor.position(here, ShardId(0)), Ok(Revision(7)));
        assert_eq!(cursor.position(here, ShardId(1)), Err(ErrorCode::CURSOR_MALFORMED));
        let other = cursor.position(ClusterId([7; 16]), ShardId(0));
        assert_eq!(other, Err(ErrorCode::CURSOR_OF_OTHER_CLUSTER));
    }
}
