//! `set-limit KEY PERMITS`.

use std::process::ExitCode;

use serde_json::json;

use super::exit::CliError;
use super::options::{Options, label};
use super::say;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key of a semaphore that is in use
    key: String,
    /// How many permits it has from now on, 1 to 1024; present holds keep theirs. Once nobody holds
    /// the key or waits for it, the next acquire states its limit anew
    permits: u32,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    client.set_limit(args.key.clone(), args.permits, &label()).await?;
    if options.json {
        say(&json!({ "ok": true, "key": args.key, "limit": args.permits }).to_string())?;
    } else {
        say(&format!("{} has {} permits", args.key, args.permits))?;
    }
    Ok(ExitCode::SUCCESS)
}
