//! `bench`: load, latency and failover of a real three-node cluster on this machine.
//!
//! `bench smoke` is the standing measurement; `bench open`, `bench closed` and `bench failover`
//! are its parts with chosen figures. Build with `--release`: the servers are taken from the
//! directory of this executable.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use leasehold_bench::check::{self, Needs, Verdict};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::history::History;
use leasehold_bench::load::{self, Mode, Outcome, Plan};
use leasehold_bench::stats::{Summary, median_index};
use leasehold_bench::{clock, failover, watching};
use serde::Serialize;

/// What a prototype of the same path without checksums, retry memory and state machine reached on
/// a machine of this kind (medians): in flight, operations per second, p50 and p99 in
/// microseconds. It bounds what can be reached.
const PROTOTYPE: [(usize, usize, f64, f64, f64); 3] = [
    (1, 1, 2_560.0, 376.0, 572.0),
    (8, 8, 94_000.0, 661.0, 1_071.0),
    (8, 32, 317_000.0, 785.0, 1_238.0),
];

/// Below a third of the prototype something is wrong with the design.
const FAULT_FACTOR: f64 = 3.0;

#[derive(Parser)]
#[command(about = "Measures a real Leasehold cluster on this machine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct Common {
    /// Writes the figures as JSON to this file.
    #[arg(long, global = true)]
    json: Option<PathBuf>,
    /// Runs of each measurement; the median is reported.
    #[arg(long, global = true, default_value_t = 3)]
    runs: usize,
    /// Client addresses of a running cluster, its shard's leader first, instead of a new one.
    #[arg(long, global = true)]
    target: Option<SocketAddr>,
    /// Further flags of the servers, NAME=VALUE.
    #[arg(long = "server-flag", global = true)]
    server_flags: Vec<String>,
    /// Length of each hold's value, in bytes.
    #[arg(long, global = true, default_value_t = 0)]
    value_len: usize,
    /// Seconds of load before anything is recorded.
    #[arg(long, global = true, default_value_t = 2)]
    warm_up_s: u64,
}

#[derive(Subcommand)]
enum Command {
    /// The standing measurement: open loop at 10,000 operations per second, closed loop, failover.
    Smoke {
        /// Seconds of each open-loop run.
        #[arg(long, default_value_t = 30)]
        open_s: u64,
        /// Seconds of each closed-loop run.
        #[arg(long, default_value_t = 5)]
        closed_s: u64,
        /// Rounds of failover.
        #[arg(long, default_value_t = 20)]
        rounds: u32,
    },
    /// Operations that are due at a steady rate, whatever becomes of them.
    Open {
        /// Operations per second; an acquire is one, its release another.
        #[arg(long, default_value_t = 10_000.0)]
        rate: f64,
        /// Number of connections.
        #[arg(long, default_value_t = 8)]
        connections: usize,
        /// Seconds of each run.
        #[arg(long, default_value_t = 30)]
        seconds: u64,
    },
    /// A fixed number of cycles always under way.
    Closed {
        /// Number of connections.
        #[arg(long, default_value_t = 8)]
        connections: usize,
        /// Cycles under way on each.
        #[arg(long, default_value_t = 8)]
        in_flight: usize,
        /// Seconds of each run.
        #[arg(long, default_value_t = 5)]
        seconds: u64,
    },
    /// From a change to the programs that watch it.
    Watch {
        /// Changes per second.
        #[arg(long, default_value_t = 2_000.0)]
        rate: f64,
        /// Watchers.
        #[arg(long, default_value_t = 200)]
        watchers: usize,
        /// Watchers that each change concerns.
        #[arg(long, default_value_t = 10)]
        matched: usize,
        /// Seconds of each run.
        #[arg(long, default_value_t = 15)]
        seconds: u64,
    },
    /// Runs the checkers over a kept history. Exits with 1 for a violation.
    Check {
        /// The history, JSON lines.
        file: PathBuf,
    },
    /// From kill -9 of the leader to the next grant.
    Failover {
        /// How often.
        #[arg(long, default_value_t = 20)]
        rounds: u32,
    },
}

/// Everything that was measured.
#[derive(Default, Serialize)]
struct Report {
    loads: Vec<Load>,
    failover: Option<Failover>,
    watch: Vec<watching::Outcome>,
    missed_goals: Vec<String>,
}

#[derive(Serialize)]
struct Load {
    median: Outcome,
    runs: Vec<Outcome>,
}

#[derive(Serialize)]
struct Failover {
    library: Summary,
    bare: Summary,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut report = Report::default();
    let result = measure(&cli, &mut report).and_then(|()| match &cli.common.json {
        Some(path) => std::fs::write(path, serde_json::to_string_pretty(&report)?),
        None => Ok(()),
    });
    if let Err(error) = result {
        eprintln!("bench: {error}");
        return ExitCode::from(2);
    }
    for goal in &report.missed_goals {
        println!("MISSED: {goal}");
    }
    if report.missed_goals.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

fn measure(cli: &Cli, report: &mut Report) -> io::Result<()> {
    if cfg!(debug_assertions) && !matches!(cli.command, Command::Check { .. }) {
        println!("WARNING: this is a debug build; its figures mean nothing");
    }
    match cli.command {
        Command::Smoke { open_s, closed_s, rounds } => {
            smoke(cli, open_s, closed_s, report)?;
            run_failover(cli, rounds, report)
        }
        Command::Open { rate, connections, seconds } => {
            let mode = Mode::Open { ops_per_s: rate };
            with_target(cli, |addr| {
                run_load(cli, addr, plan(cli, mode, connections, seconds), report)
            })
        }
        Command::Closed { connections, in_flight, seconds } => {
            let mode = Mode::Closed { in_flight };
            with_target(cli, |addr| {
                run_load(cli, addr, plan(cli, mode, connections, seconds), report)
            })
        }
        Command::Failover { rounds } => run_failover(cli, rounds, report),
        Command::Watch { rate, watchers, matched, seconds } => {
            let plan = watching::Plan {
                changes_per_s: rate,
                watchers,
                matched,
                per_client: 10,
                run_ms: seconds * 1_000,
                warm_up_ms: cli.common.warm_up_s * 1_000,
            };
            run_watch(cli, plan, report)
        }
        Command::Check { ref file } => check_history(file, report),
    }
}

fn check_history(file: &std::path::Path, report: &mut Report) -> io::Result<()> {
    let reports = check::all(&History::load(file)?, &Needs::default());
    print!("{}", check::text(&reports));
    goal(report, check::worst(&reports) == Verdict::Ok, "no guarantee is violated");
    Ok(())
}

fn smoke(cli: &Cli, open_s: u64, closed_s: u64, report: &mut Report) -> io::Result<()> {
    with_target(cli, |addr| {
        let open = plan(cli, Mode::Open { ops_per_s: 10_000.0 }, 8, open_s);
        run_load(cli, addr, open, report)?;
        let acquire = report.loads.last().expect("one was added").median.acquire;
        goal(
            report,
            acquire.p50_us < 5_000.0,
            "acquire p50 < 5 ms at 10,000 operations per second",
        );
        goal(
            report,
            acquire.p99_us < 20_000.0,
            "acquire p99 < 20 ms at 10,000 operations per second",
        );
        for (connections, in_flight, ops_per_s, p50_us, p99_us) in PROTOTYPE {
            let closed = plan(cli, Mode::Closed { in_flight }, connections, closed_s);
            run_load(cli, addr, closed, report)?;
            let reached = report.loads.last().expect("one was added").median.ops_per_s;
            println!(
                "    prototype: {ops_per_s:.0} operations/s, p50 {:.3} ms, p99 {:.3} ms; \
                 reached {:.0} % of it",
                p50_us / 1e3,
                p99_us / 1e3,
                100.0 * reached / ops_per_s
            );
            let text = format!(
                "{} in flight: at least a third of the prototype's {ops_per_s:.0} operations/s",
                connections * in_flight
            );
            goal(report, reached * FAULT_FACTOR >= ops_per_s, &text);
        }
        Ok(())
    })
}

fn goal(report: &mut Report, reached: bool, text: &str) {
    if !reached {
        report.missed_goals.push(text.to_owned());
    }
}

fn spec(cli: &Cli) -> Spec {
    cli.common.server_flags.iter().fold(Spec::with_default_timings(), |spec, flag| {
        let (name, value) = flag.split_once('=').unwrap_or((flag, "true"));
        spec.flag(name, value)
    })
}

/// Calls `work` with the address of the leader of a running cluster.
fn with_target(cli: &Cli, work: impl FnOnce(SocketAddr) -> io::Result<()>) -> io::Result<()> {
    if let Some(addr) = cli.common.target {
        return work(addr);
    }
    let cluster = Cluster::start(spec(cli))?;
    let leader = cluster.wait_leader(0, PATIENCE)?;
    println!("three nodes in {}, node {leader} leads", cluster.path().display());
    work(cluster.addresses(leader).client)
}

fn plan(cli: &Cli, mode: Mode, connections: usize, seconds: u64) -> Plan {
    Plan {
        mode,
        connections,
        keys: 8_192,
        ttl_ms: 60_000,
        value_len: cli.common.value_len,
        warm_up_ms: cli.common.warm_up_s * 1_000,
        run_ms: seconds * 1_000,
    }
}

fn run_load(cli: &Cli, addr: SocketAddr, plan: Plan, report: &mut Report) -> io::Result<()> {
    let what = match plan.mode {
        Mode::Open { ops_per_s } => format!("open loop, {ops_per_s:.0} operations/s"),
        Mode::Closed { in_flight } => {
            format!("closed loop, {} in flight", in_flight * plan.connections)
        }
    };
    println!("{what} on {} connections, {} s a run", plan.connections, plan.run_ms / 1_000);
    let mut runs = Vec::new();
    for _ in 0..cli.common.runs.max(1) {
        let outcome = load::run(addr, plan)?;
        println!("    {}", line(&outcome));
        runs.push(outcome);
    }
    let median = match plan.mode {
        Mode::Open { .. } => median_index(&runs, |run| run.acquire.p99_us),
        Mode::Closed { .. } => median_index(&runs, |run| run.ops_per_s),
    };
    let median = runs[median.expect("there was a run")].clone();
    println!("    median: {}", line(&median));
    let errors: u64 = runs.iter().flat_map(|run| run.errors.values()).sum();
    goal(report, errors == 0, &format!("{what}: no errors (there were {errors})"));
    report.loads.push(Load { median, runs });
    Ok(())
}

fn line(outcome: &Outcome) -> String {
    let mut parts = vec![
        format!("{:.0} operations/s", outcome.ops_per_s),
        format!("acquire {}", outcome.acquire),
        format!("release p99 {:.3} ms", outcome.release.p99_us / 1e3),
        format!("generator {:.0} % of a core", 100.0 * outcome.generator_cpu),
    ];
    // In the closed loop something is always under way.
    if let Mode::Open { .. } = outcome.plan.mode
        && outcome.unfinished > 0
    {
        parts.push(format!("{} unfinished", outcome.unfinished));
    }
    if !outcome.errors.is_empty() {
        parts.push(format!("errors {:?}", outcome.errors));
    }
    parts.join("; ")
}

fn run_failover(cli: &Cli, rounds: u32, report: &mut Report) -> io::Result<()> {
    println!("failover, kill -9 of the leader to the next grant, {rounds} rounds");
    let outcome = failover::run(spec(cli), rounds, |number, library_ns, bare_ns| {
        let (library, bare) = (clock::to_ms(library_ns), clock::to_ms(bare_ns));
        println!("    round {number}: {library:.0} ms by the library, {bare:.0} ms bare");
    })?;
    let (library, bare) = (outcome.library.summary(), outcome.bare.summary());
    println!("    library: {library}");
    println!("    bare:    {bare}");
    goal(report, library.p99_us < 500_000.0, "failover p99 < 500 ms");
    report.failover = Some(Failover { library, bare });
    Ok(())
}

fn run_watch(cli: &Cli, plan: watching::Plan, report: &mut Report) -> io::Result<()> {
    println!(
        "{:.0} changes/s, {} watchers, each change matched by {} of them, {} s a run",
        plan.changes_per_s,
        plan.watchers,
        plan.matched,
        plan.run_ms / 1_000
    );
    let mut work = |endpoints: &str| {
        for _ in 0..cli.common.runs.max(1) {
            let outcome = watching::run(endpoints, plan)?;
            let made = outcome.changes_per_s;
            println!("    {made:.0} changes/s; told {}", outcome.told);
            println!("    made {}", outcome.made);
            let (missing, failed) = (outcome.missing, outcome.failed);
            goal(report, missing == 0, &format!("every change is told ({missing} were not)"));
            goal(report, failed == 0, &format!("no change fails ({failed} did)"));
            report.watch.push(outcome);
        }
        Ok(())
    };
    if let Some(addr) = cli.common.target {
        return work(&addr.to_string());
    }
    let cluster = Cluster::start(spec(cli))?;
    cluster.wait_leader(0, PATIENCE)?;
    println!("three nodes in {}", cluster.path().display());
    work(&cluster.endpoint_list())
}
