//! The bytes of a backup, written and read piece by piece. `docs/BACKUP.md` draws them.
//!
//! Owns the file's layout and its checksums; what the shards' bytes mean is the state machine's
//! (`leasehold_core::backup`). It does no I/O. Every byte is under at least one checksum, and every
//! part says what it is and where it belongs, so that a changed, missing, doubled or displaced one
//! is found and named. Reading allocates for bytes that came, never for lengths that were told.

use alloc::vec::Vec;
use core::fmt;

use crate::ids::{ClusterId, LeaseId, Revision, ShardId, Token};
use crate::limits::SHARDS_MAX;
use crate::reply::BackupShard;

/// The format that this build writes, and the only one there is.
pub const BACKUP_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"LHBACKUP";
const HEADER_LEN: usize = 48;
const SHARD_MAGIC: [u8; 4] = *b"SHRD";
const SHARD_LEN: usize = 52;
const CHUNK_HEADER_LEN: usize = 8;
const SHARD_END_LEN: usize = 16;
const END_MAGIC: [u8; 8] = *b"LHBKPEND";
const END_LEN: usize = 24;
/// Longest chunk of a shard's bytes.
pub const CHUNK_LEN_MAX: usize = 1024 * 1024;

/// What a backup says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupHeader {
    /// The cluster that was backed up.
    pub cluster: ClusterId,
    /// When it was begun, in Unix milliseconds.
    pub wall_ms: u64,
    /// Number of its shards.
    pub shards: u32,
    /// Which key hash was in force.
    pub key_hash: u8,
}

/// Why bytes are not a sound backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// They do not begin like one.
    #[error("not a backup: it does not begin with the magic of one")]
    NotABackup,
    /// Written by another version.
    #[error("a backup of format version {0}; this build reads version {BACKUP_VERSION}")]
    Version(u32),
    /// A checksum does not match, or a length is out of its range.
    #[error("{part} at byte {offset} is damaged")]
    Damaged {
        /// Which part of the file.
        part: Part,
        /// Where that part begins.
        offset: u64,
    },
    /// A part is not the one that belongs there.
    #[error("{part} at byte {offset} is out of place")]
    Misplaced {
        /// What belongs there.
        part: Part,
        /// Where.
        offset: u64,
    },
    /// The file ends within itself.
    #[error("the backup is cut off: it ends at byte {offset}, within {part}")]
    Truncated {
        /// What is cut.
        part: Part,
        /// Length of the file.
        offset: u64,
    },
    /// Bytes follow its end.
    #[error("bytes follow the backup's end at byte {0}")]
    Trailing(u64),
}

/// A part of the file, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The header.
    Header,
    /// The head of a shard.
    Shard(ShardId),
    /// A piece of a shard's bytes, or their end.
    Piece(ShardId),
    /// The end of the file.
    End,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("the header"),
            Self::Shard(shard) => write!(f, "the head of shard {shard}"),
            Self::Piece(shard) => write!(f, "the state of shard {shard}"),
            Self::End => f.write_str("the end mark"),
        }
    }
}

/// Writes the pieces of a backup in their order: header, each shard ascending, end.
#[derive(Debug)]
pub struct BackupWriter {
    shards: u32,
    next: u32,
    crc: u32,
    written: u64,
    open: Option<ShardSum>,
}

/// Of the shard that is being written or read.
#[derive(Clone, Copy, Debug)]
struct ShardSum {
    shard: ShardId,
    /// Of its bytes so far.
    crc: u32,
    len: u64,
}

impl BackupWriter {
    /// Begins; returns the first bytes.
    pub fn new(header: &BackupHeader) -> (Self, Vec<u8>) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&BACKUP_VERSION.to_le_bytes());
        bytes.extend_from_slice(&header.cluster.0);
        bytes.extend_from_slice(&header.wall_ms.to_le_bytes());
        bytes.extend_from_slice(&header.shards.to_le_bytes());
        bytes.extend_from_slice(&[header.key_hash, 0, 0, 0]);
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        assert_eq!(bytes.len(), HEADER_LEN);
        let mut writer = Self { shards: header.shards, next: 0, crc: 0, written: 0, open: None };
        writer.count(&bytes);
        (writer, bytes)
    }

    /// The head of the next shard.
    pub fn shard(&mut self, about: &BackupShard) -> Vec<u8> {
        assert!(self.open.is_none() && about.shard.0 == self.next, "shards come in order");
        let mut bytes = SHARD_MAGIC.to_vec();
        bytes.extend_from_slice(&about.shard.0.to_le_bytes());
        let numbers = [about.revision.0, about.last_token.0, about.last_lease.0, about.leases];
        for number in numbers.into_iter().chain([about.keys]) {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        assert_eq!(bytes.len(), SHARD_LEN);
        self.open = Some(ShardSum { shard: about.shard, crc: 0, len: 0 });
        self.count(&bytes);
        bytes
    }

    /// Further bytes of the shard; empty for none.
    pub fn piece(&mut self, piece: &[u8]) -> Vec<u8> {
        let sum = self.open.as_mut().expect("a piece belongs to a shard");
        let mut bytes = Vec::with_capacity(piece.len() + CHUNK_HEADER_LEN);
        for part in piece.chunks(CHUNK_LEN_MAX) {
            sum.add(part);
            bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&sum.crc.to_le_bytes());
            bytes.extend_from_slice(part);
        }
        self.count(&bytes);
        bytes
    }

    /// The end of the shard.
    pub fn shard_end(&mut self) -> Vec<u8> {
        let sum = self.open.take().expect("a shard is open");
        self.next += 1;
        let bytes = sum.end();
        self.count(&bytes);
        bytes
    }

    /// The last bytes.
    pub fn finish(self) -> Vec<u8> {
        assert!(self.open.is_none() && self.next == self.shards, "every shard is written");
        let mut bytes = END_MAGIC.to_vec();
        bytes.extend_from_slice(&self.shards.to_le_bytes());
        bytes.extend_from_slice(&self.written.to_le_bytes());
        let crc = crc32c::crc32c_append(self.crc, &bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        assert_eq!(bytes.len(), END_LEN);
        bytes
    }

    fn count(&mut self, bytes: &[u8]) {
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        self.written += bytes.len() as u64;
    }
}

impl ShardSum {
    fn add(&mut self, part: &[u8]) {
        self.crc = crc32c::crc32c_append(self.crc, part);
        self.len += part.len() as u64;
    }

    /// No length, the length of all, and a checksum that names the shard.
    fn end(&self) -> Vec<u8> {
        let mut bytes = 0_u32.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.len.to_le_bytes());
        let crc = crc32c::crc32c_append(self.crc, &self.shard.0.to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// What a reader finds, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// The header.
    Header(BackupHeader),
    /// A shard begins.
    Shard(BackupShard),
    /// Verified bytes of that shard.
    Piece(&'a [u8]),
    /// That shard is complete.
    ShardEnd,
}

/// Reads a backup that is fed to it in pieces of any size.
#[derive(Debug, Default)]
pub struct BackupReader {
    /// Bytes not yet understood: less than one part.
    rest: Vec<u8>,
    /// Of all bytes before `rest`.
    crc: u32,
    read: u64,
    header: Option<BackupHeader>,
    next: u32,
    open: Option<ShardSum>,
    ended: bool,
}

impl BackupReader {
    /// A reader that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes and hands on what was verified. After an error the reader is of no use.
    pub fn feed<E: From<BackupError>>(
        &mut self,
        bytes: &[u8],
        mut found: impl FnMut(Found<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.rest.extend_from_slice(bytes);
        let rest = core::mem::take(&mut self.rest);
        let mut at = 0;
        loop {
            let taken = self.part(&rest[at..], &mut found)?;
            if taken == 0 {
                break;
            }
            self.crc = crc32c::crc32c_append(self.crc, &rest[at..at + taken]);
            self.read += taken as u64;
            at += taken;
        }
        self.rest = rest[at..].to_vec();
        Ok(())
    }

    /// All bytes were fed: the backup's header, if it is whole.
    pub fn finish(self) -> Result<BackupHeader, BackupError> {
        let offset = self.read + self.rest.len() as u64;
        match self.header {
            Some(header) if self.ended => Ok(header),
            _ => Err(BackupError::Truncated { part: self.expected(), offset }),
        }
    }

    /// The part that comes next.
    fn expected(&self) -> Part {
        match (self.header, self.open) {
            (None, _) => Part::Header,
            (Some(_), Some(sum)) => Part::Piece(sum.shard),
            (Some(header), None) if self.next < header.shards => Part::Shard(ShardId(self.next)),
            (Some(_), None) => Part::End,
        }
    }

    /// Length of the part that `bytes` begin with, 0 if it is not yet there.
    fn part<E: From<BackupError>>(
        &mut self,
        bytes: &[u8],
        found: &mut impl FnMut(Found<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        if self.ended {
            let more = !bytes.is_empty();
            return if more { Err(BackupError::Trailing(self.read).into()) } else { Ok(0) };
        }
        match self.expected() {
            Part::Header => self.header(bytes, found),
            Part::Shard(shard) => self.shard(shard, bytes, found),
            Part::Piece(_) => self.piece(bytes, found),
            Part::End => Ok(self.end(bytes)?),
        }
    }

    fn header<E: From<BackupError>>(
        &mut self,
        bytes: &[u8],
        found: &mut impl FnMut(Found<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(BackupError::NotABackup.into());
        }
        let Some(header) = bytes.first_chunk::<HEADER_LEN>() else { return Ok(0) };
        self.check(header)?;
        let version = u32_at(header, 8);
        if version != BACKUP_VERSION {
            return Err(BackupError::Version(version).into());
        }
        let shards = u32_at(header, 36);
        if !(1..=SHARDS_MAX).contains(&shards) || header[41..44] != [0; 3] {
            return Err(self.damaged().into());
        }
        let header = BackupHeader {
            cluster: ClusterId(header[12..28].try_into().expect("16 bytes")),
            wall_ms: u64_at(header, 28),
            shards,
            key_hash: header[40],
        };
        found(Found::Header(header))?;
        self.header = Some(header);
        Ok(HEADER_LEN)
    }

    fn shard<E: From<BackupError>>(
        &mut self,
        shard: ShardId,
        bytes: &[u8],
        found: &mut impl FnMut(Found<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let Some(head) = bytes.first_chunk::<SHARD_LEN>() else { return Ok(0) };
        self.check(head)?;
        let about = BackupShard {
            shard: ShardId(u32_at(head, 4)),
            revision: Revision(u64_at(head, 8)),
            last_token: Token(u64_at(head, 16)),
            last_lease: LeaseId(u64_at(head, 24)),
            leases: u64_at(head, 32),
            keys: u64_at(head, 40),
        };
        if head[..4] != SHARD_MAGIC || about.shard != shard {
            let (part, offset) = (Part::Shard(shard), self.read);
            return Err(BackupError::Misplaced { part, offset }.into());
        }
        found(Found::Shard(about))?;
        self.open = Some(ShardSum { shard, crc: 0, len: 0 });
        Ok(SHARD_LEN)
    }

    fn piece<E: From<BackupError>>(
        &mut self,
        bytes: &[u8],
        found: &mut impl FnMut(Found<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let Some(len) = bytes.first_chunk() else { return Ok(0) };
        let mut sum = self.open.expect("the caller found a shard open");
        let len = u32::from_le_bytes(*len) as usize;
        if len == 0 {
            let Some(end) = bytes.get(..SHARD_END_LEN) else { return Ok(0) };
            if end != sum.end() {
                return Err(self.damaged().into());
            }
            found(Found::ShardEnd)?;
            self.open = None;
            self.next += 1;
            return Ok(SHARD_END_LEN);
        }
        if len > CHUNK_LEN_MAX {
            return Err(self.damaged().into());
        }
        let end = CHUNK_HEADER_LEN + len;
        let Some(body) = bytes.get(CHUNK_HEADER_LEN..end) else { return Ok(0) };
        sum.add(body);
        // Planted (backups): bytes that changed are handed on.
        if sum.crc != u32_at(bytes, 4) && !crate::planted!("piece-checksum-unread") {
            return Err(self.damaged().into());
        }
        found(Found::Piece(body))?;
        self.open = Some(sum);
        Ok(end)
    }

    fn end(&mut self, bytes: &[u8]) -> Result<usize, BackupError> {
        let Some(end) = bytes.get(..END_LEN) else { return Ok(0) };
        let crc = crc32c::crc32c_append(self.crc, &end[..END_LEN - 4]);
        let header = self.header.expect("the header comes first");
        let sound = end[..8] == END_MAGIC
            && u32_at(end, 8) == header.shards
            && u64_at(end, 12) == self.read
            && u32_at(end, 20) == crc;
        if !sound {
            return Err(self.damaged());
        }
        self.ended = true;
        Ok(END_LEN)
    }

    /// A part whose last four bytes are the checksum of those before.
    fn check(&self, part: &[u8]) -> Result<(), BackupError> {
        let (body, crc) = part.split_at(part.len() - 4);
        if u32_at(crc, 0) == crc32c::crc32c(body) { Ok(()) } else { Err(self.damaged()) }
    }

    fn damaged(&self) -> BackupError {
        BackupError::Damaged { part: self.expected(), offset: self.read }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use std::format;
    use std::string::ToString;
    use std::vec;

    use super::*;

    const HEADER: BackupHeader =
        BackupHeader { cluster: ClusterId([7; 16]), wall_ms: 1_234, shards: 2, key_hash: 1 };

    fn about(shard: u32) -> BackupShard {
        BackupShard {
            shard: ShardId(shard),
            revision: Revision(10),
            last_token: Token(20),
            last_lease: LeaseId(30),
            leases: 4,
            keys: 5,
        }
    }

    /// A backup in its parts.
    fn parts() -> Vec<Vec<u8>> {
        let (mut writer, first) = BackupWriter::new(&HEADER);
        let mut parts = vec![first];
        for shard in 0..2 {
            parts.push(writer.shard(&about(shard)));
            parts.push(writer.piece(b"some bytes of a state"));
            parts.push(writer.piece(&[]));
            parts.push(writer.piece(b"and more"));
            parts.push(writer.shard_end());
        }
        parts.push(writer.finish());
        parts
    }

    fn read(bytes: &[u8], step: usize) -> Result<(BackupHeader, Vec<u8>), BackupError> {
        let mut reader = BackupReader::new();
        let mut pieces = Vec::new();
        for bytes in bytes.chunks(step) {
            reader.feed(bytes, |found| {
                match found {
                    Found::Piece(piece) => pieces.extend_from_slice(piece),
                    Found::Shard(shard) => assert_eq!(shard, about(shard.shard.0)),
                    Found::Header(_) | Found::ShardEnd => {}
                }
                Ok::<_, BackupError>(())
            })?;
        }
        Ok((reader.finish()?, pieces))
    }

    #[test]
    fn what_is_written_is_read_in_any_pieces() {
        let bytes = parts().concat();
        for step in [1, 7, 4096] {
            let (header, pieces) = read(&bytes, step).unwrap();
            assert_eq!(header, HEADER);
            assert_eq!(pieces, b"some bytes of a stateand more".repeat(2));
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let good = parts().concat();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&bad, 64).is_err(), "bit {bit}");
        }
        for len in 0..good.len() {
            let error = read(&good[..len], 64).unwrap_err();
            assert!(matches!(error, BackupError::Truncated { .. }), "length {len}: {error}");
            assert!(error.to_string().contains(&format!("byte {len}")), "{error}");
        }
        let longer = [&good[..], b"x"].concat();
        assert_eq!(read(&longer, 64), Err(BackupError::Trailing(good.len() as u64)));
    }

    /// What is handed on is used before the end comes.
    #[test]
    fn a_changed_piece_is_not_handed_on() {
        let parts = parts();
        let begins = parts[..2].concat().len() + CHUNK_HEADER_LEN;
        let good = parts.concat();
        for at in begins..begins + b"some bytes of a state".len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            let mut pieces = 0;
            let fed = BackupReader::new().feed(&bad, |found| {
                pieces += usize::from(matches!(found, Found::Piece(_)));
                Ok::<_, BackupError>(())
            });
            let (part, offset) = (Part::Piece(ShardId(0)), (begins - CHUNK_HEADER_LEN) as u64);
            assert_eq!((fed, pieces), (Err(BackupError::Damaged { part, offset }), 0), "byte {at}");
        }
    }

    #[test]
    fn parts_that_are_missing_doubled_or_swapped_are_noticed() {
        let good = parts();
        for index in 0..good.len() {
            if good[index].is_empty() {
                continue;
            }
            let mut missing = good.clone();
            missing.remove(index);
            assert!(read(&missing.concat(), 64).is_err(), "without part {index}");
            let mut doubled = good.clone();
            doubled.insert(index, good[index].clone());
            assert!(read(&doubled.concat(), 64).is_err(), "part {index} twice");
        }
        let mut swapped = good.clone();
        let (first, second) = (1..6, 6..11);
        let shards = [good[second].concat(), good[first].concat()];
        swapped.splice(1..11, shards);
        assert!(read(&swapped.concat(), 64).unwrap_err().to_string().contains("shard 0"));
    }

    #[test]
    fn another_version_and_another_file_say_so() {
        let mut bytes = parts().concat();
        bytes[8] = 9;
        let crc = crc32c::crc32c(&bytes[..HEADER_LEN - 4]);
        bytes[HEADER_LEN - 4..HEADER_LEN].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(read(&bytes, 64), Err(BackupError::Version(9)));
        assert_eq!(read(b"PK\x03\x04 something else", 4), Err(BackupError::NotABackup));
    }
}
