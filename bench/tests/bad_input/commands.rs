//! Bad input through the command line and the pipe: each has its documented code and exit code, the
//! message names the thing and what would be allowed, and nothing is changed by it.

use std::process::{Command, Stdio};

use leasehold_bench::clock::Deadline;
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process::{self, binary};
use leasehold_protocol::ids::{ClusterId, Revision, ShardId};
use leasehold_protocol::limits::VALUE_LEN_MAX;
use leasehold_protocol::shard::shard_of;
use leasehold_protocol::watch::Cursor;
use serde_json::{Value, json};

use super::pipes::Pipe;

const SHARDS: u32 = 2;
/// Exit code of input that no cluster would take.
const USAGE: i32 = 2;
/// Exit code of what this cluster refuses as it is now.
const REFUSED: i32 = 123;

/// One bad input.
struct Bad {
    error: &'static str,
    /// What the message must say.
    says: &'static [&'static str],
    exit: i32,
    /// Empty if the command line cannot say it.
    args: Vec<String>,
    request: Value,
}

fn bad(
    (error, exit): (&'static str, i32),
    says: &'static [&'static str],
    args: &[&str],
    request: Value,
) -> Bad {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    Bad { error, says, exit, args, request }
}

/// Runs the command line; its object, from wherever it says it, and its exit code.
fn run(cluster: &Cluster, args: &[String]) -> (Value, i32) {
    let mut command = Command::new(binary("leasehold").expect("built"));
    command.arg("--json").arg("--endpoints").arg(cluster.endpoint_list()).args(args);
    let output = command.stdin(Stdio::null()).output().expect("it runs");
    let said = [output.stdout, output.stderr].concat();
    let last = String::from_utf8_lossy(&said).lines().last().unwrap_or_default().to_owned();
    let object = serde_json::from_str(&last).unwrap_or_else(|_| panic!("{args:?}: {last:?}"));
    (object, output.status.code().unwrap_or(-1))
}

/// All that a refused request must leave as it is.
fn seen(pipe: &mut Pipe) -> Vec<Value> {
    let mut keys = pipe.done(json!({ "op": "ls" }))["keys"].take();
    for key in keys.as_array_mut().expect("a list") {
        // These go on by themselves.
        key["revision"] = Value::Null;
        for holder in key["holders"].as_array_mut().expect("a list") {
            holder["remaining_ms"] = Value::Null;
        }
    }
    let mut members = pipe.done(json!({ "op": "members" }));
    members["id"] = Value::Null;
    vec![keys, members]
}

fn locks(other_shard: &str) -> Vec<Bad> {
    let acquire = |key: &str, permits: u32, limit: u32| json!({ "op": "acquire", "key": key, "permits": permits, "limit": limit, "wait_ms": 0 });
    let range = ("permits_out_of_range", USAGE);
    let takes = |key: &'static str, permits: &'static str, of: &'static str| {
        ["lock", key, "--permits", permits, "--of", of, "--", "true"]
    };
    let value = "v".repeat(VALUE_LEN_MAX + 1);
    vec![
        bad(range, &["0 of 3", "1 to 1024"], &takes("s", "0", "3"), acquire("s", 0, 3)),
        bad(range, &["4 of 3", "1 to all"], &takes("s", "4", "3"), acquire("s", 4, 3)),
        bad(range, &["1 of 1025", "1 to 1024"], &takes("s", "1", "1025"), acquire("s", 1, 1025)),
        bad(
            ("limit_mismatch", REFUSED),
            &["3 permits", "states 4"],
            &takes("sem", "1", "4"),
            acquire("sem", 1, 4),
        ),
        bad(
            ("upgrade_conflict", REFUSED),
            &["Others hold the key"],
            &[],
            json!({ "op": "mode", "key": "doc", "mode": "exclusive" }),
        ),
        bad(
            ("duplicate_key", USAGE),
            &["\"twice\""],
            &["lock", "twice", "--also", "once", "--also", "twice", "--", "true"],
            json!({ "op": "acquire_all", "keys": ["twice", "once", "twice"] }),
        ),
        bad(
            ("wrong_shard", USAGE),
            &["several shards", "{tag}"],
            &["lock", "here", "--also", other_shard, "--", "true"],
            json!({ "op": "acquire_all", "keys": ["here", other_shard] }),
        ),
        bad(
            ("value_too_large", USAGE),
            &["value", "4096"],
            &["elect", "led", &value, "--", "true"],
            json!({ "op": "campaign", "name": "led", "value": value }),
        ),
    ]
}

fn positions(cluster: ClusterId) -> Vec<Bad> {
    let future = Cursor::of(cluster, shard_of(b"doc", SHARDS), Revision(1 << 60)).to_string();
    let foreign = Cursor::of(ClusterId([7; 16]), ShardId(0), Revision(1)).to_string();
    let watch = |from: &str| json!({ "op": "watch", "key": "doc", "from": from });
    let both = |error, says, from: &str| {
        bad((error, USAGE), says, &["watch", "doc", "--from", from], watch(from))
    };
    vec![
        both("cursor_malformed", &["cursor"], "00ff"),
        both("cursor_of_other_cluster", &["cursor", "another cluster"], &foreign),
        both("cursor_from_future", &["cursor", "not reached"], &future),
        bad(
            ("page_of_other_query", USAGE),
            &["\"sem\"", "\"do\""],
            &["ls", "do", "--after", "sem"],
            json!({ "op": "ls", "prefix": "do", "after": "sem" }),
        ),
    ]
}

fn members() -> Vec<Bad> {
    vec![
        bad(
            ("node_id_used", REFUSED),
            &["node id 1", "never used again"],
            &["member", "add", "1", "--peer", "127.0.0.1:1"],
            json!({ "op": "member_add", "node": 1, "peer": "127.0.0.1:1" }),
        ),
        bad(
            ("last_voter", REFUSED),
            &["last voter"],
            &["member", "remove", "1"],
            json!({ "op": "member_remove", "node": 1 }),
        ),
        bad(
            ("not_a_member", REFUSED),
            &["not a member"],
            &["member", "remove", "9"],
            json!({ "op": "member_remove", "node": 9 }),
        ),
    ]
}

#[test]
fn bad_input_is_refused_by_name_through_the_command_line_and_the_pipe() {
    let _alone = process::alone();
    let spec = Spec { nodes: 1, shards: SHARDS, ..Spec::default() };
    let cluster = Cluster::start(spec).expect("a node");
    let mut pipe = Pipe::start(&cluster, &[1]);
    let mut other = Pipe::start(&cluster, &[1]);
    other.done(json!({ "op": "acquire", "key": "sem", "permits": 1, "limit": 3 }));
    for reader in [&mut pipe, &mut other] {
        reader.done(json!({ "op": "acquire", "key": "doc", "mode": "shared" }));
    }
    let of = |key: &str| shard_of(key.as_bytes(), SHARDS);
    let far = (0..64).map(|n| format!("there-{n}")).find(|key| of(key) != of("here"));
    let cluster_id = cluster.status_of(1).expect("a status").cluster;
    let deadline = Deadline::after(PATIENCE);
    while pipe.done(json!({ "op": "members" }))["version"] == 0 {
        assert!(!deadline.passed(), "the member table was not founded");
        std::thread::sleep(process::POLL);
    }
    let before = seen(&mut pipe);
    let mut all = locks(&far.expect("some key"));
    all.extend(positions(cluster_id));
    all.extend(members());
    for Bad { error, says, exit, args, request } in all {
        let by_pipe = pipe.ask(request);
        let mut said = vec![by_pipe];
        if !args.is_empty() {
            let (object, code) = run(&cluster, &args);
            assert_eq!(code, exit, "{error}: {object}");
            said.push(object);
        }
        for object in said {
            assert_eq!(object["error"], error, "{object}");
            assert_eq!(object["class"], "not_applied", "{object}");
            let message = object["message"].as_str().expect("a message");
            assert!(says.iter().all(|word| message.contains(word)), "{error}: {message}");
        }
        assert_eq!(seen(&mut pipe), before, "{error} changed something");
    }
}
