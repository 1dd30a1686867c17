//! Damaged bytes: a closed log is either recovered whole or refused, whichever byte is hit, and no
//! input makes opening panic.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod wal_support;

use std::collections::BTreeMap;

use leasehold_server::disk::sim::{Io, SimDisk};
use leasehold_server::env::Disk;
use leasehold_server::rt::sim::SimRng;
use leasehold_server::wal::{WalConfig, WalError};
use wal_support::{A, B, Call, History, open_with, random_calls, run};

fn tiny() -> WalConfig {
    WalConfig { segment_len: 32 * 1024, ..WalConfig::default() }
}

fn recover(disk: &SimDisk) -> Result<wal_support::State, WalError> {
    run(1, async { open_with(tiny(), disk).await.map(|(_, state)| state) })
}

fn closed_log(calls: Vec<Call>) -> (SimDisk, History) {
    let disk = wal_support::disk();
    let history = History::default();
    run(1, async {
        let (log, _) = open_with(tiny(), &disk).await.unwrap();
        for call in calls {
            history.call(&log, call).await.unwrap();
            log.shard(A).flush().await.unwrap();
        }
        log.close().await.unwrap();
    });
    (disk, history)
}

/// What a byte of a segment belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// A header.
    Header,
    /// The rest of a header's page, and a record's padding: nothing reads it.
    Unread,
    /// The head of the record that starts there, with that number.
    Head(u64, u64),
    /// The payload of one.
    Payload(u64, u64),
}

/// A segment taken apart as `docs/WAL.md` says.
struct Parts {
    name: String,
    places: Vec<Place>,
    /// The newest record that some record here says was durable.
    durable_seq: u64,
}

fn number_at(bytes: &[u8], at: usize, len: usize) -> u64 {
    let mut number = [0; 8];
    number[..len].copy_from_slice(&bytes[at..at + len]);
    u64::from_le_bytes(number)
}

fn parts(name: &str, bytes: &[u8]) -> Parts {
    let mut places = vec![Place::Header; 256];
    places.resize(4096, Place::Unread);
    let (mut at, mut durable_seq) = (4096, 0);
    while at + 32 <= bytes.len() && number_at(bytes, at + 16, 8) > 0 {
        let len = number_at(bytes, at + 4, 4) as usize;
        let seq = number_at(bytes, at + 16, 8);
        durable_seq = durable_seq.max(number_at(bytes, at + 24, 8));
        places.resize(at + 32, Place::Head(at as u64, seq));
        places.resize(at + 32 + len, Place::Payload(at as u64, seq));
        at = (at + 32 + len).next_multiple_of(16);
        places.resize(at, Place::Unread);
    }
    Parts { name: name.to_owned(), places, durable_seq }
}

/// A log of several segments, each with entries still needed, every append with a vote in a flush of
/// its own. A closed one ends with a seal.
fn long_log(close: bool) -> (SimDisk, History) {
    let disk = wal_support::disk();
    let history = History::default();
    run(1, async {
        let (log, _) = open_with(tiny(), &disk).await.unwrap();
        for index in 1..=14_u64 {
            let shard = if index % 2 == 0 { A } else { B };
            let call = Call::Append { shard, index: index.div_ceil(2), len: 4001 };
            history.call(&log, call).await.unwrap();
            history.call(&log, Call::Vote { shard, vote: index as u8 }).await.unwrap();
        }
        if close {
            log.close().await.unwrap();
        }
    });
    disk.lose_power(&[], 0);
    (disk, history)
}

/// Segments with a header, oldest first.
fn used_segments(disk: &SimDisk) -> Vec<Parts> {
    let files = files(disk);
    let used = files.iter().filter(|(_, bytes)| bytes[..8] == *b"LEASEWAL");
    used.map(|(name, bytes)| parts(name, bytes)).collect()
}

fn changes(disk: &SimDisk) -> u64 {
    [Io::Create, Io::Write, Io::Sync, Io::SyncNew, Io::Rename, Io::Remove, Io::SyncDir]
        .map(|io| disk.count(io))
        .iter()
        .sum()
}

/// One flipped bit in a segment, and what must come of it.
fn flip(disk: &SimDisk, history: &History, part: &Parts, newest: bool, offset: u64, mask: u8) {
    let calls = history.calls.borrow().len();
    let damaged = disk.image(&[], 0);
    damaged.rot(&part.name, offset, mask);
    let place = part.places[offset as usize];
    let context = || format!("{}: byte {offset}, {place:?}, mask {mask}", part.name);
    let opened = run(1, async {
        let opened = open_with(tiny(), &damaged).await;
        opened.map(|(log, state)| (state, log.torn_tail().cloned()))
    });
    let is_durable = |seq| !newest || seq <= part.durable_seq;
    match (place, opened) {
        (Place::Header, Err(WalError::Version { file, .. })) => {
            assert!(file == part.name && (8..12).contains(&offset), "{}", context());
        }
        (Place::Header, Err(WalError::Damaged { file, offset: at, .. })) => {
            assert_eq!((file.as_str(), at), (part.name.as_str(), 0), "{}", context());
            assert_eq!(changes(&damaged), 0, "{}: refused, and the disk was changed", context());
        }
        (Place::Unread, Ok((state, torn))) => {
            assert_eq!(history.check(calls, &state), calls, "{}", context());
            assert_eq!(torn, None, "{}", context());
        }
        (Place::Head(start, seq) | Place::Payload(start, seq), Err(error)) => {
            assert!(is_durable(seq), "{}: {error}", context());
            let text = error.to_string();
            assert!(text.contains("Remedy: "), "{text}");
            let WalError::Damaged { file, offset: at, .. } = error else { panic!("{error}") };
            assert_eq!((file.as_str(), at), (part.name.as_str(), start), "{}", context());
            assert_eq!(changes(&damaged), 0, "{}: refused, and the disk was changed", context());
        }
        (Place::Head(start, seq) | Place::Payload(start, seq), Ok((state, torn))) => {
            assert!(!is_durable(seq), "{}: damage went unnoticed", context());
            let torn = torn.unwrap_or_else(|| panic!("{}: cut and not reported", context()));
            let reported = (torn.file.as_str(), torn.offset, torn.seq);
            assert_eq!(reported, (part.name.as_str(), start, seq), "{}", context());
            // An append and the vote behind it share the last flush.
            assert!(history.check(calls - 2, &state) <= calls, "{}", context());
        }
        (_, other) => panic!("{}: {other:?}", context()),
    }
}

/// Every class of byte of every segment. Below the newest durable seq, a recorded end or a seal a
/// flipped bit is refused, with file and offset, and nothing on the disk is touched. In the last
/// flush without a seal it is cut off, and that is reported. In a closed log that is the seal.
#[test]
fn every_class_of_byte_is_refused_harmless_or_cut_and_reported() {
    for close in [true, false] {
        let (disk, history) = long_log(close);
        let segments = used_segments(&disk);
        assert!(segments.len() >= 3, "{} segments", segments.len());
        let mut tried = BTreeMap::<&str, usize>::new();
        for (number, part) in segments.iter().enumerate() {
            let newest = number + 1 == segments.len();
            for (offset, place) in part.places.iter().enumerate() {
                let (class, bits) = match place {
                    Place::Header => ("header", 2),
                    Place::Unread if offset < 4096 => {
                        ("header's page", usize::from(offset % 512 == 0))
                    }
                    Place::Unread => ("padding", 1),
                    Place::Head(_, seq) if newest && *seq > part.durable_seq => ("last flush", 8),
                    Place::Head(..) => ("head", 1),
                    Place::Payload(_, seq) if newest && *seq > part.durable_seq => {
                        ("last flush", 1)
                    }
                    Place::Payload(start, _) if offset as u64 - start < 48 => {
                        ("payload's start", 1)
                    }
                    Place::Payload(..) => ("payload", usize::from(offset % 97 == 0)),
                };
                for bit in 0..bits {
                    flip(
                        &disk,
                        &history,
                        part,
                        newest,
                        offset as u64,
                        1 << ((offset + 3 * bit) % 8),
                    );
                }
                *tried.entry(class).or_default() += bits;
            }
        }
        println!("closed: {close}: {tried:?}");
        assert!(tried.len() == 7 && tried.values().all(|tried| *tried > 10), "{tried:?}");
    }
}

/// A newest header that rotted, in whatever way, over records that were durable: never taken for a
/// segment made ahead, never deleted.
#[test]
fn a_rotten_last_header_is_not_taken_for_a_spare() {
    let (disk, history) = long_log(false);
    let newest = used_segments(&disk).pop().unwrap().name;
    let header = files(&disk).into_iter().find(|(name, _)| *name == newest).unwrap().1;
    let header = &header[..4096];
    let zeroed = |range: std::ops::Range<usize>| {
        let mut page = header.to_vec();
        page[range].fill(0);
        page
    };
    let mut pages = vec![zeroed(0..4096), zeroed(0..256), zeroed(0..8), vec![0xff; 4096]];
    pages.extend((0..256).step_by(16).map(|at| zeroed(at..at + 16)).filter(|page| page != header));
    pages.extend((0..256).map(|at| {
        let mut page = header.to_vec();
        page[at] ^= 0x11;
        page
    }));
    for page in pages {
        let damaged = disk.image(&[], 0);
        for (at, (old, new)) in header.iter().zip(&page).enumerate() {
            damaged.rot(&newest, at as u64, old ^ new);
        }
        match recover(&damaged) {
            Err(WalError::Damaged { file, offset: 0, .. } | WalError::Version { file, .. })
                if file == newest => {}
            Err(WalError::Damaged { file, offset: 0, .. }) => {
                panic!("{file} is blamed for {newest}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(changes(&damaged), 0, "refused, and the disk was changed");
    }
    history.check(28, &recover(&disk).unwrap());
}

fn files(disk: &SimDisk) -> Vec<(String, Vec<u8>)> {
    run(1, async {
        let mut files = Vec::new();
        for name in disk.list().await.unwrap() {
            files.push((name.clone(), disk.read(&name).await.unwrap()));
        }
        files
    })
}

/// Every byte that means anything, one flipped bit each.
#[test]
fn any_flipped_bit_is_refused_or_harmless() {
    let calls = vec![
        Call::Vote { shard: B, vote: 1 },
        Call::Append { shard: A, index: 1, len: 300 },
        Call::Append { shard: A, index: 2, len: 1 },
        Call::Truncate { shard: A, last_kept: Some(1) },
        Call::Append { shard: A, index: 2, len: 250 },
        Call::Purge { shard: A, index: 1 },
        Call::Mark { shard: B, mark: 2 },
    ];
    let (disk, history) = closed_log(calls);
    let (name, bytes) = files(&disk).remove(0);
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 16;
    let mut refused = 0;
    for offset in (0..256).chain(4096..end) {
        let damaged = disk.image(&[], 0);
        damaged.rot(&name, offset as u64, 1 << (offset % 8));
        match recover(&damaged) {
            Ok(found) => drop(history.check(7, &found)),
            Err(_) => refused += 1,
        }
    }
    // Only padding and the seal may be hit without harm.
    let meaningful = 256 + end - 4096 - 16;
    assert!(refused > meaningful - 120, "{refused} of {meaningful}");
}

/// Longer logs in several segments; damage of several kinds at random places.
#[test]
fn no_damage_makes_opening_panic_or_lose_an_acknowledged_record() {
    let mut outcomes = [0; 2];
    for seed in 0..400 {
        let rng = SimRng::new(seed);
        let (disk, history) = closed_log(random_calls(&rng, 3, 40, 3000));
        let acked = history.calls.borrow().len();
        let files = files(&disk);
        let used: Vec<_> =
            files.iter().filter(|(_, bytes)| bytes.iter().any(|b| *b != 0)).collect();
        for _ in 0..=rng.below(3) {
            let (name, bytes) = used[rng.below(used.len() as u64) as usize];
            let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() as u64 + 1;
            let start = if rng.chance(300) { rng.below(256) } else { rng.below(end) };
            let len = [1, 16, 512][rng.below(3) as usize];
            for offset in start..(start + len).min(end) {
                let mask = if rng.chance(500) { bytes[offset as usize] } else { rng.next() as u8 };
                disk.rot(name, offset, mask);
            }
        }
        match recover(&disk) {
            Ok(found) => {
                history.check(acked, &found);
                outcomes[0] += 1;
            }
            Err(error) => {
                let judged = matches!(
                    error,
                    WalError::Damaged { .. }
                        | WalError::MissingEntries { .. }
                        | WalError::Version { .. }
                );
                assert!(judged, "{error}");
                outcomes[1] += 1;
            }
        }
    }
    println!("{outcomes:?} harmless, refused");
    assert!(outcomes.iter().all(|count| *count > 10), "{outcomes:?}");
}
