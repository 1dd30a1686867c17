//! Watch latency: from when a change is due until a watcher's program has it, at a steady rate of
//! changes, each of which concerns some of the watchers and is unknown to the others.
//!
//! A change sets the value of a hold, and the value is the time at which it was due, so that a
//! server that falls behind cannot hide it. Generator and watchers run on threads of their own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use leasehold::{Client, EventKind, Guard, WatchFrom, WatchItem, WatchTarget};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::clock::now_ns;
use crate::stats::{Latencies, Summary};

/// Keys of each group.
const KEYS_PER_GROUP: usize = 20;
/// After the last change, how long its watchers have.
const PATIENCE: Duration = Duration::from_secs(10);

/// What to measure.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Plan {
    /// Changes that are due each second.
    pub changes_per_s: f64,
    /// Watchers, spread evenly over the groups.
    pub watchers: usize,
    /// Watchers that each change concerns.
    pub matched: usize,
    /// Watchers of one connection.
    pub per_client: usize,
    /// How long.
    pub run_ms: u64,
    /// Before that, how long nothing is recorded.
    pub warm_up_ms: u64,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The plan.
    pub plan: Plan,
    /// From when a change was due until a watcher had it.
    pub told: Summary,
    /// From when a change was due until who made it had its reply.
    pub made: Summary,
    /// Changes made each second.
    pub changes_per_s: f64,
    /// Tellings that are missing: 0, or a fault.
    pub missing: u64,
    /// Changes that failed.
    pub failed: u64,
}

fn io_error(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn prefix(group: usize) -> String {
    format!("watched/{group:04}/")
}

struct Shared {
    over: AtomicBool,
    /// When recording begins.
    from_ns: AtomicU64,
    told: AtomicU64,
}

/// Runs it against a cluster.
pub fn run(endpoints: &str, plan: Plan) -> io::Result<Outcome> {
    assert!(plan.matched > 0 && plan.watchers >= plan.matched, "somebody watches");
    let groups = plan.watchers / plan.matched;
    let shared = Arc::new(Shared {
        over: AtomicBool::new(false),
        from_ns: AtomicU64::new(u64::MAX),
        told: AtomicU64::new(0),
    });
    let (begun, begins) = std::sync::mpsc::channel();
    let (endpoints, watched) = (endpoints.to_owned(), Arc::clone(&shared));
    let (list, ready) = (endpoints.clone(), begun);
    let watchers = std::thread::spawn(move || {
        runtime()?.block_on(async { watch_all(&list, plan, groups, &watched, &ready).await })
    });
    begins.recv().map_err(|_| io_error("the watchers did not begin"))?;
    let made = runtime()?.block_on(change_all(&endpoints, plan, groups, &shared));
    shared.over.store(true, Ordering::Relaxed);
    let told = watchers.join().map_err(|_| io_error("the watchers panicked"))??;
    let made = made?;
    let expected = made.recorded * plan.matched as u64;
    Ok(Outcome {
        plan,
        told: told.summary(),
        made: made.latencies.summary(),
        changes_per_s: made.recorded as f64 * 1e3 / plan.run_ms as f64,
        missing: expected.saturating_sub(told.len()),
        failed: made.failed,
    })
}

async fn watch_all(
    endpoints: &str,
    plan: Plan,
    groups: usize,
    shared: &Arc<Shared>,
    ready: &std::sync::mpsc::Sender<()>,
) -> io::Result<Latencies> {
    let mut tasks = JoinSet::new();
    let (tell, mut begun) = mpsc::unbounded_channel();
    let mut client = None;
    for watcher in 0..plan.watchers {
        if watcher % plan.per_client == 0 {
            client = Some(Client::connect(endpoints).await.map_err(io_error)?);
        }
        let client = client.clone().expect("made at the first");
        let (shared, tell) = (Arc::clone(shared), tell.clone());
        tasks.spawn(watch(client, prefix(watcher % groups), shared, tell));
    }
    drop(tell);
    for _ in 0..plan.watchers {
        begun.recv().await.ok_or_else(|| io_error("a watcher did not begin"))?;
    }
    ready.send(()).map_err(io_error)?;
    let mut all = Latencies::default();
    while let Some(done) = tasks.join_next().await {
        all.add(&done.map_err(io_error)??);
    }
    Ok(all)
}

async fn watch(
    client: Client,
    prefix: String,
    shared: Arc<Shared>,
    begun: mpsc::UnboundedSender<()>,
) -> io::Result<Latencies> {
    let target = WatchTarget::prefix(prefix);
    let mut watch = client.watch(&target, &WatchFrom::Now).map_err(io_error)?;
    let mut latencies = Latencies::default();
    let mut has_begun = false;
    while !shared.over.load(Ordering::Relaxed) {
        let next = tokio::time::timeout(Duration::from_millis(200), watch.next()).await;
        let Ok(item) = next else { continue };
        let item = item.map_err(io_error)?;
        if !std::mem::replace(&mut has_begun, true) {
            begun.send(()).map_err(io_error)?;
        }
        let WatchItem::Change { events, .. } = item else { continue };
        for event in events {
            let EventKind::ValueChanged { value, .. } = &event.kind else { continue };
            let Ok(due) = value.as_slice().try_into().map(u64::from_le_bytes) else { continue };
            if due >= shared.from_ns.load(Ordering::Relaxed) {
                latencies.record(now_ns().saturating_sub(due));
                shared.told.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(latencies)
}

struct Made {
    latencies: Latencies,
    recorded: u64,
    failed: u64,
}

async fn change_all(
    endpoints: &str,
    plan: Plan,
    groups: usize,
    shared: &Arc<Shared>,
) -> io::Result<Made> {
    let client = Client::connect(endpoints).await.map_err(io_error)?;
    let session = client.session(Duration::from_mins(1)).map_err(io_error)?;
    let mut guards: Vec<Guard> = Vec::new();
    for key in 0..KEYS_PER_GROUP * groups {
        let name = format!("{}{key:05}", prefix(key % groups));
        guards.push(session.lock(name).acquire().await.map_err(io_error)?);
    }
    let start = now_ns() + 1_000_000;
    let from = start + plan.warm_up_ms * 1_000_000;
    shared.from_ns.store(from, Ordering::Relaxed);
    let step_ns = 1e9 / plan.changes_per_s;
    let total = ((plan.warm_up_ms + plan.run_ms) as f64 / 1e3 * plan.changes_per_s) as u64;
    let mut made = Made { latencies: Latencies::default(), recorded: 0, failed: 0 };
    let mut under_way = JoinSet::new();
    for number in 0..total {
        let due = start + (number as f64 * step_ns) as u64;
        while let Some(done) = under_way.try_join_next() {
            made.take(done.map_err(io_error)?, from);
        }
        let now = now_ns();
        if due > now {
            tokio::time::sleep(Duration::from_nanos(due - now)).await;
        }
        let change = guards[number as usize % guards.len()].set_value(due.to_le_bytes());
        under_way.spawn(async move { (due, change.await.is_ok(), now_ns()) });
    }
    while let Some(done) = under_way.join_next().await {
        made.take(done.map_err(io_error)?, from);
    }
    let expected = made.recorded * plan.matched as u64;
    let deadline = crate::clock::Deadline::after(PATIENCE);
    while shared.told.load(Ordering::Relaxed) < expected && !deadline.passed() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(made)
}

impl Made {
    fn take(&mut self, (due, made, at): (u64, bool, u64), from: u64) {
        if !made {
            self.failed += 1;
        } else if due >= from {
            self.recorded += 1;
            self.latencies.record(at.saturating_sub(due));
        }
    }
}
