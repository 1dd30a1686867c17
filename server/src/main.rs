//! The server's binary: the command line, and how the process ends.

use std::process::ExitCode;

use leasehold_server::admin::Metrics;
use leasehold_server::cli::{self, Action};
use leasehold_server::config::Config;
use leasehold_server::error::{Exit, NodeError};
use leasehold_server::shutdown::Shutdown;
use leasehold_server::{node, restore, trace};

/// Most of what a request allocates is small and freed on the same core within a millisecond.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Before the first thread: threads inherit which signals are blocked.
    let result = match cli::parse(std::env::args_os()) {
        Err(exit) => return exit.into(),
        Ok(Action::CheckConfig(config)) => return check(&config).into(),
        Ok(Action::Restore(request, config)) => restore::run(&request, &config).map(|()| Exit::Ok),
        Ok(Action::Dev(options)) => signals().map(|shutdown| cli::dev::run(&options, &shutdown)),
        Ok(Action::Start(config)) => signals().and_then(|shutdown| start(*config, shutdown)),
    };
    let exit = result.unwrap_or_else(|error| {
        eprintln!("leaseholdd: {error}");
        error.exit()
    });
    exit.into()
}

fn signals() -> Result<Shutdown, NodeError> {
    Shutdown::on_signals().map_err(NodeError::internal)
}

fn check(config: &Config) -> Exit {
    config.warnings().iter().for_each(|warning| eprintln!("warning: {warning}"));
    println!("the configuration is right");
    Exit::Ok
}

fn start(config: Config, shutdown: Shutdown) -> Result<Exit, NodeError> {
    let _log = trace::start(&config.process.log_level, config.process.log_format)
        .map_err(NodeError::internal)?;
    config.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    let metrics = Metrics::new(config.process.cores, config.cluster.shards);
    node::run(config, shutdown, metrics).map(|()| Exit::Ok)
}
