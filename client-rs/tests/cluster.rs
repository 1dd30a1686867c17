//! The library and the command line against a real cluster: three `leaseholdd` processes.
//!
//! The server's binary must be there before: `LEASEHOLD_BIN_DIR`, or else the directory in which
//! this test was built. A missing binary is a failure, never a pass.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold::{AcquireError, Client, Config, HoldState, Mode, Observed, Role, ShardId};
use rustix::process::{Pid, Signal, kill_process};

const TTL: Duration = Duration::from_secs(5);

/// One cluster at a time: the machine is small.
static TURN: Mutex<()> = Mutex::new(());

fn binary(name: &str) -> PathBuf {
    let dir = std::env::var_os("LEASEHOLD_BIN_DIR").map_or_else(
        || {
            let test = std::env::current_exe().expect("a test has a path");
            test.parent().and_then(|deps| deps.parent()).expect("target/PROFILE/deps").to_owned()
        },
        PathBuf::from,
    );
    let path = dir.join(name);
    assert!(
        path.exists(),
        "{} is missing; build it first: cargo build --workspace --bins",
        path.display()
    );
    path
}

/// A running `leaseholdd dev`, stopped when dropped.
struct Cluster {
    dev: Child,
    endpoints: String,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    fn start() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut dev = Command::new(binary("leaseholdd"))
            .args(["dev", "--nodes", "3", "--port", "0"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("leaseholdd runs");
        let mut line = String::new();
        let out = dev.stdout.as_mut().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("it speaks");
        let endpoints = line.trim().strip_prefix("LEASEHOLD_ENDPOINTS=").expect("its one line");
        Self { endpoints: endpoints.to_owned(), dev, _turn: turn }
    }

    async fn client(&self) -> Client {
        let config = Config::new(&self.endpoints).expect("valid");
        Client::with_config(config).await.expect("the cluster answers")
    }

    /// Kills a node the hard way.
    fn kill(&self, client_addr: &str) {
        let children = format!("/proc/{0}/task/{0}/children", self.dev.id());
        let children = std::fs::read_to_string(children).expect("it runs");
        let (_, port) = client_addr.rsplit_once(':').expect("HOST:PORT");
        let listens = |pid: &str| listening_ports(pid).contains(&port.parse().expect("a port"));
        let pid = children.split_whitespace().find(|pid| listens(pid)).expect("a node listens");
        let pid = Pid::from_raw(pid.parse().expect("a number")).expect("not 0");
        kill_process(pid, Signal::KILL).expect("it runs");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.dev.id().cast_signed()).expect("not 0");
        // It stops its nodes itself.
        let _ = kill_process(pid, Signal::TERM);
        let _ = self.dev.wait();
    }
}

/// The TCP ports on which a process listens, from the kernel's tables.
fn listening_ports(pid: &str) -> Vec<u16> {
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .map(|entries| {
            let links = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
            links.map(|link| link.to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
    let port = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let ours = sockets.contains(&format!("socket:[{inode}]"));
        let (_, port) = local.rsplit_once(':')?;
        (*state == "0A" && ours).then(|| u16::from_str_radix(port, 16).ok()).flatten()
    };
    table.lines().skip(1).filter_map(port).collect()
}

/// The client address of the node that leads shard 0.
async fn leader(client: &Client) -> String {
    for _ in 0..200 {
        let status = client.status().await.expect("readable");
        let leads = |shard: &leasehold::ShardStatus| shard.role == Role::Leader;
        if let Some(node) =
            status.nodes.iter().find(|node| node.reachable && node.shards.iter().any(leads))
        {
            return node.client_addr.clone();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("no leader");
}

async fn until_waiting(client: &Client, key: &str, waiters: usize) {
    for _ in 0..400 {
        let read = client.get(key).await.expect("readable");
        if read.info.waiters.len() == waiters {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{key} never had {waiters} waiters");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_handed_over_with_a_higher_token() {
    let cluster = Cluster::start();
    let (one, two) = (cluster.client().await, cluster.client().await);
    let (first, second) = (one.session(TTL).expect("valid"), two.session(TTL).expect("valid"));
    let guard = first.lock("jobs/a").value("one").acquire().await.expect("free");
    let refused = second.lock("jobs/a").try_acquire().await.expect_err("held");
    assert!(matches!(&refused, AcquireError::Held(failure) if failure.token == guard.token()));
    let waiting = tokio::spawn(async move { second.lock("jobs/a").acquire().await });
    until_waiting(&one, "jobs/a", 1).await;
    let token = guard.token();
    guard.release().await.expect("held");
    let next = waiting.await.expect("no panic").expect("granted");
    assert!(next.token() > token);
    next.release().await.expect("held");
    first.close().await.expect("confirmed");
    assert!(one.get("jobs/a").await.expect("readable").info.holders.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_and_waits_survive_a_moved_leader() {
    let cluster = Cluster::start();
    let (one, two) = (cluster.client().await, cluster.client().await);
    let (first, second) = (one.session(TTL).expect("valid"), two.session(TTL).expect("valid"));
    let guard = first.lock("k").acquire().await.expect("free");
    let waiting = tokio::spawn(async move { second.lock("k").acquire().await });
    until_waiting(&one, "k", 1).await;
    for _ in 0..3 {
        let before = leader(&one).await;
        one.transfer_leader(ShardId(0), None).await.expect("moved");
        let mut moved = false;
        for _ in 0..100 {
            moved = leader(&one).await != before;
            if moved {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(moved, "another node leads");
        guard.renew().await.expect("the lease lives");
        assert_eq!(guard.state(), HoldState::Held);
        until_waiting(&one, "k", 1).await;
    }
    let token = guard.token();
    guard.release().await.expect("held");
    assert!(waiting.await.expect("no panic").expect("granted").token() > token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_leader_costs_no_hold_no_wait_and_no_session() {
    let cluster = Cluster::start();
    let (one, two) = (cluster.client().await, cluster.client().await);
    let (first, second) = (one.session(TTL).expect("valid"), two.session(TTL).expect("valid"));
    let guard = first.lock("k").acquire().await.expect("free");
    let waiting = tokio::spawn({
        let second = second.clone();
        async move { second.lock("k").acquire().await }
    });
    until_waiting(&one, "k", 1).await;
    let victim = leader(&one).await;
    cluster.kill(&victim);
    // Everything goes on: another key at once, the hold past its first TTL, the wait to its end.
    let other = second.lock("other").acquire().await.expect("granted by the next leader");
    let renewed = guard.renew().await.expect("the lease lives");
    assert!(renewed > TTL / 2);
    assert_eq!(guard.state(), HoldState::Held);
    let token = guard.token();
    guard.release().await.expect("held");
    let next = waiting.await.expect("no panic").expect("granted");
    assert!(next.token() > token);
    assert_eq!(other.state(), HoldState::Held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn modes_several_keys_and_an_election_outlive_a_killed_leader() {
    let cluster = Cluster::start();
    let (one, two) = (cluster.client().await, cluster.client().await);
    let (first, second) = (one.session(TTL).expect("valid"), two.session(TTL).expect("valid"));
    let reader = first.lock("rw").shared().acquire().await.expect("free");
    let permits = first.lock("s").permits(2, 3).acquire().await.expect("free");
    let other = second.lock("s").permits(1, 3).acquire().await.expect("one is left");
    let several = first.lock_all(["{t}a", "{t}b"]).acquire().await.expect("free");
    let election = two.election("e");
    let mut observation = election.observe().expect("accepted");
    assert_eq!(observation.next().await.expect("told"), Observed::Vacant);
    let leads = one.election("e").campaign(&first, "one").await.expect("nobody else");
    let Observed::Leader(seen) = told(&mut observation).await else { panic!("it leads") };
    assert_eq!(seen.token, leads.token());
    let mut yields = leads.yields().expect("accepted");
    let all = {
        let second = second.clone();
        tokio::spawn(async move { second.lock_all(["{t}b", "{t}a"]).acquire().await })
    };
    until_waiting(&one, "{t}a", 1).await;

    cluster.kill(&leader(&one).await);
    let token = reader.upgrade().await.expect("nobody else reads");
    assert_eq!((reader.token(), reader.mode()), (token, Mode::EXCLUSIVE));
    reader.downgrade().await.expect("held");
    assert_eq!(second.lock("rw").shared().acquire().await.expect("let in").mode(), Mode::SHARED);
    assert_eq!(permits.slots().await.expect("held"), [0, 1]);
    assert_eq!(other.slots().await.expect("held"), [2]);
    leads.proclaim("two").await.expect("leads");
    loop {
        match told(&mut observation).await {
            Observed::Leader(seen) if seen.value == b"two" => break,
            Observed::Vacant => panic!("it leads all the time"),
            _ => {}
        }
    }
    let within = Duration::from_secs(1);
    two.ask_yield("e", leads.token(), "me", "a deploy", within).await.expect("it leads");
    assert_eq!(yields.next().await.expect("told").expect("it leads").why, "a deploy");
    several.release().await.expect("held");
    let all = all.await.expect("no panic").expect("granted");
    assert_eq!(all.holds().len(), 2);
    leads.resign().await.expect("led");
    while told(&mut observation).await != Observed::Vacant {}
    first.close().await.expect("confirmed");
}

async fn told(observation: &mut leasehold::Observation) -> Observed {
    observation.next().await.expect("it goes on")
}

#[test]
fn the_command_line_locks_over_a_real_cluster() {
    let cluster = Cluster::start();
    let run = |arguments: &[&str]| {
        Command::new(binary("leasehold"))
            .env("LEASEHOLD_ENDPOINTS", &cluster.endpoints)
            .args(arguments)
            .output()
            .expect("it runs")
    };
    let first = run(&["lock", "k", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN; exit 3"]);
    assert_eq!(first.status.code(), Some(3), "{first:?}");
    let second = run(&["lock", "k", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN"]);
    let token = |output: &std::process::Output| {
        String::from_utf8_lossy(&output.stdout).trim().parse::<u64>().expect("a token")
    };
    assert!(token(&second) > token(&first));
    let status = run(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert_eq!(status["nodes"].as_array().map(Vec::len), Some(3), "{status}");
    let inside = run(&["lock", "k", "--", "true"]);
    assert_eq!(inside.status.code(), Some(0), "{inside:?}");
}
