//! What the caller decides: sizes and limits, and whose log it is.

use std::time::Duration;

use leasehold_protocol::ids::{ClusterId, DiskId, NodeId};

use super::header::HEADER_LEN;

/// Longest vote, log id, commit position or snapshot mark, in bytes.
pub const BLOB_LEN_MAX: usize = 1024;

/// Sizes and limits of one WAL. Every value may change between two starts.
#[derive(Clone, Debug)]
pub struct WalConfig {
    /// Length of a new segment, in bytes: a multiple of 4096, at least 32 KiB. Default 16 MiB.
    /// The longest entry is a quarter of it.
    pub segment_len: u64,
    /// Segments made ahead of need, at least 1. Default 1.
    pub spare_segments: usize,
    /// Bytes that one flush takes at most, except that one record always goes. Default 1 MiB.
    pub batch_len_max: u64,
    /// Bytes that may wait for a flush; beyond, `append` answers `Busy`. Default 32 MiB.
    pub staged_len_max: u64,
    /// Quiet time after which a seal is written. Default 100 ms.
    pub seal_after: Duration,
    /// A shard that keeps more bytes of segments than this from being deleted is asked for a
    /// snapshot. Default 128 MiB.
    pub pin_bytes_max: u64,
    /// Segments in use at most; a log that needs one more fails. Starts may add four, so that a
    /// failed log can be opened and purged. With `segment_len` and `spare_segments` this bounds
    /// the disk use. Default 64.
    pub segments_max: usize,
}

impl Default for WalConfig {
    fn default() -> Self {
        Self {
            segment_len: 16 * 1024 * 1024,
            spare_segments: 1,
            batch_len_max: 1024 * 1024,
            staged_len_max: 32 * 1024 * 1024,
            seal_after: Duration::from_millis(100),
            pin_bytes_max: 128 * 1024 * 1024,
            segments_max: 64,
        }
    }
}

impl WalConfig {
    /// Longest payload of an entry, in bytes.
    pub fn entry_len_max(&self) -> usize {
        usize::try_from(self.segment_len / 4).unwrap_or(usize::MAX)
    }

    /// Every problem, one a line; empty if there is none.
    pub fn validate(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut demand = |holds: bool, problem: String| {
            if !holds {
                problems.push(problem);
            }
        };
        let range = 8 * HEADER_LEN..=1 << 30;
        demand(
            self.segment_len.is_multiple_of(HEADER_LEN) && range.contains(&self.segment_len),
            format!(
                "segment_len is {}; it must be a multiple of {HEADER_LEN} from {} to {}",
                self.segment_len,
                range.start(),
                range.end()
            ),
        );
        demand(self.spare_segments >= 1, "spare_segments is 0; at least 1".into());
        demand(self.batch_len_max >= 1, "batch_len_max is 0; at least 1".into());
        demand(self.staged_len_max >= 1, "staged_len_max is 0; at least 1".into());
        demand(self.segments_max >= 4, format!("segments_max is {}; min 4", self.segments_max));
        problems
    }
}

/// Whose log it is. All but `boot` must be what the log was written with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalIdentity {
    /// The cluster.
    pub cluster: ClusterId,
    /// The node.
    pub node: NodeId,
    /// The data directory.
    pub disk: DiskId,
    /// This core's number, from 0.
    pub core: u32,
    /// The data directory's number of cores.
    pub cores: u32,
    /// How often the node has started; written into headers for whoever reads a dump.
    pub boot: u64,
}
