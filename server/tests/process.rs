//! The binary from outside: exit codes, refusals, and the local cluster of `dev`.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::yield_now;

use leasehold_server::error::Exit;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

/// A process that is killed and waited for at the end of its test, whatever happens.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn leaseholdd(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leaseholdd"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(args: &[&str]) -> Output {
    leaseholdd(args).output().unwrap()
}

/// Asserts an exit code and that standard error has every part.
fn refused(args: &[&str], exit: Exit, parts: &[&str]) {
    let output = run(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(exit.code().into()), "{args:?}: {text}");
    for part in parts {
        assert!(text.contains(part), "{args:?} does not say {part}: {text}");
    }
}

/// Flags of a single node in `dir`, on ports that were free.
fn flags(dir: &Path) -> Vec<String> {
    let ports: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let names = ["client-listen", "peer-listen", "admin-listen"];
    let listens = names
        .iter()
        .zip(&ports)
        .map(|(name, port)| format!("--{name}=127.0.0.1:{}", port.local_addr().unwrap().port()));
    let dir = dir.join("data");
    let own =
        ["start".to_owned(), "--node-id=1".to_owned(), format!("--data-dir={}", dir.display())];
    own.into_iter().chain(listens).collect()
}

fn refs(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

fn is_ready(admin: &str) -> bool {
    let Ok(mut stream) = TcpStream::connect(admin) else { return false };
    let asked = stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let mut reply = String::new();
    asked.is_ok() && stream.read_to_string(&mut reply).is_ok() && reply.starts_with("HTTP/1.1 200")
}

fn start(flags: &[String]) -> Guard {
    let mut process = Guard(leaseholdd(&refs(flags)).spawn().unwrap());
    let admin = flags.iter().find_map(|flag| flag.strip_prefix("--admin-listen=")).unwrap();
    while !is_ready(admin) {
        let ended = process.0.try_wait().unwrap();
        assert!(ended.is_none(), "ended before it was ready: {ended:?}");
        yield_now();
    }
    process
}

fn stop(mut process: Guard) {
    kill_process(Pid::from_child(&process.0), Signal::TERM).unwrap();
    assert_eq!(process.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_wrong_configuration_exits_with_2_and_names_everything() {
    let parts = ["heartbeat-ms: 50 must be at most a third of election-min-ms (100)", "2 problem"];
    let own = ["start", "--node-id", "1", "--data-dir", "d"];
    let timings = ["--heartbeat-ms", "50", "--election-min-ms", "100", "--election-max-ms", "90"];
    refused(&[&own[..], &timings[..]].concat(), Exit::Usage, &parts);
    refused(&["start", "--shrads", "1"], Exit::Usage, &["--shrads"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    fs::write(&file, "node-id = 1\ndata-dir = \"d\"\nshrads = 1\n").unwrap();
    let file = file.to_str().unwrap();
    refused(&["start", "--config", file], Exit::Usage, &["shrads: no such key", file]);
    refused(&["check-config", "--config", file], Exit::Usage, &["shrads: no such key"]);
    fs::write(file, "node-id = 1\ndata-dir = \"d\"\n").unwrap();
    assert_eq!(run(&["check-config", "--config", file]).status.code(), Some(0));
}

#[test]
fn a_second_server_on_a_directory_is_refused_with_the_pid_and_a_killed_one_blocks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let first_flags = flags(dir.path());
    for _ in 0..3 {
        let first = start(&first_flags);
        let pid = format!("process {}", first.0.id());
        let other_ports = flags(dir.path());
        refused(&refs(&other_ports), Exit::DataDirInUse, &[&pid, "data"]);
        // Killed by the guard.
        drop(first);
    }
    stop(start(&first_flags));
}

#[test]
fn a_port_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let own = flags(dir.path());
    let admin = own.iter().find_map(|flag| flag.strip_prefix("--admin-listen=")).unwrap();
    let _taken = TcpListener::bind(admin).unwrap();
    refused(&refs(&own), Exit::PortInUse, &["admin-listen", admin, "another process"]);
}

#[test]
fn a_foreign_directory_is_refused_with_both_values() {
    let dir = tempfile::tempdir().unwrap();
    let own = flags(dir.path());
    stop(start(&own));
    let mut other = own.clone();
    other.push("--cluster=other".to_owned());
    refused(&refs(&other), Exit::DataDirForeign, &["cluster leasehold", "cluster other"]);
    let mut other = own.clone();
    other.push("--cores=2".to_owned());
    refused(&refs(&other), Exit::DataDirForeign, &["a core count of 1", "a core count of 2"]);
    let mut other = own.clone();
    other[1] = "--node-id=2".to_owned();
    refused(&refs(&other), Exit::DataDirForeign, &["node-id 1", "node-id 2"]);
    stop(start(&own));
}

struct Dev {
    process: Guard,
    endpoints: String,
    dir: tempfile::TempDir,
}

fn dev() -> Dev {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("cluster");
    let args = ["dev", "--port", "0", "--nodes", "3", "--dir", place.to_str().unwrap()];
    let mut process = Guard(leaseholdd(&args).spawn().unwrap());
    let mut endpoints = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut endpoints).unwrap();
    Dev { process, endpoints, dir }
}

/// Returns once no process uses any node's data directory.
fn wait_until_free(dir: &tempfile::TempDir) {
    for node in 1..=3 {
        let dir = File::open(dir.path().join(format!("cluster/node-{node}"))).unwrap();
        flock(&dir, FlockOperation::LockExclusive).unwrap();
    }
}

#[test]
fn dev_prints_endpoints_and_stops_its_nodes() {
    let Dev { mut process, endpoints, dir } = dev();
    let mut stderr = process.0.stderr.take().unwrap();
    let list = endpoints.strip_prefix("LEASEHOLD_ENDPOINTS=").unwrap().trim_end();
    assert_eq!(list.split(',').count(), 3, "{list}");
    stop(process);
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    assert!(said.contains("3 nodes are ready") && !said.contains("is killed"), "{said}");
    wait_until_free(&dir);
    let log = fs::read_to_string(dir.path().join("cluster/node-3.log")).unwrap();
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn nodes_of_a_killed_dev_end_with_it() {
    let Dev { mut process, dir, .. } = dev();
    process.0.kill().unwrap();
    wait_until_free(&dir);
}
