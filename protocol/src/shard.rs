//! Which shard owns a key, and whether a client's input is in range: the one place that client,
//! server and state machine ask, so that they cannot differ.
//!
//! The key hash is published and never changes within a cluster: its number travels in the
//! server's hello, and `docs/PROTOCOL.md` lists test vectors.

use alloc::vec::Vec;

use crate::command::Want;
use crate::error::ErrorCode;
use crate::ids::{Mode, ShardId};
use crate::limits::{
    KEY_LEN_MAX, LABEL_LEN_MAX, LOCK_DELAY_MS_MAX, PERMITS_MAX, REASON_LEN_MAX, SHARDS_MAX,
    TTL_MS_MAX, TTL_MS_MIN, VALUE_LEN_MAX, WANTS_MAX,
};

/// The number of the key hash described here, for `ServerHello::key_hash`.
pub const KEY_HASH: u8 = 1;

/// The hash of the part of a key that decides its shard: its CRC-32C, then mixed so that every bit
/// depends on every other. Unmixed, keys that count up in their last letter share their low bits
/// and would fall into few of the shards.
pub fn key_hash(key: &[u8]) -> u32 {
    mix(crc32c::crc32c(hashed_part(key)))
}

/// The finalizer of 32-bit `MurmurHash3` (Appleby, public domain).
const fn mix(mut hash: u32) -> u32 {
    hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

/// The inside of the key's `{tag}` if it has one, else the whole key. A tag runs from the first
/// `{` to the first `}` after it and is not empty.
fn hashed_part(key: &[u8]) -> &[u8] {
    let Some(open) = key.iter().position(|&byte| byte == b'{') else { return key };
    let inside = &key[open + 1..];
    match inside.iter().position(|&byte| byte == b'}') {
        None | Some(0) => key,
        Some(close) => &inside[..close],
    }
}

/// The shard that owns a key in a cluster of `shards` shards.
///
/// # Panics
/// If `shards` is 0; see `check_shards`.
pub fn shard_of(key: &[u8], shards: u32) -> ShardId {
    assert!(shards > 0, "a cluster has at least one shard");
    ShardId(key_hash(key) % shards)
}

/// A key: 1 to `KEY_LEN_MAX` bytes of UTF-8.
pub const fn check_key(key: &[u8]) -> Result<&str, ErrorCode> {
    if key.is_empty() {
        return Err(ErrorCode::KEY_EMPTY);
    }
    if key.len() > KEY_LEN_MAX {
        return Err(ErrorCode::KEY_TOO_LONG);
    }
    match core::str::from_utf8(key) {
        Ok(key) => Ok(key),
        Err(_) => Err(ErrorCode::KEY_NOT_UTF8),
    }
}

/// The prefix or the start of a listing: like a key, but it may be empty and may end within a
/// character.
pub const fn check_key_bound(bound: &[u8]) -> Result<(), ErrorCode> {
    if bound.len() > KEY_LEN_MAX { Err(ErrorCode::KEY_TOO_LONG) } else { Ok(()) }
}

/// A value: at most `VALUE_LEN_MAX` bytes of any content.
pub const fn check_value(value: &[u8]) -> Result<(), ErrorCode> {
    if value.len() > VALUE_LEN_MAX { Err(ErrorCode::VALUE_TOO_LARGE) } else { Ok(()) }
}

/// A lease's time to live, `TTL_MS_MIN..=TTL_MS_MAX` milliseconds. Takes more bits than a lease
/// has, so that a caller's absurd number is refused and not cut to size first.
pub const fn check_ttl_ms(ttl_ms: u64) -> Result<u32, ErrorCode> {
    if ttl_ms < TTL_MS_MIN as u64 || ttl_ms > TTL_MS_MAX as u64 {
        return Err(ErrorCode::TTL_OUT_OF_RANGE);
    }
    Ok(ttl_ms as u32)
}

/// A session's label or the `who` of a forced release: at most `LABEL_LEN_MAX` bytes of UTF-8.
pub const fn check_label(label: &[u8]) -> Result<&str, ErrorCode> {
    check_text(label, LABEL_LEN_MAX)
}

/// The reason of a forced release: at most `REASON_LEN_MAX` bytes of UTF-8.
pub const fn check_reason(reason: &[u8]) -> Result<&str, ErrorCode> {
    check_text(reason, REASON_LEN_MAX)
}

const fn check_text(text: &[u8], len_max: usize) -> Result<&str, ErrorCode> {
    if text.len() > len_max {
        return Err(ErrorCode::LABEL_TOO_LONG);
    }
    match core::str::from_utf8(text) {
        Ok(text) => Ok(text),
        Err(_) => Err(ErrorCode::LABEL_TOO_LONG),
    }
}

/// One key of an acquire with options.
pub const fn check_want(want: &Want) -> Result<(), ErrorCode> {
    if let Err(code) = check_key(want.key.as_slice()) {
        return Err(code);
    }
    match want.mode.permit_count() {
        Some(count) if count < 1 || count > want.limit => Err(ErrorCode::PERMITS_OUT_OF_RANGE),
        Some(_) => check_limit(want.limit),
        None if want.limit != 0 => Err(ErrorCode::BAD_COMBINATION),
        None => check_mode(want.mode),
    }
}

/// The keys of an acquire with options: 1 to `WANTS_MAX`, none twice. Of several, none may ask to
/// enter a hold once more, nor may the acquire ask for a lease of its hold's own.
pub fn check_wants(wants: &[Want], own: bool) -> Result<(), ErrorCode> {
    if wants.len() > WANTS_MAX {
        return Err(ErrorCode::TOO_MANY_ITEMS);
    }
    wants.iter().try_for_each(check_want)?;
    let mut keys: Vec<&[u8]> = wants.iter().map(|want| want.key.as_slice()).collect();
    keys.sort_unstable();
    if keys.is_sorted_by(|a, b| a < b) {
        let several = wants.len() > 1 && (own || wants.iter().any(|want| want.reentrant));
        if several || wants.is_empty() { Err(ErrorCode::BAD_COMBINATION) } else { Ok(()) }
    } else {
        Err(ErrorCode::DUPLICATE_KEY)
    }
}

/// A semaphore's number of permits.
pub const fn check_limit(limit: u32) -> Result<(), ErrorCode> {
    if limit >= 1 && limit <= PERMITS_MAX { Ok(()) } else { Err(ErrorCode::PERMITS_OUT_OF_RANGE) }
}

/// A lock-delay.
pub const fn check_delay_ms(delay_ms: u32) -> Result<(), ErrorCode> {
    if delay_ms <= LOCK_DELAY_MS_MAX { Ok(()) } else { Err(ErrorCode::DELAY_OUT_OF_RANGE) }
}

/// A mode of a lock.
pub const fn check_mode(mode: Mode) -> Result<(), ErrorCode> {
    if mode.0 <= Mode::SHARED.0 { Ok(()) } else { Err(ErrorCode::UNSUPPORTED_MODE) }
}

/// A number of shards that a cluster can have.
pub const fn check_shards(shards: u32) -> Result<(), ErrorCode> {
    if shards >= 1 && shards <= SHARDS_MAX { Ok(()) } else { Err(ErrorCode::WRONG_SHARD) }
}

/// A request's shard: that of its key.
pub fn check_shard(shard: ShardId, key: &[u8], shards: u32) -> Result<(), ErrorCode> {
    if shard == shard_of(key, shards) { Ok(()) } else { Err(ErrorCode::WRONG_SHARD) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_tag_if_there_is_one() {
        let same = |a: &str, b: &str| assert_eq!(key_hash(a.as_bytes()), key_hash(b.as_bytes()));
        same("{user1}/lock", "user1");
        same("jobs/{user1}", "user1");
        same("a{b}{c}", "b");
        same("a{b{c}d", "b{c");
        let whole =
            |key: &str| assert_eq!(key_hash(key.as_bytes()), mix(crc32c::crc32c(key.as_bytes())));
        whole("plain");
        whole("{}x");
        whole("a{}b{c}");
        whole("{open");
        whole("close}{");
        whole("");
    }

    #[test]
    fn keys_that_differ_in_a_letter_do_not_share_shards() {
        let shards = |last: char| shard_of(std::format!("key/{last}").as_bytes(), 4);
        let used: alloc::collections::BTreeSet<_> = ('a'..='p').map(shards).collect();
        assert_eq!(used.len(), 4, "{used:?}");
    }

    #[test]
    fn every_shard_gets_its_part_of_the_keys() {
        let mut counts = [0_u32; 7];
        for number in 0..7_000 {
            let key = std::format!("jobs/nightly/{number}");
            counts[shard_of(key.as_bytes(), 7).0 as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
        assert_eq!(shard_of(b"any", 1), ShardId(0));
    }

    #[test]
    fn keys_values_and_labels_are_checked_at_both_ends_of_their_range() {
        assert_eq!(check_key(b""), Err(ErrorCode::KEY_EMPTY));
        assert_eq!(check_key(b"k"), Ok("k"));
        assert!(check_key(&[b'k'; KEY_LEN_MAX]).is_ok());
        assert_eq!(check_key(&[b'k'; KEY_LEN_MAX + 1]), Err(ErrorCode::KEY_TOO_LONG));
        assert_eq!(check_key(b"k\xff"), Err(ErrorCode::KEY_NOT_UTF8));
        assert_eq!(check_key_bound(b""), Ok(()));
        assert_eq!(check_key_bound(&[b'k'; KEY_LEN_MAX + 1]), Err(ErrorCode::KEY_TOO_LONG));
        assert_eq!(check_value(&[0xff; VALUE_LEN_MAX]), Ok(()));
        assert_eq!(check_value(&[0; VALUE_LEN_MAX + 1]), Err(ErrorCode::VALUE_TOO_LARGE));
        assert_eq!(check_label(b""), Ok(""));
        assert!(check_label(&[b'l'; LABEL_LEN_MAX]).is_ok());
        assert_eq!(check_label(&[b'l'; LABEL_LEN_MAX + 1]), Err(ErrorCode::LABEL_TOO_LONG));
        assert_eq!(check_label(b"\xc3"), Err(ErrorCode::LABEL_TOO_LONG));
        assert!(check_reason(&[b'r'; REASON_LEN_MAX]).is_ok());
        assert_eq!(check_reason(&[b'r'; REASON_LEN_MAX + 1]), Err(ErrorCode::LABEL_TOO_LONG));
    }

    #[test]
    fn absurd_numbers_are_out_of_range_and_never_cut_to_size() {
        for ttl_ms in [0, 999, 600_001, 1 << 32, (1 << 32) + 5_000, 5_000_000_000, u64::MAX] {
            assert_eq!(check_ttl_ms(ttl_ms), Err(ErrorCode::TTL_OUT_OF_RANGE), "{ttl_ms}");
        }
        assert_eq!(check_ttl_ms(1_000), Ok(1_000));
        assert_eq!(check_ttl_ms(600_000), Ok(600_000));
        assert_eq!(check_mode(Mode::EXCLUSIVE), Ok(()));
        assert_eq!(check_mode(Mode::SHARED), Ok(()));
        assert_eq!(check_mode(Mode(2)), Err(ErrorCode::UNSUPPORTED_MODE));
        assert_eq!(check_shards(0), Err(ErrorCode::WRONG_SHARD));
        assert_eq!(check_shards(SHARDS_MAX), Ok(()));
        assert_eq!(check_shards(SHARDS_MAX + 1), Err(ErrorCode::WRONG_SHARD));
        let want = |mode, limit| {
            check_want(&Want { key: alloc::vec![b'k'], mode, limit, reentrant: false })
        };
        for limit in [1, 7, PERMITS_MAX] {
            assert_eq!(want(Mode::permits(1), limit), Ok(()));
            assert_eq!(want(Mode::permits(limit), limit), Ok(()));
        }
        for (count, limit) in
            [(0, 0), (0, 1), (1, 0), (2, 1), (1, PERMITS_MAX + 1), (u32::MAX, u32::MAX)]
        {
            let said = want(Mode::permits(count), limit);
            assert_eq!(said, Err(ErrorCode::PERMITS_OUT_OF_RANGE), "{count} of {limit}");
        }
        assert_eq!(want(Mode::SHARED, 0), Ok(()));
        assert_eq!(want(Mode::SHARED, 1), Err(ErrorCode::BAD_COMBINATION));
        assert_eq!(want(Mode(3), 0), Err(ErrorCode::UNSUPPORTED_MODE));
        assert_eq!(check_delay_ms(LOCK_DELAY_MS_MAX), Ok(()));
        assert_eq!(check_delay_ms(LOCK_DELAY_MS_MAX + 1), Err(ErrorCode::DELAY_OUT_OF_RANGE));
        let many = |count: usize, reentrant| -> Vec<Want> {
            let key = |at: usize| std::format!("k{at}").into_bytes();
            let want = |at| Want { key: key(at), mode: Mode::SHARED, limit: 0, reentrant };
            (0..count).map(want).collect()
        };
        assert_eq!(check_wants(&many(WANTS_MAX, false), false), Ok(()));
        assert_eq!(check_wants(&many(1, true), true), Ok(()));
        let too_many = many(WANTS_MAX + 1, false);
        assert_eq!(check_wants(&too_many, false), Err(ErrorCode::TOO_MANY_ITEMS));
        for (count, own, reentrant) in [(0, false, false), (2, true, false), (2, false, true)] {
            let said = check_wants(&many(count, reentrant), own);
            assert_eq!(said, Err(ErrorCode::BAD_COMBINATION), "{count} {own} {reentrant}");
        }
        let twice = [many(2, false), many(1, false)].concat();
        assert_eq!(check_wants(&twice, false), Err(ErrorCode::DUPLICATE_KEY));
        let shard = shard_of(b"k", 5);
        assert_eq!(check_shard(shard, b"k", 5), Ok(()));
        assert_eq!(check_shard(ShardId((shard.0 + 1) % 5), b"k", 5), Err(ErrorCode::WRONG_SHARD));
        assert_eq!(check_shard(ShardId(5), b"k", 5), Err(ErrorCode::WRONG_SHARD));
    }
}
