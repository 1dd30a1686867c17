//! The test programs, and the tiers in which they are run: the cheapest first.

use std::fmt;
use std::time::Duration;

/// One test program.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Program {
    pub(crate) package: &'static str,
    /// The name of its target; `lib` for a crate's unit tests.
    pub(crate) target: &'static str,
    pub(crate) arguments: &'static [&'static str],
    /// Whoever takes longer hangs.
    pub(crate) limit: Duration,
}

impl Program {
    /// It starts the workspace's own programs.
    pub(crate) fn needs_bins(&self) -> bool {
        self.package == BENCH || self.package == CLIENT && self.target != "lib"
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let package = self.package.trim_start_matches("leasehold-");
        write!(f, "{package} {}", self.target)?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {argument}"))
    }
}

/// Programs of one kind. All but the last are what `make test` runs, at the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    /// Frames and connections.
    Protocol,
    /// The state machine and lease time.
    Core,
    /// The server's unit tests.
    Server,
    /// The log: recovery, damage, crash images.
    Wal,
    /// Raft on simulated nodes.
    Raft,
    /// One shard's service on simulated nodes.
    Shard,
    /// The whole server on virtual time.
    Simulator,
    /// The client's core on virtual time.
    Client,
    /// Client and command line against a real cluster.
    Cluster,
    /// Faults on real processes.
    Processes,
    /// The simulator with more seeds than `make test` takes.
    LongSimulator,
}

const LIMIT: Duration = Duration::from_mins(5);

const fn program(package: &'static str, target: &'static str) -> Program {
    Program { package, target, arguments: &[], limit: LIMIT }
}

const PROTOCOL: &str = "leasehold-protocol";
const CORE: &str = "leasehold-core";
const SERVER: &str = "leasehold-server";
const SIM: &str = "leasehold-sim";
const CLIENT: &str = "leasehold";
const BENCH: &str = "leasehold-bench";

static PROTOCOL_TESTS: [Program; 5] = [
    program(PROTOCOL, "frames"),
    program(PROTOCOL, "conn"),
    program(PROTOCOL, "golden"),
    program(PROTOCOL, "lib"),
    program(PROTOCOL, "hostile"),
];
static CORE_TESTS: [Program; 6] = [
    program(CORE, "scripts"),
    program(CORE, "lib"),
    program(CORE, "batch"),
    program(CORE, "wheel"),
    program(CORE, "model"),
    program(CORE, "search"),
];
static SERVER_TESTS: [Program; 1] = [program(SERVER, "lib")];
static WAL_TESTS: [Program; 5] = [
    program(SERVER, "wal_recovery"),
    program(SERVER, "wal_failure"),
    program(SERVER, "wal_damage"),
    program(SERVER, "wal_disk"),
    program(SERVER, "wal_images"),
];
static RAFT_TESTS: [Program; 7] = [
    program(SERVER, "raft_confirm"),
    program(SERVER, "raft_faults"),
    program(SERVER, "raft_cluster"),
    program(SERVER, "raft_peers"),
    program(SERVER, "raft_pins"),
    program(SERVER, "raft_recipes"),
    program(SERVER, "suites"),
];
static SHARD_TESTS: [Program; 2] = [program(SERVER, "shard"), program(SERVER, "shard_takeover")];
static SIMULATOR: [Program; 1] = [Program { limit: LONG, ..program(SIM, "sim") }];
static CLIENT_TESTS: [Program; 1] = [program(CLIENT, "lib")];
static CLUSTER_TESTS: [Program; 3] =
    [program(CLIENT, "api"), program(CLIENT, "cluster"), program(CLIENT, "cli")];
static PROCESS_TESTS: [Program; 8] = [
    program(BENCH, "contention"),
    program(BENCH, "restart"),
    program(BENCH, "snapshot"),
    program(BENCH, "identity"),
    program(BENCH, "modes"),
    program(BENCH, "watch"),
    program(BENCH, "recipes_leader"),
    program(BENCH, "members"),
];
static LONG_SIMULATOR: [Program; 1] =
    [Program { arguments: &["--seeds", "100"], limit: LONG, ..program(SIM, "sim") }];

const LONG: Duration = Duration::from_mins(30);

impl Tier {
    pub(crate) fn programs(self) -> &'static [Program] {
        match self {
            Self::Protocol => &PROTOCOL_TESTS,
            Self::Core => &CORE_TESTS,
            Self::Server => &SERVER_TESTS,
            Self::Wal => &WAL_TESTS,
            Self::Raft => &RAFT_TESTS,
            Self::Shard => &SHARD_TESTS,
            Self::Simulator => &SIMULATOR,
            Self::Client => &CLIENT_TESTS,
            Self::Cluster => &CLUSTER_TESTS,
            Self::Processes => &PROCESS_TESTS,
            Self::LongSimulator => &LONG_SIMULATOR,
        }
    }
}
