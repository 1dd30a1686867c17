//! `pipe`: one session over standard input and output, for scripts and for languages without a
//! binding. A JSON object a line in each direction.
//!
//! Requests and replies, news, limits: `docs/PIPE.md`. Each request has an `id` and gets one reply
//! with it, as soon as it is decided: a waiting acquire holds nothing up. A line without an `id` is
//! news. At the end of input everything is given back, the session is closed, and the exit code
//! is 0.
//!
//! Invariants: an operation's fields are read strictly; a hold's loss is told once; what is open or
//! kept is bounded, and what goes beyond is answered and changes nothing.

mod ask;
mod lines;
mod members;
mod news;
mod request;
mod serve;

use std::process::ExitCode;
use std::time::Duration;

use super::exit::CliError;
use super::options::{Options, ttl};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// Time to live of the session, 1s to 10m
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = ttl)]
    ttl: Duration,
    /// Shown in listings
    #[arg(long)]
    label: Option<String>,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let session = match args.label {
        Some(label) => client.labelled_session(args.ttl, label)?,
        None => client.session(args.ttl)?,
    };
    serve::run(client, session, args.ttl).await?;
    Ok(ExitCode::SUCCESS)
}
