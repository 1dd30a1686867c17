//! `transfer-leader [--shard N] [--to NODE]`.

use std::process::ExitCode;

use leasehold::{NodeId, ShardId};
use serde_json::json;

use super::exit::CliError;
use super::options::Options;
use super::say;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The shard
    #[arg(long, default_value_t = 0)]
    shard: u32,
    /// The node that shall lead; without it the leader chooses
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    to: Option<u64>,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    if args.shard >= client.shards() {
        return Err(CliError::Usage(format!(
            "--shard {}: the cluster has shards 0 to {}",
            args.shard,
            client.shards() - 1
        )));
    }
    client.transfer_leader(ShardId(args.shard), args.to.map(NodeId)).await?;
    if options.json {
        say(&json!({ "ok": true, "shard": args.shard, "to": args.to }).to_string())?;
    } else {
        say(&format!("the leadership of shard {} was moved", args.shard))?;
    }
    Ok(ExitCode::SUCCESS)
}
