//! Backup under load, restore into another number of shards, forced recovery: the first new token
//! of every key is above the last old one, nothing is granted too early, nothing old lives on.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use leasehold::{Client, ErrorCode, Guard, Session};
use leasehold_bench::clock::now_ns;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_protocol::backup::{BackupError, BackupHeader, BackupReader, BackupWriter, Found};
use serde_json::{Value, json};

const KEYS: u64 = 40;
const TTL: Duration = Duration::from_mins(1);
/// What is left of the waiting time of 600.6 s.
const SILENT_FOR: &str = "598s";
const WAIT_LEFT: Duration = Duration::from_millis(2_600);

const DATA_DIR_FOREIGN: i32 = 5;
const DATA_DIR_IN_USE: i32 = 4;
const CLOCK: i32 = 10;
const BACKUP_UNUSABLE: i32 = 15;
pub(super) const USAGE: i32 = 2;
// Of `leasehold`.
pub(super) const FAILED: i32 = 125;

fn key(index: u64) -> String {
    format!("job/{}", index % KEYS)
}

/// Runs a test while no other one starts processes.
pub(super) fn alone(test: impl Future<Output = ()>) {
    let _alone = process::alone();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(test);
}

/// Runs a program to its end.
pub(super) fn output(mut command: Command) -> Output {
    command.output().expect("it runs")
}

pub(super) fn expect(output: &Output, code: i32, words: &[&str]) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
    text
}

fn cli(cluster: &Cluster, args: &[&str]) -> Output {
    let mut command = Command::new(process::binary("leasehold").expect("the command"));
    command.arg("--endpoints").arg(cluster.endpoint_list()).args(args);
    output(command)
}

/// What `leasehold pipe` answers to these requests, in order of their ids.
fn pipe(cluster: &Cluster, requests: &[Value]) -> Vec<Value> {
    let mut command = Command::new(process::binary("leasehold").expect("the command"));
    command.arg("--endpoints").arg(cluster.endpoint_list()).arg("pipe");
    ask(command, requests)
}

/// What a `leasehold pipe` that is about to start answers.
pub(super) fn ask(mut command: Command, requests: &[Value]) -> Vec<Value> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
    let mut input = child.stdin.take().expect("piped");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut answers = Vec::new();
    for request in requests {
        writeln!(input, "{request}").expect("it listens");
        answers.extend(lines.by_ref().map_while(Result::ok).find_map(|line| {
            let line: Value = serde_json::from_str(&line).expect("JSON");
            (line["id"] == request["id"]).then_some(line)
        }));
    }
    drop(input);
    assert!(child.wait().expect("it ends").success());
    answers
}

/// Makes a second backup, with the one waiter in it, which takes no other's place.
fn back_up_by_pipe(cluster: &Cluster, place: &str) {
    let request = |id: u32, op: &str| json!({ "id": id, "op": op, "place": place });
    let requests = [(1, "backup_create"), (2, "backup_verify"), (3, "backup_create")];
    let answers = pipe(cluster, &requests.map(|(id, op)| request(id, op)));
    assert_eq!(answers[0]["ok"], true, "{answers:?}");
    let queued: u64 = (0..2).filter_map(|at| answers[1]["shards"][at]["waiters"].as_u64()).sum();
    assert_eq!((queued, &answers[2]["error"]), (1, &json!("usage")), "{answers:?}");
}

/// `restore` or `recover` with the arguments of a node's start.
pub(super) fn restoring(cluster: &Cluster, node: u64, verb: &str, further: &[&str]) -> Output {
    let start = cluster.command(node).expect("a command");
    let mut command = Command::new(start.get_program());
    command.arg(verb).args(further).args(start.get_args().skip(1));
    output(command)
}

pub(super) fn session(client: &Client) -> Session {
    client.session(TTL).expect("a session")
}

async fn take(session: &Session, key: &str) -> Guard {
    let wait = PATIENCE;
    session.lock(key).wait(wait).acquire().await.unwrap_or_else(|error| panic!("{key}: {error}"))
}

/// Takes and gives back `grants` times over all keys; the highest token of all.
async fn work(session: &Session, grants: u64) -> u64 {
    let mut highest = 0;
    for index in 0..grants {
        let guard = take(session, &key(index)).await;
        highest = highest.max(guard.token().0);
        guard.release().await.expect("released");
    }
    highest
}

/// A cluster that is to replace another: everything but its processes.
pub(super) fn replacement(shards: u32) -> Cluster {
    let spec = Spec { name: "restored".into(), shards, ..Spec::default() };
    Cluster::prepare(spec).expect("a directory")
}

fn start(cluster: &mut Cluster) {
    for id in cluster.ids() {
        cluster.spawn(id).expect("started");
    }
    cluster.wait_ready(PATIENCE).expect("ready");
}

/// The first token of every key is above all old ones, and was not granted before its time.
async fn check_new_tokens(cluster: &Cluster, began: u64, old_highest: u64) {
    let client = Client::connect(&cluster.endpoint_list()).await.expect("connected");
    let session = session(&client);
    let refused = session.lock("job/0").try_acquire().await;
    let elapsed = || Duration::from_nanos(now_ns() - began);
    if elapsed() < WAIT_LEFT {
        assert!(refused.is_err(), "granted after {:?}", elapsed());
    }
    drop(refused);
    for index in 0..KEYS {
        let guard = take(&session, &key(index)).await;
        assert!(elapsed() >= WAIT_LEFT, "granted after {:?}", elapsed());
        assert!(guard.token().0 > old_highest, "{}: {} again", guard.key(), guard.token());
        guard.release().await.expect("released");
    }
    session.close().await.expect("closed");
    let leases = client.sessions(10).await.expect("a listing");
    assert!(leases.is_empty(), "old sessions live on: {leases:?}");
}

/// Changes one bit in the middle of a file.
#[cfg(feature = "s3")]
pub(super) fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).expect("the file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(path, bytes).expect("written");
}

fn damaged(backup: &Path, change: impl Fn(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(backup).expect("the backup");
    change(&mut bytes);
    let path = backup.with_extension("damaged");
    std::fs::write(&path, bytes).expect("written");
    path
}

/// The same backup, as a node whose clock is a day ahead would have made it.
fn of_tomorrow(backup: &Path) -> PathBuf {
    let mut bytes = Vec::new();
    let mut writer = None;
    let mut reader = BackupReader::new();
    let read = reader.feed::<BackupError>(&std::fs::read(backup).expect("the backup"), |found| {
        if let Found::Header(header) = found {
            let wall_ms = header.wall_ms + 24 * 60 * 60 * 1_000;
            let (begun, head) = BackupWriter::new(&BackupHeader { wall_ms, ..header });
            writer = Some(begun);
            bytes.extend(head);
            return Ok(());
        }
        let writer: &mut BackupWriter = writer.as_mut().expect("the header is first");
        bytes.extend(match found {
            Found::Shard(about) => writer.shard(&about),
            Found::Piece(piece) => writer.piece(piece),
            Found::Header(_) | Found::ShardEnd => writer.shard_end(),
        });
        Ok(())
    });
    read.expect("sound");
    bytes.extend(writer.expect("it has a header").finish());
    let path = backup.with_extension("tomorrow");
    std::fs::write(&path, bytes).expect("written");
    path
}

#[test]
fn a_backup_under_load_restored_elsewhere_grants_above_every_old_token() {
    alone(backup_and_restore());
}

async fn backup_and_restore() {
    let mut old = Cluster::start(Spec { shards: 2, ..Spec::default() }).expect("a cluster");
    let client = Client::connect(&old.endpoint_list()).await.expect("connected");
    let session = session(&client);
    work(&session, KEYS).await;

    // Live sessions, holds and a queue are in the backup; commands go on while it is made.
    let holder = take(&session, "held").await;
    let other = client.session(TTL).expect("a session");
    let waiter = other.lock("held").wait(PATIENCE * 10).begin().expect("it waits");
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let load = {
        let (stop, done, client) = (Arc::clone(&stop), Arc::clone(&done), client.clone());
        tokio::spawn(async move {
            let session = client.session(TTL).expect("a session");
            while !stop.load(Ordering::Relaxed) {
                work(&session, 10).await;
                done.fetch_add(10, Ordering::Relaxed);
            }
        })
    };
    while done.load(Ordering::Relaxed) < 20 {
        tokio::time::sleep(process::POLL).await;
    }
    let backup = old.path().join("backup");
    let before = done.load(Ordering::Relaxed);
    let name = backup.to_str().expect("a path");
    expect(&cli(&old, &["backup", "create", name]), 0, &["written", "shard 1", "1 waiter(s)"]);
    expect(&cli(&old, &["backup", "create", name]), USAGE, &["exists already"]);
    expect(&cli(&old, &["backup", "verify", name]), 0, &["sound", "1 waiter(s)"]);
    back_up_by_pipe(&old, &format!("{name}-by-pipe"));
    while done.load(Ordering::Relaxed) < before + 10 {
        tokio::time::sleep(process::POLL).await;
    }
    stop.store(true, Ordering::Relaxed);
    load.await.expect("no fault under load");

    // What the old cluster goes on to grant is not in the backup.
    let old_highest = work(&session, 1_000).await;
    let old_id = old.status_of(1).expect("a status").cluster;
    old.kill_all().expect("killed");
    drop((holder, waiter));

    let mut new = replacement(3);
    let middle = std::fs::metadata(&backup).expect("the backup").len() as usize / 2;
    let refuse = |word: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = damaged(&backup, change);
        let path = path.to_str().expect("a path");
        expect(&restoring(&new, 1, "restore", &["--from", path]), BACKUP_UNUSABLE, &[word]);
        let mut verify = Command::new(process::binary("leasehold").expect("the command"));
        verify.args(["backup", "verify", path]);
        expect(&output(verify), FAILED, &[word]);
        assert!(!new.data_dir(1).exists(), "nothing is made of a damaged backup");
    };
    refuse("is damaged", &|bytes| bytes[middle] ^= 4);
    refuse("cut off", &|bytes| bytes.truncate(middle));
    refuse("not a backup", &|bytes| bytes[0] = 0);
    let tomorrow = of_tomorrow(&backup);
    let from = ["--from", tomorrow.to_str().expect("a path")];
    expect(&restoring(&new, 1, "restore", &from), CLOCK, &["is behind that of the old cluster"]);
    assert!(!new.data_dir(1).exists(), "nothing is made while the clock is behind");
    let from = ["--from", name, "--old-cluster-silent-for", SILENT_FOR];
    expect(&restoring(&new, 2, "restore", &from), USAGE, &["not the lowest"]);
    let words = ["2 shard(s)", "become 3", "1 waiter(s)", "no key is granted for 3 s"];
    expect(&restoring(&new, 1, "restore", &from), 0, &words);
    expect(&restoring(&new, 1, "restore", &from), DATA_DIR_FOREIGN, &["is not empty"]);

    let began = now_ns();
    start(&mut new);
    let addr = new.addresses(1).client;
    let stranger =
        Wire::connect_to(addr, old_id, PATIENCE).map(|_| ()).expect_err("another cluster");
    assert!(stranger.to_string().contains(ErrorCode::WRONG_CLUSTER.name()), "{stranger}");
    assert_ne!(new.status_of(1).expect("a status").cluster, old_id);
    check_new_tokens(&new, began, old_highest).await;
}

#[test]
fn one_surviving_disk_makes_a_new_cluster_by_force_and_not_otherwise() {
    alone(forced_recovery());
}

async fn forced_recovery() {
    let mut old = Cluster::start(Spec { shards: 2, ..Spec::default() }).expect("a cluster");
    let client = Client::connect(&old.endpoint_list()).await.expect("connected");
    let session = session(&client);
    let old_highest = work(&session, 3 * KEYS).await;
    let _held = take(&session, "held").await;

    let mut new = replacement(1);
    let survivor = old.data_dir(3);
    let survivor = survivor.to_str().expect("a path");
    let from = ["--from-data", survivor, "--old-cluster-silent-for", SILENT_FOR];
    let forced = [&["--force-from-one-node"], &from[..]].concat();
    expect(&restoring(&new, 1, "recover", &forced), DATA_DIR_IN_USE, &["is in use"]);
    old.kill_all().expect("killed");
    expect(&restoring(&new, 1, "recover", &from), USAGE, &["--force-from-one-node"]);
    let words = ["FORCED RECOVERY", "never come back", "become 1", "1 hold(s)"];
    expect(&restoring(&new, 1, "recover", &forced), 0, &words);
    let began = now_ns();
    start(&mut new);
    check_new_tokens(&new, began, old_highest).await;
}
