//! `get KEY`.

use std::process::ExitCode;

use leasehold::{Freshness, KeyRead, Mode};

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key
    key: String,
    /// Takes what the asked node knows, even if it lags, and says how old that is at most
    #[arg(long)]
    stale: bool,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let freshness = if args.stale { Freshness::Stale } else { Freshness::Linearizable };
    let read = client.get_with(args.key, freshness).await?;
    if options.json {
        say(&json::key(&read).to_string())?;
    } else {
        show(&read)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One key, for a person.
pub(super) fn show(read: &KeyRead) -> Result<(), CliError> {
    let stale = match (read.stale, read.age) {
        (false, _) => String::new(),
        (true, Some(age)) => format!(", stale by {} ms at most", age.as_millis()),
        (true, None) => ", stale, its age is not known".to_owned(),
    };
    say(&format!("{}  (shard {}, revision {}{stale})", read.info.key, read.shard, read.revision))?;
    if read.info.limit > 0 {
        say(&format!("  a semaphore of {} permits", read.info.limit))?;
    }
    if read.info.holders.is_empty() && read.info.delays.is_empty() {
        say("  vacant")?;
    }
    for holder in &read.info.holders {
        let left = holder.remaining_ms.map_or_else(String::new, |ms| format!(", {ms} ms left"));
        let forced = if holder.forced { ", forced" } else { "" };
        let mode = mode_text(holder.mode);
        say(&format!(
            "  held by lease {} ({}){mode}, token {}{left}{forced}",
            holder.lease, holder.label, holder.token
        ))?;
    }
    for delay in &read.info.delays {
        let left = delay.remaining_ms.map_or_else(String::new, |ms| format!(", {ms} ms left"));
        say(&format!("  lock-delay after the loss of token {}{left}", delay.token))?;
    }
    for waiter in &read.info.waiters {
        let mode = mode_text(waiter.mode);
        say(&format!(
            "  {}. waits: lease {} ({}){mode}",
            waiter.position, waiter.lease, waiter.label
        ))?;
    }
    let hidden = read.info.waiters_total as usize - read.info.waiters.len();
    if hidden > 0 {
        say(&format!("  and {hidden} more wait"))?;
    }
    Ok(())
}

/// Nothing for an exclusive hold, the usual one.
pub(super) fn mode_text(mode: Mode) -> String {
    match mode.permit_count() {
        Some(1) => ", 1 permit".to_owned(),
        Some(count) => format!(", {count} permits"),
        None if mode == Mode::SHARED => ", shared".to_owned(),
        None => String::new(),
    }
}
