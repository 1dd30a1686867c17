//! Many connections: bursts, broken ones, how they are spread, what they leave behind.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use leasehold_bench::clock::{Deadline, now_ns, to_ms};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_protocol::command::Command;
use leasehold_protocol::ids::Mode;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;
use rustix::process::Signal;

use crate::bare::{self, LIMIT, Lease, Patient as _, scaled, until};

const TTL_MS: u32 = 600_000;

fn single() -> Spec {
    Spec { nodes: 1, ..Spec::default() }
}

/// Connections with a lease each.
fn crowd(cluster: &Cluster, id: u64, count: usize) -> Vec<(Wire, Lease)> {
    let connected = (0..count).map(|_| bare::connect(cluster.addresses(id).client));
    connected
        .map(|mut wire| {
            let lease = bare::open_lease(&mut wire, TTL_MS);
            (wire, lease)
        })
        .collect()
}

/// Every connection asks one thing, `meanwhile` happens, and every one gets its answer. Returns how
/// long that took.
fn burst(crowd: &mut [(Wire, Lease)], round: u64, meanwhile: impl FnOnce()) -> Duration {
    let number = 1 + 3 * round;
    let mut asked = Vec::new();
    for (index, (wire, lease)) in crowd.iter_mut().enumerate() {
        lease.floor = number - 1;
        asked.push(wire.send_patiently(&lease.acquire(number, &format!("burst/{index}"), 0)));
    }
    let from_ns = now_ns();
    meanwhile();
    let mut tokens = Vec::new();
    for (index, ((wire, _), asked)) in crowd.iter_mut().zip(asked).enumerate() {
        let answer = wire.recv(Deadline::after(PATIENCE)).expect("connected");
        match answer {
            Some((id, Reply::Outcome(reply))) if id == asked => match reply.outcome {
                Outcome::Granted(grant) => tokens.push(grant.token),
                outcome => panic!("connection {index}: {outcome:?}"),
            },
            other => panic!("connection {index}: {other:?}"),
        }
    }
    let took = Duration::from_nanos(now_ns() - from_ns);
    for (index, ((wire, lease), token)) in crowd.iter_mut().zip(tokens).enumerate() {
        wire.send_patiently(&lease.release(number + 2, &format!("burst/{index}"), token));
    }
    for (index, (wire, _)) in crowd.iter_mut().enumerate() {
        let answer = wire.recv(Deadline::after(PATIENCE)).expect("connected");
        assert!(answer.is_some(), "connection {index} has no answer to its release");
    }
    took
}

/// B120: requests of all connections are there when the node goes on after a stop, so that all of
/// them complete in one turn of its ring: every one is answered.
#[test]
fn a_burst_of_completions_leaves_no_connection_silent() {
    let (connections, rounds) = scaled((400, 5), (5_000, 50));
    let _alone = process::alone();
    let mut cluster = Cluster::start(single()).expect("a cluster");
    let mut crowd = crowd(&cluster, 1, connections);
    let mut longest = Duration::ZERO;
    for round in 0..rounds {
        cluster.signal(1, Signal::STOP).expect("stopped");
        let go_on = || cluster.signal(1, Signal::CONT).expect("continued");
        longest = longest.max(burst(&mut crowd, round, go_on));
    }
    println!("{rounds} bursts of {connections} requests at once, each answered within {longest:?}");
}

/// B121: bursts of many connections while snapshots are written and a node catches up by snapshot.
#[test]
fn bursts_snapshots_and_a_catch_up_at_once_stall_nobody() {
    const ENTRIES: u64 = 50;
    let connections = scaled(200, 3_000);
    let _alone = process::alone();
    let spec = Spec::default()
        .flag("snapshot-entries", ENTRIES)
        .flag("snapshot-keep-entries", 2 * ENTRIES);
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let away = cluster.ids().find(|id| *id != leader).expect("three nodes");
    let mut crowd = crowd(&cluster, leader, connections);
    let mut filler = bare::connect(cluster.addresses(leader).client);
    let mut lease = bare::open_lease(&mut filler, TTL_MS);
    let before = bare::own_status(&cluster, away).expect("it answers").last_index;
    cluster.kill(away).expect("killed");
    let mut round = 0;
    let mut number = 1;
    let purged = |cluster: &Cluster| cluster.metric(leader, "leasehold_shard_purged_index", "");
    until("the log is cut", || {
        burst(&mut crowd, round, || {});
        round += 1;
        // Many small entries, too: a burst is few of them.
        for _ in 0..ENTRIES {
            let grant = bare::grant(&mut filler, &lease, number, "filler");
            bare::outcome(&mut filler, &lease.release(number + 2, "filler", grant.token));
            lease.floor = number + 2;
            number += 3;
        }
        purged(&cluster).is_ok_and(|index| index > before as f64 + 1.0)
    });
    cluster.spawn(away).expect("started again");
    let installed = |cluster: &Cluster| {
        let count = cluster.metric(away, "leasehold_snapshots_total", "kind=\"installed\"");
        count.is_ok_and(|count| count >= 1.0)
    };
    let mut longest = Duration::ZERO;
    until("it has caught up by snapshot", || {
        longest = longest.max(burst(&mut crowd, round, || {}));
        round += 1;
        installed(&cluster)
    });
    let stall = cluster.metric(leader, "leasehold_reactor_stall_max_seconds", "").expect("a page");
    println!(
        "{round} bursts of {connections}, the longest {longest:?} during the catch-up; longest stall of the leader's core \
         {:.0} ms",
        stall * 1e3
    );
}

/// B119: connections that break in the middle of a frame, by the thousand, or that fall silent
/// there, beside clients that check every byte they get.
#[test]
fn broken_connections_touch_nobody_elses_bytes() {
    let cycles = scaled(1_500, 100_000);
    let _alone = process::alone();
    let cluster = Cluster::start(single()).expect("a cluster");
    let addr = cluster.addresses(1).client;
    let silent: Vec<TcpStream> = (0..50)
        .map(|index| {
            let mut stream = TcpStream::connect(addr).expect("connected");
            stream.write_all(&HALF[..index % HALF.len()]).expect("sent");
            stream
        })
        .collect();
    let (over, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let neighbours: Vec<_> = (0..2)
            .map(|who| {
                let (over, checked) = (&over, &checked);
                scope.spawn(move || neighbour(addr, who, over, checked))
            })
            .collect();
        let deadline = Deadline::after(PATIENCE * scaled(1, 20));
        for cycle in 0..cycles {
            // In step with the neighbours, so that most of what they do has company.
            while checked.load(Ordering::Relaxed) < cycle / 25 {
                assert!(!deadline.passed(), "after {cycle} connections nobody else is served");
                std::thread::sleep(process::POLL);
            }
            let Ok(mut stream) = TcpStream::connect(addr) else { continue };
            // A part of a hello, or of something that is none.
            let bytes = if cycle % 3 == 0 { &[cycle as u8; 12][..] } else { HALF };
            let _ = stream.write_all(&bytes[..=cycle as usize % bytes.len()]);
            if cycle % 2 == 0 {
                let now = Some(Duration::ZERO);
                rustix::net::sockopt::set_socket_linger(&stream, now).expect("a socket");
            }
        }
        over.store(true, Ordering::Relaxed);
        for neighbour in neighbours {
            neighbour.join().expect("its bytes were its own");
        }
    });
    // Those that stay silent are ended by the handshake's deadline.
    for mut stream in silent {
        stream.set_read_timeout(Some(LIMIT)).expect("set");
        let mut rest = Vec::new();
        let end = stream.read_to_end(&mut rest);
        let timed_out = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        assert!(!end.as_ref().is_err_and(timed_out), "never ended: {end:?}");
    }
    let open = || cluster.metric(1, "leasehold_connections", "port=\"client\"");
    until("all are gone", || open().is_ok_and(|open| open < 1.0));
    let checked = checked.load(Ordering::Relaxed);
    println!("{cycles} broken and 50 silent connections; {checked} answers compared byte by byte");
    bare::assert_no_panic(&cluster);
}

/// The first bytes of a frame that announces more than follows.
const HALF: &[u8] =
    &[60, 0, 0, 0, 0x4c, 0x53, 0x48, 0x44, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7];

/// Takes keys with values that only it writes, and reads them again.
fn neighbour(addr: std::net::SocketAddr, who: u8, over: &AtomicBool, checked: &AtomicU64) {
    let mut wire = bare::connect(addr);
    let mut lease = bare::open_lease(&mut wire, TTL_MS);
    let mut number = 1;
    while !over.load(Ordering::Relaxed) {
        let name = format!("own/{who}/{number}");
        let value: Vec<u8> =
            (0..=number as usize * 37 % 4_000).map(|at| at as u8 ^ number as u8 ^ who).collect();
        let acquire = bare::command(Command::Acquire {
            caller: lease.caller(number),
            key: name.as_bytes().to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: value.clone(),
            wait_ms: 0,
        });
        let outcome = bare::outcome(&mut wire, &acquire);
        let Outcome::Granted(grant) = outcome else { panic!("no grant: {outcome:?}") };
        let info = bare::key(&mut wire, &name);
        assert_eq!(info.key, name);
        assert!(info.holders[0].value == value, "another client's bytes");
        assert_eq!((info.holders[0].lease, info.holders[0].token), (lease.id, grant.token));
        bare::outcome(&mut wire, &lease.release(number + 2, &name, grant.token));
        lease.floor = number + 2;
        number += 3;
        checked.fetch_add(1, Ordering::Relaxed);
    }
    bare::outcome(&mut wire, &lease.close());
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count()
}

fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("Linux tells");
    line.split_whitespace().nth(1).expect("a figure").parse().expect("a figure")
}

/// B123: neither waits that run out nor connections that come and go leave anything behind.
#[test]
fn waits_and_connections_leave_nothing_behind() {
    /// What an allocator may keep more after the same work once more.
    const SLACK_KIB: u64 = 8 * 1024;
    let (chunks, connects) = scaled((5, 300), (400, 10_000));
    let _alone = process::alone();
    let cluster = Cluster::start(single()).expect("a cluster");
    let pid = cluster.pid(1).expect("it runs");
    let mut wire = bare::connect(cluster.addresses(1).client);
    let holder = bare::open_lease(&mut wire, TTL_MS);
    for index in 0..HELD {
        bare::grant(&mut wire, &holder, 1 + 3 * index, &held(index));
    }
    let work = |wire: &mut Wire| {
        for _ in 0..chunks {
            run_out(wire);
        }
        for _ in 0..connects {
            drop(bare::connect(cluster.addresses(1).client));
        }
        let open = || cluster.metric(1, "leasehold_connections", "port=\"client\"");
        until("they are gone", || open().is_ok_and(|open| open < 2.0));
    };
    // Once to warm up: buffers, the log's segments and the allocator's pages have come.
    work(&mut wire);
    let before = (descriptors(pid), resident_kib(pid));
    work(&mut wire);
    until("its descriptors are back", || descriptors(pid) <= before.0 + 1);
    let after = (descriptors(pid), resident_kib(pid));
    println!(
        "{} waits that ran out and {connects} connections, once more: descriptors and KiB resident {before:?} before, \
         {after:?} after",
        chunks * HELD
    );
    assert!(after.1 < before.1 + SLACK_KIB, "{after:?} after {before:?}");
}

/// As many keys are held.
const HELD: u64 = 500;

fn held(index: u64) -> String {
    format!("held/{index}")
}

/// A session that waits a millisecond for each of these keys, all at once.
fn run_out(wire: &mut Wire) {
    let waiter = bare::open_lease(wire, TTL_MS);
    for index in 0..HELD {
        wire.send_patiently(&waiter.acquire(1 + 3 * index, &held(index), 1));
    }
    let mut over = 0;
    while over < HELD {
        match wire.recv(Deadline::after(PATIENCE)).expect("connected").expect("an answer") {
            (_, Reply::Outcome(reply)) => match reply.outcome {
                Outcome::Queued { .. } => {}
                Outcome::TimedOut { .. } => over += 1,
                outcome => panic!("not over: {outcome:?}"),
            },
            (_, reply) => panic!("no outcome: {reply:?}"),
        }
    }
    bare::outcome(wire, &waiter.close());
}

/// B127: connections are spread evenly over the cores, few and many, also those of one client
/// address, and serve whichever core's shard they ask.
#[test]
fn connections_are_spread_evenly_over_the_cores() {
    const CORES: u32 = 4;
    let many = scaled(200, 1_000);
    let _alone = process::alone();
    let spec = Spec { shards: CORES, ..single() }.flag("cores", CORES);
    let cluster = Cluster::start(spec).expect("a cluster");
    for count in [8, many] {
        let from_ns = now_ns();
        let wires: Vec<Wire> =
            (0..count).map(|_| bare::connect(cluster.addresses(1).client)).collect();
        let of = |core: u32| {
            let label = format!("core=\"{core}\",port=\"client\"");
            cluster.metric(1, "leasehold_connections", &label).expect("a page")
        };
        let mut each = Vec::new();
        until("all are counted", || {
            each = (0..CORES).map(of).collect();
            each.iter().sum::<f64>() >= f64::from(count)
        });
        println!("{count} connections in {:.0} ms: {each:?}", to_ms(now_ns() - from_ns));
        let least = each.iter().copied().fold(f64::MAX, f64::min);
        let most = each.iter().copied().fold(0.0, f64::max);
        assert!(least > 0.0 && most <= 2.0 * least, "unevenly spread: {each:?}");
        drop(wires);
        let open = || cluster.metric(1, "leasehold_connections", "port=\"client\"");
        until("they are gone", || open().is_ok_and(|open| open < 1.0));
    }
}
