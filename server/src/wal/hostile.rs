//! Hostile bytes for the log: mutated records and segments, and whole logs whose headers and records
//! lie under checksums that fit. Nothing may panic or take memory that the bytes do not justify; a
//! log that opens is the same when it is opened again.

use std::collections::BTreeMap;

use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use openraft::AsyncRuntime;

use super::checkpoint::{Checkpoint, Range, ShardState};
use super::header::{Cut, FirstPage, HEADER_LEN, Header, segment_name};
use super::record::{HEAD_LEN, Op, Record};
use super::scan::{Damage, Scan, scan};
use super::{Recovered, Wal, WalConfig, WalError, WalIdentity};
use crate::disk::sim::{SimDisk, SimDiskConfig};
use crate::env::Disk;
use crate::hostile_support::{
    Random, Shown, Taken, corpus, mutate_once, shuffle_once, taken_by, times,
};
use crate::raft::suite::SimEnv;
use crate::rt::sim::{SimRt, WorldConfig};

/// Inputs that once found something.
const CORPUS: &str = include_str!("../../../protocol/tests/hostile_support/corpus.txt");

const SALT: u64 = 0x1122_3344_5566_7788;
const SEGMENT_LEN: usize = 2 * 4096;

const IDENTITY: WalIdentity = WalIdentity {
    cluster: ClusterId([1; 16]),
    node: NodeId(2),
    disk: DiskId([3; 16]),
    core: 0,
    cores: 1,
    boot: 1,
};

fn header() -> Header {
    Header {
        identity: IDENTITY,
        number: 3,
        segment_len: SEGMENT_LEN as u64,
        salt: SALT,
        first_seq: 40,
        prev: Cut { number: 2, end: 8_192, next_seq: 40 },
        base: Cut { number: 1, end: 4_800, next_seq: 22 },
    }
}

/// One of each kind, as a log could hold them.
fn records() -> Vec<Record> {
    let state = ShardState {
        vote: Some(b"a vote of some bytes"[..].into()),
        purged: Some((6, b"a log id"[..].into())),
        committed: None,
        snapshot: Some(b"snapshot-6"[..].into()),
        range: Range { first: 7, next: 9 },
    };
    let shards: BTreeMap<ShardId, ShardState> =
        (0..3).map(|shard| (ShardId(shard), state.clone())).collect();
    let entry = |index| Op::Entry { index, payload: vec![index as u8; 90].into() };
    let ops = vec![
        Op::Checkpoint(Checkpoint { carried: 2, shards }),
        entry(9),
        entry(10),
        Op::Vote(b"another vote"[..].into()),
        Op::Truncate(Some(9)),
        entry(10),
        Op::Purge { index: 8, log_id: b"log id 8"[..].into() },
        Op::Committed(b"committed"[..].into()),
        Op::Snapshot(b"a snapshot's name"[..].into()),
        Op::Truncate(None),
        entry(30),
        Op::Seal,
    ];
    let record = |(seq, op)| Record { shard: ShardId(1), seq, durable_seq: seq - 1 - seq % 3, op };
    (40..).zip(ops).map(record).collect()
}

fn stored(record: &Record, salt: u64) -> Vec<u8> {
    let (mut bytes, body) = record.encode(salt);
    bytes.extend_from_slice(body);
    bytes.resize(record.op.stored_len() as usize, 0);
    bytes
}

/// Makes a record's checksum fit what its head says, as far as there are bytes.
fn seal(record: &mut [u8], salt: u64) {
    let Some(len) = record.get(4..8).map(|len| u32::from_le_bytes(len.try_into().expect("four")))
    else {
        return;
    };
    let end = record.len().min(HEAD_LEN.saturating_add(len as usize));
    let seed = crc32c::crc32c(&salt.to_le_bytes());
    let crc = crc32c::crc32c_append(seed, &record[4..end.max(4)]);
    record[..4].copy_from_slice(&crc.to_le_bytes());
}

fn segment(records: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = header().encode();
    bytes.resize(HEADER_LEN as usize, 0);
    for record in records {
        bytes.extend_from_slice(record);
    }
    bytes.resize(SEGMENT_LEN, 0);
    bytes
}

/// A mutated segment, and whether checksums were made to fit what is not what was written.
fn mutation(random: &mut Random, records: &[Vec<u8>], foreign: &[Vec<u8>]) -> (Vec<u8>, bool) {
    let mut changed = records.to_vec();
    let forged = random.one_in(2);
    for _ in 0..random.below(3) {
        let others = if random.one_in(2) { foreign } else { records };
        shuffle_once(random, &mut changed, others);
    }
    for _ in 0..random.below(3) {
        if changed.is_empty() {
            break;
        }
        let at = random.below(changed.len());
        mutate_once(random, &mut changed[at], random_record(records, at + 1));
        if random.one_in(3) {
            let padded = changed[at].len().next_multiple_of(16);
            changed[at].resize(padded, 0);
        }
        if forged {
            seal(&mut changed[at], SALT);
        }
    }
    (segment(&changed), forged)
}

fn random_record(records: &[Vec<u8>], at: usize) -> &[u8] {
    &records[at % records.len()]
}

fn check_scan(found: &Result<Scan, Damage>, forged: bool, written: &[Record]) -> usize {
    match found {
        Ok(scan) => {
            assert!(scan.end >= HEADER_LEN && scan.end + scan.torn_len <= SEGMENT_LEN as u64);
            assert_eq!(scan.next_seq, 40 + scan.records.len() as u64);
            let seqs = scan.records.iter().map(|record| record.seq);
            assert!(seqs.eq(40..scan.next_seq), "records count without a gap");
            // What was not written by the log is no record of it.
            assert!(forged || written.starts_with(&scan.records), "{:?}", scan.records);
            usize::from(scan.records.len() == written.len())
        }
        Err(damage) => {
            assert!(damage.offset <= SEGMENT_LEN as u64 && !damage.reason.is_empty());
            2
        }
    }
}

#[test]
fn mutated_segments_are_cut_or_refused_and_nothing_is_invented() {
    let written = records();
    let here: Vec<Vec<u8>> = written.iter().map(|record| stored(record, SALT)).collect();
    let foreign: Vec<Vec<u8>> = written.iter().map(|record| stored(record, SALT ^ 1)).collect();
    let mut random = Random::of_test(7);
    let (mut outcomes, mut worst) = ([0_u64; 3], 0);
    let mut try_one = |bytes: &[u8], cut: Option<Cut>, forged: bool| {
        let _shown = Shown { format: "segment", bytes: &bytes[HEADER_LEN as usize..] };
        let (found, Taken { peak, largest }) = taken_by(|| scan(bytes, &header(), cut));
        let used = bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0) - HEADER_LEN as usize + 1;
        worst = worst.max(peak * 100 / used.max(100));
        let bound = 16 * used + 4096;
        assert!(peak <= bound && largest <= bound, "{used} bytes took {peak}, {largest}");
        outcomes[check_scan(&found, forged, &written)] += 1;
    };
    for bytes in corpus(CORPUS, "segment") {
        let bytes = segment(&[bytes]);
        try_one(&bytes, None, true);
    }
    for _ in 0..times(150_000) {
        let (bytes, forged) = mutation(&mut random, &here, &foreign);
        let cut = random.one_in(4).then(|| Cut {
            number: 3,
            end: HEADER_LEN + 16 * random.below(300) as u64,
            next_seq: 40 + random.below(14) as u64,
        });
        try_one(&bytes, cut, forged);
    }
    println!("{outcomes:?} cut, whole, refused; most memory: {worst} % of the bytes used");
    assert!(outcomes.iter().all(|count| *count > 1_000), "{outcomes:?}");
}

#[test]
fn mutated_records_checkpoints_and_headers_decode_to_what_encodes_alike() {
    let here: Vec<Vec<u8>> = records().iter().map(|record| stored(record, SALT)).collect();
    let mut random = Random::of_test(8);
    let (mut accepted, mut refused, mut headers) = (0_u64, 0_u64, 0_u64);
    let mut try_one = |bytes: &[u8]| {
        let _shown = Shown { format: "record", bytes };
        let (decoded, Taken { peak, largest }) = taken_by(|| Record::decode(bytes, SALT));
        let bound = 16 * bytes.len() + 2048;
        assert!(peak <= bound && largest <= bound, "{} bytes took {peak}", bytes.len());
        match decoded {
            Some((record, _)) => {
                let again = Record::decode(&stored(&record, SALT), SALT).expect("it was encoded");
                assert_eq!(again.0, record);
                accepted += 1;
            }
            None => refused += 1,
        }
    };
    for bytes in &corpus(CORPUS, "record") {
        try_one(bytes);
    }
    for _ in 0..times(100_000) {
        let mut bytes = random.pick(&here).clone();
        for _ in 0..=random.below(3) {
            mutate_once(&mut random, &mut bytes, &here[0]);
        }
        seal(&mut bytes, SALT);
        try_one(&bytes);
    }
    for _ in 0..times(50_000) {
        let mut page = header().encode();
        mutate_once(&mut random, &mut page, &here[0]);
        seal_header(&mut page);
        if let FirstPage::Valid(header) = Header::decode(&page) {
            assert_eq!(Header::decode(&header.encode()), FirstPage::Valid(header));
            headers += 1;
        }
    }
    println!("{accepted} accepted, {refused} refused; {headers} headers accepted");
    assert!(accepted > 1_000 && refused > 1_000 && headers > 1_000);
}

fn seal_header(page: &mut [u8]) {
    if page.len() >= 256 {
        page[12..16].fill(0);
        let crc = crc32c::crc32c(&page[..256]);
        page[12..16].copy_from_slice(&crc.to_le_bytes());
    }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    SimRt::with_config(1, WorldConfig::default()).block_on(test)
}

fn config() -> WalConfig {
    WalConfig { segment_len: 32 * 1024, ..WalConfig::default() }
}

async fn open(disk: &SimDisk) -> Result<(Wal<SimEnv>, BTreeMap<ShardId, Recovered>), WalError> {
    let mut salt = SALT;
    let salts = move || {
        salt += 1;
        salt
    };
    Wal::open(config(), IDENTITY, disk.clone(), salts).await
}

/// A log of several segments with two shards, entries still needed in each.
fn log() -> SimDisk {
    let disk = SimDisk::new(4, SimDiskConfig::default());
    run(async {
        let (log, _) = open(&disk).await.expect("an empty disk opens");
        for index in 1..=24_u64 {
            let shard = log.shard(ShardId((index % 2) as u32));
            shard.append([(index / 2, vec![index as u8; 2_500].into())], |_| {}).expect("room");
            shard.save_vote(&[index as u8; 20]).await.expect("the disk works");
        }
        log.shard(ShardId(0)).purge(2, b"log id").expect("the log works");
        log.close().await.expect("the disk works");
    });
    disk
}

/// Each segment's name and bytes, and where its records lie.
struct Files(Vec<(String, Vec<u8>, Vec<std::ops::Range<usize>>)>);

impl Files {
    fn of(disk: &SimDisk) -> Self {
        run(async {
            let mut files = Vec::new();
            for name in disk.list().await.expect("it lists") {
                let bytes = disk.read(&name).await.expect("it reads");
                let FirstPage::Valid(header) = Header::decode(&bytes[..4096]) else { continue };
                let (mut places, mut at) = (Vec::new(), HEADER_LEN as usize);
                while let Some((_, len)) = Record::decode(&bytes[at..], header.salt) {
                    places.push(at..at + len as usize);
                    at += len as usize;
                }
                files.push((name, bytes, places));
            }
            Self(files)
        })
    }

    /// Gives one segment another number, in its header and in its name. No segment made ahead is left,
    /// which could not be older than it.
    fn renumber(&self, random: &mut Random, disk: &SimDisk) {
        run(async {
            for name in disk.list().await.expect("it lists") {
                if self.0.iter().all(|(used, ..)| *used != name) {
                    disk.remove(&name).await.expect("the file is there");
                }
            }
        });
        let (name, bytes, _) = random.pick(&self.0);
        let number =
            if random.one_in(2) { random.lie() } else { random.next() >> random.below(64) };
        let mut page = bytes[..256].to_vec();
        page[72..80].copy_from_slice(&number.to_le_bytes());
        seal_header(&mut page);
        for (at, (old, new)) in bytes.iter().zip(&page).enumerate() {
            disk.rot(name, at as u64, old ^ new);
        }
        let renamed = segment_name(number);
        run(async { disk.rename(name, &renamed).await.expect("the file is there") });
    }

    /// Changes one segment on `disk`: a field of its header or one of its records, under checksums
    /// that fit; sometimes the bytes alone.
    fn lie(&self, random: &mut Random, disk: &SimDisk) {
        let (name, bytes, places) = random.pick(&self.0);
        let mut changed = bytes.clone();
        if random.one_in(3) {
            let at = 16 + 8 * random.below(17);
            let number = if random.one_in(2) { random.lie() } else { random.next() % 9 };
            changed[at..at + 8].copy_from_slice(&number.to_le_bytes());
            seal_header(&mut changed);
        } else if random.one_in(6) {
            let at = random.below(places.last().map_or(4096, |place| place.end));
            changed[at] ^= 1 << random.below(8);
        } else if !places.is_empty() {
            let place = if random.one_in(2) { &places[0] } else { random.pick(places) };
            let salt = u64::from_le_bytes(bytes[88..96].try_into().expect("eight bytes"));
            let mut record = changed[place.clone()].to_vec();
            // In the head and in the fixed part of the payload, mostly.
            let shown = if random.one_in(4) { record.len() } else { record.len().min(80) };
            let at = 4 + random.below(shown - 4);
            let width = [1, 4, 8][random.below(3)].min(shown - at);
            record[at..at + width].copy_from_slice(&random.lie().to_le_bytes()[..width]);
            seal(&mut record, salt);
            changed[place.clone()].copy_from_slice(&record);
        }
        for (at, (old, new)) in bytes.iter().zip(&changed).enumerate() {
            if old != new {
                disk.rot(name, at as u64, old ^ new);
            }
        }
    }
}

/// Whatever a log's own files say, under checksums that fit, it is refused with a reason or opens;
/// and what opens stays as it is.
#[test]
fn a_log_that_lies_is_refused_or_opens_to_the_same_twice() {
    let (disk, mut random) = (log(), Random::of_test(9));
    let files = Files::of(&disk);
    assert!(files.0.len() >= 3, "{} segments", files.0.len());
    let mut outcomes = [0_u64; 2];
    for _ in 0..times(4_000) {
        let lying = disk.image(&[], 0);
        for _ in 0..=random.below(2) {
            files.lie(&mut random, &lying);
        }
        if random.one_in(20) {
            files.renumber(&mut random, &lying);
        }
        let found = run(async {
            let (log, found) = open(&lying).await?;
            log.shard(ShardId(1)).save_vote(b"a later vote").await.expect("the disk works");
            log.close().await.expect("the disk works");
            Ok::<_, WalError>(found)
        });
        match found {
            Ok(mut found) => {
                found.entry(ShardId(1)).or_default().vote = Some(b"a later vote".to_vec());
                let (_, again) = run(async { open(&lying).await }).expect("it opened before");
                assert_eq!(again, found);
                outcomes[0] += 1;
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                outcomes[1] += 1;
            }
        }
    }
    println!("{outcomes:?} opened, refused");
    assert!(outcomes.iter().all(|count| *count > 100), "{outcomes:?}");
}
