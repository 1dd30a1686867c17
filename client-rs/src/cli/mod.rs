//! The command line of Leasehold: one verb a file, all of them over the library's public API.

mod ask_yield;
mod backup;
mod elect;
mod exit;
mod force_release;
mod get;
mod json;
mod lock;
mod ls;
mod member;
mod observe;
mod options;
mod ping;
mod pipe;
mod sessions;
mod set_limit;
mod status;
mod transfer_leader;
#[allow(unsafe_code, reason = "one call of the C library that has no safe form")]
mod tty;
mod watch;
mod why;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::exit::{CliError, HELP};
use self::options::Options;

/// Locks, and what is known about them, from the command line.
#[derive(Parser, Debug)]
#[command(name = "leasehold", version, about, after_help = HELP, arg_required_else_help = true)]
struct Args {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Runs a command under a lock
    Lock(lock::Args),
    /// Leads an election, while a command runs or until a signal
    Elect(elect::Args),
    /// Shows who leads an election, now and at each change
    Observe(observe::Args),
    /// Shows who holds a key and who waits for it
    Get(get::Args),
    /// Says in plain words who holds a key, until when, and who waits
    Why(why::Args),
    /// Lists keys that are held or waited for
    Ls(ls::Args),
    /// Shows what happens to a key, to keys with a prefix, or to all
    Watch(watch::Args),
    /// Lists live leases
    Sessions(sessions::Args),
    /// Ends somebody's hold
    ForceRelease(force_release::Args),
    /// Asks the holder of a key to give it up
    Yield(ask_yield::Args),
    /// Changes how many permits a semaphore has
    SetLimit(set_limit::Args),
    /// Shows nodes, shards, roles and digests
    Status,
    /// Moves the leadership of a shard
    TransferLeader(transfer_leader::Args),
    /// Shows and changes the cluster's members
    Member(member::Args),
    /// Spreads the leaders of the shards evenly over the nodes
    SpreadLeaders,
    /// Makes and checks backups
    Backup(backup::Args),
    /// Asks for a sign of life
    Ping(ping::Args),
    /// Serves one session over standard input and output, a JSON object a line
    Pipe(pipe::Args),
    #[command(name = lock::KEEPER, hide = true)]
    Keeper,
    #[command(name = lock::EXEC, hide = true)]
    Exec(lock::ExecArgs),
}

/// Parses the arguments, runs the verb, and turns its end into an exit code.
pub(crate) fn main() -> ExitCode {
    let args = Args::parse();
    let json = args.options.json;
    match run(args) {
        Ok(code) => code,
        Err(error) => {
            report(&error, json);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(args: Args) -> Result<ExitCode, CliError> {
    let options = args.options;
    match args.verb {
        // Becomes the command, or says why not.
        Verb::Exec(args) => lock::exec(&args),
        Verb::Lock(args) => single(lock::run(&options, args)),
        Verb::Elect(args) => single(elect::run(&options, args)),
        Verb::Keeper => single(lock::keep()),
        Verb::Get(args) => shared(get::run(&options, args)),
        Verb::Ls(args) => shared(ls::run(&options, args)),
        Verb::Watch(args) => shared(watch::run(&options, args)),
        Verb::Sessions(args) => shared(sessions::run(&options, args)),
        Verb::ForceRelease(args) => shared(force_release::run(&options, args)),
        Verb::Observe(args) => shared(observe::run(&options, args)),
        Verb::Why(args) => shared(why::run(&options, args)),
        Verb::Yield(args) => shared(ask_yield::run(&options, args)),
        Verb::SetLimit(args) => shared(set_limit::run(&options, args)),
        Verb::Status => shared(status::run(&options)),
        Verb::TransferLeader(args) => shared(transfer_leader::run(&options, args)),
        Verb::Member(args) => shared(member::run(&options, args)),
        Verb::SpreadLeaders => shared(member::spread_leaders(&options)),
        Verb::Backup(args) => shared(backup::run(&options, args)),
        Verb::Ping(args) => shared(ping::run(&options, args)),
        Verb::Pipe(args) => shared(pipe::run(&options, args)),
    }
}

/// Runs on this very thread: a supervisor's child dies with the *thread* that started it.
fn single(verb: impl Future<Output = Result<ExitCode, CliError>>) -> Result<ExitCode, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(CliError::Io)?.block_on(verb)
}

/// Runs with a thread for the verb and one for what goes on beside it.
fn shared(verb: impl Future<Output = Result<ExitCode, CliError>>) -> Result<ExitCode, CliError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build();
    runtime.map_err(CliError::Io)?.block_on(verb)
}

/// With `--json` an error is one object on standard output, else a line on standard error.
fn report(error: &CliError, json: bool) {
    if json {
        let _ = say(&error.to_json().to_string());
    } else {
        let _ = writeln!(std::io::stderr(), "leasehold: {error}");
    }
}

/// Writes a line to standard output. A reader that has gone is not an error of ours.
fn say(line: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CliError::Io(error)),
        _ => Ok(()),
    }
}

/// Does some work, and other work beside it as long as that takes.
async fn beside<T>(work: impl Future<Output = T>, other: impl Future<Output = ()>) -> T {
    let (mut work, mut other) = (std::pin::pin!(work), std::pin::pin!(other));
    tokio::select! {
        biased;
        done = &mut work => done,
        () = &mut other => work.await,
    }
}
