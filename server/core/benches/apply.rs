//! What a command costs in `apply`, and what goes with it: `cargo bench -p leasehold-core`.
//!
//! Prints nanoseconds of processor time per operation, the best of several rounds; so other work
//! on the machine disturbs it little. An argument picks the lines that contain it.

use std::hint::black_box;

use leasehold_core::snapshot::{Decoder, Encoder};
use leasehold_core::wheel::Wheel;
use leasehold_core::{Batch, State};
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;
use rustix::time::{ClockId, clock_gettime};

const SECRET: Secret = Secret([1; 16]);
const LEASES: u64 = 20_000;
const ROUNDS: usize = 9;

fn caller(lease: u64, number: u64) -> Caller {
    let floor = Number(number - 1);
    Caller { lease: LeaseId(lease), secret: SECRET, number: Number(number), floor, acks: vec![] }
}

fn acquire(lease: u64, number: u64, key: Vec<u8>, wait_ms: u32) -> Command {
    let (mode, own, value) = (Mode::EXCLUSIVE, None, b"10.0.0.1:8080".to_vec());
    Command::Acquire { caller: caller(lease, number), key, mode, own, value, wait_ms }
}

/// The release reserved by acquire `number`.
fn release(lease: u64, number: u64, key: Vec<u8>, token: Token) -> Command {
    Command::Release { caller: caller(lease, number + 2), key, token }
}

fn key(n: u64) -> Vec<u8> {
    format!("jobs/nightly/{n:06}").into_bytes()
}

/// `LEASES` sessions, each holding one key.
fn populated() -> State {
    let mut state = State::new(ShardId(0));
    let events = &mut Vec::new();
    state.apply(0, &Command::Begin { token_base: Token(1 << 50) }, events);
    for lease in 1..=LEASES {
        let label = b"worker".to_vec();
        state.apply(0, &Command::Open { ttl_ms: 15_000, secret: SECRET, label }, events);
        state.apply(0, &acquire(lease, 1, key(lease), 0), events);
        events.clear();
    }
    state
}

fn report(name: &str, operations: u64, mut round: impl FnMut()) {
    if std::env::args().skip(1).any(|only| !only.starts_with('-') && !name.contains(&only)) {
        return;
    }
    let best = (0..ROUNDS)
        .map(|_| {
            let start_ns = cpu_ns();
            round();
            cpu_ns() - start_ns
        })
        .min()
        .expect("some rounds");
    println!("{:>9.0} ns  {name}", best as f64 / operations as f64);
}

/// Processor time of this thread.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn token_of(outcome: &Outcome) -> Token {
    match outcome {
        Outcome::Granted(grant) => grant.token,
        other => panic!("{other:?}"),
    }
}

/// Free keys, another one and another session each time, of so many.
fn pairs(state: &mut State, number: &mut u64, sessions: u64) {
    let mut events: Vec<Event> = Vec::new();
    for n in 0..sessions {
        let lease = n * 7_919 % sessions + 1;
        let key = key(LEASES + lease);
        let outcome = state.apply(0, &acquire(lease, *number, key.clone(), 0), &mut events);
        let token = token_of(&outcome);
        state.apply(0, &release(lease, *number, key, token), &mut events);
        events.clear();
    }
    *number += 3;
}

/// Of the last grant among the events.
fn granted(events: &[Event]) -> Token {
    let mut tokens = events.iter().rev().filter_map(|event| match event.kind {
        EventKind::Granted { token, .. } => Some(token),
        _ => None,
    });
    tokens.next().expect("a grant")
}

/// One key with 10,000 waiters: the holder releases and queues again.
struct HotKey {
    number: u64,
    turn: u64,
    token: Token,
}

impl HotKey {
    fn turns(&mut self, state: &mut State, turns: u64) {
        let mut events: Vec<Event> = Vec::new();
        for _ in 0..turns {
            let (round, lease) = (self.turn / 10_001, self.turn % 10_001 + 1);
            let number = self.number + 3 * round;
            let command = release(lease, number, b"hot".to_vec(), self.token);
            state.apply(0, &command, &mut events);
            self.token = granted(&events);
            let command = acquire(lease, number + 3, b"hot".to_vec(), 9);
            let outcome = state.apply(0, &command, &mut events);
            assert!(matches!(outcome, Outcome::Queued { position: 9_999, .. }), "{outcome:?}");
            events.clear();
            self.turn += 1;
        }
    }
}

fn main() {
    let mut state = populated();
    let mut number = 4;
    println!("{LEASES} sessions, {LEASES} held keys");
    report("building the commands of a pair", LEASES, || {
        for n in 0..LEASES {
            black_box(acquire(n, 4, key(n), 0));
            black_box(release(n, 4, key(n), Token(n)));
        }
    });
    report("acquire + release of a free key by one of all sessions", LEASES, || {
        pairs(&mut state, &mut number, LEASES);
    });
    report("acquire + release of a free key by one of 500 sessions", 500, || {
        pairs(&mut state, &mut number, 500);
    });

    let mut events = Vec::new();
    for lease in 1..=10_001 {
        state.apply(0, &acquire(lease, number, b"hot".to_vec(), 9), &mut events);
    }
    let mut hot = HotKey { number, turn: 0, token: granted(&events) };
    report("release + hand-over + queue again, 10,000 waiters", 20_000, || {
        hot.turns(&mut state, 20_000);
    });

    let lease = 15_000;
    report("try-acquire that is refused", LEASES, || {
        for n in 0..LEASES {
            let outcome =
                state.apply(0, &acquire(lease, number + 3 * n, key(n + 1), 0), &mut events);
            assert!(matches!(outcome, Outcome::Refused { .. }));
        }
        number += 3 * LEASES;
    });

    report("freezing a view", 1_000, || {
        for _ in 0..1_000 {
            black_box(Encoder::new(&state));
        }
    });
    let chunks: Vec<_> = Encoder::new(&state).collect();
    let len = chunks.len() as u64;
    report(&format!("encoding one of {len} chunks"), len, || {
        black_box(Encoder::new(&state).map(|chunk| chunk.len()).sum::<usize>());
    });
    let items = (state.leases_len() + state.keys_len()) as u64;
    let mut read = Vec::new();
    report(&format!("decoding one of {len} chunks"), len, || {
        let mut decoder = Decoder::new();
        for chunk in &chunks {
            decoder.feed(chunk).expect("good");
        }
        read.push(decoder);
    });
    report(&format!("checking one of {items} leases and keys of a snapshot"), items, || {
        black_box(read.pop().expect("one per round").finish().expect("good").digest());
    });

    number += 1_000_000;
    report("acquire + release while a view is frozen", LEASES, || {
        let frozen = Encoder::new(&state);
        pairs(&mut state, &mut number, LEASES);
        drop(frozen);
    });

    ending_a_lease();
    batches_and_wheel();
}

fn ending_a_lease() {
    const HOLDS: u64 = 4_000;
    let mut state = populated();
    let mut lease = LEASES;
    let mut events = Vec::new();
    report("opening a lease, granting it a hold, ending both with it", HOLDS, || {
        let open = Command::Open { ttl_ms: 15_000, secret: SECRET, label: b"many".to_vec() };
        state.apply(0, &open, &mut events);
        lease += 1;
        for n in 0..HOLDS {
            state.apply(0, &acquire(lease, 3 * n + 1, key(LEASES + n + 1), 0), &mut events);
        }
        state.apply(0, &Command::Expire { lease: LeaseId(lease) }, &mut events);
        events.clear();
    });
}

fn batches_and_wheel() {
    let commands: Vec<_> = (0..256).map(|n| acquire(n + 1, 4, key(n), 0)).collect();
    let batch = Batch { wall_ms: 1, commands };
    let bytes = batch.encode();
    report("encoding a command of a batch", 256, || drop(black_box(batch.encode())));
    report("decoding a command of a batch", 256, || drop(black_box(Batch::decode(&bytes))));

    report("wheel: insert, renew twice, fire", 1_000_000, || {
        let mut wheel = Wheel::new(0);
        let ttl_ns = 15_000_000_000;
        let all: Vec<_> = (0..1_000_000_u64).map(|n| wheel.insert(n * 997 + ttl_ns, n)).collect();
        for (n, handle) in all.iter().enumerate() {
            wheel.renew(*handle, n as u64 * 997 + 2 * ttl_ns);
        }
        for (n, handle) in all.iter().enumerate() {
            wheel.renew(*handle, n as u64 * 997 + 3 * ttl_ns);
        }
        let mut due = Vec::new();
        wheel.advance(10 * ttl_ns, &mut due);
        assert_eq!(due.len(), 1_000_000);
    });
}
