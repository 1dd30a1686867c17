//! Taking a snapshot, chunk by chunk.

use alloc::vec::Vec;
use core::ops::Bound;

use leasehold_protocol::codec;
use leasehold_protocol::ids::{LeaseId, Number};

use super::item::{
    End, ForcedItem, Header, HoldItem, Item, ItemKind, LeaseItem, RecordItem, WaiterItem,
};
use super::{CHUNK_LEN, MAGIC, SNAPSHOT_VERSION};
use crate::blob::Key;
use crate::memory::{Answer, Kind, Record};
use crate::state::State;
use crate::table::{Hold, KeyState, Lease, Waiter};

/// Where the encoder stands: what comes next is what follows this.
enum Cursor {
    Start,
    Lease(LeaseId),
    Record(LeaseId, u64),
    LateRecord(LeaseId, u64),
    Key(Option<Key>),
    Hold(Key, LeaseId),
    Waiter(Key, Option<u64>),
    Done,
}

/// Yields a snapshot in chunks of at most `CHUNK_LEN` and one item. Chunk borders mean nothing to
/// the decoder.
pub struct Encoder {
    state: State,
    cursor: Cursor,
    checksum: u32,
    items: u64,
}

impl Encoder {
    /// Freezes the state as it is now.
    pub fn new(state: &State) -> Self {
        Self { state: state.clone(), cursor: Cursor::Start, checksum: 0, items: 0 }
    }

    /// The next item; moves the cursor on.
    fn next_item(&mut self) -> Option<Item> {
        while !matches!(self.cursor, Cursor::Done) {
            let (cursor, item) = self.step();
            self.cursor = cursor;
            if item.is_some() {
                return item;
            }
        }
        None
    }

    /// One step of the walk: where it leads, and the item that was found there, if any.
    fn step(&self) -> (Cursor, Option<Item>) {
        match &self.cursor {
            Cursor::Done => (Cursor::Done, None),
            Cursor::Start => (Cursor::Lease(LeaseId(0)), Some(self.header())),
            Cursor::Lease(after) => match after_in(&self.state.leases, after) {
                Some((id, lease)) => (Cursor::Record(*id, 0), Some(lease_item(*id, lease))),
                None => (Cursor::Key(None), None),
            },
            Cursor::Record(id, after) => match after_in(&self.lease(*id).memory.records, after) {
                Some((number, record)) => {
                    let item = record_item(*id, *number, record, false);
                    (Cursor::Record(*id, *number), Some(item))
                }
                None => (Cursor::LateRecord(*id, 0), None),
            },
            Cursor::LateRecord(id, after) => match after_in(&self.lease(*id).memory.late, after) {
                Some((number, record)) => {
                    let item = record_item(*id, *number, record, true);
                    (Cursor::LateRecord(*id, *number), Some(item))
                }
                None => (Cursor::Lease(*id), None),
            },
            Cursor::Key(after) => self.step_to_key(after.as_ref()),
            Cursor::Hold(key, after) => match after_in(&self.key(key).holds, after) {
                Some((lease, hold)) => {
                    (Cursor::Hold(key.clone(), *lease), Some(hold_item(key, *lease, hold)))
                }
                None => (Cursor::Waiter(key.clone(), None), None),
            },
            Cursor::Waiter(key, after) => self.step_to_waiter(key, *after),
        }
    }

    fn step_to_key(&self, after: Option<&Key>) -> (Cursor, Option<Item>) {
        let keys = &self.state.keys;
        match after.map_or_else(|| keys.first(), |after| after_in(keys, after)) {
            Some((key, _)) => (Cursor::Hold(key.clone(), LeaseId(0)), None),
            None => (Cursor::Done, Some(Item::End(End { items: self.items }))),
        }
    }

    fn step_to_waiter(&self, key: &Key, after: Option<u64>) -> (Cursor, Option<Item>) {
        let queue = &self.key(key).queue;
        match after.map_or_else(|| queue.first(), |after| after_in(queue, &after)) {
            Some((place, waiter)) => {
                let item = waiter_item(key, *place, waiter);
                (Cursor::Waiter(key.clone(), Some(*place)), Some(item))
            }
            None => (Cursor::Key(Some(key.clone())), None),
        }
    }

    fn lease(&self, id: LeaseId) -> &Lease {
        self.state.leases.get(&id).expect("the state is frozen")
    }

    fn key(&self, key: &Key) -> &KeyState {
        self.state.keys.get(key).expect("the state is frozen")
    }

    fn header(&self) -> Item {
        let state = &self.state;
        Item::Header(Header {
            shard: state.shard,
            revision: state.revision,
            begun: state.begun,
            last_token: state.last_token,
            last_lease: state.last_lease,
            digest: state.digest(),
        })
    }
}

impl Iterator for Encoder {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if matches!(self.cursor, Cursor::Done) {
            return None;
        }
        let mut chunk = Vec::with_capacity(CHUNK_LEN + CHUNK_LEN / 8);
        if matches!(self.cursor, Cursor::Start) {
            chunk.extend_from_slice(&MAGIC);
            chunk.extend_from_slice(&SNAPSHOT_VERSION.to_le_bytes());
        }
        let head = chunk.len();
        chunk.extend_from_slice(&[0; super::BLOCK_HEADER_LEN]);
        let start = chunk.len();
        while chunk.len() - start < CHUNK_LEN
            && let Some(item) = self.next_item()
        {
            self.items += 1;
            append(&mut chunk, &item);
        }
        self.checksum = crc32c::crc32c_append(self.checksum, &chunk[start..]);
        let len = (chunk.len() - start) as u32;
        chunk[head..head + 4].copy_from_slice(&len.to_le_bytes());
        chunk[head + 4..start].copy_from_slice(&self.checksum.to_le_bytes());
        Some(chunk)
    }
}

fn append(chunk: &mut Vec<u8>, item: &Item) {
    let at = chunk.len();
    chunk.extend_from_slice(&[0; 4]);
    codec::encode_into(item, chunk);
    let len = (chunk.len() - at - 4) as u32;
    chunk[at..at + 4].copy_from_slice(&len.to_le_bytes());
}

fn after_in<'a, K: Ord + Clone, V: Clone>(
    map: &'a crate::cow::Map<K, V>,
    after: &K,
) -> Option<(&'a K, &'a V)> {
    map.iter_from(Bound::Excluded(after)).next()
}

fn lease_item(id: LeaseId, lease: &Lease) -> Item {
    Item::Lease(LeaseItem {
        lease: id,
        ttl_ms: lease.ttl_ms,
        secret: lease.secret,
        label: lease.label.as_slice().to_vec(),
        own: lease.own,
        version: lease.version,
        floor: lease.memory.floor,
    })
}

fn record_item(lease: LeaseId, number: u64, record: &Record, late: bool) -> Item {
    Item::Record(RecordItem {
        lease,
        number: Number(number),
        late,
        kind: match record.kind {
            Kind::Acquire => ItemKind::Acquire,
            Kind::Forestalled => ItemKind::Forestalled,
            Kind::Cancel => ItemKind::Cancel,
            Kind::Release => ItemKind::Release,
        },
        print: record.print,
        keep: record.keep,
        outcome: match record.answer {
            Answer::Waiting => None,
            Answer::Done(outcome) => Some(outcome),
        },
    })
}

fn hold_item(key: &Key, lease: LeaseId, hold: &Hold) -> Item {
    Item::Hold(HoldItem {
        key: key.to_vec(),
        lease,
        token: hold.token,
        mode: hold.mode,
        number: hold.number,
        value: hold.value.as_slice().to_vec(),
        since_ms: hold.since_ms,
        forced: hold.forced.as_ref().map(|forced| ForcedItem {
            who: forced.who.as_slice().to_vec(),
            why: forced.why.as_slice().to_vec(),
        }),
    })
}

fn waiter_item(key: &Key, place: u64, waiter: &Waiter) -> Item {
    Item::Waiter(WaiterItem {
        key: key.to_vec(),
        place,
        lease: waiter.lease,
        number: waiter.number,
        mode: waiter.mode,
        own: waiter.own,
        value: waiter.value.as_slice().to_vec(),
        wait_ms: waiter.wait_ms,
    })
}
