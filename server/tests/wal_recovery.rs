//! What a log gives back after it was closed, killed or cut, and what it refuses.

mod wal_support;

use leasehold_server::disk::sim::{SimDisk, Tear};
use wal_support::{A, B, Call, History, open, recover, run, sleep_ms};

fn append(index: u64) -> Call {
    Call::Append { shard: A, index, len: 100 }
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
    history.check(10, &found);
    assert_eq!(found[&A].committed.as_deref(), Some(&b"committed"[..]));
}
