//! The bytes of a snapshot's file, written and read piece by piece.
//!
//! ```text
//! offset  size  field
//!      0     8  magic    "LEASESNP"
//!      8     4  version  1
//!     12     4  shard
//!     16    16  cluster
//!     32     4  length of the cover
//!     36     4  CRC-32C of the bytes 0..36 and of the cover
//!     40     -  cover: the last entry and the membership that the snapshot holds (a record)
//!      -     -  chunks: length (4, not 0), CRC-32C (4), bytes
//!      -     4  0: the end
//!      -     8  length of all chunks' bytes
//!      -     8  digest of the state
//!      -     4  CRC-32C of the whole file before this field
//! ```
//!
//! All numbers are little-endian. Reading trusts no length before it is bounded and verifies each
//! part before it hands it on; it never panics on bytes from outside.

use leasehold_protocol::ids::{ClusterId, ShardId};

use crate::raft::convert::{self, RecordError};
use crate::raft::types::SnapshotMeta;

const MAGIC: [u8; 8] = *b"LEASESNP";
const VERSION: u32 = 1;
const HEADER_LEN: usize = 40;
const CHUNK_HEADER_LEN: usize = 8;
const END_LEN: usize = 24;
/// Longest cover, in bytes.
const COVER_LEN_MAX: usize = 256 * 1024;
/// Longest chunk, in bytes.
const CHUNK_LEN_MAX: usize = 1024 * 1024;

/// Whose snapshot it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) cluster: ClusterId,
    pub(crate) shard: ShardId,
}

/// Why bytes are not a snapshot of this group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SnapshotError {
    /// Not a snapshot's file.
    #[error("it does not open with the magic of a snapshot")]
    Magic,
    /// Written by another version.
    #[error("it has version {0}, this build reads version {VERSION}")]
    Version(u32),
    /// Of another cluster.
    #[error("it belongs to cluster {found}, not to {expected}")]
    Cluster {
        /// The file's.
        found: ClusterId,
        /// This node's.
        expected: ClusterId,
    },
    /// Of another shard.
    #[error("it belongs to shard {found}, not to {expected}")]
    Shard {
        /// The file's.
        found: ShardId,
        /// The group's.
        expected: ShardId,
    },
    /// A checksum does not match, or a length is out of its range.
    #[error("it is damaged at byte {0}")]
    Damaged(u64),
    /// It ends too early, or goes on after its end.
    #[error("it has the wrong length")]
    Length,
    /// Its cover is not understood.
    #[error("its cover: {0}")]
    Cover(RecordError),
    /// Its cover is not what was announced.
    #[error("it covers something else than announced")]
    Announced,
    /// The state in it is not understood.
    #[error("the state in it: {0}")]
    State(String),
}

/// Writes the pieces of a file in their order.
pub(crate) struct FileWriter {
    crc: u32,
    chunks_len: u64,
}

impl FileWriter {
    /// Begins; returns the first bytes.
    pub(crate) fn new(owner: Owner, meta: &SnapshotMeta) -> (Self, Vec<u8>) {
        let cover = convert::meta_record(meta);
        assert!(cover.len() <= COVER_LEN_MAX, "a membership is small");
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&owner.shard.0.to_le_bytes());
        bytes.extend_from_slice(&owner.cluster.0);
        bytes.extend_from_slice(&(cover.len() as u32).to_le_bytes());
        let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes), &cover);
        bytes.extend_from_slice(&crc.to_le_bytes());
        assert_eq!(bytes.len(), HEADER_LEN);
        bytes.extend_from_slice(&cover);
        (Self { crc: crc32c::crc32c(&bytes), chunks_len: 0 }, bytes)
    }

    /// The bytes for a piece of the state; empty for an empty one.
    pub(crate) fn chunk(&mut self, chunk: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(chunk.len() + CHUNK_HEADER_LEN);
        for part in chunk.chunks(CHUNK_LEN_MAX) {
            bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&crc32c::crc32c(part).to_le_bytes());
            bytes.extend_from_slice(part);
        }
        self.chunks_len += chunk.len() as u64;
        self.crc = crc32c::crc32c_append(self.crc, &bytes);
        bytes
    }

    /// The last bytes.
    pub(crate) fn finish(self, digest: u64) -> Vec<u8> {
        let mut bytes = 0_u32.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.chunks_len.to_le_bytes());
        bytes.extend_from_slice(&digest.to_le_bytes());
        let crc = crc32c::crc32c_append(self.crc, &bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        assert_eq!(bytes.len(), END_LEN);
        bytes
    }
}

/// Reads a file fed to it in pieces of any size.
pub(crate) struct FileReader {
    owner: Owner,
    /// Bytes not yet understood: less than one part.
    rest: Vec<u8>,
    /// Of all bytes before `rest`.
    crc: u32,
    read: u64,
    chunks_len: u64,
    meta: Option<SnapshotMeta>,
    digest: Option<u64>,
}

impl FileReader {
    pub(crate) fn new(owner: Owner) -> Self {
        let (meta, digest) = (None, None);
        Self { owner, rest: Vec::new(), crc: 0, read: 0, chunks_len: 0, meta, digest }
    }

    /// What the snapshot covers, once that was read.
    pub(crate) fn meta(&self) -> Option<&SnapshotMeta> {
        self.meta.as_ref()
    }

    /// Takes the next bytes and hands verified pieces of the state to `chunk`.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        mut chunk: impl FnMut(&[u8]) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        self.rest.extend_from_slice(bytes);
        let rest = std::mem::take(&mut self.rest);
        let mut at = 0;
        loop {
            let part = &rest[at..];
            let taken = if self.digest.is_some() {
                if part.is_empty() { 0 } else { return Err(SnapshotError::Length) }
            } else if self.meta.is_none() {
                self.header(part)?
            } else {
                self.part(part, &mut chunk)?
            };
            if taken == 0 {
                break;
            }
            self.crc = crc32c::crc32c_append(self.crc, &part[..taken]);
            self.read += taken as u64;
            at += taken;
        }
        self.rest = rest[at..].to_vec();
        Ok(())
    }

    /// The whole file was fed: what it covers and the state's digest.
    pub(crate) fn finish(self) -> Result<(SnapshotMeta, u64), SnapshotError> {
        match (self.meta, self.digest) {
            (Some(meta), Some(digest)) if self.rest.is_empty() => Ok((meta, digest)),
            _ => Err(SnapshotError::Length),
        }
    }

    /// Length of the header with its cover, 0 if it is not yet there.
    fn header(&mut self, bytes: &[u8]) -> Result<usize, SnapshotError> {
        let Some(header) = bytes.first_chunk::<HEADER_LEN>() else { return Ok(0) };
        if header[..8] != MAGIC {
            return Err(SnapshotError::Magic);
        }
        let version = u32_at(header, 8);
        if version != VERSION {
            return Err(SnapshotError::Version(version));
        }
        let cover_len = u32_at(header, 32) as usize;
        if cover_len > COVER_LEN_MAX {
            return Err(SnapshotError::Damaged(32));
        }
        let end = HEADER_LEN + cover_len;
        let Some(cover) = bytes.get(HEADER_LEN..end) else { return Ok(0) };
        let crc = crc32c::crc32c_append(crc32c::crc32c(&header[..36]), cover);
        if crc != u32_at(header, 36) {
            return Err(SnapshotError::Damaged(36));
        }
        let cluster = ClusterId(header[16..32].try_into().expect("16 bytes"));
        self.check_owner(Owner { cluster, shard: ShardId(u32_at(header, 12)) })?;
        self.meta = Some(convert::read_meta(cover).map_err(SnapshotError::Cover)?);
        Ok(end)
    }

    fn check_owner(&self, found: Owner) -> Result<(), SnapshotError> {
        let expected = self.owner;
        if found.cluster != expected.cluster {
            let (found, expected) = (found.cluster, expected.cluster);
            return Err(SnapshotError::Cluster { found, expected });
        }
        if found.shard != expected.shard {
            let (found, expected) = (found.shard, expected.shard);
            return Err(SnapshotError::Shard { found, expected });
        }
        Ok(())
    }

    /// Length of the next chunk or of the end, 0 if it is not yet there.
    fn part(
        &mut self,
        bytes: &[u8],
        chunk: &mut impl FnMut(&[u8]) -> Result<(), SnapshotError>,
    ) -> Result<usize, SnapshotError> {
        let Some(len) = bytes.first_chunk() else { return Ok(0) };
        let len = u32::from_le_bytes(*len) as usize;
        if len == 0 {
            return self.end(bytes);
        }
        if len > CHUNK_LEN_MAX {
            return Err(SnapshotError::Damaged(self.read));
        }
        let end = CHUNK_HEADER_LEN + len;
        let Some(body) = bytes.get(CHUNK_HEADER_LEN..end) else { return Ok(0) };
        if crc32c::crc32c(body) != u32_at(bytes, 4) {
            return Err(SnapshotError::Damaged(self.read));
        }
        self.chunks_len += len as u64;
        chunk(body)?;
        Ok(end)
    }

    fn end(&mut self, bytes: &[u8]) -> Result<usize, SnapshotError> {
        let Some(end) = bytes.get(..END_LEN) else { return Ok(0) };
        let crc = crc32c::crc32c_append(self.crc, &end[..END_LEN - 4]);
        if crc != u32_at(end, END_LEN - 4) {
            return Err(SnapshotError::Damaged(self.read));
        }
        if u64_at(end, 4) != self.chunks_len {
            return Err(SnapshotError::Length);
        }
        self.digest = Some(u64_at(end, 12));
        Ok(END_LEN)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
