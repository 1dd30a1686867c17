//! Reading a snapshot, in whatever pieces it comes.

use alloc::rc::Rc;
use alloc::string::String;
use alloc::vec::Vec;
use core::cmp::Ordering;

use leasehold_protocol::codec;
use leasehold_protocol::ids::LeaseId;
use leasehold_protocol::limits::{LEASES_MAX, MEMBERS_EVER_MAX};
use leasehold_protocol::member::MemberInfo;
use leasehold_protocol::planted;

use super::former;
use super::item::{
    GhostItem, Header, HoldItem, Item, ItemKind, KeyItem, LastEndItem, LeaseItem, MembersItem,
    QuarantineItem, RecordItem, WaiterItem,
};
use super::{
    BLOCK_HEADER_LEN, BLOCK_LEN_MAX, FORMER_VERSION, MAGIC, PRELUDE_LEN, SNAPSHOT_VERSION,
};
use crate::blob::{Blob, Key, KeyRef};
use crate::cow::Probe;
use crate::digest;
use crate::invariants::Checker;
use crate::members::Members;
use crate::memory::{Answer, Kind, Record};
use crate::state::{CLAIMS_MAX, State};
use crate::table::{self, Asked, Claim, ClaimId, Forced, Ghost, Hold, KeyState, Lease, Waiter};

/// Why bytes are not a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// They do not begin like one.
    #[error("not a snapshot: it does not begin with the magic")]
    NotASnapshot,
    /// The format version is not known here.
    #[error(
        "a snapshot of format version {0}; this build reads versions {FORMER_VERSION} and {SNAPSHOT_VERSION}"
    )]
    Version(u32),
    /// A block claims to be longer than any block is.
    #[error("block {block}: a length of {len} bytes is above the limit of {BLOCK_LEN_MAX}")]
    BlockTooLong {
        /// Its place in the stream.
        block: u64,
        /// The length it claims.
        len: usize,
    },
    /// A block was changed, or is not in its place.
    #[error("block {block}: the checksum does not match")]
    Checksum {
        /// Its place in the stream.
        block: u64,
    },
    /// An item is not what an item looks like.
    #[error("item {item} is malformed")]
    Malformed {
        /// Its place in the stream.
        item: u64,
    },
    /// The items are well-formed but do not go together.
    #[error("item {item}: {what}")]
    Contradiction {
        /// Its place in the stream.
        item: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// The state that the items make up breaks an invariant.
    #[error("the state is inconsistent: {0}")]
    Inconsistent(String),
    /// The state is not the one that was written.
    #[error("the digest does not match")]
    Digest,
    /// The stream ends too early.
    #[error("the snapshot is cut off")]
    Truncated,
    /// The stream goes on after its end mark.
    #[error("bytes follow the snapshot's end")]
    Trailing,
}

/// Builds a state from a snapshot's bytes. Holds at most one unfinished block of them.
#[derive(Default)]
pub struct Decoder {
    /// Bytes of the unfinished prelude or block.
    buffer: Vec<u8>,
    /// The stream's format version, once it was read; 0 before.
    version: u32,
    ended: bool,
    failed: Option<SnapshotError>,
    checksum: u32,
    blocks: u64,
    items: u64,
    build: Option<Build>,
    /// The secrets were left out, and so the digest says nothing.
    redacted: bool,
}

/// A state in the making.
struct Build {
    state: State,
    header: Header,
    /// The lease whose records come now.
    lease: LeaseId,
    /// The key whose holds and waiters come now.
    key: Option<Key>,
    /// Once everything was read.
    checker: Option<Checker>,
}

impl Decoder {
    /// A decoder that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same for what `Encoder::redacted` wrote: without its secrets a state has another
    /// digest than the one that was written.
    pub fn redacted() -> Self {
        Self { redacted: true, ..Self::default() }
    }

    /// Takes the next bytes. After an error every call gives that error.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.take(bytes);
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.build = None;
        }
        result
    }

    /// Checks up to `items` leases and keys of the state that was read; true when all are found
    /// right. `finish` checks what is left at once: for a large state that takes a while (some
    /// microseconds per item), which a caller on a core spreads with this.
    pub fn check(&mut self, items: usize) -> Result<bool, SnapshotError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.check_some(items);
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.build = None;
        }
        result
    }

    fn check_some(&mut self, items: usize) -> Result<bool, SnapshotError> {
        let Some(build) = self.build.as_mut().filter(|_| self.ended) else {
            return Err(SnapshotError::Truncated);
        };
        let checker = match &mut build.checker {
            Some(checker) => checker,
            none => {
                let checker = Checker::new(&build.state).map_err(SnapshotError::Inconsistent)?;
                none.insert(checker)
            }
        };
        if !checker.step(items).map_err(SnapshotError::Inconsistent)? {
            return Ok(false);
        }
        build.state.sum = checker.sum();
        if self.redacted || build.state.digest() == build.header.digest {
            Ok(true)
        } else {
            Err(SnapshotError::Digest)
        }
    }

    /// The state, if the snapshot is complete and sound in every respect.
    pub fn finish(mut self) -> Result<State, SnapshotError> {
        while !self.check(usize::MAX)? {}
        let Build { state, checker, .. } = self.build.expect("it was checked");
        drop(checker);
        Ok(state)
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<(), SnapshotError> {
        while !bytes.is_empty() {
            if self.ended {
                return Err(SnapshotError::Trailing);
            }
            let missing = self.wanted()? - self.buffer.len();
            let (now, later) = bytes.split_at(missing.min(bytes.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if now.len() < missing {
                break;
            }
            if self.version == 0 {
                self.check_prelude()?;
            } else if self.buffer.len() >= self.wanted()? {
                let buffer = core::mem::take(&mut self.buffer);
                self.block(&buffer)?;
                self.buffer = buffer;
                self.buffer.clear();
            }
        }
        Ok(())
    }

    /// How many bytes the buffer needs before anything can be done with them.
    fn wanted(&self) -> Result<usize, SnapshotError> {
        if self.version == 0 {
            return Ok(PRELUDE_LEN);
        }
        let Some(len) = self.buffer.first_chunk().filter(|_| self.buffer.len() >= BLOCK_HEADER_LEN)
        else {
            return Ok(BLOCK_HEADER_LEN);
        };
        let len = u32::from_le_bytes(*len) as usize;
        if len > BLOCK_LEN_MAX {
            return Err(SnapshotError::BlockTooLong { block: self.blocks, len });
        }
        Ok(BLOCK_HEADER_LEN + len)
    }

    fn check_prelude(&mut self) -> Result<(), SnapshotError> {
        let (magic, version) = self.buffer.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(SnapshotError::NotASnapshot);
        }
        let version = u32::from_le_bytes(version.try_into().expect("4 bytes follow the magic"));
        if !(FORMER_VERSION..=SNAPSHOT_VERSION).contains(&version) {
            return Err(SnapshotError::Version(version));
        }
        self.version = version;
        self.buffer.clear();
        Ok(())
    }

    fn block(&mut self, block: &[u8]) -> Result<(), SnapshotError> {
        let (head, mut payload) = block.split_at(BLOCK_HEADER_LEN);
        let stated = u32::from_le_bytes(head[4..].try_into().expect("4 bytes"));
        self.checksum = crc32c::crc32c_append(self.checksum, payload);
        if stated != self.checksum {
            return Err(SnapshotError::Checksum { block: self.blocks });
        }
        self.blocks += 1;
        while !payload.is_empty() {
            if self.ended {
                return Err(SnapshotError::Trailing);
            }
            let malformed = SnapshotError::Malformed { item: self.items };
            let Some((len, rest)) = payload.split_first_chunk() else { return Err(malformed) };
            let len = u32::from_le_bytes(*len) as usize;
            let Some((archive, rest)) = rest.split_at_checked(len) else { return Err(malformed) };
            let item = match self.version {
                FORMER_VERSION => former::decode(archive),
                _ => codec::decode(archive),
            };
            let item = item.map_err(|_| malformed)?;
            self.item(item)?;
            payload = rest;
        }
        Ok(())
    }

    fn item(&mut self, item: Item) -> Result<(), SnapshotError> {
        let number = self.items;
        self.items += 1;
        let wrong = |what| SnapshotError::Contradiction { item: number, what };
        let build = match (self.build.as_mut(), item) {
            (None, Item::Header(header)) => {
                self.build = Some(Build::new(header));
                return Ok(());
            }
            (None, _) => return Err(wrong("the header is not the first item")),
            (Some(_), Item::Header(_)) => return Err(wrong("a second header")),
            (Some(_), Item::End(end)) => {
                self.ended = true;
                let counted = end.items == number;
                return if counted { Ok(()) } else { Err(wrong("items are missing")) };
            }
            (Some(build), item) => (build, item),
        };
        match build {
            (build, Item::Lease(item)) => build.lease(&item),
            (build, Item::Record(item)) => build.record(&item),
            (build, Item::Key(item)) => build.key(&item),
            (build, Item::Ghost(item)) => build.ghost(&item),
            (build, Item::Hold(item)) => build.hold(item),
            (build, Item::Waiter(item)) => build.waiter(&item),
            (build, Item::LastEnd(item)) => build.last_end(item),
            (build, Item::Members(item)) => build.members(&item),
            (build, Item::Member(info)) => build.member(info),
            (build, Item::Quarantine(item)) => build.quarantine(item),
            (_, Item::Header(_) | Item::End(_)) => unreachable!("handled above"),
        }
        .map_err(wrong)
    }
}

impl Build {
    fn new(header: Header) -> Self {
        let mut state = State::new(header.shard);
        state.revision = header.revision;
        state.begun = header.begun;
        state.last_token = header.last_token;
        state.last_lease = header.last_lease;
        Self { state, header, lease: LeaseId(0), key: None, checker: None }
    }

    fn members(&mut self, item: &MembersItem) -> Result<(), &'static str> {
        let members = Rc::make_mut(&mut self.state.members);
        if *members != Members::default() {
            return Err("a second member table");
        }
        let MembersItem { version, fence, operation } = *item;
        (members.version, members.fence, members.operation) = (version, fence, operation);
        Ok(())
    }

    fn member(&mut self, info: MemberInfo) -> Result<(), &'static str> {
        let members = Rc::make_mut(&mut self.state.members);
        let last = members.nodes.last_key_value();
        if members.version == 0 || last.is_some_and(|(node, _)| *node >= info.entry.node) {
            return Err("a member out of order");
        }
        if members.nodes.len() >= MEMBERS_EVER_MAX {
            return Err("too many members");
        }
        members.nodes.insert(info.entry.node, info);
        Ok(())
    }

    fn quarantine(&mut self, item: QuarantineItem) -> Result<(), &'static str> {
        if self.lease != LeaseId(0) || self.key.is_some() || item.quarantine_ms == 0 {
            return Err("a waiting time out of order");
        }
        match core::mem::replace(&mut self.state.quarantine_ms, item.quarantine_ms) {
            0 => Ok(()),
            _ => Err("a second waiting time"),
        }
    }

    fn lease(&mut self, item: &LeaseItem) -> Result<(), &'static str> {
        if item.lease <= self.lease || self.key.is_some() {
            return Err("a lease out of order");
        }
        if self.state.leases.len() >= LEASES_MAX {
            return Err("too many leases");
        }
        self.lease = item.lease;
        let label = Blob::new(&item.label);
        let mut lease = Lease::new(item.ttl_ms, item.secret, label, item.own);
        lease.version = item.version;
        lease.memory.floor = item.floor;
        lease.base = digest::lease_base(item.lease, &lease);
        self.state.leases.insert(item.lease, Rc::new(lease));
        Ok(())
    }

    fn record(&mut self, item: &RecordItem) -> Result<(), &'static str> {
        if item.lease != self.lease || self.key.is_some() {
            return Err("a record without its lease");
        }
        let lease = self.state.leases.lease_mut(item.lease).ok_or("a record without its lease")?;
        let record = Record {
            kind: match item.kind {
                ItemKind::Acquire => Kind::Acquire,
                ItemKind::Forestalled => Kind::Forestalled,
                ItemKind::Cancel => Kind::Cancel,
                ItemKind::Release => Kind::Release,
                ItemKind::Convert => Kind::Convert,
                ItemKind::SetValue => Kind::SetValue,
            },
            print: item.print,
            answer: item.outcome.map_or(Answer::Waiting, Answer::Done),
            keep: item.keep,
        };
        let memory = &mut lease.memory;
        memory.kept += usize::from(item.keep && !item.late);
        let table = if item.late { &mut memory.late } else { &mut memory.records };
        match table.insert(item.number.0, record) {
            None => Ok(()),
            Some(_) => Err("a record comes twice"),
        }
    }

    fn key(&mut self, item: &KeyItem) -> Result<(), &'static str> {
        let (_, entry) = self.entry(&item.key)?;
        if !entry.is_vacant() || entry.floor != 0 || entry.limit != 0 {
            return Err("a key after its holds or waiters");
        }
        (entry.floor, entry.limit) = (item.floor, item.limit);
        Ok(())
    }

    fn ghost(&mut self, item: &GhostItem) -> Result<(), &'static str> {
        let (key, entry) = self.claimed(&item.key, 1)?;
        let (mode, slots, delay_ms) = (item.mode, Blob::new(&item.slots), item.delay_ms);
        if !entry.taken.put(&item.slots) {
            return Err("a slot is taken twice");
        }
        entry.ghosts.insert(item.token, Ghost { mode, slots, delay_ms });
        match self.state.delays.insert(item.token, (key, delay_ms)) {
            None => Ok(()),
            Some(_) => Err("a delay comes twice"),
        }
    }

    fn last_end(&mut self, item: LastEndItem) -> Result<(), &'static str> {
        let key = self.state.shared_key(KeyRef::new(&item.key));
        let end = table::End {
            lease: item.lease,
            label: Blob::new(&item.label),
            token: item.token,
            mode: item.mode,
            reason: item.reason,
            revision: item.revision,
            at_ms: item.at_ms,
        };
        self.state.ends.restore(&key, end, item.old)
    }

    /// The entry of the key that holds and waiters come for, with room for so many more.
    fn claimed(&mut self, key: &[u8], more: usize) -> Result<(Key, &mut KeyState), &'static str> {
        if self.state.claims + more > CLAIMS_MAX {
            return Err("too many holds and waiters");
        }
        self.state.claims += more;
        self.entry(key)
    }

    /// The entry of the present key; keys come in order.
    fn entry(&mut self, key: &[u8]) -> Result<(Key, &mut KeyState), &'static str> {
        let key = KeyRef::new(key);
        let key = match self.key.as_ref().map(|last| (last, key.cmp_with(last))) {
            Some((last, Ordering::Equal)) => last.clone(),
            Some((_, Ordering::Less)) => return Err("a key out of order"),
            Some((_, Ordering::Greater)) | None => {
                let key = key.to_key();
                self.state.keys.insert(key.clone(), Rc::default());
                self.state.names.insert(key.name().clone(), ());
                key
            }
        };
        self.key = Some(key.clone());
        let entry = self.state.keys.entry_mut(&key).expect("it was inserted");
        Ok((key, entry))
    }

    fn claim(&mut self, lease: LeaseId, id: ClaimId, claim: Claim) -> Result<(), &'static str> {
        let lease = self.state.leases.lease_mut(lease).ok_or("a claim of a dead lease")?;
        lease.waits += usize::from(matches!(claim, Claim::Wait(_)));
        lease.again += usize::from(matches!(claim, Claim::Again(_)));
        match lease.claims.insert(id, claim) {
            None => Ok(()),
            Some(_) => Err("two claims under one number"),
        }
    }

    fn hold(&mut self, item: HoldItem) -> Result<(), &'static str> {
        let (key, entry) = self.claimed(&item.key, 1 + item.again.len())?;
        let forced = item.forced.map(|forced| {
            Rc::new(Forced { who: Blob::new(&forced.who), why: Blob::new(&forced.why) })
        });
        let is_forced = forced.is_some();
        let hold = Hold {
            token: item.token,
            mode: item.mode,
            number: item.number,
            part: item.part,
            value: Blob::new(&item.value),
            since_ms: item.since_ms,
            forced,
            slots: Blob::new(&item.slots),
            delay_ms: item.delay_ms,
            again: item.again.clone(),
            asked: item.asked.map(|asked| {
                Rc::new(Asked {
                    who: Blob::new(&asked.who),
                    why: Blob::new(&asked.why),
                    within_ms: asked.within_ms,
                })
            }),
        };
        if !entry.taken.put(&item.slots) {
            return Err("a slot is taken twice");
        }
        if entry.holds.insert(item.lease, hold).is_some() {
            return Err("a hold comes twice");
        }
        // Planted (G3): a forced end that was pending is pending for ever.
        if is_forced && !planted!("snapshot-forgets-forced") {
            self.state.forced.insert(item.token.0, (key.clone(), item.lease));
        }
        for number in &item.again {
            self.claim(item.lease, (*number, 0), Claim::Again(key.clone()))?;
        }
        self.claim(item.lease, (item.number.0, item.part), Claim::Hold(key))
    }

    fn waiter(&mut self, item: &WaiterItem) -> Result<(), &'static str> {
        let (key, entry) = self.claimed(&item.key, 1)?;
        if entry.queue.last().is_some_and(|(place, _)| *place >= item.place) {
            return Err("a waiter out of order");
        }
        let own = item.own.is_some();
        let waiter = Waiter {
            lease: item.lease,
            number: item.number,
            part: item.part,
            parts: item.parts,
            mode: item.mode,
            own: item.own,
            value: Blob::new(&item.value),
            wait_ms: item.wait_ms,
            delay_ms: item.delay_ms,
        };
        entry.queue.insert(item.place, waiter);
        if entry.places.insert(item.lease, item.place).is_some() {
            return Err("a lease waits twice for a key");
        }
        self.state.own_waiters += usize::from(own);
        self.claim(item.lease, (item.number.0, item.part), Claim::Wait(key))
    }
}
