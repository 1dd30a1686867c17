//! `sessions`.

use std::process::ExitCode;

use leasehold::{LeaseId, ShardId};

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// At most this many leases
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Only those after --after in this shard, and of later shards: where a former listing ended
    #[arg(long, value_name = "N", default_value_t = 0)]
    shard: u32,
    /// Only leases above this one
    #[arg(long, value_name = "LEASE", default_value_t = 0)]
    after: u64,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let (shard, after, limit) = (ShardId(args.shard), LeaseId(args.after), args.limit as usize);
    let mut found = client.sessions_after(shard, after, limit + 1).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    if let (true, Some((shard, last))) = (more, found.last()) {
        eprintln!("more follow: --shard {shard} --after {}", last.lease);
    }
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
