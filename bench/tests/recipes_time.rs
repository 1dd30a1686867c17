//! Reports of faults in lease time, tried on real processes (docs/TESTING.md names each): what is
//! left of a TTL across failovers, many leases at a take-over, TTLs of different clients, renewals
//! at the very edge. `LEASEHOLD_LONG=1` is the long form.

#[path = "support/bare.rs"]
mod bare;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bare::{LIMIT, Lease, scaled, until};
use leasehold_bench::clock::{Deadline, now_ns, to_ms};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::history::Recorder;
use leasehold_bench::process;
use leasehold_bench::store::{SlowRoad, Store};
use leasehold_bench::wire::Wire;
use leasehold_bench::worker::{Event, Order, Settings, Worker};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{LeaseId, RequestId, Secret};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{Reply, Role};
use leasehold_protocol::request::Freshness;
use rustix::process::Signal;

const NS_PER_MS: u64 = 1_000_000;

/// What a node says about a lease.
enum Account {
    /// It cannot tell.
    Nothing,
    /// It lives for so many milliseconds.
    Left(u32),
    /// There is no such lease.
    Ended,
}

fn account(cluster: &Cluster, id: u64, lease: LeaseId) -> Account {
    let limit = Duration::from_secs(1);
    let wire = Wire::connect(cluster.addresses(id).client, limit).ok();
    let Some(sessions) = wire.and_then(|mut wire| bare::try_sessions(&mut wire, limit)) else {
        return Account::Nothing;
    };
    match sessions.iter().find(|session| session.lease == lease) {
        Some(session) => Account::Left(session.remaining_ms.expect("a fresh read tells it")),
        None => Account::Ended,
    }
}

/// B03: each change of leader gives a lease at most its full TTL again, the third like the first,
/// and without renewals it ends after the last.
#[test]
fn a_third_failover_gives_no_more_time_than_the_first() {
    let mut ttl_ms: u32 = scaled(2_000, 120_000);
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    while !ends_after_three_failovers(&mut cluster, ttl_ms) {
        // It ran out while this machine was slow: a longer one does not.
        ttl_ms *= 3;
        assert!(ttl_ms < 200_000, "INVALID: no lease lives for three failovers");
    }
}

/// False if the lease ended before three failovers were made.
fn ends_after_three_failovers(cluster: &mut Cluster, ttl_ms: u32) -> bool {
    const FAILOVERS: u64 = 3;
    cluster.wait_ready(PATIENCE).expect("ready");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let lease = bare::open_lease(&mut bare::connect(cluster.addresses(leader).client), ttl_ms);
    let (mut failovers, mut rises, mut last_ms) = (0, 0, ttl_ms);
    let mut killed_ns = now_ns();
    loop {
        let mut told = false;
        for id in cluster.ids() {
            let left_ms = match account(cluster, id, lease.id) {
                Account::Nothing => continue,
                Account::Left(left_ms) => left_ms,
                Account::Ended => {
                    if failovers < FAILOVERS {
                        return false;
                    }
                    assert!(rises <= failovers, "{rises} rises in {failovers} failovers");
                    assert!(rises > 0, "INVALID: no failover was seen");
                    let late_ms = to_ms(now_ns() - killed_ns) - f64::from(ttl_ms);
                    println!(
                        "TTL {ttl_ms} ms: {rises} rises in {failovers} failovers, the end \
                         {late_ms:.0} ms after the last kill + TTL"
                    );
                    return true;
                }
            };
            told = true;
            assert!(left_ms <= ttl_ms, "node {id} says {left_ms} of {ttl_ms} ms are left");
            // Half a TTL is no rounding and no short stall.
            rises += u64::from(left_ms > last_ms + ttl_ms / 2);
            last_ms = left_ms;
        }
        if told && failovers < FAILOVERS && last_ms < ttl_ms * 2 / 5 {
            let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
            killed_ns = now_ns();
            cluster.kill(leader).expect("killed");
            cluster.spawn(leader).expect("started again");
            failovers += 1;
        }
        let limit_ns = u64::from(ttl_ms) * NS_PER_MS + 2 * PATIENCE.as_nanos() as u64;
        assert!(now_ns() < killed_ns + limit_ns, "no end; {last_ms} ms are left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// B04: while leaders are stopped and continued, what is left of a lease is within its TTL, or
/// there is an error.
#[test]
fn what_is_left_is_never_absurd_while_leaders_pause() {
    const TTLS_MS: [u32; 2] = [600_000, 5_000];
    /// Of all nodes, after each pause.
    const ANSWERS: u64 = 20;
    let rounds: u64 = scaled(4, 30);
    let pause = Duration::from_millis(scaled(500, 3_000));
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let leases = TTLS_MS.map(|ttl_ms| (bare::open_lease(&mut wire, ttl_ms), ttl_ms));
    let first_term = bare::term(&cluster);
    let stop = AtomicBool::new(false);
    let told = AtomicU64::new(0);
    let watch = |addr| {
        let mut refused = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
            let limit = Duration::from_millis(500);
            let Ok(mut wire) = Wire::connect(addr, limit) else {
                refused += 1;
                continue;
            };
            // The short one is kept alive.
            let _ = wire.call(&leases[1].0.renew(), limit);
            let Some(sessions) = bare::try_sessions(&mut wire, limit) else {
                refused += 1;
                continue;
            };
            told.fetch_add(1, Ordering::Relaxed);
            for session in sessions {
                let asked = leases.iter().find(|(lease, _)| lease.id == session.lease);
                let (_, ttl_ms) = asked.expect("only these were opened");
                let left_ms = session.remaining_ms.expect("a fresh read tells what is left");
                assert!(left_ms <= *ttl_ms, "{left_ms} of {ttl_ms} ms are left");
                assert_eq!(session.ttl_ms, *ttl_ms, "the TTL that was asked for");
            }
        }
        refused
    };
    let addrs = cluster.endpoints();
    let refused: u64 = std::thread::scope(|scope| {
        let watchers: Vec<_> = addrs.iter().map(|addr| scope.spawn(|| watch(*addr))).collect();
        for _ in 0..rounds {
            let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
            cluster.signal(leader, Signal::STOP).expect("stopped");
            std::thread::sleep(pause);
            let leads = |id| bare::own_status(&cluster, id).is_some_and(|s| s.role == Role::Leader);
            until("another leader", || cluster.ids().any(|id| id != leader && leads(id)));
            cluster.signal(leader, Signal::CONT).expect("continued");
            let until_told = told.load(Ordering::Relaxed) + ANSWERS;
            until("nodes answer again", || told.load(Ordering::Relaxed) >= until_told);
        }
        stop.store(true, Ordering::Relaxed);
        watchers.into_iter().map(|watcher| watcher.join().expect("all was sound")).sum()
    });
    let terms = bare::term(&cluster) - first_term;
    let told = told.into_inner();
    println!("{rounds} pauses, {terms} terms, {told} sound answers, {refused} refusals");
    assert!(terms >= rounds, "INVALID: {terms} terms");
}

/// B10: a take-over with very many live leases costs one election, not many.
#[test]
fn many_idle_leases_do_not_delay_a_take_over() {
    const TTL_MS: u32 = 600_000;
    /// Requests under way.
    const PIPELINE: usize = 1_000;
    let (leases, kills) = scaled((10_000, 2), (200_000, 5));
    let _alone = process::alone();
    // Reading a long log takes its time in a debug build on a busy machine.
    let spec = Spec::default().flag("watchdog-ms", 120_000);
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let (mut sent, mut opened) = (0, 0);
    while opened < leases {
        while sent < leases && sent - opened < PIPELINE {
            wire.send(&bare::open(TTL_MS).1).expect("sent");
            sent += 1;
        }
        let reply = wire.recv(Deadline::after(LIMIT)).expect("connected").expect("an answer").1;
        match reply {
            Reply::Outcome(reply) if matches!(reply.outcome, Outcome::Opened { .. }) => opened += 1,
            // An election under the load of the tests around: again.
            Reply::Error(_) => sent -= 1,
            reply => panic!("no lease: {reply:?}"),
        }
    }
    let mut figures = Vec::new();
    for _ in 0..kills {
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let before = bare::term(&cluster);
        cluster.kill(leader).expect("killed");
        let killed_ns = now_ns();
        let other = cluster.ids().find(|id| *id != leader).expect("there are three nodes");
        bare::open_lease(&mut bare::connect(cluster.addresses(other).client), TTL_MS);
        let took_ms = to_ms(now_ns() - killed_ns);
        let terms = bare::term(&cluster) - before;
        figures.push(format!("{took_ms:.0} ms and {terms} terms"));
        assert!((1..=5).contains(&terms), "{terms} elections for one take-over");
        cluster.spawn(leader).expect("started again");
        cluster.wait_ready(PATIENCE * 8).expect("ready again");
    }
    println!("{leases} leases; to the first write after a kill: {}", figures.join(", "));
    for id in cluster.ids() {
        bare::until_within(PATIENCE * 2, "every node has every lease", || {
            let live = cluster.metric(id, "leasehold_leases", "");
            live.is_ok_and(|live| live >= (leases + kills) as f64)
        });
    }
}

fn granted(worker: &Worker) -> u64 {
    match worker.event(PATIENCE).expect("an event") {
        Event::Granted { token } => token,
        other => panic!("no grant, but {other:?}"),
    }
}

/// B12: who asks with a short TTL waits for the end of the holder's own, longer one.
#[test]
fn a_contender_is_judged_by_the_holders_ttl() {
    const LONG_TTL_MS: u64 = 15_000;
    const SHORT_TTL_MS: u64 = 1_000;
    /// Many times the contender's TTL, and well within the rest of the holder's.
    const PAUSE: Duration = Duration::from_secs(4);
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let store = Store::start(Recorder::new()).expect("a store");
    let road = SlowRoad::open().expect("a road");
    let start = |name: &str, ttl_ms| {
        let settings = Settings {
            name: name.to_owned(),
            endpoints: cluster.endpoint_list(),
            key: "ttl".to_owned(),
            ttl_ms,
            store: store.addr(),
            slow_road: road.addr().expect("an address"),
        };
        let program = Path::new(env!("CARGO_BIN_EXE_demo"));
        let worker = Worker::start(program, &settings).expect("a worker");
        assert_eq!(worker.event(PATIENCE).expect("an event"), Event::Asked);
        worker
    };
    let mut holder = start("holder", LONG_TTL_MS);
    let token = granted(&holder);
    let contender = start("contender", SHORT_TTL_MS);
    let mut wire = bare::connect(cluster.endpoints()[0]);
    until("the contender waits", || bare::key(&mut wire, "ttl").waiters.len() == 1);
    holder.signal(Signal::STOP).expect("stopped");
    std::thread::sleep(PAUSE);
    assert_eq!(contender.try_event(), None, "the holder's TTL is not over");
    holder.signal(Signal::CONT).expect("continued");
    let held = holder.ask(&Order::Check, PATIENCE, |event| match event {
        Event::State { held, .. } => Some(*held),
        _ => None,
    });
    assert!(held.expect("an answer"), "the holder goes on as such");
    assert_eq!(contender.try_event(), None, "it still holds");
    holder.order(&Order::Release).expect("it listens");
    assert!(granted(&contender) > token);
}

#[derive(Clone, Copy, Debug)]
enum Asked {
    Renewal {
        send_ns: u64,
    },
    /// After a renewal that was acknowledged and was sent then.
    Alive {
        renewed_ns: u64,
    },
    /// After an answer that the lease is dead.
    Gone,
}

/// One lease at the edge of its time.
struct Edge {
    lease: Lease,
    key: String,
    opened_ns: u64,
}

/// B14: an acknowledged renewal is worth the whole TTL, and *dead* means that the lock is free.
#[test]
fn a_renewal_at_the_edge_is_honoured_or_refused() {
    const TTL_MS: u64 = 1_000;
    const EACH_WAY: u64 = 20;
    let (leases, rounds_max) = (scaled(60, 150), scaled(8, 20));
    let needed = scaled(100, 3_000);
    let _alone = process::alone();
    let cluster = Cluster::start(Spec::default()).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let follower = cluster.ids().find(|id| *id != leader).expect("there are three nodes");
    let mut wire = bare::connect(cluster.addresses(follower).client);
    let mut tally = Tally::default();
    let mut round = 0;
    while tally.renewed < EACH_WAY || tally.dead < EACH_WAY || tally.renewed + tally.dead < needed {
        assert!(round < rounds_max, "INVALID: too few answers of each kind: {tally:?}");
        edge_round(&mut wire, round, leases, TTL_MS, &mut tally);
        round += 1;
    }
    println!("{round} rounds of {leases} leases: {tally:?}");
}

#[derive(Debug, Default)]
struct Tally {
    renewed: u64,
    dead: u64,
    /// Looks at a renewed lease within its TTL.
    alive: u64,
    gone: u64,
    asked_again: u64,
}

/// Opens leases, each with a key of its own.
fn edges(wire: &mut Wire, round: u64, leases: u64, ttl_ms: u64) -> Vec<Edge> {
    let requests = (0..leases)
        .map(|_| bare::open(ttl_ms as u32))
        .map(|(secret, request)| (wire.send(&request).expect("connected"), secret));
    let mut secrets: BTreeMap<RequestId, Secret> = requests.collect();
    let mut edges = Vec::new();
    while !secrets.is_empty() {
        let (id, reply) = wire.recv(Deadline::after(LIMIT)).expect("connected").expect("an answer");
        let lease = bare::opened(&reply, secrets.remove(&id).expect("it was asked"));
        let key = format!("edge/{round}/{}", edges.len());
        edges.push(Edge { lease, key, opened_ns: now_ns() });
    }
    for edge in &edges {
        wire.send(&edge.lease.acquire(1, &edge.key, 0)).expect("connected");
    }
    for _ in &edges {
        let (_, reply) = wire.recv(Deadline::after(LIMIT)).expect("connected").expect("an answer");
        let Reply::Outcome(reply) = reply else { panic!("no grant: {reply:?}") };
        assert!(matches!(reply.outcome, Outcome::Granted(_)), "{reply:?}");
    }
    edges
}

fn edge_round(wire: &mut Wire, round: u64, leases: u64, ttl_ms: u64, tally: &mut Tally) {
    // When to ask what: a renewal, or a look at a lease that was renewed then.
    let mut agenda: BTreeMap<(u64, usize), Option<u64>> = BTreeMap::new();
    let edges = edges(wire, round, leases, ttl_ms);
    for (index, edge) in edges.iter().enumerate() {
        // From 40 ms before to 80 ms after the end, which the leader alone knows exactly.
        let offset_ns = index as u64 * 120 * NS_PER_MS / leases;
        let at_ns = edge.opened_ns + (ttl_ms - 40) * NS_PER_MS + offset_ns;
        agenda.insert((at_ns, index), None);
    }
    let mut open: BTreeMap<RequestId, (usize, Asked)> = BTreeMap::new();
    let overdue = Deadline::after(PATIENCE);
    while !(agenda.is_empty() && open.is_empty()) {
        assert!(!overdue.passed(), "no answers: {open:?}");
        let now = now_ns();
        while let Some(((at_ns, index), look)) = agenda.first_key_value().map(|(k, v)| (*k, *v)) {
            if at_ns > now {
                break;
            }
            agenda.pop_first();
            let (request, asked) = match look {
                None => (edges[index].lease.renew(), Asked::Renewal { send_ns: now_ns() }),
                Some(renewed_ns) => (edges[index].lease.holds(), Asked::Alive { renewed_ns }),
            };
            open.insert(wire.send(&request).expect("connected"), (index, asked));
        }
        let next_ns = agenda.first_key_value().map_or(u64::MAX, |(key, _)| key.0);
        let pause = Duration::from_nanos(next_ns.saturating_sub(now_ns()).min(50 * NS_PER_MS));
        let Some((id, reply)) = wire.recv(Deadline::after(pause)).expect("connected") else {
            continue;
        };
        let (index, asked) = open.remove(&id).expect("it was asked");
        let edge = &edges[index];
        match (asked, verdict(&reply)) {
            (_, Verdict::Again) => {
                tally.asked_again += 1;
                let look = match asked {
                    Asked::Alive { renewed_ns } => Some(renewed_ns),
                    _ => None,
                };
                agenda.insert((now_ns() + 5 * NS_PER_MS, index), look);
            }
            (Asked::Renewal { send_ns }, Verdict::Lives) => {
                tally.renewed += 1;
                agenda.insert((now_ns(), index), Some(send_ns));
                agenda.insert((send_ns + ttl_ms * NS_PER_MS * 8 / 10, index), Some(send_ns));
            }
            (Asked::Renewal { .. }, Verdict::Dead) => {
                tally.dead += 1;
                let request = bare::get(&edge.key, Freshness::Linearizable);
                open.insert(wire.send(&request).expect("connected"), (index, Asked::Gone));
            }
            (Asked::Alive { renewed_ns }, verdict) => {
                // A look that was answered late says nothing.
                if now_ns() < renewed_ns + ttl_ms * NS_PER_MS {
                    assert!(matches!(verdict, Verdict::Lives), "{}: {reply:?}", edge.key);
                    tally.alive += 1;
                }
            }
            (Asked::Gone, _) => {
                let Reply::Keys(reply) = reply else { panic!("no key: {reply:?}") };
                assert!(reply.keys[0].holders.is_empty(), "{} is dead and holds", edge.key);
                tally.gone += 1;
            }
        }
    }
}

#[derive(Debug)]
enum Verdict {
    Lives,
    Dead,
    Again,
}

fn verdict(reply: &Reply) -> Verdict {
    match reply {
        Reply::Renewed(reply) => match reply.results[0].error {
            None => {
                assert_eq!(reply.results[0].ttl_ms, 1_000, "the TTL that was granted");
                Verdict::Lives
            }
            Some(ErrorCode::LEASE_DEAD) => Verdict::Dead,
            Some(ErrorCode::LEASE_EXPIRING) => Verdict::Again,
            Some(code) => panic!("a renewal was refused with {code}"),
        },
        Reply::Holds(reply) => {
            assert_eq!(reply.holds.len(), 1, "a live lease has its hold");
            Verdict::Lives
        }
        Reply::Keys(_) => Verdict::Lives,
        Reply::Error(error) if error.code == ErrorCode::LEASE_DEAD => Verdict::Dead,
        Reply::Error(_) => Verdict::Again,
        reply => panic!("not an answer to any question: {reply:?}"),
    }
}
