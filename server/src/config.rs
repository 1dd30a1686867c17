//! The server's configuration: what every node of a cluster must agree on, apart from what
//! concerns one process (`Cluster` and `Process`).
//!
//! Owns reading and checking. Values come from a TOML file and from flags of the same names, the
//! flags winning; a key's syntax, default and documentation are one entry of `KEYS`. Every problem
//! is reported at once, and an unknown key is a problem. A `Config` that exists has passed every
//! check, so nobody else checks again.

mod address;
mod check;
mod docs;
mod keys;
mod source;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use leasehold_protocol::ids::NodeId;

pub use self::address::HostPort;
pub use self::docs::markdown;
pub use self::keys::{Fallback, KEYS, Key, Kind, Scope, find};
pub use self::source::Settings;

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What every node of the cluster must agree on.
    pub cluster: Cluster,
    /// What concerns this process alone.
    pub process: Process,
}

/// Equal on every node. Meanings, ranges and relations: `KEYS`, docs/CONFIG.md.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The cluster's name, for people.
    pub name: String,
    /// Every node's peer address, this node's included; never empty in a checked configuration.
    pub peers: BTreeMap<NodeId, HostPort>,
    /// Number of shards.
    pub shards: u32,
    /// The file with the cluster secret; `None` only for a single node.
    pub secret_file: Option<PathBuf>,
    /// Time between heartbeats, in milliseconds.
    pub heartbeat_ms: u64,
    /// Shortest election time-out, in milliseconds.
    pub election_min_ms: u64,
    /// Longest election time-out, in milliseconds.
    pub election_max_ms: u64,
    /// Tokens start above this at birth; 0 for none.
    pub token_floor: u64,
}

/// One process's own. Meanings, ranges and relations: `KEYS`, docs/CONFIG.md.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// This node.
    pub node_id: NodeId,
    /// It founds no cluster, but waits until one admits it.
    pub join: bool,
    /// The data directory.
    pub data_dir: PathBuf,
    /// Where clients connect.
    pub client_listen: SocketAddr,
    /// See `Config::client_advertise`.
    client_advertise: Option<HostPort>,
    /// Where peers connect.
    pub peer_listen: SocketAddr,
    /// See `Config::peer_advertise`.
    peer_advertise: Option<HostPort>,
    /// Where operators' HTTP is served, if anywhere.
    pub admin_listen: Option<SocketAddr>,
    /// Number of executors.
    pub cores: u32,
    /// Each executor is bound to a CPU.
    pub pin_cores: bool,
    /// Size of a WAL segment, in MiB.
    pub wal_segment_mib: u64,
    /// Applied entries between two snapshots of a shard.
    pub snapshot_entries: u64,
    /// See `Config::snapshot_keep_entries`.
    snapshot_keep_entries: Option<u64>,
    /// Most client connections.
    pub client_connections_max: usize,
    /// Longest time without progress of an executor, in milliseconds.
    pub watchdog_ms: u64,
    /// Level or filter of the log.
    pub log_level: String,
    /// Format of the log.
    pub log_format: LogFormat,
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// One thing wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The key concerned.
    pub key: String,
    /// What is wrong, and the rule.
    pub what: String,
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.what)
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("config file {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not TOML.
    #[error("config file {} is not TOML: {source}", path.display())]
    NotToml {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// Everything that is wrong with the values, one line each.
    #[error("the configuration has {} problem(s):{}", .0.len(), lines(.0))]
    Problems(Vec<Problem>),
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().fold(String::new(), |text, problem| text + "\n  " + &problem.to_string())
}

impl Config {
    /// Parses and checks settings, and completes what other keys imply. Reads the secret file's
    /// length; touches nothing else.
    pub fn resolve(settings: &Settings) -> Result<Self, ConfigError> {
        let mut problems = settings.problems.clone();
        let mut config = Self::blank();
        for key in KEYS {
            let given = settings.values.get(key.name);
            let text = match (given, key.fallback) {
                (Some(given), _) => given.text.as_str(),
                (None, Fallback::Value(value)) => value,
                (None, Fallback::Unset(_)) => continue,
                (None, Fallback::Required) => {
                    let what = "required, but not given".to_owned();
                    problems.push(Problem { key: key.name.to_owned(), what });
                    continue;
                }
            };
            if let Err(what) = (key.put)(&mut config, text) {
                let origin = given.map_or("its default", |given| given.origin.as_str());
                let what = format!("{what} (from {origin})");
                problems.push(Problem { key: key.name.to_owned(), what });
            }
        }
        // Relations are judged only between values that could be read: no follow-up noise.
        if problems.is_empty() {
            config.complete();
            problems = config.check();
        }
        if problems.is_empty() { Ok(config) } else { Err(ConfigError::Problems(problems)) }
    }

    /// The address told to clients and other nodes.
    pub fn client_advertise(&self) -> HostPort {
        let process = &self.process;
        process.client_advertise.clone().unwrap_or_else(|| process.client_listen.into())
    }

    /// The address told to peers.
    pub fn peer_advertise(&self) -> HostPort {
        let process = &self.process;
        let listed = || self.cluster.peers.get(&process.node_id).cloned();
        process.peer_advertise.clone().or_else(listed).unwrap_or_else(|| process.peer_listen.into())
    }

    /// Log entries kept behind a snapshot.
    pub fn snapshot_keep_entries(&self) -> u64 {
        let process = &self.process;
        process.snapshot_keep_entries.unwrap_or(2 * process.snapshot_entries)
    }

    /// The cluster secret; `None` for a single node without one, which then admits no peer.
    pub fn secret(&self) -> Result<Option<Vec<u8>>, ConfigError> {
        let read = self.cluster.secret_file.as_deref().map(check::read_secret).transpose();
        read.map_err(|what| {
            ConfigError::Problems(vec![Problem { key: "secret-file".to_owned(), what }])
        })
    }

    /// Fields as `resolve` finds them before the first key is put; no key keeps such a value.
    fn blank() -> Self {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        Self {
            cluster: Cluster {
                name: String::new(),
                peers: BTreeMap::new(),
                shards: 0,
                secret_file: None,
                heartbeat_ms: 0,
                election_min_ms: 0,
                election_max_ms: 0,
                token_floor: 0,
            },
            process: Process {
                node_id: NodeId(0),
                join: false,
                data_dir: PathBuf::new(),
                client_listen: nowhere,
                client_advertise: None,
                peer_listen: nowhere,
                peer_advertise: None,
                admin_listen: None,
                cores: 0,
                pin_cores: false,
                wal_segment_mib: 0,
                snapshot_entries: 0,
                snapshot_keep_entries: None,
                client_connections_max: 0,
                watchdog_ms: 0,
                log_level: String::new(),
                log_format: LogFormat::Text,
            },
        }
    }

    fn complete(&mut self) {
        if self.cluster.peers.is_empty() {
            let own = self.peer_advertise();
            self.cluster.peers.insert(self.process.node_id, own);
        }
    }
}
