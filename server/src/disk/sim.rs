//! A simulated disk: what is written is volatile until it is synced, and a crash keeps any part of
//! the rest.
//!
//! Files consist of 4 KiB pages, each with a durable and a volatile image. A crash keeps any subset
//! of the pages (or 512-byte sectors) that were not synced, and any prefix of the name changes
//! since the directory was last synced. A failed sync behaves like Linux's: its pages count as
//! clean afterwards, a second sync "succeeds" and makes nothing durable. A full disk refuses new
//! files. All of it is deterministic under the seed.
//!
//! It also checks its user: storing into a segment while a sync of it is in flight panics.

mod crash;
mod faults;
mod file;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use openraft_rt::AsyncRuntime;

pub use crash::{Tear, Unsynced};
pub use faults::Io;

use self::faults::Faults;
use self::file::File;
use crate::env::{Disk, Draft, Segment};
use crate::rt::sim::{SimRng, SimRt};

type FileRef = Rc<RefCell<File>>;
type Names = BTreeMap<String, FileRef>;
type Observer = Rc<dyn Fn(&SimDisk)>;

/// How a disk behaves when nothing is wrong with it.
#[derive(Clone, Copy, Debug, Default)]
pub struct SimDiskConfig {
    /// The shortest sync.
    pub sync_min: Duration,
    /// The longest sync; each takes a random time from the shortest up to this.
    pub sync_max: Duration,
    /// The longest of any other operation.
    pub io_max: Duration,
    /// Bytes that all files together may have; `None` is no limit.
    pub capacity: Option<u64>,
}

/// One directory of a simulated disk. Clones are handles to the same one.
#[derive(Clone)]
pub struct SimDisk {
    inner: Rc<Inner>,
}

struct Inner {
    config: Cell<SimDiskConfig>,
    rng: SimRng,
    /// What a running process sees.
    names: RefCell<Names>,
    /// What is on the platter.
    durable_names: RefCell<Names>,
    /// The states of `names` since the directory was last synced, oldest first.
    unsynced_names: RefCell<Vec<Names>>,
    faults: RefCell<Faults>,
    observer: RefCell<Option<Observer>>,
    store_observer: RefCell<Option<Observer>>,
    written_bytes: Cell<u64>,
    refusals: Cell<u64>,
    /// Raised by a crash: handles from before are dead.
    power_cycle: Cell<u64>,
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.inner.names.borrow();
        f.debug_struct("SimDisk").field("names", &names.keys()).finish_non_exhaustive()
    }
}

impl SimDisk {
    /// An empty directory.
    pub fn new(seed: u64, config: SimDiskConfig) -> Self {
        Self::with_names(SimRng::new(seed), config, Names::new())
    }

    fn with_names(rng: SimRng, config: SimDiskConfig, names: Names) -> Self {
        let inner = Inner {
            config: Cell::new(config),
            rng,
            durable_names: RefCell::new(names.clone()),
            names: RefCell::new(names),
            unsynced_names: RefCell::default(),
            faults: RefCell::default(),
            observer: RefCell::default(),
            store_observer: RefCell::default(),
            written_bytes: Cell::new(0),
            refusals: Cell::new(0),
            power_cycle: Cell::new(0),
        };
        Self { inner: Rc::new(inner) }
    }

    /// Changes how the disk behaves from now on.
    pub fn set_config(&self, config: SimDiskConfig) {
        self.inner.config.set(config);
    }

    /// Makes the `nth` operation of its kind from now on (0 is the next) fail.
    pub fn fail(&self, io: Io, nth: u64, kind: io::ErrorKind) {
        self.inner.faults.borrow_mut().add(io, nth, kind);
    }

    /// No operation fails on purpose any more.
    pub fn heal(&self) {
        self.inner.faults.borrow_mut().clear();
    }

    /// Operations that failed on purpose so far.
    pub fn failures(&self) -> u64 {
        self.inner.faults.borrow().struck()
    }

    /// Operations that found no room so far.
    pub fn refusals(&self) -> u64 {
        self.inner.refusals.get()
    }

    /// Operations of a kind so far.
    pub fn count(&self, io: Io) -> u64 {
        self.inner.faults.borrow().count(io)
    }

    /// Calls `observer` at each sync twice, when everything it covers is still unsynced, and when
    /// it is durable but not yet reported; and at each change of names, before and after it is
    /// durable.
    pub fn observe(&self, observer: impl Fn(&Self) + 'static) {
        *self.inner.observer.borrow_mut() = Some(Rc::new(observer));
    }

    /// Calls `observer` after each store into a segment, as often as a record has pieces: a device
    /// may write a page back, and power may go, between any two of them.
    pub fn observe_stores(&self, observer: impl Fn(&Self) + 'static) {
        *self.inner.store_observer.borrow_mut() = Some(Rc::new(observer));
    }

    /// Flips the bits of `mask` in one byte of a file for good. Panics if there is no such byte.
    pub fn rot(&self, name: &str, offset: u64, mask: u8) {
        let file = self.inner.names.borrow()[name].clone();
        file.borrow_mut().rot(offset, mask);
    }

    /// Bytes of all files.
    pub fn used_bytes(&self) -> u64 {
        self.inner.names.borrow().values().map(|file| file.borrow().len()).sum()
    }

    async fn io(&self, io: Io) -> io::Result<()> {
        let io_max = self.inner.config.get().io_max;
        self.pause(Duration::ZERO, io_max).await;
        self.inner.faults.borrow_mut().strike(io)
    }

    async fn pause(&self, min: Duration, max: Duration) {
        let nanos_max = u64::try_from(max.saturating_sub(min).as_nanos()).unwrap_or(u64::MAX);
        let more = if nanos_max > 0 { self.inner.rng.below(nanos_max) } else { 0 };
        let pause = min + Duration::from_nanos(more);
        if !pause.is_zero() {
            SimRt::sleep(pause).await;
        }
    }

    fn find(&self, name: &str) -> io::Result<FileRef> {
        let file = self.inner.names.borrow().get(name).cloned();
        file.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no file {name}")))
    }

    fn reserve(&self, len: u64) -> io::Result<()> {
        match self.inner.config.get().capacity {
            Some(capacity) if self.used_bytes() + len > capacity => {
                self.inner.refusals.set(self.inner.refusals.get() + 1);
                let full = "no space left on the simulated disk";
                Err(io::Error::new(io::ErrorKind::StorageFull, full))
            }
            _ => Ok(()),
        }
    }

    fn change_names(&self, change: impl FnOnce(&mut Names)) {
        let mut names = self.inner.names.borrow_mut();
        change(&mut names);
        self.inner.unsynced_names.borrow_mut().push(names.clone());
        drop(names);
        self.tell_observer();
    }

    async fn sync(&self, file: &FileRef, io: Io) -> io::Result<()> {
        let power_cycle = self.inner.power_cycle.get();
        let struck = self.inner.faults.borrow_mut().strike(io);
        file.borrow_mut().begin_sync();
        self.tell_observer();
        let SimDiskConfig { sync_min, sync_max, .. } = self.inner.config.get();
        self.pause(sync_min, sync_max).await;
        if self.inner.power_cycle.get() != power_cycle {
            return Err(power_lost());
        }
        let written = file.borrow_mut().end_sync(struck.is_ok());
        self.inner.written_bytes.set(self.inner.written_bytes.get() + written);
        self.tell_observer();
        struck
    }

    fn tell_observer(&self) {
        self.tell(&self.inner.observer);
    }

    fn tell(&self, observer: &RefCell<Option<Observer>>) {
        let observer = observer.borrow().clone();
        if let Some(observer) = observer {
            observer(self);
        }
    }
}

fn power_lost() -> io::Error {
    io::Error::other("the simulated machine lost its power")
}

impl Disk for SimDisk {
    type Segment = SimSegment;
    type Draft = SimDraft;

    async fn list(&self) -> io::Result<Vec<String>> {
        self.io(Io::Read).await?;
        Ok(self.inner.names.borrow().keys().cloned().collect())
    }

    async fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        self.io(Io::Read).await?;
        let file = self.find(name)?;
        let len = file.borrow().len();
        Ok(file.borrow().read(0, len))
    }

    async fn read_at(&self, name: &str, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        self.io(Io::Read).await?;
        Ok(self.find(name)?.borrow().read(offset, len as u64))
    }

    async fn create_segment(&self, name: &str, len: u64) -> io::Result<()> {
        self.io(Io::Create).await?;
        self.reserve(len)?;
        let mut file = File::default();
        file.append(&vec![0; usize::try_from(len).expect("segments are small")]);
        let file = Rc::new(RefCell::new(file));
        self.sync(&file, Io::SyncNew).await?;
        self.change_names(|names| drop(names.insert(name.to_owned(), file)));
        self.sync_dir().await
    }

    async fn open_segment(&self, name: &str) -> io::Result<SimSegment> {
        self.io(Io::Read).await?;
        let file = self.find(name)?;
        Ok(SimSegment { disk: self.clone(), power_cycle: self.inner.power_cycle.get(), file })
    }

    async fn draft(&self, name: &str) -> io::Result<SimDraft> {
        self.io(Io::Create).await?;
        Ok(SimDraft { disk: self.clone(), name: name.to_owned(), file: Rc::default() })
    }

    async fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.io(Io::Rename).await?;
        let file = self.find(from)?;
        self.change_names(|names| {
            names.remove(from);
            names.insert(to.to_owned(), file);
        });
        self.sync_dir().await
    }

    async fn remove(&self, name: &str) -> io::Result<()> {
        self.io(Io::Remove).await?;
        self.find(name)?;
        self.change_names(|names| drop(names.remove(name)));
        self.sync_dir().await
    }

    async fn sync_file(&self, name: &str) -> io::Result<()> {
        let file = self.find(name)?;
        self.sync(&file, Io::Sync).await
    }

    async fn sync_dir(&self) -> io::Result<()> {
        self.io(Io::SyncDir).await?;
        self.inner.unsynced_names.borrow_mut().clear();
        let names = self.inner.names.borrow().clone();
        *self.inner.durable_names.borrow_mut() = names;
        self.tell_observer();
        Ok(())
    }

    fn written_bytes(&self) -> Option<u64> {
        Some(self.inner.written_bytes.get())
    }
}

/// A mapped file of a simulated disk.
pub struct SimSegment {
    disk: SimDisk,
    power_cycle: u64,
    file: FileRef,
}

impl SimSegment {
    fn has_power(&self) -> bool {
        self.disk.inner.power_cycle.get() == self.power_cycle
    }
}

impl Segment for SimSegment {
    fn len(&self) -> u64 {
        self.file.borrow().len()
    }

    fn store(&mut self, offset: u64, bytes: &[u8]) {
        if self.has_power() {
            self.file.borrow_mut().store(offset, bytes);
            self.disk.tell(&self.disk.inner.store_observer);
        }
    }

    async fn sync(&self) -> io::Result<()> {
        if !self.has_power() {
            return Err(power_lost());
        }
        self.disk.sync(&self.file, Io::Sync).await
    }
}

/// A file of a simulated disk that has no name yet.
pub struct SimDraft {
    disk: SimDisk,
    name: String,
    file: FileRef,
}

impl Draft for SimDraft {
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.disk.io(Io::Write).await?;
        self.disk.reserve(self.file.borrow().len() + bytes.len() as u64)?;
        self.file.borrow_mut().append(bytes);
        Ok(())
    }

    async fn publish(self) -> io::Result<()> {
        self.disk.sync(&self.file, Io::SyncNew).await?;
        self.disk.io(Io::Rename).await?;
        self.disk.change_names(|names| drop(names.insert(self.name, self.file)));
        self.disk.sync_dir().await
    }
}
