//! What a log gives back after it was closed, killed or cut, and what it refuses.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod wal_support;

use std::cell::Cell;
use std::io::ErrorKind;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::{ClusterId, DiskId, NodeId};
use leasehold_server::disk::sim::{Io, SimDisk, SimDiskConfig, Tear};
use leasehold_server::env::Disk;
use leasehold_server::rt::sim::SimRt;
use leasehold_server::wal::{BLOB_LEN_MAX, WalConfig, WalError, WalIdentity};
use openraft::AsyncRuntime;
use wal_support::sim_env::sleep_ms;
use wal_support::{
    A, B, C, Call, History, IDENTITY, ShardId, State, open, open_as, open_with, recover, run,
    small, without_committed,
};

/// The first segment, and where its first record after the checkpoint starts.
const FIRST: &str = "wal-0000000000000001.seg";
const SECOND: &str = "wal-0000000000000002.seg";
/// A header's page, and the checkpoint of a log without shards: 32 + 8 bytes, aligned.
const RECORDS: u64 = 4096 + 48;

fn append(index: u64) -> Call {
    Call::Append { shard: A, index, len: 100 }
}

/// The bytes of `append`'s record: head 32, index 8, payload 100, aligned to 16.
const APPEND_LEN: u64 = 144;

/// Appends `first..=last`, each in a flush of its own.
async fn append_each(log: &wal_support::Log, history: &History, first: u64, last: u64) {
    for index in first..=last {
        history.call(log, append(index)).await.unwrap();
        log.shard(A).flush().await.unwrap();
    }
}

/// A log with the entries 1 to 5, each in a flush of its own; whether its seal was written.
fn five_entries(sealed: bool) -> (SimDisk, History) {
    let disk = wal_support::disk();
    let history = History::default();
    run(1, async {
        let (log, _) = open(&disk).await;
        append_each(&log, &history, 1, 5).await;
        if sealed {
            log.close().await.unwrap();
        }
    });
    disk.lose_power(&[], 0);
    (disk, history)
}

/// From now on no sync ends within a test.
fn hang_syncs(disk: &SimDisk) {
    disk.set_config(SimDiskConfig { sync_max: Duration::from_hours(10_000), ..Default::default() });
}

fn damage(disk: &SimDisk) -> (String, u64, String) {
    match recover(disk) {
        Err(WalError::Damaged { file, offset, reason }) => (file, offset, reason),
        other => panic!("expected damage, found {other:?}"),
    }
}

fn indexes(state: &State) -> Vec<u64> {
    let entries = state.get(&A).map(|shard| shard.entries.iter().map(|(index, _)| *index));
    entries.into_iter().flatten().collect()
}

/// Several shards, every kind of record, a clean end.
#[test]
fn what_was_written_is_read_again() {
    let disk = wal_support::disk();
    let history = History::default();
    let calls = [
        append(1),
        append(2),
        Call::Vote { shard: B, vote: 7 },
        Call::Append { shard: B, index: 10, len: 0 },
        append(3),
        Call::Truncate { shard: A, last_kept: Some(2) },
        append(3),
        Call::Purge { shard: A, index: 1 },
        Call::Mark { shard: A, mark: 9 },
        Call::Vote { shard: A, vote: 8 },
    ];
    run(1, async {
        let (log, found) = open(&disk).await;
        assert!(found.is_empty());
        for call in calls {
            history.call(&log, call).await.unwrap();
        }
        log.shard(A).committed(b"committed").unwrap();
        log.close().await.unwrap();
    });
    assert_eq!(history.acked.get(), 10);
    let found = recover(&disk).unwrap();
    assert_eq!(history.check(10, &found), 10);
    assert_eq!(found[&A].committed.as_deref(), Some(&b"committed"[..]));
}

/// Entries cut off and written anew, gaps by purging beyond the end, an emptied log.
#[test]
fn truncation_and_purge_are_replayed_in_order() {
    let disk = wal_support::disk();
    let history = History::default();
    let calls = [
        append(1),
        append(2),
        Call::Truncate { shard: A, last_kept: None },
        append(5),
        append(6),
        Call::Purge { shard: A, index: 20 },
        append(21),
        append(22),
        Call::Truncate { shard: A, last_kept: Some(21) },
        Call::Truncate { shard: A, last_kept: Some(40) },
        Call::Purge { shard: A, index: 3 },
    ];
    for len in 1..=calls.len() {
        let disk = SimDisk::new(len as u64, SimDiskConfig::default());
        run(1, async {
            let (log, _) = open(&disk).await;
            let history = History::default();
            for call in &calls[..len] {
                history.call(&log, call.clone()).await.unwrap();
            }
            log.close().await.unwrap();
            history.check(len, &recover_inside(&disk).await);
        });
    }
    run(1, async {
        let (log, _) = open(&disk).await;
        for call in calls {
            history.call(&log, call).await.unwrap();
        }
        log.shard(A).flush().await.unwrap();
    });
    history.check(11, &recover(&disk).unwrap());
}

async fn recover_inside(disk: &SimDisk) -> State {
    open(disk).await.1
}

#[test]
fn a_torn_tail_is_cut_at_the_first_bad_record() {
    let (disk, history) = five_entries(true);
    let lost = history.clone();
    // Entries 6 to 8 in one flush, of which a crash keeps the last page only.
    run(1, async {
        let (log, _) = open(&disk).await;
        hang_syncs(&disk);
        for index in 6..=8 {
            let call = Call::Append { shard: A, index, len: 6000 };
            lost.call(&log, call).await.unwrap();
        }
        sleep_ms(5).await;
    });
    let pieces = disk.unsynced(Tear::Page);
    assert!(pieces.len() >= 5);
    disk.lose_power(&pieces[4..], 0);
    assert_eq!(history.check(5, &recover(&disk).unwrap()), 5);
}

/// A log that is damaged in the middle must never be shortened in silence.
#[test]
fn damage_below_a_later_durable_seq_is_refused_with_file_offset_and_remedy() {
    for entry in 1..=4 {
        let start = RECORDS + (entry - 1) * APPEND_LEN;
        for at in [0, 4, 8, 12, 16, 24, 32, 60, 139] {
            let (disk, _) = five_entries(false);
            disk.rot(FIRST, start + at, 0x10);
            let (file, offset, reason) = damage(&disk);
            assert_eq!((file.as_str(), offset), (FIRST, start), "{reason}");
        }
    }
    let (disk, _) = five_entries(false);
    disk.rot(FIRST, RECORDS, 1);
    let message = recover(&disk).unwrap_err().to_string();
    assert!(message.contains("wal-0000000000000001.seg is damaged at offset 4144"), "{message}");
    assert!(message.contains("Remedy: "), "{message}");
}

/// The stated limit: nothing on the disk tells damage to the last flush from a torn one.
#[test]
fn damage_to_the_last_unsealed_flush_looks_like_a_torn_tail() {
    let (disk, history) = five_entries(false);
    disk.rot(FIRST, RECORDS + 4 * APPEND_LEN, 1);
    assert_eq!(history.check(4, &recover(&disk).unwrap()), 4);
}

#[test]
fn a_seal_protects_the_last_flush() {
    let (disk, _) = five_entries(true);
    disk.rot(FIRST, RECORDS + 4 * APPEND_LEN, 1);
    assert_eq!(damage(&disk).1, RECORDS + 4 * APPEND_LEN);
    // The seal itself holds nothing that could be lost.
    let (disk, history) = five_entries(true);
    disk.rot(FIRST, RECORDS + 5 * APPEND_LEN, 1);
    history.check(5, &recover(&disk).unwrap());
}

#[test]
fn an_idle_log_seals_once() {
    let disk = wal_support::disk();
    let history = History::default();
    run(1, async {
        let (log, _) = open(&disk).await;
        sleep_ms(500).await;
        assert_eq!(log.metrics().seals, 1, "the opening is sealed too");
        append_each(&log, &history, 1, 1).await;
        sleep_ms(50).await;
        assert_eq!(log.metrics().seals, 1);
        sleep_ms(100).await;
        assert_eq!(log.metrics().seals, 2);
        let syncs = log.metrics().syncs;
        sleep_ms(10_000).await;
        assert_eq!((log.metrics().seals, log.metrics().syncs), (2, syncs), "idle is idle");
    });
}

/// What a killed process left in the page cache is read by the next one, which must not build on it
/// before it is durable.
#[test]
fn what_recovery_hands_out_is_durable() {
    let (disk, history) = five_entries(true);
    // Long enough to stay where they are: recovery copies short logs into its own segment.
    let long = |index| Call::Append { shard: A, index, len: 6000 };
    run(1, async {
        let (log, _) = open(&disk).await;
        hang_syncs(&disk);
        for index in 6..=9 {
            history.call(&log, long(index)).await.unwrap();
        }
        sleep_ms(5).await;
    });
    disk.set_config(SimDiskConfig::default());
    assert_eq!(history.acked.get(), 5);
    disk.kill_process();
    let found = recover(&disk).unwrap();
    assert_eq!(history.check(5, &found), 9, "the page cache outlives the process");
    disk.lose_power(&[], 0);
    assert_eq!(recover(&disk).unwrap(), found);
}

/// A process is killed while it syncs a header; the next one finds that header, uses the segment for
/// nothing and goes on to another. The header must not vanish afterwards: the segment would then be
/// one without a header below one that has one, which is damage.
#[test]
fn a_header_whose_sync_was_cut_off_cannot_vanish_later() {
    let (disk, history) = five_entries(true);
    run(1, async {
        let (stored, hanging) = (Rc::new(Cell::new(false)), disk.clone());
        let header_stored = stored.clone();
        disk.observe_stores(move |_| {
            header_stored.set(true);
            hang_syncs(&hanging);
        });
        let opening = open_with(small(), &disk);
        assert!(SimRt::timeout(Duration::from_secs(1), opening).await.is_err(), "it hangs");
        assert!(stored.get(), "the header was stored");
    });
    disk.observe_stores(|_| {});
    disk.set_config(SimDiskConfig::default());
    disk.kill_process();
    let found = recover(&disk).unwrap();
    history.check(5, &found);
    disk.lose_power(&[], 0);
    assert_eq!(recover(&disk).unwrap(), found);
}

/// A segment whose name is not durable must not hold the first acknowledged record.
#[test]
fn the_new_segments_name_is_durable_before_it_is_used() {
    let (disk, _) = five_entries(true);
    run(1, async {
        disk.remove(SECOND).await.unwrap();
        // The process dies between renaming a new spare and syncing the directory.
        disk.fail(Io::SyncDir, 0, ErrorKind::Other);
        disk.create_segment("wal-0000000000000009.seg", small().segment_len).await.unwrap_err();
        disk.kill_process();
        assert_eq!(disk.unsynced_names(), 1);
        let (_log, _) = open(&disk).await;
        let image = disk.image(&[], 0);
        let found = image.list().await.unwrap();
        assert!(found.contains(&"wal-0000000000000009.seg".to_owned()), "{found:?}");
    });
}

/// The room for a seal is kept, whatever the last record leaves.
#[test]
fn a_full_segment_can_be_sealed() {
    let capacity = small().segment_len - RECORDS;
    for left in (0..=96).step_by(16) {
        let disk = wal_support::disk();
        let history = History::default();
        let longest = 32 + 8 + 16 * 1024_u64;
        let last_len = capacity - 3 * longest.next_multiple_of(16) - left;
        run(1, async {
            let (log, _) = open(&disk).await;
            for (index, len) in (1..).zip([longest, longest, longest, last_len]) {
                let call = Call::Append { shard: A, index, len: len as usize - 40 };
                history.call(&log, call).await.unwrap();
                log.shard(A).flush().await.unwrap();
            }
            sleep_ms(500).await;
            assert_eq!(log.metrics().segments, if left < 32 { 2 } else { 1 });
            log.close().await.unwrap();
        });
        history.check(4, &recover(&disk).unwrap());
    }
}

/// Bytes behind a cut stay void, whatever the device returns for them later.
#[test]
fn a_cut_is_recorded_and_stays() {
    let (disk, history) = five_entries(false);
    let fifth = RECORDS + 4 * APPEND_LEN;
    disk.rot(FIRST, fifth, 1);
    assert_eq!(indexes(&recover(&disk).unwrap()), [1, 2, 3, 4]);
    disk.rot(FIRST, fifth, 1);
    assert_eq!(indexes(&recover(&disk).unwrap()), [1, 2, 3, 4]);
    history.calls.borrow_mut().truncate(4);
    history.acked.set(4);
    run(1, async {
        let (log, _) = open(&disk).await;
        append_each(&log, &history, 5, 6).await;
    });
    disk.lose_power(&[], 0);
    history.check(6, &recover(&disk).unwrap());
}

/// The same with a log too long to be carried forward: the old segment stays and its cut with it.
#[test]
fn a_cut_of_a_segment_that_stays_holds_too() {
    let disk = wal_support::disk();
    let history = History::default();
    let long = |index| Call::Append { shard: A, index, len: 6000 };
    run(1, async {
        let (log, _) = open(&disk).await;
        for index in 1..=7 {
            history.call(&log, long(index)).await.unwrap();
            log.shard(A).flush().await.unwrap();
        }
    });
    disk.lose_power(&[], 0);
    let long_len = (32_u64 + 8 + 6000).next_multiple_of(16);
    let seventh = RECORDS + 6 * long_len;
    disk.rot(FIRST, seventh + 64, 1);
    assert_eq!(indexes(&recover(&disk).unwrap()), [1, 2, 3, 4, 5, 6]);
    disk.rot(FIRST, seventh + 64, 1);
    assert_eq!(indexes(&recover(&disk).unwrap()), [1, 2, 3, 4, 5, 6], "void for good");
    // Damage before the cut is damage, however late in the segment.
    disk.rot(FIRST, seventh - 16, 1);
    let (file, offset, reason) = damage(&disk);
    assert_eq!((file.as_str(), offset), (FIRST, seventh - long_len), "{reason}");
}

#[test]
fn a_log_of_somebody_else_is_refused_with_both_values() {
    let others = [
        ("cluster", WalIdentity { cluster: ClusterId([9; 16]), ..IDENTITY }),
        ("node", WalIdentity { node: NodeId(77), ..IDENTITY }),
        ("disk", WalIdentity { disk: DiskId([8; 16]), ..IDENTITY }),
        ("core count", WalIdentity { cores: 4, ..IDENTITY }),
        ("core", WalIdentity { core: 3, ..IDENTITY }),
    ];
    let values = [
        ["01010101", "09090909"],
        ["node 2", "node 77"],
        ["03030303", "08080808"],
        ["core count 1", "core count 4"],
        ["core 0", "core 3"],
    ];
    for ((what, identity), values) in others.into_iter().zip(values) {
        let (disk, history) = five_entries(true);
        let error = run(1, async { open_as(small(), identity, &disk).await.unwrap_err() });
        assert!(matches!(&error, WalError::Foreign { what: found, .. } if *found == what));
        let message = error.to_string();
        assert!(values.iter().all(|value| message.contains(value)), "{message}");
        // Refusing changed nothing.
        history.check(5, &recover(&disk).unwrap());
    }
    let (disk, history) = five_entries(true);
    let later = WalIdentity { boot: 2, ..IDENTITY };
    let (_, found) = run(1, async { open_as(small(), later, &disk).await.unwrap() });
    history.check(5, &found);
}

#[test]
fn headers_are_judged_by_what_is_behind_them() {
    // A header that was synced before the first record was stored cannot be gone with records
    // behind it.
    let (disk, _) = five_entries(true);
    disk.rot(FIRST, 100, 1);
    let (file, offset, reason) = damage(&disk);
    assert_eq!((file.as_str(), offset), (FIRST, 0));
    assert!(reason.contains("header is not valid"), "{reason}");

    // One torn by a crash has nothing behind it: the segment was never used.
    let (disk, history) = five_entries(true);
    disk.rot(SECOND, 0, 0xff);
    history.check(5, &recover(&disk).unwrap());
    assert!(!names(&disk).contains(&SECOND.to_owned()));

    // A newer format is named, not guessed at.
    let (disk, _) = five_entries(true);
    disk.rot(FIRST, 8, 2);
    let message = recover(&disk).unwrap_err().to_string();
    assert!(message.contains("format version 3; this program reads 1"), "{message}");
}

fn names(disk: &SimDisk) -> Vec<String> {
    run(1, async { disk.list().await.unwrap() })
}

fn remove(disk: &SimDisk, name: &str) {
    run(1, async { disk.remove(name).await.unwrap() });
}

/// A log of several segments, none of which can go.
fn long_log() -> (SimDisk, History) {
    let disk = wal_support::disk();
    let history = History::default();
    run(1, async {
        let (log, _) = open(&disk).await;
        for index in 1..=30 {
            let call = Call::Append { shard: A, index, len: 10_000 };
            history.call(&log, call).await.unwrap();
        }
        history.call(&log, Call::Vote { shard: B, vote: 1 }).await.unwrap();
        log.close().await.unwrap();
    });
    (disk, history)
}

#[test]
fn a_missing_segment_is_noticed() {
    let (disk, history) = long_log();
    let used: Vec<String> = names(&disk);
    assert!(used.len() >= 6, "{used:?}");
    history.check(31, &recover(&disk).unwrap());
    let (newest, older) = {
        let (disk, _) = long_log();
        let spare = names(&disk).len() - 1;
        (spare - 1, 0..spare - 1)
    };
    for number in older {
        let (disk, _) = long_log();
        let name = names(&disk)[number].clone();
        remove(&disk, &name);
        let error = recover(&disk).unwrap_err();
        let noticed = match &error {
            WalError::Damaged { file, reason, .. } => *file == name && reason.contains("missing"),
            WalError::MissingEntries { shard, first, .. } => *shard == A && *first == 1,
            _ => false,
        };
        assert!(noticed, "{name}: {error}");
    }
    // The newest can vanish unnoticed, like a disk rolled back to an older state.
    let (disk, _) = long_log();
    remove(&disk, &names(&disk)[newest]);
    assert!(recover(&disk).is_ok());
}

#[test]
fn a_renamed_segment_is_noticed() {
    let (disk, _) = long_log();
    run(1, async { disk.rename(SECOND, "wal-00000000000000ff.seg").await.unwrap() });
    let (file, _, reason) = damage(&disk);
    assert_eq!(file, "wal-00000000000000ff.seg");
    assert!(reason.contains("says segment 2"), "{reason}");
}

#[test]
fn damage_in_an_older_segment_is_damage_even_in_its_last_record() {
    let (disk, _) = long_log();
    // Five entries of 10,048 bytes fit beside the first checkpoint.
    let last = RECORDS + 5 * 10_048 - 64;
    disk.rot(FIRST, last, 1);
    let (file, _, reason) = damage(&disk);
    assert_eq!(file, FIRST);
    assert!(reason.contains("a later segment says"), "{reason}");
}

/// Each start begins a segment; entries are carried forward, so old ones do not pile up.
#[test]
fn starting_again_and_again_does_not_fill_the_disk() {
    let disk = wal_support::disk();
    let history = History::default();
    for index in 1..=60 {
        run(index, async {
            let (log, found) = open(&disk).await;
            history.check(history.acked.get(), &found);
            append_each(&log, &history, index, index).await;
        });
        disk.lose_power_at_random(Tear::Sector);
    }
    run(1, async {
        let (log, found) = open(&disk).await;
        history.check(60, &found);
        sleep_ms(100).await;
        assert!(log.metrics().segments <= 2, "{:?}", log.metrics().segments);
    });
    assert!(disk.used_bytes() <= 4 * small().segment_len, "{}", disk.used_bytes());
}

/// What the shards' states leave of a segment is all that can be carried.
#[test]
fn a_large_checkpoint_leaves_less_room_for_what_is_carried() {
    let config = WalConfig { segment_len: 32 * 1024, ..small() };
    let disk = wal_support::disk();
    run(1, async {
        let (log, _) = open_with(config.clone(), &disk).await.unwrap();
        for number in 0..24 {
            log.shard(ShardId(number)).save_vote(&[1; BLOB_LEN_MAX]).await.unwrap();
        }
        log.close().await.unwrap();
    });
    for index in 1..=6 {
        run(1, async {
            let (log, found) = open_with(config.clone(), &disk).await.unwrap();
            assert_eq!(found.len(), 24 + usize::from(index > 1));
            log.shard(ShardId(99))
                .append([(index, wal_support::payload(index, 1000))], |_| {})
                .unwrap();
            log.shard(ShardId(99)).flush().await.unwrap();
        });
    }
    let found = run(1, async { open_with(config, &disk).await.unwrap().1 });
    assert_eq!(found[&ShardId(99)].entries.len(), 6);
}

/// Longer logs than fit into one opening are carried in part.
#[test]
fn starting_again_and_again_with_a_long_log_keeps_few_segments() {
    let (disk, history) = long_log();
    let before = names(&disk).len();
    for boot in 1..=40 {
        run(boot, async {
            let (log, found) = open(&disk).await;
            history.check(history.acked.get(), &found);
            history.call(&log, Call::Append { shard: A, index: 30 + boot, len: 40 }).await.unwrap();
            log.shard(A).flush().await.unwrap();
        });
        disk.lose_power_at_random(Tear::Page);
    }
    run(1, async {
        let (_log, found) = open(&disk).await;
        history.check(71, &found);
        sleep_ms(100).await;
    });
    assert!(names(&disk).len() <= before + 2, "{:?}", names(&disk));
}

/// The commit position rides on other records and never runs ahead of its entries.
#[test]
fn commit_positions_are_saved_lazily() {
    let disk = wal_support::disk();
    run(1, async {
        let (log, _) = open(&disk).await;
        let shard = log.shard(A);
        shard.append([(1, wal_support::payload(1, 10))], |_| {}).unwrap();
        shard.flush().await.unwrap();
        sleep_ms(200).await;
        let syncs = log.metrics().syncs;
        shard.committed(b"1").unwrap();
        sleep_ms(50).await;
        assert_eq!(log.metrics().syncs, syncs, "no flush of its own");
        assert_eq!(recover(&disk.image(&[], 0)).unwrap()[&A].committed, None);
        // Rides on another shard's vote.
        log.shard(B).save_vote(b"vote").await.unwrap();
        let committed = |disk: &SimDisk| recover(disk).unwrap()[&A].committed.clone();
        assert_eq!(committed(&disk.image(&[], 0)).as_deref(), Some(&b"1"[..]));
        // Or on the seal of a quiet while.
        sleep_ms(1000).await;
        shard.committed(b"2").unwrap();
        sleep_ms(200).await;
        assert_eq!(committed(&disk.image(&[], 0)).as_deref(), Some(&b"2"[..]));
    });
}

#[test]
fn another_segment_length_is_taken_up() {
    let (disk, history) = long_log();
    let larger = WalConfig { segment_len: 128 * 1024, ..small() };
    for config in [larger, small()] {
        run(1, async {
            let (log, found) = open_with(config.clone(), &disk).await.unwrap();
            history.check(31, &found);
            log.close().await.unwrap();
        });
    }
    history.check(31, &recover(&disk).unwrap());
}

#[test]
fn a_contradictory_configuration_is_refused_with_every_reason() {
    let config = WalConfig {
        segment_len: 10_000,
        spare_segments: 0,
        batch_len_max: 0,
        staged_len_max: 0,
        segments_max: 3,
        ..small()
    };
    let disk = wal_support::disk();
    let error = run(1, async { open_with(config, &disk).await.unwrap_err() });
    let message = error.to_string();
    let keys = ["segment_len", "spare_segments", "batch_len_max", "staged_len_max", "segments_max"];
    assert!(keys.iter().all(|name| message.contains(name)), "{message}");
    assert!(names(&disk).is_empty());
}

/// Votes of shards that write nothing else, while another shard's purges delete segments.
#[test]
fn votes_of_quiet_shards_survive_purges() {
    let disk = wal_support::disk();
    run(1, async {
        let (log, _) = open(&disk).await;
        log.shard(B).save_vote(b"B's vote").await.unwrap();
        log.shard(C).snapshot_mark(b"C's mark").unwrap();
        log.shard(C).purge(41, b"C's log id").unwrap();
        let busy = log.shard(A);
        for index in 1..=200 {
            busy.append([(index, wal_support::payload(index, 5000))], |_| {}).unwrap();
            if index % 10 == 0 {
                busy.purge(index - 1, b"log id").unwrap();
            }
            busy.flush().await.unwrap();
        }
        assert!(log.metrics().segments_made >= 10);
    });
    disk.lose_power(&[], 0);
    let found = without_committed(&recover(&disk).unwrap());
    assert_eq!(found[&B].vote.as_deref(), Some(&b"B's vote"[..]));
    assert_eq!(found[&C].snapshot.as_deref(), Some(&b"C's mark"[..]));
    assert_eq!(found[&C].purged, Some((41, b"C's log id".to_vec())));
    assert_eq!(indexes(&found), [200]);
    assert!(!names(&disk).contains(&FIRST.to_owned()));
}
