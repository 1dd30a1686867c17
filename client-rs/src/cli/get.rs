//! `get KEY`.

use std::process::ExitCode;

use leasehold::{Freshness, KeyInfo, KeyRead, LeaseId, Mode};

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key
    key: String,
    /// Shows the holders whose lease is above this: the next page of a key that has more than 256
    #[arg(long, value_name = "LEASE", default_value_t = 0)]
    holders_after: u64,
    /// Takes what the asked node knows, even if it lags, and says how old that is at most
    #[arg(long)]
    stale: bool,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let freshness = if args.stale { Freshness::Stale } else { Freshness::Linearizable };
    let read = client.get_after(args.key, LeaseId(args.holders_after), freshness).await?;
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
        let KeyInfo { limit, taken, .. } = read.info;
        say(&format!("  a semaphore, {taken} of {limit} permits taken"))?;
    }
    if read.info.holders_total == 0 && read.info.delays_total == 0 {
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
    if let Some(cut) = holders_cut(&read.info) {
        say(&format!("  {cut}"))?;
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

/// Says that more hold the key than are shown, and how to go on.
pub(super) fn holders_cut(info: &KeyInfo) -> Option<String> {
    let (shown, total) = (info.holders.len(), info.holders_total);
    if shown == total as usize {
        return None;
    }
    let text = format!("shown are {shown} of {total} holders");
    Some(match info.holders.last() {
        Some(last) => format!("{text}; the next: --holders-after {}", last.lease),
        None => text,
    })
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
