//! Taking a snapshot, chunk by chunk.
//!
//! The frozen tables are consumed as they are written, so that each tree node is given up as soon
//! as its content is in a chunk: from then on the live state need not copy it, and at the end
//! there is no pile of old nodes to free at once.

use alloc::rc::Rc;
use alloc::vec::{self, Vec};

use leasehold_protocol::codec;
use leasehold_protocol::ids::{LeaseId, Number, Secret};
use leasehold_protocol::member::MemberInfo;
use leasehold_protocol::planted;

use super::item::{
    AskedItem, End, ForcedItem, GhostItem, Header, HoldItem, Item, ItemKind, KeyItem, LastEndItem,
    LeaseItem, MembersItem, QuarantineItem, RecordItem, WaiterItem,
};
use super::{BLOCK_HEADER_LEN, CHUNK_LEN, MAGIC, SNAPSHOT_VERSION};
use crate::blob::Key;
use crate::cow::IntoIter;
use crate::ends;
use crate::members::Members;
use crate::memory::{Answer, Kind, Record};
use crate::state::State;
use crate::table::{self, Ghost, Hold, KeyState, Lease, Waiter};

/// Yields a snapshot in chunks of at most `CHUNK_LEN` and one item. Chunk borders mean nothing to
/// the decoder.
pub struct Encoder {
    header: Option<Header>,
    quarantine: Option<QuarantineItem>,
    /// Leave secrets out.
    redacted: bool,
    leases: IntoIter<LeaseId, Rc<Lease>>,
    memory: Option<MemoryLeft>,
    keys: IntoIter<Key, Rc<KeyState>>,
    key: Option<KeyLeft>,
    ends: ends::Iter,
    members: Option<Rc<Members>>,
    nodes: vec::IntoIter<MemberInfo>,
    ended: bool,
    checksum: u32,
    items: u64,
    begun: bool,
}

/// What is left to write of one lease's memory.
struct MemoryLeft {
    lease: LeaseId,
    records: IntoIter<u64, Record>,
    late: IntoIter<u64, Record>,
}

/// What is left to write of one key.
struct KeyLeft {
    key: Key,
    own: Option<KeyItem>,
    ghosts: IntoIter<u64, Ghost>,
    holds: IntoIter<LeaseId, Hold>,
    queue: IntoIter<u64, Waiter>,
}

impl Encoder {
    /// Freezes the state as it is now.
    pub fn new(state: &State) -> Self {
        let header = Header {
            shard: state.shard,
            revision: state.revision,
            begun: state.begun,
            last_token: state.last_token,
            last_lease: state.last_lease,
            digest: state.digest(),
        };
        let quarantine_ms = state.quarantine_ms;
        Self {
            header: Some(header),
            quarantine: (quarantine_ms > 0).then_some(QuarantineItem { quarantine_ms }),
            redacted: false,
            leases: state.leases.clone().into_iter(),
            memory: None,
            keys: state.keys.clone().into_iter(),
            key: None,
            ends: state.ends.iter(),
            members: (*state.members != Members::default()).then(|| Rc::clone(&state.members)),
            nodes: Vec::new().into_iter(),
            ended: false,
            checksum: 0,
            items: 0,
            begun: false,
        }
    }

    /// Freezes the state as it is now, to be written without the secrets of its leases: enough to
    /// know what there was, not enough to act as any of them. Only `Decoder::redacted` reads it.
    pub fn redacted(state: &State) -> Self {
        Self { redacted: true, ..Self::new(state) }
    }

    fn next_item(&mut self) -> Option<Item> {
        let item = self.next_whole_item()?;
        Some(if self.redacted { without_secrets(item) } else { item })
    }

    fn next_whole_item(&mut self) -> Option<Item> {
        if let Some(header) = self.header.take() {
            return Some(Item::Header(header));
        }
        if let Some(quarantine) = self.quarantine.take() {
            return Some(Item::Quarantine(quarantine));
        }
        if let Some(item) = self.memory.as_mut().and_then(MemoryLeft::next_item) {
            return Some(item);
        }
        if let Some((id, lease)) = self.leases.next() {
            self.memory = Some(MemoryLeft {
                lease: id,
                records: lease.memory.records.clone().into_iter(),
                late: lease.memory.late.clone().into_iter(),
            });
            return Some(lease_item(id, &lease));
        }
        self.memory = None;
        loop {
            if let Some(item) = self.key.as_mut().and_then(KeyLeft::next_item) {
                return Some(item);
            }
            let Some((key, entry)) = self.keys.next() else { break };
            let holds = entry.holds.clone().into_iter();
            let queue = entry.queue.clone().into_iter();
            let ghosts = entry.ghosts.clone().into_iter();
            let own = key_item(&key, &entry);
            self.key = Some(KeyLeft { key, own, ghosts, holds, queue });
        }
        if let Some((key, end, old)) = self.ends.next() {
            return Some(last_end_item(&key, &end, old));
        }
        self.key = None;
        if let Some(members) = self.members.take() {
            self.nodes = members.nodes().cloned().collect::<Vec<_>>().into_iter();
            let Members { version, fence, operation, .. } = *members;
            return Some(Item::Members(MembersItem { version, fence, operation }));
        }
        if let Some(info) = self.nodes.next() {
            return Some(Item::Member(info));
        }
        if self.ended {
            return None;
        }
        self.ended = true;
        Some(Item::End(End { items: self.items }))
    }
}

impl MemoryLeft {
    fn next_item(&mut self) -> Option<Item> {
        if let Some((number, record)) = self.records.next() {
            return Some(record_item(self.lease, number, &record, false));
        }
        let (number, record) = self.late.next()?;
        Some(record_item(self.lease, number, &record, true))
    }
}

impl KeyLeft {
    fn next_item(&mut self) -> Option<Item> {
        if let Some(own) = self.own.take() {
            return Some(Item::Key(own));
        }
        if let Some((token, ghost)) = self.ghosts.next() {
            return Some(ghost_item(&self.key, token, &ghost));
        }
        if let Some((lease, hold)) = self.holds.next() {
            return Some(hold_item(&self.key, lease, &hold));
        }
        // Planted (G4, G5): who waits is not in the snapshot.
        if planted!("snapshot-forgets-waiters") {
            return None;
        }
        let (place, waiter) = self.queue.next()?;
        Some(waiter_item(&self.key, place, &waiter))
    }
}

impl Iterator for Encoder {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.ended {
            return None;
        }
        let mut chunk = Vec::with_capacity(CHUNK_LEN + CHUNK_LEN / 8);
        if !self.begun {
            self.begun = true;
            chunk.extend_from_slice(&MAGIC);
            chunk.extend_from_slice(&SNAPSHOT_VERSION.to_le_bytes());
        }
        let head = chunk.len();
        chunk.extend_from_slice(&[0; BLOCK_HEADER_LEN]);
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

fn without_secrets(mut item: Item) -> Item {
    match &mut item {
        Item::Lease(lease) => lease.secret = Secret::default(),
        Item::Waiter(WaiterItem { own: Some(own), .. }) => own.secret = Secret::default(),
        _ => {}
    }
    item
}

fn append(chunk: &mut Vec<u8>, item: &Item) {
    let at = chunk.len();
    chunk.extend_from_slice(&[0; 4]);
    codec::encode_into(item, chunk);
    let len = (chunk.len() - at - 4) as u32;
    chunk[at..at + 4].copy_from_slice(&len.to_le_bytes());
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
            Kind::Convert => ItemKind::Convert,
            Kind::SetValue => ItemKind::SetValue,
        },
        print: record.print,
        keep: record.keep,
        outcome: match record.answer {
            Answer::Waiting => None,
            Answer::Done(outcome) => Some(outcome),
        },
    })
}

fn key_item(key: &Key, entry: &KeyState) -> Option<KeyItem> {
    let has_own = entry.floor > 0 || entry.limit > 0;
    has_own.then(|| KeyItem { key: key.to_vec(), floor: entry.floor, limit: entry.limit })
}

fn last_end_item(key: &Key, end: &table::End, old: bool) -> Item {
    Item::LastEnd(LastEndItem {
        key: key.to_vec(),
        lease: end.lease,
        label: end.label.as_slice().to_vec(),
        token: end.token,
        mode: end.mode,
        reason: end.reason.clone(),
        revision: end.revision,
        at_ms: end.at_ms,
        old,
    })
}

fn ghost_item(key: &Key, token: u64, ghost: &Ghost) -> Item {
    Item::Ghost(GhostItem {
        key: key.to_vec(),
        token,
        mode: ghost.mode,
        slots: ghost.slots.as_slice().to_vec(),
        delay_ms: ghost.delay_ms,
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
        slots: hold.slots.as_slice().to_vec(),
        delay_ms: hold.delay_ms,
        again: hold.again.clone(),
        asked: hold.asked.as_ref().map(|asked| AskedItem {
            who: asked.who.as_slice().to_vec(),
            why: asked.why.as_slice().to_vec(),
            within_ms: asked.within_ms,
        }),
        part: hold.part,
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
        delay_ms: waiter.delay_ms,
        part: waiter.part,
        parts: waiter.parts,
    })
}
