//! The log: what it keeps, cuts and refuses, beside the engine's own suite.

use std::collections::BTreeMap;

use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, ShardId};
use openraft::AsyncRuntime;
use openraft::async_runtime::Oneshot;

use super::*;
use crate::disk::sim::{SimDisk, SimDiskConfig};
use crate::raft::suite::SimEnv;
use crate::raft::types::{EntryData, LeaderId, Member};
use crate::rt::channels::LocalOneshot;
use crate::rt::sim::{SimRt, WorldConfig};
use crate::wal::{Wal, WalConfig, WalIdentity};

const SHARD: ShardId = ShardId(0);

fn run<T>(test: impl Future<Output = T>) -> T {
    SimRt::with_config(3, WorldConfig::default()).block_on(test)
}

fn at(term: u64, index: u64) -> LogId {
    LogId::new(LeaderId { term, node_id: 1 }, index)
}

fn blank(term: u64, index: u64) -> Entry {
    Entry { log_id: at(term, index), payload: EntryPayload::Blank }
}

fn batch(index: u64, len: usize) -> Entry {
    let payload = EntryPayload::Normal(EntryData::from(vec![7; len]));
    Entry { log_id: at(1, index), payload }
}

fn members(index: u64, voters: &[u64]) -> Entry {
    let nodes: BTreeMap<u64, Member> =
        voters.iter().map(|voter| (*voter, Member::default())).collect();
    let voters = vec![voters.iter().copied().collect()];
    let membership = Membership::new(voters, nodes).expect("voters are nodes");
    Entry { log_id: at(1, index), payload: EntryPayload::Membership(membership) }
}

async fn open(disk: &SimDisk) -> Log<SimEnv> {
    let identity = WalIdentity {
        cluster: ClusterId([1; 16]),
        node: NodeId(1),
        disk: DiskId([1; 16]),
        core: 0,
        cores: 1,
        boot: 1,
    };
    let config = WalConfig { segment_len: 1024 * 1024, ..WalConfig::default() };
    let opened = Wal::<SimEnv>::open(config, identity, disk.clone(), || 7).await;
    let (wal, mut recovered) = opened.expect("a sound log opens");
    let rounds = |vote: Option<&_>| Rounds::new(NodeId(1), vote);
    let recovered = recovered.remove(&SHARD).unwrap_or_default();
    Log::open(wal.shard(SHARD), recovered, rounds, Box::new(|_| {})).expect("nothing is damaged")
}

fn disk() -> SimDisk {
    SimDisk::new(1, SimDiskConfig::default())
}

/// Appends and waits until the entries are durable.
async fn append(log: &mut Log<SimEnv>, entries: impl IntoIterator<Item = Entry>) {
    let (sender, flushed) = LocalOneshot::channel();
    let entries: Vec<Entry> = entries.into_iter().collect();
    log.append(entries, IOFlushed::signal(sender)).await.expect("the disk works");
    flushed.await.expect("it is called").expect("the disk works");
}

async fn indexes(log: &mut Log<SimEnv>, range: impl RangeBounds<u64> + Clone + Debug) -> Vec<u64> {
    let entries = log.try_get_log_entries(range).await.expect("it is in memory");
    entries.iter().map(|entry| entry.log_id.index).collect()
}

#[test]
fn what_was_kept_is_there_after_a_restart() {
    run(async {
        let disk = disk();
        let mut log = open(&disk).await;
        append(&mut log, (0..20).map(|index| blank(1, index))).await;
        log.save_vote(&Vote { leader_id: LeaderId { term: 4, node_id: 2 }, committed: false })
            .await
            .expect("the disk works");
        log.truncate_after(Some(at(1, 14))).await.expect("the disk works");
        log.purge(at(1, 4)).await.expect("the disk works");
        append(&mut log, [blank(2, 15)]).await;
        drop(log);
        disk.kill_process();
        let mut log = open(&disk).await;
        assert_eq!(indexes(&mut log, ..).await, (5..=15).collect::<Vec<u64>>());
        let state = log.get_log_state().await.expect("it is in memory");
        assert_eq!(state.last_purged_log_id, Some(at(1, 4)));
        assert_eq!(state.last_log_id, Some(at(2, 15)));
        let vote = log.read_vote().await.expect("it is in memory").expect("it was saved");
        assert_eq!((vote.leader_id.term, vote.committed), (4, false));
        assert_eq!(log.rounds().leadership(), None);
    });
}

#[test]
#[should_panic(expected = "no hole")]
fn a_hole_is_never_stored() {
    run(async {
        let mut log = open(&disk()).await;
        append(&mut log, [blank(1, 0), blank(1, 1)]).await;
        log.shared.kept.borrow_mut().push(blank(1, 3));
    });
}

#[test]
fn a_replication_request_is_bounded_by_bytes_and_never_empty() {
    run(async {
        let mut log = open(&disk()).await;
        append(&mut log, (0..30).map(|index| batch(index, 100_000))).await;
        let some = log.limited_get_log_entries(3, 30).await.expect("it is in memory");
        assert_eq!(some.len(), READ_BYTES_MAX / 100_000 + 1);
        assert_eq!(some[0].log_id.index, 3);
        let one = log.limited_get_log_entries(29, 30).await.expect("it is in memory");
        assert_eq!(one.len(), 1);
    });
}

#[test]
fn the_last_membership_of_the_log_counts_at_once_and_only_as_long_as_it_is_there() {
    run(async {
        let mut log = open(&disk()).await;
        let voters =
            |log: &Log<SimEnv>| -> Vec<u64> { log.membership().membership().voter_ids().collect() };
        append(&mut log, [members(0, &[1]), blank(1, 1), members(2, &[1, 2])]).await;
        append(&mut log, [blank(1, 3), members(4, &[1, 2, 3])]).await;
        assert_eq!(voters(&log), [1, 2, 3]);
        log.truncate_after(Some(at(1, 3))).await.expect("the disk works");
        assert_eq!(voters(&log), [1, 2]);
        log.purge(at(1, 3)).await.expect("the disk works");
        assert_eq!(voters(&log), [1, 2], "its entry is gone, the membership is not");
        let EntryPayload::Membership(four) = members(9, &[4]).payload else { unreachable!() };
        log.snapshot_membership(Some(at(1, 9)), &StoredMembership::new(Some(at(1, 9)), four));
        assert_eq!(voters(&log), [4]);
    });
}

#[test]
fn a_snapshot_replaces_what_a_deposed_leader_said_of_the_membership() {
    run(async {
        let mut log = open(&disk()).await;
        append(&mut log, [members(0, &[1, 2, 3]), blank(1, 1), members(2, &[9])]).await;
        let EntryPayload::Membership(early) = members(1, &[1, 2]).payload else { unreachable!() };
        log.snapshot_membership(Some(at(2, 7)), &StoredMembership::new(Some(at(2, 1)), early));
        log.purge(at(2, 7)).await.expect("the disk works");
        let voters: Vec<u64> = log.membership().membership().voter_ids().collect();
        assert_eq!(voters, [1, 2], "not the one at index 2, which the snapshot overtook");
    });
}

/// What `reconcile` leaves of entries `0..=last` of term 1 for a snapshot up to `covered`.
async fn reconciled(last: u64, covered: LogId) -> (Vec<u64>, Option<LogId>) {
    let disk = disk();
    let mut log = open(&disk).await;
    append(&mut log, (0..=last).map(|index| blank(1, index))).await;
    log.reconcile(covered).expect("the disk works");
    let before = (indexes(&mut log, ..).await, log.purged());
    let next = log.get_log_state().await.expect("it is in memory").last_log_id;
    append(&mut log, [blank(9, next.expect("there is one").index + 1)]).await;
    drop(log);
    disk.kill_process();
    let mut log = open(&disk).await;
    log.reconcile(covered).expect("the disk works");
    assert_eq!(log.purged(), before.1, "the same after a restart");
    assert_eq!(indexes(&mut log, ..).await.len(), before.0.len() + 1);
    before
}

#[test]
fn a_snapshot_and_a_log_that_do_not_fit_are_brought_together() {
    run(async {
        // The log goes through the snapshot's last entry: it stays.
        assert_eq!(reconciled(9, at(1, 5)).await, ((0..=9).collect(), None));
        // The log ends before: it is older than the snapshot.
        assert_eq!(reconciled(9, at(1, 20)).await, (vec![], Some(at(1, 20))));
        // The log has another entry there: what a deposed leader left behind.
        assert_eq!(reconciled(9, at(2, 5)).await, (vec![], Some(at(2, 5))));
    });
}

#[test]
fn records_that_are_not_understood_are_named() {
    let entry = |index| (index, Rc::from(convert::entry_record(&blank(1, index))));
    let damaged = |recovered| Kept::recover(recovered).err().expect("it is damaged");
    let hole = Recovered { entries: vec![entry(1), entry(3)], ..Recovered::default() };
    assert_eq!(damaged(hole), LogDamaged::Hole { expected: 2, found: 3 });
    let vote = Recovered { vote: Some(vec![9, 9]), ..Recovered::default() };
    assert!(damaged(vote).to_string().contains("the vote in the log: the record has version 9"));
    let broken = Recovered { entries: vec![(7, Rc::from(vec![1]))], ..Recovered::default() };
    assert!(damaged(broken).to_string().contains("index 7"));
}
