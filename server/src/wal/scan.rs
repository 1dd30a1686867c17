//! Reads a segment's records and decides where it ends: torn tail, recorded cut, or damage.
//!
//! The records of a flush that never completed may be on disk in part and in any order, page by
//! page, so the first bad record proves nothing by itself. Two facts do:
//!
//! - a newer header names this segment's cut: everything before it was durable, so a bad record
//!   there is damage, and everything after it is void;
//! - a later record, still valid, carries a `durable_seq` at or above the bad one's `seq`: the bad
//!   one had been durable, so it is damage.
//!
//! Otherwise the segment ends at the first bad record. Damage to the very last flush before a
//! crash, not followed by a seal, looks exactly like a torn tail and is cut like one.

use leasehold_protocol::planted;

use super::header::{Cut, HEADER_LEN, Header};
use super::record::{ALIGN, Op, Record, View};

/// The records of a segment that count.
#[derive(Debug)]
pub(crate) struct Scan {
    /// In order.
    pub(crate) records: Vec<Record>,
    /// Offset behind the last one.
    pub(crate) end: u64,
    /// One more than the last one's `seq`.
    pub(crate) next_seq: u64,
    /// Bytes behind `end` up to the last that is not zero, if nothing says that they are void: what
    /// a flush left that never completed.
    pub(crate) torn_len: u64,
}

/// Durable bytes that are not what they were.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Damage {
    /// Where.
    pub(crate) offset: u64,
    /// How that is known.
    pub(crate) reason: String,
}

impl Scan {
    /// Number of the opening's records, if all of them are there: the checkpoint and the entries
    /// that it says were carried.
    pub(crate) fn opening_len(&self) -> Option<usize> {
        let Op::Checkpoint(checkpoint) = &self.records.first()?.op else { return None };
        let len = 1 + checkpoint.carried as usize;
        (self.records.len() >= len).then_some(len)
    }
}

/// Reads `bytes`, a whole segment, as far as it counts.
pub(crate) fn scan(bytes: &[u8], header: &Header, cut: Option<Cut>) -> Result<Scan, Damage> {
    if bytes.len() as u64 != header.segment_len {
        let reason = format!("it has {} of {} bytes", bytes.len(), header.segment_len);
        return Err(Damage { offset: bytes.len() as u64, reason });
    }
    let found = valid_prefix(bytes, header, cut.map_or(bytes.len() as u64, |cut| cut.end));
    match cut {
        Some(cut) if found.end == cut.end && found.next_seq == cut.next_seq => Ok(found),
        Some(cut) => Err(Damage {
            offset: found.end,
            reason: format!(
                "record {} is not valid, though a later segment says that all up to offset {} was \
                 durable",
                found.next_seq, cut.end
            ),
        }),
        None => {
            refuse_lost_records(bytes, header, &found)?;
            Ok(Scan { torn_len: used_len(&bytes[found.end as usize..]), ..found })
        }
    }
}

/// Bytes up to the last that is not zero.
fn used_len(bytes: &[u8]) -> u64 {
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1)
}

fn valid_prefix(bytes: &[u8], header: &Header, end_max: u64) -> Scan {
    let end_max = end_max.min(bytes.len() as u64) as usize;
    let (end, next_seq) = (HEADER_LEN, header.first_seq);
    let mut scan = Scan { records: Vec::new(), end, next_seq, torn_len: 0 };
    let mut durable_seq = 0;
    while let Some(rest) = bytes.get(scan.end as usize..end_max)
        && let Some((record, len)) = Record::decode(rest, header.salt)
        && record.seq == scan.next_seq
        && record.durable_seq >= durable_seq
        && scan.end + len <= end_max as u64
    {
        scan.end += len;
        scan.next_seq += 1;
        durable_seq = record.durable_seq;
        scan.records.push(record);
    }
    scan
}

/// Looks behind the valid prefix for a record that proves that more had been durable.
fn refuse_lost_records(bytes: &[u8], header: &Header, found: &Scan) -> Result<(), Damage> {
    let lost_seq = found.next_seq;
    // Planted (G5): valid records behind a bad one are dropped without a word.
    if planted!("damage-taken-for-a-torn-tail") {
        return Ok(());
    }
    for offset in (found.end as usize..bytes.len()).step_by(ALIGN as usize) {
        let Some(view) = View::at(&bytes[offset..]) else { continue };
        if view.durable_seq >= lost_seq && view.is_authentic(header.salt) {
            let reason = format!(
                "record {lost_seq} is not valid, though record {} at offset {offset} says that all \
                 up to record {} was durable",
                view.seq, view.durable_seq
            );
            return Err(Damage { offset: found.end, reason });
        }
    }
    Ok(())
}
