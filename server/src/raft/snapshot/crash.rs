//! Power cuts while snapshots are published and the log behind them is purged: at every boundary of
//! the disk, what is left is a snapshot and a log that fit together (G5). The same for a second cut
//! during the start after the first.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::State;
use leasehold_protocol::command::Command;
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, Secret, ShardId, Token};
use openraft::AsyncRuntime;
use openraft::storage::RaftSnapshotBuilder;

use super::{Builder, Owner, Snapshots};
use crate::disk::sim::{SimDisk, SimDiskConfig, Tear};
use crate::env::Disk;
use crate::raft::convert;
use crate::raft::suite::SimEnv;
use crate::raft::types::{LeaderId, LogId, SnapshotMeta, StoredMembership};
use crate::rt::sim::{SimRng, SimRt, WorldConfig};
use crate::wal::{Recovered, Wal, WalConfig, WalIdentity};

const SHARD: ShardId = ShardId(5);
const OWNER: Owner = Owner { cluster: ClusterId([3; 16]), shard: SHARD };
/// Entries between two snapshots.
const STEP: u64 = 4;

fn run<T>(test: impl Future<Output = T>) -> T {
    SimRt::with_config(1, WorldConfig::default()).block_on(test)
}

fn at(index: u64) -> LogId {
    LogId::new(LeaderId { term: 4, node_id: 2 }, index)
}

fn meta(last: u64) -> SnapshotMeta {
    SnapshotMeta { last_log_id: Some(at(last)), last_membership: StoredMembership::default() }
}

/// The state after `last` entries: one lease an entry.
fn state(last: u64) -> State {
    let mut state = State::new(SHARD);
    let begin = Command::Begin { token_base: Token(10) };
    state.apply(1, &begin, &mut Vec::new());
    for _ in 0..last {
        let open = Command::Open { ttl_ms: 5_000, secret: Secret([1; 16]), label: vec![7; 90] };
        state.apply(1, &open, &mut Vec::new());
    }
    state
}

async fn open_wal(disk: &SimDisk) -> (Wal<SimEnv>, Recovered) {
    let identity = WalIdentity {
        cluster: OWNER.cluster,
        node: NodeId(1),
        disk: DiskId([1; 16]),
        core: 0,
        cores: 1,
        boot: 1,
    };
    let config = WalConfig { segment_len: 32 * 1024, ..WalConfig::default() };
    let salts = SimRng::new(disk.written_bytes().unwrap_or(0));
    let opened = Wal::open(config, identity, disk.clone(), move || salts.next()).await;
    let (wal, mut recovered) = opened.expect("no power cut makes a log unreadable");
    (wal, recovered.remove(&SHARD).unwrap_or_default())
}

/// What a node finds when it starts.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    /// Last entry of the newest good snapshot.
    snapshot: u64,
    /// Entries of the log, first to last.
    entries: Vec<u64>,
}

/// Starts on what the disk holds and checks that it fits together: a good snapshot that covers what
/// was purged and what was marked, and an entry for everything acknowledged beyond.
async fn check(disk: &SimDisk, acked: u64) -> Found {
    let (wal, recovered) = open_wal(disk).await;
    let opened = Snapshots::open(disk.clone(), wal.shard(SHARD), OWNER).await;
    let (snapshots, loaded) = opened.expect("the disk works");
    assert!(snapshots.damaged.borrow().is_empty(), "a published snapshot is whole");
    let last = loaded.as_ref().and_then(|loaded| loaded.meta.last_log_id);
    let snapshot = last.map_or(0, |last| last.index);
    if let Some(loaded) = loaded {
        assert_eq!(loaded.state.digest(), state(snapshot).digest());
    }
    let purged = recovered.purged.map_or(0, |(index, _)| index);
    assert!(purged <= snapshot, "purged up to {purged}, the newest snapshot is {snapshot}");
    if let Some(mark) = recovered.snapshot {
        let marked = convert::read_log_id(&mark).expect("it was written").index;
        assert!(marked <= snapshot, "snapshot {marked} is marked, {snapshot} is there");
    }
    let entries: Vec<u64> = recovered.entries.iter().map(|(index, _)| *index).collect();
    assert!(entries.first().is_none_or(|first| *first == purged + 1), "{purged}: {entries:?}");
    let last = entries.last().copied().unwrap_or(purged).max(snapshot);
    assert!(last >= acked, "{acked} were acknowledged, {last} are there");
    Found { snapshot, entries }
}

/// Collects the images at every boundary of `disk`.
fn watch(disk: &SimDisk, acked: &Rc<Cell<u64>>) -> Rc<RefCell<Vec<(SimDisk, u64)>>> {
    let images: Rc<RefCell<Vec<(SimDisk, u64)>>> = Rc::default();
    let (collected, acked, rng) = (images.clone(), acked.clone(), SimRng::new(5));
    disk.observe(move |disk| {
        let pieces = disk.unsynced(Tear::Page);
        for names_kept in 0..=disk.unsynced_names() {
            let subsets = if pieces.len() <= 4 { 1_u64 << pieces.len() } else { 16 };
            for mask in 0..subsets {
                let mask = if pieces.len() <= 4 { mask } else { rng.next() };
                let kept = pieces.iter().enumerate().filter(|(at, _)| mask >> (at % 64) & 1 == 1);
                let kept: Vec<_> = kept.map(|(_, piece)| piece.clone()).collect();
                collected.borrow_mut().push((disk.image(&kept, names_kept), acked.get()));
            }
        }
    });
    images
}

/// Appends entries; after every `STEP` of them takes a snapshot and purges up to the one before.
async fn live(disk: &SimDisk, acked: &Rc<Cell<u64>>) {
    let (wal, _) = open_wal(disk).await;
    let log = wal.shard(SHARD);
    let opened = Snapshots::open(disk.clone(), log.clone(), OWNER).await;
    let (snapshots, _) = opened.expect("the disk works");
    for index in 1..=6 * STEP {
        let acked = acked.clone();
        let done = move |result: Result<(), _>| {
            result.expect("the disk works");
            acked.set(index);
        };
        log.append([(index, vec![index as u8; 3_000].into())], done).expect("there is room");
        if index.is_multiple_of(STEP) {
            let mut builder = Builder::new(snapshots.clone(), meta(index), &state(index));
            builder.build_snapshot().await.expect("the disk works");
            if let Some(previous) = snapshots.previous() {
                let previous = previous.last_log_id.expect("it covers something");
                let record = convert::log_id_record(&previous);
                log.purge(previous.index, &record).expect("the log works");
            }
        }
        log.flush().await.expect("the disk works");
    }
    wal.close().await.expect("the disk works");
}

#[test]
fn snapshot_and_log_fit_together_after_any_power_cut() {
    let sync_max = Duration::from_micros(300);
    let disk = SimDisk::new(3, SimDiskConfig { sync_max, ..SimDiskConfig::default() });
    let acked = Rc::new(Cell::new(0));
    let images = watch(&disk, &acked);
    run(live(&disk, &acked));
    let images = images.take();
    let (mut checked, mut second, mut snapshots) = (0, 0, BTreeMap::<u64, usize>::new());
    for (number, (image, acked)) in images.iter().enumerate() {
        let again = watch(image, &Rc::new(Cell::new(*acked)));
        let found = run(check(image, *acked));
        *snapshots.entry(found.snapshot).or_default() += 1;
        checked += 1;
        if number % 2 == 0 {
            for (image, acked) in again.take() {
                run(check(&image, acked));
                second += 1;
            }
            image.observe(|_| {});
            image.lose_power(&[], 0);
            assert_eq!(run(check(image, *acked)), found, "what was handed out stays");
        }
    }
    println!("{checked} images, {second} of starts; by newest snapshot: {snapshots:?}");
    assert!(checked > 250 && second > 1_000 && snapshots.len() == 7, "INVALID: {snapshots:?}");
}
