//! Small files that are replaced whole: magic, version, kind, length, checksum, body.
//!
//! ```text
//!  0  8  magic "LEASEHLD"
//!  8  1  format version, 1
//!  9  1  kind of the body
//! 10  2  zero
//! 12  4  length of the body, little-endian
//! 16  4  CRC-32C of bytes 8..16 and the body, little-endian
//! 20     body (rkyv)
//! ```
//!
//! A file is written under a temporary name, synced, renamed, and its directory synced, so that
//! after a crash either the old or the new content is there, whole. Anything else is damage and an
//! error; nothing is ever repaired by guess.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"LEASEHLD";
const VERSION: u8 = 1;
const HEADER_LEN: usize = 20;
/// Longest body; far above any that is written.
const BODY_LEN_MAX: usize = 64 * 1024;

/// What a file holds; stored, so that files cannot be swapped unnoticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FileKind {
    Owner = 1,
    Boot = 2,
    /// A birth record that knew nothing of restored clusters: read, never written.
    BirthFormer = 3,
    Removed = 4,
    Restore = 5,
    Birth = 6,
}

/// Why a file of the data directory is of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The content is not what was written.
    #[error("{}: damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// The file was written by a newer version.
    #[error("{}: format {found}, but this version reads up to {VERSION}", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// The format found.
        found: u8,
    },
}

impl FileError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// The whole file for a body.
pub(super) fn encode(kind: FileKind, body: &[u8]) -> Vec<u8> {
    assert!(body.len() <= BODY_LEN_MAX, "identity bodies are small by construction");
    let mut bytes = Vec::with_capacity(HEADER_LEN + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&[VERSION, kind as u8, 0, 0]);
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[8..16]), body);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// The body of a whole file.
pub(super) fn decode<'a>(
    path: &Path,
    kind: FileKind,
    bytes: &'a [u8],
) -> Result<&'a [u8], FileError> {
    let damaged = |what| FileError::Damaged { path: path.to_owned(), what };
    if bytes.len() < HEADER_LEN {
        return Err(damaged("shorter than its header"));
    }
    let (header, body) = bytes.split_at(HEADER_LEN);
    if &header[..8] != MAGIC {
        return Err(damaged("not a file of Leasehold"));
    }
    if header[8] > VERSION {
        return Err(FileError::Newer { path: path.to_owned(), found: header[8] });
    }
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    if word(12) as usize != body.len() {
        return Err(damaged("its length is not the recorded one"));
    }
    if word(16) != crc32c::crc32c_append(crc32c::crc32c(&header[8..16]), body) {
        return Err(damaged("its checksum does not match"));
    }
    if header[9] != kind as u8 {
        return Err(damaged("it holds something else than its name says"));
    }
    Ok(body)
}

/// True if a whole file says that it holds this kind; `decode` finds out whether that is so.
pub(super) fn claims(kind: FileKind, bytes: &[u8]) -> bool {
    bytes.get(9) == Some(&(kind as u8))
}

/// A file's bytes; `None` if it does not exist.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::io(path)(error)),
    }
}

/// Replaces `dir/name`, durably on return. After an error the caller must stop: what is on disk
/// is not known.
pub(super) fn replace(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), FileError> {
    let draft = dir.join(format!("{name}.new"));
    let mut file = File::create(&draft).map_err(FileError::io(&draft))?;
    file.write_all(bytes).map_err(FileError::io(&draft))?;
    file.sync_all().map_err(FileError::io(&draft))?;
    let target = dir.join(name);
    fs::rename(&draft, &target).map_err(FileError::io(&target))?;
    sync_dir(dir)
}

/// Makes the names in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), FileError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(FileError::io(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path() -> &'static Path {
        Path::new("some/file")
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let good = encode(FileKind::Boot, b"some body");
        assert_eq!(decode(path(), FileKind::Boot, &good).unwrap(), b"some body");
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(path(), FileKind::Boot, &bad).is_err(), "bit {bit}");
        }
        for len in 0..good.len() {
            assert!(decode(path(), FileKind::Boot, &good[..len]).is_err(), "length {len}");
        }
    }

    #[test]
    fn another_kind_is_refused() {
        let error = decode(path(), FileKind::Birth, &encode(FileKind::Boot, b"")).unwrap_err();
        assert!(error.to_string().contains("something else"), "{error}");
    }

    #[test]
    fn a_newer_format_names_both() {
        let mut bytes = encode(FileKind::Boot, b"");
        bytes[8] = 7;
        let error = decode(path(), FileKind::Boot, &bytes).unwrap_err().to_string();
        assert!(error.contains("format 7") && error.contains("up to 1"), "{error}");
    }

    #[test]
    fn replace_leaves_no_draft_and_overwrites_an_old_one() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x.new"), b"left by a crash, and longer than the next").unwrap();
        replace(dir.path(), "x", b"one").unwrap();
        replace(dir.path(), "x", b"two").unwrap();
        assert_eq!(read(&dir.path().join("x")).unwrap().unwrap(), b"two");
        assert!(read(&dir.path().join("x.new")).unwrap().is_none());
    }
}
