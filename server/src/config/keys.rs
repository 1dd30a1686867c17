//! The one table of configuration keys. The TOML file, the flags of the command line and
//! `docs/CONFIG.md` are all made from it, so they cannot drift apart.

use std::path::PathBuf;
use std::str::FromStr;

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::limits::SHARDS_MAX;

use super::address::{parse_listen, parse_peers};
use super::{Config, LogFormat};

/// Who must agree on a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every node of the cluster.
    Cluster,
    /// This process alone.
    Process,
}

/// The TOML type of a key; a flag is always text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number.
    Number,
    /// `true` or `false`.
    Switch,
    /// A string.
    Text,
    /// A string with commas, or an array of strings.
    List,
}

/// A key's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The key must be given.
    Required,
    /// The key may be absent; the text says what happens then.
    Unset(&'static str),
    /// This value, as it would be written on the command line.
    Value(&'static str),
}

/// One configuration key.
pub struct Key {
    /// Its name in the file; `--name` is its flag.
    pub name: &'static str,
    /// Who must agree on it.
    pub scope: Scope,
    /// Its TOML type.
    pub kind: Kind,
    /// Placeholder of the value in the help.
    pub placeholder: &'static str,
    /// Its default.
    pub fallback: Fallback,
    /// Its unit, or "" if it has none.
    pub unit: &'static str,
    /// What is accepted.
    pub range: &'static str,
    /// What it means, and how it relates to other keys.
    pub meaning: &'static str,
    /// Parses a value into the configuration; the error says what is accepted.
    pub(super) put: fn(&mut Config, &str) -> Result<(), String>,
}

/// The key of a name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

fn number<T>(text: &str, low: T, high: T) -> Result<T, String>
where
    T: FromStr + PartialOrd + Copy + std::fmt::Display,
{
    text.parse()
        .ok()
        .filter(|value| (&low..=&high).contains(&value))
        .ok_or_else(|| format!("\"{text}\" is not a whole number of {low}..={high}"))
}

fn switch(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| format!("\"{text}\" is neither true nor false"))
}

fn name(text: &str) -> Result<String, String> {
    let fits = (1..=64).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if fits {
        Ok(text.to_owned())
    } else {
        Err(format!("\"{text}\" is not 1..=64 characters of a-z, A-Z, 0-9, '-', '_', '.'"))
    }
}

fn path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("the path is empty".to_owned()) } else { Ok(PathBuf::from(text)) }
}

fn log_level(text: &str) -> Result<String, String> {
    let filter = tracing_subscriber::EnvFilter::try_new(text);
    match filter {
        Ok(_) if !text.is_empty() => Ok(text.to_owned()),
        Ok(_) => Err("the level is empty".to_owned()),
        Err(error) => Err(format!("\"{text}\" is not a level or filter: {error}")),
    }
}

fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(format!("\"{text}\" is neither text nor json")),
    }
}

macro_rules! put {
    ($group:ident . $field:ident = $parse:expr) => {
        |config: &mut Config, text: &str| {
            let parse: fn(&str) -> Result<_, String> = $parse;
            config.$group.$field = parse(text)?;
            Ok(())
        }
    };
}

/// Every key, in the order of the documents.
pub const KEYS: &[Key] = &[
    Key {
        name: "cluster",
        scope: Scope::Cluster,
        kind: Kind::Text,
        placeholder: "NAME",
        fallback: Fallback::Value("leasehold"),
        unit: "",
        range: "1..=64 characters of a-z, A-Z, 0-9, '-', '_', '.'",
        meaning: "The cluster's name, for people. Nodes of different names refuse each other and a \
            data directory keeps its name, so that two clusters cannot mix by a wrong address. The \
            identity that peers and clients check is a random cluster id, made at birth.",
        put: put!(cluster.name = name),
    },
    Key {
        name: "peers",
        scope: Scope::Cluster,
        kind: Kind::List,
        placeholder: "1=HOST:PORT,…",
        fallback: Fallback::Unset("a cluster of this node alone"),
        unit: "",
        range: "1, 3 or 5 items NODE=HOST:PORT; IPv6 addresses in brackets",
        meaning: "Every node's peer address, this node's included. Names are \
            resolved again at each connect. The node ids are fixed at birth; addresses may change \
            later.",
        put: put!(cluster.peers = parse_peers),
    },
    Key {
        name: "shards",
        scope: Scope::Cluster,
        kind: Kind::Number,
        placeholder: "N",
        fallback: Fallback::Value("1"),
        unit: "",
        range: "1..=64",
        meaning: "Number of Raft groups that share the key space. Fixed at birth. One is enough \
            for most uses; each further shard has its own leader and costs timers when idle.",
        put: put!(cluster.shards = |text| number(text, 1, SHARDS_MAX)),
    },
    Key {
        name: "secret-file",
        scope: Scope::Cluster,
        kind: Kind::Text,
        placeholder: "FILE",
        fallback: Fallback::Unset("no other node is admitted; allowed for a single node only"),
        unit: "",
        range: "a readable file with 16..=1024 bytes, blanks at its end not counted",
        meaning: "The cluster secret, which peers prove to each other without sending it. The same \
            bytes on every node. Required if `peers` names other nodes.",
        put: put!(cluster.secret_file = |text| path(text).map(Some)),
    },
    Key {
        name: "heartbeat-ms",
        scope: Scope::Cluster,
        kind: Kind::Number,
        placeholder: "MS",
        fallback: Fallback::Value("30"),
        unit: "milliseconds",
        range: "5..=1000",
        meaning: "Time between two heartbeats of a leader. At most a third of `election-min-ms`, \
            so that one lost heartbeat does not start an election.",
        put: put!(cluster.heartbeat_ms = |text| number(text, 5, 1000)),
    },
    Key {
        name: "election-min-ms",
        scope: Scope::Cluster,
        kind: Kind::Number,
        placeholder: "MS",
        fallback: Fallback::Value("100"),
        unit: "milliseconds",
        range: "15..=2499",
        meaning: "Shortest silence of the leader after which a node may stand for election. At \
            least three times `heartbeat-ms` and below `election-max-ms`.",
        put: put!(cluster.election_min_ms = |text| number(text, 15, 2499)),
    },
    Key {
        name: "election-max-ms",
        scope: Scope::Cluster,
        kind: Kind::Number,
        placeholder: "MS",
        fallback: Fallback::Value("150"),
        unit: "milliseconds",
        range: "16..=2500",
        meaning: "Longest silence of the leader before a node stands. A crashed leader is replaced \
            within about twice this time, and a lease must outlive that: a shorter TTL is refused, \
            with the range that is allowed, when a client asks for it. So the shortest TTL is twice \
            this value, or 1 s if that is more; the recommended 5 s are always allowed.",
        put: put!(cluster.election_max_ms = |text| number(text, 16, 2500)),
    },
    Key {
        name: "token-floor",
        scope: Scope::Cluster,
        kind: Kind::Number,
        placeholder: "TOKEN",
        fallback: Fallback::Value("0"),
        unit: "",
        range: "0..=4611686018427387904 (2^62)",
        meaning: "Fencing tokens start above it. Read at the cluster's birth only; without it \
            they start at the wall clock's Unix milliseconds times 1024, with it at the higher of \
            both. Give it when a cluster replaces a lost one \
            and the clock may be behind; with it, a clock before this build's date is accepted.",
        put: put!(cluster.token_floor = |text| number(text, 0, 1 << 62)),
    },
    Key {
        name: "node-id",
        scope: Scope::Process,
        kind: Kind::Number,
        placeholder: "N",
        fallback: Fallback::Required,
        unit: "",
        range: "1..=9223372036854775807",
        meaning: "This node's number, one of those in `peers`. Never reused: a node whose data \
            directory is lost comes back under a new number or is admitted again.",
        put: put!(process.node_id = |text| number(text, 1, i64::MAX as u64).map(NodeId)),
    },
    Key {
        name: "join",
        scope: Scope::Process,
        kind: Kind::Switch,
        placeholder: "BOOL",
        fallback: Fallback::Value("false"),
        unit: "",
        range: "true or false",
        meaning: "This node founds no cluster: with an empty data directory it asks the other nodes \
            of `peers`, any of the cluster's, until `leasehold member add` or `member replace` \
            admits it. `peers` may then have any number of items. Of no effect once the node \
            belongs to a cluster.",
        put: put!(process.join = switch),
    },
    Key {
        name: "data-dir",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "DIR",
        fallback: Fallback::Required,
        unit: "",
        range: "a directory on a local disk; made if it does not exist",
        meaning: "Where this node keeps everything. It belongs to one node of one cluster and one \
            core count, and one process at a time.",
        put: put!(process.data_dir = path),
    },
    Key {
        name: "client-listen",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "IP:PORT",
        fallback: Fallback::Value("127.0.0.1:7400"),
        unit: "",
        range: "IP:PORT, port 1..=65535",
        meaning: "Where clients connect. Loopback by default: clients are not authenticated, so \
            open it to trusted networks only.",
        put: put!(process.client_listen = parse_listen),
    },
    Key {
        name: "client-advertise",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "HOST:PORT",
        fallback: Fallback::Unset("`client-listen`"),
        unit: "",
        range: "HOST:PORT, port 1..=65535",
        meaning: "The address under which clients reach `client-listen`; told to clients as a hint \
            and to the other nodes. Required if `client-listen` is 0.0.0.0 or [::].",
        put: put!(process.client_advertise = |text| text.parse().map(Some)),
    },
    Key {
        name: "peer-listen",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "IP:PORT",
        fallback: Fallback::Value("127.0.0.1:7401"),
        unit: "",
        range: "IP:PORT, port 1..=65535",
        meaning: "Where the other nodes connect.",
        put: put!(process.peer_listen = parse_listen),
    },
    Key {
        name: "peer-advertise",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "HOST:PORT",
        fallback: Fallback::Unset("this node's address in `peers`, else `peer-listen`"),
        unit: "",
        range: "HOST:PORT, port 1..=65535",
        meaning: "The address under which the other nodes reach `peer-listen`. Required if neither \
            `peers` nor `peer-listen` names one.",
        put: put!(process.peer_advertise = |text| text.parse().map(Some)),
    },
    Key {
        name: "admin-listen",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "IP:PORT",
        fallback: Fallback::Value("127.0.0.1:7402"),
        unit: "",
        range: "IP:PORT, port 1..=65535, or `off`",
        meaning: "HTTP for operators: /metrics, /livez, /readyz. Read-only and without \
            authentication.",
        put: put!(
            process.admin_listen =
                |text| { if text == "off" { Ok(None) } else { parse_listen(text).map(Some) } }
        ),
    },
    Key {
        name: "cores",
        scope: Scope::Process,
        kind: Kind::Number,
        placeholder: "N",
        fallback: Fallback::Value("1"),
        unit: "threads",
        range: "1..=64",
        meaning: "Number of executors; shard s runs on core s modulo `cores`. Fixed when the data \
            directory is made. More than `shards` only spreads connections.",
        put: put!(process.cores = |text| number(text, 1, 64)),
    },
    Key {
        name: "pin-cores",
        scope: Scope::Process,
        kind: Kind::Switch,
        placeholder: "BOOL",
        fallback: Fallback::Value("false"),
        unit: "",
        range: "true or false",
        meaning: "Binds each executor to a CPU of its own. For machines that do nothing else; on \
            shared or small ones it makes latency worse. `cores` must not exceed the CPUs then.",
        put: put!(process.pin_cores = switch),
    },
    Key {
        name: "wal-segment-mib",
        scope: Scope::Process,
        kind: Kind::Number,
        placeholder: "MIB",
        fallback: Fallback::Value("16"),
        unit: "MiB",
        range: "8..=1024",
        meaning: "Size of each segment file of the write-ahead log. Each core keeps at least two. \
            An existing segment keeps its size.",
        put: put!(process.wal_segment_mib = |text| number(text, 8, 1024)),
    },
    Key {
        name: "snapshot-entries",
        scope: Scope::Process,
        kind: Kind::Number,
        placeholder: "N",
        fallback: Fallback::Value("10000"),
        unit: "log entries",
        range: "10..=10000000",
        meaning: "Log entries between two snapshots of a shard. \
            Fewer means a faster restart and more writing.",
        put: put!(process.snapshot_entries = |text| number(text, 10, 10_000_000)),
    },
    Key {
        name: "snapshot-keep-entries",
        scope: Scope::Process,
        kind: Kind::Number,
        placeholder: "N",
        fallback: Fallback::Unset("twice `snapshot-entries`"),
        unit: "log entries",
        range: "20..=20000000, at least twice `snapshot-entries`",
        meaning: "Log entries kept behind a snapshot. A node that was away for less catches up \
            from the log; and a damaged newest snapshot can be replaced by the one before it.",
        put: put!(process.snapshot_keep_entries = |text| number(text, 20, 20_000_000).map(Some)),
    },
    Key {
        name: "client-connections-max",
        scope: Scope::Process,
        kind: Kind::Number,
        placeholder: "N",
        fallback: Fallback::Value("10000"),
        unit: "connections",
        range: "1..=1000000",
        meaning: "Most client connections of this node; one more is answered too_many_connections. The \
            limit of open files (`ulimit -n`) must leave room for it.",
        put: put!(process.client_connections_max = |text| number(text, 1, 1_000_000)),
    },
    Key {
        name: "watchdog-ms",
        scope: Scope::Process,
        kind: Kind::Number,
        placeholder: "MS",
        fallback: Fallback::Value("10000"),
        unit: "milliseconds",
        range: "1000..=600000",
        meaning: "Longest time without progress of an executor. Then the process ends with the \
            watchdog's exit code, so that the other nodes take over. More than twice \
            `election-max-ms`.",
        put: put!(process.watchdog_ms = |text| number(text, 1000, 600_000)),
    },
    Key {
        name: "log-level",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "LEVEL",
        fallback: Fallback::Value("info"),
        unit: "",
        range: "off, error, warn, info, debug, trace, or a filter as `info,openraft=debug`",
        meaning: "How much is logged to standard error. The Raft engine (`openraft`) is held at \
            `error` and the runtime (`glommio`) at `warn` unless a filter names them.",
        put: put!(process.log_level = log_level),
    },
    Key {
        name: "log-format",
        scope: Scope::Process,
        kind: Kind::Text,
        placeholder: "FORMAT",
        fallback: Fallback::Value("text"),
        unit: "",
        range: "text or json",
        meaning: "One line per event, as text or as a JSON object.",
        put: put!(process.log_format = log_format),
    },
];
