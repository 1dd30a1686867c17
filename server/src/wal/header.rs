//! A segment's first page: whose it is, and where the log before it ends.
//!
//! The header has the page to itself, so no later store touches it, and it is synced before the
//! first record is stored. A header that names a cut is therefore proof that everything before the
//! cut was durable. Layout in `docs/WAL.md`.

use leasehold_protocol::ids::{ClusterId, DiskId, NodeId};

use super::config::WalIdentity;

/// Bytes that belong to the header; records start here.
pub(crate) const HEADER_LEN: u64 = 4096;
/// Bytes of it that carry meaning.
const USED_LEN: usize = 256;
/// The format that this code writes, and the only one so far.
pub(crate) const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"LEASEWAL";

/// Where an older segment ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    /// The older segment's number; 0 if there is none.
    pub(crate) number: u64,
    /// Offset of the first byte that does not count.
    pub(crate) end: u64,
    /// One more than its last record's `seq`.
    pub(crate) next_seq: u64,
}

/// A segment's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Whose log this is.
    pub(crate) identity: WalIdentity,
    /// The segment's number: rises by time, never reused within a log.
    pub(crate) number: u64,
    /// The file's length.
    pub(crate) segment_len: u64,
    /// Random; seeds the records' checksums.
    pub(crate) salt: u64,
    /// The first record's `seq`.
    pub(crate) first_seq: u64,
    /// The segment written before this one. It matters only while this one's opening is incomplete.
    pub(crate) prev: Cut,
    /// The newest older segment whose entries are needed beside this one's opening.
    pub(crate) base: Cut,
}

/// What the first page of a segment file holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FirstPage {
    /// Nothing but zero: a segment made ahead and never used.
    Blank,
    /// A header.
    Valid(Box<Header>),
    /// A header of a format that this code does not know.
    Version(u32),
    /// Neither.
    Bad,
}

impl Header {
    /// The first page's bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut page = vec![0; USED_LEN];
        let identity = &self.identity;
        let mut put = |offset: usize, bytes: &[u8]| {
            page[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        put(0, MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(16, &identity.cluster.0);
        put(32, &identity.disk.0);
        put(48, &identity.node.0.to_le_bytes());
        put(56, &identity.core.to_le_bytes());
        put(60, &identity.cores.to_le_bytes());
        put(64, &identity.boot.to_le_bytes());
        let cuts = [self.prev, self.base].map(|cut| [cut.number, cut.end, cut.next_seq]);
        let rest = [[self.number, self.segment_len, self.salt], [self.first_seq, 0, 0]];
        let words = rest[0].iter().chain(&rest[1][..1]).chain(cuts.as_flattened());
        for (word, offset) in words.zip((72..).step_by(8)) {
            put(offset, &word.to_le_bytes());
        }
        let crc = crc32c::crc32c(&page);
        page[12..16].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Reads a first page.
    pub(crate) fn decode(page: &[u8]) -> FirstPage {
        if page.iter().all(|byte| *byte == 0) {
            return FirstPage::Blank;
        }
        let Some(used) = page.first_chunk::<USED_LEN>() else { return FirstPage::Bad };
        if &used[..8] != MAGIC {
            return FirstPage::Bad;
        }
        let version = u32_at(used, 8);
        let mut zeroed = *used;
        zeroed[12..16].fill(0);
        if version == VERSION && crc32c::crc32c(&zeroed) == u32_at(used, 12) {
            FirstPage::Valid(Box::new(Self::fields(used)))
        } else if version > VERSION {
            FirstPage::Version(version)
        } else {
            FirstPage::Bad
        }
    }

    fn fields(page: &[u8; USED_LEN]) -> Self {
        let cut_at = |offset| Cut {
            number: u64_at(page, offset),
            end: u64_at(page, offset + 8),
            next_seq: u64_at(page, offset + 16),
        };
        Self {
            identity: WalIdentity {
                cluster: ClusterId(*page[16..].first_chunk().expect("inside the page")),
                disk: DiskId(*page[32..].first_chunk().expect("inside the page")),
                node: NodeId(u64_at(page, 48)),
                core: u32_at(page, 56),
                cores: u32_at(page, 60),
                boot: u64_at(page, 64),
            },
            number: u64_at(page, 72),
            segment_len: u64_at(page, 80),
            salt: u64_at(page, 88),
            first_seq: u64_at(page, 96),
            prev: cut_at(104),
            base: cut_at(128),
        }
    }
}

fn u32_at(page: &[u8; USED_LEN], offset: usize) -> u32 {
    u32::from_le_bytes(*page[offset..].first_chunk().expect("inside the page"))
}

fn u64_at(page: &[u8; USED_LEN], offset: usize) -> u64 {
    u64::from_le_bytes(*page[offset..].first_chunk().expect("inside the page"))
}

const NAME_PREFIX: &str = "wal-";
const NAME_SUFFIX: &str = ".seg";

/// No honest log counts this far; what is added to such a number cannot overflow.
pub(crate) const COUNTER_MAX: u64 = i64::MAX as u64 / 2;

/// Files with higher numbers in their names are not this log's. Far above what a header may say, so
/// that no segment that follows a valid one is ever overlooked.
pub(crate) const NAME_NUMBER_MAX: u64 = i64::MAX as u64;

/// The file name of a segment.
pub(crate) fn segment_name(number: u64) -> String {
    format!("{NAME_PREFIX}{number:016x}{NAME_SUFFIX}")
}

/// The number in a segment's file name; `None` for any other file.
pub(crate) fn segment_number(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(NAME_PREFIX)?.strip_suffix(NAME_SUFFIX)?;
    let number = u64::from_str_radix(digits, 16).ok()?;
    (segment_name(number) == name && (1..=NAME_NUMBER_MAX).contains(&number)).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            identity: WalIdentity {
                cluster: ClusterId([0xc1; 16]),
                node: NodeId(3),
                disk: DiskId([0xd1; 16]),
                core: 1,
                cores: 2,
                boot: 9,
            },
            number: 12,
            segment_len: 65_536,
            salt: 0x0102_0304_0506_0708,
            first_seq: 100,
            prev: Cut { number: 11, end: 8192, next_seq: 100 },
            base: Cut { number: 9, end: 65_504, next_seq: 77 },
        }
    }

    #[test]
    fn a_header_survives_the_round_trip_and_any_flipped_bit_is_noticed() {
        let page = header().encode();
        assert_eq!(Header::decode(&page), FirstPage::Valid(Box::new(header())));
        for bit in 0..page.len() * 8 {
            let mut damaged = page.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches!(Header::decode(&damaged), FirstPage::Valid(_)), "bit {bit}");
        }
    }

    #[test]
    fn blank_bad_and_newer_pages_are_told_apart() {
        assert_eq!(Header::decode(&[0; 4096]), FirstPage::Blank);
        assert_eq!(Header::decode(&[]), FirstPage::Blank);
        assert_eq!(Header::decode(&[1; 4096]), FirstPage::Bad);
        let mut newer = header().encode();
        newer[8] = 2;
        assert_eq!(Header::decode(&newer), FirstPage::Version(2));
    }

    #[test]
    fn names_and_numbers_agree() {
        assert_eq!(segment_name(0x1f), "wal-000000000000001f.seg");
        assert_eq!(segment_number("wal-000000000000001f.seg"), Some(0x1f));
        let foreign = ["wal-1f.seg", "wal-000000000000001F.seg", "snapshot-1", "wal-.seg"];
        assert!(foreign.iter().all(|name| segment_number(name).is_none()));
        assert_eq!(segment_number("wal-0000000000000000.seg"), None);
        assert_eq!(segment_number("wal-7fffffffffffffff.seg"), Some(NAME_NUMBER_MAX));
        assert_eq!(segment_number("wal-8000000000000000.seg"), None);
    }

    #[test]
    fn the_format_is_the_committed_one() {
        crate::wal::golden::check("header-v1.bin", &header().encode());
    }
}
