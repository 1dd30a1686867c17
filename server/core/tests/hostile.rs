//! Hostile bytes for what the state machine reads from disks and peers: snapshots of a shard's state
//! and batches of commands. Nothing may panic, no memory may be taken that the bytes do not justify,
//! and no bytes but a good snapshot's may become a state.
//!
//! Most mutations are made below the checksums, which are then made to fit: otherwise the checksums
//! would be all that is tested.

#[path = "../../../protocol/tests/hostile_support/mod.rs"]
mod hostile_support;

use hostile_support::{Random, Shown, Taken, corpus, mutate_once, shuffle_once, taken_by, times};
use leasehold_core::snapshot::{Decoder, Encoder, SnapshotError};
use leasehold_core::{Batch, DecodeError, State, invariants};
use leasehold_protocol::command::{Caller, Command, OwnLease};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;

/// Inputs that once found something.
const CORPUS: &str = include_str!("../../../protocol/tests/hostile_support/corpus.txt");

const SECRET: Secret = Secret([5; 16]);
/// Magic and version.
const PRELUDE_LEN: usize = 12;
/// Length and checksum.
const BLOCK_HEADER_LEN: usize = 8;

fn caller(lease: u64, number: u64) -> Caller {
    let floor = Number(number.saturating_sub(7));
    Caller { lease: LeaseId(lease), secret: SECRET, number: Number(number), floor, acks: vec![] }
}

fn acquire(lease: u64, number: u64, key: u64, own: bool) -> Command {
    Command::Acquire {
        caller: caller(lease, number),
        key: format!("jobs/{key}").into_bytes(),
        mode: Mode::EXCLUSIVE,
        own: own.then_some(OwnLease { ttl_ms: 2_000, secret: SECRET }),
        value: vec![b'v'; 12],
        wait_ms: 5_000,
    }
}

/// A small state with everything in it: holds, queues, own leases, a forced release, memories.
fn state() -> State {
    let mut state = State::new(ShardId(3));
    let mut apply = |command: Command| state.apply(9, &command, &mut Vec::new());
    apply(Command::Begin { token_base: Token(1_000) });
    for n in 0..5_u8 {
        apply(Command::Open { ttl_ms: 5_000, secret: SECRET, label: vec![b'a' + n; 9] });
    }
    for round in 0..4_u64 {
        for lease in 1..=5 {
            let own = (round + lease).is_multiple_of(4);
            apply(acquire(lease, round * 3 + 1, (round * 7 + lease * 3) % 9, own));
        }
    }
    apply(Command::Cancel { caller: caller(1, 2), release_if_granted: true });
    let holder = state.key_info(b"jobs/6").holders[0].clone();
    let force = Command::ForceRelease {
        key: b"jobs/6".to_vec(),
        token: holder.token,
        who: b"ops".to_vec(),
        why: b"stuck".to_vec(),
        now: false,
    };
    assert!(matches!(state.apply(9, &force, &mut Vec::new()), Outcome::Forced { .. }));
    invariants::check(&state).expect("a sound state");
    state
}

/// A snapshot taken apart: the archives of its items.
#[derive(Clone)]
struct Parts {
    prelude: Vec<u8>,
    items: Vec<Vec<u8>>,
    /// The item whose length is not said as it is.
    lie: Option<(usize, u32)>,
}

impl Parts {
    fn of(bytes: &[u8]) -> Self {
        let (prelude, mut rest) = bytes.split_at(PRELUDE_LEN);
        let mut items = Vec::new();
        while !rest.is_empty() {
            let (block, later) = rest[BLOCK_HEADER_LEN..].split_at(length(rest));
            let mut block = block;
            while !block.is_empty() {
                let (archive, later) = block[4..].split_at(length(block));
                items.push(archive.to_vec());
                block = later;
            }
            rest = later;
        }
        Self { prelude: prelude.to_vec(), items, lie: None }
    }

    /// The end mark counts the items; it must fit again after some came or went.
    fn fix_count(&mut self, counted: usize) {
        let (before, now) = ((counted as u64).to_le_bytes(), self.items.len() as u64 - 1);
        let Some(end) = self.items.last_mut() else { return };
        let at = end.windows(8).position(|number| number == before);
        if let Some(at) = at {
            end[at..at + 8].copy_from_slice(&now.to_le_bytes());
        }
    }

    /// The stream, in blocks of `per_block` items, with checksums that fit.
    fn bytes(&self, per_block: usize) -> Vec<u8> {
        let mut bytes = self.prelude.clone();
        let (mut checksum, mut number) = (0, 0);
        for items in self.items.chunks(per_block) {
            let mut payload = Vec::new();
            for archive in items {
                let lie = self.lie.filter(|(liar, _)| *liar == number);
                let len = lie.map_or(archive.len() as u32, |(_, len)| len);
                payload.extend_from_slice(&len.to_le_bytes());
                payload.extend_from_slice(archive);
                number += 1;
            }
            checksum = crc32c::crc32c_append(checksum, &payload);
            bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&checksum.to_le_bytes());
            bytes.extend_from_slice(&payload);
        }
        bytes
    }
}

fn length(bytes: &[u8]) -> usize {
    u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")) as usize
}

/// Mutated below the checksums, in the stream, or both.
fn mutation(random: &mut Random, parts: &Parts) -> Vec<u8> {
    let mut changed = parts.clone();
    let counted = changed.items.len() - 1;
    let depth = random.below(8);
    if depth < 6 {
        for _ in 0..=random.below(3) {
            if random.one_in(3) {
                shuffle_once(random, &mut changed.items, &parts.items);
            } else if !changed.items.is_empty() {
                let at = random.below(changed.items.len());
                mutate_once(random, &mut changed.items[at], random_item(&parts.items, at + 1));
            }
        }
        if !random.one_in(6) {
            changed.fix_count(counted);
        }
    }
    if random.one_in(10) {
        changed.lie = Some((random.below(changed.items.len().max(1)), random.lie() as u32));
    }
    let per_block = 1 + random.below(30);
    let mut bytes = changed.bytes(per_block);
    if depth > 4 {
        mutate_once(random, &mut bytes, &parts.prelude);
    }
    bytes
}

fn random_item(items: &[Vec<u8>], at: usize) -> &[u8] {
    &items[at % items.len()]
}

/// How far mutated snapshots came.
#[derive(Debug, Default)]
struct Depths {
    framing: u64,
    malformed: u64,
    contradiction: u64,
    inconsistent: u64,
    digest: u64,
    accepted: u64,
}

impl Depths {
    fn count(&mut self, result: &Result<State, SnapshotError>) {
        let depth = match result {
            Ok(_) => &mut self.accepted,
            Err(SnapshotError::Malformed { .. }) => &mut self.malformed,
            Err(SnapshotError::Contradiction { .. }) => &mut self.contradiction,
            Err(SnapshotError::Inconsistent(_)) => &mut self.inconsistent,
            Err(SnapshotError::Digest) => &mut self.digest,
            Err(_) => &mut self.framing,
        };
        *depth += 1;
    }

    fn require_all(&self) {
        println!("{self:?}");
        let Self { framing, malformed, contradiction, inconsistent, digest, accepted } = self;
        let all = [framing, malformed, contradiction, inconsistent, digest, accepted];
        assert!(all.iter().all(|count| **count > 100), "{self:?}");
    }
}

fn decode(bytes: &[u8], piece: usize) -> Result<State, SnapshotError> {
    let mut decoder = Decoder::new();
    for piece in bytes.chunks(piece) {
        decoder.feed(piece)?;
    }
    decoder.finish()
}

/// What a state and the check of it may take: an item becomes a few tree nodes of up to 32 entries
/// each, so a small snapshot takes more beside its length than a large one.
const fn snapshot_bound(len: usize) -> usize {
    8 * len + 16 * 1024
}

#[test]
fn no_mutated_snapshot_becomes_another_state() {
    let state = state();
    let whole: Vec<u8> = Encoder::new(&state).flatten().collect();
    let parts = Parts::of(&whole);
    assert_eq!(parts.bytes(usize::MAX), whole);
    println!("{} bytes, {} items", whole.len(), parts.items.len());
    let mut random = Random::of_test(5);
    let (mut depths, mut worst) = (Depths::default(), (0, 0));
    let mut try_one = |bytes: &[u8], piece: usize| {
        let _shown = Shown { format: "snapshot", bytes };
        let (result, Taken { peak, largest }) = taken_by(|| decode(bytes, piece));
        assert!(peak <= snapshot_bound(bytes.len()), "{} bytes took {peak}", bytes.len());
        assert!(largest <= 2 * bytes.len() + 8 * 1024, "{} bytes: {largest}", bytes.len());
        worst = (worst.0.max(peak * 100 / bytes.len().max(500)), worst.1.max(largest));
        if let Ok(copy) = &result {
            assert_eq!(copy.digest(), state.digest(), "only the state itself passes");
            invariants::check(copy).expect("it was checked");
        }
        depths.count(&result);
    };
    for bytes in &corpus(CORPUS, "snapshot") {
        try_one(bytes, usize::MAX);
    }
    for _ in 0..times(100_000) {
        let bytes = mutation(&mut random, &parts);
        try_one(&bytes, 1 + random.below(2 * bytes.len().max(1)));
    }
    println!("most memory: {} % of a snapshot's length; largest: {}", worst.0, worst.1);
    depths.require_all();
}

#[test]
fn no_announced_length_of_a_block_costs_memory() {
    let whole: Vec<u8> = Encoder::new(&state()).flatten().collect();
    for len in [u32::MAX, 1 << 31, 1 << 20, 81_921, 81_920, 65_536] {
        let mut bytes = whole[..PRELUDE_LEN + BLOCK_HEADER_LEN].to_vec();
        bytes[PRELUDE_LEN..PRELUDE_LEN + 4].copy_from_slice(&len.to_le_bytes());
        let (result, Taken { peak, .. }) = taken_by(|| decode(&bytes, 7));
        assert!(result.is_err());
        assert!(peak <= 256, "{len}: {peak}");
    }
}

fn batch() -> Batch {
    let release =
        Command::Release { caller: caller(2, 6), key: b"jobs/2".to_vec(), token: Token(1_001) };
    let commands = vec![
        Command::Open { ttl_ms: 5_000, secret: SECRET, label: b"web".to_vec() },
        acquire(2, 5, 2, true),
        Command::Cancel { caller: caller(1, 2), release_if_granted: true },
        release,
        Command::Expire { lease: LeaseId(7) },
    ];
    Batch { wall_ms: 1_700_000_000_000, commands }
}

/// A batch's commands, each with its length, shuffled and mutated, behind a count that fits or not.
fn mutated_batch(random: &mut Random, whole: &[u8]) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    if random.one_in(2) {
        let (header, mut rest) = whole.split_at(13);
        let mut commands = Vec::new();
        while !rest.is_empty() {
            let (command, later) = rest.split_at(4 + length(rest));
            commands.push(command.to_vec());
            rest = later;
        }
        let others = commands.clone();
        for _ in 0..=random.below(3) {
            shuffle_once(random, &mut commands, &others);
        }
        bytes = [header, &commands.concat()].concat();
        if !random.one_in(4) {
            bytes[9..13].copy_from_slice(&(commands.len() as u32).to_le_bytes());
        }
    }
    for _ in 0..random.below(3) {
        mutate_once(random, &mut bytes, whole);
    }
    bytes
}

#[test]
fn mutated_batches_are_refused_or_are_batches() {
    let whole = batch().encode();
    let mut random = Random::of_test(6);
    let mut outcomes = [0_u64; 4];
    let mut try_one = |bytes: &[u8]| {
        let _shown = Shown { format: "batch", bytes };
        let (result, Taken { peak, largest }) = taken_by(|| Batch::decode(bytes));
        let bound = 24 * bytes.len() + 256;
        assert!(peak <= bound && largest <= bound, "{} bytes took {peak}", bytes.len());
        let outcome = match result {
            Ok(batch) => {
                assert_eq!(Batch::decode(&batch.encode()).as_ref(), Ok(&batch));
                0
            }
            Err(DecodeError::Version(_)) => 1,
            Err(DecodeError::Length) => 2,
            Err(_) => 3,
        };
        outcomes[outcome] += 1;
    };
    for bytes in &corpus(CORPUS, "batch") {
        try_one(bytes);
    }
    for _ in 0..times(50_000) {
        try_one(&mutated_batch(&mut random, &whole));
    }
    println!("{outcomes:?} accepted, other version, wrong length, malformed command");
    assert!(outcomes.iter().all(|count| *count > 100), "{outcomes:?}");
}
