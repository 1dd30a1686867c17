//! The log of one group: the engine's storage interface over the core's WAL.
//!
//! Every entry that is not purged is kept in memory, so that replication and apply never read the
//! disk. The WAL keeps records whose bytes it does not look into (`convert`).
//!
//! Invariants:
//! - Entries are contiguous; an append that would leave a hole panics rather than being stored.
//! - `Rounds` hears of a vote before the WAL does (DESIGN §5).
//! - The effective membership is the last one in the log, committed or not, or the snapshot's; it
//!   changes in the very step in which its entry is appended or cut off.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::rc::Rc;

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::planted;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use openraft::{EntryPayload, RaftTypeConfig};

use super::convert::{self, RecordError};
use super::rounds::Rounds;
use super::types::{Entry, EntryPrint, LogId, Membership, RaftTypes, StoredMembership, Vote};
use crate::env::Env;
use crate::wal::{Recovered, WalFailed, WalShard};

/// Entries of one replication request are bounded by this many bytes; one entry always goes.
const READ_BYTES_MAX: usize = 512 * 1024;
/// What an entry's record takes beside its batch, at most, unless it is a membership.
const ENTRY_OVERHEAD: usize = 96;

/// What the WAL kept of a group is not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogDamaged {
    /// One of the small records.
    #[error("the {what} in the log: {error}")]
    Record {
        /// Which.
        what: &'static str,
        /// Why.
        error: RecordError,
    },
    /// An entry.
    #[error("the entry at index {index} in the log: {error}")]
    Entry {
        /// Where.
        index: u64,
        /// Why.
        error: RecordError,
    },
    /// An entry does not follow the one before.
    #[error("the log goes on with index {found} where {expected} belongs")]
    Hole {
        /// Where the hole starts.
        expected: u64,
        /// The entry behind it.
        found: u64,
    },
}

/// The log; clones share it.
pub(crate) struct Log<E: Env> {
    shared: Rc<Shared<E>>,
}

impl<E: Env> Clone for Log<E> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

struct Shared<E: Env> {
    wal: WalShard<E>,
    rounds: Rc<Rounds>,
    /// Told of each effective membership.
    changed: Box<dyn Fn(&Membership)>,
    kept: RefCell<Kept>,
}

#[derive(Default)]
struct Kept {
    vote: Option<Vote>,
    committed: Option<LogId>,
    purged: Option<LogId>,
    entries: VecDeque<Entry>,
    /// By index: the memberships in `entries`, and below them the last one before.
    memberships: BTreeMap<u64, StoredMembership>,
}

impl Kept {
    fn recover(recovered: Recovered) -> Result<Self, LogDamaged> {
        let mut kept = Self::default();
        let small = |what| move |error| LogDamaged::Record { what, error };
        if let Some(bytes) = recovered.vote {
            kept.vote = Some(convert::read_vote(&bytes).map_err(small("vote"))?);
        }
        if let Some((_, bytes)) = recovered.purged {
            kept.purged = Some(convert::read_log_id(&bytes).map_err(small("purge point"))?);
        }
        if let Some(bytes) = recovered.committed {
            kept.committed = Some(convert::read_log_id(&bytes).map_err(small("commit point"))?);
        }
        for (index, bytes) in recovered.entries {
            let entry = convert::read_entry(&bytes);
            let entry = entry.map_err(|error| LogDamaged::Entry { index, error })?;
            let expected = kept.next_index().unwrap_or(index);
            if entry.log_id.index != expected {
                return Err(LogDamaged::Hole { expected, found: entry.log_id.index });
            }
            kept.push(entry);
        }
        Ok(kept)
    }

    fn last(&self) -> Option<LogId> {
        self.entries.back().map(|entry| entry.log_id).or(self.purged)
    }

    /// `None` before the first entry.
    fn next_index(&self) -> Option<u64> {
        self.last().map(|last| last.index + 1)
    }

    fn first_index(&self) -> u64 {
        self.entries.front().map_or(0, |entry| entry.log_id.index)
    }

    fn push(&mut self, entry: Entry) {
        let index = entry.log_id.index;
        let expected = self.next_index().unwrap_or(index);
        assert_eq!(index, expected, "an append leaves no hole in the log");
        if let EntryPayload::Membership(membership) = &entry.payload {
            let stored = StoredMembership::new(Some(entry.log_id), membership.clone());
            self.memberships.insert(index, stored);
        }
        self.entries.push_back(entry);
    }

    fn truncate_from(&mut self, index: u64) {
        let keep = index.saturating_sub(self.first_index()) as usize;
        self.entries.truncate(keep);
        self.memberships.split_off(&index);
    }

    fn purge(&mut self, purged: LogId) {
        let first = self.first_index();
        let cut = (purged.index + 1).saturating_sub(first).min(self.entries.len() as u64);
        self.entries.drain(..cut as usize);
        self.purged = self.purged.max(Some(purged));
        let last_before = self.memberships.range(..=purged.index).next_back();
        if let Some((&last_before, _)) = last_before {
            self.memberships = self.memberships.split_off(&last_before);
        }
    }

    /// Whatever the log said up to `last` is replaced: a deposed leader's membership, which was
    /// never committed, may have been there.
    fn replace_memberships(&mut self, last: Option<LogId>, membership: &StoredMembership) {
        if membership.membership().get_joint_config().is_empty() {
            return;
        }
        if let Some(last) = last {
            self.memberships = self.memberships.split_off(&(last.index + 1));
        }
        let at = membership.log_id().map_or(0, |at| at.index);
        self.memberships.entry(at).or_insert_with(|| membership.clone());
    }

    fn effective(&self) -> StoredMembership {
        self.memberships.last_key_value().map(|(_, last)| last.clone()).unwrap_or_default()
    }

    fn read(&self, range: impl RangeBounds<u64>, bytes_max: usize) -> Vec<Entry> {
        let first = self.first_index();
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before + 1,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last + 1,
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        let skip = start.saturating_sub(first).min(self.entries.len() as u64) as usize;
        let mut bytes = 0;
        let within = self.entries.range(skip..).take_while(|entry| {
            let more = bytes < bytes_max;
            bytes += ENTRY_OVERHEAD + payload_len(entry);
            more && entry.log_id.index < end
        });
        within.cloned().collect()
    }
}

fn payload_len(entry: &Entry) -> usize {
    match &entry.payload {
        EntryPayload::Blank => 0,
        EntryPayload::Normal(data) => data.bytes().len(),
        EntryPayload::Membership(_) => 4096,
    }
}

impl<E: Env> Log<E> {
    /// `changed` is told of each effective membership, first of the recovered one.
    pub(crate) fn open(
        wal: WalShard<E>,
        recovered: Recovered,
        rounds: impl FnOnce(Option<&Vote>) -> Rc<Rounds>,
        changed: Box<dyn Fn(&Membership)>,
    ) -> Result<Self, LogDamaged> {
        let kept = Kept::recover(recovered)?;
        let rounds = rounds(kept.vote.as_ref());
        let shared = Shared { wal, rounds, changed, kept: RefCell::new(kept) };
        let log = Self { shared: Rc::new(shared) };
        log.membership_changed();
        Ok(log)
    }

    pub(crate) fn rounds(&self) -> &Rc<Rounds> {
        &self.shared.rounds
    }

    /// The effective membership.
    pub(crate) fn membership(&self) -> StoredMembership {
        self.shared.kept.borrow().effective()
    }

    /// What was last known to be committed.
    pub(crate) fn committed(&self) -> Option<LogId> {
        self.shared.kept.borrow().committed
    }

    /// The index after which entries are there, `None` if the log was never cut.
    pub(crate) fn purged(&self) -> Option<LogId> {
        self.shared.kept.borrow().purged
    }

    /// All entries that are kept, in order.
    pub(crate) fn prints(&self) -> Vec<EntryPrint> {
        let print = |entry: &Entry| EntryPrint {
            index: entry.log_id.index,
            leader: (entry.log_id.leader_id.term, NodeId(entry.log_id.leader_id.node_id)),
            crc: crc32c::crc32c(&convert::entry_record(entry)),
        };
        self.shared.kept.borrow().entries.iter().map(print).collect()
    }

    /// A snapshot up to `last` with this membership is in force.
    pub(crate) fn snapshot_membership(&self, last: Option<LogId>, membership: &StoredMembership) {
        self.shared.kept.borrow_mut().replace_memberships(last, membership);
        self.membership_changed();
    }

    /// At start: the newest snapshot covers the log up to `last`. If the log does not go through
    /// `last`, a crash came between that snapshot's arrival and the cut of what it replaces: the
    /// whole log is older than the snapshot or contradicts it, and is dropped.
    pub(crate) fn reconcile(&self, last: LogId) -> Result<(), WalFailed> {
        let mut kept = self.shared.kept.borrow_mut();
        let through = kept.read(last.index..=last.index, 1).first().map(|entry| entry.log_id);
        if through == Some(last) || kept.purged >= Some(last) {
            return Ok(());
        }
        let first = kept.first_index();
        kept.truncate_from(first);
        kept.purge(last);
        drop(kept);
        self.shared.wal.truncate_after(None)?;
        self.shared.wal.purge(last.index, &convert::log_id_record(&last))
    }

    /// The first failure of the WAL ends this node's leadership before the engine hears of it.
    fn checked(&self, done: Result<(), WalFailed>) -> io::Result<()> {
        if done.is_err() {
            self.shared.rounds.fail();
        }
        Ok(done?)
    }

    fn membership_changed(&self) {
        let effective = self.membership();
        let voters = effective.membership().get_joint_config().clone();
        self.shared.rounds.set_voters(voters);
        (self.shared.changed)(effective.membership());
    }
}

impl<E: Env> RaftLogReader<RaftTypes<E>> for Log<E> {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> io::Result<Vec<Entry>>
    where
        RB: RangeBounds<u64> + Clone + Debug,
    {
        Ok(self.shared.kept.borrow().read(range, usize::MAX))
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        Ok(self.shared.kept.borrow().read(start..end, READ_BYTES_MAX))
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.shared.kept.borrow().vote)
    }
}

impl<E: Env> RaftLogStorage<RaftTypes<E>> for Log<E> {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<RaftTypes<E>>> {
        let kept = self.shared.kept.borrow();
        Ok(LogState { last_purged_log_id: kept.purged, last_log_id: kept.last() })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        self.shared.rounds.asked(vote);
        let record = convert::vote_record(vote);
        // Planted (G5): after a restart a node votes a second time in one term.
        if !planted!("vote-not-persisted") {
            self.checked(self.shared.wal.save_vote(&record).await)?;
        }
        self.shared.kept.borrow_mut().vote = Some(*vote);
        Ok(())
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        self.shared.kept.borrow_mut().committed = committed;
        if let Some(committed) = committed {
            let record = convert::log_id_record(&committed);
            self.checked(self.shared.wal.committed(&record))?;
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.shared.kept.borrow().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<RaftTypes<E>>) -> io::Result<()>
    where
        I: IntoIterator<Item = <RaftTypes<E> as RaftTypeConfig>::Entry>,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        let record = |entry| (entry_index(entry), convert::entry_record(entry).into());
        let records: Vec<(u64, Rc<[u8]>)> = entries.iter().map(record).collect();
        let bytes = records.iter().map(|(_, record)| record.len()).sum();
        self.shared.wal.room(records.len(), bytes).await;
        let rounds = self.shared.rounds.clone();
        let flushed = move |done: Result<(), WalFailed>| {
            if done.is_err() {
                rounds.fail();
            }
            callback.io_completed(done.map_err(io::Error::from));
        };
        self.checked(self.shared.wal.append(records, flushed))?;
        let membership = |entry: &Entry| matches!(entry.payload, EntryPayload::Membership(_));
        let membership = entries.iter().any(membership);
        for entry in entries {
            self.shared.kept.borrow_mut().push(entry);
        }
        if membership {
            self.membership_changed();
        }
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let last = last.map(|last| last.index);
        self.checked(self.shared.wal.truncate_after(last))?;
        self.shared.kept.borrow_mut().truncate_from(last.map_or(0, |last| last + 1));
        self.membership_changed();
        Ok(())
    }

    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        let record = convert::log_id_record(&upto);
        self.checked(self.shared.wal.purge(upto.index, &record))?;
        self.shared.kept.borrow_mut().purge(upto);
        Ok(())
    }
}

fn entry_index(entry: &Entry) -> u64 {
    entry.log_id.index
}

#[cfg(test)]
mod tests;
