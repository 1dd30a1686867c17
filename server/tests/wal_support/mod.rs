//! What the WAL's tests share: an environment on simulated parts, short names for the calls, and a
//! naive model of what a log holds after its first `n` records.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

#[path = "../sim_env/mod.rs"]
pub mod sim_env;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

pub use leasehold_protocol::ids::ShardId;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId};
use leasehold_server::disk::sim::{SimDisk, SimDiskConfig};
use leasehold_server::env::Disk;
use leasehold_server::rt::sim::SimRng;
pub use leasehold_server::wal::Recovered;
use leasehold_server::wal::{Wal, WalConfig, WalError, WalFailed, WalIdentity};
pub use sim_env::{SimEnv, run};

pub type Log = Wal<SimEnv>;
pub type State = BTreeMap<ShardId, Recovered>;

pub const IDENTITY: WalIdentity = WalIdentity {
    cluster: ClusterId([1; 16]),
    node: NodeId(2),
    disk: DiskId([3; 16]),
    core: 0,
    cores: 1,
    boot: 1,
};

pub const A: ShardId = ShardId(0);
pub const B: ShardId = ShardId(1);
pub const C: ShardId = ShardId(2);

/// Segments of 64 KiB, so that few records fill one.
pub fn small() -> WalConfig {
    WalConfig { segment_len: 64 * 1024, ..WalConfig::default() }
}

/// A disk whose syncs take up to 200 us.
pub fn disk() -> SimDisk {
    SimDisk::new(7, SimDiskConfig { sync_max: Duration::from_micros(200), ..Default::default() })
}

pub async fn open_as(
    config: WalConfig,
    identity: WalIdentity,
    disk: &SimDisk,
) -> Result<(Log, State), WalError> {
    let salts = SimRng::new(disk.written_bytes().unwrap_or(0) ^ 0x5a17);
    Wal::open(config, identity, disk.clone(), move || salts.next()).await
}

pub async fn open_with(config: WalConfig, disk: &SimDisk) -> Result<(Log, State), WalError> {
    open_as(config, IDENTITY, disk).await
}

pub async fn open(disk: &SimDisk) -> (Log, State) {
    open_with(small(), disk).await.expect("a sound log opens")
}

/// Opens a log of a world of its own, only to see what is there.
pub fn recover(disk: &SimDisk) -> Result<State, WalError> {
    run(1, async { open_with(small(), disk).await.map(|(_, state)| state) })
}

pub fn payload(index: u64, len: usize) -> Rc<[u8]> {
    let mut bytes = vec![index as u8; len];
    let head = index.to_le_bytes();
    let shown = head.len().min(len);
    bytes[..shown].copy_from_slice(&head[..shown]);
    bytes.into()
}

/// One staged call.
#[derive(Clone, Debug)]
pub enum Call {
    Append { shard: ShardId, index: u64, len: usize },
    Vote { shard: ShardId, vote: u8 },
    Truncate { shard: ShardId, last_kept: Option<u64> },
    Purge { shard: ShardId, index: u64 },
    Mark { shard: ShardId, mark: u8 },
}

/// The state after `calls`, as a test would write it down by hand.
pub fn model(calls: &[Call]) -> State {
    let mut state = State::new();
    for call in calls {
        let (Call::Append { shard, .. }
        | Call::Vote { shard, .. }
        | Call::Truncate { shard, .. }
        | Call::Purge { shard, .. }
        | Call::Mark { shard, .. }) = call;
        let shard = state.entry(*shard).or_default();
        match call {
            Call::Append { index, len, .. } => shard.entries.push((*index, payload(*index, *len))),
            Call::Vote { vote, .. } => shard.vote = Some(vec![*vote; 24]),
            Call::Truncate { last_kept, .. } => {
                shard.entries.retain(|(index, _)| last_kept.is_some_and(|last| *index <= last));
            }
            Call::Purge { index: purged, .. } => {
                shard.purged = Some((*purged, purged.to_le_bytes().to_vec()));
                shard.entries.retain(|(index, _)| index > purged);
            }
            Call::Mark { mark, .. } => shard.snapshot = Some(vec![*mark; 24]),
        }
    }
    state
}

/// Makes calls and counts how many were acknowledged: all before the last acknowledged append or
/// vote.
#[derive(Clone, Default)]
pub struct History {
    pub calls: Rc<RefCell<Vec<Call>>>,
    pub acked: Rc<Cell<usize>>,
    pub errors: Rc<Cell<usize>>,
}

impl History {
    /// Stages a call. An acknowledgement that skips an earlier one would be a bug of the log.
    pub async fn call(&self, log: &Log, call: Call) -> Result<(), WalFailed> {
        self.calls.borrow_mut().push(call.clone());
        let number = self.calls.borrow().len();
        match call {
            Call::Append { shard, index, len } => {
                let this = self.clone();
                log.shard(shard).append([(index, payload(index, len))], move |result| {
                    this.answered(number, result.is_ok());
                })
            }
            Call::Vote { shard, vote } => {
                log.shard(shard).save_vote(&[vote; 24]).await?;
                self.answered(number, true);
                Ok(())
            }
            Call::Truncate { shard, last_kept } => log.shard(shard).truncate_after(last_kept),
            Call::Purge { shard, index } => log.shard(shard).purge(index, &index.to_le_bytes()),
            Call::Mark { shard, mark } => log.shard(shard).snapshot_mark(&[mark; 24]),
        }
    }

    fn answered(&self, number: usize, durable: bool) {
        if durable {
            assert!(number > self.acked.get(), "acknowledgements come in order");
            self.acked.set(number);
        } else {
            self.errors.set(self.errors.get() + 1);
        }
    }

    /// Panics unless `found` is the state after all acknowledged calls and some prefix of the
    /// others. Returns that prefix's length.
    pub fn check(&self, acked: usize, found: &State) -> usize {
        let calls = self.calls.borrow();
        let found = without_committed(found);
        let fits = (acked..=calls.len()).rev().find(|len| model(&calls[..*len]) == found);
        fits.unwrap_or_else(|| {
            panic!("{acked} of {} calls were acknowledged; found {found:?}", calls.len())
        })
    }
}

/// Commit positions are saved lazily: they are checked by themselves.
pub fn without_committed(state: &State) -> State {
    let mut state = state.clone();
    for shard in state.values_mut() {
        shard.committed = None;
    }
    state
}

/// Random calls that a Raft node could make, seeded; `len` of them.
pub fn random_calls(rng: &SimRng, shards: u64, len: usize, payload_max: u64) -> Vec<Call> {
    let mut ranges: BTreeMap<ShardId, (u64, u64)> = BTreeMap::new();
    let mut calls = Vec::new();
    while calls.len() < len {
        let shard = ShardId(rng.below(shards) as u32);
        let (first, next) = ranges.entry(shard).or_insert((1, 1));
        calls.push(match rng.below(20) {
            0 => Call::Vote { shard, vote: rng.below(250) as u8 },
            1 => Call::Mark { shard, mark: rng.below(250) as u8 },
            2 if first < next => {
                *next = *first + rng.below(*next - *first);
                Call::Truncate { shard, last_kept: next.checked_sub(1) }
            }
            3 | 4 if first < next => {
                let index = *first + rng.below(*next - *first);
                *first = index + 1;
                Call::Purge { shard, index }
            }
            _ => {
                *next += 1;
                let len = rng.below(payload_max) as usize;
                Call::Append { shard, index: *next - 1, len }
            }
        });
    }
    calls
}
