//! `sessions`.

use std::process::ExitCode;

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// At most this many leases
    #[arg(long, default_value_t = 1000)]
    limit: usize,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let found = client.sessions(args.limit).await?;
    if options.json {
        let list = found.iter().map(|(shard, session)| json::session(*shard, session));
        say(&list.collect::<serde_json::Value>().to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    for (shard, session) in &found {
        let left = session.remaining_ms.map_or_else(|| "?".to_owned(), |ms| ms.to_string());
        say(&format!(
            "shard {shard} lease {} ({}): ttl {} ms, {left} ms left, {} held, {} waited for{}",
            session.lease,
            session.label,
            session.ttl_ms,
            session.holds,
            session.waits,
            if session.own_lease { ", a hold's own" } else { "" },
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
