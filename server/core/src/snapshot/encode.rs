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
use crate::table::{Hold, Lease, Waiter};

/// Where the encoder stands: the item that was written last.
enum Cursor {
    Start,
    Lease(LeaseId),
    Record(LeaseId, u64),
    LateRecord(LeaseId, u64),
    Key(Option<Key>),
    Hold(Key, LeaseId),
    Waiter(Key, u64),
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
        loop {
            match &self.cursor {
                Cursor::Done => return None,
                Cursor::Start => {
                    self.cursor = Cursor::Lease(LeaseId(0));
                    return Some(self.header());
                }
                &Cursor::Lease(lease) => self.cursor = Cursor::Record(lease, 0),
                &Cursor::Record(id, after) => {
                    let records = self.state.leases.get(&id).map(|lease| &lease.memory.records);
                    let next = records.and_then(|all| after_in(all, &after));
                    let Some((&number, record)) = next else {
                        self.cursor = Cursor::LateRecord(id, 0);
                        continue;
                    };
                    self.cursor = Cursor::Record(id, number);
                    return Some(record_item(id, number, record, false));
                }
                &Cursor::LateRecord(id, after) => {
                    let records = self.state.leases.get(&id).map(|lease| &lease.memory.late);
                    let next = records.and_then(|all| after_in(all, &after));
                    if let Some((&number, record)) = next {
                        self.cursor = Cursor::LateRecord(id, number);
                        return Some(record_item(id, number, record, true));
                    }
                    let Some((&next, lease)) = after_in(&self.state.leases, &id) else {
                        self.cursor = Cursor::Key(None);
                        continue;
                    };
                    self.cursor = Cursor::Lease(next);
                    return Some(lease_item(next, lease));
                }
                Cursor::Key(after) => {
                    let next = match after {
                        None => self.state.keys.first(),
                        Some(key) => after_in(&self.state.keys, key),
                    };
                    let Some((key, _)) = next else {
                        self.cursor = Cursor::Done;
                        return Some(Item::End(End { items: self.items }));
                    };
                    self.cursor = Cursor::Hold(key.clone(), LeaseId(0));
                }
                Cursor::Hold(key, after) => {
                    let entry = self.state.keys.get(key).expect("the state is frozen");
                    let key = key.clone();
                    let Some((&lease, hold)) = after_in(&entry.holds, after) else {
                        let first = entry.queue.first();
                        let first = first.map(|(&place, waiter)| (place, waiter));
                        let item = first.map(|(place, one)| waiter_item(&key, place, one));
                        self.cursor = match first {
                            Some((place, _)) => Cursor::Waiter(key, place),
                            None => Cursor::Key(Some(key)),
                        };
                        if item.is_some() {
                            return item;
                        }
                        continue;
                    };
                    let item = hold_item(&key, lease, hold);
                    self.cursor = Cursor::Hold(key, lease);
                    return Some(item);
                }
                Cursor::Waiter(key, after) => {
                    let entry = self.state.keys.get(key).expect("the state is frozen");
                    let key = key.clone();
                    let Some((&place, waiter)) = after_in(&entry.queue, after) else {
                        self.cursor = Cursor::Key(Some(key));
                        continue;
                    };
                    let item = waiter_item(&key, place, waiter);
                    self.cursor = Cursor::Waiter(key, place);
                    return Some(item);
                }
            }
        }
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
