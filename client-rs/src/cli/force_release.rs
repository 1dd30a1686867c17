//! `force-release KEY --reason TEXT [--token N] [--now]`.

use std::process::ExitCode;

use leasehold::{ErrorCode, Failure, KeyRead, Token};
use serde_json::json;

use super::exit::CliError;
use super::get::show;
use super::options::{Options, label};
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key
    key: String,
    /// Why, for the record
    #[arg(long)]
    reason: String,
    /// The token of the hold that is meant; without it the present hold is read, shown and ended
    #[arg(long)]
    token: Option<u64>,
    /// Passes the key on at once; the holder may still believe that it holds it, and only
    /// resources that check tokens are safe
    #[arg(long)]
    now: bool,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let mut shown = None;
    let token = if let Some(token) = args.token {
        Token(token)
    } else {
        let read = client.get(args.key.clone()).await?;
        let token = present_token(&read, "--token")?;
        if !options.json {
            show(&read)?;
        }
        shown = Some(read);
        token
    };
    let who = label();
    let forced =
        client.force_release(args.key.clone(), token, &who, &args.reason, args.now).await?;
    if options.json {
        let object = json!({
            "ok": true,
            "key": args.key,
            "token": forced.token.0,
            "passed_on": forced.passed_on,
            "before": shown.as_ref().map(json::key),
        });
        say(&object.to_string())?;
    } else if forced.passed_on {
        say(&format!("token {}: the hold was ended and the key passed on", forced.token))?;
    } else {
        say(&format!(
            "token {}: the hold is not renewed any more; the key is passed on when the holder \
             gives it back or its validity ends",
            forced.token
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Tokens that are named, of more holders.
const TOKENS_SHOWN: usize = 8;

/// The token of the only holder; `option` is how another is named.
pub(super) fn present_token(read: &KeyRead, option: &str) -> Result<Token, CliError> {
    match read.info.holders.as_slice() {
        [] => {
            let text = format!("nobody holds {}", read.info.key);
            Err(CliError::Failed(Failure::new(ErrorCode::NOT_OWNER, text)))
        }
        [holder] => Ok(holder.token),
        several => {
            let shown = several.iter().take(TOKENS_SHOWN);
            let tokens: Vec<_> = shown.map(|holder| holder.token.to_string()).collect();
            let more = read.info.holders_total as usize - tokens.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let (key, tokens) = (&read.info.key, tokens.join(", "));
            Err(CliError::Usage(format!(
                "several hold {key}; choose with {option}: {tokens}{more}"
            )))
        }
    }
}
