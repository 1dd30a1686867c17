//! `make demo`: a lock, a worker that dies with it, and a leader that dies, on a real cluster.
//!
//! Prints a timeline for people who never saw the project. Every line that states something was
//! verified just before; the first step that does not come true ends the demo with exit code 1.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use leasehold_bench::clock::{Deadline, now_ns};
use leasehold_bench::cluster::{Cluster, Spec};
use leasehold_bench::history::Recorder;
use leasehold_bench::process::POLL;
use leasehold_bench::store::{Answer, SlowRoad, Store};
use leasehold_bench::wire::Wire;
use leasehold_bench::worker::{self, Event, Order, Settings, Worker};
use leasehold_protocol::error::ErrorClass;
use leasehold_protocol::ids::LeaseId;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{Freshness, GetRequest, Request};

/// The lock's key.
const KEY: &str = "reports/nightly";
/// The workers' TTL: short, so that the demo is.
const TTL_MS: u64 = 3_000;
/// Within this time every single step comes true.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Parser)]
#[command(about = "Shows what Leasehold does, on a real three-node cluster")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// One of the demo's workers (the demo starts them itself).
    #[command(hide = true)]
    Worker(Settings),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Some(Command::Worker(settings)) => worker::run(&settings),
        None => demo(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints lines with the time since the start.
struct Timeline {
    start_ns: u64,
}

impl Timeline {
    fn say(&self, text: &str) {
        let seconds = (now_ns() - self.start_ns) as f64 / 1e9;
        println!("[{seconds:5.1} s]  {text}");
    }
}

/// The demo's stage: all of it is torn down when this is dropped.
struct Stage {
    time: Timeline,
    cluster: Cluster,
    store: Store,
    road: SlowRoad,
}

fn demo() -> io::Result<()> {
    println!("Leasehold demo: two workers, one lock, three servers.");
    println!("Only one worker at a time may write the nightly report.\n");
    let time = Timeline { start_ns: now_ns() };
    let cluster = Cluster::start(Spec::with_default_timings())?;
    let leader = cluster.wait_leader(0, LIMIT)?;
    time.say(&format!("Three servers run, each with its own disk. Server {leader} leads."));
    let store = Store::start(Recorder::new())?;
    let mut stage = Stage { time, cluster, store, road: SlowRoad::open()? };

    let (mut anna, first) = first_worker(&stage)?;
    let mut ben = second_worker(&stage)?;
    let second = holder_dies(&stage, &mut anna, first, &mut ben)?;
    late_write(&stage, first, second)?;
    leader_dies(&mut stage, &mut ben, second)?;
    end(stage, ben)
}

fn ensure(holds: bool, what: &str) -> io::Result<()> {
    if holds { Ok(()) } else { Err(io::Error::other(format!("this did not come true: {what}"))) }
}

fn start_worker(stage: &Stage, name: &str) -> io::Result<Worker> {
    let settings = Settings {
        name: name.to_owned(),
        endpoints: stage.cluster.endpoint_list(),
        key: KEY.to_owned(),
        ttl_ms: TTL_MS,
        store: stage.store.addr(),
        slow_road: stage.road.addr()?,
    };
    let worker = Worker::start(&program()?, &settings)?;
    ensure(worker.event(LIMIT)? == Event::Asked, "the worker connects")?;
    Ok(worker)
}

fn program() -> io::Result<PathBuf> {
    std::env::current_exe()
}

fn granted(worker: &Worker) -> io::Result<u64> {
    match worker.event(LIMIT)? {
        Event::Granted { token } => Ok(token),
        other => Err(io::Error::other(format!("no grant, but {other:?}"))),
    }
}

fn write(worker: &mut Worker, text: &str) -> io::Result<()> {
    let taken = worker.ask(&Order::Write(text.to_owned()), LIMIT, |event| match event {
        Event::Wrote { taken, .. } => Some(*taken),
        _ => None,
    })?;
    ensure(taken, "the store takes the holder's write")
}

fn first_worker(stage: &Stage) -> io::Result<(Worker, u64)> {
    let mut anna = start_worker(stage, "Anna")?;
    let token = granted(&anna)?;
    stage.time.say(&format!("Anna asks for the lock and gets it, with token {token}."));
    write(&mut anna, "page 1, by Anna")?;
    stage.time.say("Anna writes page 1. The store notes the token that came with it.");
    Ok((anna, token))
}

fn second_worker(stage: &Stage) -> io::Result<Worker> {
    let ben = start_worker(stage, "Ben")?;
    let deadline = Deadline::after(LIMIT);
    while holder_and_queue(stage, 0)?.1 == 0 {
        ensure(!deadline.passed(), "Ben is in the queue")?;
        std::thread::sleep(POLL);
    }
    ensure(ben.try_event().is_none(), "Ben is not granted while Anna holds")?;
    stage.time.say("Ben asks for the same lock. Anna has it, so Ben waits in the queue.");
    Ok(ben)
}

/// Returns Ben's token.
fn holder_dies(stage: &Stage, anna: &mut Worker, first: u64, ben: &mut Worker) -> io::Result<u64> {
    anna.ask(&Order::Post("page 2, by Anna".into()), LIMIT, |event| match event {
        Event::Posted { token } => Some(*token),
        _ => None,
    })?;
    stage.time.say("Anna sends page 2, but the network holds it up on its way to the store.");
    ensure(ben.try_event().is_none(), "Ben is not granted while Anna holds")?;
    anna.kill()?;
    let killed_ns = now_ns();
    stage.time.say(&format!(
        "Anna is killed (kill -9). She cannot give the lock back; her lease of {} s runs out.",
        TTL_MS / 1_000
    ));
    let token = granted(ben)?;
    let waited_ms = (now_ns() - killed_ns) / 1_000_000;
    ensure(token > first, "the next token is higher")?;
    stage.time.say(&format!(
        "Ben has the lock, {:.1} s later, with the higher token {token}.",
        waited_ms as f64 / 1e3
    ));
    write(ben, "page 2, by Ben")?;
    stage.time.say("Ben writes page 2. The store takes it and notes the new token.");
    Ok(token)
}

fn late_write(stage: &Stage, first: u64, second: u64) -> io::Result<()> {
    let late = stage.road.take()?;
    ensure(late.token == first, "the late write carries Anna's token")?;
    let answer = late.deliver(stage.store.addr())?;
    ensure(answer == Answer::Refused { highest: second }, "the store refuses the late write")?;
    let newest = stage.store.newest(KEY);
    ensure(newest.is_some_and(|taken| taken.text == "page 2, by Ben"), "Ben's page is unharmed")?;
    stage.time.say(&format!(
        "Now Anna's page 2 arrives, with token {first}. The store has seen {second} and refuses it:"
    ));
    stage.time.say("    Ben's page is safe, though Anna's message came from before her death.");
    Ok(())
}

fn leader_dies(stage: &mut Stage, ben: &mut Worker, token: u64) -> io::Result<()> {
    let leader = stage.cluster.wait_leader(0, LIMIT)?;
    let killed_ns = now_ns();
    stage.cluster.kill(leader)?;
    stage.time.say(&format!("Server {leader}, the leader, is killed (kill -9)."));
    let next = stage.cluster.wait_leader(0, LIMIT)?;
    let took_ms = (now_ns() - killed_ns) / 1_000_000;
    ensure(next != leader, "another server leads")?;
    let (holder, _) = holder_and_queue(stage, next)?;
    ensure(holder == Some(token), "the lock is as it was")?;
    stage.time.say(&format!(
        "Server {next} leads after {took_ms} ms. It says: the lock is Ben's, token {token}."
    ));
    // Past the TTL, so that only renewals by the new leader can have kept it.
    let until_ns = killed_ns + TTL_MS * 1_000_000 + 500_000_000;
    std::thread::sleep(Duration::from_nanos(until_ns.saturating_sub(now_ns())));
    let (held, same) = ben.ask(&Order::Check, LIMIT, |event| match event {
        Event::State { held, token, .. } => Some((*held, *token)),
        _ => None,
    })?;
    ensure(held && same == token, "Ben still holds, with the same token")?;
    write(ben, "page 3, by Ben")?;
    stage.time.say("Ben noticed nothing: his lease was renewed all along, and he writes page 3.");
    Ok(())
}

/// The holder's token and the length of the queue, as a node says; node 0 is the leader. Asked
/// again while the cluster cannot answer, as every client does.
fn holder_and_queue(stage: &Stage, node: u64) -> io::Result<(Option<u64>, u32)> {
    let node = if node == 0 { stage.cluster.wait_leader(0, LIMIT)? } else { node };
    let deadline = Deadline::after(LIMIT);
    let get = Request::Get(GetRequest {
        key: KEY.as_bytes().to_vec(),
        holders_after: LeaseId(0),
        freshness: Freshness::Linearizable,
        timeout_ms: 5_000,
    });
    loop {
        let mut wire = Wire::connect(stage.cluster.addresses(node).client, LIMIT)?;
        match wire.call(&get, LIMIT)? {
            Reply::Keys(reply) => {
                let info = reply.keys.first();
                let holder = info.and_then(|info| info.holders.first());
                let waiters = info.map_or(0, |info| info.waiters_total);
                return Ok((holder.map(|holder| holder.token.0), waiters));
            }
            Reply::Error(error) if error.code.class() == ErrorClass::Retryable => {
                ensure(!deadline.passed(), &format!("the lock can be read ({})", error.code))?;
                std::thread::sleep(POLL);
            }
            other => {
                let text = format!("the lock could not be read: {other:?}");
                return Err(io::Error::other(text));
            }
        }
    }
}

fn end(mut stage: Stage, mut ben: Worker) -> io::Result<()> {
    ben.ask(&Order::Release, LIMIT, |event| (*event == Event::Released).then_some(()))?;
    ben.finish(LIMIT)?;
    ensure(holder_and_queue(&stage, 0)?.0.is_none(), "the lock is free")?;
    stage.time.say("Ben gives the lock back. It is free.");
    for id in stage.cluster.ids() {
        if stage.cluster.pid(id).is_some() {
            let status = stage.cluster.terminate(id, LIMIT)?;
            ensure(status.success(), &format!("server {id} stops in order ({status})"))?;
        }
    }
    let path = stage.cluster.path().to_owned();
    let Stage { time, cluster, store, road } = stage;
    drop((cluster, store, road));
    ensure(!path.exists(), "the demo's files are gone")?;
    time.say("All servers are stopped and everything is cleaned up.");
    println!("\nEvery line above was checked against the running servers as it was printed.");
    Ok(())
}
