//! What happened in one run, as its clients saw it: the only input of the checkers.
//!
//! Owns the record types, the recorder that the clients of a run share, and the file form (JSON,
//! one record a line). Must never judge: that is the checkers' part.
//!
//! Invariants: all times are nanoseconds of one monotonic clock; an operation is recorded once,
//! with the invocation of its first attempt and the return of its last; an answer that did not
//! arrive is `Outcome::Unknown`, never guessed.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

mod applied;

pub use applied::{Applied, Cause, Change};

/// Records that one recorder keeps; a run that makes more is refused, not cut.
pub const RECORDS_MAX: usize = 8_000_000;

/// One line of a history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// One call of a client.
    Op(Op),
    /// One lease-renewing message.
    Renewal(Renewal),
    /// A client library's own statement about a hold.
    Claim(Claim),
    /// A client learned that a hold or a lease is at its end without having ended it.
    Lost(Lost),
    /// A write that reached a store which checks tokens.
    Store(StoreWrite),
    /// What the cluster said after the last fault was lifted.
    Final(FinalState),
    /// A fault that the harness made.
    Fault(Fault),
    /// What a node applied, if the harness could see it.
    Applied(Applied),
    /// How full something was at the most.
    Peak(Peak),
}

/// One call: from the first send of its request to its final answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// The client that called, numbered by the harness.
    pub client: u32,
    /// The shard that answered.
    pub shard: u32,
    /// The lease that acts, if the client's interface shows it.
    pub lease: Option<u64>,
    /// The command's number within its lease, if shown.
    pub number: Option<u64>,
    /// The key; empty where there is none.
    pub key: String,
    /// What was asked.
    pub kind: OpKind,
    /// Before the first attempt was sent.
    pub invoke_ns: u64,
    /// After the final answer was read; `None` if there was none.
    pub return_ns: Option<u64>,
    /// How often the request was sent.
    pub attempts: u32,
    /// When and where the wait began: only if the very first attempt was answered with `queued`.
    /// The answer to a retry tells where the wait stands, not where it began.
    pub queued: Option<QueuedAt>,
    /// What came of it.
    pub outcome: Outcome,
}

/// A wait's place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedAt {
    /// The shard's revision of the enqueueing.
    pub revision: u64,
    /// When the client read that answer.
    pub at_ns: u64,
}

/// What a call asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// A new lease.
    Open {
        /// Its time to live, in milliseconds.
        ttl_ms: u32,
    },
    /// A hold.
    Acquire {
        /// Longest wait, in milliseconds; 0 decides at once.
        wait_ms: u32,
    },
    /// The end of a wait.
    Cancel {
        /// The number of the acquire that waits.
        acquire: u64,
        /// Give the hold back if there is one already.
        release_if_granted: bool,
    },
    /// The end of a hold.
    Release {
        /// Its token.
        token: u64,
    },
    /// The end of a lease.
    Close,
    /// Who holds the key?
    Get,
    /// An operator's end of a hold.
    ForceRelease {
        /// Its token.
        token: u64,
        /// Without waiting for the hold's last possible validity.
        now: bool,
    },
}

/// What came of a call. Revisions are `None` where the client's interface does not show them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The lease exists.
    Opened {
        /// The revision of that change.
        revision: Option<u64>,
    },
    /// The client holds the key.
    Granted {
        /// The fencing token.
        token: u64,
        /// The lease that holds, if it is not the caller's.
        own_lease: Option<u64>,
        /// The revision of the grant.
        revision: Option<u64>,
    },
    /// The wait ended without a hold.
    Ended {
        /// The revision of that change.
        revision: Option<u64>,
    },
    /// The hold is given back.
    Released {
        /// Its token.
        token: u64,
        /// The revision of that change.
        revision: Option<u64>,
    },
    /// The lease is closed, or the hold's forced end is noted.
    Done {
        /// The revision of that change.
        revision: Option<u64>,
    },
    /// The answer to a read.
    Read {
        /// The holder's token, `None` if nobody holds.
        token: Option<u64>,
        /// The revision at which it was read.
        revision: u64,
        /// The reader asked for an answer that may lag.
        stale: bool,
    },
    /// A definite failure: nothing was changed.
    Refused {
        /// The error's stable name.
        code: String,
        /// The present token where the answer names it.
        token: Option<u64>,
        /// The revision at which this was decided, if it was decided by the state.
        revision: Option<u64>,
    },
    /// Applied or not.
    Unknown,
}

impl Op {
    /// The call certainly had no effect: it was refused, and no copy of it was sent before, whose
    /// answer may have been lost. For commands without a number; others get the first answer again.
    pub fn had_no_effect(&self) -> bool {
        self.outcome.is_definite_failure() && self.attempts <= 1
    }
}

impl Outcome {
    /// The shard's revision that the answer carried.
    pub fn revision(&self) -> Option<u64> {
        match self {
            Self::Opened { revision }
            | Self::Granted { revision, .. }
            | Self::Ended { revision }
            | Self::Released { revision, .. }
            | Self::Done { revision }
            | Self::Refused { revision, .. } => *revision,
            Self::Read { revision, .. } => Some(*revision),
            Self::Unknown => None,
        }
    }

    /// The effect is acknowledged.
    pub fn is_ok(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::Unknown)
    }

    /// The call certainly had no effect.
    pub fn is_definite_failure(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

/// One message that restarts a lease's TTL: an open, or a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewal {
    /// The client that sent it.
    pub client: u32,
    /// The lease's shard.
    pub shard: u32,
    /// The lease.
    pub lease: u64,
    /// The lease's time to live, in milliseconds.
    pub ttl_ms: u32,
    /// Before it was sent.
    pub send_ns: u64,
    /// When its acknowledgement was read; `None` if it was not acknowledged.
    pub ack_ns: Option<u64>,
}

/// "This hold is mine until then", as the client library said it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The client.
    pub client: u32,
    /// The key.
    pub key: String,
    /// The hold's token.
    pub token: u64,
    /// Before the library was asked.
    pub at_ns: u64,
    /// The end of the validity that it stated; at or before `at_ns` if it stated none.
    pub until_ns: u64,
}

/// The end of a hold, or of all holds of a lease, that its client did not ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The client.
    pub client: u32,
    /// The shard.
    pub shard: u32,
    /// The lease that ended, if shown.
    pub lease: Option<u64>,
    /// The key, if one hold ended.
    pub key: Option<String>,
    /// The token of that hold.
    pub token: Option<u64>,
    /// When the client learned it.
    pub at_ns: u64,
    /// In the client's words.
    pub cause: String,
}

/// A write to a store that checks tokens, in the order in which the store took them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreWrite {
    /// Who wrote.
    pub client: u32,
    /// The key whose token guards the write.
    pub key: String,
    /// The token that came with it.
    pub token: u64,
    /// The store took it.
    pub accepted: bool,
    /// When the store decided.
    pub at_ns: u64,
}

/// The cluster's state after the last fault was lifted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinalState {
    /// Before the first question was sent.
    pub invoke_ns: u64,
    /// After the last answer was read.
    pub return_ns: u64,
    /// The shard.
    pub shard: u32,
    /// The revision at which the keys were read.
    pub revision: u64,
    /// All keys of the shard that are held or waited for.
    pub keys: Vec<FinalKey>,
    /// Every node's own account of its state.
    pub nodes: Vec<FinalNode>,
    /// The nodes that say that they lead the shard.
    #[serde(default)]
    pub leaders: Vec<u64>,
}

/// One key of a final state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinalKey {
    /// The key.
    pub key: String,
    /// The holders' leases and tokens.
    pub holders: Vec<(u64, u64)>,
    /// The waiters' leases and numbers, in queue order.
    pub waiters: Vec<(u64, u64)>,
}

/// One node of a final state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinalNode {
    /// The node.
    pub node: u64,
    /// Its applied revision.
    pub revision: u64,
    /// Its digest there.
    pub digest: u64,
}

/// A fault that the harness made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// When.
    pub at_ns: u64,
    /// Which.
    pub kind: FaultKind,
    /// The node, 0 for all or for a client.
    pub node: u64,
}

/// The kinds of faults, for coverage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// kill -9 of a shard's leader.
    LeaderKilled,
    /// kill -9 of another node.
    FollowerKilled,
    /// kill -9 of all nodes.
    AllKilled,
    /// SIGSTOP of the leader, past an election.
    LeaderStopped,
    /// A node started again.
    Restarted,
    /// A follower was given a snapshot.
    SnapshotInstalled,
    /// SIGSTOP of a client, past its TTL.
    ClientStopped,
    /// kill -9 of a client, or silence that is meant.
    ClientKilled,
    /// Links cut.
    Partitioned,
    /// All links whole again.
    Healed,
}

/// The most that a bounded thing of a node ever held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peak {
    /// The node.
    pub node: u64,
    /// What.
    pub name: String,
    /// The most that was seen.
    pub seen: u64,
    /// The stated limit.
    pub limit: u64,
}

/// All records of one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// In no particular order.
    pub records: Vec<Record>,
}

macro_rules! select {
    ($(#[$doc:meta])* $name:ident, $variant:ident, $type:ty) => {
        $(#[$doc])*
        pub fn $name(&self) -> impl Iterator<Item = &$type> {
            self.records.iter().filter_map(|record| match record {
                Record::$variant(item) => Some(item),
                _ => None,
            })
        }
    };
}

impl History {
    select!(
        /// The calls.
        ops,
        Op,
        Op
    );
    select!(
        /// The lease-renewing messages.
        renewals,
        Renewal,
        Renewal
    );
    select!(
        /// The client libraries' statements.
        claims,
        Claim,
        Claim
    );
    select!(
        /// The losses that clients learned of.
        losses,
        Lost,
        Lost
    );
    select!(
        /// The guarded writes.
        store_writes,
        Store,
        StoreWrite
    );
    select!(
        /// The final states, one a shard.
        finals,
        Final,
        FinalState
    );
    select!(
        /// The faults.
        faults,
        Fault,
        Fault
    );
    select!(
        /// What nodes applied.
        applied,
        Applied,
        Applied
    );
    select!(
        /// How full things were.
        peaks,
        Peak,
        Peak
    );

    /// Writes one JSON record a line, replacing the file.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        for record in &self.records {
            serde_json::to_writer(&mut out, record)?;
            out.write_all(b"\n")?;
        }
        out.flush()
    }

    /// Reads what `save` wrote; a bad line is an error that names it.
    pub fn load(path: &Path) -> io::Result<Self> {
        let mut records = Vec::new();
        for (index, line) in BufReader::new(File::open(path)?).lines().enumerate() {
            let record = serde_json::from_str(&line?).map_err(|error| {
                let text = format!("{}, line {}: {error}", path.display(), index + 1);
                io::Error::new(io::ErrorKind::InvalidData, text)
            })?;
            records.push(record);
        }
        Ok(Self { records })
    }
}

/// Takes the records of all clients of one run.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<Vec<Record>>>);

impl Recorder {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps one record. Panics when the run is larger than a history may be: a cut history
    /// would be judged wrongly.
    pub fn push(&self, record: Record) {
        let mut records = self.records();
        assert!(records.len() < RECORDS_MAX, "the run made more than {RECORDS_MAX} records");
        records.push(record);
    }

    /// Notes a fault at this moment.
    pub fn fault(&self, kind: FaultKind, node: u64) {
        let at_ns = crate::clock::now_ns();
        self.push(Record::Fault(Fault { at_ns, kind, node }));
    }

    /// All records so far.
    pub fn history(&self) -> History {
        History { records: self.records().clone() }
    }

    fn records(&self) -> MutexGuard<'_, Vec<Record>> {
        self.0.lock().expect("no holder of this lock panics while it changes the records")
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorder({} records)", self.records().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_survives_its_file() {
        let history = History {
            records: vec![
                Record::Op(Op {
                    client: 3,
                    shard: 0,
                    lease: Some(7),
                    number: Some(4),
                    key: "a/b".into(),
                    kind: OpKind::Acquire { wait_ms: 10 },
                    invoke_ns: 5,
                    return_ns: Some(9),
                    attempts: 2,
                    queued: Some(QueuedAt { revision: 4, at_ns: 6 }),
                    outcome: Outcome::Granted { token: 9, own_lease: None, revision: Some(5) },
                }),
                Record::Fault(Fault { at_ns: 4, kind: FaultKind::LeaderKilled, node: 2 }),
                Record::Final(FinalState {
                    keys: vec![FinalKey {
                        key: "k".into(),
                        holders: vec![(1, 2)],
                        waiters: vec![(3, 4)],
                    }],
                    ..FinalState::default()
                }),
            ],
        };
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("history.jsonl");
        history.save(&path).expect("written");
        assert_eq!(History::load(&path).expect("read"), history);
    }

    #[test]
    fn a_bad_line_is_named() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("history.jsonl");
        let line = r#"{"record":"fault","at_ns":1,"kind":"healed","node":0}"#;
        std::fs::write(&path, format!("{line}\nnonsense\n")).expect("written");
        let error = History::load(&path).expect_err("the second line is no record");
        assert!(error.to_string().contains("line 2"), "{error}");
    }
}
