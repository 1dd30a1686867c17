//! Bad input over the wire: each gets its documented code, from every node, and nothing is lost:
//! the present holder keeps the lock.

#[path = "bad_input/commands.rs"]
mod commands;
#[path = "support/pipe.rs"]
mod pipes;

use std::time::Duration;

use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use leasehold_bench::wire::{Wire, refusal};
use leasehold_protocol::command::{Caller, Command, OwnLease, Want};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::limits::{KEY_LEN_MAX, VALUE_LEN_MAX, WINDOW};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{
    CommandRequest, Freshness, GetRequest, RenewItem, RenewRequest, Request,
};
use leasehold_protocol::shard::shard_of;

const LIMIT: Duration = Duration::from_secs(5);
const SECRET: Secret = Secret([1; 16]);

struct Client {
    wire: Wire,
    lease: LeaseId,
    next: u64,
}

impl Client {
    fn command(&mut self, command: Command) -> Reply {
        let shard = ShardId(0);
        let request = Request::Command(CommandRequest { shard, timeout_ms: 3_000, command });
        self.wire.call(&request, LIMIT).expect("an answer")
    }

    fn outcome(&mut self, command: Command) -> Outcome {
        match self.command(command) {
            Reply::Outcome(reply) => reply.outcome,
            reply => panic!("no outcome: {reply:?}"),
        }
    }

    fn open(&mut self, ttl_ms: u32, secret: Secret) -> Reply {
        self.command(Command::Open { ttl_ms, secret, label: b"bad-input".to_vec() })
    }

    fn caller(&mut self) -> Caller {
        let number = self.next;
        self.next += 3;
        self.caller_at(number)
    }

    fn caller_at(&self, number: u64) -> Caller {
        Caller {
            lease: self.lease,
            secret: SECRET,
            number: Number(number),
            floor: Number(0),
            acks: Vec::new(),
        }
    }

    fn acquire(&mut self, key: &[u8]) -> Command {
        acquire(self.caller(), key)
    }
}

fn acquire(caller: Caller, key: &[u8]) -> Command {
    let (mode, own, value) = (Mode::EXCLUSIVE, None, Vec::new());
    Command::Acquire { caller, key: key.to_vec(), mode, own, value, wait_ms: 0 }
}

fn with_value(command: Command, len: usize) -> Command {
    match command {
        Command::Acquire { caller, key, mode, own, wait_ms, .. } => {
            Command::Acquire { caller, key, mode, own, value: vec![b'v'; len], wait_ms }
        }
        other => other,
    }
}

fn expect(reply: &Reply, code: ErrorCode, what: &str) {
    assert_eq!(refusal(reply), Some(code), "{what}: {reply:?}");
}

#[test]
fn every_bad_input_has_its_code_and_nothing_is_lost() {
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    for addr in cluster.endpoints() {
        let wire = Wire::connect(addr, LIMIT).expect("connected");
        let mut client = Client { wire, lease: LeaseId(0), next: 1 };
        ttls(&mut client);
        let Reply::Outcome(reply) = client.open(60_000, SECRET) else { panic!("no session") };
        let Outcome::Opened { lease, .. } = reply.outcome else { panic!("no session: {reply:?}") };
        client.lease = lease;
        keys_and_values(&mut client);
        owners(&mut client);
        numbers(&mut client);
        leases(&mut client);
    }
    cluster.wait_leader(0, PATIENCE).expect("still a leader");
}

/// A client that does not look at the shards of its keys itself could hold one in two of them.
#[test]
fn a_key_of_another_shard_among_several_is_refused_by_the_server() {
    const SHARDS: u32 = 2;
    let _alone = process::alone();
    let cluster = Cluster::start(Spec { shards: SHARDS, ..Spec::default() }).expect("a cluster");
    let key = |shard: u32| {
        let mut keys = (0..).map(|n| format!("doc/{n}").into_bytes());
        keys.find(|key| shard_of(key, SHARDS) == ShardId(shard)).expect("there are enough")
    };
    for addr in cluster.endpoints() {
        let wire = Wire::connect(addr, LIMIT).expect("connected");
        let mut client = Client { wire, lease: LeaseId(0), next: 1 };
        let Outcome::Opened { lease, .. } =
            client.outcome(Command::Open { ttl_ms: 60_000, secret: SECRET, label: Vec::new() })
        else {
            panic!("no session")
        };
        client.lease = lease;
        for keys in [vec![key(0), key(1)], vec![key(1), key(0)], vec![key(1)]] {
            let want = |key| Want { key, mode: Mode::EXCLUSIVE, limit: 0, reentrant: false };
            let caller = client.caller();
            let reply = client.command(Command::AcquireAll {
                caller,
                wants: keys.into_iter().map(want).collect(),
                own: None,
                value: Vec::new(),
                wait_ms: 0,
                delay_ms: 0,
            });
            expect(&reply, ErrorCode::WRONG_SHARD, "a key of shard 1 in shard 0");
        }
        for shard in 0..SHARDS {
            let freshness = Freshness::Linearizable;
            let get = GetRequest {
                key: key(shard),
                holders_after: LeaseId(0),
                freshness,
                timeout_ms: 3_000,
            };
            let reply = client.wire.call(&Request::Get(get), LIMIT).expect("an answer");
            let Reply::Keys(reply) = reply else { panic!("{reply:?}") };
            assert!(reply.keys.iter().all(|key| key.holders.is_empty()), "nothing was granted");
        }
    }
}

/// B149: a lease that ends before a leader can be replaced is refused where it is asked for.
#[test]
fn a_ttl_shorter_than_a_change_of_leader_is_refused() {
    let _alone = process::alone();
    let spec = Spec { nodes: 1, ..Spec::default() };
    let spec = spec.flag("heartbeat-ms", 200).flag("election-min-ms", 1_500);
    let cluster = Cluster::start(spec.flag("election-max-ms", 2_400)).expect("a cluster");
    let wire = Wire::connect(cluster.addresses(1).client, LIMIT).expect("connected");
    let mut client = Client { wire, lease: LeaseId(0), next: 1 };
    for ttl_ms in [1_000, 4_799] {
        let reply = client.open(ttl_ms, SECRET);
        expect(&reply, ErrorCode::TTL_OUT_OF_RANGE, &format!("TTL {ttl_ms}"));
        let Reply::Error(error) = reply else { unreachable!("it is a refusal") };
        assert!(error.message.contains("4800 to 600000"), "{}", error.message);
    }
    let Reply::Outcome(reply) = client.open(4_800, SECRET) else { panic!("no session") };
    let Outcome::Opened { lease, .. } = reply.outcome else { panic!("no session: {reply:?}") };
    client.lease = lease;
    let own = Some(OwnLease { ttl_ms: 4_799, secret: SECRET });
    let Command::Acquire { caller, key, mode, value, wait_ms, .. } = client.acquire(b"own") else {
        unreachable!("it is an acquire")
    };
    let reply = client.command(Command::Acquire { caller, key, mode, own, value, wait_ms });
    expect(&reply, ErrorCode::TTL_OUT_OF_RANGE, "an own lease");
    assert!(cluster.log(1).contains("up to 4800 ms"), "the start says so: {}", cluster.log(1));
}

fn ttls(client: &mut Client) {
    for ttl_ms in [0, 1, 999, 600_001, u32::MAX, 1_000_000_000] {
        let reply = client.open(ttl_ms, SECRET);
        expect(&reply, ErrorCode::TTL_OUT_OF_RANGE, &format!("TTL {ttl_ms}"));
    }
}

fn keys_and_values(client: &mut Client) {
    let long = vec![b'k'; KEY_LEN_MAX + 1];
    for (key, code) in [
        (b"".as_slice(), ErrorCode::KEY_EMPTY),
        (&long, ErrorCode::KEY_TOO_LONG),
        (b"\xff\xfe", ErrorCode::KEY_NOT_UTF8),
    ] {
        let command = client.acquire(key);
        let reply = client.command(command);
        expect(&reply, code, "acquire");
        let get = GetRequest {
            key: key.to_vec(),
            holders_after: LeaseId(0),
            freshness: Freshness::Linearizable,
            timeout_ms: 3_000,
        };
        let reply = client.wire.call(&Request::Get(get), LIMIT).expect("an answer");
        expect(&reply, code, "get");
    }
    let command = with_value(client.acquire(b"value"), VALUE_LEN_MAX + 1);
    let reply = client.command(command);
    expect(&reply, ErrorCode::VALUE_TOO_LARGE, "a value over 4 KiB");
    let command = with_value(client.acquire(&vec![b'k'; KEY_LEN_MAX]), VALUE_LEN_MAX);
    let outcome = client.outcome(command);
    let Outcome::Granted(grant) = outcome else { panic!("the longest key: {outcome:?}") };
    let key = vec![b'k'; KEY_LEN_MAX];
    let caller = client.caller();
    let outcome = client.outcome(Command::Release { caller, key, token: grant.token });
    assert!(matches!(outcome, Outcome::Released { .. }), "{outcome:?}");
}

/// Releases that are not the holder's leave the lock where it is.
fn owners(client: &mut Client) {
    let command = client.acquire(b"owned");
    let first = client.outcome(command);
    let Outcome::Granted(old) = first else { panic!("not granted: {first:?}") };
    let release = |caller, token| Command::Release { caller, key: b"owned".to_vec(), token };
    let caller = client.caller();
    client.outcome(release(caller, old.token));
    let command = client.acquire(b"owned");
    let second = client.outcome(command);
    let Outcome::Granted(grant) = second else { panic!("not granted: {second:?}") };

    for (what, token) in [("old", old.token), ("guessed", Token(grant.token.0 + 1))] {
        let caller = client.caller();
        let reply = client.command(release(caller, token));
        expect(&reply, ErrorCode::NOT_OWNER, &format!("a release with an {what} token"));
    }
    let caller = Caller { secret: Secret([2; 16]), ..client.caller() };
    let reply = client.command(release(caller, grant.token));
    expect(&reply, ErrorCode::BAD_SECRET, "a release without the secret");
    // Another session with the right token.
    let mine = client.lease;
    let Reply::Outcome(reply) = client.open(60_000, SECRET) else { panic!("no session") };
    let Outcome::Opened { lease, .. } = reply.outcome else { panic!("no session: {reply:?}") };
    client.lease = lease;
    let caller = client.caller_at(1);
    let reply = client.command(release(caller, grant.token));
    expect(&reply, ErrorCode::NOT_OWNER, "a release by another session");
    client.lease = mine;

    let command = client.acquire(b"owned");
    let reply = client.command(command);
    expect(&reply, ErrorCode::ALREADY_HELD, "a second acquire of the holder");
    let caller = client.caller();
    let outcome = client.outcome(release(caller, grant.token));
    assert!(matches!(outcome, Outcome::Released { .. }), "the holder kept it: {outcome:?}");
}

fn numbers(client: &mut Client) {
    let number = client.next;
    let command = client.acquire(b"numbered");
    let first = client.outcome(command.clone());
    assert!(matches!(first, Outcome::Granted(_)), "{first:?}");
    assert_eq!(client.outcome(command), first, "a retry has the first outcome");
    let other = acquire(client.caller_at(number), b"another");
    let reply = client.command(other);
    expect(&reply, ErrorCode::NUMBER_CONFLICT, "another body under a used number");
    let beyond = acquire(client.caller_at(WINDOW + 10), b"beyond");
    let reply = client.command(beyond);
    expect(&reply, ErrorCode::NUMBER_BEYOND_WINDOW, "a number beyond the window");

    let Outcome::Granted(grant) = first else { unreachable!("checked above") };
    let floor = Number(number + 2);
    let caller = Caller { floor, ..client.caller() };
    let key = b"numbered".to_vec();
    client.outcome(Command::Release { caller, key, token: grant.token });
    let below = Caller { floor, ..client.caller_at(number) };
    let reply = client.command(acquire(below, b"below"));
    expect(&reply, ErrorCode::NUMBER_BELOW_FLOOR, "a number below the floor");
}

fn leases(client: &mut Client) {
    let live = client.lease;
    for lease in [LeaseId(0), LeaseId(u64::MAX), LeaseId(live.0 + 1_000_000)] {
        client.lease = lease;
        let caller = client.caller_at(1);
        let reply = client.command(acquire(caller, b"k"));
        expect(&reply, ErrorCode::LEASE_DEAD, "an unknown lease");
    }
    client.lease = live;
    let close = Command::Close { lease: live, secret: SECRET };
    let outcome = client.outcome(close.clone());
    assert!(matches!(outcome, Outcome::Closed { .. }), "{outcome:?}");
    let reply = client.command(close);
    expect(&reply, ErrorCode::LEASE_DEAD, "a second close");
    let command = client.acquire(b"k");
    let reply = client.command(command);
    expect(&reply, ErrorCode::LEASE_DEAD, "a dead lease");
    let item = RenewItem { lease: live, secret: SECRET, version: HoldSetVersion(0) };
    let renew = RenewRequest { shard: ShardId(0), timeout_ms: 3_000, items: vec![item] };
    match client.wire.call(&Request::Renew(renew), LIMIT).expect("an answer") {
        Reply::Renewed(reply) => {
            assert_eq!(reply.results[0].error, Some(ErrorCode::LEASE_DEAD), "{reply:?}");
        }
        reply => panic!("a renewal of a dead lease: {reply:?}"),
    }
}
