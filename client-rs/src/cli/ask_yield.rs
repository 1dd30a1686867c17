//! `yield KEY --reason TEXT [--within TIME] [--token N]`: asks the holder to give a key up.

use std::process::ExitCode;
use std::time::Duration;

use leasehold::Token;
use serde_json::json;

use super::exit::CliError;
use super::force_release::present_token;
use super::options::{Options, label, time};
use super::say;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key
    key: String,
    /// Why, for the holder
    #[arg(long)]
    reason: String,
    /// How soon; nothing but the holder's goodwill follows
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    within: Duration,
    /// The token of the hold that is meant; without it the present one
    #[arg(long)]
    token: Option<u64>,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let token = match args.token {
        Some(token) => Token(token),
        None => present_token(&client.get(args.key.clone()).await?, "--token")?,
    };
    client.ask_yield(args.key.clone(), token, &label(), &args.reason, args.within).await?;
    if options.json {
        say(&json!({ "ok": true, "key": args.key, "token": token.0 }).to_string())?;
    } else {
        say(&format!("token {token}: the holder was asked"))?;
    }
    Ok(ExitCode::SUCCESS)
}
