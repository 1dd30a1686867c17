//! What can go wrong: at opening (`WalError`), and afterwards (`WalFailed`).

use std::fmt;
use std::io;
use std::sync::Arc;

use leasehold_protocol::ids::ShardId;

/// What an operator does about a log that must not be used.
const REMEDY: &str = "the other members still have the data: move this node's data directory \
                      away and let the node join again as a new member";

/// Why a log does not open. Nothing was changed on disk unless the variant says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalError {
    /// The configuration contradicts itself.
    #[error("the WAL's configuration is wrong: {}", .0.join("; "))]
    Config(Vec<String>),
    /// A file cannot be read, written or made. The disk may be full or failing.
    #[error("{operation} {file}: {source}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        file: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The log belongs to another cluster, node, data directory or core, or was written with
    /// another number of cores.
    #[error("{file} belongs to {what} {found}, but this is {what} {expected}")]
    Foreign {
        /// The segment.
        file: String,
        /// Which of the identities differs.
        what: &'static str,
        /// What the segment says.
        found: String,
        /// What the caller says.
        expected: String,
    },
    /// The segment's format is newer than this program.
    #[error("{file} has format version {found}; this program reads {}", super::header::VERSION)]
    Version {
        /// The segment.
        file: String,
        /// Its version.
        found: u32,
    },
    /// Bytes that were durable are damaged or gone: acknowledged changes may be lost.
    #[error("{file} is damaged at offset {offset}: {reason}. Remedy: {REMEDY}")]
    Damaged {
        /// The segment.
        file: String,
        /// Where the damage starts, in bytes.
        offset: u64,
        /// How it is known to be damage and not a torn tail.
        reason: String,
    },
    /// Entries that are still needed are in no segment.
    #[error("entries {first}..={last} of shard {shard} are missing. Remedy: {REMEDY}")]
    MissingEntries {
        /// The shard.
        shard: ShardId,
        /// The first index that should be there.
        first: u64,
        /// The last one.
        last: u64,
    },
    /// The log keeps more segments than the configuration allows, even with the reserve.
    #[error("the log needs {kept} segments and may have {kept_max}: raise segments_max")]
    TooManySegments {
        /// Segments that cannot be deleted.
        kept: usize,
        /// How many a start tolerates.
        kept_max: usize,
    },
    /// The new segment could not be begun.
    #[error(transparent)]
    Failed(#[from] WalFailed),
}

impl WalError {
    pub(crate) fn io(operation: &'static str, file: &str, source: io::Error) -> Self {
        Self::Io { operation, file: file.to_owned(), source }
    }
}

/// What the last crash left at the end of the log: records of a flush that never completed, none of
/// which was acknowledged. They were cut off, which is no error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TornTail {
    /// The segment.
    pub file: String,
    /// Where the log now ends, in bytes.
    pub offset: u64,
    /// Number of the first record that was cut off.
    pub seq: u64,
    /// Bytes that were cut off.
    pub len: u64,
}

impl fmt::Display for TornTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, offset, seq, len } = self;
        write!(f, "record {seq} at offset {offset} of {file}: {len} bytes of an unfinished flush")
    }
}

/// The one failure that ended a log: first come, kept for ever.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What was tried.
    pub operation: &'static str,
    /// On which file.
    pub file: String,
    /// The kind of the system's answer; `StorageFull` for a full disk.
    pub kind: io::ErrorKind,
    /// The system's answer.
    pub message: String,
}

impl Failure {
    pub(crate) fn new(operation: &'static str, file: &str, error: &io::Error) -> Self {
        let message = error.to_string();
        Self { operation, file: file.to_owned(), kind: error.kind(), message }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.operation, self.file, self.message)
    }
}

/// Why a record was not made durable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WalFailed {
    /// The log failed, now or earlier. Whether the record will be there after a restart is
    /// unknown; no later record will be acknowledged.
    #[error("the WAL failed: {0}")]
    Failed(Arc<Failure>),
    /// Too much waits for a flush; nothing was staged. `WalShard::room` waits for better times.
    #[error("the WAL has {staged_len} of {staged_len_max} bytes staged")]
    Busy {
        /// Bytes that wait.
        staged_len: u64,
        /// Bytes that may wait.
        staged_len_max: u64,
    },
    /// The entry does not fit; nothing was staged.
    #[error("an entry of {len} bytes is longer than {len_max}")]
    TooLong {
        /// Its length.
        len: usize,
        /// The longest one.
        len_max: usize,
    },
    /// The log was closed; nothing was staged.
    #[error("the WAL is closed")]
    Closed,
}

impl From<WalFailed> for io::Error {
    fn from(failed: WalFailed) -> Self {
        let kind = match &failed {
            WalFailed::Failed(failure) => failure.kind,
            WalFailed::Busy { .. } => io::ErrorKind::ResourceBusy,
            WalFailed::TooLong { .. } => io::ErrorKind::InvalidInput,
            WalFailed::Closed => io::ErrorKind::BrokenPipe,
        };
        Self::new(kind, failed)
    }
}
