//! Damaged bytes: a closed log is either recovered whole or refused, whichever byte is hit, and no
//! input makes opening panic.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod wal_support;

use leasehold_server::disk::sim::SimDisk;
use leasehold_server::env::Disk;
use leasehold_server::rt::sim::SimRng;
use leasehold_server::wal::{WalConfig, WalError};
use wal_support::{A, B, Call, History, open_with, random_calls, run};

fn tiny() -> WalConfig {
    WalConfig { segment_len: 32 * 1024, ..WalConfig::default() }
}

fn recover(disk: &SimDisk) -> Result<wal_support::State, WalError> {
    run(1, async { open_with(tiny(), disk).await.map(|(_, state)| state) })
}

fn closed_log(calls: Vec<Call>) -> (SimDisk, History) {
    let disk = wal_support::disk();
    let history = History::default();
    run(1, async {
        let (log, _) = open_with(tiny(), &disk).await.unwrap();
        for call in calls {
            history.call(&log, call).await.unwrap();
            log.shard(A).flush().await.unwrap();
        }
        log.close().await.unwrap();
    });
    (disk, history)
}

fn files(disk: &SimDisk) -> Vec<(String, Vec<u8>)> {
    run(1, async {
        let mut files = Vec::new();
        for name in disk.list().await.unwrap() {
            files.push((name.clone(), disk.read(&name).await.unwrap()));
        }
        files
    })
}

/// Every byte that means anything, one flipped bit each.
#[test]
fn any_flipped_bit_is_refused_or_harmless() {
    let calls = vec![
        Call::Vote { shard: B, vote: 1 },
        Call::Append { shard: A, index: 1, len: 300 },
        Call::Append { shard: A, index: 2, len: 1 },
        Call::Truncate { shard: A, last_kept: Some(1) },
        Call::Append { shard: A, index: 2, len: 250 },
        Call::Purge { shard: A, index: 1 },
        Call::Mark { shard: B, mark: 2 },
    ];
    let (disk, history) = closed_log(calls);
    let (name, bytes) = files(&disk).remove(0);
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 16;
    let mut refused = 0;
    for offset in (0..256).chain(4096..end) {
        let damaged = disk.image(&[], 0);
        damaged.rot(&name, offset as u64, 1 << (offset % 8));
        match recover(&damaged) {
            Ok(found) => drop(history.check(7, &found)),
            Err(_) => refused += 1,
        }
    }
    // Only padding and the seal may be hit without harm.
    let meaningful = 256 + end - 4096 - 16;
    assert!(refused > meaningful - 120, "{refused} of {meaningful}");
}

/// Longer logs in several segments; damage of several kinds at random places.
#[test]
fn no_damage_makes_opening_panic_or_lose_an_acknowledged_record() {
    let mut outcomes = [0; 2];
    for seed in 0..400 {
        let rng = SimRng::new(seed);
        let (disk, history) = closed_log(random_calls(&rng, 3, 40, 3000));
        let acked = history.calls.borrow().len();
        let files = files(&disk);
        let used: Vec<_> =
            files.iter().filter(|(_, bytes)| bytes.iter().any(|b| *b != 0)).collect();
        for _ in 0..=rng.below(3) {
            let (name, bytes) = used[rng.below(used.len() as u64) as usize];
            let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() as u64 + 1;
            let start = if rng.chance(300) { rng.below(256) } else { rng.below(end) };
            let len = [1, 16, 512][rng.below(3) as usize];
            for offset in start..(start + len).min(end) {
                let mask = if rng.chance(500) { bytes[offset as usize] } else { rng.next() as u8 };
                disk.rot(name, offset, mask);
            }
        }
        match recover(&disk) {
            Ok(found) => {
                history.check(acked, &found);
                outcomes[0] += 1;
            }
            Err(error) => {
                let judged = matches!(
                    error,
                    WalError::Damaged { .. }
                        | WalError::MissingEntries { .. }
                        | WalError::Version { .. }
                );
                assert!(judged, "{error}");
                outcomes[1] += 1;
            }
        }
    }
    println!("{outcomes:?} harmless, refused");
    assert!(outcomes.iter().all(|count| *count > 10), "{outcomes:?}");
}
