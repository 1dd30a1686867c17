//! A new cluster in the place of one that is lost (DESIGN §4): from a backup, or by force from the
//! disk of one node when the majority is gone.
//!
//! Both find out what the old cluster's counters had reached, and leave in a fresh data directory,
//! that of the new cluster's lowest node, what its birth takes over. Nothing else is taken over:
//! leases, holds and queues end. Nothing is written before all that can be checked is checked, and
//! the old cluster's files are never changed.

mod survivor;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold_core::backup::{Contents, Inspector, Unsound};
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::shard::KEY_HASH;

use crate::config::Config;
use crate::env::Clock as _;
use crate::error::{Exit, NodeError};
use crate::identity::{DataDir, DataDirError, PlanError, RestorePlan, build_unix_ms};
use crate::rt::clock::OsClock;

/// Bytes of a backup that are read at once.
const READ_LEN: usize = 256 * 1024;

/// What is restored from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A backup's file.
    Backup(PathBuf),
    /// The data directory of a node whose cluster lost its majority.
    Survivor(PathBuf),
}

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// From where.
    pub source: Source,
    /// For how long the old cluster has answered nobody, by the operator's word.
    pub silent_for: Duration,
}

/// Why nothing was restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The backup cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The backup.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is damaged.
    #[error("{}: {source}", path.display())]
    Unsound {
        /// The backup.
        path: PathBuf,
        /// What is wrong with it.
        source: Unsound,
    },
    /// It was made under another key hash, which this build does not know.
    #[error("{}: it is of a cluster with key hash {found}; this build knows {KEY_HASH}", path.display())]
    KeyHash {
        /// The backup.
        path: PathBuf,
        /// Its key hash.
        found: u8,
    },
    /// The configured node does not make the birth of its cluster.
    #[error(
        "node {own} is not the lowest of its cluster: restore on node {lowest}, and start the \
         others with empty data directories"
    )]
    NotLowest {
        /// The configured node.
        own: NodeId,
        /// The one to restore on.
        lowest: NodeId,
    },
    /// The clock, or a counter at its end.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The clock is behind the build's date.
    #[error(
        "the wall clock ({wall_ms} ms since 1970) is behind this build's date ({build_ms} ms): set it"
    )]
    Clock {
        /// The clock, in Unix milliseconds.
        wall_ms: u64,
        /// The build's date, in Unix milliseconds.
        build_ms: u64,
    },
    /// The survivor's files are of no use.
    #[error("{}: shard {shard}: {reason}", path.display())]
    Survivor {
        /// Its data directory.
        path: PathBuf,
        /// The shard, or the core that holds it.
        shard: String,
        /// Why.
        reason: String,
    },
    /// A data directory.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
}

impl RestoreError {
    /// The code to exit with.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Read { .. }
            | Self::Unsound { .. }
            | Self::KeyHash { .. }
            | Self::Plan(PlanError::Exhausted) => Exit::BackupUnusable,
            Self::NotLowest { .. } => Exit::Usage,
            Self::Plan(PlanError::Clock { .. }) | Self::Clock { .. } => Exit::Clock,
            Self::Survivor { .. } => Exit::DataDirUnusable,
            Self::DataDir(error) => error.exit(),
        }
    }
}

/// Restores, and says on standard output what was done and what is to be done next.
pub fn run(request: &Request, config: &Config) -> Result<(), NodeError> {
    check_node(config)?;
    // Refused before a long backup is read; looked at again when the directory is made.
    DataDir::check_empty(&config.process.data_dir).map_err(RestoreError::from)?;
    let old = match &request.source {
        Source::Backup(path) => read_backup(path)?,
        Source::Survivor(path) => {
            eprint!("{}", loud(path));
            survivor::read(path)?
        }
    };
    let wall_ms = OsClock.wall_ms();
    let build_ms = build_unix_ms();
    if wall_ms < build_ms {
        return Err(RestoreError::Clock { wall_ms, build_ms }.into());
    }
    let silent_ms = u64::try_from(request.silent_for.as_millis()).unwrap_or(u64::MAX);
    let plan = RestorePlan::new(&old, wall_ms, silent_ms).map_err(RestoreError::from)?;
    DataDir::create_restored(config, &plan).map_err(RestoreError::from)?;
    print!("{}", report(&old, &plan, config));
    Ok(())
}

fn check_node(config: &Config) -> Result<(), RestoreError> {
    let own = config.process.node_id;
    match config.cluster.peers.keys().next() {
        Some(lowest) if *lowest != own => Err(RestoreError::NotLowest { own, lowest: *lowest }),
        _ => Ok(()),
    }
}

/// Reads a backup to its end; every byte of it is checked.
pub fn read_backup(path: &Path) -> Result<Contents, RestoreError> {
    let read = |source| RestoreError::Read { path: path.to_owned(), source };
    let unsound = |source| RestoreError::Unsound { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(read)?;
    let mut inspector = Inspector::new();
    let mut buffer = vec![0; READ_LEN];
    loop {
        match file.read(&mut buffer).map_err(read)? {
            0 => break,
            len => inspector.feed(&buffer[..len]).map_err(unsound)?,
        }
    }
    let contents = inspector.finish().map_err(unsound)?;
    let found = contents.header.key_hash;
    if found != KEY_HASH {
        return Err(RestoreError::KeyHash { path: path.to_owned(), found });
    }
    Ok(contents)
}

fn loud(path: &Path) -> String {
    format!(
        "FORCED RECOVERY from {} alone.\n\
         Whatever the lost majority decided that this node has not heard of is lost for good.\n\
         Do this only if the other nodes can never come back: started again beside the new\n\
         cluster, they would serve the old one. Their data directories must not be used again.\n",
        path.display()
    )
}

fn report(old: &Contents, plan: &RestorePlan, config: &Config) -> String {
    let mut text = String::new();
    let shards = &old.shards;
    let leases: u64 = shards.iter().map(|shard| shard.about.leases).sum();
    let holds: usize = shards.iter().map(|shard| shard.holds).sum();
    let waiters: usize = shards.iter().map(|shard| shard.waiters).sum();
    let Config { cluster, process } = config;
    let quarantine_s = plan.restored.quarantine_ms.div_ceil(1_000);
    let _ = writeln!(
        text,
        "restored into {}: {} shard(s) of cluster {} become {} of cluster {:?}, under a new id\n\
         ended: {leases} lease(s), {holds} hold(s), {waiters} waiter(s)\n\
         tokens start above {}",
        process.data_dir.display(),
        old.header.shards,
        old.header.cluster,
        cluster.shards,
        cluster.name,
        plan.token_floor
    );
    let _ = if quarantine_s == 0 {
        writeln!(text, "keys are granted at once: the old cluster has been silent for long enough")
    } else {
        writeln!(
            text,
            "no key is granted for {quarantine_s} s after a leader's beginning: until then a client \
             of the old cluster may rely on its hold"
        )
    };
    let _ = writeln!(text, "next: start this node, and the others with empty data directories");
    text
}
