//! Full disks, other file systems, damaged snapshots. Mounts are made in a namespace of the node's
//! own process, and end with it. Where mounting is not allowed, a test says so and is skipped.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process::{self, POLL};
use leasehold_bench::wire::Wire;
use leasehold_protocol::command::Command as Asked;
use leasehold_protocol::ids::Mode;
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{OutcomeReply, Reply, ShardStatus};
use leasehold_protocol::request::Request;
use rustix::process::Signal;

use crate::bare::{self, LIMIT, Lease, Patient as _, scaled, until};

const TTL_MS: u32 = 600_000;
/// The documented exit codes.
const DATA_DIR_UNUSABLE: i32 = 6;
const STORAGE_FAILED: i32 = 8;

/// A node's command behind `mount`, a piece of shell in which `$0` is the node's data directory and
/// `"$@"` the node's command.
fn mounted(cluster: &Cluster, id: u64, mount: &str) -> Command {
    let node = cluster.command(id).expect("a command");
    let dir = cluster.data_dir(id);
    fs::create_dir_all(&dir).expect("a directory");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &format!("set -e; {mount}")]).arg(dir);
    command.arg(node.get_program()).args(node.get_args());
    command.stdin(std::process::Stdio::null());
    command
}

fn may_mount() -> bool {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = Command::new("unshare");
    command.args(["--mount", "mount", "-t", "tmpfs", "none"]).arg(dir.path());
    let may = command.output().is_ok_and(|output| output.status.success());
    if !may {
        println!("skipped: mounting is not allowed here");
    }
    may
}

/// Sends some requests at once and returns their outcomes, in the order of the requests.
fn all(wire: &mut Wire, requests: &[Request]) -> Vec<Outcome> {
    let ids: Vec<_> = requests.iter().map(|request| wire.send_patiently(request)).collect();
    let mut outcomes = BTreeMap::new();
    while outcomes.len() < ids.len() {
        match wire.recv(Deadline::after(PATIENCE)).expect("connected").expect("an answer") {
            (_, Reply::Outcome(OutcomeReply { outcome: Outcome::Queued { .. }, .. })) => {}
            (id, Reply::Outcome(reply)) => drop(outcomes.insert(id, reply.outcome)),
            (_, reply) => panic!("no outcome: {reply:?}"),
        }
    }
    ids.iter().map(|id| outcomes[id]).collect()
}

/// Fifty keys with large values, taken and given back, so that the log grows by about 200 KiB.
fn write(wire: &mut Wire, lease: &mut Lease, number: &mut u64) {
    let first = *number;
    let keys: Vec<String> = (0..50).map(|index| format!("large/{index}")).collect();
    let acquires = (first..).step_by(3).zip(&keys).map(|(number, key)| {
        bare::command(Asked::Acquire {
            caller: lease.caller(number),
            key: key.as_bytes().to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: vec![b'v'; 4_000],
            wait_ms: 0,
        })
    });
    let acquires: Vec<Request> = acquires.collect();
    let granted = all(wire, &acquires).into_iter().enumerate();
    let releases: Vec<Request> = granted
        .map(|(index, outcome)| match outcome {
            Outcome::Granted(grant) => {
                lease.release(first + 3 * index as u64 + 2, &keys[index], grant.token)
            }
            outcome => panic!("no grant: {outcome:?}"),
        })
        .collect();
    for outcome in all(wire, &releases) {
        assert!(matches!(outcome, Outcome::Released { .. }), "{outcome:?}");
    }
    *number += 150;
    lease.floor = *number - 1;
}

fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// B78: a node whose disk fills up while its log grows into a new segment stops with its code and
/// says why; the others go on and nothing acknowledged is lost. One whose disk is full already does
/// not start.
#[test]
fn a_node_on_a_full_disk_stops_in_order_and_costs_nothing() {
    const SEGMENT_MIB: u64 = 8;
    let _alone = process::alone();
    if !may_mount() {
        return;
    }
    let mut cluster = Cluster::prepare(Spec::default().flag("wal-segment-mib", SEGMENT_MIB))
        .expect("directories");
    let small = 3;
    for id in cluster.ids().filter(|id| *id != small) {
        cluster.spawn(id).expect("started");
    }
    // Room for two segments and a little more.
    let full = |mib| format!("mount -t tmpfs -o size={mib}m none \"$0\"; exec \"$@\"");
    let command = mounted(&cluster, small, &full(2 * SEGMENT_MIB + 2));
    cluster.spawn_as(small, command).expect("started");
    cluster.wait_ready(PATIENCE).expect("ready");
    let mut leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    if leader == small {
        let mut wire = bare::connect(cluster.addresses(small).client);
        wire.call(&bare::transfer(1), LIMIT).expect("an answer");
        until("another leads", || cluster.leader(0).is_some_and(|id| id != small));
        leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    }
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let mut lease = bare::open_lease(&mut wire, TTL_MS);
    bare::grant(&mut wire, &lease, 1, "kept");
    let (mut number, mut rounds) = (4, 0);
    let status = loop {
        write(&mut wire, &mut lease, &mut number);
        rounds += 1;
        if let Ok(status) = cluster.wait_exit(small, POLL) {
            break status;
        }
        assert!(rounds < 400, "INVALID: the disk was not filled");
    };
    let said = last_lines(&cluster.log(small));
    assert_eq!(status.code(), Some(STORAGE_FAILED), "{status}: {said}");
    assert!(said.contains("No space left"), "{said}");
    println!("after {} KiB: {}", rounds * 200, said.lines().last().unwrap_or_default());

    for _ in 0..3 {
        write(&mut wire, &mut lease, &mut number);
    }
    assert_eq!(bare::key(&mut wire, "kept").holders[0].lease, lease.id);

    bare::assert_no_panic(&cluster);
    drop(cluster);

    let spec = Spec { nodes: 1, ..Spec::default() }.flag("wal-segment-mib", SEGMENT_MIB);
    let mut cluster = Cluster::prepare(spec).expect("directories");
    let command = mounted(&cluster, 1, &full(SEGMENT_MIB / 2));
    cluster.spawn_as(1, command).expect("started");
    let status = cluster.wait_exit(1, PATIENCE).expect("it ends by itself");
    let said = last_lines(&cluster.log(1));
    assert!([Some(DATA_DIR_UNUSABLE), Some(STORAGE_FAILED)].contains(&status.code()), "{said}");
    assert!(said.contains("No space left"), "{said}");
    println!("at the start: {}", said.lines().last().unwrap_or_default());
    bare::assert_no_panic(&cluster);
}

/// B87: file systems that lack what others have. An overlay and a tmpfs serve, across a restart;
/// where no file can be made, the start is refused with the path.
#[test]
fn other_file_systems_serve_or_are_refused_with_the_path() {
    /// The second run starts on what the first has left.
    const TWICE: &str = "trap : TERM; \"$@\"; echo the-second-run; exec \"$@\"";
    let _alone = process::alone();
    let overlay = format!(
        "mount -t tmpfs none /mnt; mkdir /mnt/lower /mnt/upper /mnt/work; mount -t overlay \
         -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work none \"$0\"; {TWICE}"
    );
    let tmpfs = format!("mount -t tmpfs none \"$0\"; {TWICE}");
    let mounts = [("tmpfs", tmpfs), ("overlay", overlay)];
    for (kind, mount) in mounts.into_iter().filter(|_| may_mount()) {
        let spec = Spec { nodes: 1, ..Spec::default() };
        let mut cluster = Cluster::prepare(spec).expect("directories");
        let command = mounted(&cluster, 1, &mount);
        cluster.spawn_as(1, command).expect("started");
        cluster.wait_ready(PATIENCE).unwrap_or_else(|error| panic!("{kind}: {error}"));
        let mut wire = bare::connect(cluster.addresses(1).client);
        let lease = bare::open_lease(&mut wire, TTL_MS);
        let held = bare::grant(&mut wire, &lease, 1, "kept");
        cluster.signal(1, Signal::TERM).expect("asked to stop");
        until("it starts again", || cluster.log(1).contains("the-second-run"));
        cluster.wait_ready(PATIENCE).unwrap_or_else(|error| panic!("{kind}: {error}"));
        let mut wire = bare::connect(cluster.addresses(1).client);
        assert_eq!(bare::key(&mut wire, "kept").holders[0].token, held.token, "{kind}");
        println!("{kind}: served twice");
    }

    let cluster = Cluster::prepare(Spec { nodes: 1, ..Spec::default() }).expect("directories");
    let node = cluster.command(1).expect("a command");
    let place = |arg: &&OsStr| !arg.to_string_lossy().starts_with("--data-dir");
    let mut command = Command::new(node.get_program());
    command.args(node.get_args().filter(place)).arg("--data-dir=/proc/1/task/d");
    let output = command.output().expect("it ends by itself");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(DATA_DIR_UNUSABLE), "{said}");
    assert!(said.contains("/proc/1/task"), "{said}");
}

/// The newest snapshot below a node's directory.
fn newest_snapshot(cluster: &Cluster, id: u64) -> PathBuf {
    fn files(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).expect("readable").flatten() {
            let path = entry.path();
            if path.is_dir() {
                files(&path, found);
            } else if entry.file_name().to_string_lossy().starts_with("snapshot-") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    files(&cluster.data_dir(id), &mut found);
    found.into_iter().max().expect("it has a snapshot")
}

/// B82: the newest snapshot of a node is flipped, cut or emptied. The node comes back by the one
/// before it and the log, whoever else is damaged; the state is the same on all, also under the
/// damaged node's lead.
#[test]
fn a_damaged_snapshot_harms_nobody() {
    type Damage = fn(&mut Vec<u8>);
    const ENTRIES: u64 = 20;
    let _alone = process::alone();
    let nodes = scaled(3, 5);
    let spec = Spec { nodes, ..Spec::default() };
    let spec = spec.flag("snapshot-entries", ENTRIES).flag("snapshot-keep-entries", 2 * ENTRIES);
    let mut cluster = Cluster::start(spec).expect("a cluster");
    let mut number = 4;
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let mut lease = bare::open_lease(&mut bare::connect(cluster.addresses(leader).client), TTL_MS);
    let damages: [(&str, Damage); 3] = [
        ("flipped", |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
        }),
        ("cut", |bytes| bytes.truncate(bytes.len() / 2)),
        ("emptied", Vec::clear),
    ];
    for (kind, damage) in damages {
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let mut wire = bare::connect(cluster.addresses(leader).client);
        let from = bare::own_status(&cluster, leader).expect("it answers").last_index;
        until("new snapshots everywhere", || {
            write(&mut wire, &mut lease, &mut number);
            let new = |id| bare::own_status(&cluster, id).map(|status| status.snapshot_index);
            cluster.ids().all(|id| new(id).is_some_and(|index| index > from + ENTRIES))
        });
        // A minority but one that matters, as many as may be missing.
        let victims: Vec<u64> =
            cluster.ids().filter(|id| *id != leader).take(nodes as usize / 2).collect();
        for id in &victims {
            cluster.kill(*id).expect("killed");
            let path = newest_snapshot(&cluster, *id);
            let mut bytes = fs::read(&path).expect("readable");
            damage(&mut bytes);
            fs::write(&path, bytes).expect("damaged");
        }
        for id in &victims {
            cluster.spawn(*id).expect("started again");
        }
        cluster.wait_ready(PATIENCE).unwrap_or_else(|error| panic!("{kind}: {error}"));
        wire.call(&bare::transfer(victims[0]), LIMIT).expect("an answer");
        let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
        let mut wire = bare::connect(cluster.addresses(leader).client);
        write(&mut wire, &mut lease, &mut number);
        until("equal digests", || {
            let states: Vec<_> =
                cluster.ids().filter_map(|id| bare::own_status(&cluster, id)).collect();
            let same = |status: &ShardStatus| {
                (status.applied_revision, status.digest)
                    == (states[0].applied_revision, states[0].digest)
            };
            states.len() == nodes as usize && states.iter().all(same)
        });
        println!("{kind} on {victims:?}: back, node {leader} leads");
    }
    bare::assert_no_panic(&cluster);
}
