//! The command line as a program: output, exit codes, and the processes of `lock`.
#![cfg(all(unix, feature = "cli"))]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use self::support::server::TestServer;

const PATIENCE: Duration = Duration::from_secs(20);

fn program(server: &TestServer) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    command.env("LEASEHOLD_ENDPOINTS", server.endpoint());
    command
}

fn run(server: &TestServer, arguments: &[&str]) -> Output {
    program(server).args(arguments).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Polls until `done`; fails after a time that only a fault exceeds.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let step = Duration::from_millis(5);
    for _ in 0..PATIENCE.as_millis() / step.as_millis() {
        if done() {
            return;
        }
        std::thread::sleep(step);
    }
    panic!("never came: {what}");
}

/// The kernel's letter for what a process does; `None` if there is none.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

fn is_running(pid: i32) -> bool {
    // A zombie has ended; only its parent has not noticed.
    !matches!(state(pid), None | Some('Z'))
}

/// A script that writes its process id, and that of a child in its group, to a file.
fn announcing(dir: &tempfile::TempDir, then: &str) -> (String, std::path::PathBuf) {
    let file = dir.path().join("pids");
    let script =
        format!("sleep 1000 & echo $$ $! > {0}.tmp; mv {0}.tmp {0}; {then}", file.display());
    (script, file)
}

fn pids(file: &std::path::Path) -> Vec<i32> {
    eventually("the command started", || file.exists());
    let line = std::fs::read_to_string(file).expect("just seen");
    line.split_whitespace().map(|pid| pid.parse().expect("a number")).collect()
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().cast_signed()).expect("not 0");
    kill_process(pid, signal).expect("it runs");
}

#[test]
fn lock_runs_the_command_with_key_and_token_and_passes_its_code_on() {
    let server = TestServer::start();
    let script = "echo \"$LEASEHOLD_KEY $LEASEHOLD_TOKEN\"; exit 7";
    let output = run(&server, &["lock", "jobs/a", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(text(&output.stdout), "jobs/a 1001\n");
    assert_eq!(text(&output.stderr), "", "quiet when all is well");
    assert!(server.tokens("jobs/a").is_empty());
    assert_eq!(server.leases(), 0, "the session was closed");
    let output = run(&server, &["lock", "jobs/a", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN"]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "1002\n".to_owned()));
}

#[test]
fn the_commands_arguments_are_not_touched() {
    let server = TestServer::start();
    let arguments = ["-v", "--ttl", "3", "--", "x", "a b", "\"q\"", "two\nlines", "", "--help"];
    let mut command = program(&server);
    command.args(["lock", "k", "--ttl", "5s", "--", "printf", "%s|"]).args(arguments);
    let output = command.output().expect("it runs");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(text(&output.stdout), arguments.map(|argument| format!("{argument}|")).concat());
}

#[test]
fn the_command_inherits_standard_streams_and_nothing_else() {
    let server = TestServer::start();
    let script = "cat; for fd in /proc/self/fd/*; do readlink $fd; done";
    let shown = |mut command: Command| {
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().expect("it runs");
        child.stdin.take().expect("piped").write_all(b"from outside\n").expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        text(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let mut locked = program(&server);
    locked.args(["lock", "k", "--", "sh"]);
    let (locked, plain) = (shown(locked), shown(Command::new("sh")));
    assert_eq!(locked[0], "from outside");
    assert_eq!(locked.len(), plain.len(), "{locked:?} {plain:?}");
    assert!(locked.iter().all(|link| !link.contains("socket:")), "{locked:?}");
    // Beyond the first line and the three streams, whatever the test itself was given.
    assert_eq!(locked[4..], plain[4..]);
}

#[test]
fn a_lock_that_is_held_is_not_acquired() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let mut holder =
        program(&server).args(["lock", "k", "--", "sh", "-c", &script]).spawn().expect("it runs");
    pids(&file);
    let output = run(&server, &["lock", "k", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    assert!(text(&output.stderr).contains("held"), "{output:?}");
    let output = run(&server, &["--json", "lock", "k", "--wait", "50ms", "--", "true"]);
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    let error: Value = serde_json::from_slice(&output.stderr).expect("JSON");
    assert_eq!(error["error"], "timed_out");
    signal(&holder, Signal::TERM);
    assert_eq!(holder.wait().expect("it ends").code(), Some(143), "128 + SIGTERM");
    eventually("the lock is free", || server.tokens("k").is_empty());
}

#[test]
fn signals_reach_the_command_and_its_answer_counts() {
    let server = TestServer::start();
    for (sent, code) in [(Signal::INT, 31), (Signal::TERM, 32), (Signal::QUIT, 33)] {
        let dir = tempfile::tempdir().expect("a directory");
        let traps = "trap 'exit 31' INT; trap 'exit 32' TERM; trap 'exit 33' QUIT;";
        let (script, file) = announcing(&dir, "wait; wait");
        let script = format!("{traps} {script}");
        let mut child =
            program(&server).args(["lock", "k", "--", "sh", "-c", &script]).spawn().unwrap();
        let pids = pids(&file);
        signal(&child, sent);
        assert_eq!(child.wait().expect("it ends").code(), Some(code));
        assert!(pids.iter().all(|pid| !is_running(*pid)), "its group is gone: {pids:?}");
        assert!(server.tokens("k").is_empty());
    }
}

#[test]
fn a_command_that_does_not_exist_has_its_own_code() {
    let server = TestServer::start();
    let output = run(&server, &["lock", "k", "--", "/no/such/program"]);
    assert_eq!(output.status.code(), Some(127), "{output:?}");
    assert!(text(&output.stderr).contains("/no/such/program"), "{output:?}");
    let output = run(&server, &["lock", "k", "--", "/etc/passwd"]);
    assert_eq!(output.status.code(), Some(126), "{output:?}");
    assert!(server.tokens("k").is_empty());
}

#[test]
fn what_the_command_leaves_behind_is_ended_before_the_lock_is_free() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "exit 0");
    let output = program(&server)
        .args(["lock", "k", "--", "sh", "-c", &script])
        .stdout(Stdio::null())
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(pids(&file).iter().all(|pid| !is_running(*pid)));
    assert!(server.tokens("k").is_empty());
}

#[test]
fn a_lost_lock_ends_the_whole_group_while_the_cluster_still_counts_it_as_held() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    // TERM is ignored by both: only KILL at the end of validity helps.
    let (script, file) = announcing(&dir, "while :; do sleep 1; done");
    let script = format!("trap '' TERM; {script}");
    let child = program(&server)
        .args(["lock", "k", "--ttl", "2s", "--grace", "500ms", "--", "sh", "-c", &script])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let pids = pids(&file);
    let token = server.tokens("k");
    server.mute(true);
    eventually("the group is gone", || pids.iter().all(|pid| !is_running(*pid)));
    assert_eq!(server.tokens("k"), token, "nobody else could have had it yet");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(121), "{output:?}");
    let said = text(&output.stderr);
    assert!(said.contains("TERM") && said.contains("KILL"), "{said}");
    assert!(said.contains("at risk ("), "{said}");
}

#[test]
fn a_command_that_obeys_term_is_not_killed() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let done = dir.path().join("done");
    let (script, file) = announcing(&dir, "wait; wait");
    let script = format!("trap 'echo tidy > {}; exit 0' TERM; {script}", done.display());
    let child = program(&server)
        .args(["lock", "k", "--ttl", "2s", "--grace", "900ms", "--", "sh", "-c", &script])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    pids(&file);
    server.mute(true);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(121), "lost, whatever the command's code: {output:?}");
    assert_eq!(std::fs::read_to_string(done).expect("it tidied up"), "tidy\n");
    assert!(!text(&output.stderr).contains("KILL"), "{output:?}");
}

#[test]
fn a_forced_release_at_once_kills_the_command_at_once() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let child = program(&server)
        .args(["--json", "lock", "k", "--ttl", "3s", "--", "sh", "-c", &script])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let pids = pids(&file);
    let output = run(&server, &["force-release", "k", "--reason", "test", "--now"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(text(&output.stdout).contains("held by lease"), "shown first: {output:?}");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(121), "{output:?}");
    assert!(text(&output.stderr).contains(r#"{"cause":"forced","event":"lost"}"#), "{output:?}");
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn a_command_that_the_keeper_killed_was_lost_whenever_its_supervisor_learns_of_it() {
    let server = TestServer::start();
    for round in 0..4 {
        let dir = tempfile::tempdir().expect("a directory");
        let (script, file) = announcing(&dir, "wait");
        let key = format!("k{round}");
        let child = program(&server)
            .args(["lock", &key, "--", "sh", "-c", &script])
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        let pids = pids(&file);
        signal(&child, Signal::STOP);
        let output = run(&server, &["force-release", &key, "--reason", "test", "--now"]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        eventually("the keeper has killed it", || pids.iter().all(|pid| !is_running(*pid)));
        signal(&child, Signal::CONT);
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(121), "{output:?}");
        assert!(text(&output.stderr).contains("the lock was lost (forced)"), "{output:?}");
    }
}

#[test]
fn killing_the_supervisor_kills_the_group_and_frees_the_lock() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let mut child = program(&server)
        .args(["lock", "k", "--ttl", "600s", "--grace", "1s", "--", "sh", "-c", &script])
        .spawn()
        .expect("it runs");
    let pids = pids(&file);
    child.kill().expect("it runs");
    child.wait().expect("it ended");
    eventually("the group is gone", || pids.iter().all(|pid| !is_running(*pid)));
    eventually("the lock is free long before its TTL", || server.tokens("k").is_empty());
    eventually("the session is closed", || server.leases() == 0);
}

#[test]
fn killing_the_keeper_ends_the_command_in_time() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let child = program(&server)
        .args(["lock", "k", "--ttl", "2s", "--", "sh", "-c", &script])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let pids = pids(&file);
    let keeper = keeper_of(child.id());
    kill_process(Pid::from_raw(keeper).expect("not 0"), Signal::KILL).expect("it runs");
    eventually("the group is gone", || pids.iter().all(|pid| !is_running(*pid)));
    assert_eq!(server.tokens("k").len(), 1, "before the cluster passes it on");
    assert_eq!(child.wait_with_output().expect("it ends").status.code(), Some(121));
}

/// The child of a supervisor that is not the command.
fn keeper_of(supervisor: u32) -> i32 {
    let tasks = format!("/proc/{supervisor}/task/{supervisor}/children");
    let children = std::fs::read_to_string(tasks).expect("it runs");
    let is_keeper = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("__keeper")
    };
    children
        .split_whitespace()
        .map(|pid| pid.parse().expect("a number"))
        .find(is_keeper)
        .expect("one")
}

#[test]
fn a_stopped_keeper_does_not_keep_the_command_alive() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let child = program(&server)
        .args(["lock", "k", "--ttl", "2s", "--", "sh", "-c", &script])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let pids = pids(&file);
    let keeper = Pid::from_raw(keeper_of(child.id())).expect("not 0");
    kill_process(keeper, Signal::STOP).expect("it runs");
    eventually("the group is gone", || pids.iter().all(|pid| !is_running(*pid)));
    assert_eq!(server.tokens("k").len(), 1, "before the cluster passes it on");
    assert_eq!(child.wait_with_output().expect("it ends").status.code(), Some(121));
    assert!(test_kill_process(keeper).is_err(), "nothing is left behind");
}

#[test]
fn a_wait_is_given_up_by_a_signal() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let holder =
        program(&server).args(["lock", "k", "--", "sh", "-c", &script]).spawn().expect("it runs");
    pids(&file);
    let mut waiter = program(&server).args(["lock", "k", "--", "true"]).spawn().expect("it runs");
    eventually("it waits", || server.waiters("k") == 1);
    signal(&waiter, Signal::INT);
    assert_eq!(waiter.wait().expect("it ends").code(), Some(130));
    eventually("it left the queue", || server.waiters("k") == 0);
    signal(&holder, Signal::TERM);
    let _ = holder.wait_with_output();
}

#[test]
fn reads_have_the_promised_fields() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &["--label", "me"]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "a/1", "value": "v"}));
    let token = pipe.reply(1)["token"].clone();
    let mut other = Pipe::start(&server, &[]);
    other.send(&json!({"id": 1, "op": "acquire", "key": "a/1"}));
    eventually("it waits", || server.waiters("a/1") == 1);

    let key = json(&run(&server, &["get", "a/1", "--json"]));
    assert_eq!((&key["key"], &key["shard"]), (&json!("a/1"), &json!(0)));
    assert!(key["revision"].is_u64());
    let holder = &key["holders"][0];
    assert_eq!(holder["token"], token);
    assert_eq!((&holder["value"], &holder["label"]), (&json!("v"), &json!("me")));
    assert_eq!(holder["mode"], "exclusive");
    for field in ["lease", "since_ms", "remaining_ms"] {
        assert!(holder[field].is_u64(), "{field}: {holder}");
    }
    let waiter = &key["waiters"][0];
    assert!(waiter["lease"].is_u64());
    assert_eq!((&waiter["mode"], &waiter["position"]), (&json!("exclusive"), &json!(0)));

    let list = json(&run(&server, &["ls", "a/", "--json"]));
    assert_eq!((list.as_array().expect("a list").len(), &list[0]["key"]), (1, &json!("a/1")));
    let sessions = json(&run(&server, &["--json", "sessions"]));
    assert_eq!(sessions.as_array().expect("a list").len(), 2);
    assert_eq!((&sessions[0]["label"], &sessions[0]["holds"]), (&json!("me"), &json!(1)));

    let status = json(&run(&server, &["status", "--json"]));
    assert_eq!(status["shards"], 1);
    assert_eq!(status["cluster_id"].as_str().expect("text").len(), 32);
    let node = &status["nodes"][0];
    assert_eq!((&node["id"], &node["reachable"]), (&json!(1), &json!(true)));
    assert!(node["client_addr"].is_string() && node["version"].is_string());
    let shard = &node["shards"][0];
    assert_eq!((&shard["shard"], &shard["role"]), (&json!(0), &json!("leader")));
    assert!(shard["term"].is_u64() && shard["applied_revision"].is_u64());
    assert_eq!(shard["digest"].as_str().expect("text").len(), 16);
    assert!(json(&run(&server, &["ping", "--json"]))["rtt_us"].is_u64());
    let moved = run(&server, &["transfer-leader", "--to", "1", "--json"]);
    assert_eq!(json(&moved)["ok"], true);

    assert_eq!((&key["stale"], &key["age_ms"]), (&json!(false), &Value::Null));
    for verb in [["get", "a/1"], ["ls", "a/1"]] {
        let stale = run(&server, &[&verb[..], &["--stale"]].concat());
        assert!(text(&stale.stdout).contains("stale by 40 ms at most"), "{stale:?}");
        let stale = json(&run(&server, &[&verb[..], &["--stale", "--json"]].concat()));
        let stale = stale.get(0).unwrap_or(&stale);
        assert_eq!((&stale["stale"], &stale["age_ms"]), (&json!(true), &json!(40)));
    }
    pipe.send(&json!({"id": 2, "op": "get", "key": "a/1", "stale": true}));
    pipe.send(&json!({"id": 3, "op": "ls", "stale": true}));
    let (one, all) = (pipe.reply(2), pipe.reply(3));
    assert_eq!((&one["age_ms"], &all["keys"][0]["age_ms"]), (&json!(40), &json!(40)));

    let shown = text(&run(&server, &["get", "a/1"]).stdout);
    assert!(shown.contains("held by") && shown.contains("waits"), "{shown}");
    pipe.end();
    other.end();
}

#[test]
fn bad_input_is_refused_with_its_name() {
    let server = TestServer::start();
    let long = "x".repeat(513);
    for (arguments, named) in [
        (vec!["lock", "k", "--ttl", "15", "--", "true"], "15s"),
        (vec!["lock", "k", "--ttl", "500ms", "--", "true"], "1s to 600s"),
        (vec!["lock", "k", "--ttl", "15000000000s", "--", "true"], "1s to 600s"),
        (vec!["lock", "k", "--tll", "15s", "--", "true"], "--tll"),
        (vec!["lock", "k", "--ttl", "5s", "--grace", "4s", "--", "true"], "--grace"),
        (vec!["lock", "k"], "CMD"),
        (vec!["lock", "", "--", "true"], "key_empty"),
        (vec!["get", ""], "key_empty"),
        (vec!["get", &long], "key_too_long"),
        (vec!["--endpoints", "nowhere", "get", "k"], "nowhere"),
        (vec!["transfer-leader", "--shard", "9"], "--shard 9"),
        (vec!["steal", "k"], "steal"),
        (vec!["lock", "k", "--permits", "1", "--", "true"], "--of"),
        (vec!["lock", "k", "--permits", "3", "--of", "2", "--", "true"], "3 of 2"),
        (vec!["lock", "k", "--lock-delay", "61s", "--", "true"], "61000"),
    ] {
        let output = run(&server, &arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(text(&output.stderr).contains(named), "{arguments:?}: {output:?}");
    }
    let output = run(&server, &["get", "", "--json"]);
    let error = json(&output);
    assert_eq!((&error["ok"], &error["error"]), (&json!(false), &json!("key_empty")));
    assert_eq!(error["class"], "not_applied");
}

#[test]
fn an_absent_cluster_and_a_refusal_have_codes_of_their_own() {
    let server = TestServer::start();
    let away = ["--endpoints", "127.0.0.1:1", "--timeout", "200ms"];
    for verb in [vec!["ping"], vec!["lock", "k", "--", "true"], vec!["pipe"]] {
        let arguments: Vec<&str> = away.iter().copied().chain(verb).collect();
        let output = run(&server, &arguments);
        assert_eq!(output.status.code(), Some(122), "{arguments:?}: {output:?}");
        assert!(text(&output.stderr).contains("unreachable"), "{output:?}");
    }
    let output = run(&server, &["force-release", "k", "--reason", "test"]);
    assert_eq!(output.status.code(), Some(123), "nobody holds it: {output:?}");
    let output = run(&server, &["force-release", "k", "--reason", "test", "--token", "5"]);
    assert_eq!(output.status.code(), Some(123), "{output:?}");
    assert!(text(&output.stderr).contains("not_owner"), "{output:?}");
}

#[test]
fn help_lists_the_exit_codes_and_hides_the_inner_verbs() {
    let server = TestServer::start();
    let help = text(&run(&server, &["--help"]).stdout);
    for code in ["120", "121", "122", "123", "124", "125", "126", "127", "128+n"] {
        assert!(help.contains(code), "{code}: {help}");
    }
    assert!(!help.contains("__"), "{help}");
}

/// A running `pipe`.
struct Pipe {
    child: Child,
    input: Option<ChildStdin>,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    kept: Vec<Value>,
}

impl Pipe {
    fn start(server: &TestServer, arguments: &[&str]) -> Self {
        let mut child = program(server)
            .arg("pipe")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let input = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut pipe = Self { child, input, lines, kept: Vec::new() };
        assert_eq!(pipe.line()["event"], "ready");
        pipe
    }

    fn send(&mut self, request: &Value) {
        self.send_raw(&request.to_string());
    }

    fn send_raw(&mut self, line: &str) {
        let input = self.input.as_mut().expect("not ended");
        writeln!(input, "{line}").expect("it reads");
    }

    fn line(&mut self) -> Value {
        let line = self.lines.next().expect("more lines").expect("readable");
        serde_json::from_str(&line).expect("JSON")
    }

    /// The next line that fits; others are kept.
    fn until(&mut self, fits: impl Fn(&Value) -> bool) -> Value {
        if let Some(index) = self.kept.iter().position(&fits) {
            return self.kept.remove(index);
        }
        loop {
            let line = self.line();
            if fits(&line) {
                return line;
            }
            self.kept.push(line);
        }
    }

    fn reply(&mut self, id: u64) -> Value {
        self.until(|line| line["id"] == id)
    }

    fn event(&mut self, event: &str) -> Value {
        self.until(|line| line["event"] == event)
    }

    /// Closes its input; it must end by itself with 0.
    fn end(mut self) {
        self.input = None;
        assert_eq!(self.child.wait().expect("it ends").code(), Some(0));
    }
}

#[test]
fn pipe_serves_many_locks_and_a_wait_holds_nothing_up() {
    let server = TestServer::start();
    let mut holder = Pipe::start(&server, &[]);
    holder.send(&json!({"id": 1, "op": "acquire", "key": "a", "wait_ms": 0}));
    let granted = holder.reply(1);
    assert_eq!((&granted["ok"], &granted["key"]), (&json!(true), &json!("a")));
    assert!(granted["remaining_ms"].as_u64().expect("a number") > 5_000);

    let mut pipe = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "a"}));
    eventually("it waits", || server.waiters("a") == 1);
    pipe.send(&json!({"id": 2, "op": "acquire", "key": "b", "value": "x"}));
    let second = pipe.reply(2);
    pipe.send(&json!({"id": 3, "op": "get", "key": "b"}));
    let read = pipe.reply(3);
    assert_eq!(read["holders"][0]["token"], second["token"]);
    pipe.send(&json!({"id": 4, "op": "remaining", "key": "b"}));
    let remaining = pipe.reply(4);
    assert_eq!((&remaining["state"], &remaining["ok"]), (&json!("held"), &json!(true)));
    pipe.send(&json!({"id": 5, "op": "release", "key": "b", "token": 1}));
    let refused = pipe.reply(5);
    assert_eq!(
        (&refused["error"], &refused["class"]),
        (&json!("not_owner"), &json!("not_applied"))
    );
    pipe.send(&json!({"id": 6, "op": "release", "key": "b", "token": second["token"]}));
    assert_eq!(pipe.reply(6)["ok"], true);
    pipe.send(&json!({"id": "six", "op": "acquire", "key": "a", "wait_ms": 0}));
    assert_eq!(pipe.until(|line| line["id"] == "six")["error"], "already_queued");

    holder.send(&json!({"id": 2, "op": "release", "key": "a"}));
    assert_eq!(holder.reply(2)["ok"], true);
    let next = pipe.reply(1);
    assert!(next["token"].as_u64() > granted["token"].as_u64());
    pipe.end();
    holder.end();
    assert_eq!(server.leases(), 0, "both sessions were closed");
}

#[test]
fn pipe_cancels_renews_and_tells_of_losses() {
    let server = TestServer::start();
    let mut holder = Pipe::start(&server, &["--ttl", "60s"]);
    holder.send(&json!({"id": 1, "op": "acquire", "key": "a"}));
    assert_eq!(holder.reply(1)["ok"], true);
    holder.send(&json!({"id": 2, "op": "acquire", "key": "own", "ttl_ms": 10_000}));
    assert_eq!(holder.reply(2)["ok"], true);
    holder.send(&json!({"id": 3, "op": "renew", "key": "own"}));
    assert!(holder.reply(3)["remaining_ms"].as_u64().expect("a number") > 9_000);

    let mut pipe = Pipe::start(&server, &["--ttl", "2s"]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "a"}));
    eventually("it waits", || server.waiters("a") == 1);
    pipe.send(&json!({"id": 2, "op": "cancel", "target": 1}));
    assert_eq!(pipe.reply(1)["error"], "cancelled");
    assert_eq!(pipe.reply(2)["ok"], true);
    eventually("it left", || server.waiters("a") == 0);
    pipe.send(&json!({"id": 3, "op": "cancel", "target": 1}));
    assert_eq!(pipe.reply(3)["error"], "not_queued");

    pipe.send(&json!({"id": 4, "op": "acquire", "key": "b"}));
    let token = pipe.reply(4)["token"].clone();
    server.down(true);
    let risk = pipe.event("at_risk");
    assert_eq!((&risk["key"], &risk["token"]), (&json!("b"), &token));
    assert_eq!(risk["cause"], "unreachable");
    let lost = pipe.event("lost");
    assert_eq!(
        (&lost["key"], &lost["token"], &lost["cause"]),
        (&json!("b"), &token, &json!("expired"))
    );
    pipe.send(&json!({"id": 5, "op": "remaining", "key": "b"}));
    let remaining = pipe.reply(5);
    assert_eq!((&remaining["state"], &remaining["remaining_ms"]), (&json!("lost"), &json!(0)));
    server.down(false);
    pipe.send(&json!({"id": 6, "op": "acquire", "key": "b"}));
    assert!(pipe.reply(6)["token"].as_u64() > token.as_u64());
    pipe.end();
    holder.end();
    assert!(server.tokens("a").is_empty());
    assert!(server.tokens("own").is_empty(), "an own lease is given back too");
}

#[test]
fn pipe_answers_what_it_does_not_understand_and_goes_on() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    pipe.send_raw("this is not JSON");
    let misread = pipe.line();
    assert_eq!((&misread["id"], &misread["error"]), (&Value::Null, &json!("malformed")));
    pipe.send_raw(&format!("{{\"id\":1,\"op\":\"get\",\"key\":\"{}\"}}", "x".repeat(70_000)));
    assert!(pipe.line()["message"].as_str().expect("text").contains("65536"));
    pipe.send(&json!({"id": 2, "op": "acquire", "key": "k", "wait": 3}));
    let misread = pipe.reply(2);
    assert!(misread["message"].as_str().expect("text").contains("wait"), "{misread}");
    pipe.send(&json!({"id": 3, "op": "acquire", "key": ""}));
    assert_eq!(pipe.reply(3)["error"], "key_empty");
    pipe.send(&json!({"id": 4, "op": "acquire", "key": "k", "ttl_ms": 999}));
    assert_eq!(pipe.reply(4)["error"], "ttl_out_of_range");
    pipe.send(&json!({"id": 5, "op": "acquire", "key": "k", "value": "x".repeat(4097)}));
    assert_eq!(pipe.reply(5)["error"], "value_too_large");
    pipe.send(&json!({"id": 6, "op": "acquire", "key": "k"}));
    assert_eq!(pipe.reply(6)["ok"], true);
    pipe.end();
}

#[test]
fn a_stopped_supervisor_does_not_keep_the_command_alive() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let child = program(&server)
        .args(["lock", "k", "--ttl", "2s", "--", "sh", "-c", &script])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let pids = pids(&file);
    // Once the command runs, the supervisor sleeps only after it has told the keeper the group.
    eventually("the keeper knows the group", || state(child.id().cast_signed()) == Some('S'));
    signal(&child, Signal::STOP);
    server.down(true);
    eventually("the group is gone", || pids.iter().all(|pid| !is_running(*pid)));
    signal(&child, Signal::CONT);
    assert_eq!(child.wait_with_output().expect("it ends").status.code(), Some(121));
}

#[test]
fn lock_shares_and_takes_permits() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let mut holder = program(&server)
        .args(["lock", "k", "--shared", "--", "sh", "-c", &script])
        .spawn()
        .expect("it runs");
    pids(&file);
    let output = run(&server, &["lock", "k", "--shared", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = run(&server, &["lock", "k", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    assert!(text(&run(&server, &["get", "k"]).stdout).contains("shared"));
    let output = run(&server, &["lock", "k", "--permits", "1", "--of", "2", "--", "true"]);
    assert_eq!(output.status.code(), Some(123), "it is a lock: {output:?}");
    signal(&holder, Signal::TERM);
    holder.wait().expect("it ends");
    let nested = [
        env!("CARGO_BIN_EXE_leasehold"),
        "lock",
        "s",
        "--permits",
        "1",
        "--of",
        "2",
        "--try",
        "--",
        "true",
    ];
    let taken = ["lock", "s", "--permits", "1", "--of", "2", "--"];
    let output = run(&server, &[taken.as_slice(), &nested].concat());
    assert_eq!(output.status.code(), Some(0), "both permits are there: {output:?}");
    let taken = ["lock", "s", "--permits", "2", "--of", "2", "--"];
    let output = run(&server, &[taken.as_slice(), &nested].concat());
    assert_eq!(output.status.code(), Some(120), "none is left: {output:?}");
    let output = run(&server, &[taken.as_slice(), &["sh", "-c", "echo $LEASEHOLD_SLOTS"]].concat());
    assert_eq!(text(&output.stdout), "0 1\n");
}

#[test]
fn pipe_knows_modes_permits_and_entries() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    let mut other = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "k", "mode": "shared"}));
    let shared = pipe.reply(1);
    assert_eq!((&shared["mode"], shared["floor"].is_u64()), (&json!("shared"), true));
    other.send(&json!({"id": 1, "op": "acquire", "key": "k", "mode": "shared"}));
    let second = other.reply(1);
    pipe.send(&json!({"id": 2, "op": "mode", "key": "k", "mode": "exclusive"}));
    let conflict = pipe.reply(2);
    assert_eq!(conflict["error"], "upgrade_conflict");
    assert_eq!(conflict["holder_token"], second["token"]);
    other.send(&json!({"id": 2, "op": "release", "key": "k"}));
    assert_eq!(other.reply(2)["ok"], true);
    pipe.send(&json!({"id": 3, "op": "mode", "key": "k", "mode": "exclusive"}));
    let upgraded = pipe.reply(3);
    assert_eq!(upgraded["mode"], "exclusive");
    assert!(upgraded["token"].as_u64() > shared["token"].as_u64());
    pipe.send(&json!({"id": 4, "op": "acquire", "key": "k", "reentrant": true}));
    assert_eq!(pipe.reply(4)["token"], upgraded["token"]);
    pipe.send(&json!({"id": 5, "op": "mode", "key": "k", "mode": "shared"}));
    assert_eq!(pipe.reply(5)["error"], "hold_reentered");
    for id in 6..8 {
        pipe.send(&json!({"id": id, "op": "release", "key": "k", "token": upgraded["token"]}));
        assert_eq!(pipe.reply(id)["ok"], true);
    }
    assert!(server.tokens("k").is_empty());
    pipe.send(&json!({"id": 8, "op": "acquire", "key": "s", "permits": 2, "limit": 3}));
    let permits = pipe.reply(8);
    assert_eq!((&permits["mode"], &permits["permits"]), (&json!("permits"), &json!(2)));
    assert_eq!(permits["slots"], json!([0, 1]));
    other.send(&json!({"id": 8, "op": "acquire", "key": "s", "permits": 1, "limit": 2}));
    assert!(other.reply(8)["message"].as_str().expect("text").contains("3 permits"));
    pipe.send(&json!({"id": 9, "op": "set_value", "key": "s", "value": "x"}));
    assert_eq!(pipe.reply(9)["ok"], true);
    let read = json(&run(&server, &["get", "s", "--json"]));
    assert_eq!((&read["limit"], &read["holders"][0]["slots"]), (&json!(3), &json!([0, 1])));
    assert_eq!((&read["taken"], &read["holders_total"]), (&json!(2), &json!(1)));
    let lease = read["holders"][0]["lease"].to_string();
    let rest = json(&run(&server, &["get", "s", "--json", "--holders-after", &lease]));
    assert_eq!((&rest["holders"], &rest["holders_total"]), (&json!([]), &json!(1)));
    other.send(
        &json!({"id": 9, "op": "get", "key": "s", "holders_after": read["holders"][0]["lease"]}),
    );
    assert_eq!(other.reply(9)["holders"], json!([]));
    assert_eq!(read["holders"][0]["value"], "x");
    pipe.end();
    other.end();
}

#[test]
fn elect_leads_until_a_signal_or_while_a_command_runs() {
    let server = TestServer::start();
    let mut first = program(&server)
        .args(["elect", "e", "addr-1", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut lines = BufReader::new(first.stdout.take().expect("piped")).lines();
    let mut next = || -> Value {
        serde_json::from_str(&lines.next().expect("a line").expect("readable")).expect("JSON")
    };
    let elected = next();
    assert_eq!((&elected["event"], &elected["name"]), (&json!("elected"), &json!("e")));
    let output = run(&server, &["elect", "e", "addr-2", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    let second = program(&server)
        .args(["elect", "e", "addr-2", "--", "sh", "-c", "echo $LEASEHOLD_KEY $LEASEHOLD_TOKEN"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    eventually("it stands", || server.waiters("e") == 1);
    signal(&first, Signal::TERM);
    assert_eq!(next()["event"], "resigned");
    assert_eq!(first.wait().expect("it ends").code(), Some(0));
    let output = second.wait_with_output().expect("it ends");
    let said = text(&output.stdout);
    let token: u64 = said.trim().strip_prefix("e ").expect("its name").parse().expect("a number");
    assert!(token > elected["token"].as_u64().expect("a number"));
    assert!(server.tokens("e").is_empty());
}

#[test]
fn pipe_hands_a_hold_over_and_another_goes_on_with_it() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    let mut other = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "own", "ttl_ms": 60_000}));
    let own = pipe.reply(1);
    pipe.send(&json!({"id": 2, "op": "acquire", "key": "k"}));
    let sessions = pipe.reply(2);
    pipe.send(&json!({"id": 3, "op": "hand_over", "key": "k"}));
    assert_eq!(pipe.reply(3)["error"], "bad_combination");
    pipe.send(&json!({"id": 4, "op": "remaining", "key": "k"}));
    assert_eq!(pipe.reply(4)["token"], sessions["token"], "it was not let go of");
    pipe.send(&json!({"id": 5, "op": "hand_over", "key": "own", "token": own["token"]}));
    let handed = pipe.reply(5);
    assert_eq!(handed["token"], own["token"]);
    // Its end gives back what it has, and that is not among it any more.
    pipe.end();
    assert!(server.tokens("k").is_empty());
    assert_eq!(json!(server.tokens("own")), json!([own["token"]]));
    other.send(&json!({"id": 1, "op": "take_over", "handover": handed["handover"]}));
    let taken = other.reply(1);
    assert_eq!((&taken["key"], &taken["token"]), (&json!("own"), &own["token"]));
    other.send(&json!({"id": 2, "op": "take_over", "handover": "leasehold"}));
    assert_eq!(other.reply(2)["error"], "malformed");
    other.send(&json!({"id": 3, "op": "release", "key": "own", "token": own["token"]}));
    assert_eq!(other.reply(3)["ok"], true);
    assert!(server.tokens("own").is_empty());
    other.end();
}

#[test]
fn pipe_campaigns_proclaims_and_resigns() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "leader", "name": "e"}));
    assert_eq!(pipe.reply(1)["leader"], Value::Null);
    pipe.send(&json!({"id": 2, "op": "campaign", "name": "e", "value": "a", "wait_ms": 0}));
    let token = pipe.reply(2)["token"].clone();
    pipe.send(&json!({"id": 3, "op": "proclaim", "name": "e", "value": "b", "token": token}));
    assert_eq!(pipe.reply(3)["ok"], true);
    pipe.send(&json!({"id": 4, "op": "leader", "name": "e"}));
    let leader = pipe.reply(4)["leader"].clone();
    assert_eq!((&leader["token"], &leader["value"]), (&token, &json!("b")));
    pipe.send(&json!({"id": 5, "op": "resign", "name": "e"}));
    assert_eq!(pipe.reply(5)["ok"], true);
    pipe.send(&json!({"id": 6, "op": "proclaim", "name": "e", "value": "c"}));
    assert_eq!(pipe.reply(6)["error"], "not_owner");
    pipe.send(&json!({"id": 7, "op": "campaign", "name": "e", "value": "x".repeat(4097)}));
    assert_eq!(pipe.reply(7)["error"], "value_too_large");
    pipe.end();
}

#[test]
fn why_says_in_words_who_holds_and_who_waits() {
    let server = TestServer::start();
    let said = text(&run(&server, &["why", "k"]).stdout);
    assert_eq!(said, "Nobody holds k.\nNobody waits.\n");
    let mut pipe = Pipe::start(&server, &["--label", "holder"]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "k"}));
    let token = pipe.reply(1)["token"].clone();
    let mut other = Pipe::start(&server, &["--label", "waiter"]);
    other.send(&json!({"id": 1, "op": "acquire", "key": "k", "mode": "shared"}));
    eventually("it waits", || server.waiters("k") == 1);
    other.send(&json!({"id": 2, "op": "place", "target": 1}));
    let place = other.reply(2);
    assert_eq!((&place["ok"], &place["position"]), (&json!(true), &json!(0)));
    assert_eq!(place["holders"][0]["label"], "holder");
    other.send(&json!({"id": 3, "op": "yield", "key": "k", "why": "a deploy", "within_ms": 2000}));
    assert_eq!(other.reply(3)["token"], token);
    let said = text(&run(&server, &["why", "k"]).stdout);
    for part in [
        "holder (lease ",
        "holds it exclusively",
        "UTC",
        "at the earliest",
        "asked it to give up within 2.0 s: a deploy",
        "1 wait, in this order: waiter (lease",
        ", shared)",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    pipe.send(&json!({"id": 4, "op": "why", "key": "k"}));
    let why = pipe.reply(4);
    assert!(why["text"].as_str().expect("text").contains("holder (lease "), "{why}");
    assert_eq!(why["holders"][0]["asked"]["within_ms"], 2000);
    let output = run(&server, &["force-release", "k", "--reason", "stuck", "--now"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(other.reply(1)["ok"], true, "the next one");
    let said = text(&run(&server, &["why", "k"]).stdout);
    assert!(said.contains("waiter (lease ") && said.contains("of holder (lease "), "{said}");
    assert!(said.contains("was forced by ") && said.contains(": stuck"), "{said}");
    let read = json(&run(&server, &["get", "k", "--json"]));
    assert_eq!((&read["last_end"]["token"], &read["last_end"]["why"]), (&token, &json!("stuck")));
    let next = read["holders"][0]["token"].clone();
    let output = run(&server, &["yield", "nobody", "--reason", "x"]);
    assert_eq!(output.status.code(), Some(123), "{output:?}");
    let output = run(&server, &["yield", "k", "--reason", "y", "--within", "1s", "--json"]);
    assert_eq!(json(&output)["token"], next);
    pipe.end();
    other.end();
}

#[test]
fn set_limit_changes_a_semaphore_in_use() {
    let server = TestServer::start();
    let output = run(&server, &["set-limit", "s", "3"]);
    assert_eq!(output.status.code(), Some(123), "{output:?}");
    assert!(text(&output.stderr).contains("not_in_use"), "{output:?}");
    let output = run(&server, &["set-limit", "s", "1025"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let mut pipe = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "s", "permits": 2, "limit": 2}));
    assert_eq!(pipe.reply(1)["ok"], true);
    let mut other = Pipe::start(&server, &[]);
    other.send(&json!({"id": 1, "op": "acquire", "key": "s", "permits": 2, "limit": 2}));
    eventually("it waits", || server.waiters("s") == 1);
    pipe.send(&json!({"id": 2, "op": "set_limit", "key": "s", "limit": 1}));
    assert_eq!(pipe.reply(2)["ok"], true);
    let refused = other.reply(1);
    assert_eq!(refused["error"], "permits_above_limit");
    assert!(refused["message"].as_str().expect("text").contains("1 permits"), "{refused}");
    let output = run(&server, &["set-limit", "s", "4"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    other.send(&json!({"id": 3, "op": "acquire", "key": "s", "permits": 2, "limit": 4}));
    assert_eq!(other.reply(3)["ok"], true);
    pipe.end();
    other.end();
}

#[test]
fn lock_and_pipe_take_several_keys_at_once() {
    let server = TestServer::start();
    let script = "echo $LEASEHOLD_KEY $LEASEHOLD_TOKEN $LEASEHOLD_TOKENS";
    let output =
        run(&server, &["lock", "a", "--also", "b", "--also", "c", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(text(&output.stdout), "a 1001 1001 1002 1003\n");
    let mut pipe = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire_all", "keys": ["a", "b"], "wait_ms": 0}));
    let granted = pipe.reply(1);
    let (first, second) = (granted["holds"][0].clone(), granted["holds"][1].clone());
    assert_eq!((&first["key"], &first["token"]), (&json!("a"), &granted["token"]));
    assert_eq!(second["key"], "b");
    assert_eq!(server.tokens("b"), [second["token"].as_u64().expect("a number")]);
    let output = run(&server, &["lock", "c", "--also", "b", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    assert!(server.tokens("c").is_empty());
    let mut other = Pipe::start(&server, &[]);
    other.send(&json!({"id": 1, "op": "acquire_all", "keys": ["c", "b"]}));
    eventually("it waits", || server.waiters("c") == 1);
    other.send(&json!({"id": 2, "op": "place", "target": 1}));
    assert_eq!(other.reply(2)["position"], 0);
    pipe.send(&json!({"id": 2, "op": "release_all", "token": granted["token"]}));
    assert_eq!(pipe.reply(2)["ok"], true);
    let next = other.reply(1);
    assert_eq!(next["holds"].as_array().expect("a list").len(), 2);
    pipe.send(&json!({"id": 3, "op": "release_all", "token": granted["token"]}));
    assert_eq!(pipe.reply(3)["error"], "not_owner");
    pipe.send(&json!({"id": 4, "op": "acquire_all", "keys": ["x", "x"]}));
    assert_eq!(pipe.reply(4)["error"], "duplicate_key");
    pipe.end();
    other.end();
    assert!(server.tokens("c").is_empty(), "the session was closed");
}

#[test]
fn several_keys_are_held_in_several_ways() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    let keys = json!([
        {"key": "r", "mode": "shared"},
        "x",
        {"key": "s", "permits": 2, "limit": 3},
    ]);
    pipe.send(&json!({"id": 1, "op": "acquire_all", "keys": keys, "yields": true}));
    let granted = pipe.reply(1);
    let names: Vec<_> = (0..3).map(|part| &granted["holds"][part]["key"]).collect();
    assert_eq!(names, ["r", "x", "s"], "in the order of the request");
    assert_eq!(granted["holds"][2]["slots"], json!([0, 1]));
    assert!(granted["holds"][1].get("slots").is_none(), "{granted}");
    let output = run(&server, &["lock", "r", "--shared", "--also", "q", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(0), "all of them shared: {output:?}");
    let output = run(&server, &["lock", "q", "--also", "r", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    let output = run(&server, &["yield", "s", "--reason", "a deploy"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let asked = pipe.event("yield");
    assert_eq!((&asked["key"], &asked["token"]), (&json!("s"), &granted["holds"][2]["token"]));
    pipe.send(&json!({"id": 2, "op": "release_all", "token": granted["token"]}));
    assert_eq!(pipe.reply(2)["ok"], true);
    pipe.send(&json!({"id": 3, "op": "acquire_each", "keys": ["b", "a"]}));
    let each = pipe.reply(3);
    assert_eq!((&each["holds"][0]["key"], &each["holds"][1]["key"]), (&json!("a"), &json!("b")));
    let script = "echo $LEASEHOLD_KEY $LEASEHOLD_TOKEN $LEASEHOLD_TOKENS";
    let each = ["lock", "z", "--also", "y", "--also", "x", "--each", "--", "sh", "-c", script];
    let said = text(&run(&server, &each).stdout);
    let tokens: Vec<u64> =
        said.split_whitespace().skip(1).map(|token| token.parse().expect("a token")).collect();
    // As they were given, though the last key by its bytes was taken last.
    assert_eq!(tokens, [tokens[3] + 2, tokens[3] + 2, tokens[3] + 1, tokens[3]], "{said}");
    let output = run(&server, &["lock", "c", "--also", "b", "--each", "--try", "--", "true"]);
    assert_eq!(output.status.code(), Some(120), "{output:?}");
    assert!(text(&output.stderr).contains("b: "), "it names the key: {output:?}");
    let mut other = Pipe::start(&server, &[]);
    other.send(&json!({"id": 1, "op": "acquire_each", "keys": ["b", "0"], "wait_ms": 0}));
    let refused = other.reply(1);
    assert_eq!(refused["error"], "held");
    assert!(refused["message"].as_str().expect("text").starts_with("b: "), "{refused}");
    eventually("all were given back", || server.tokens("0").is_empty());
    pipe.send(&json!({"id": 4, "op": "release", "key": "b"}));
    assert_eq!(pipe.reply(4)["ok"], true);
    other.send(&json!({"id": 2, "op": "acquire_each", "keys": ["b", "b"]}));
    assert_eq!(other.reply(2)["error"], "duplicate_key");
    other
        .send(&json!({"id": 3, "op": "acquire_all", "keys": ["b", {"key": "c", "mod": "shared"}]}));
    assert!(other.reply(3)["message"].as_str().expect("text").contains("mod"));
    pipe.end();
    other.end();
}

#[test]
fn a_pipe_keeps_several_holds_of_a_key_that_have_leases_of_their_own() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    let mut tokens = Vec::new();
    for id in 1..=2 {
        pipe.send(&json!({
            "id": id, "op": "acquire", "key": "s", "permits": 1, "limit": 2, "ttl_ms": 30_000,
        }));
        let granted = pipe.reply(id);
        assert_eq!(granted["slots"], json!([id - 1]), "{granted}");
        tokens.push(granted["token"].clone());
    }
    assert_eq!(server.tokens("s").len(), 2, "the first is not given back");
    pipe.send(&json!({"id": 3, "op": "remaining", "key": "s"}));
    assert_eq!(pipe.reply(3)["token"], tokens[1], "the newest, without a token");
    for (id, token) in (4..).zip(&tokens) {
        pipe.send(&json!({"id": id, "op": "renew", "key": "s", "token": token}));
        assert_eq!(pipe.reply(id)["ok"], true);
    }
    pipe.send(&json!({"id": 6, "op": "release", "key": "s", "token": tokens[0]}));
    assert_eq!(pipe.reply(6)["ok"], true);
    assert_eq!(server.tokens("s"), [tokens[1].as_u64().expect("a number")]);
    pipe.end();
    assert!(server.tokens("s").is_empty(), "the end gives the other back");
}

#[test]
fn pipe_says_what_is_wrong_with_what_it_is_told() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire_all", "keys": ["a", "b"]}));
    let token = pipe.reply(1)["token"].clone();
    pipe.send(&json!({"id": 2, "op": "remaining", "key": "a"}));
    let remaining = pipe.reply(2);
    assert_eq!((&remaining["state"], &remaining["token"]), (&json!("held"), &token));
    let long = "k".repeat(600);
    let orders = [
        (json!({"op": "release", "key": "a"}), "bad_combination", "release_all"),
        (json!({"op": "acquire", "key": "k", "permits": -1}), "malformed", "\"permits\""),
        (json!({"op": "acquire_all", "keys": [5]}), "malformed", "an object"),
        // The one that is wrong comes after the other in the order of bytes.
        (json!({"op": "acquire_each", "keys": ["e", long]}), "key_too_long", "kkk"),
        (json!({"op": "acquire_each", "keys": ["x", "x"]}), "duplicate_key", "x: "),
        (json!({"op": "ls", "limit": 1001}), "malformed", "1 to 1000"),
        (json!({"op": "sessions", "limit": 1001}), "malformed", "1 to 1000"),
        (
            json!({"op": "member_add", "node": 9, "peer": "h:1", "client": "bad address"}),
            "malformed",
            "bad address",
        ),
        (json!({"op": "member_add", "node": 9, "peer": "junk"}), "malformed", "junk"),
    ];
    for (id, (mut order, error, word)) in (3..).zip(orders) {
        order["id"] = id.into();
        pipe.send(&order);
        let refused = pipe.reply(id);
        assert_eq!(refused["error"], error, "{order}: {refused}");
        assert!(refused["message"].as_str().expect("text").contains(word), "{refused}");
    }
    assert_eq!((server.tokens("e"), server.tokens("k")), (vec![], vec![]));
    pipe.send(&json!({"id": 20, "op": "get", "key": "e"}));
    assert!(pipe.reply(20).get("last_end").is_none(), "nothing was granted on the way");
    pipe.send(&json!({"id": 21, "op": "acquire", "key": "f"}));
    assert_eq!(pipe.reply(21)["ok"], true);
    let output = run(&server, &["force-release", "f", "--reason", "stuck", "--now"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    pipe.send(&json!({"id": 22, "op": "release", "key": "f"}));
    let over = pipe.reply(22);
    assert!(over["message"].as_str().expect("text").contains("had ended before"), "{over}");
    let mut other = Pipe::start(&server, &[]);
    other.send(&json!({"id": 1, "op": "acquire_each", "keys": ["0", "a"], "yields": true}));
    eventually("it waits", || server.waiters("a") == 1);
    other.send(&json!({"id": 2, "op": "cancel", "target": 1}));
    assert_eq!(other.reply(1)["error"], "cancelled");
    assert_eq!(other.reply(2)["ok"], true);
    eventually("all was given back", || server.tokens("0").is_empty() && server.waiters("a") == 0);
    other.send(&json!({"id": 3, "op": "acquire_each", "keys": ["0"], "yields": true}));
    assert_eq!(other.reply(3)["ok"], true);
    assert_eq!(run(&server, &["yield", "0", "--reason", "a deploy"]).status.code(), Some(0));
    assert_eq!(other.event("yield")["key"], "0");
    let all = json(&run(&server, &["sessions", "--json"]));
    let first = all[0]["lease"].to_string();
    let rest = json(&run(&server, &["sessions", "--json", "--after", &first]));
    let len = |list: &Value| list.as_array().expect("a list").len();
    assert_eq!((len(&all), len(&rest)), (2, 1), "{all}");
    pipe.end();
    other.end();
}

#[test]
fn observe_and_pipe_follow_an_election() {
    let server = TestServer::start();
    let mut observer = program(&server)
        .args(["observe", "e", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut lines = BufReader::new(observer.stdout.take().expect("piped")).lines();
    let mut next = || -> Value {
        serde_json::from_str(&lines.next().expect("a line").expect("readable")).expect("JSON")
    };
    assert_eq!(next(), json!({"event": "vacant", "name": "e"}));
    let mut pipe = Pipe::start(&server, &["--label", "me"]);
    pipe.send(&json!({"id": 1, "op": "observe", "name": "e"}));
    assert_eq!(pipe.reply(1)["ok"], true);
    assert_eq!(pipe.event("vacant")["name"], "e");
    pipe.send(&json!({"id": 2, "op": "observe", "name": "e"}));
    assert_eq!(pipe.reply(2)["error"], "busy");
    pipe.send(&json!({"id": 3, "op": "campaign", "name": "e", "value": "a"}));
    let token = pipe.reply(3)["token"].clone();
    let leader = pipe.event("leader");
    assert_eq!(
        (&leader["token"], &leader["value"], &leader["label"]),
        (&token, &json!("a"), &json!("me"))
    );
    assert_eq!(next()["value"], "a");
    let shown = text(&run(&server, &["observe", "e", "--once"]).stdout);
    assert!(shown.starts_with("a  (me, token "), "{shown}");
    pipe.send(&json!({"id": 4, "op": "resign", "name": "e"}));
    assert_eq!(pipe.event("vacant")["name"], "e");
    assert_eq!(next()["event"], "vacant");
    assert_eq!(text(&run(&server, &["observe", "e", "--once"]).stdout), "vacant\n");
    pipe.send(&json!({"id": 5, "op": "unobserve", "name": "e"}));
    assert_eq!(pipe.reply(5)["ok"], true);
    pipe.send(&json!({"id": 6, "op": "observe", "name": "e"}));
    assert_eq!(pipe.reply(6)["ok"], true);
    pipe.end();
    observer.kill().expect("it runs");
    observer.wait().expect("it ended");
}

#[test]
fn a_request_to_yield_reaches_pipe_and_the_command_under_a_lock() {
    let server = TestServer::start();
    let mut pipe = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "p", "yields": true}));
    let token = pipe.reply(1)["token"].clone();
    let output = run(&server, &["yield", "p", "--reason", "a deploy", "--within", "2s"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let asked = pipe.event("yield");
    assert_eq!(
        (&asked["key"], &asked["token"], &asked["why"]),
        (&json!("p"), &token, &json!("a deploy"))
    );
    assert_eq!(asked["within_ms"], 2000);
    pipe.end();

    let dir = tempfile::tempdir().expect("a directory");
    let (script, file) = announcing(&dir, "wait");
    let child = program(&server)
        .args(["lock", "k", "--yields", "--", "sh", "-c", &format!("trap 'exit 9' TERM; {script}")])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    pids(&file);
    let output = run(&server, &["yield", "k", "--reason", "a deploy"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(9), "its own code: {output:?}");
    assert!(text(&output.stderr).contains("asks to yield"), "{output:?}");
    assert!(server.tokens("k").is_empty());

    let leads = program(&server)
        .args(["elect", "e", "v", "--yields"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    eventually("it leads", || server.tokens("e").len() == 1);
    let output = run(&server, &["yield", "e", "--reason", "a deploy"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = leads.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(text(&output.stdout).contains("a deploy"), "{output:?}");
}

#[test]
fn a_waiter_is_told_its_place_if_it_asks() {
    let server = TestServer::start();
    let mut holder = Pipe::start(&server, &["--label", "holder"]);
    holder.send(&json!({"id": 1, "op": "acquire", "key": "k"}));
    let token = holder.reply(1)["token"].clone();
    let mut pipe = Pipe::start(&server, &[]);
    pipe.send(&json!({"id": 1, "op": "acquire", "key": "k"}));
    eventually("it waits", || server.waiters("k") == 1);
    let mut second = Pipe::start(&server, &[]);
    second.send(&json!({"id": 7, "op": "acquire", "key": "k", "places": true}));
    let place = second.event("place");
    assert_eq!((&place["acquire"], &place["position"]), (&json!(7), &json!(1)), "{place}");
    assert_eq!(place["holders"][0]["token"], token);
    let mut lock = program(&server)
        .args(["lock", "k", "--show-place", "--json", "--", "true"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut told = BufReader::new(lock.stderr.take().expect("piped")).lines();
    let mut next = || -> Value {
        let line = told.next().expect("more").expect("readable");
        serde_json::from_str(&line).expect("JSON")
    };
    let place = next();
    assert_eq!((&place["event"], &place["position"]), (&json!("place"), &json!(2)), "{place}");
    assert_eq!((&place["holder_label"], &place["holder_token"]), (&json!("holder"), &token));

    pipe.send(&json!({"id": 2, "op": "cancel", "target": 1}));
    assert_eq!(second.event("place")["position"], 0);
    assert_eq!(next()["position"], 1);
    assert_eq!(pipe.reply(1)["error"], "cancelled");
    holder.end();
    second.reply(7);
    second.end();
    assert_eq!(lock.wait().expect("it ends").code(), Some(0));
    pipe.send(&json!({"id": 3, "op": "acquire", "key": "k", "places": true}));
    assert_eq!(pipe.reply(3)["ok"], true);
    assert!(pipe.kept.iter().all(|line| line["event"] != "place"), "{:?}", pipe.kept);
    pipe.end();
}
