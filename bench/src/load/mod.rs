//! The load generator: many connections on one thread and one epoll, speaking the protocol
//! directly so that the measured thing is the cluster and not a client library.
//!
//! A cycle is an acquire and then, as soon as it is granted, its release; each of the two is an
//! operation. Keys are never contended. In the open loop every acquire has a time at which it is
//! due, and its latency counts from then even if it could not be sent in time, so that a stall of
//! the cluster is not hidden by the generator waiting with it. In the closed loop a fixed number
//! of cycles is always under way.

mod connection;
mod session;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::Timespec;
use serde::Serialize;

use crate::clock::now_ns;
use crate::stats::{Errors, Latencies, Summary};

use connection::Connection;

/// Longest sleep of the loop; renewals and time-outs are looked at that often.
const TURN_NS_MAX: u64 = 20_000_000;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// This many operations are due each second, evenly spaced, whatever becomes of them.
    Open {
        /// Operations per second; half of them are acquires.
        ops_per_s: f64,
    },
    /// This many cycles are under way on each connection.
    Closed {
        /// Cycles per connection.
        in_flight: usize,
    },
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// How load is made.
    pub mode: Mode,
    /// Number of connections, each with a session of its own.
    pub connections: usize,
    /// Different keys of each connection: more than can be under way on it, or it meets itself.
    pub keys: usize,
    /// TTL of the sessions, in milliseconds. Each is renewed four times as often; a renewal that is
    /// not acknowledged ends the run with an error.
    pub ttl_ms: u32,
    /// Length of each hold's value, in bytes.
    pub value_len: usize,
    /// Load before anything is recorded, in milliseconds.
    pub warm_up_ms: u64,
    /// The recorded part, in milliseconds.
    pub run_ms: u64,
}

/// What a run measured.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The plan.
    pub plan: Plan,
    /// Operations that succeeded within the recorded part.
    pub operations: u64,
    /// Those per second.
    pub ops_per_s: f64,
    /// Acquires: from the time they were due (open loop) or sent (closed loop) to the grant.
    pub acquire: Summary,
    /// Releases: from their send.
    pub release: Summary,
    /// Refused or failed operations, by the error's name.
    pub errors: Errors,
    /// Acquires that were due in the recorded part and had no grant at its end.
    pub unfinished: u64,
    /// Processor time that the generator itself used, as a share of one core.
    pub generator_cpu: f64,
}

/// The record of a run in progress, shared by its connections.
#[derive(Debug, Default)]
struct Record {
    /// Only what is due, or sent, from here on counts.
    from_ns: u64,
    acquire: Latencies,
    release: Latencies,
    errors: Errors,
}

/// Runs a plan against one node, which should lead the shard.
pub fn run(addr: SocketAddr, plan: Plan) -> io::Result<Outcome> {
    assert!(plan.connections > 0, "a run has connections");
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut connections = Vec::with_capacity(plan.connections);
    let keys: Vec<_> = (0..plan.connections).map(|index| connection::keys(index, plan)).collect();
    for (index, keys) in keys.into_iter().enumerate() {
        let connection = Connection::open(addr, index, plan, keys)?;
        let data = epoll::EventData::new_u64(index as u64);
        let interest = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&epoll, connection.as_fd(), data, interest)?;
        connections.push(connection);
    }
    let start_ns = now_ns();
    let mut record =
        Record { from_ns: start_ns + plan.warm_up_ms * 1_000_000, ..Record::default() };
    let end_ns = record.from_ns + plan.run_ms * 1_000_000;
    let mut cpu_from = None;
    for connection in &mut connections {
        connection.begin(start_ns);
    }
    let mut events =
        vec![
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
            plan.connections
        ];
    let mut now = start_ns;
    while now < end_ns {
        let mut due_ns = end_ns.min(now + TURN_NS_MAX);
        for connection in &mut connections {
            connection.turn(now, &mut record)?;
            due_ns = due_ns.min(connection.next_due_ns());
        }
        if cpu_from.is_none() && now >= record.from_ns {
            cpu_from = Some(cpu_ns());
        }
        let sleep = Duration::from_nanos(due_ns.saturating_sub(now_ns()));
        let timeout = Timespec::try_from(sleep).map_err(io::Error::other)?;
        let count = match epoll::wait(&epoll, &mut events[..], Some(&timeout)) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        now = now_ns();
        for event in &events[..count] {
            connections[event.data.u64() as usize].readable(now, &mut record)?;
        }
    }
    let cpu = cpu_ns() - cpu_from.unwrap_or_else(cpu_ns);
    let outcome = outcome(plan, &connections, record, cpu);
    let patience = Duration::from_millis(10 * plan.run_ms);
    connections.into_iter().try_for_each(|connection| connection.close(patience))?;
    Ok(outcome)
}

fn outcome(plan: Plan, connections: &[Connection], record: Record, cpu_ns: u64) -> Outcome {
    let operations = record.acquire.len() + record.release.len();
    let seconds = plan.run_ms as f64 / 1e3;
    let unfinished = connections.iter().map(|c| c.unfinished(record.from_ns)).sum();
    Outcome {
        plan,
        operations,
        ops_per_s: operations as f64 / seconds,
        acquire: record.acquire.summary(),
        release: record.release.summary(),
        errors: record.errors,
        unfinished,
        generator_cpu: cpu_ns as f64 / 1e9 / seconds,
    }
}

/// Processor time of this process.
fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
