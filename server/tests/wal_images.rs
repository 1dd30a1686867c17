//! Crash images: at every boundary of every sync, name change and store of small histories, the
//! states that a power cut could leave on the disk are recovered. All acknowledged records must be
//! there, and of the others a prefix (G5). The same for a second power cut during each recovery.
//!
//! All subsets of the unsynced pieces while there are at most 2^10, a seeded sample above; a small
//! one between two stores of a flush. Devices also write pages back before their time, so that a
//! page may be older than its neighbours. A run that did not see a kind of boundary is INVALID.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod wal_support;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_server::disk::sim::{SimDisk, SimDiskConfig, Tear, Unsynced};
use leasehold_server::rt::sim::SimRng;
use leasehold_server::wal::WalConfig;
use wal_support::sim_env::sleep_ms;
use wal_support::{A, B, C, Call, History, State, open_with, random_calls, run};

/// Subsets tried of more than 2^10.
const SAMPLES: u64 = 64;
/// Subsets tried between two stores of one flush.
const STORE_SAMPLES: u64 = 6;

fn tiny() -> WalConfig {
    WalConfig { segment_len: 32 * 1024, batch_len_max: 12 * 1024, ..WalConfig::default() }
}

/// How the device of a history behaves, beyond what its configuration says.
#[derive(Clone, Copy)]
struct Device {
    tear: Tear,
    /// Stores, in a thousand, after which some page is written back before its time, so that pages of
    /// several ages are on the disk.
    early: u64,
}

const PAGES: Device = Device { tear: Tear::Page, early: 0 };
const SECTORS: Device = Device { tear: Tear::Sector, early: 0 };
const EARLY_PAGES: Device = Device { early: 150, ..PAGES };
const EARLY_SECTORS: Device = Device { early: 150, ..SECTORS };

/// A disk as it might be found, and how many calls were acknowledged by then.
struct Image {
    disk: SimDisk,
    acked: usize,
}

/// Every way to keep some of the pieces; a sample if they are many.
fn subsets(pieces: &[Unsynced], rng: &SimRng, samples: u64) -> Vec<Vec<Unsynced>> {
    let pick = |mask: u64| {
        let kept = pieces.iter().enumerate().filter(|(at, _)| mask >> (at % 64) & 1 == 1);
        kept.map(|(_, piece)| piece.clone()).collect()
    };
    let few = if samples == SAMPLES { 10 } else { 2 };
    if pieces.len() <= few {
        return (0..1_u64 << pieces.len()).map(pick).collect();
    }
    let mut all: Vec<Vec<Unsynced>> = (0..samples).map(|_| pick(rng.next())).collect();
    all.push(Vec::new());
    all.push(pieces.to_vec());
    all
}

/// The boundaries at which images were taken: a test that never saw one proves nothing about it.
#[derive(Default, Debug)]
struct Boundaries(BTreeMap<&'static str, usize>);

impl Boundaries {
    fn saw(&mut self, what: &'static str, images: usize) {
        *self.0.entry(what).or_default() += images;
    }

    fn require(&self, all: &[&str]) {
        println!("{:?}", self.0);
        assert!(all.iter().all(|what| self.0.get(what) > Some(&0)), "INVALID: {:?}", self.0);
    }
}

/// Takes the images of one history.
#[derive(Clone)]
struct Camera {
    device: Device,
    rng: Rc<SimRng>,
    history: History,
    images: Rc<RefCell<Vec<Image>>>,
    /// Disks whose process was killed: the machine goes on, so all of it is to be read, though not
    /// all is durable.
    killed: Rc<RefCell<Vec<Image>>>,
    boundaries: Rc<RefCell<Boundaries>>,
}

impl Camera {
    /// Takes images at every boundary of every sync, name change and store of `disk` from now on.
    fn watch(disk: &SimDisk, device: Device, history: &History) -> Self {
        let this = Self {
            device,
            rng: Rc::new(SimRng::new(99)),
            history: history.clone(),
            images: Rc::default(),
            killed: Rc::default(),
            boundaries: Rc::default(),
        };
        let (at_sync, at_store) = (this.clone(), this.clone());
        disk.observe(move |disk| at_sync.at_boundary(disk));
        disk.observe_stores(move |disk| at_store.between_stores(disk));
        this
    }

    fn at_boundary(&self, disk: &SimDisk) {
        let pieces = disk.unsynced(self.device.tear);
        let before = self.images.borrow().len();
        for names_kept in 0..=disk.unsynced_names() {
            self.take(disk, &subsets(&pieces, &self.rng, SAMPLES), names_kept);
        }
        let killed = Image { disk: disk.image_of_kill(), acked: self.history.acked.get() };
        self.killed.borrow_mut().push(killed);
        let images = self.images.borrow().len() - before;
        self.classify(disk, &pieces, images);
    }

    fn between_stores(&self, disk: &SimDisk) {
        let pieces = disk.unsynced(self.device.tear);
        let subsets = subsets(&pieces, &self.rng, STORE_SAMPLES);
        self.take(disk, &subsets, 0);
        self.boundaries.borrow_mut().saw("store", subsets.len());
        if !pieces.is_empty() && self.rng.chance(self.device.early) {
            disk.write_back(&pieces[self.rng.below(pieces.len() as u64) as usize]);
            self.boundaries.borrow_mut().saw("written back early", 1);
        }
    }

    fn take(&self, disk: &SimDisk, subsets: &[Vec<Unsynced>], names_kept: usize) {
        let acked = self.history.acked.get();
        let image = |kept: &Vec<Unsynced>| Image { disk: disk.image(kept, names_kept), acked };
        self.images.borrow_mut().extend(subsets.iter().map(image));
    }

    /// What is being made durable, or just was.
    fn classify(&self, disk: &SimDisk, pieces: &[Unsynced], images: usize) {
        let mut boundaries = self.boundaries.borrow_mut();
        if disk.unsynced_names() > 0 {
            return boundaries.saw("names", images);
        }
        let Some(first) = pieces.first() else { return boundaries.saw("after a sync", images) };
        boundaries.saw(
            match first.offset {
                0..4096 => "header",
                4096 => "opening",
                _ => "records",
            },
            images,
        );
        let calls = self.history.calls.borrow();
        let waiting = &calls[self.history.acked.get().min(calls.len())..];
        if waiting.is_empty() && first.offset > 4096 {
            boundaries.saw("seal", images);
        }
        for call in waiting {
            boundaries.saw(
                match call {
                    Call::Append { .. } => "append",
                    Call::Vote { .. } => "vote",
                    Call::Truncate { .. } => "truncate",
                    Call::Purge { .. } => "purge",
                    Call::Mark { .. } => "mark",
                },
                images,
            );
        }
    }
}

/// What a log gives back, and whether something was cut off its end.
fn recover(disk: &SimDisk) -> (State, bool) {
    let opened = run(1, async {
        let opened = open_with(tiny(), disk).await;
        opened.map(|(log, state)| (state, log.torn_tail().is_some()))
    });
    opened.expect("no power cut makes a log unreadable")
}

/// Runs the calls, `burst` at a time, now and then with a pause long enough for a seal; returns the
/// history and the images.
fn record(calls: Vec<Call>, burst: usize, device: Device) -> (History, Camera) {
    let config = SimDiskConfig { sync_max: Duration::from_micros(300), ..Default::default() };
    let disk = SimDisk::new(3, config);
    let history = History::default();
    let camera = Camera::watch(&disk, device, &history);
    run(2, async {
        let (log, _) = open_with(tiny(), &disk).await.unwrap();
        for (number, call) in calls.into_iter().enumerate() {
            history.call(&log, call).await.unwrap();
            if number % burst == 0 {
                sleep_ms(if number % (3 * burst) == 0 { 150 } else { 1 }).await;
            }
        }
        log.close().await.unwrap();
    });
    assert_eq!(history.errors.get(), 0);
    (history, camera)
}

/// What the checked images came to.
#[derive(Default, Debug)]
struct Checked {
    images: usize,
    /// Of these, images of a recovery.
    second: usize,
    /// Something was cut off and reported.
    torn: usize,
    /// Calls came back that nobody had acknowledged.
    more_than_acked: usize,
    boundaries: Boundaries,
}

impl Checked {
    fn recovered(&mut self, history: &History, image: &Image) -> usize {
        let (found, torn) = recover(&image.disk);
        let found_len = history.check(image.acked, &found);
        self.images += 1;
        self.torn += usize::from(torn);
        self.more_than_acked += usize::from(found_len > image.acked);
        found_len
    }

    /// Recovers every image; of every `second`-th also each image of that recovery.
    fn check(&mut self, history: &History, images: &[Image], device: Device, second: usize) {
        for (number, image) in images.iter().enumerate() {
            if number % second != 0 {
                self.recovered(history, image);
                continue;
            }
            let recovering = History { acked: Rc::new(Cell::new(image.acked)), ..history.clone() };
            let again = Camera::watch(&image.disk, device, &recovering);
            let found_len = self.recovered(history, image);
            for image in again.images.take() {
                self.recovered(history, &image);
                self.second += 1;
            }
            // What the first recovery handed out stays, even if nothing after it reached the disk.
            image.disk.observe(|_| {});
            image.disk.observe_stores(|_| {});
            image.disk.lose_power(&[], 0);
            history.check(found_len, &recover(&image.disk).0);
        }
    }

    /// Starts after every kill; what the start hands out must be there after a power cut that keeps
    /// nothing that is not durable, and after one at each boundary of that start.
    fn check_killed(&mut self, history: &History, killed: &[Image], device: Device) {
        for image in killed {
            let recovering = History { acked: Rc::new(Cell::new(image.acked)), ..history.clone() };
            let again = Camera::watch(&image.disk, device, &recovering);
            let found_len = self.recovered(history, image);
            for image in thinned(again.images.take(), 3, &again.rng) {
                self.recovered(history, &image);
                self.second += 1;
            }
            image.disk.observe(|_| {});
            image.disk.observe_stores(|_| {});
            image.disk.lose_power(&[], 0);
            history.check(found_len, &recover(&image.disk).0);
            self.boundaries.saw("killed", 1);
        }
    }

    fn add_boundaries(&mut self, camera: &Camera) {
        for (what, images) in camera.boundaries.take().0 {
            self.boundaries.saw(what, images);
        }
    }

    fn require(&self, images_min: usize, boundaries: &[&str]) {
        let Self { images, second, torn, more_than_acked, .. } = self;
        println!(
            "{images} images, {second} of recoveries; {torn} torn, {more_than_acked} with more"
        );
        assert!(*images >= images_min, "INVALID: {images} images");
        assert!(*second > 0 && *torn > 0 && *more_than_acked > 0, "INVALID: {self:?}");
        self.boundaries.require(boundaries);
    }
}

const BOUNDARIES: [&str; 9] =
    ["killed", "store", "header", "opening", "records", "names", "after a sync", "seal", "append"];

/// The same calls in batches of different lengths. Of long lists of images, every n-th by a seeded
/// draw, so that all of them together take seconds.
fn check_in_bursts(calls: &[Call], bursts: &[usize], device: Device) -> Checked {
    let mut checked = Checked::default();
    for burst in bursts {
        let (history, camera) = record(calls.to_vec(), *burst, device);
        let images = thinned(camera.images.take(), 2_500, &SimRng::new(*burst as u64));
        checked.check(&history, &images, device, 24);
        checked.check_killed(&history, &camera.killed.take(), device);
        checked.add_boundaries(&camera);
    }
    checked
}

/// `WAL_IMAGES_TIMES`: how many times the usual number of random histories.
fn times() -> u64 {
    let times = std::env::var("WAL_IMAGES_TIMES");
    times.map_or(1, |times| times.parse().expect("WAL_IMAGES_TIMES is a number"))
}

fn thinned(images: Vec<Image>, most: usize, rng: &SimRng) -> Vec<Image> {
    let skip = images.len().div_ceil(most).max(1);
    let offset = rng.below(skip as u64) as usize;
    images.into_iter().skip(offset).step_by(skip).collect()
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
    for device in [SECTORS, EARLY_SECTORS] {
        let checked = check_in_bursts(&calls, &[1, 4, 20], device);
        checked.require(1_200, &BOUNDARIES);
        checked.boundaries.require(&["vote", "truncate", "purge"]);
    }
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
    for device in [PAGES, EARLY_PAGES] {
        let checked = check_in_bursts(&calls, &[1, 3, 8], device);
        checked.require(1_200, &BOUNDARIES);
    }
}

/// Every segment is dead when the next is begun. What shards said there that have been quiet since
/// must outlive it: votes, purge points and snapshot marks.
#[test]
fn what_quiet_shards_said_outlives_the_segments() {
    let mut calls = vec![
        Call::Vote { shard: B, vote: 77 },
        append(C, 1, 200),
        Call::Mark { shard: C, mark: 5 },
        Call::Purge { shard: C, index: 1 },
        Call::Vote { shard: C, vote: 78 },
        append(C, 2, 40),
        Call::Truncate { shard: C, last_kept: Some(1) },
    ];
    for index in 1..=20 {
        calls.push(append(A, index, 8000));
        calls.push(Call::Purge { shard: A, index });
    }
    for device in [PAGES, EARLY_PAGES] {
        let checked = check_in_bursts(&calls, &[3, 7], device);
        checked.require(1_200, &BOUNDARIES);
        checked.boundaries.require(&["vote", "purge", "mark", "truncate"]);
    }
}

/// The same with votes that come all the time.
#[test]
fn dead_segments_go_only_when_the_next_opening_is_durable() {
    let mut calls = Vec::new();
    for index in 1..=20 {
        calls.push(Call::Vote { shard: B, vote: index as u8 });
        calls.push(append(A, index, 8000));
        calls.push(Call::Purge { shard: A, index });
    }
    check_in_bursts(&calls, &[3, 7], PAGES).require(1_200, &BOUNDARIES);
}

#[test]
fn random_histories() {
    let mut checked = Checked::default();
    for seed in 0..24 * times() {
        let rng = SimRng::new(seed);
        let calls = random_calls(&rng, 3, 60, 2500);
        let device = [PAGES, SECTORS, EARLY_PAGES, EARLY_SECTORS][seed as usize % 4];
        let (history, camera) = record(calls, 1 + rng.below(12) as usize, device);
        let images = thinned(camera.images.take(), 200, &rng);
        checked.check(&history, &images, device, 64);
        let killed = thinned(camera.killed.take(), 16, &rng);
        checked.check_killed(&history, &killed, device);
        checked.add_boundaries(&camera);
    }
    checked.require(4_000, &BOUNDARIES);
    checked.boundaries.require(&["vote", "truncate", "purge", "mark", "written back early"]);
}
