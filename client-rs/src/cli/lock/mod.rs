//! `lock KEY -- CMD ARGS…`: runs a command under a lock, and sees to it that the command is gone
//! before the lock's validity is.
//!
//! Three processes, so that none of them can hold the command up alone:
//!
//! - the **supervisor** (this process): starts the command in a process group of its own, forwards
//!   signals, and ends the group in time. It knows until when the lock is valid and needs nobody
//!   to tell it that time has passed.
//! - the **keeper**: a child with the client in it. It acquires, renews, and tells the supervisor
//!   each new end of validity over a pipe. When the lock is lost it kills the command's group as
//!   well, in case the supervisor does not run. If the supervisor is gone (its end of the pipe
//!   closes) it kills the group, waits until it is gone, and gives the lock back.
//! - the **command**. Its first moments are this program again (`exec`), which asks the kernel to
//!   be killed when the supervisor dies, and then becomes the command.
//!
//! The group gets TERM `--grace` before the validity ends, and KILL at its end. When the command
//! has ended, what is left of its group is ended too, before the lock is given back.
//!
//! What cannot be caught: a process that the command moved to a session or group of its own, a
//! command that changes its credentials (the kernel then forgets the death signal), and processes
//! that do not run at all because the whole machine stands still.

mod exec;
mod hold;
mod keeper;
mod report;
mod supervisor;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(super) use self::exec::{ExecArgs, exec};
pub(super) use self::keeper::{keep, next_yield};
use super::exit::CliError;
use super::options::{Options, label, time, ttl};

/// The keeper's verb.
pub(super) const KEEPER: &str = "__keeper";
/// The verb that becomes the command.
pub(super) const EXEC: &str = "__exec";

/// The shortest grace that is useful.
const GRACE_MIN: Duration = Duration::from_millis(50);

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key
    key: String,
    #[command(flatten)]
    term: Term,
    /// Attached to the hold; whoever reads the key sees it
    #[arg(long)]
    value: Option<String>,
    /// And this key of the same shard, in the same step or not at all; may be given several times.
    /// `LEASEHOLD_TOKENS` has all tokens in the order of the keys
    #[arg(long, value_name = "KEY", conflicts_with = "permits")]
    also: Vec<String>,
    /// Takes the keys one after the other, of any shards: while it waits for one it holds those
    /// before it
    #[arg(long, requires = "also", conflicts_with_all = ["shared", "show_place"])]
    each: bool,
    /// Shares the lock, or all of several, with others who do the same; nobody holds it exclusively
    /// meanwhile
    #[arg(long, conflicts_with = "permits")]
    shared: bool,
    /// Takes so many permits of a semaphore; needs --of
    #[arg(long, value_name = "N", requires = "of")]
    permits: Option<u32>,
    /// How many permits the semaphore has, 1 to 1024; all who use it must say the same
    #[arg(long, value_name = "M", requires = "permits")]
    of: Option<u32>,
    /// While it waits, says on standard error how many wait before it, and who holds
    #[arg(long)]
    show_place: bool,
    /// The command and its arguments, passed on as they are
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// How long a hold is waited for, how long it lasts, how it ends.
#[derive(clap::Args, Debug)]
pub(super) struct Term {
    /// Time to live without a renewal, 1s to 10m
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = ttl)]
    ttl: Duration,
    /// Waits at most this long; without it, waits until it is free
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "try_once")]
    wait: Option<Duration>,
    /// Does not wait
    #[arg(long = "try")]
    try_once: bool,
    /// If it is lost, nobody else gets it for this long, at most 60s
    #[arg(long, value_name = "TIME", value_parser = time)]
    lock_delay: Option<Duration>,
    /// When somebody asks to yield (`leasehold yield`), sends the command TERM; without a command,
    /// gives up
    #[arg(long)]
    yields: bool,
    /// How long before the end of validity the command gets TERM; by default a fifth of the TTL
    #[arg(long, value_name = "TIME", value_parser = time)]
    grace: Option<Duration>,
}

impl Term {
    pub(super) const fn ttl(&self) -> Duration {
        self.ttl
    }

    pub(super) fn wait(&self) -> Option<Duration> {
        if self.try_once { Some(Duration::ZERO) } else { self.wait }
    }

    pub(super) const fn yields(&self) -> bool {
        self.yields
    }

    pub(super) fn lock_delay(&self) -> Duration {
        self.lock_delay.unwrap_or_default()
    }
}

/// A command that is to run under a hold.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) key: String,
    /// Further keys...
    pub(super) also: Vec<String>,
    /// ...one after the other, instead of all in one step.
    pub(super) each: bool,
    pub(super) value: Option<String>,
    pub(super) shared: bool,
    /// Permits and the semaphore's limit.
    pub(super) permits: Option<(u32, u32)>,
    /// Its place in the queue is told.
    pub(super) show_place: bool,
    pub(super) term: Term,
    pub(super) command: Vec<OsString>,
}

/// What the keeper must do, its first line of input.
#[derive(Serialize, Deserialize, Debug)]
struct Order {
    endpoints: String,
    timeout_ms: u64,
    label: String,
    key: String,
    also: Vec<String>,
    each: bool,
    value: Option<String>,
    ttl_ms: u64,
    /// `None` has no limit, 0 does not wait.
    wait_ms: Option<u64>,
    mode: OrderMode,
    lock_delay_ms: u64,
    yields: bool,
    show_place: bool,
}

/// How the keys are held.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
enum OrderMode {
    Exclusive,
    Shared,
    Permits { permits: u32, limit: u32 },
}

impl Order {
    /// All keys, as they were given.
    fn keys(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.key).chain(&self.also)
    }

    const fn takes_permits(&self) -> bool {
        matches!(self.mode, OrderMode::Permits { .. })
    }

    fn wait(&self) -> Option<Duration> {
        self.wait_ms.map(Duration::from_millis)
    }

    const fn lock_delay(&self) -> Duration {
        Duration::from_millis(self.lock_delay_ms)
    }
}

/// What the keeper says, a line each.
#[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Word {
    /// It waits there, for the hold with this label and token, if there is one.
    Place { position: u32, waiters_total: u32, held_by: Option<(String, u64)> },
    /// Granted, with the keys' tokens and the slots of a semaphore's permits.
    Held { tokens: Vec<u64>, until_ns: u64, slots: Vec<u32> },
    /// Valid until this point of the system's clock.
    Until { until_ns: u64 },
    /// Renewals are overdue, or the end is decided.
    AtRisk { cause: String, remaining_ms: u64 },
    /// Lost.
    Lost { cause: String },
    /// Not acquired.
    Failed { error: String, class: String, message: String, exit: u8 },
    /// Somebody asks the holder to give up.
    Yield { who: String, why: String, within_ms: u64 },
    /// Given back.
    Released,
}

/// What the supervisor says after the order.
#[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
#[serde(tag = "say", rename_all = "snake_case")]
enum Reply {
    /// The command's process group.
    Group { group: i32 },
    /// The group is gone: give the lock back.
    Release,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let Args { key, also, each, term, value, shared, permits, of, show_place, command } = args;
    let permits = permits.zip(of);
    let job = Job { key, also, each, value, shared, permits, show_place, term, command };
    run_job(options, job).await
}

/// Runs a command under a hold.
pub(super) async fn run_job(options: &Options, job: Job) -> Result<ExitCode, CliError> {
    let (ttl, wait) = (job.term.ttl, job.term.wait());
    let grace = job.term.grace.unwrap_or(ttl / 5);
    if grace < GRACE_MIN || grace > ttl / 2 {
        return Err(CliError::Usage(format!(
            "--grace is {} ms: it must be at least {} ms and at most half of the TTL, {} ms",
            grace.as_millis(),
            GRACE_MIN.as_millis(),
            (ttl / 2).as_millis()
        )));
    }
    // Refused here, where the message reaches the caller before anything is started.
    options.config()?;
    let order = Order {
        endpoints: options.endpoints.clone(),
        timeout_ms: options.timeout.as_millis() as u64,
        label: label(),
        key: job.key,
        also: job.also,
        each: job.each,
        value: job.value,
        ttl_ms: ttl.as_millis() as u64,
        wait_ms: wait.map(|wait| wait.as_millis() as u64),
        mode: match job.permits {
            Some((permits, limit)) => OrderMode::Permits { permits, limit },
            None if job.shared => OrderMode::Shared,
            None => OrderMode::Exclusive,
        },
        lock_delay_ms: job.term.lock_delay().as_millis() as u64,
        yields: job.term.yields,
        show_place: job.show_place,
    };
    supervisor::run(&order, &job.command, grace, options.json).await
}
