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
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

use crate::answers::nothing_more;
use crate::bare::{self, Patient as _, scaled};
use crate::draw::Draw;

const TTL_MS: u32 = 600_000;
const SESSIONS: usize = 6;

/// What must have come up, by request and outcome.
const EFFECTS: [&str; 27] = [
    "exclusive Granted",
    "exclusive Queued",
    "exclusive Cancelled",
    "exclusive already_held",
    "exclusive already_queued",
    "shared Granted",
    "shared Queued",
    "shared Cancelled",
    "permits Granted",
    "permits Queued",
    "permits Cancelled",
    "permits held",
    "permits limit_mismatch",
    "permits permits_above_limit",
    "several Granted",
    "several Queued",
    "several Cancelled",
    "several held",
    "release Released",
    "release not_owner",
    "release all Released",
    "downgrade Changed",
    "upgrade Granted",
    "upgrade upgrade_conflict",
    "limit Changed",
    "cancel Cancelled",
    "cancel Released",
];

/// The state machine with what it has said about each request.
pub(crate) struct Oracle {
    pub(crate) state: State,
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
        if let Outcome::Queued { .. } = outcome
            && let Command::Acquire { caller, .. } | Command::AcquireAll { caller, .. } = command
        {
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

    /// The number of this lease's wait for any key, if it has one.
    pub(crate) fn wait_of(&self, lease: LeaseId) -> Option<Number> {
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

/// B42, B37: hundreds of requests at once on one connection, of all modes, of several keys, several of
/// the same session for the same key: each answer is its own request's, to the letter.
#[test]
fn every_answer_on_a_crowded_connection_is_its_own_requests() {
    const REQUESTS: usize = 300;
    let rounds = scaled(5, 100);
    let _alone = process::alone();
    let cluster = Cluster::start(bare::calm()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);

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

    let mut draw = Draw { rng: SmallRng::seed_from_u64(42), leases, next: 4 };
    let mut kinds = BTreeMap::<String, usize>::new();
    let (mut names, mut queued) = (BTreeMap::new(), 0);
    for _ in 0..rounds {
        oracle.expected.clear();
        let seen = draw.next.saturating_sub(3_000);
        for lease in &mut draw.leases {
            // As a client that has not seen all answers yet.
            lease.floor = seen;
        }
        for _ in 0..REQUESTS {
            let (name, request) = draw.request(&oracle);
            let id = wire.send_patiently(&request);
            names.insert(id, name);
            oracle.apply(id, command_of(&request));
        }
        queued += check(&mut wire, &oracle.expected);
        for (id, outcomes) in &oracle.expected {
            for outcome in outcomes {
                *kinds.entry(format!("{} {}", names[id], name_of(outcome))).or_default() += 1;
            }
        }
    }
    nothing_more(&mut wire, "base");
    println!(
        "{} requests in {rounds} rounds, {queued} told that they wait: {kinds:?}",
        rounds * REQUESTS
    );
    assert!(queued > 0, "INVALID: no answer was an interim one");
    for effect in EFFECTS {
        assert!(kinds.contains_key(effect), "INVALID: {effect} never came up");
    }
}

fn name_of(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Refused { code, .. } => code.name().to_owned(),
        outcome => format!("{outcome:?}").split(['(', ' ']).next().unwrap_or("").to_owned(),
    }
}

/// Takes all answers and compares them. Where a wait has ended in the very step of the log in
/// which it began, its end alone may be told. Returns how many were told that they wait.
fn check(wire: &mut Wire, expected: &BTreeMap<RequestId, Vec<Outcome>>) -> usize {
    let queued = |outcome: &Outcome| matches!(outcome, Outcome::Queued { .. });
    let mut got = BTreeMap::<RequestId, Vec<Outcome>>::new();
    let mut left: BTreeSet<RequestId> = expected.keys().copied().collect();
    while !left.is_empty() {
        let answer = wire.recv(Deadline::after(PATIENCE)).expect("connected");
        let Some((id, reply)) = answer else { panic!("no answer to {left:?}") };
        let Reply::Outcome(reply) = reply else { panic!("no outcome: {reply:?}") };
        let foretold = expected.get(&id).is_some_and(|all| all.contains(&reply.outcome));
        assert!(foretold, "{id:?} was told {:?}, not of {:?}", reply.outcome, expected.get(&id));
        let outcomes = got.entry(id).or_default();
        outcomes.push(reply.outcome);
        let last = expected.get(&id).and_then(|all| all.last());
        if !queued(&reply.outcome) || last.is_none_or(queued) {
            assert!(left.remove(&id), "answered again: {id:?} {outcomes:?}");
        }
    }
    for (id, outcomes) in expected {
        let told = &got[id];
        assert!(told == outcomes || told[..] == outcomes[outcomes.len() - 1..], "{id:?}");
    }
    got.values().flatten().filter(|outcome| queued(outcome)).count()
}
