//! Reports of faults in sessions and connections, tried on real processes (docs/TESTING.md names
//! each): memory of old requests, connections cut anywhere, late frames, clients without a
//! cluster, lost sessions. `LEASEHOLD_LONG=1` is the long form.

#[path = "support/bare.rs"]
mod bare;

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use bare::{LIMIT, Lease, scaled, until};
use leasehold::{AcquireError, Client, Config, Guard, HoldState, LossCause, Session};
use leasehold_bench::check::Needs;
use leasehold_bench::clock::{Deadline, now_ns, to_ms};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::contention::{Contention, Plan};
use leasehold_bench::history::{Record, Recorder};
use leasehold_bench::judge::judge;
use leasehold_bench::proxy::{Proxy, Rules, Way};
use leasehold_bench::wire::{Wire, refusal};
use leasehold_bench::{finals, process};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{RequestId, Secret, Token};
use leasehold_protocol::limits::LAST_ENDS_MAX;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;

fn runtime() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime")
}

/// Waits for something, while the runtime's tasks go on.
async fn eventually(what: &str, mut fits: impl FnMut() -> bool) {
    let deadline = Deadline::after(PATIENCE);
    while !fits() {
        assert!(!deadline.passed(), "within {PATIENCE:?}: {what}");
        tokio::time::sleep(process::POLL).await;
    }
}

/// Resident memory of a node, in KiB.
fn resident_kib(cluster: &Cluster, id: u64) -> u64 {
    let pid = cluster.pid(id).expect("it runs");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("Linux tells");
    line.split_whitespace().nth(1).expect("a figure").parse().expect("a figure")
}

/// The length of a node's newest snapshot, in bytes.
fn snapshot_len(cluster: &Cluster, id: u64) -> u64 {
    fn newest(dir: &std::path::Path) -> Option<(std::time::SystemTime, u64)> {
        let entries = fs::read_dir(dir).ok()?.flatten();
        let found = entries.filter_map(|entry| {
            let path = entry.path();
            if path.is_dir() {
                return newest(&path);
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            let meta = entry.metadata().ok().filter(|_| name.contains("snap"))?;
            Some((meta.modified().ok()?, meta.len()))
        });
        found.max()
    }
    newest(&cluster.data_dir(id)).map_or(0, |(_, len)| len)
}

/// B53: what the cluster remembers of short sessions goes with them, what it remembers of a live
/// one outlives a restart of all nodes, and the numbers of a dead one are refused.
#[test]
fn memory_of_requests_lives_exactly_as_long_as_its_session() {
    const PAIRS: u64 = 10;
    const ENTRIES: u64 = 100;
    const EXPIRING_MS: u32 = 3_000;
    const END_LEN: u64 = 160;
    let sessions = scaled(400, 50_000);
    let _alone = process::alone();
    let spec = Spec::default()
        .flag("snapshot-entries", ENTRIES)
        .flag("snapshot-keep-entries", 2 * ENTRIES);
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let kept = bare::open_lease(&mut wire, 600_000);
    let request = kept.acquire(1, "kept", 0);
    let first = bare::outcome(&mut wire, &request);
    assert!(matches!(first, Outcome::Granted(_)), "{first:?}");
    snapshots(&mut wire, &cluster, leader, ENTRIES);
    let empty = (resident_kib(&cluster, leader), snapshot_len(&cluster, leader));

    // Every other one says goodbye in the end, the rest runs out, maybe before it has finished.
    let (mut ends, mut last) = (Vec::new(), None);
    for chunk in 0..sessions / 200 {
        let lasting = short_sessions(&mut wire, 100, 600_000, PAIRS, 2 * chunk);
        let expiring = short_sessions(&mut wire, 100, EXPIRING_MS, PAIRS, 2 * chunk + 1);
        last = expiring.last().copied();
        ends.extend(lasting);
    }
    snapshots(&mut wire, &cluster, leader, ENTRIES);
    let full = (resident_kib(&cluster, leader), snapshot_len(&cluster, leader));
    for lease in &ends {
        let closed = bare::outcome(&mut wire, &lease.close());
        assert!(matches!(closed, Outcome::Closed { .. }), "{closed:?}");
    }
    until("all but one end", || {
        cluster.metric(leader, "leasehold_leases", "").is_ok_and(|live| live <= 1.0)
    });
    snapshots(&mut wire, &cluster, leader, ENTRIES);
    let after = (resident_kib(&cluster, leader), snapshot_len(&cluster, leader));
    println!(
        "{sessions} sessions of {} requests; KiB resident and bytes of snapshot: {empty:?} before, {full:?} with them, {after:?} after",
        2 * PAIRS
    );
    assert!(full.1 > 4 * empty.1, "INVALID: the sessions left no trace in the snapshot");
    // How each key's last hold ended is kept on purpose, of so many keys.
    let kept_ends = END_LEN * (sessions as u64).min(LAST_ENDS_MAX as u64);
    assert!(
        after.1 < empty.1 + full.1 / 20 + kept_ends,
        "the snapshot keeps what nobody can ask for"
    );

    cluster.kill_all().expect("killed");
    for id in cluster.ids() {
        cluster.spawn(id).expect("started again");
    }
    cluster.wait_ready(PATIENCE).expect("ready again");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    assert_eq!(bare::outcome(&mut wire, &request), first, "the retry is recognised");
    let dead = last.expect("some were opened");
    let refused = bare::call(&mut wire, &dead.acquire(1, "dead", 0));
    assert_eq!(refusal(&refused), Some(ErrorCode::LEASE_DEAD));
}

/// Writes until the node has two more snapshots.
fn snapshots(wire: &mut Wire, cluster: &Cluster, id: u64, entries: u64) {
    let from = bare::own_status(cluster, id).expect("it answers").last_index;
    let mut lease = bare::open_lease(wire, 600_000);
    let mut number = 1;
    until("a new snapshot", || {
        for _ in 0..20 {
            let outcome = bare::outcome(wire, &lease.acquire(number, "filler", 0));
            let Outcome::Granted(grant) = outcome else { panic!("no grant: {outcome:?}") };
            bare::outcome(wire, &lease.release(number + 2, "filler", grant.token));
            lease.floor = number + 2;
            number += 3;
        }
        let status = bare::own_status(cluster, id).expect("it answers");
        status.snapshot_index > from + entries
    });
    bare::outcome(wire, &lease.close());
}

/// Opens sessions, each of which makes some acquires and releases of which nothing is acknowledged.
fn short_sessions(
    wire: &mut Wire,
    count: usize,
    ttl_ms: u32,
    pairs: u64,
    chunk: usize,
) -> Vec<Lease> {
    let leases = open_many(wire, count, ttl_ms);
    for pair in 0..pairs {
        let number = 1 + 3 * pair;
        let mut asked = BTreeMap::new();
        let key = |index: usize| format!("short/{chunk}/{index}");
        for (index, lease) in leases.iter().enumerate() {
            let request = lease.acquire(number, &key(index), 0);
            asked.insert(wire.send(&request).expect("sent"), (index, request));
        }
        let mut done = 0;
        while done < count {
            let (id, reply) = next(wire);
            let (index, request) = asked.remove(&id).expect("it was asked");
            let again = match reply {
                Reply::Outcome(reply) => match reply.outcome {
                    Outcome::Granted(grant) => {
                        leases[index].release(number + 2, &key(index), grant.token)
                    }
                    Outcome::Released { .. } => {
                        done += 1;
                        continue;
                    }
                    Outcome::Refused { code: ErrorCode::LEASE_DEAD, .. } if ttl_ms < 600_000 => {
                        done += 1;
                        continue;
                    }
                    outcome => panic!("not its outcome: {outcome:?}"),
                },
                // Not now: the same again, under its number.
                Reply::Error(_) => request,
                reply => panic!("no outcome: {reply:?}"),
            };
            asked.insert(wire.send(&again).expect("sent"), (index, again));
        }
    }
    leases
}

fn next(wire: &mut Wire) -> (RequestId, Reply) {
    wire.recv(Deadline::after(LIMIT)).expect("connected").expect("an answer")
}

fn open_many(wire: &mut Wire, count: usize, ttl_ms: u32) -> Vec<Lease> {
    let mut secrets = BTreeMap::new();
    let ask = |wire: &mut Wire, secrets: &mut BTreeMap<RequestId, Secret>| {
        let (secret, request) = bare::open(ttl_ms);
        secrets.insert(wire.send(&request).expect("sent"), secret);
    };
    (0..count).for_each(|_| ask(wire, &mut secrets));
    let mut leases = Vec::new();
    while leases.len() < count {
        let (id, reply) = next(wire);
        let secret = secrets.remove(&id).expect("it was asked");
        match reply {
            Reply::Error(_) => ask(wire, &mut secrets),
            reply => leases.push(bare::opened(&reply, secret)),
        }
    }
    leases
}

/// B54: connections are reset after any number of bytes, in both directions, under load: no side
/// ever reads the rest of an old frame as a new one, and no command has two effects.
#[test]
fn connections_cut_anywhere_cost_nothing() {
    /// Within so many bytes: some cuts are in a hello, most in what follows.
    const WITHIN: u64 = 3_000;
    let cuts = scaled(100, 2_000);
    let _alone = process::alone();
    let spec = Spec { proxied_clients: true, ..Spec::default() }
        .flag("log-level", "info,leasehold_server::net=debug");
    let cluster = Cluster::start(spec).expect("a cluster");
    let recorder = Recorder::new();
    let plan = Plan { clients: 8, keys: 4, hold_ms_max: 10, ttl_ms: 10_000, ..Plan::default() };
    let mut load = Contention::start(&cluster.endpoints(), &recorder, &plan);
    let library = Plan { first_client: plan.clients, ..plan.clone() };
    load.add_library_clients(&cluster.endpoints(), &recorder, &library);
    assert!(load.progress(50, PATIENCE), "no grants at first");
    let links = cluster.links();
    let cut = Way::CutWithin(WITHIN);
    links.set_clients(Rules { refuse: false, to_server: cut, to_client: cut });
    let made = || links.clients().map(Proxy::cuts).sum::<u64>();
    bare::until_within(PATIENCE * scaled(10, 60), "connections are cut", || made() >= cuts);
    let made = made();
    links.set_clients(Rules::default());
    assert!(load.progress(100, PATIENCE), "no grants after the cuts");
    load.freeze();
    let end = finals::read(&cluster.endpoints(), 0, PATIENCE).expect("a final state");
    recorder.push(Record::Final(end));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((load.lost(), load.stuck()), (0, 0), "lost sessions, calls without an answer");
    load.end();
    for id in cluster.ids() {
        let log = cluster.log(id);
        let line = log.lines().find(|line| line.contains("connection ended"));
        assert_eq!(line, None, "node {id} read something that was no frame");
    }
    bare::assert_no_panic(&cluster);
    let needs = Needs {
        handovers: 50,
        tokens: 100,
        acked: 200,
        ordered: 200,
        nodes: 3,
        retries: cuts / 10,
        ..Needs::default()
    };
    let report = judge(&recorder, &needs).unwrap_or_else(|report| panic!("\n{report}"));
    println!("{made} connections cut\n{report}");
}

/// B57: a hundred clients without a cluster cost next to nothing, and do not knock in step.
#[test]
fn clients_without_a_cluster_pause_between_attempts() {
    const CLIENTS: u32 = 100;
    let window = Duration::from_secs(scaled(4, 60));
    let _alone = process::alone();
    let spec = Spec { proxied_clients: true, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    runtime().block_on(async {
        let guards = take_all(&cluster, CLIENTS, Duration::from_mins(4)).await;
        cluster.kill_all().expect("killed");
        // Each goes on trying to do something.
        let tasks: Vec<_> = guards
            .iter()
            .map(|(client, session, _)| {
                let (client, session) = (client.clone(), session.clone());
                tokio::spawn(async move {
                    loop {
                        let _ = session.lock("more").wait(Duration::from_secs(1)).acquire().await;
                        let _ = client.get("more").await;
                    }
                })
            })
            .collect();
        tokio::time::sleep(window / 3).await;
        let (from_ns, cpu_from) = (now_ns(), cpu());
        tokio::time::sleep(window).await;
        let (to_ns, cpu_used) = (now_ns(), cpu().saturating_sub(cpu_from));
        tasks.iter().for_each(tokio::task::JoinHandle::abort);

        let connects: Vec<u64> = cluster
            .links()
            .clients()
            .flat_map(Proxy::connects_ns)
            .filter(|at_ns| (from_ns..to_ns).contains(at_ns))
            .collect();
        let seconds = (to_ns - from_ns) as f64 / 1e9;
        let each = connects.len() as f64 / seconds / f64::from(CLIENTS);
        let busiest = busiest_tenth(&connects);
        println!(
            "{CLIENTS} clients, {:.1} % of a core for all of them and the proxies, {each:.2} connects a second each; \
             the busiest tenth of a second had {busiest} of {}",
            cpu_used.as_secs_f64() / seconds * 100.0,
            connects.len()
        );
        assert!(!connects.is_empty(), "INVALID: nobody tried");
        assert!(each < 5.0, "{each} connects a second each");
        // Half a percent of a core for each, at most.
        assert!(cpu_used.as_secs_f64() < seconds * 0.5, "{cpu_used:?} in {seconds} s");
        assert!(busiest < connects.len() / 4, "all knock at the same time");

        for id in cluster.ids() {
            cluster.spawn(id).expect("started again");
        }
        eventually("everybody is back", || {
            guards.iter().all(|(_, _, guard)| guard.state() == HoldState::Held)
        })
        .await;
        for (_, _, guard) in guards {
            guard.release().await.expect("still its own");
        }
    });
}

/// Most of these times that lie within a tenth of a second.
fn busiest_tenth(times_ns: &[u64]) -> usize {
    let mut buckets = BTreeMap::new();
    for at_ns in times_ns {
        *buckets.entry(at_ns / 100_000_000).or_insert(0) += 1;
    }
    buckets.into_values().max().unwrap_or(0)
}

/// Processor time of this process.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("it does not go backwards")
}

/// A client of its own with a session and a lock.
async fn take(endpoints: &str, key: &str, ttl: Duration) -> (Client, Session, Guard) {
    let deadline = Deadline::after(4 * PATIENCE);
    loop {
        let taken = try_take(endpoints, key, ttl).await;
        assert!(taken.is_ok() || !deadline.passed(), "no lock {key}: {taken:?}");
        if let Ok(taken) = taken {
            return taken;
        }
    }
}

async fn try_take(
    endpoints: &str,
    key: &str,
    ttl: Duration,
) -> Result<(Client, Session, Guard), leasehold::Error> {
    let config = Config::new(endpoints)?.call_timeout(PATIENCE);
    let client = Client::with_config(config).await?;
    let session = client.session(ttl)?;
    let guard = session.lock(key).acquire().await?;
    Ok((client, session, guard))
}

/// The same many times, a hundred at once.
async fn take_all(cluster: &Cluster, count: u32, ttl: Duration) -> Vec<(Client, Session, Guard)> {
    let endpoints = cluster.endpoint_list();
    let numbers: Vec<u32> = (0..count).collect();
    let mut guards = Vec::new();
    for some in numbers.chunks(100) {
        let taken: Vec<_> = some
            .iter()
            .map(|number| {
                let (endpoints, key) = (endpoints.clone(), format!("many/{number}"));
                tokio::spawn(async move { take(&endpoints, &key, ttl).await })
            })
            .collect();
        for task in taken {
            guards.push(task.await.expect("no panic"));
        }
    }
    guards
}

/// B60: frames that a former connection delivers late are answered by memory or refused; nothing
/// moves, and the session works on over its new connection.
#[test]
fn late_frames_of_a_former_connection_move_nothing() {
    let _alone = process::alone();
    let spec = Spec { proxied_clients: true, ..Spec::default() };
    let cluster = Cluster::start(spec).expect("a cluster");
    let proxy = cluster.links().client(1).expect("it was asked for");
    let mut old = bare::connect(cluster.endpoint(1));
    let mut lease = bare::open_lease(&mut old, 60_000);
    proxy.set(Rules { to_server: Way::Hold, ..Rules::default() });
    // All of this is on its way for a while: two acquires, of which one is given up and one gives
    // its hold back, and a goodbye of another lease.
    for request in [
        lease.acquire(1, "late", 0),
        lease.release(3, "late", Token(1)),
        lease.acquire(4, "given/up", 0),
        lease.cancel(5),
        lease.renew(),
    ] {
        old.send(&request).expect("sent");
    }

    let mut new = bare::connect(cluster.endpoint(2));
    let first = bare::grant(&mut new, &lease, 1, "late");
    // The held release names another token, as one of a lost reply would: made up here.
    let released = bare::outcome(&mut new, &lease.release(6, "late", first.token));
    assert!(matches!(released, Outcome::Released { .. }), "{released:?}");
    let cancelled = bare::outcome(&mut new, &lease.cancel(5));
    assert!(matches!(cancelled, Outcome::Cancelled { .. }), "{cancelled:?}");
    let second = bare::grant(&mut new, &lease, 7, "late");
    lease.floor = 6;
    let renewed = bare::call(&mut new, &lease.renew());
    assert!(matches!(renewed, Reply::Renewed(_)), "{renewed:?}");
    // A command that tells the floor.
    bare::grant(&mut new, &lease, 10, "other");

    proxy.set(Rules::default());
    let mut late = Vec::new();
    for _ in 0..5 {
        let (_, reply) = old.recv(Deadline::after(LIMIT)).expect("open").expect("an answer");
        late.push(match reply {
            Reply::Renewed(reply) => format!("renewed {:?}", reply.results[0].error),
            reply => format!("{:?}", refusal(&reply).expect("nothing else is done")),
        });
    }
    println!("late frames: {late:?}");
    let key = bare::key(&mut new, "late");
    assert_eq!(key.holders.len(), 1);
    assert_eq!((key.holders[0].lease, key.holders[0].token), (lease.id, second.token));
    assert!(bare::key(&mut new, "given/up").holders.is_empty(), "nobody asked for it any more");
    let released = bare::outcome(&mut new, &lease.release(9, "late", second.token));
    assert!(matches!(released, Outcome::Released { .. }), "the session works on: {released:?}");
    let closed = bare::outcome(&mut old, &lease.close());
    assert!(matches!(closed, Outcome::Closed { .. }), "over either connection: {closed:?}");
}

/// B63: a short election costs no hold; a cluster that is away for longer than the TTL costs it
/// once, and nothing renews it afterwards.
#[test]
fn a_short_gap_keeps_a_hold_and_a_long_one_loses_it_once() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    runtime().block_on(async {
        let (client, session, guard) =
            take(&cluster.endpoint_list(), "short", Duration::from_secs(20)).await;
        let watch = guard.watch();
        for _ in 0..scaled(1, 5) {
            let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
            cluster.kill(leader).expect("killed");
            eventually("another leader", || cluster.leader(0).is_some_and(|id| id != leader)).await;
            guard.renew().await.expect("the new leader knows it");
            assert_eq!(watch.state(), HoldState::Held);
            cluster.spawn(leader).expect("started again");
            cluster.wait_ready(PATIENCE).expect("ready again");
        }
        guard.release().await.expect("still its own");
        session.close().await.expect("it answers");

        let session = client.session(Duration::from_secs(2)).expect("in range");
        let guard = session.lock("long").acquire().await.expect("free");
        let (mut watch, token) = (guard.watch(), guard.token());
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let away: Vec<u64> = cluster.ids().filter(|id| *id != leader).collect();
        for id in &away {
            cluster.kill(*id).expect("killed");
        }
        let mut losses = 0;
        while losses == 0 {
            let change = tokio::time::timeout(PATIENCE, watch.changed()).await.expect("it is told");
            losses += u64::from(matches!(change, Some(HoldState::Lost(_))));
        }
        assert_eq!(guard.lost().await, LossCause::Expired);
        // A renewal that was on its way may still come.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let renewals = |cluster: &Cluster, id| {
            cluster.metric(id, "leasehold_requests_total", "kind=\"renew\"").expect("metrics")
        };
        let before = renewals(&cluster, leader);
        for id in &away {
            cluster.spawn(*id).expect("started again");
        }
        cluster.wait_ready(PATIENCE).expect("ready again");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(guard.state(), HoldState::Lost(LossCause::Expired));
        let after: f64 = cluster.ids().map(|id| renewals(&cluster, id)).sum();
        assert!(after <= before, "{} renewals after the loss", after - before);
        let told_again = tokio::time::timeout(Duration::from_millis(50), watch.changed()).await;
        assert!(told_again.is_err(), "lost is said once: {told_again:?}");
        let again = session.lock("long").acquire().await.expect("the session works on");
        assert!(again.token() > token);
    });
}

/// B65: the clients of a dead leader come back, all of them with their sessions.
#[test]
fn the_clients_of_a_dead_leader_all_come_back() {
    // Thousands of clients in one process have less of it each.
    let (clients, ttl_s): (u32, _) = scaled((200, 10), (1_000, 30));
    let _alone = process::alone();
    let spec = Spec { proxied_clients: true, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let guards = take_all(&cluster, clients, Duration::from_secs(ttl_s)).await;
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let killed_ns = now_ns();
        cluster.kill(leader).expect("killed");
        // Every client wants one thing of the new leader, at the same time.
        let renewals: Vec<_> = guards.iter().map(|(_, _, guard)| guard.renew()).collect();
        for renewal in renewals {
            renewal.await.expect("every session survives");
        }
        let back_ns = now_ns();
        assert!(guards.iter().all(|(_, _, guard)| guard.state() == HoldState::Held));
        let mut connects: Vec<u64> = cluster
            .links()
            .clients()
            .flat_map(Proxy::connects_ns)
            .filter(|at_ns| *at_ns > killed_ns)
            .collect();
        connects.sort_unstable();
        let spread_ms = to_ms(connects[connects.len() - 1] - connects[0]);
        println!(
            "{clients} clients: {} connects within {spread_ms:.0} ms, {} in the busiest tenth of a second; \
             all renewed after {:.0} ms",
            connects.len(),
            busiest_tenth(&connects),
            to_ms(back_ns - killed_ns)
        );
        assert!(connects.len() < 20 * clients as usize, "they knock again and again");
    });
}

/// B69: calls of a session that was lost end with that; a new session works at once, and nothing
/// of the old one is sent again under it. Without a leader for less than the TTL nothing ends.
#[test]
fn calls_of_a_lost_session_end_with_it() {
    const CALLS: usize = 50;
    let _alone = process::alone();
    let spec = Spec { proxied_clients: true, ..Spec::default() };
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let blocker = bare::open_lease(&mut wire, 600_000);
    for call in 0..CALLS {
        bare::grant(&mut wire, &blocker, 1 + 3 * call as u64, &format!("taken/{call}"));
    }
    runtime().block_on(async {
        let (client, session, guard) =
            take(&cluster.endpoint_list(), "own", Duration::from_secs(2)).await;
        let calls: Vec<_> = (0..CALLS)
            .map(|call| tokio::spawn(session.lock(format!("taken/{call}")).acquire()))
            .collect();
        let waits = |wire: &mut Wire| {
            let sessions = bare::try_sessions(wire, LIMIT).unwrap_or_default();
            sessions.iter().map(|session| session.waits as usize).sum::<usize>()
        };
        eventually("all calls wait", || waits(&mut wire) == CALLS).await;
        // A call that has not read yet that it waits may move to a new lease. The answer to a read
        // comes behind the calls' on their connection.
        client.get("own").await.expect("an answer");
        cluster.links().set_clients(Rules::SILENT);
        eventually("the session ends", || waits(&mut wire) == 0).await;
        cluster.links().set_clients(Rules::default());

        let next = client.session(Duration::from_secs(10)).expect("in range");
        let own = next.lock("own").acquire().await.expect("a new session works at once");
        assert!(own.token() > guard.token());
        for call in calls {
            let ended = tokio::time::timeout(PATIENCE, call).await.expect("each call ends");
            let ended = ended.expect("no panic");
            assert!(matches!(ended, Err(AcquireError::Lost(_))), "{ended:?}");
        }
        assert_eq!(waits(&mut wire), 0, "nothing was asked again");

        // Three seconds without a leader, TTL 10 s: no self-expiry.
        for id in cluster.ids().filter(|id| *id != leader) {
            cluster.signal(id, rustix::process::Signal::STOP).expect("stopped");
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(!matches!(own.state(), HoldState::Lost(_)), "{:?}", own.state());
        for id in cluster.ids().filter(|id| *id != leader) {
            cluster.signal(id, rustix::process::Signal::CONT).expect("continued");
        }
        own.renew().await.expect("it is still there");
        own.release().await.expect("still its own");
    });
}
