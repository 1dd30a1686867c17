//! How long a client waits when a leader dies: from its kill -9 to the next grant.
//!
//! Measured twice in each round, by a client of the `leasehold` crate and by one that speaks the
//! bare protocol and tries another node after a few milliseconds: the second shows what the
//! cluster needs, the first what a user sees.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use leasehold::{Client, Session};
use tokio::runtime::Runtime;

use crate::actor::{Actor, Failed};
use crate::clock::now_ns;
use crate::cluster::{Cluster, PATIENCE, Spec};
use crate::history::Recorder;
use crate::stats::Latencies;

/// Time between a recovered cluster and the next kill, so that rounds do not disturb each other.
const REST: Duration = Duration::from_millis(300);

/// What the rounds measured.
#[derive(Debug, Default)]
pub struct Outcome {
    /// By the client library.
    pub library: Latencies,
    /// By the bare protocol.
    pub bare: Latencies,
}

/// Kills the leader in each of some rounds and tells each round's number and its two latencies.
pub fn run(spec: Spec, rounds: u32, mut round: impl FnMut(u32, u64, u64)) -> io::Result<Outcome> {
    let mut cluster = Cluster::start(spec)?;
    let mut bare = BareProbe::start(&cluster)?;
    let library = LibraryProbe::start(&cluster)?;
    let mut outcome = Outcome::default();
    for number in 1..=rounds {
        // A cycle before the kill makes both talk to the leader.
        library.cycle()?;
        bare.cycle()?;
        std::thread::sleep(REST);
        let leader = cluster.wait_leader(0, PATIENCE)?;
        let killed_ns = now_ns();
        cluster.kill(leader)?;
        let (by_library, by_bare) = std::thread::scope(|scope| {
            let other = scope.spawn(|| bare.cycle());
            let granted = library.cycle();
            (granted, other.join().expect("the probe does not panic"))
        });
        let (library_ns, bare_ns) = (by_library? - killed_ns, by_bare? - killed_ns);
        outcome.library.record(library_ns);
        outcome.bare.record(bare_ns);
        round(number, library_ns, bare_ns);
        cluster.spawn(leader)?;
        cluster.wait_ready(PATIENCE)?;
        std::thread::sleep(REST);
    }
    Ok(outcome)
}

struct BareProbe(Actor);

impl BareProbe {
    fn start(cluster: &Cluster) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut actor = Actor::new(0, cluster.endpoints(), Recorder::new(), stop);
        actor.open(600_000, PATIENCE).map_err(failed)?;
        Ok(Self(actor))
    }

    /// Returns when the key was granted.
    fn cycle(&mut self) -> io::Result<u64> {
        let held = self.0.acquire("failover/bare", u32::MAX, PATIENCE).map_err(failed)?;
        let granted_ns = now_ns();
        self.0.release(&held, PATIENCE).map_err(failed)?;
        Ok(granted_ns)
    }
}

fn failed(error: Failed) -> io::Error {
    io::Error::other(format!("the bare client failed: {error:?}"))
}

struct LibraryProbe {
    runtime: Runtime,
    session: Session,
}

impl LibraryProbe {
    fn start(cluster: &Cluster) -> io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build()?;
        let client = runtime.block_on(Client::connect(&cluster.endpoint_list()));
        let client = client.map_err(io::Error::other)?;
        let session = client.session(Duration::from_mins(10)).map_err(io::Error::other)?;
        Ok(Self { runtime, session })
    }

    fn cycle(&self) -> io::Result<u64> {
        self.runtime.block_on(async {
            let guard = self.session.lock("failover/library").acquire().await;
            let guard = guard.map_err(io::Error::other)?;
            let granted_ns = now_ns();
            guard.release().await.map_err(io::Error::other)?;
            Ok(granted_ns)
        })
    }
}
