//! How long a client waits when a leader dies: from its kill -9 to the next grant.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::actor::Actor;
use crate::clock::now_ns;
use crate::cluster::{Cluster, PATIENCE, Spec};
use crate::history::Recorder;
use crate::stats::Latencies;

/// Time between a recovered cluster and the next kill, so that rounds do not disturb each other.
const REST: Duration = Duration::from_millis(300);

/// Kills the leader in each of some rounds. The first latency is the client's that talked to the
/// leader: it must notice the death, find the new leader and be granted a key.
pub fn run(spec: Spec, rounds: u32, mut round: impl FnMut(u32, u64)) -> io::Result<Latencies> {
    let mut cluster = Cluster::start(spec)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut actor = Actor::new(0, cluster.endpoints(), Recorder::new(), stop);
    let failed = |what: &str, error: &dyn std::fmt::Debug| {
        io::Error::other(format!("{what} failed: {error:?}"))
    };
    actor.open(60_000, PATIENCE).map_err(|error| failed("opening a session", &error))?;
    let mut latencies = Latencies::default();
    for number in 1..=rounds {
        // A cycle before the kill makes the actor talk to the leader.
        cycle(&mut actor, "failover").map_err(|error| failed("a cycle before the kill", &error))?;
        let leader = cluster.wait_leader(0, PATIENCE)?;
        actor.idle(REST);
        let killed_ns = now_ns();
        cluster.kill(leader)?;
        let held = actor.acquire("failover", u32::MAX, PATIENCE);
        let took_ns = now_ns() - killed_ns;
        let held = held.map_err(|error| failed("the acquire after the kill", &error))?;
        actor.release(&held, PATIENCE).map_err(|error| failed("a release", &error))?;
        latencies.record(took_ns);
        round(number, took_ns);
        cluster.spawn(leader)?;
        cluster.wait_ready(PATIENCE)?;
        actor.idle(REST);
    }
    Ok(latencies)
}

fn cycle(actor: &mut Actor, key: &str) -> Result<(), crate::actor::Failed> {
    let held = actor.acquire(key, u32::MAX, PATIENCE)?;
    actor.release(&held, PATIENCE)
}
