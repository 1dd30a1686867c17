//! Who a node is: a wiped voter does not vote, a foreign data directory is refused with both
//! values, and a second server on the same ports or directory exits at once with the reason.

#[path = "identity/backup.rs"]
mod backup;
#[cfg(feature = "s3")]
#[path = "identity/s3.rs"]
mod s3;

use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use leasehold_bench::actor::{Actor, Failed};
use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::history::Recorder;
use leasehold_bench::process::{self, Process};

/// "At once", on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);

// The documented exit codes of `leaseholdd`.
const PORT_IN_USE: i32 = 3;
const DATA_DIR_IN_USE: i32 = 4;
const DATA_DIR_FOREIGN: i32 = 5;

/// Starts a node's command with some flags changed and returns how it ended, by itself.
fn start_and_fail(cluster: &Cluster, id: u64, changed: &[(&str, String)]) -> Output {
    let mut command = cluster.command(id).expect("a command");
    for (name, value) in changed {
        let args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        let prefix = format!("--{name}=");
        let args = args.into_iter().filter(|arg| !arg.to_string_lossy().starts_with(&prefix));
        let mut next = std::process::Command::new(command.get_program());
        next.args(args).arg(format!("{prefix}{value}"));
        command = next;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("output");
    let file = std::fs::File::create(&path).expect("a file");
    command.stdin(Stdio::null()).stdout(file.try_clone().expect("a second handle")).stderr(file);
    let mut process = Process::spawn(command).expect("it starts");
    let status = process.wait(AT_ONCE).unwrap_or_else(|error| {
        panic!("{error}; it said: {}", std::fs::read_to_string(&path).unwrap_or_default())
    });
    Output { status, stdout: Vec::new(), stderr: std::fs::read(&path).expect("its output") }
}

fn expect_refusal(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

#[test]
fn a_second_server_and_a_foreign_directory_are_refused_with_the_reason() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let mut taken = Vec::new();
    let mut port = || leasehold_bench::ports::free(&mut taken).expect("a port").to_string();
    let elsewhere = [("client-listen", port()), ("peer-listen", port()), ("admin-listen", port())];

    // The same directory on other ports: the pid of the one that has it is named.
    let output = start_and_fail(&cluster, 1, &elsewhere);
    let pid = cluster.pid(1).expect("node 1 runs").to_string();
    expect_refusal(&output, DATA_DIR_IN_USE, &[&pid, "node1"]);

    // The same ports with another directory: the address is named.
    let dir = cluster.path().join("other");
    let output = start_and_fail(&cluster, 1, &[("data-dir", dir.display().to_string())]);
    expect_refusal(&output, PORT_IN_USE, &["127.0.0.1"]);

    // The first ones are unharmed.
    assert_eq!(cluster.statuses().len(), 3);

    cluster.kill(2).expect("killed");
    let output = start_and_fail(&cluster, 2, &[("cluster", "another".into())]);
    expect_refusal(&output, DATA_DIR_FOREIGN, &["another", "bench"]);
    let dir = cluster.data_dir(2).display().to_string();
    let output = start_and_fail(
        &cluster,
        3,
        &[("data-dir", dir), elsewhere[0].clone(), elsewhere[1].clone(), elsewhere[2].clone()],
    );
    expect_refusal(&output, DATA_DIR_FOREIGN, &["2", "3"]);
    let output = start_and_fail(&cluster, 2, &[("cores", "2".into())]);
    expect_refusal(&output, DATA_DIR_FOREIGN, &["1", "2", "core"]);

    // None of the refused starts has changed it.
    cluster.spawn(2).expect("started again");
    cluster.wait_ready(PATIENCE).expect("ready again");
}

#[test]
fn a_wiped_voter_does_not_vote() {
    let _alone = process::alone();
    let mut cluster = Cluster::start(Spec::default()).expect("a cluster");
    let stop = Arc::new(AtomicBool::new(false));
    let mut actor = Actor::new(1, cluster.endpoints(), Recorder::new(), stop);
    actor.open(60_000, PATIENCE).expect("a session");
    let held = actor.acquire("k", u32::MAX, PATIENCE).expect("granted");
    actor.release(&held, PATIENCE).expect("released");

    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let others: Vec<u64> = cluster.ids().filter(|id| *id != leader).collect();
    let (wiped, third) = (others[0], others[1]);
    cluster.kill(wiped).expect("killed");
    std::fs::remove_dir_all(cluster.data_dir(wiped)).expect("wiped");
    cluster.spawn(wiped).expect("started again");
    let deadline = Deadline::after(PATIENCE);
    while !cluster.log(wiped).contains("takes no part until it is admitted") {
        assert!(!deadline.passed(), "the wiped node does not say that it has no voice");
        std::thread::sleep(process::POLL);
    }

    // The leader and the wiped node are two of three, but the wiped one has no voice: nothing is
    // granted, and after the leader's death the third and the wiped one elect nobody.
    cluster.kill(third).expect("killed");
    let refused = actor.acquire("k", u32::MAX, Duration::from_secs(3));
    assert_eq!(refused, Err(Failed::Stopped), "granted by a majority that is none");
    cluster.kill(leader).expect("killed");
    cluster.spawn(third).expect("started again");
    let refused = actor.acquire("k2", u32::MAX, Duration::from_secs(3));
    assert_eq!(refused, Err(Failed::Stopped), "granted by a majority that is none");

    // The two that have their disks are a majority again.
    cluster.spawn(leader).expect("started again");
    actor.acquire("k3", u32::MAX, PATIENCE).expect("granted by the two old voters");
}
