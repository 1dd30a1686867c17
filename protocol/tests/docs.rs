//! `docs/PROTOCOL.md` says what the code does: error codes, kinds, sizes, limits, key hashes and
//! drawn frames are read from the page and compared.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::shard::{key_hash, shard_of};
use leasehold_protocol::{
    command, ids, kind, limits, member, outcome, peer, reply, request, watch,
};
use rkyv::Archived;

fn page() -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/PROTOCOL.md");
    fs::read_to_string(path).unwrap()
}

/// The rows of the table whose head is `head`, without back-ticks.
fn table(head: &str) -> Vec<Vec<String>> {
    let page = page();
    let mut lines = page.lines().skip_while(|line| *line != head).skip(2).peekable();
    assert!(lines.peek().is_some(), "no table {head}");
    lines
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells = line.trim_matches('|').split('|');
            cells.map(|cell| cell.trim().replace('`', "")).collect()
        })
        .collect()
}

#[test]
fn the_error_table_is_that_of_the_code() {
    let code = |code: &ErrorCode| {
        let (name, class, text) = (code.name(), code.class().name(), code.text());
        vec![code.0.to_string(), name.into(), class.into(), text.to_owned()]
    };
    let expected: Vec<Vec<String>> = ErrorCode::ALL.iter().map(code).collect();
    assert_eq!(table("| code | name | class | meaning |"), expected);
}

#[test]
fn codes_ascend_and_names_lead_back_to_them() {
    for pair in ErrorCode::ALL.windows(2) {
        assert!(pair[0] < pair[1], "{:?} and {:?}", pair[0], pair[1]);
    }
    for code in ErrorCode::ALL {
        assert_eq!(ErrorCode::from_name(code.name()), Some(*code));
    }
    assert_eq!(ErrorCode(999).name(), "unknown_code");
}

#[test]
fn the_table_of_kinds_is_that_of_the_code() {
    let said: Vec<(u8, String)> = table("| kind | name | body | from |")
        .iter()
        .map(|row| (row[0].parse().unwrap(), row[1].clone()))
        .collect();
    let known: Vec<(u8, String)> = (0..=u8::MAX)
        .filter(|&kind| !kind::is_peer(kind) && kind::name(kind) != "unknown")
        .map(|kind| (kind, kind::name(kind).to_owned()))
        .collect();
    assert_eq!(said, known);
}

#[test]
fn the_sizes_of_types_are_those_of_the_code() {
    macro_rules! sizes {
        ($($module:ident::{$($name:ident),*};)*) => {
            [$($((stringify!($name).to_owned(), size_of::<Archived<$module::$name>>())),*),*]
        };
    }
    let known: BTreeMap<String, usize> = sizes! {
        command::{Caller, Command, OwnLease, Want};
        outcome::{Outcome};
        request::{ClientHello, CommandRequest, RenewRequest, RenewItem, GetRequest, ListRequest,
            SessionsRequest, HoldsRequest, ClaimRequest, BackupRequest, StatusRequest, TransferRequest};
        reply::{ServerHello, NodeAddress, LeaderHint, OutcomeReply, RenewReply, RenewResult,
            KeysReply, KeyInfo, LastEnd, Holder, Waiter, Delay, YieldRequest, ClaimReply, Claimed, Waiting, SessionsReply, SessionInfo, HoldsReply, HeldKey,
            StatusReply, NodeStatus, ShardStatus, BackupReply, BackupShard, ErrorReply};
        watch::{WatchRequest, WatchFrom, UnwatchRequest, WatchEvents, WatchEvent, WatchState,
            WatchNotice, WatchEnd};
        member::{MemberCommand, MembersRequest, MembersReply, MemberInfo, MemberOperation,
            ShardProgress, MemberChangeRequest, MemberChange, NewMember, MemberChangeReply,
            GroupStepRequest, GroupGoal};
        peer::{MemberEntry};
    }
    .into();
    let said: BTreeMap<String, usize> = table("| type | bytes | fields |")
        .iter()
        .map(|row| (row[0].clone(), row[1].parse().unwrap()))
        .collect();
    assert_eq!(said, known);
    assert_eq!(size_of::<Archived<ids::Secret>>(), 16);
}

#[test]
fn the_limits_are_those_of_the_code() {
    macro_rules! limits {
        ($($name:ident)*) => { [$((stringify!($name).to_owned(), limits::$name as u64)),*] };
    }
    let known: BTreeMap<String, u64> = limits! {
        KEY_LEN_MAX VALUE_LEN_MAX LABEL_LEN_MAX REASON_LEN_MAX TTL_MS_MIN TTL_MS_MAX SHARDS_MAX
        WINDOW OPEN_WAITS_MAX LEASE_CLAIMS_MAX LEASES_MAX QUEUE_LEN_MAX MEMBERS_MAX MEMBERS_EVER_MAX WANTS_MAX LAST_ENDS_MAX PERMITS_MAX CLAIM_HOLDERS_MAX LOCK_DELAY_MS_MAX ACKS_MAX RENEW_BATCH_MAX PAGE_LEN_MAX
        AUTH_LEN_MAX HELLO_BODY_MAX CLIENT_BODY_MAX REPLY_BODY_MAX PEER_BODY_MAX IN_FLIGHT_MAX
        IN_FLIGHT_RESERVE OUTPUT_LEN_HIGH OUTPUT_LEN_MAX MESSAGE_LEN_MAX HANDSHAKE_MS_MAX
        IDLE_MS_MAX PING_AFTER_MS CURSOR_LEN_MAX WATCHES_MAX CONNECTION_WATCHES_MAX HISTORY_BYTES
        HISTORY_SHARE_MIN WATCH_OUTPUT_MAX
    }
    .into();
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/limits.rs");
    let source = fs::read_to_string(source).unwrap();
    let mut declared: Vec<&str> = source
        .lines()
        .filter_map(|line| line.strip_prefix("pub const ")?.split(':').next())
        .filter(|name| *name != "HEADER_LEN")
        .collect();
    declared.sort_unstable();
    assert_eq!(declared, known.keys().collect::<Vec<_>>(), "every limit is in this test");
    let said: BTreeMap<String, u64> = table("| limit | value | what happens beyond it |")
        .iter()
        .map(|row| (row[0].clone(), row[1].parse().unwrap()))
        .collect();
    assert_eq!(said, known);
}

#[test]
fn the_key_hashes_are_those_of_the_code() {
    let rows = table("| key | hashed | CRC-32C | mixed | of 4 | of 5 | of 64 |");
    assert!(rows.len() >= 9);
    for row in rows {
        let key = row[0].as_bytes();
        let crc = crc32c::crc32c(row[1].as_bytes());
        assert_eq!(format!("{crc:08x}"), row[2], "{}", row[0]);
        assert_eq!(format!("{:08x}", key_hash(key)), row[3], "{}", row[0]);
        for (shards, cell) in [(4, 4), (5, 5), (64, 6)] {
            assert_eq!(shard_of(key, shards).0.to_string(), row[cell], "{}", row[0]);
        }
    }
    assert_eq!(format!("{:08x}", crc32c::crc32c(b"123456789")), "e3069283");
}

/// The blocks marked `bytes NAME` hold the golden frame NAME, at the offsets they say.
#[test]
fn the_drawn_frames_are_the_golden_ones() {
    let page = page();
    let mut names = Vec::new();
    for block in page.split("\n```bytes ").skip(1) {
        let (name, rest) = block.split_once('\n').unwrap();
        let (lines, _) = rest.split_once("\n```").unwrap();
        let mut bytes = Vec::new();
        for line in lines.lines() {
            let mut cells = line.split('|');
            let offset = usize::from_str_radix(cells.next().unwrap().trim(), 16).unwrap();
            assert_eq!(offset, bytes.len(), "{name}: {line}");
            let hex = cells.next().unwrap().split_whitespace();
            bytes.extend(hex.map(|byte| u8::from_str_radix(byte, 16).unwrap()));
        }
        let file =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.bin"));
        assert_eq!(bytes, fs::read(file).unwrap(), "{name}");
        names.push(name);
    }
    assert_eq!(names, ["acquire", "granted", "hello", "renewed", "error"]);
}
