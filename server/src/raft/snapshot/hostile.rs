//! Hostile bytes for what the groups keep and send: snapshot files, the covers in them, and the
//! records behind the log's own. Mutated below the checksums, which are then made to fit.

use std::collections::BTreeMap;

use leasehold_core::snapshot::Encoder;
use leasehold_core::{Batch, State};
use leasehold_protocol::command::Command;
use leasehold_protocol::ids::{ClusterId, DiskId, LeaseId, Secret, ShardId, Token};
use openraft::EntryPayload;

use super::StateReader;
use super::format::{FileReader, FileWriter, Owner, SnapshotError};
use crate::hostile_support::{
    Random, Shown, Taken, corpus, mutate_once, shuffle_once, taken_by, times,
};
use crate::raft::convert;
use crate::raft::types::{
    Entry, EntryData, LeaderId, LogId, Member, Membership, SnapshotMeta, StoredMembership, Vote,
};

/// Inputs that once found something.
const CORPUS: &str = include_str!("../../../../protocol/tests/hostile_support/corpus.txt");

const OWNER: Owner = Owner { cluster: ClusterId([3; 16]), shard: ShardId(5) };
const HEADER_LEN: usize = 40;
const END_LEN: usize = 24;

fn at(index: u64) -> LogId {
    LogId::new(LeaderId { term: 4, node_id: 2 }, index)
}

fn membership() -> Membership {
    let member = |node: u64| Member {
        disk: DiskId([node as u8; 16]),
        peer_addr: format!("node{node}:1"),
        client_addr: String::new(),
    };
    let nodes: BTreeMap<u64, Member> = (1..=4).map(|node| (node, member(node))).collect();
    Membership::new(vec![[1, 2, 3].into(), [2, 3, 4].into()], nodes).expect("voters are nodes")
}

fn meta() -> SnapshotMeta {
    let last_membership = StoredMembership::new(Some(at(7)), membership());
    SnapshotMeta { last_log_id: Some(at(99)), last_membership }
}

fn state() -> State {
    let mut state = State::new(OWNER.shard);
    let begin = Command::Begin { token_base: Token(10) };
    let open = |n: u8| Command::Open { ttl_ms: 5_000, secret: Secret([n; 16]), label: vec![n; 9] };
    for command in [begin, open(1), open(2), open(3)] {
        state.apply(1, &command, &mut Vec::new());
    }
    state
}

/// A file taken apart: its header with the cover, its chunks' bytes, its end.
#[derive(Clone)]
struct Parts {
    header: Vec<u8>,
    chunks: Vec<Vec<u8>>,
    end: Vec<u8>,
}

impl Parts {
    fn new() -> Self {
        let state = state();
        let (mut writer, header) = FileWriter::new(OWNER, &meta());
        let bytes: Vec<u8> = Encoder::new(&state).flatten().collect();
        let chunks: Vec<Vec<u8>> = bytes.chunks(100).map(<[u8]>::to_vec).collect();
        for chunk in &chunks {
            drop(writer.chunk(chunk));
        }
        Self { header, chunks, end: writer.finish(state.digest()) }
    }

    fn seal_header(&mut self) {
        if self.header.len() >= HEADER_LEN {
            let crc = crc32c::crc32c(&self.header[..36]);
            let crc = crc32c::crc32c_append(crc, &self.header[HEADER_LEN..]);
            self.header[36..HEADER_LEN].copy_from_slice(&crc.to_le_bytes());
        }
    }

    /// The file, its chunks' checksums and its end made to fit if `sealed`.
    fn bytes(&self, sealed: bool) -> Vec<u8> {
        let mut bytes = self.header.clone();
        for chunk in &self.chunks {
            bytes.extend_from_slice(&(chunk.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&crc32c::crc32c(chunk).to_le_bytes());
            bytes.extend_from_slice(chunk);
        }
        let mut end = self.end.clone();
        if sealed && end.len() == END_LEN {
            let len: usize = self.chunks.iter().map(Vec::len).sum();
            end[4..12].copy_from_slice(&(len as u64).to_le_bytes());
            let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes), &end[..END_LEN - 4]);
            end[END_LEN - 4..].copy_from_slice(&crc.to_le_bytes());
        }
        bytes.extend_from_slice(&end);
        bytes
    }
}

fn mutation(random: &mut Random, whole: &Parts) -> Vec<u8> {
    let mut changed = whole.clone();
    match random.below(4) {
        0 => {
            // The cover, most times: its length fits, unless the mutation lies about it.
            let mut cover = changed.header.split_off(HEADER_LEN);
            mutate_once(random, &mut cover, &whole.header);
            let len = cover.len() as u32;
            changed.header[32..36].copy_from_slice(&len.to_le_bytes());
            changed.header.extend_from_slice(&cover);
            changed.seal_header();
        }
        1 => {
            mutate_once(random, &mut changed.header, &whole.end);
            changed.seal_header();
        }
        2 => shuffle_once(random, &mut changed.chunks, &whole.chunks),
        _ => {
            let chunk = random.below(changed.chunks.len());
            mutate_once(random, &mut changed.chunks[chunk], &whole.end);
        }
    }
    if random.one_in(5) {
        mutate_once(random, &mut changed.end, &whole.header);
    }
    let sealed = !random.one_in(4);
    let mut bytes = changed.bytes(sealed);
    if random.one_in(5) {
        mutate_once(random, &mut bytes, &whole.header);
    }
    bytes
}

/// Reads a file as a node does that receives it piece by piece.
fn read(bytes: &[u8], piece: usize) -> Result<(SnapshotMeta, State), SnapshotError> {
    let (mut reader, mut decoder) = (FileReader::new(OWNER), StateReader::new(OWNER));
    for piece in bytes.chunks(piece) {
        reader.feed(piece, |chunk| decoder.feed(chunk))?;
    }
    let (meta, digest) = reader.finish()?;
    Ok((meta, decoder.finish(digest)?))
}

#[test]
fn no_mutated_file_becomes_another_state() {
    let (whole, digest) = (Parts::new(), state().digest());
    let (found, _) = read(&whole.bytes(true), 64).expect("it is sound");
    assert_eq!(found, meta());
    let mut random = Random::of_test(10);
    let (mut outcomes, mut worst) = (BTreeMap::<&str, u64>::new(), 0);
    let mut try_one = |bytes: &[u8], piece: usize| {
        let _shown = Shown { format: "file", bytes };
        let (result, Taken { peak, largest }) = taken_by(|| read(bytes, piece));
        worst = worst.max(peak * 100 / bytes.len().max(200));
        let bound = 8 * bytes.len() + 16 * 1024;
        assert!(peak <= bound && largest <= bound, "{} bytes took {peak}", bytes.len());
        let outcome = match result {
            Ok((_, state)) => {
                assert_eq!(state.digest(), digest, "only the state itself passes");
                let named = &bytes[bytes.len() - 12..bytes.len() - 4];
                assert_eq!(named, digest.to_le_bytes(), "and only under its digest");
                "accepted"
            }
            Err(SnapshotError::Damaged(_)) => "damaged",
            Err(SnapshotError::Length) => "length",
            Err(SnapshotError::Cover(_)) => "cover",
            Err(SnapshotError::State(_)) => "state",
            Err(SnapshotError::Cluster { .. } | SnapshotError::Shard { .. }) => "owner",
            Err(_) => "header",
        };
        *outcomes.entry(outcome).or_default() += 1;
    };
    for bytes in &corpus(CORPUS, "file") {
        try_one(bytes, bytes.len());
    }
    for _ in 0..times(50_000) {
        let bytes = mutation(&mut random, &whole);
        try_one(&bytes, 1 + random.below(2 * bytes.len().max(1)));
    }
    println!("{outcomes:?}; most memory: {worst} % of the file's length");
    assert!(outcomes.len() == 7 && outcomes.values().all(|count| *count > 100), "{outcomes:?}");
}

/// A record of the WAL by the name of its kind, and how it reads back.
type Kind = (Vec<u8>, fn(&[u8]) -> Option<Vec<u8>>);

fn kinds() -> Vec<Kind> {
    let batch = Batch { wall_ms: 5, commands: vec![Command::Expire { lease: LeaseId(7) }] };
    let payloads = [
        EntryPayload::Blank,
        EntryPayload::Normal(EntryData::from(batch.encode())),
        EntryPayload::Membership(membership()),
    ];
    let entry = |bytes: &[u8]| convert::read_entry(bytes).ok().map(|e| convert::entry_record(&e));
    let vote = Vote { leader_id: LeaderId { term: 9, node_id: 4 }, committed: true };
    let mut kinds: Vec<Kind> = vec![
        (convert::vote_record(&vote), |bytes| {
            convert::read_vote(bytes).ok().map(|vote| convert::vote_record(&vote))
        }),
        (convert::log_id_record(&at(8)), |bytes| {
            convert::read_log_id(bytes).ok().map(|id| convert::log_id_record(&id))
        }),
        (convert::meta_record(&meta()), |bytes| {
            convert::read_meta(bytes).ok().map(|meta| convert::meta_record(&meta))
        }),
    ];
    for payload in payloads {
        kinds.push((convert::entry_record(&Entry { log_id: at(5), payload }), entry));
    }
    kinds
}

#[test]
fn mutated_records_are_refused_or_are_values() {
    let kinds = kinds();
    let mut random = Random::of_test(11);
    let (mut accepted, mut refused) = (0_u64, 0_u64);
    for _ in 0..times(60_000) {
        let (record, read) = random.pick(&kinds);
        let mut bytes = record.clone();
        for _ in 0..=random.below(3) {
            mutate_once(&mut random, &mut bytes, &kinds[2].0);
        }
        let _shown = Shown { format: "raft-record", bytes: &bytes };
        let (again, Taken { peak, largest }) = taken_by(|| read(&bytes));
        // Members are kept in a tree, whose nodes have room for eleven.
        let bound = 16 * bytes.len() + 4096;
        assert!(peak <= bound && largest <= bound, "{} bytes took {peak}", bytes.len());
        match again {
            Some(again) => {
                assert_eq!(read(&again).as_ref(), Some(&again), "what was accepted is a value");
                accepted += 1;
            }
            None => refused += 1,
        }
    }
    println!("{accepted} accepted, {refused} refused");
    assert!(accepted > 1_000 && refused > 1_000);
}
