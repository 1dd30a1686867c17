//! Rebuilds every shard's state and entries from scanned records.
//!
//! Pure. `Ledger` decides what a record means; this keeps the payloads beside it and checks at the
//! end that none is missing.

use std::collections::{BTreeMap, VecDeque};

use leasehold_protocol::ids::ShardId;

use super::error::WalError;
use super::header::{Header, segment_name};
use super::ledger::Ledger;
use super::record::{Blob, Op};
use super::scan::Scan;

/// What the segments on disk add up to.
#[derive(Default)]
pub(crate) struct Replay {
    /// The state.
    pub(crate) ledger: Ledger,
    /// The live entries of each shard, ascending.
    pub(crate) entries: BTreeMap<ShardId, VecDeque<(u64, Blob)>>,
}

impl Replay {
    /// Takes in the next segment of the chain, oldest first.
    pub(crate) fn add(&mut self, header: &Header, scan: Scan) -> Result<(), WalError> {
        self.ledger.begin_segment(header.number, header.base);
        for record in scan.records {
            self.ledger.apply(record.shard, &record.op).map_err(|reason| WalError::Damaged {
                file: segment_name(header.number),
                offset: scan.end,
                reason: format!("record {} contradicts the log: {reason}", record.seq),
            })?;
            self.keep_payloads(record.shard, record.op);
        }
        self.ledger.advance(scan.end, scan.next_seq);
        Ok(())
    }

    fn keep_payloads(&mut self, shard: ShardId, op: Op) {
        match op {
            Op::Entry { index, payload } => {
                self.entries.entry(shard).or_default().push_back((index, payload));
            }
            Op::Truncate(_) | Op::Purge { .. } => self.trim(shard),
            Op::Checkpoint(checkpoint) => {
                checkpoint.shards.keys().for_each(|shard| self.trim(*shard));
            }
            Op::Vote(_) | Op::Committed(_) | Op::Snapshot(_) | Op::Seal => {}
        }
    }

    fn trim(&mut self, shard: ShardId) {
        let Some(entries) = self.entries.get_mut(&shard) else { return };
        let Some(state) = self.ledger.shards().get(&shard) else { return };
        let range = state.range;
        while entries.front().is_some_and(|(index, _)| *index < range.first) {
            entries.pop_front();
        }
        while entries.back().is_some_and(|(index, _)| *index >= range.next) {
            entries.pop_back();
        }
    }

    /// Errors if an entry that a shard still needs is in none of the segments.
    pub(crate) fn check_complete(&self) -> Result<(), WalError> {
        for (shard, state) in self.ledger.shards() {
            let entries = self.entries.get(shard);
            let indexes = entries.into_iter().flatten().map(|(index, _)| *index);
            if !indexes.eq(state.range.first..state.range.next) {
                return Err(WalError::MissingEntries {
                    shard: *shard,
                    first: state.range.first,
                    last: state.range.next.saturating_sub(1),
                });
            }
        }
        Ok(())
    }
}
