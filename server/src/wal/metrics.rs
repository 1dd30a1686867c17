//! What a WAL counts about itself.

use std::time::Duration;

use hdrhistogram::Histogram;
use leasehold_protocol::ids::ShardId;

use super::header::HEADER_LEN;

/// Longest sync that the histogram tells from a longer one, in microseconds.
const SYNC_MICROS_MAX: u64 = 60_000_000;

/// A WAL's figures at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WalMetrics {
    /// Completed syncs of segments, headers and seals included.
    pub syncs: u64,
    /// How long they took, in microseconds.
    pub sync_micros: Histogram<u64>,
    /// Records stored.
    pub records: u64,
    /// Bytes of records and headers stored.
    pub stored_bytes: u64,
    /// Seals among the records.
    pub seals: u64,
    /// Segments in use, without spares.
    pub segments: usize,
    /// Segments made since the start.
    pub segments_made: u64,
    /// Bytes that wait for a flush or are in one.
    pub staged_bytes: u64,
    /// Bytes of older segments that each shard keeps from being deleted.
    pub pinned_bytes: Vec<(ShardId, u64)>,
    /// Bytes that this process had the block layer write since the WAL was opened, by what it had
    /// to write: touched pages, zeroes of new segments. `None` where the system does not count.
    /// About 1 is right; above 8, commits are written in larger units than pages. It counts the
    /// whole process, so snapshots and a second WAL raise it.
    pub write_amplification: Option<f64>,
}

/// The counters.
pub(crate) struct Counters {
    pub(crate) syncs: u64,
    pub(crate) sync_micros: Histogram<u64>,
    pub(crate) records: u64,
    pub(crate) stored_bytes: u64,
    pub(crate) seals: u64,
    pub(crate) segments_made: u64,
    /// Bytes that ought to reach the device.
    due_bytes: u64,
    written_at_start: Option<u64>,
}

impl Counters {
    pub(crate) fn new(written_at_start: Option<u64>) -> Self {
        Self {
            syncs: 0,
            sync_micros: Histogram::new_with_max(SYNC_MICROS_MAX, 2).expect("constant bounds"),
            records: 0,
            stored_bytes: 0,
            seals: 0,
            segments_made: 0,
            due_bytes: 0,
            written_at_start,
        }
    }

    /// A sync of the bytes `from..to` of a segment completed.
    pub(crate) fn synced(&mut self, from: u64, to: u64, took: Duration) {
        self.syncs += 1;
        self.stored_bytes += to - from;
        let pages = to.div_ceil(HEADER_LEN) - from / HEADER_LEN;
        self.due_bytes += pages * HEADER_LEN;
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.sync_micros.saturating_record(micros);
    }

    /// A segment of `len` bytes was made.
    pub(crate) fn made_segment(&mut self, len: u64) {
        self.segments_made += 1;
        self.due_bytes += len;
    }

    pub(crate) fn write_amplification(&self, written_now: Option<u64>) -> Option<f64> {
        let written = written_now?.checked_sub(self.written_at_start?)?;
        (self.due_bytes > 0).then(|| written as f64 / self.due_bytes as f64)
    }
}
