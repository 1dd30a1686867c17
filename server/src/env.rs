//! The three seams between Leasehold and the world: `Disk`, `Net`, `Clock` (DESIGN §3), and the
//! runtime that drives tasks.
//!
//! Production implements them on glommio and Linux, the simulator on virtual time. Nothing outside
//! an implementation of these traits opens a file or a socket, reads a clock or draws a random
//! number on a core. Everything here is single-threaded: one value lives on one core.

use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::time::Duration;

use openraft::AsyncRuntime;

/// The world as one core sees it.
pub trait Env: Debug + Clone + Copy + Default + Ord + 'static {
    /// Tasks, timers and channels, also for openraft.
    type Rt: AsyncRuntime;
    /// Time.
    type Clock: Clock;
    /// The files of one core's part of the data directory.
    type Disk: Disk;
    /// Byte streams between nodes.
    type Net: Net;
}

/// Nanoseconds of a clock that never steps and runs through suspend (`CLOCK_BOOTTIME` on Linux).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonoTime(pub u64);

impl MonoTime {
    /// This time and `duration` more.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }

    /// From `earlier` to here; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Time. The wall clock is for display and for the birth of tokens only; no decision compares it.
pub trait Clock: Clone + 'static {
    /// Monotonic time.
    fn now(&self) -> MonoTime;
    /// Unix milliseconds.
    fn wall_ms(&self) -> u64;
}

/// Files in one directory. Names are plain file names. After the first error of a write or sync
/// the caller stops using the disk for good; an implementation never retries a sync.
#[allow(async_fn_in_trait, reason = "one thread per core: no future here is ever Send")]
pub trait Disk: Clone + 'static {
    /// A preallocated, mapped file.
    type Segment: Segment;
    /// A file being written, invisible under its name until published.
    type Draft: Draft;

    /// All file names, sorted; drafts are not among them.
    async fn list(&self) -> io::Result<Vec<String>>;
    /// A whole file's durable bytes, read past the page cache where the platform can.
    async fn read(&self, name: &str) -> io::Result<Vec<u8>>;
    /// Up to `len` bytes of a published file from `offset`; fewer only at its end.
    async fn read_at(&self, name: &str, offset: u64, len: usize) -> io::Result<Vec<u8>>;
    /// Creates a file of `len` zero bytes, really written, in 4 KiB writes, synced under a
    /// temporary name, renamed to `name`, its directory synced. Off the core's thread.
    async fn create_segment(&self, name: &str, len: u64) -> io::Result<()>;
    /// Maps an existing segment for writing, its pages resident.
    async fn open_segment(&self, name: &str) -> io::Result<Self::Segment>;
    /// Begins a file that `Draft::publish` will name `name`, replacing what is there.
    async fn draft(&self, name: &str) -> io::Result<Self::Draft>;
    /// Renames a file and syncs the directory.
    async fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file; the directory is synced before this returns.
    async fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes everything that was ever written to an existing file durable.
    async fn sync_file(&self, name: &str) -> io::Result<()>;
    /// Makes every name in the directory durable.
    async fn sync_dir(&self) -> io::Result<()>;
    /// Bytes that this process had the block layer write; `None` where that is not counted.
    fn written_bytes(&self) -> Option<u64>;
}

/// A mapped segment. `store` must not be called while a `sync` is in flight.
#[allow(async_fn_in_trait, reason = "one thread per core: no future here is ever Send")]
pub trait Segment: 'static {
    /// Its length in bytes.
    fn len(&self) -> u64;
    /// True if it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies `bytes` into the map. Panics if they do not fit.
    fn store(&mut self, offset: u64, bytes: &[u8]);
    /// Makes everything stored so far durable (one fdatasync).
    async fn sync(&self) -> io::Result<()>;
}

/// See `Disk::draft`. Dropping it abandons the file.
#[allow(async_fn_in_trait, reason = "one thread per core: no future here is ever Send")]
pub trait Draft: 'static {
    /// Appends.
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Syncs, renames to its name, syncs the directory.
    async fn publish(self) -> io::Result<()>;
}

/// Byte streams between nodes. Addresses are `HOST:PORT` and resolved anew at each connect.
#[allow(async_fn_in_trait, reason = "one thread per core: no future here is ever Send")]
pub trait Net: Clone + 'static {
    /// The reading half of a stream.
    type Reader: ByteReader;
    /// The writing half of a stream.
    type Writer: ByteWriter;

    /// Connects; the caller bounds the wait.
    async fn connect(&self, addr: &str) -> io::Result<(Self::Reader, Self::Writer)>;

    /// Ends a stream so that what was written last arrives, even if input is unread; takes at
    /// most `limit`. Where dropping both halves does that, nothing is to be done.
    async fn finish(reader: Self::Reader, writer: Self::Writer, limit: Duration) {
        let _ = limit;
        drop((reader, writer));
    }
}

/// The reading half of a byte stream.
pub trait ByteReader: 'static {
    /// Reads at least one byte; 0 at the end of the stream.
    fn read(&mut self, buf: &mut [u8]) -> impl Future<Output = io::Result<usize>>;
}

/// The writing half of a byte stream. Dropping both halves closes the stream.
pub trait ByteWriter: 'static {
    /// Hands all of `bytes` to the transport.
    fn write_all(&mut self, bytes: &[u8]) -> impl Future<Output = io::Result<()>>;
}
