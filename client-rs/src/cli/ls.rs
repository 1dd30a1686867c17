//! `ls [PREFIX]`.

use std::process::ExitCode;

use leasehold::Freshness;

use super::exit::CliError;
use super::get::show;
use super::options::Options;
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// Only keys that start with this
    #[arg(default_value = "")]
    prefix: String,
    /// Only keys above this one: where a former listing ended
    #[arg(long, value_name = "KEY", default_value = "")]
    after: String,
    /// At most this many keys
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Takes what the asked node knows, even if it lags, and says how old that is at most
    #[arg(long)]
    stale: bool,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let freshness = if args.stale { Freshness::Stale } else { Freshness::Linearizable };
    let (prefix, after) = (args.prefix.as_bytes(), args.after.as_bytes());
    let listing = client.list_after(prefix, after, args.limit as usize, freshness).await?;
    let keys = listing.keys;
    if options.json {
        say(&keys.iter().map(json::key).collect::<serde_json::Value>().to_string())?;
    } else {
        keys.iter().try_for_each(show)?;
    }
    if let (true, Some(last)) = (listing.more, keys.last()) {
        eprintln!("more keys follow: --after {}", last.info.key);
    }
    Ok(ExitCode::SUCCESS)
}
