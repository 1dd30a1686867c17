//! Many requests of some sessions under way on one connection, each answer foretold by the state
//! machine, run here on the same commands.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_core::State;
use leasehold_protocol::command::Command;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{LeaseId, Number, RequestId, ShardId, Token};
use leasehold_protocol::member::{MemberCommand, MembersRequest};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::MemberEntry;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::bare::{self, Lease, Patient as _, scaled};

const TTL_MS: u32 = 600_000;
const SESSIONS: usize = 3;
const KEYS: usize = 3;

/// The state machine with what it has said about each request.
struct Oracle {
    state: State,
    /// Waiting acquires by lease and number.
    waits: BTreeMap<(LeaseId, Number), RequestId>,
    expected: BTreeMap<RequestId, Vec<Outcome>>,
}

impl Oracle {
    /// Of a shard whose first token is above `base`.
    fn new(base: Token) -> Self {
        let mut state = State::new(ShardId(0));
        state.apply(0, &Command::Begin { token_base: base }, &mut Vec::new());
        Self { state, waits: BTreeMap::new(), expected: BTreeMap::new() }
    }

    fn apply(&mut self, id: RequestId, command: &Command) -> Outcome {
        let mut events = Vec::new();
        let outcome = self.state.apply(0, command, &mut events);
        self.expected.entry(id).or_default().push(outcome);
        if let (Outcome::Queued { .. }, Command::Acquire { caller, .. }) = (&outcome, command) {
            self.waits.insert((caller.lease, caller.number), id);
        }
        for event in events {
            if let EventKind::WaitEnded { lease, number, outcome, .. } = event.kind
                && let Some(id) = self.waits.remove(&(lease, number))
            {
                self.expected.entry(id).or_default().push(outcome);
            }
        }
        outcome
    }

    fn holder(&self, key: &str) -> Option<(LeaseId, Token)> {
        let info = self.state.key_info(key.as_bytes());
        info.holders.first().map(|holder| (holder.lease, holder.token))
    }

    /// The number of this lease's wait for any key, if it has one.
    fn wait_of(&self, lease: LeaseId) -> Option<Number> {
        self.waits.keys().find(|(waiting, _)| *waiting == lease).map(|(_, number)| *number)
    }
}

/// The nodes in the member table, which the first leader writes down as a command of this shard.
fn founders(wire: &mut Wire) -> Vec<MemberEntry> {
    let mut founders = Vec::new();
    bare::until("the member table is there", || {
        let reply = bare::call(wire, &Request::Members(MembersRequest { timeout_ms: 1_000 }));
        let Reply::Members(reply) = reply else { panic!("no member table: {reply:?}") };
        founders = reply.members.into_iter().map(|member| member.entry).collect();
        !founders.is_empty()
    });
    founders
}

fn command_of(request: &Request) -> &Command {
    match request {
        Request::Command(request) => &request.command,
        request => unreachable!("only commands are sent: {request:?}"),
    }
}

/// Something that makes sense now, or that must be refused.
fn draw(rng: &mut SmallRng, oracle: &Oracle, leases: &[Lease], next: &mut u64) -> Request {
    let lease = &leases[rng.random_range(0..leases.len())];
    let key = format!("piped/{}", rng.random_range(0..KEYS));
    let number = *next;
    *next += 3;
    match rng.random_range(0..10) {
        0..=3 => lease.acquire(number, &key, u32::MAX),
        4..=5 => lease.acquire(number, &key, 0),
        6..=8 => match oracle.holder(&key) {
            // The holder's release, or one that takes its token for its own.
            Some((holder, token)) => {
                let holder = leases.iter().find(|lease| lease.id == holder).unwrap_or(lease);
                let caller = if rng.random_ratio(5, 6) { holder } else { lease };
                caller.release(number, &key, token)
            }
            None => lease.release(number, &key, Token(1)),
        },
        _ => match oracle.wait_of(lease.id) {
            Some(number) => lease.cancel(number.0 + 1),
            None => lease.acquire(number, &key, u32::MAX),
        },
    }
}

/// B42, B37: hundreds of requests at once on one connection, several of the same session for the
/// same key: each answer is its own request's, to the letter.
#[test]
fn every_answer_on_a_crowded_connection_is_its_own_requests() {
    const REQUESTS: usize = 300;
    let rounds = scaled(5, 100);
    let _alone = process::alone();
    let cluster = Cluster::start(bare::calm()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let mut rng = SmallRng::seed_from_u64(42);

    let founded = Command::Member(MemberCommand::Found(founders(&mut wire)));
    // The first commands of this shard tell where its tokens start.
    let (secret, open) = bare::open(TTL_MS);
    let opened = bare::call(&mut wire, &open);
    let mut leases = vec![bare::opened(&opened, secret)];
    let acquire = leases[0].acquire(1, "base", 0);
    let first = bare::outcome(&mut wire, &acquire);
    let Outcome::Granted(grant) = first else { panic!("no grant: {first:?}") };
    let mut oracle = Oracle::new(Token(grant.token.0 - 1));
    oracle.apply(RequestId(0), &founded);
    let mut told = Vec::new();
    for request in [&open, &acquire] {
        told.push(oracle.apply(RequestId(0), command_of(request)));
    }
    let Reply::Outcome(opened) = opened else { panic!("no lease: {opened:?}") };
    assert_eq!(told, [opened.outcome, first], "INVALID: not a new shard");
    for _ in 1..SESSIONS {
        let (secret, open) = bare::open(TTL_MS);
        let reply = bare::call(&mut wire, &open);
        oracle.apply(RequestId(0), command_of(&open));
        leases.push(bare::opened(&reply, secret));
    }

    let mut next: u64 = 4;
    let mut kinds = BTreeMap::<String, usize>::new();
    for _ in 0..rounds {
        oracle.expected.clear();
        for lease in &mut leases {
            // As a client that has not seen all answers yet.
            lease.floor = next.saturating_sub(3_000);
        }
        for _ in 0..REQUESTS {
            let request = draw(&mut rng, &oracle, &leases, &mut next);
            let id = wire.send_patiently(&request);
            oracle.apply(id, command_of(&request));
        }
        check(&mut wire, &oracle.expected, &mut kinds);
    }
    println!("{} requests in {rounds} rounds: {kinds:?}", rounds * REQUESTS);
    for kind in ["Granted", "Queued", "Released", "Cancelled", "already_held", "already_queued"] {
        assert!(kinds.contains_key(kind), "INVALID: {kind} never came up");
    }
}

/// Takes all answers and compares them. Where a wait has ended in the very step of the log in
/// which it began, its end alone may be told.
fn check(
    wire: &mut Wire,
    expected: &BTreeMap<RequestId, Vec<Outcome>>,
    kinds: &mut BTreeMap<String, usize>,
) {
    let mut got = BTreeMap::<RequestId, Vec<Outcome>>::new();
    let mut left: BTreeSet<RequestId> = expected.keys().copied().collect();
    while !left.is_empty() {
        let answer = wire.recv(Deadline::after(PATIENCE)).expect("connected");
        let Some((id, reply)) = answer else { panic!("no answer to {left:?}") };
        let Reply::Outcome(reply) = reply else { panic!("no outcome: {reply:?}") };
        let kind = match reply.outcome {
            Outcome::Refused { code, .. } => code.name().to_owned(),
            outcome => format!("{outcome:?}").split(['(', ' ']).next().unwrap_or("").to_owned(),
        };
        *kinds.entry(kind).or_default() += 1;
        let outcomes = got.entry(id).or_default();
        outcomes.push(reply.outcome);
        let last = expected.get(&id).and_then(|all| all.last());
        let queued = |outcome: &Outcome| matches!(outcome, Outcome::Queued { .. });
        if !queued(&reply.outcome) || last.is_none_or(queued) {
            assert!(left.remove(&id), "answered again: {id:?} {outcomes:?}");
        }
    }
    for (id, outcomes) in expected {
        let told = &got[id];
        assert!(told == outcomes || told[..] == outcomes[outcomes.len() - 1..], "{id:?}");
    }
}
