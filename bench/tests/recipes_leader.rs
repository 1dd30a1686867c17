//! Reports of faults around leaders, tried on real processes (docs/TESTING.md names each): a
//! bridge between two halves, a leader cut off with its clients, moves of leadership under load or
//! into a dying node, requests that a deposed leader still owes, overload. `LEASEHOLD_LONG=1` is
//! the long form.

#[path = "support/bare.rs"]
mod bare;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bare::{LIMIT, scaled, until};
use leasehold_bench::actor::Actor;
use leasehold_bench::check::Needs;
use leasehold_bench::clock::{Deadline, now_ns, to_ms};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::contention::{Contention, Plan, key_name};
use leasehold_bench::history::{Record, Recorder};
use leasehold_bench::judge::judge;
use leasehold_bench::load;
use leasehold_bench::wire::{Wire, refusal};
use leasehold_bench::{finals, process};
use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{NodeId, RequestId};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{Reply, Role};
use leasehold_protocol::request::{Freshness, Request};

fn actor(cluster: &Cluster, client: u32, nodes: &[u64], ttl_ms: u32) -> Actor {
    let endpoints = nodes.iter().map(|id| cluster.endpoint(*id)).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let mut actor = Actor::new(client, endpoints, Recorder::new(), stop);
    actor.open(ttl_ms, PATIENCE).expect("a session");
    actor
}

/// B18: the old leader reaches one bridge node only; the bridge and two more are a majority and
/// find a leader, however often the old one speaks to the bridge.
#[test]
fn a_bridge_does_not_keep_a_majority_from_electing() {
    let _alone = process::alone();
    let spec = Spec { nodes: 5, proxied_peers: true, ..Spec::default() };
    let cluster = Cluster::start(spec).expect("a cluster");
    let old = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let others: Vec<u64> = cluster.ids().filter(|id| *id != old).collect();
    let [bridge, y, z, alone] = others[..] else { panic!("there are five nodes") };
    let cut_ns = now_ns();
    cluster.links().isolate(alone);
    for id in [y, z] {
        cluster.links().cut(old, id);
    }
    let mut actor = actor(&cluster, 1, &[y], 60_000);
    actor.acquire("bridged", u32::MAX, PATIENCE).expect("a majority serves");
    let took_ms = to_ms(now_ns() - cut_ns);
    let leader = cluster.leader(0).expect("a leader");
    assert!([bridge, y, z].contains(&leader), "node {leader} leads without a majority");
    println!("from the cut to the first grant: {took_ms:.0} ms");
    cluster.links().heal();
    until("all nodes agree", || agree(&cluster));
}

fn agree(cluster: &Cluster) -> bool {
    let own = cluster.ids().map(|id| {
        let status = bare::own_status(cluster, id)?;
        Some((status.applied_revision, status.digest, status.leader))
    });
    let states: BTreeSet<_> = own.collect();
    states.len() == 1 && !states.contains(&None)
}

/// B19: a leader that is cut off together with its clients gives no old answer as a fresh one, and
/// what it cannot do it refuses in time.
#[test]
fn a_leader_that_is_cut_off_says_nothing_old() {
    const TTL_MS: u32 = 2_000;
    /// Of a request; and how long its answer may take on a busy machine.
    const TIMEOUT: Duration = Duration::from_millis(bare::TIMEOUT_MS as u64);
    let _alone = process::alone();
    let spec = Spec { proxied_peers: true, ..Spec::default() };
    let cluster = Cluster::start(spec).expect("a cluster");
    let old = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let others: Vec<u64> = cluster.ids().filter(|id| *id != old).collect();
    let mut wire = bare::connect(cluster.addresses(old).client);
    let lease = bare::open_lease(&mut wire, TTL_MS);
    let first = bare::grant(&mut wire, &lease, 1, "moved");

    cluster.links().isolate(old);
    let heir = std::thread::scope(|scope| {
        let heir = scope.spawn(|| {
            let mut heir = actor(&cluster, 2, &others, 60_000);
            let held = heir.acquire("moved", u32::MAX, PATIENCE).expect("granted after expiry");
            (heir, held)
        });
        ask_cut_off(&mut wire, &lease, first.token.0, TIMEOUT);
        heir.join().expect("no panic")
    });
    let (mut heir, held) = heir;
    assert!(held.token > first.token.0);
    // The key has moved; the old leader must not say anything else.
    ask_cut_off(&mut wire, &lease, first.token.0, TIMEOUT);
    until("it does not call itself the leader any more", || {
        bare::own_status(&cluster, old).is_some_and(|status| status.leader == NodeId(0))
    });
    until("nor ready", || matches!(cluster.admin(old, "/readyz"), Ok((503, _))));

    cluster.links().heal();
    until("all nodes agree", || agree(&cluster));
    assert_eq!(bare::own_status(&cluster, old).expect("a status").role, Role::Follower);
    assert_eq!(bare::key(&mut wire, "moved").holders[0].token.0, held.token);
    heir.release(&held, PATIENCE).expect("still its own");
    bare::assert_no_panic(&cluster);
}

/// A stale read tells how old it is at most, from a node that leads and from one that follows: all
/// that was acknowledged before is in it. A node that is cut off tells an age that grows.
#[test]
fn a_stale_read_tells_its_age_also_where_the_node_is_cut_off() {
    let _alone = process::alone();
    let spec = Spec { proxied_peers: true, ..Spec::default() };
    let cluster = Cluster::start(spec).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let follower = cluster.ids().find(|id| *id != leader).expect("another node");
    let mut actor = actor(&cluster, 1, &[leader], 60_000);
    for node in [leader, follower] {
        let mut wire = bare::connect(cluster.addresses(node).client);
        for round in 0..6 {
            let key = format!("aged-{node}-{round}");
            actor.acquire(&key, 0, PATIENCE).expect("granted");
            let acked_ns = now_ns();
            until("an age that says that it is in it", || {
                let asked_ms = to_ms(now_ns() - acked_ns);
                let (age_ms, held) = stale_read(&mut wire, &key);
                let in_it = age_ms.is_some_and(|age_ms| f64::from(age_ms) < asked_ms);
                assert!(held || !in_it, "acknowledged {asked_ms} ms ago, age {age_ms:?}");
                in_it
            });
        }
    }

    let mut wire = bare::connect(cluster.addresses(follower).client);
    cluster.links().isolate(follower);
    let cut_ns = now_ns();
    let next = cluster.wait_leader(0, PATIENCE).expect("a leader");
    assert_ne!(next, follower);
    actor.acquire("unheard", 0, PATIENCE).expect("a majority serves");
    let mut ages = Vec::new();
    while ages.last().is_none_or(|age| *age < 2_500) {
        let since_ms = to_ms(now_ns() - cut_ns);
        let (age_ms, held) = stale_read(&mut wire, "unheard");
        let age_ms = age_ms.expect("it was asked before");
        assert!(!held, "it cannot have heard of it");
        assert!(f64::from(age_ms) >= since_ms.floor(), "{age_ms} ms, cut off for {since_ms} ms");
        ages.push(age_ms);
        std::thread::sleep(process::POLL);
    }
    assert!(ages.is_sorted() && ages.len() > 10, "{ages:?}");
    cluster.links().heal();
    until("it has caught up", || {
        let (age_ms, held) = stale_read(&mut wire, "unheard");
        held && age_ms.is_some_and(|age_ms| age_ms < 1_000)
    });
}

/// The age of a stale read, and whether the key is held in it.
fn stale_read(wire: &mut Wire, key: &str) -> (Option<u32>, bool) {
    match bare::call(wire, &bare::get(key, Freshness::Stale)) {
        Reply::Keys(reply) => {
            assert!(reply.stale, "it is marked");
            (reply.age_ms, !reply.keys[0].holders.is_empty())
        }
        other => panic!("no stale read: {other:?}"),
    }
}

/// Asks a node without a majority everything once, all at the same time.
fn ask_cut_off(wire: &mut Wire, lease: &bare::Lease, token: u64, timeout: Duration) {
    let stale = wire.send(&bare::get("moved", Freshness::Stale)).expect("sent");
    let (_, open) = bare::open(2_000);
    let asked = [
        ("read", bare::get("moved", Freshness::Linearizable)),
        ("listing of leases", bare::sessions()),
        ("renewal", lease.renew()),
        ("read of holds", lease.holds()),
        ("open", open),
        ("acquire", lease.acquire(4, "pending", 0)),
    ];
    let mut asked: Vec<_> =
        asked.iter().map(|(what, request)| (wire.send(request).expect("sent"), *what)).collect();
    let sent_ns = now_ns();
    let mut marked = false;
    while !(asked.is_empty() && marked) {
        let (id, reply) = wire
            .recv(Deadline::after(timeout + LIMIT))
            .expect("connected")
            .unwrap_or_else(|| panic!("no answer by its deadline: {asked:?}"));
        if id == stale {
            let Reply::Keys(reply) = reply else { panic!("no stale read: {reply:?}") };
            assert!(reply.stale, "an old answer is marked");
            assert!(reply.keys[0].holders.iter().all(|holder| holder.token.0 == token));
            marked = true;
            continue;
        }
        let index = asked.iter().position(|(sent, _)| *sent == id).expect("it was asked");
        let (_, what) = asked.swap_remove(index);
        let code = refusal(&reply).unwrap_or_else(|| panic!("{what}: {reply:?}"));
        assert_ne!(code.class(), ErrorClass::NotApplied, "{what}: {code} is no news of a minority");
    }
    println!("a cut-off leader refused all within {:.0} ms", to_ms(now_ns() - sent_ns));
}

/// B20: reads stay linearizable while leadership is moved again and again.
#[test]
fn reads_while_leadership_moves_are_linearizable() {
    let moves = scaled(8, 100);
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let recorder = Recorder::new();
    let plan = Plan { clients: 6, keys: 2, hold_ms_max: 5, ..Plan::default() };
    let load = Contention::start(&cluster.endpoints(), &recorder, &plan);
    let stop = Arc::new(AtomicBool::new(false));
    let reads = AtomicU64::new(0);
    let moved = std::thread::scope(|scope| {
        for reader in 0..3 {
            let (endpoints, recorder) = (cluster.endpoints(), recorder.clone());
            let mut actor = Actor::new(100 + reader, endpoints, recorder, Arc::clone(&stop));
            let (stop, reads) = (&stop, &reads);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _ = actor.get(&key_name(reader % 2), LIMIT);
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut moved = 0;
        for _ in 0..moves {
            let before = reads.load(Ordering::Relaxed);
            let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
            let to = leader % 3 + 1;
            let mut wire = bare::connect(cluster.addresses(leader).client);
            let reply = wire.call(&bare::transfer(to), LIMIT).expect("an answer");
            moved += u64::from(reply == Reply::Transferred);
            assert!(load.progress(20, PATIENCE), "no grants after a move");
            until("reads go on", || reads.load(Ordering::Relaxed) >= before + 20);
        }
        load.freeze();
        let end = finals::read(&cluster.endpoints(), 0, PATIENCE).expect("a final state");
        recorder.push(Record::Final(end));
        stop.store(true, Ordering::Relaxed);
        moved
    });
    assert_eq!((load.lost(), load.stuck()), (0, 0), "lost sessions, calls without an answer");
    load.end();
    assert!(moved * 2 >= moves, "INVALID: {moved} of {moves} moves were made");
    let needs = Needs { tokens: 100, acked: 200, ordered: 400, nodes: 3, ..Needs::default() };
    let report = judge(&recorder, &needs).unwrap_or_else(|report| panic!("\n{report}"));
    println!("{moved} moves, {} reads\n{report}", reads.into_inner());
}

/// B21: a move of leadership whose target dies in the middle leaves a leader that serves, and the
/// node that tried can lead again.
#[test]
fn a_move_into_a_dying_node_poisons_nobody() {
    let rounds = scaled(5, 50);
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let mut client = actor(&cluster, 1, &[1, 2, 3], 60_000);
    let first = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let (mut moved, mut refused) = (0, 0);
    for round in 0..rounds {
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let target = leader % 3 + 1;
        let mut wire = bare::connect(cluster.addresses(leader).client);
        wire.send(&bare::transfer(target)).expect("sent");
        // At once, and a little later each time: before, in and after the hand-over.
        std::thread::sleep(Duration::from_millis(round % 10 * 2));
        cluster.kill(target).expect("killed");
        match wire.recv(Deadline::after(LIMIT)).expect("connected").expect("an answer").1 {
            Reply::Transferred => moved += 1,
            _ => refused += 1,
        }
        let held = client.acquire("kept", u32::MAX, PATIENCE).expect("two nodes serve");
        client.release(&held, PATIENCE).expect("they do");
        cluster.spawn(target).expect("started again");
        cluster.wait_ready(PATIENCE).expect("ready again");
    }
    println!("{rounds} targets killed: {moved} moves were answered as made, {refused} were not");
    // The node that tried first leads again, and completes writes.
    until("the first node leads again", || {
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let mut wire = bare::connect(cluster.addresses(leader).client);
        leader == first
            || wire
                .call(&bare::transfer(first), LIMIT)
                .is_ok_and(|reply| reply == Reply::Transferred)
                && cluster.leader(0) == Some(first)
    });
    let mut own = actor(&cluster, 2, &[first], 60_000);
    let held = own.acquire("first", u32::MAX, PATIENCE).expect("a leader that is told so serves");
    own.release(&held, PATIENCE).expect("it does");
    until("all nodes agree", || agree(&cluster));
    bare::assert_no_panic(&cluster);
}

/// B25: a leader with thousands of open requests is cut off, falls behind what the others keep of
/// the log, and comes back by snapshot: every request has its answer, and the node serves on.
#[test]
fn a_deposed_leader_answers_what_it_owes_and_follows_by_snapshot() {
    const KEPT: u64 = 100;
    let (rounds, requests) = (scaled(1, 5), scaled(500, 2_000_u64));
    let _alone = process::alone();
    let spec = Spec { proxied_peers: true, ..Spec::default() }
        .flag("snapshot-entries", KEPT / 2)
        .flag("snapshot-keep-entries", KEPT);
    let cluster = Cluster::start(spec).expect("a cluster");
    let pids: Vec<_> = cluster.ids().map(|id| cluster.pid(id)).collect();
    for round in 0..rounds {
        let old = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let installed = || {
            let label = "kind=\"installed\"";
            cluster.metric(old, "leasehold_snapshots_total", label).expect("metrics")
        };
        let before = installed();
        let others: Vec<u64> = cluster.ids().filter(|id| *id != old).collect();
        let mut wire = bare::connect(cluster.addresses(old).client);
        let lease = bare::open_lease(&mut wire, 600_000);
        let mut open = BTreeSet::new();
        for number in 0..requests {
            if number == requests / 2 {
                cluster.links().isolate(old);
            }
            let request = lease.acquire(1 + 3 * number, &format!("owed/{round}/{number}"), 0);
            open.insert(wire.send(&request).expect("sent"));
        }
        let gone = bare::own_status(&cluster, old).expect("it answers").last_index;
        let mut client = actor(&cluster, 10 + round, &others, 60_000);
        let mut answers = VecDeque::new();
        bare::until_within(PATIENCE * 8, "the others cut what the old leader lacks", || {
            // What comes is read, and something is sent: a connection that is idle is closed.
            wire.send(&Request::Ping).expect("sent");
            while let Some(answer) = wire.recv(Deadline::after(process::POLL)).expect("connected") {
                answers.push_back(answer);
            }
            let held = client.acquire("busy", u32::MAX, PATIENCE).expect("granted");
            client.release(&held, PATIENCE).expect("released");
            others.iter().any(|id| {
                let purged = cluster.metric(*id, "leasehold_shard_purged_index", "shard=\"0\"");
                purged.is_ok_and(|purged| purged > (gone + KEPT) as f64)
            })
        });
        let (granted, unanswered) = count_answers(&mut wire, open, answers);
        cluster.links().heal();
        bare::until_within(PATIENCE * 4, "a snapshot of the new leader", || installed() > before);
        until("all nodes agree", || agree(&cluster));
        println!("round {round}: {granted} granted, {unanswered} refused or unknown");
        assert!(unanswered > 0, "INVALID: the cut came after the last answer");
        bare::open_lease(&mut bare::connect(cluster.addresses(old).client), 60_000);
    }
    let after: Vec<_> = cluster.ids().map(|id| cluster.pid(id)).collect();
    assert_eq!(pids, after);
    bare::assert_no_panic(&cluster);
}

/// One answer for each of these requests: how many are grants, and how many are not.
fn count_answers(
    wire: &mut Wire,
    mut open: BTreeSet<RequestId>,
    mut answers: VecDeque<(RequestId, Reply)>,
) -> (u64, u64) {
    let (mut granted, mut unanswered) = (0, 0);
    while !open.is_empty() {
        let answer = match answers.pop_front() {
            Some(answer) => Some(answer),
            None => wire.recv(Deadline::after(LIMIT)).expect("connected"),
        };
        let (id, reply) =
            answer.unwrap_or_else(|| panic!("{} requests have no answer", open.len()));
        if reply == Reply::Pong {
            continue;
        }
        assert!(open.remove(&id), "an answer for each request, and one only");
        match &reply {
            Reply::Outcome(outcome) if matches!(outcome.outcome, Outcome::Granted(_)) => {
                granted += 1;
            }
            reply if refusal(reply).is_some() => unanswered += 1,
            reply => panic!("not an answer to an acquire: {reply:?}"),
        }
    }
    (granted, unanswered)
}

/// B26: far more requests than the cluster can do cost nobody a session, and the leader its place.
#[test]
fn overload_costs_no_session_and_no_leadership() {
    let connections = scaled(48, 200);
    let (excess, run_ms) = scaled((3.0, 6_500), (3.0, 30_000));
    let _alone = process::alone();
    // Heartbeats that wait behind requests would miss even these times within seconds.
    let spec = Spec::default()
        .flag("heartbeat-ms", 200)
        .flag("election-min-ms", 1_000)
        .flag("election-max-ms", 1_500)
        .flag("watchdog-ms", 20_000);
    let cluster = Cluster::start(spec).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let closed = load::Plan {
        mode: load::Mode::Closed { in_flight: 32 },
        connections: 48,
        keys: 64,
        ttl_ms: scaled(6_000, 10_000),
        value_len: 16,
        warm_up_ms: 300,
        run_ms: 1_000,
    };
    let addr = cluster.addresses(leader).client;
    let before = bare::term(&cluster);
    let capacity = load::run(addr, closed).expect("a measurement").ops_per_s;
    let mut asked = excess * capacity;
    let outcome = loop {
        let mode = load::Mode::Open { ops_per_s: asked };
        let plan = load::Plan { mode, connections, keys: 6_000, run_ms, ..closed };
        // It fails if any renewal is refused.
        let outcome = load::run(addr, plan).expect("every session is renewed");
        println!(
            "{asked:.0} operations a second asked for, {:.0} done; {} unfinished, refused: {:?}",
            outcome.ops_per_s, outcome.unfinished, outcome.errors
        );
        // Refused, or more than a second's work left: there was no keeping up.
        let refused = outcome.errors.contains_key(ErrorCode::BUSY.name());
        if refused || outcome.unfinished as f64 > outcome.ops_per_s {
            break outcome;
        }
        // Larger batches do more than a closed loop shows, and the machine may be less busy now.
        asked *= 2.0;
        assert!(asked < 100.0 * capacity, "INVALID: no overload is reached");
    };
    for code in [ErrorCode::LEASE_DEAD, ErrorCode::LEASE_LOST, ErrorCode::NOT_LEADER] {
        assert_eq!(outcome.errors.get(code.name()), None, "{:?}", outcome.errors);
    }
    assert_eq!(bare::term(&cluster), before, "an election under load");
    assert_eq!(cluster.leader(0), Some(leader));
}
