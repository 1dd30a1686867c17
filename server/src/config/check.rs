//! What single keys cannot tell: relations between values, each refusal naming its rule.

use std::net::SocketAddr;
use std::path::Path;

use leasehold_protocol::limits::TTL_MS_MIN;

use super::{Config, Problem};

/// Bytes of a cluster secret, blanks at its end not counted.
const SECRET_LEN: std::ops::RangeInclusive<usize> = 16..=1024;

impl Config {
    /// Everything wrong with values that are well-formed each on its own.
    pub(super) fn check(&self) -> Vec<Problem> {
        let mut problems = Problems(Vec::new());
        self.check_timings(&mut problems);
        self.check_members(&mut problems);
        self.check_addresses(&mut problems);
        self.check_process(&mut problems);
        problems.0
    }

    /// What is allowed but probably not meant, a sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let cores = self.process.cores;
        if cores as usize > cpus {
            warnings.push(format!("cores: {cores} executors share {cpus} CPUs"));
        }
        if cores > self.cluster.shards {
            let shards = self.cluster.shards;
            warnings.push(format!("cores: only {shards} of {cores} executors have a shard"));
        }
        let (max, failover) = (self.cluster.election_max_ms, 2 * self.cluster.election_max_ms);
        if failover > u64::from(TTL_MS_MIN) {
            warnings.push(format!(
                "election-max-ms: with {max} a change of leader takes up to {failover} ms, so \
                 leases with a shorter TTL are refused"
            ));
        }
        let listen = self.process.client_listen;
        if !listen.ip().is_loopback() {
            warnings.push(format!(
                "client-listen: {listen} is not loopback, and clients are not authenticated"
            ));
        }
        warnings
    }

    fn check_timings(&self, problems: &mut Problems) {
        let cluster = &self.cluster;
        let (heartbeat, min, max) =
            (cluster.heartbeat_ms, cluster.election_min_ms, cluster.election_max_ms);
        problems.unless(heartbeat * 3 <= min, "heartbeat-ms", || {
            format!("{heartbeat} must be at most a third of election-min-ms ({min})")
        });
        problems.unless(min < max, "election-min-ms", || {
            format!("{min} must be below election-max-ms ({max})")
        });
        let (keep, every) = (self.snapshot_keep_entries(), self.process.snapshot_entries);
        problems.unless(keep >= 2 * every, "snapshot-keep-entries", || {
            format!("{keep} must be at least twice snapshot-entries ({every})")
        });
        let watchdog = self.process.watchdog_ms;
        problems.unless(watchdog > 2 * max, "watchdog-ms", || {
            format!("{watchdog} must be more than twice election-max-ms ({max})")
        });
    }

    fn check_members(&self, problems: &mut Problems) {
        let peers = &self.cluster.peers;
        let join = self.process.join;
        problems.unless(!join || peers.len() > 1, "join", || {
            "peers names no other node that could admit this one".to_owned()
        });
        problems.unless(join || matches!(peers.len(), 1 | 3 | 5), "peers", || {
            format!(
                "{} nodes; a cluster has 1, 3 or 5 (an even one survives no more failures)",
                peers.len()
            )
        });
        let node = self.process.node_id;
        problems.unless(peers.contains_key(&node), "node-id", || {
            let ids: Vec<_> = peers.keys().map(ToString::to_string).collect();
            format!("{node} is not among the nodes of peers ({})", ids.join(", "))
        });
        match &self.cluster.secret_file {
            None => problems.unless(peers.len() == 1, "secret-file", || {
                "required if peers names other nodes".to_owned()
            }),
            Some(path) => {
                if let Err(what) = read_secret(path) {
                    problems.push("secret-file", what);
                }
            }
        }
    }

    fn check_addresses(&self, problems: &mut Problems) {
        let process = &self.process;
        let advertise = self.client_advertise();
        problems.unless(!advertise.is_unspecified(), "client-advertise", || {
            format!("{advertise} is no address to connect to; give client-advertise")
        });
        let advertise = self.peer_advertise();
        problems.unless(!advertise.is_unspecified(), "peer-advertise", || {
            format!("{advertise} is no address to connect to; give peer-advertise or peers")
        });
        let mut listens =
            vec![("client-listen", process.client_listen), ("peer-listen", process.peer_listen)];
        listens.extend(process.admin_listen.map(|admin| ("admin-listen", admin)));
        for (index, (key, address)) in listens.iter().enumerate() {
            for (other_key, other) in &listens[..index] {
                problems.unless(!collide(*address, *other), key, || {
                    format!("{address} collides with {other_key} ({other})")
                });
            }
        }
    }

    fn check_process(&self, problems: &mut Problems) {
        let process = &self.process;
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let cores = process.cores as usize;
        problems.unless(!process.pin_cores || cores <= cpus, "pin-cores", || {
            format!("{cores} cores cannot be bound to {cpus} CPUs")
        });
    }
}

/// The bytes of a cluster secret, blanks at its end cut off.
pub(crate) fn read_secret(path: &Path) -> Result<Vec<u8>, String> {
    let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let secret = bytes.trim_ascii_end();
    if SECRET_LEN.contains(&secret.len()) {
        return Ok(secret.to_vec());
    }
    let (low, high) = (SECRET_LEN.start(), SECRET_LEN.end());
    let found = secret.len();
    Err(format!("{}: {found} bytes, but a secret has {low}..={high}", path.display()))
}

fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let overlap = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    overlap && a.port() == b.port()
}

struct Problems(Vec<Problem>);

impl Problems {
    fn push(&mut self, key: &str, what: String) {
        self.0.push(Problem { key: key.to_owned(), what });
    }

    fn unless(&mut self, right: bool, key: &str, what: impl FnOnce() -> String) {
        if !right {
            self.push(key, what());
        }
    }
}
