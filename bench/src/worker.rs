//! A worker: a process of its own that wants one lock and writes to a store under its token. The
//! demo and the tests start it, talk to it in lines, and kill or stop it.
//!
//! On its standard input it takes one order a line; on its standard output it tells in JSON what
//! happened, one event a line. The end of its input ends it, with its lock given back.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use leasehold::{Client, Config, Guard, HoldState};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::clock::{Deadline, now_ns};
use crate::process::Process;
use crate::store::{self, Answer};

/// What a worker needs to know.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Its name.
    #[arg(long)]
    pub name: String,
    /// The cluster.
    #[arg(long)]
    pub endpoints: String,
    /// The lock's key.
    #[arg(long)]
    pub key: String,
    /// The session's TTL, in milliseconds.
    #[arg(long)]
    pub ttl_ms: u64,
    /// Where the store listens.
    #[arg(long)]
    pub store: SocketAddr,
    /// A slow road to the store.
    #[arg(long)]
    pub slow_road: SocketAddr,
}

/// An order, a line each: `write TEXT`, `post TEXT` (by the slow road), `check`, `release`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Writes to the store under the token and reports the answer.
    Write(String),
    /// Hands a write to the slow road.
    Post(String),
    /// Says whether the lock is held.
    Check,
    /// Gives the lock back.
    Release,
}

impl Order {
    fn line(&self) -> String {
        match self {
            Self::Write(text) => format!("write {text}\n"),
            Self::Post(text) => format!("post {text}\n"),
            Self::Check => "check\n".to_owned(),
            Self::Release => "release\n".to_owned(),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let (verb, text) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "write" => Some(Self::Write(text.to_owned())),
            "post" => Some(Self::Post(text.to_owned())),
            "check" => Some(Self::Check),
            "release" => Some(Self::Release),
            _ => None,
        }
    }
}

/// What a worker tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// It is connected and has asked for the lock.
    Asked,
    /// It holds the lock.
    Granted {
        /// Under this token.
        token: u64,
    },
    /// The store answered a write.
    Wrote {
        /// It took it.
        taken: bool,
        /// The token that was sent.
        token: u64,
        /// The highest token that the store has seen, if it refused.
        highest: Option<u64>,
    },
    /// A write is on the slow road.
    Posted {
        /// The token that it carries.
        token: u64,
    },
    /// The answer to `check`.
    State {
        /// When the library was asked.
        at_ns: u64,
        /// The library says that the lock is held, at risk or not.
        held: bool,
        /// For how much longer, in milliseconds.
        remaining_ms: u64,
        /// The token.
        token: u64,
    },
    /// The lock was lost.
    Lost {
        /// Why.
        cause: String,
    },
    /// The lock was given back.
    Released,
    /// Something failed.
    Failed {
        /// What.
        message: String,
    },
}

/// Runs a worker until its input ends.
pub fn run(settings: &Settings) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(work(settings));
    if let Err(error) = &result {
        tell(&Event::Failed { message: error.to_string() });
    }
    result
}

async fn work(settings: &Settings) -> io::Result<()> {
    let config = Config::new(&settings.endpoints).map_err(io::Error::other)?;
    let config = config.label(settings.name.clone());
    let client = Client::with_config(config).await.map_err(io::Error::other)?;
    let ttl = Duration::from_millis(settings.ttl_ms);
    let session = client.session(ttl).map_err(io::Error::other)?;
    let mut orders = orders();
    tell(&Event::Asked);
    let acquired = session.lock(settings.key.as_str()).value(settings.name.as_str()).acquire();
    let guard = tokio::select! {
        guard = acquired => guard.map_err(io::Error::other)?,
        // The input ended, or somebody gave an order too early.
        _ = orders.recv() => return Ok(()),
    };
    tell(&Event::Granted { token: guard.token().0 });
    serve(settings, guard, &mut orders).await?;
    session.close().await.map_err(io::Error::other)
}

async fn serve(
    settings: &Settings,
    guard: Guard,
    orders: &mut tokio::sync::mpsc::Receiver<Order>,
) -> io::Result<()> {
    let token = guard.token().0;
    let lost = guard.lost();
    tokio::pin!(lost);
    let mut told = false;
    loop {
        let order = tokio::select! {
            biased;
            // Orders first: a worker that was stopped and woken must answer a check by itself,
            // not by having heard of its loss before.
            order = orders.recv() => order,
            cause = &mut lost, if !told => {
                told = true;
                tell(&Event::Lost { cause: cause.name().to_owned() });
                continue;
            }
        };
        match order {
            None => return Ok(()),
            Some(Order::Write(text)) => {
                let answer = store::put(settings.store, &settings.key, token, &text)?;
                let highest = match answer {
                    Answer::Taken => None,
                    Answer::Refused { highest } => Some(highest),
                };
                tell(&Event::Wrote { taken: highest.is_none(), token, highest });
            }
            Some(Order::Post(text)) => {
                store::post(settings.slow_road, &settings.key, token, &text)?;
                tell(&Event::Posted { token });
            }
            Some(Order::Check) => {
                let at_ns = now_ns();
                let held = !matches!(guard.state(), HoldState::Lost(_));
                let remaining_ms = guard.remaining().as_millis() as u64;
                tell(&Event::State { at_ns, held, remaining_ms, token });
            }
            Some(Order::Release) => {
                guard.release().await.map_err(io::Error::other)?;
                tell(&Event::Released);
                return Ok(());
            }
        }
    }
}

/// Reads orders on a thread of its own.
fn orders() -> tokio::sync::mpsc::Receiver<Order> {
    let (sender, receiver) = tokio::sync::mpsc::channel(16);
    std::thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            let Some(order) = Order::parse(&line) else { continue };
            if sender.blocking_send(order).is_err() {
                return;
            }
        }
    });
    receiver
}

fn tell(event: &Event) {
    let line = serde_json::to_string(event).expect("an event has a JSON form");
    let mut out = io::stdout().lock();
    // Whoever started this worker may be gone; then nobody is left to tell.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// A worker's process, seen by whoever started it.
#[derive(Debug)]
pub struct Worker {
    process: Process,
    input: Option<ChildStdin>,
    events: mpsc::Receiver<Event>,
}

impl Worker {
    /// Starts the worker of a program that has the subcommand `worker`.
    pub fn start(program: &std::path::Path, settings: &Settings) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg("worker");
        command.arg(format!("--name={}", settings.name));
        command.arg(format!("--endpoints={}", settings.endpoints));
        command.arg(format!("--key={}", settings.key));
        command.arg(format!("--ttl-ms={}", settings.ttl_ms));
        command.arg(format!("--store={}", settings.store));
        command.arg(format!("--slow-road={}", settings.slow_road));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::spawn(command)?;
        let input = process.child().stdin.take();
        let output = process.child().stdout.take().expect("the output is a pipe");
        let (sender, events) = mpsc::channel();
        // Ends with the pipe, at the latest when the process is killed.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let message = format!("not an event: {line}");
                let event = serde_json::from_str(&line).unwrap_or(Event::Failed { message });
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        Ok(Self { process, input, events })
    }

    /// Gives an order.
    pub fn order(&mut self, order: &Order) -> io::Result<()> {
        let input = self.input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        input.write_all(order.line().as_bytes())
    }

    /// The next event.
    pub fn event(&self, limit: Duration) -> io::Result<Event> {
        self.events.recv_timeout(limit).map_err(|error| {
            let text = format!("a worker said nothing within {limit:?}: {error}");
            io::Error::new(io::ErrorKind::TimedOut, text)
        })
    }

    /// The next event if there is one already.
    pub fn try_event(&self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// Gives an order and returns the first event that `fits`, dropping others.
    pub fn ask<T>(
        &mut self,
        order: &Order,
        limit: Duration,
        fits: impl Fn(&Event) -> Option<T>,
    ) -> io::Result<T> {
        self.order(order)?;
        let deadline = Deadline::after(limit);
        loop {
            let event = self.event(deadline.left())?;
            if let Some(found) = fits(&event) {
                return Ok(found);
            }
            if let Event::Failed { message } = event {
                return Err(io::Error::other(message));
            }
        }
    }

    /// kill -9.
    pub fn kill(&mut self) -> io::Result<()> {
        self.process.kill().map(|_| ())
    }

    /// Sends a signal.
    pub fn signal(&mut self, signal: Signal) -> io::Result<()> {
        self.process.signal(signal)
    }

    /// Ends its input and waits for its end.
    pub fn finish(mut self, limit: Duration) -> io::Result<()> {
        self.input = None;
        let status = self.process.wait(limit)?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("ended with {status}")))
        }
    }
}
