//! The metrics: one static table, and the cells that cores count in.
//!
//! Owns names and values. A core counts with relaxed atomic additions into cells of its own; no
//! lock, no allocation, no formatting. Only the admin thread reads across cores.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use hdrhistogram::Histogram as Hdr;

use super::health::Health;
use super::histogram::{Counts, Recorder};

/// A metric's entry in the table.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The name of its family.
    pub name: &'static str,
    /// Its label within the family, as `kind="get"`, or "".
    pub label: &'static str,
    /// What it counts; the same for the whole family.
    pub help: &'static str,
    /// What a stored value is multiplied with when it is shown.
    pub scale: f64,
}

macro_rules! table {
    (
        $(#[$doc:meta])* $enum:ident;
        $($name:literal, $scale:literal, $help:literal { $($variant:ident $($label:literal)?,)* })*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $enum { $($(#[doc = $help] $(#[doc = $label])? $variant,)*)* }

        impl $enum {
            /// The table, in the order of the variants.
            pub const TABLE: &'static [Spec] = &[$($(Spec {
                name: $name,
                label: concat!("" $(, $label)?),
                help: $help,
                scale: $scale,
            },)*)*];
        }
    };
}

table! {
    /// Everything that only grows.
    Counter;
    "leasehold_requests_total", 1.0, "Requests read from clients." {
        RequestOpen "kind=\"open\"",
        RequestAcquire "kind=\"acquire\"",
        RequestCancel "kind=\"cancel\"",
        RequestRelease "kind=\"release\"",
        RequestClose "kind=\"close\"",
        RequestForceRelease "kind=\"force_release\"",
        RequestRenew "kind=\"renew\"",
        RequestGet "kind=\"get\"",
        RequestList "kind=\"list\"",
        RequestOther "kind=\"other\"",
    }
    "leasehold_errors_total", 1.0, "Requests answered with an error, by its class." {
        ErrorRetryable "class=\"retryable\"",
        ErrorNotApplied "class=\"not_applied\"",
        ErrorUnknown "class=\"unknown\"",
    }
    "leasehold_grants_total", 1.0, "Holds granted, as applied by this node." {
        Grants,
    }
    "leasehold_queued_total", 1.0, "Acquires that were queued, as applied by this node." {
        Queued,
    }
    "leasehold_releases_total", 1.0, "Holds that ended, by reason, as applied by this node." {
        EndReleased "reason=\"released\"",
        EndExpired "reason=\"lease_expired\"",
        EndClosed "reason=\"session_closed\"",
        EndForced "reason=\"forced\"",
    }
    "leasehold_lease_expiries_total", 1.0, "Leases that expired, as applied by this node." {
        Expiries,
    }
    "leasehold_leader_changes_total", 1.0, "Changes of a shard's leader, as seen by this node." {
        LeaderChanges,
    }
    "leasehold_batches_proposed_total", 1.0, "Batches of commands proposed as a leader." {
        BatchesProposed,
    }
    "leasehold_commands_applied_total", 1.0, "Commands applied by this node, whoever led." {
        CommandsApplied,
    }
    "leasehold_forwarded_total", 1.0, "Requests passed on to a shard's leader on another node." {
        Forwarded,
    }
    "leasehold_snapshots_total", 1.0, "Snapshots received from a leader and installed." {
        SnapshotsInstalled "kind=\"installed\"",
    }
    "leasehold_connections_accepted_total", 1.0, "Connections accepted." {
        AcceptedClient "port=\"client\"",
        AcceptedPeer "port=\"peer\"",
    }
    "leasehold_accept_errors_total", 1.0, "Failed accepts, as when file descriptors run out." {
        AcceptErrors,
    }
    "leasehold_wal_syncs_total", 1.0, "Flushes of the write-ahead log." {
        WalSyncs,
    }
    "leasehold_wal_bytes_total", 1.0, "Bytes of records written to the write-ahead log." {
        WalBytes,
    }
}

table! {
    /// Everything that goes up and down.
    Gauge;
    "leasehold_connections", 1.0, "Open connections." {
        ConnectionsClient "port=\"client\"",
        ConnectionsPeer "port=\"peer\"",
    }
    "leasehold_peer_links", 1.0, "Open connections that this node made to its peers." {
        PeerLinks,
    }
    "leasehold_leases", 1.0, "Live leases of the core's shards." {
        Leases,
    }
    "leasehold_holds", 1.0, "Holds of the core's shards." {
        Holds,
    }
    "leasehold_waiters", 1.0, "Queued acquires of the core's shards." {
        Waiters,
    }
    "leasehold_watches", 1.0, "Watches of the core's shards." {
        Watches,
    }
    "leasehold_watch_history_events", 1.0, "Past events that the core's shards keep for watches." {
        WatchHistory,
    }
    "leasehold_wal_segments", 1.0, "Segment files of the write-ahead log in use." {
        WalSegments,
    }
    "leasehold_wal_write_amplification", 0.001,
    "Bytes written by the process per byte that the log had to write: near 1 is right, 8 is not." {
        WalWriteAmplification,
    }
    "leasehold_reactor_stall_seconds", 1e-9,
    "Longest time between two turns of the core's event loop in the last interval." {
        ReactorStall,
    }
    "leasehold_reactor_stall_max_seconds", 1e-9,
    "Longest time between two turns of the core's event loop since the start." {
        ReactorStallMax,
    }
}

table! {
    /// Distributions: durations are recorded in nanoseconds.
    Distribution;
    "leasehold_request_seconds", 1e-9,
    "From reading a client's request to its first answer; waiting in a queue is not counted." {
        TookOpen "kind=\"open\"",
        TookAcquire "kind=\"acquire\"",
        TookCancel "kind=\"cancel\"",
        TookRelease "kind=\"release\"",
        TookClose "kind=\"close\"",
        TookForceRelease "kind=\"force_release\"",
        TookRenew "kind=\"renew\"",
        TookGet "kind=\"get\"",
        TookList "kind=\"list\"",
        TookOther "kind=\"other\"",
    }
    "leasehold_wal_sync_seconds", 1e-9, "Duration of a flush of the write-ahead log." {
        WalSync,
    }
    "leasehold_commit_seconds", 1e-9, "From proposing a batch to having applied it." {
        Commit,
    }
    "leasehold_confirm_seconds", 1e-9, "Duration of a confirmed round." {
        Confirm,
    }
    "leasehold_batch_commands", 1.0, "Commands of a proposed batch." {
        BatchCommands,
    }
}

/// All metrics of a process.
#[derive(Debug)]
pub struct Metrics {
    cores: Box<[CoreMetrics]>,
    health: Health,
}

impl Metrics {
    /// Cells for so many cores and shards.
    pub fn new(cores: u32, shards: u32) -> Arc<Self> {
        assert!(cores > 0, "a node has a core");
        let cores = (0..cores).map(|_| CoreMetrics::new()).collect();
        Arc::new(Self { cores, health: Health::new(shards) })
    }

    /// The cells of one core, to be kept by it.
    pub fn handle(self: &Arc<Self>, core: u32) -> CoreHandle {
        assert!((core as usize) < self.cores.len(), "no core {core}");
        CoreHandle { metrics: self.clone(), core: core as usize }
    }

    /// The node's and its shards' health.
    pub fn health(&self) -> &Health {
        &self.health
    }

    pub(super) fn cores(&self) -> &[CoreMetrics] {
        &self.cores
    }

    /// What all cores recorded of a distribution.
    pub(super) fn merged(&self, distribution: usize) -> Counts {
        let mut all = Counts::empty();
        for core in &self.cores {
            all.merge(&core.recorders[distribution].counts());
        }
        all
    }
}

/// One core's cells. Any thread may count in them; only its own core should.
#[derive(Debug)]
pub struct CoreMetrics {
    counters: Box<[AtomicU64]>,
    gauges: Box<[AtomicI64]>,
    recorders: Box<[Recorder]>,
}

impl CoreMetrics {
    fn new() -> Self {
        Self {
            counters: Counter::TABLE.iter().map(|_| AtomicU64::new(0)).collect(),
            gauges: Gauge::TABLE.iter().map(|_| AtomicI64::new(0)).collect(),
            recorders: Distribution::TABLE.iter().map(|_| Recorder::new()).collect(),
        }
    }

    /// Counts one.
    pub fn count(&self, counter: Counter) {
        self.add(counter, 1);
    }

    /// Counts `n`.
    pub fn add(&self, counter: Counter, n: u64) {
        self.counters[counter as usize].fetch_add(n, Ordering::Relaxed);
    }

    /// Sets a gauge, in stored units (see `Spec::scale`).
    pub fn set(&self, gauge: Gauge, value: i64) {
        self.gauges[gauge as usize].store(value, Ordering::Relaxed);
    }

    /// Moves a gauge by `delta`.
    pub fn shift(&self, gauge: Gauge, delta: i64) {
        self.gauges[gauge as usize].fetch_add(delta, Ordering::Relaxed);
    }

    /// Records a value of a distribution, in stored units (nanoseconds for durations).
    pub fn record(&self, distribution: Distribution, value: u64) {
        self.recorders[distribution as usize].record(value);
    }

    /// Sets a counter that is kept elsewhere to its total, which never falls.
    pub fn follow(&self, counter: Counter, total: u64) {
        self.counters[counter as usize].store(total, Ordering::Relaxed);
    }

    /// Sets a distribution that is kept elsewhere, since the start, in units of `scale` stored
    /// units (1000 for microseconds). About a thousand stores: once a second, not more.
    pub fn follow_distribution(&self, distribution: Distribution, hdr: &Hdr<u64>, scale: u64) {
        self.recorders[distribution as usize].follow(hdr, scale);
    }

    pub(super) fn counter(&self, index: usize) -> u64 {
        self.counters[index].load(Ordering::Relaxed)
    }

    pub(super) fn gauge(&self, index: usize) -> i64 {
        self.gauges[index].load(Ordering::Relaxed)
    }
}

/// One core's cells and what keeps them alive.
#[derive(Clone, Debug)]
pub struct CoreHandle {
    metrics: Arc<Metrics>,
    core: usize,
}

impl Deref for CoreHandle {
    type Target = CoreMetrics;

    fn deref(&self) -> &CoreMetrics {
        &self.metrics.cores[self.core]
    }
}

impl CoreHandle {
    /// The node's and its shards' health.
    pub fn health(&self) -> &Health {
        &self.metrics.health
    }
}
