//! `watch [KEY] [--prefix] [--from PLACE]`: what happens, a line each, until a signal.

use std::process::ExitCode;

use leasehold::{EndReason, EventKind, Revision, WatchEvent, WatchFrom, WatchItem, WatchTarget};

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key; without it, everything is watched
    #[arg(default_value = "")]
    key: String,
    /// Watches all keys that begin with KEY
    #[arg(long)]
    prefix: bool,
    /// Where to begin: `now`, `state` (what there is, then what happens), or a cursor that an
    /// earlier watch printed with `--json`
    #[arg(long, value_name = "PLACE", default_value = "now")]
    from: String,
    /// Ends after this many changes
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let target = if args.prefix || args.key.is_empty() {
        WatchTarget::prefix(args.key)
    } else {
        WatchTarget::key(args.key)
    };
    let from = place(&args.from)?;
    let client = options.connect().await?;
    let mut watch = client.watch(&target, &from)?;
    let mut changes = 0;
    while args.limit.is_none_or(|limit| changes < limit) {
        let item = watch.next().await?;
        changes += u64::from(matches!(item, WatchItem::Change { .. }));
        if options.json {
            say(&json::watch_item(&item, watch.cursor().as_ref()).to_string())?;
        } else {
            show(&item)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Where to begin.
pub(super) fn place(text: &str) -> Result<WatchFrom, leasehold::CallError> {
    Ok(match text {
        "now" => WatchFrom::Now,
        "state" => WatchFrom::State,
        cursor => WatchFrom::Cursor(leasehold::Cursor::parse(cursor)?),
    })
}

fn show(item: &WatchItem) -> Result<(), CliError> {
    match item {
        WatchItem::Change { revision, events, .. } => {
            events.iter().try_for_each(|event| say(&line(*revision, event)))
        }
        WatchItem::State { shard, revision, keys, first, .. } => {
            if *first {
                say(&format!("{revision}  the state of shard {shard}:"))?;
            }
            for info in keys {
                let mut tokens: Vec<_> =
                    info.holders.iter().map(|holder| holder.token.to_string()).collect();
                let more = info.holders_total as usize - tokens.len();
                if more > 0 {
                    tokens.push(format!("{more} more"));
                }
                let waiters = info.waiters_total;
                let held = if tokens.is_empty() { "nobody".to_owned() } else { tokens.join(", ") };
                say(&format!("{revision}  {}  held under {held}, {waiters} wait", info.key))?;
            }
            Ok(())
        }
        WatchItem::NoQuorum => say("no quorum: what follows may be late"),
        WatchItem::Quorum => say("quorum again: nothing was missed"),
        _ => Ok(()),
    }
}

fn line(revision: Revision, event: &WatchEvent) -> String {
    let name = json::event_name(&event.kind);
    let key = event.kind.key();
    let key = String::from_utf8_lossy(key.unwrap_or_default());
    let more = match &event.kind {
        EventKind::Granted { token, lease, .. } => format!(" to lease {lease}, token {token}"),
        EventKind::Ended { token, reason, .. } => format!(" ({}), token {token}", why(reason)),
        EventKind::Queued { lease, .. } | EventKind::WaitEnded { lease, .. } => {
            format!(", lease {lease}")
        }
        EventKind::ValueChanged { value, .. } => {
            format!(" to {:?}", String::from_utf8_lossy(value))
        }
        _ => String::new(),
    };
    let label = if event.label.is_empty() { String::new() } else { format!(" ({})", event.label) };
    format!("{revision}  {key}  {name}{more}{label}")
}

fn why(reason: &EndReason) -> String {
    match reason {
        EndReason::Forced { who, why } => {
            let (who, why) = (String::from_utf8_lossy(who), String::from_utf8_lossy(why));
            format!("forced by {who}: {why}")
        }
        reason => json::reason_name(reason).replace('_', " "),
    }
}
