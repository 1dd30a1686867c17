//! Failing and full disks, bounds, and the space a log takes.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod wal_support;

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::rc::Rc;

use leasehold_server::disk::sim::{Io, SimDisk, SimDiskConfig, Tear};
use leasehold_server::rt::sim::SimRng;
use leasehold_server::wal::{WalConfig, WalError, WalFailed};
use wal_support::sim_env::sleep_ms;
use wal_support::{
    A, B, C, Call, History, Log, open, open_with, payload, random_calls, recover, run, small,
};

const SEGMENT_LEN: u64 = 64 * 1024;

fn append(index: u64, len: usize) -> Call {
    Call::Append { shard: A, index, len }
}

/// Everything answers the latched failure, and nothing reaches the disk any more.
async fn assert_latched(log: &Log, kind: ErrorKind, disk: &SimDisk) {
    let failure = log.failed().expect("the failure is latched");
    assert_eq!(failure.kind, kind);
    let expected = Err(WalFailed::Failed(failure.clone()));
    let shard = log.shard(B);
    let syncs = disk.count(Io::Sync);
    assert_eq!(shard.append([(1, payload(1, 10))], |_| panic!("not staged")), expected);
    assert_eq!(shard.save_vote(b"vote").await, expected);
    assert_eq!(shard.truncate_after(None), expected);
    assert_eq!(shard.purge(1, b"log id"), expected);
    assert_eq!(shard.committed(b"log id"), expected);
    assert_eq!(shard.snapshot_mark(b"mark"), expected);
    assert_eq!(shard.flush().await, expected);
    assert_eq!(log.close().await, expected);
    shard.room(1, 1_000_000).await;
    sleep_ms(1000).await;
    assert_eq!(*log.until_failed().await, *failure);
    assert_eq!(disk.count(Io::Sync), syncs, "a failed sync is never tried again");
}

#[test]
fn the_first_failed_sync_is_final() {
    let disk = wal_support::disk();
    let history = History::default();
    run(1, async {
        let (log, _) = open(&disk).await;
        history.call(&log, append(1, 100)).await.unwrap();
        log.shard(A).flush().await.unwrap();
        assert_eq!(history.acked.get(), 1);
        disk.fail(Io::Sync, 0, ErrorKind::Other);
        history.call(&log, append(2, 100)).await.unwrap();
        let vote = history.call(&log, Call::Vote { shard: B, vote: 3 }).await;
        assert!(matches!(vote, Err(WalFailed::Failed(_))));
        assert_eq!((history.acked.get(), history.errors.get()), (1, 1));
        assert_latched(&log, ErrorKind::Other, &disk).await;
        let message = log.failed().unwrap().to_string();
        assert!(message.starts_with("sync wal-0000000000000001.seg: simulated"), "{message}");
    });
    disk.lose_power(&[], 0);
    history.check(1, &recover(&disk).unwrap());
}

/// Callbacks of records behind the failing flush hear of it as well, in order.
#[test]
fn whatever_waits_is_told_of_the_failure() {
    let disk = wal_support::disk();
    let told = Rc::new(RefCell::new(Vec::new()));
    run(1, async {
        let (log, _) = open_with(WalConfig { batch_len_max: 1, ..small() }, &disk).await.unwrap();
        disk.fail(Io::Sync, 2, ErrorKind::Other);
        for index in 1..=6 {
            let told = told.clone();
            let done = move |result: Result<(), _>| told.borrow_mut().push((index, result.is_ok()));
            log.shard(A).append([(index, payload(index, 100))], done).unwrap();
        }
        log.until_failed().await;
    });
    let expected = [(1, true), (2, true), (3, false), (4, false), (5, false), (6, false)];
    assert_eq!(*told.borrow(), expected);
}

/// The n-th operation of each kind fails, while opening or later: nothing acknowledged is lost,
/// nothing is acknowledged afterwards, and the next start works.
#[test]
fn any_operation_may_fail_at_any_time() {
    let kinds = [Io::Read, Io::Create, Io::Sync, Io::SyncNew, Io::Remove, Io::SyncDir];
    let mut failed_opens = 0;
    let mut failed_logs = 0;
    for (io, nth) in kinds.into_iter().flat_map(|io| (0..12).map(move |nth| (io, nth))) {
        let seed = nth * 10 + io as u64;
        let disk = wal_support::disk();
        let history = History::default();
        let calls = random_calls(&SimRng::new(seed), 3, 120, 4000);
        let (first, second) = calls.split_at(60);
        run(seed, async {
            let (log, _) = open(&disk).await;
            play(&log, &history, first).await;
        });
        disk.lose_power_at_random(Tear::Sector);
        // What of the first half was not acknowledged may be gone: go on from what is there.
        let found = recover(&disk).unwrap();
        let kept = history.check(history.acked.get(), &found);
        history.calls.borrow_mut().truncate(kept);
        if kept < 60 {
            continue;
        }
        disk.fail(io, nth, ErrorKind::Other);
        run(seed, async {
            let log = match open_with(small(), &disk).await {
                Ok((log, _)) => log,
                Err(error) => {
                    assert!(matches!(error, WalError::Io { .. } | WalError::Failed(_)), "{error}");
                    failed_opens += 1;
                    return;
                }
            };
            play(&log, &history, second).await;
            failed_logs += usize::from(log.failed().is_some());
        });
        disk.lose_power_at_random(Tear::Sector);
        disk.heal();
        history.check(history.acked.get(), &recover(&disk).unwrap());
    }
    println!("{failed_opens} opens and {failed_logs} logs failed");
    assert!(failed_opens > 10 && failed_logs > 10);
}

/// Makes the calls until one fails; a failed log acknowledges nothing more.
async fn play(log: &Log, history: &History, calls: &[Call]) {
    for call in calls {
        if history.call(log, call.clone()).await.is_err() {
            assert!(log.failed().is_some());
            let acked = history.acked.get();
            sleep_ms(1000).await;
            assert_eq!(history.acked.get(), acked);
            return;
        }
        if let Call::Purge { .. } = call {
            sleep_ms(2).await;
        }
    }
    drop(log.shard(A).flush().await);
}

/// A disk that is full when the spare is made ahead is no failure yet; when the segment is needed
/// it is.
#[test]
fn a_full_disk_is_final_only_when_the_space_is_needed() {
    let disk = wal_support::disk();
    let history = History::default();
    let room_for = |segments: u64| SimDiskConfig {
        capacity: Some(segments * SEGMENT_LEN),
        ..SimDiskConfig::default()
    };
    disk.set_config(room_for(2));
    run(1, async {
        let (log, _) = open(&disk).await;
        // The second segment is taken, a third does not fit.
        for index in 1..=9 {
            history.call(&log, append(index, 10_000)).await.unwrap();
            log.shard(A).flush().await.unwrap();
        }
        sleep_ms(10).await;
        assert!(log.failed().is_none());
        assert_eq!(disk.used_bytes(), 2 * SEGMENT_LEN);
        // Room made by a purge is used.
        history.call(&log, Call::Purge { shard: A, index: 8 }).await.unwrap();
        log.shard(A).flush().await.unwrap();
        sleep_ms(10).await;
        assert_eq!(log.metrics().segments, 1);
        assert_eq!(disk.used_bytes(), 2 * SEGMENT_LEN, "a spare, ahead of need again");
        for index in 10..=14 {
            history.call(&log, append(index, 10_000)).await.unwrap();
            log.shard(A).flush().await.unwrap();
        }
        assert!(log.failed().is_none());
        let mut index = 15;
        while history.call(&log, append(index, 10_000)).await.is_ok() {
            drop(log.shard(A).flush().await);
            index += 1;
            assert!(index < 30, "the disk must be full by now");
        }
        assert_latched(&log, ErrorKind::StorageFull, &disk).await;
    });
    disk.lose_power(&[], 0);
    // A start needs a segment; with none to be had it says so and changes nothing.
    let error = recover(&disk).unwrap_err();
    let WalError::Io { operation, source, .. } = &error else { panic!("{error}") };
    assert_eq!((*operation, source.kind()), ("make", ErrorKind::StorageFull));
    disk.set_config(room_for(8));
    history.check(history.acked.get(), &recover(&disk).unwrap());
}

/// 24 MiB through 64 KiB segments: what is dead is deleted.
#[test]
fn disk_use_stays_bounded_while_purging() {
    let disk = wal_support::disk();
    let peak = run(1, async {
        let (log, _) = open(&disk).await;
        let mut peak = 0;
        for index in 1..=2400 {
            for shard in [A, B] {
                let entry = [(index, payload(index, 5000))];
                log.shard(shard).append(entry, |result| result.unwrap()).unwrap();
            }
            if index % 20 == 0 {
                log.shard(A).purge(index - 10, b"log id").unwrap();
                log.shard(B).purge(index - 5, b"log id").unwrap();
            }
            log.shard(A).flush().await.unwrap();
            peak = peak.max(disk.used_bytes());
        }
        let metrics = log.metrics();
        assert!(metrics.stored_bytes > 24_000_000);
        assert!(metrics.segments_made > 300);
        peak
    });
    // 30 entries of A and 25 of B live at most, 55 * 5 KB in 5 segments; a first and a last one in
    // part; the spare, and one being deleted.
    assert!(peak <= 9 * SEGMENT_LEN, "{} segments", peak / SEGMENT_LEN);
}

/// A shard that never purges is asked for a snapshot, and at the bound the log fails rather than
/// fill the disk.
#[test]
fn a_shard_that_pins_too_much_is_named() {
    let disk = wal_support::disk();
    let config = WalConfig { pin_bytes_max: 4 * SEGMENT_LEN, segments_max: 10, ..small() };
    let asked: Rc<RefCell<Vec<(u32, u64)>>> = Rc::default();
    run(1, async {
        let (log, _) = open_with(config.clone(), &disk).await.unwrap();
        let told = asked.clone();
        log.on_pin(move |shard, bytes| told.borrow_mut().push((shard.0, bytes / SEGMENT_LEN)));
        // B writes once and never again; A keeps purging.
        log.shard(B).append([(1, payload(1, 10))], |_| {}).unwrap();
        let mut index = 0;
        let mut write = async |count: u64| {
            for _ in 0..count {
                index += 1;
                log.shard(A).append([(index, payload(index, 10_000))], |_| {}).unwrap();
                log.shard(A).purge(index - 1, b"log id").unwrap();
                if log.shard(A).flush().await.is_err() {
                    return false;
                }
            }
            true
        };
        assert!(write(20).await);
        assert!(asked.borrow().is_empty(), "{asked:?}");
        assert_eq!(log.shard(B).pinned_bytes(), 3 * SEGMENT_LEN);
        assert_eq!(log.shard(A).pinned_bytes(), 0);
        assert!(write(15).await);
        assert_eq!(asked.borrow()[0], (1, 5), "{asked:?}");
        assert!(asked.borrow().iter().all(|(shard, _)| *shard == B.0), "{asked:?}");
        // A purge lets go of it.
        log.shard(B).purge(1, b"log id").unwrap();
        log.shard(B).flush().await.unwrap();
        sleep_ms(10).await;
        assert_eq!(log.shard(B).pinned_bytes(), 0);
        assert!(log.metrics().segments <= 2);
        // Nobody listens: the bound holds.
        log.shard(C).append([(1, payload(1, 10))], |_| {}).unwrap();
        assert!(write(35).await);
        let heard = Rc::new(Cell::new(false));
        let hear = heard.clone();
        log.on_pin(move |shard, _| hear.set(shard == C));
        assert!(heard.get(), "asked at once");
        assert!(!write(80).await);
        let message = log.failed().unwrap().to_string();
        assert!(message.contains("10 segments are in use"), "{message}");
    });
    assert!(disk.used_bytes() <= 12 * SEGMENT_LEN);
    // A start gathers the few entries that are left: nothing is pinned any more.
    let raised = WalConfig { segments_max: 20, ..config };
    run(1, async {
        let (log, _) = open_with(raised, &disk).await.unwrap();
        assert_eq!(log.shard(C).pinned_bytes(), 0);
        sleep_ms(100).await;
        assert_eq!(log.metrics().segments, 1);
    });
}

/// A log that failed for want of a segment opens again, a few times, and a purge heals it.
#[test]
fn a_log_at_its_bound_can_be_opened_and_purged() {
    let disk = wal_support::disk();
    let config = WalConfig { segments_max: 6, ..small() };
    let mut index = 0;
    let mut failures = 0;
    let error = loop {
        let opened = run(failures, async {
            let (log, _) = open_with(config.clone(), &disk).await?;
            loop {
                index += 1;
                let entry = [(index, payload(index, 10_000))];
                let staged = log.shard(A).append(entry, |_| {});
                if staged.is_err() || log.shard(A).flush().await.is_err() {
                    let message = log.failed().unwrap().to_string();
                    assert!(message.starts_with("add a segment to the log"), "{message}");
                    break;
                }
            }
            index -= 1;
            Ok::<(), WalError>(())
        });
        disk.kill_process();
        match opened {
            Ok(()) => failures += 1,
            Err(error) => break error,
        }
        // The entry that did not fit was never stored.
        index = recover_count(&disk, &config).unwrap_or(index);
    };
    assert!(matches!(error, WalError::TooManySegments { kept_max: 10, .. }), "{error}");
    assert!((2..=5).contains(&failures), "{failures}");
    assert!(disk.used_bytes() <= 12 * SEGMENT_LEN, "{}", disk.used_bytes() / SEGMENT_LEN);
    let raised = WalConfig { segments_max: 20, ..config.clone() };
    run(1, async {
        let (log, _) = open_with(raised, &disk).await.unwrap();
        log.shard(A).purge(index, b"log id").unwrap();
        log.shard(A).flush().await.unwrap();
        sleep_ms(100).await;
        assert_eq!(log.metrics().segments, 1);
    });
    disk.kill_process();
    run(1, async { open_with(config, &disk).await.map(drop).unwrap() });
}

fn recover_count(disk: &SimDisk, config: &WalConfig) -> Option<u64> {
    let image = disk.image(&[], 0);
    let opened = run(1, async { open_with(config.clone(), &image).await });
    Some(opened.ok()?.1[&A].entries.last()?.0)
}

#[test]
fn staging_is_bounded_and_says_busy() {
    let disk = wal_support::disk();
    let config = WalConfig { staged_len_max: 30_000, ..small() };
    run(1, async {
        let (log, _) = open_with(config, &disk).await.unwrap();
        let shard = log.shard(A);
        let acked = Rc::new(Cell::new(0));
        let count = |acked: &Rc<Cell<u64>>| {
            let acked = acked.clone();
            move |result: Result<(), WalFailed>| {
                result.unwrap();
                acked.set(acked.get() + 1);
            }
        };
        shard.append([(1, payload(1, 10_000))], count(&acked)).unwrap();
        shard.append([(2, payload(2, 10_000))], count(&acked)).unwrap();
        let busy = shard.append([(3, payload(3, 10_000))], |_| panic!("not staged"));
        assert!(matches!(busy, Err(WalFailed::Busy { staged_len_max: 30_000, .. })), "{busy:?}");
        // A vote is not refused for the sake of entries.
        shard.save_vote(b"vote").await.unwrap();
        shard.append([(3, payload(3, 10_000))], count(&acked)).unwrap();
        shard.append([(4, payload(4, 10_000))], count(&acked)).unwrap();
        shard.room(1, 10_000).await;
        shard.append([(5, payload(5, 10_000))], count(&acked)).unwrap();
        shard.flush().await.unwrap();
        assert_eq!(acked.get(), 5);
        // When nothing waits, a batch longer than the bound goes: else it never could.
        shard.room(4, 40_000).await;
        let many = (6..=9).map(|index| (index, payload(index, 10_000)));
        shard.append(many, count(&acked)).unwrap();
        shard.flush().await.unwrap();
        assert_eq!(acked.get(), 6);
        let long = shard.append([(10, payload(10, 16 * 1024 + 1))], |_| panic!("not staged"));
        assert_eq!(long, Err(WalFailed::TooLong { len: 16_385, len_max: 16_384 }));
        shard.append([(10, payload(10, 16 * 1024))], count(&acked)).unwrap();
        log.close().await.unwrap();
        assert_eq!(acked.get(), 7);
        assert_eq!(shard.append([], |_| {}), Err(WalFailed::Closed));
        assert_eq!(shard.flush().await, Err(WalFailed::Closed));
    });
}

/// One flush covers all shards, and callbacks come in the order of staging.
#[test]
fn a_flush_is_shared_and_callbacks_keep_order() {
    let disk = wal_support::disk();
    run(1, async {
        let (log, _) = open(&disk).await;
        let order: Rc<RefCell<Vec<u64>>> = Rc::default();
        let tell = |number: u64| {
            let order = order.clone();
            move |result: Result<(), WalFailed>| {
                result.unwrap();
                order.borrow_mut().push(number);
            }
        };
        let before = log.metrics().syncs;
        // The first goes alone, if the flush task is quick; the others wait for it in one batch.
        for number in 0..99 {
            let (shard, index) = ([A, B, C][number as usize % 3], 1 + number / 3);
            log.shard(shard).append([(index, payload(number, 20))], tell(number)).unwrap();
            if number == 0 {
                sleep_ms(0).await;
            }
        }
        log.shard(A).append([], tell(99)).unwrap();
        log.shard(B).flush().await.unwrap();
        assert_eq!(*order.borrow(), (0..=99).collect::<Vec<u64>>());
        let syncs = log.metrics().syncs - before;
        assert!(syncs <= 2, "{syncs} syncs for 99 appends");
        // With nothing staged, a callback without entries still comes.
        log.shard(A).append([], tell(100)).unwrap();
        sleep_ms(10).await;
        assert_eq!(order.borrow().last(), Some(&100));
        // A callback may use the log.
        let (again, done, nested) = (log.shard(A), tell(101), tell(102));
        let append_again = move |result| {
            done(result);
            again.append([(34, payload(34, 10))], nested).unwrap();
        };
        log.shard(C).append([(34, payload(34, 10))], append_again).unwrap();
        sleep_ms(10).await;
        assert_eq!(order.borrow()[101..], [101, 102]);
    });
}

#[test]
#[should_panic(expected = "entry 3 does not follow")]
fn a_gap_between_entries_is_a_bug_of_the_caller() {
    let disk = wal_support::disk();
    run(1, async {
        let (log, _) = open(&disk).await;
        log.shard(A).append([(1, payload(1, 10))], |_| {}).unwrap();
        drop(log.shard(A).append([(3, payload(3, 10))], |_| {}));
    });
}
