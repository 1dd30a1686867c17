//! `why KEY`: who holds it, since when, until when at the earliest, who waits, in plain words.

use std::process::ExitCode;

use leasehold::{EndReason, Holder, KeyRead, LastEnd, Mode};
use serde_json::Value;

use super::exit::CliError;
use super::options::Options;
use super::{json, say};

/// Waiters that are named one by one.
const WAITERS_SHOWN: usize = 5;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The key
    key: String,
}

pub(super) async fn run(options: &Options, args: Args) -> Result<ExitCode, CliError> {
    let client = options.connect().await?;
    let read = client.get(args.key).await?;
    if options.json {
        say(&object(&read).to_string())?;
    } else {
        sentences(&read).iter().try_for_each(|line| say(line))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What `get` shows, and the same in words.
pub(super) fn object(read: &KeyRead) -> Value {
    let mut object = json::key(read);
    object["text"] = sentences(read).join(" ").into();
    object
}

fn sentences(read: &KeyRead) -> Vec<String> {
    let info = &read.info;
    let mut said = Vec::new();
    if info.limit > 0 {
        said.push(format!(
            "{} is a semaphore; {} of {} permits are taken.",
            info.key, info.taken, info.limit
        ));
    }
    if info.holders.is_empty() {
        said.push(format!("Nobody holds {}.", info.key));
    }
    said.extend(info.holders.iter().map(|holder| about(&info.key, holder)));
    let more = info.holders_total as usize - info.holders.len();
    if more > 0 {
        said.push(format!("{more} more hold it."));
    }
    for delay in &info.delays {
        let rest = delay.remaining_ms.unwrap_or(delay.delay_ms);
        said.push(format!(
            "The hold under token {} was lost and asked for a lock-delay: its place stays taken for another {}.",
            delay.token,
            seconds(rest)
        ));
    }
    said.extend(info.last_end.as_ref().map(ending));
    said.push(match info.waiters.as_slice() {
        [] => "Nobody waits.".to_owned(),
        waiters => {
            let named = waiters.iter().take(WAITERS_SHOWN);
            let named: Vec<_> = named
                .map(|waiter| {
                    format!("{} (lease {}{})", waiter.label, waiter.lease, wish(waiter.mode))
                })
                .collect();
            let more = info.waiters_total as usize - named.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{} wait, in this order: {}{more}.", info.waiters_total, named.join(", "))
        }
    });
    said
}

fn about(key: &str, holder: &Holder) -> String {
    let how = match holder.mode.permit_count() {
        Some(1) => "1 permit".to_owned(),
        Some(count) => format!("{count} permits"),
        None if holder.mode == Mode::SHARED => "it shared".to_owned(),
        None => "it exclusively".to_owned(),
    };
    let entries = match holder.entries {
        0 | 1 => String::new(),
        several => format!(", entered {several} times"),
    };
    let Holder { label, lease, token, .. } = holder;
    let since = utc(holder.since_ms);
    let mut said = vec![format!(
        "{label} (lease {lease}) holds {how}, under token {token}, since {since}{entries}."
    )];
    said.extend(holder.remaining_ms.map(|rest| until(key, holder, rest)));
    if holder.own_lease {
        said.push("It has a lease of its own, which is renewed only when asked.".to_owned());
    }
    if let Some(asked) = &holder.asked {
        let within = seconds(asked.within_ms);
        said.push(format!("{} asked it to give up within {within}: {}.", asked.who, asked.why));
    }
    said.join(" ")
}

fn until(key: &str, holder: &Holder, rest_ms: u32) -> String {
    let rest = seconds(rest_ms);
    if holder.forced {
        return format!(
            "An operator forced its end: {key} is passed on when the holder gives it back, or in \
             {rest}."
        );
    }
    let delay = match holder.delay_ms {
        0 => String::new(),
        delay => format!(", and a lock-delay of {} follows", seconds(delay)),
    };
    format!("If it is not renewed, its lease ends in {rest} at the earliest{delay}.")
}

fn ending(end: &LastEnd) -> String {
    let LastEnd { label, lease, token, .. } = end;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let how = match &end.reason {
        EndReason::Forced { who, why } => {
            format!("was forced by {}: {}", text(who), text(why))
        }
        reason => json::reason(reason).1.to_owned(),
    };
    let at = utc(end.at_ms);
    format!(
        "The last hold that ended, of {label} (lease {lease}) under token {token}, {how}, at {at}."
    )
}

fn wish(mode: Mode) -> String {
    match mode.permit_count() {
        Some(count) => format!(", {count} permits"),
        None if mode == Mode::SHARED => ", shared".to_owned(),
        None => String::new(),
    }
}

fn seconds(ms: u32) -> String {
    format!("{}.{} s", ms / 1000, ms % 1000 / 100)
}

/// Unix milliseconds as date and time, by the proleptic Gregorian calendar.
fn utc(unix_ms: u64) -> String {
    let (days, seconds) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    // Years begin in March here, so that the leap day is the last one.
    let day = days + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_by_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_399_000), "2000-02-28 23:59:59 UTC");
        assert_eq!(utc(951_782_400_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_709_251_200_000), "2024-03-01 00:00:00 UTC");
        assert_eq!(utc(4_102_444_800_999), "2100-01-01 00:00:00 UTC");
        assert_eq!(seconds(61_250), "61.2 s");
    }
}
