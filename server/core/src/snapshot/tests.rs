//! Good snapshots in any pieces; bad ones of every kind.

use alloc::vec;
use alloc::vec::Vec;
use std::format;

use leasehold_protocol::codec;
use leasehold_protocol::command::{Caller, Command, OwnLease};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, Mode, Number, Revision, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

use super::item::{
    End, ForcedItem, GhostItem, Header, HoldItem, Item, ItemKind, KeyItem, LeaseItem, RecordItem,
    WaiterItem,
};
use super::*;
use crate::State;

const SECRET: Secret = Secret([5; 16]);

fn apply(state: &mut State, command: &Command) -> Outcome {
    state.apply(9, command, &mut Vec::new())
}

fn acquire(state: &mut State, lease: u64, number: u64, key: &str, own: bool) -> Outcome {
    let caller = Caller {
        lease: LeaseId(lease),
        secret: SECRET,
        number: Number(number),
        floor: Number(number.saturating_sub(40)),
        acks: Vec::new(),
    };
    let command = Command::Acquire {
        caller,
        key: key.as_bytes().to_vec(),
        mode: Mode::EXCLUSIVE,
        own: own.then_some(OwnLease { ttl_ms: 2_000, secret: SECRET }),
        value: vec![b'v'; 200],
        wait_ms: 5_000,
    };
    apply(state, &command)
}

/// A state with everything in it, some blocks long.
fn rich() -> State {
    let mut state = State::new(ShardId(3));
    apply(&mut state, &Command::Begin { token_base: Token(1_000) });
    for n in 0..40 {
        let label = format!("worker-{n}").into_bytes();
        apply(&mut state, &Command::Open { ttl_ms: 5_000, secret: SECRET, label });
    }
    for round in 0..30_u64 {
        for lease in 1..=40 {
            let key = format!("jobs/{}", (round * 7 + lease * 3) % 400);
            acquire(&mut state, lease, round * 3 + 1, &key, (round + lease) % 11 == 0);
        }
    }
    let holder = state.key_info(b"jobs/10").holders[0].clone();
    let force = Command::ForceRelease {
        key: b"jobs/10".to_vec(),
        token: holder.token,
        who: b"ops".to_vec(),
        why: b"stuck".to_vec(),
        now: false,
    };
    assert!(matches!(apply(&mut state, &force), Outcome::Forced { passed_on: false, .. }));
    crate::invariants::check(&state).expect("a sound state");
    state
}

fn bytes_of(state: &State) -> Vec<Vec<u8>> {
    Encoder::new(state).collect()
}

fn decode(pieces: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Result<State, SnapshotError> {
    let mut decoder = Decoder::new();
    for piece in pieces {
        decoder.feed(piece.as_ref())?;
    }
    decoder.finish()
}

#[test]
fn is_the_same_state_in_whatever_pieces_it_comes() {
    let state = rich();
    let chunks = bytes_of(&state);
    assert!(chunks.len() > 3, "{} chunks", chunks.len());
    assert!(chunks.iter().all(|chunk| chunk.len() <= CHUNK_LEN + 16 * 1024));
    let whole = chunks.concat();
    for len in [1, 3, 8, 4_097, whole.len()] {
        let copy = decode(whole.chunks(len)).expect("a good snapshot");
        assert_eq!(copy.digest(), state.digest());
        assert_eq!(bytes_of(&copy).concat(), whole, "the copy's own snapshot is the same");
    }
    let empty = State::new(ShardId(0));
    let copy = decode(bytes_of(&empty)).expect("a good snapshot");
    assert_eq!(copy.digest(), empty.digest());
}

#[test]
fn a_frozen_view_stays_as_it_was_while_the_state_goes_on() {
    let mut state = rich();
    let digest = state.digest();
    let encoder = Encoder::new(&state);
    let mut decoder = Decoder::new();
    let mut lease = 1;
    for chunk in encoder {
        decoder.feed(&chunk).expect("a good snapshot");
        // Everything that the encoder has not reached yet goes away, and more comes.
        for _ in 0..8 {
            apply(&mut state, &Command::Expire { lease: LeaseId(lease) });
            apply(&mut state, &Command::Open { ttl_ms: 1_000, secret: SECRET, label: vec![] });
            lease += 1;
        }
    }
    assert_ne!(state.digest(), digest);
    assert_eq!(decoder.finish().expect("a good snapshot").digest(), digest);
}

#[test]
fn a_changed_byte_is_found() {
    let whole = bytes_of(&rich()).concat();
    let positions =
        (0..whole.len()).step_by(4_099).chain(0..64).chain(whole.len() - 64..whole.len());
    for position in positions {
        let mut damaged = whole.clone();
        damaged[position] ^= 1 << (position % 8);
        assert!(decode([damaged]).is_err(), "byte {position}");
    }
}

#[test]
fn a_cut_or_continued_stream_is_found() {
    let whole = bytes_of(&rich()).concat();
    for len in (0..whole.len()).step_by(4_099).chain(0..40).chain(whole.len() - 40..whole.len()) {
        assert_eq!(decode([&whole[..len]]).err(), Some(SnapshotError::Truncated), "{len} bytes");
    }
    let longer = [&whole[..], &[0]].concat();
    assert_eq!(decode([longer]).err(), Some(SnapshotError::Trailing));
}

#[test]
fn a_block_out_of_place_is_found() {
    let chunks = bytes_of(&rich());
    let mut swapped = chunks.clone();
    swapped.swap(1, 2);
    assert_eq!(decode(swapped).err(), Some(SnapshotError::Checksum { block: 1 }));
    let mut missing = chunks.clone();
    missing.remove(1);
    assert_eq!(decode(missing).err(), Some(SnapshotError::Checksum { block: 1 }));
    let mut doubled = chunks.clone();
    doubled.insert(1, chunks[1].clone());
    assert_eq!(decode(doubled).err(), Some(SnapshotError::Checksum { block: 2 }));
}

#[test]
fn may_be_checked_in_slices() {
    let state = rich();
    let mut decoder = Decoder::new();
    assert_eq!(decoder.check(1), Err(SnapshotError::Truncated));
    let mut decoder = Decoder::new();
    for chunk in bytes_of(&state) {
        decoder.feed(&chunk).expect("a good snapshot");
    }
    let mut slices = 0;
    while !decoder.check(10).expect("a good snapshot") {
        slices += 1;
    }
    assert_eq!(slices, (state.leases_len() + state.keys_len()) / 10);
    assert_eq!(decoder.finish().expect("a good snapshot").digest(), state.digest());
}

#[test]
fn after_an_error_a_decoder_stays_with_it() {
    let mut decoder = Decoder::new();
    let error = decoder.feed(b"HTTP/1.1 200 OK\r\n").expect_err("not a snapshot");
    assert_eq!(error, SnapshotError::NotASnapshot);
    assert_eq!(decoder.feed(b""), Err(SnapshotError::NotASnapshot));
    assert_eq!(decoder.finish().err(), Some(SnapshotError::NotASnapshot));
}

#[test]
fn another_version_is_named() {
    let prelude = [&MAGIC[..], &7_u32.to_le_bytes()].concat();
    assert_eq!(decode([prelude]).err(), Some(SnapshotError::Version(7)));
}

#[test]
fn a_length_that_no_block_has_is_refused_before_its_bytes_come() {
    let mut bytes = stream(&[header(0)]);
    bytes.truncate(PRELUDE_LEN);
    bytes.extend_from_slice(&u32::MAX.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    let len = u32::MAX as usize;
    assert_eq!(decode([bytes]).err(), Some(SnapshotError::BlockTooLong { block: 0, len }));
}

/// A stream of these items with good checksums, in one block.
fn stream(items: &[Item]) -> Vec<u8> {
    let mut payload = Vec::new();
    for item in items {
        let archive = codec::encode(item);
        payload.extend_from_slice(&(archive.len() as u32).to_le_bytes());
        payload.extend_from_slice(&archive);
    }
    block(&payload)
}

fn block(payload: &[u8]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &SNAPSHOT_VERSION.to_le_bytes()].concat();
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

fn header(digest: u64) -> Item {
    Item::Header(Header {
        shard: ShardId(0),
        revision: 50,
        begun: true,
        last_token: 900,
        last_lease: 20,
        digest,
    })
}

fn lease(id: u64) -> LeaseItem {
    LeaseItem {
        lease: LeaseId(id),
        ttl_ms: 5_000,
        secret: SECRET,
        label: Vec::new(),
        own: false,
        version: 1,
        floor: 9,
    }
}

fn record(lease: u64, number: u64) -> RecordItem {
    let (token, revision) = (Token(0), Revision(5));
    RecordItem {
        lease: LeaseId(lease),
        number: Number(number),
        late: false,
        kind: ItemKind::Acquire,
        print: 1,
        keep: false,
        outcome: Some(Outcome::Refused { code: ErrorCode::HELD, token, revision }),
    }
}

fn hold(key: &str, lease: u64, token: u64) -> HoldItem {
    HoldItem {
        key: key.as_bytes().to_vec(),
        lease: LeaseId(lease),
        token: Token(token),
        mode: Mode::EXCLUSIVE,
        number: Number(token),
        value: Vec::new(),
        since_ms: 0,
        forced: None,
        slots: Vec::new(),
        delay_ms: 0,
        again: Vec::new(),
        asked: None,
        part: 0,
    }
}

fn floor(key: &str, floor: u64) -> Item {
    Item::Key(KeyItem { key: key.as_bytes().to_vec(), floor, limit: 0 })
}

fn waiter(key: &str, place: u64, lease: u64) -> WaiterItem {
    WaiterItem {
        key: key.as_bytes().to_vec(),
        place,
        lease: LeaseId(lease),
        number: Number(1),
        mode: Mode::EXCLUSIVE,
        own: None,
        value: Vec::new(),
        wait_ms: 1,
        delay_ms: 0,
        part: 0,
        parts: 1,
    }
}

fn waiting(lease: u64) -> RecordItem {
    RecordItem { keep: true, outcome: None, ..record(lease, 1) }
}

/// Decodes the items between a header and a right end mark.
fn decode_items(items: Vec<Item>) -> Result<State, SnapshotError> {
    let mut all = vec![header(0)];
    all.extend(items);
    all.push(Item::End(End { items: all.len() as u64 }));
    decode([stream(&all)])
}

fn contradiction(items: Vec<Item>) -> &'static str {
    match decode_items(items) {
        Err(SnapshotError::Contradiction { what, .. }) => what,
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn items_that_do_not_go_together_are_named() {
    let two = |a, b| contradiction(vec![a, b]);
    assert_eq!(contradiction(vec![header(0)]), "a second header");
    assert_eq!(two(Item::Lease(lease(2)), Item::Lease(lease(2))), "a lease out of order");
    assert_eq!(contradiction(vec![Item::Record(record(2, 1))]), "a record without its lease");
    let twice = vec![Item::Lease(lease(2)), Item::Record(record(2, 1)), Item::Record(record(2, 1))];
    assert_eq!(contradiction(twice), "a record comes twice");
    assert_eq!(contradiction(vec![Item::Hold(hold("k", 2, 5))]), "a claim of a dead lease");
    // The order is that of the key table; here only that there is one.
    let pair = |one, other| {
        let (one, other) = (Item::Hold(hold(one, 2, 5)), Item::Hold(hold(other, 2, 6)));
        decode_items(vec![Item::Lease(lease(2)), one, other]).err()
    };
    let out_of_order = Some(SnapshotError::Contradiction { item: 3, what: "a key out of order" });
    assert_ne!(pair("j", "k") == out_of_order, pair("k", "j") == out_of_order);
    let late_key = vec![Item::Lease(lease(2)), Item::Hold(hold("k", 2, 5)), floor("k", 4)];
    assert_eq!(contradiction(late_key), "a key after its holds or waiters");
    let twice = vec![limit("k", 3), permits(1, &[1]), {
        let mode = Mode::permits(1);
        Item::Hold(HoldItem { mode, slots: vec![1], ..hold("k", 3, 6) })
    }];
    assert_eq!(contradiction(held(twice)), "a slot is taken twice");
    assert_eq!(contradiction(vec![ghost("k", 4), ghost("k", 4)]), "a delay comes twice");
    let late_lease =
        vec![Item::Lease(lease(2)), Item::Hold(hold("k", 2, 5)), Item::Lease(lease(3))];
    assert_eq!(contradiction(late_lease), "a lease out of order");
    let again =
        vec![Item::Lease(lease(2)), Item::Hold(hold("k", 2, 5)), Item::Hold(hold("k", 2, 5))];
    assert_eq!(contradiction(again), "a hold comes twice");
    let places = vec![
        Item::Lease(lease(2)),
        Item::Lease(lease(3)),
        Item::Waiter(waiter("k", 4, 2)),
        Item::Waiter(waiter("k", 4, 3)),
    ];
    assert_eq!(contradiction(places), "a waiter out of order");
    let waits = vec![
        Item::Lease(lease(2)),
        Item::Waiter(waiter("k", 4, 2)),
        Item::Waiter(waiter("k", 5, 2)),
    ];
    assert_eq!(contradiction(waits), "a lease waits twice for a key");
    let few = stream(&[header(0), Item::End(End { items: 7 })]);
    let what = "items are missing";
    assert_eq!(decode([few]).err(), Some(SnapshotError::Contradiction { item: 1, what }));
    let headless = stream(&[Item::End(End { items: 0 })]);
    let what = "the header is not the first item";
    assert_eq!(decode([headless]).err(), Some(SnapshotError::Contradiction { item: 0, what }));
}

/// Leases 2 and 3, and what they have.
fn held(extra: Vec<Item>) -> Vec<Item> {
    let mut items = vec![Item::Lease(lease(2)), Item::Lease(lease(3))];
    items.extend(extra);
    items
}

fn shared(token: u64) -> Item {
    Item::Hold(HoldItem { mode: Mode::SHARED, ..hold("k", 2, token) })
}

fn permits(count: u32, slots: &[u8]) -> Item {
    let mode = Mode::permits(count);
    Item::Hold(HoldItem { mode, slots: slots.to_vec(), ..hold("k", 2, 5) })
}

fn limit(key: &str, limit: u32) -> Item {
    Item::Key(KeyItem { key: key.as_bytes().to_vec(), floor: 4, limit })
}

fn ghost(key: &str, token: u64) -> Item {
    let (mode, slots, delay_ms) = (Mode::EXCLUSIVE, Vec::new(), 5);
    Item::Ghost(GhostItem { key: key.as_bytes().to_vec(), token, mode, slots, delay_ms })
}

fn lasting(delay_ms: u32) -> Item {
    let (mode, slots, token) = (Mode::EXCLUSIVE, Vec::new(), 5);
    Item::Ghost(GhostItem { key: b"k".to_vec(), token, mode, slots, delay_ms })
}

fn each_is_refused(cases: Vec<(&str, Vec<Item>)>) {
    for (expected, items) in cases {
        match decode_items(items) {
            Err(SnapshotError::Inconsistent(text)) => {
                assert!(text.contains(expected), "{text:?} is not about {expected:?}");
            }
            other => panic!("{expected:?}: {:?}", other.err()),
        }
    }
}

#[test]
fn holds_and_floors_that_do_not_go_together_are_refused() {
    each_is_refused(vec![
        ("a shared hold without a floor", held(vec![shared(5)])),
        (
            "an exclusive hold has a floor of its own",
            held(vec![floor("k", 4), Item::Hold(hold("k", 2, 5))]),
        ),
        ("token 5 is below the floor", held(vec![floor("k", 6), shared(5)])),
        ("a lock and a semaphore at once", held(vec![floor("k", 4), permits(1, &[1])])),
        ("not as many slots as permits", held(vec![limit("k", 3), permits(2, &[0b1])])),
        ("slots that cannot be", held(vec![limit("k", 3), permits(1, &[1, 0])])),
        ("1025 permits", held(vec![limit("k", 1_025), permits(1, &[1])])),
        ("an exclusive hold beside others", held(vec![ghost("k", 4), Item::Hold(hold("k", 2, 5))])),
        ("a delay of 60001", held(vec![lasting(60_001)])),
        ("a delay of 0", held(vec![lasting(0)])),
        ("token 901 was never given", held(vec![ghost("k", 901)])),
        ("floor 901 was never given", held(vec![floor("k", 901), shared(5)])),
    ]);
}

/// Each breaks one invariant and has every checksum right.
#[test]
fn a_state_that_cannot_be_is_refused() {
    let with = |change: fn(&mut HoldItem)| {
        let mut item = hold("k", 2, 5);
        change(&mut item);
        held(vec![Item::Hold(item)])
    };
    let lease_with = |change: fn(&mut LeaseItem)| {
        let mut item = lease(2);
        change(&mut item);
        vec![Item::Lease(item)]
    };
    let cases = vec![
        (
            "an exclusive hold beside others",
            held(vec![Item::Hold(hold("k", 2, 5)), Item::Hold(hold("k", 3, 6))]),
        ),
        ("token 901 was never given", with(|hold| hold.token = Token(901))),
        ("an unknown mode", with(|hold| hold.mode = Mode(9))),
        ("its value is too large", with(|hold| hold.value = vec![0; 4_097])),
        ("key \"\" is out of range", with(|hold| hold.key = Vec::new())),
        ("is out of range", with(|hold| hold.key = vec![0xff])),
        (
            "texts out of range",
            with(|hold| {
                hold.forced = Some(ForcedItem { who: vec![0xff], why: Vec::new() });
            }),
        ),
        ("TTL 0", lease_with(|lease| lease.ttl_ms = 0)),
        ("lease 2: label", lease_with(|lease| lease.label = vec![b'l'; 129])),
        ("lease 21 was never minted", lease_with(|lease| lease.lease = LeaseId(21))),
        ("own lease 2 has not one hold", lease_with(|lease| lease.own = true)),
        (
            "claim 1 and its record differ",
            held(vec![Item::Hold(hold("k", 3, 5)), Item::Waiter(waiter("k", 0, 2))]),
        ),
        ("record 1 and its wait differ", vec![Item::Lease(lease(2)), Item::Record(waiting(2))]),
        (
            "the head could be granted",
            vec![Item::Lease(lease(2)), Item::Record(waiting(2)), Item::Waiter(waiter("k", 0, 2))],
        ),
        ("beyond the window", vec![Item::Lease(lease(2)), Item::Record(record(2, 1 << 40))]),
        (
            "record 1 should be gone",
            vec![Item::Lease(LeaseItem { floor: 9, ..lease(2) }), Item::Record(record(2, 1))],
        ),
        (
            "late record 1 above the floor",
            vec![
                Item::Lease(LeaseItem { floor: 0, ..lease(2) }),
                Item::Record(RecordItem { late: true, kind: ItemKind::Cancel, ..record(2, 1) }),
            ],
        ),
    ];
    each_is_refused(cases);
}

#[test]
fn a_sound_state_with_another_digest_is_refused() {
    let items = vec![Item::Lease(lease(2)), Item::Hold(hold("k", 2, 5))];
    assert_eq!(decode_items(items).err(), Some(SnapshotError::Digest));
}

#[test]
fn an_item_that_is_no_archive_is_refused() {
    for payload in [&[1, 2, 3][..], &[200, 0, 0, 0, 1], &[4, 0, 0, 0, 9, 9, 9, 9]] {
        assert_eq!(decode([block(payload)]).err(), Some(SnapshotError::Malformed { item: 0 }));
    }
}

/// Written by the build before acquires of several keys: holds of every mode, waiters, an own
/// lease, a forced hold, an entry, a lock-delay, a request to yield, retry memory.
#[test]
fn a_snapshot_of_the_former_version_is_the_same_state() {
    let copy = decode([include_bytes!("former.bin")]).expect("a good snapshot");
    assert_eq!(copy.digest(), 0xd203_6fab_8b53_9e1d);
    assert_eq!((copy.leases_len(), copy.keys_len()), (7, 5));
    let again = decode(bytes_of(&copy)).expect("a good snapshot");
    assert_eq!(again.digest(), copy.digest());
}
