//! Crash images: at every boundary of every sync of small histories, every state that a power cut
//! could leave on the disk is recovered. All acknowledged records must be there, and of the others
//! a prefix (G5). The same for a second power cut during each recovery.
//!
//! All subsets of the unsynced pieces while there are at most 2^10, a seeded sample above.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod wal_support;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use leasehold_server::disk::sim::{SimDisk, SimDiskConfig, Tear, Unsynced};
use leasehold_server::rt::sim::SimRng;
use leasehold_server::wal::WalConfig;
use wal_support::{A, B, C, Call, History, State, open_with, random_calls, run, sleep_ms};

/// Subsets tried of more than 2^10.
const SAMPLES: u64 = 64;

fn tiny() -> WalConfig {
    WalConfig { segment_len: 32 * 1024, batch_len_max: 12 * 1024, ..WalConfig::default() }
}

/// A disk as it might be found, and how many calls were acknowledged by then.
struct Image {
    disk: SimDisk,
    acked: usize,
}

/// Every way to keep some of the pieces; a sample if they are many.
fn subsets(pieces: &[Unsynced], rng: &SimRng) -> Vec<Vec<Unsynced>> {
    let pick = |mask: u64| {
        let kept = pieces.iter().enumerate().filter(|(at, _)| mask >> (at % 64) & 1 == 1);
        kept.map(|(_, piece)| piece.clone()).collect()
    };
    if pieces.len() <= 10 {
        return (0..1_u64 << pieces.len()).map(pick).collect();
    }
    let mut all: Vec<Vec<Unsynced>> = (0..SAMPLES).map(|_| pick(rng.next())).collect();
    all.push(Vec::new());
    all.push(pieces.to_vec());
    all
}

/// Collects the images at every boundary of every sync of `disk` from now on.
fn watch(disk: &SimDisk, tear: Tear, acked: Rc<Cell<usize>>) -> Rc<RefCell<Vec<Image>>> {
    let images: Rc<RefCell<Vec<Image>>> = Rc::default();
    let collected = images.clone();
    let rng = SimRng::new(99);
    disk.observe(move |disk| {
        for names_kept in 0..=disk.unsynced_names() {
            for kept in subsets(&disk.unsynced(tear), &rng) {
                let image = Image { disk: disk.image(&kept, names_kept), acked: acked.get() };
                collected.borrow_mut().push(image);
            }
        }
    });
    images
}

fn recover(disk: &SimDisk) -> State {
    run(1, async { open_with(tiny(), disk).await.map(|(_, state)| state).unwrap() })
}

/// Runs the calls, `burst` at a time; returns the history and the images.
fn record(calls: Vec<Call>, burst: usize, tear: Tear) -> (History, Vec<Image>) {
    let config = SimDiskConfig { sync_max: Duration::from_micros(300), ..Default::default() };
    let disk = SimDisk::new(3, config);
    let history = History::default();
    let images = watch(&disk, tear, history.acked.clone());
    run(2, async {
        let (log, _) = open_with(tiny(), &disk).await.unwrap();
        for (number, call) in calls.into_iter().enumerate() {
            history.call(&log, call).await.unwrap();
            if number % burst == 0 {
                sleep_ms(1).await;
            }
        }
        log.close().await.unwrap();
    });
    assert_eq!(history.errors.get(), 0);
    let images = images.take();
    (history, images)
}

/// Recovers every image; of every `second`-th also each image of that recovery.
fn check(history: &History, images: &[Image], tear: Tear, second: usize) -> usize {
    let mut checked = 0;
    for (number, image) in images.iter().enumerate() {
        if number % second != 0 {
            history.check(image.acked, &recover(&image.disk));
            checked += 1;
            continue;
        }
        let again = watch(&image.disk, tear, Rc::new(Cell::new(image.acked)));
        let found = recover(&image.disk);
        let found_len = history.check(image.acked, &found);
        for image in again.take() {
            history.check(image.acked, &recover(&image.disk));
            checked += 1;
        }
        // What the first recovery handed out stays, even if nothing after it reached the disk.
        image.disk.observe(|_| {});
        image.disk.lose_power(&[], 0);
        history.check(found_len, &recover(&image.disk));
        checked += 2;
    }
    checked
}

/// The same calls in batches of different lengths.
fn check_in_bursts(calls: &[Call], bursts: &[usize], tear: Tear) {
    let mut checked = 0;
    for burst in bursts {
        let (history, images) = record(calls.to_vec(), *burst, tear);
        checked += check(&history, &images, tear, 3);
    }
    println!("{checked} images");
    assert!(checked > 1000);
}

fn append(shard: wal_support::ShardId, index: u64, len: usize) -> Call {
    Call::Append { shard, index, len }
}

/// Small records: many of them share a page, a page is torn into sectors.
#[test]
fn small_records_torn_by_sector() {
    let mut calls = vec![Call::Vote { shard: A, vote: 1 }];
    calls.extend((1..=6).map(|index| append(A, index, 300)));
    calls.push(Call::Truncate { shard: A, last_kept: Some(4) });
    calls.extend((5..=7).map(|index| append(A, index, 400)));
    calls.push(Call::Vote { shard: B, vote: 2 });
    calls.push(Call::Purge { shard: A, index: 3 });
    calls.extend((1..=3).map(|index| append(B, index, 100)));
    check_in_bursts(&calls, &[1, 4, 20], Tear::Sector);
}

/// Records longer than a page, so that a torn one has its head and not its end, or the reverse.
#[test]
fn long_records_torn_by_page_across_segments() {
    let mut calls = Vec::new();
    for index in 1..=14 {
        calls.push(append(A, index, 5000));
        if index % 5 == 0 {
            calls.push(Call::Vote { shard: C, vote: index as u8 });
            calls.push(Call::Purge { shard: A, index: index - 2 });
        }
    }
    check_in_bursts(&calls, &[1, 3, 8], Tear::Page);
}

/// Every segment is dead when the next is begun: its votes must outlive it.
#[test]
fn dead_segments_go_only_when_the_next_opening_is_durable() {
    let mut calls = Vec::new();
    for index in 1..=20 {
        calls.push(Call::Vote { shard: B, vote: index as u8 });
        calls.push(append(A, index, 8000));
        calls.push(Call::Purge { shard: A, index });
    }
    check_in_bursts(&calls, &[3, 7], Tear::Page);
}

#[test]
fn random_histories() {
    let mut checked = 0;
    for seed in 0..12 {
        let rng = SimRng::new(seed);
        let calls = random_calls(&rng, 3, 60, 2500);
        let tear = if seed % 2 == 0 { Tear::Page } else { Tear::Sector };
        let (history, images) = record(calls, 1 + rng.below(12) as usize, tear);
        // Every image would take minutes; which ones are left out depends on the seed.
        let skip = 1 + images.len() / 200;
        let offset = rng.below(skip as u64) as usize;
        let images: Vec<Image> = images.into_iter().skip(offset).step_by(skip).collect();
        checked += check(&history, &images, tear, 64);
    }
    println!("{checked} images");
    assert!(checked > 2000);
}
