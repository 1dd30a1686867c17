//! `restore` and `recover`: the arguments of `start`, which say what the new node is, and where its
//! cluster comes from.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use super::config_args;
use crate::restore::{Request, Source};

/// `restore`.
pub(super) fn restore() -> Command {
    let from = Arg::new("from")
        .long("from")
        .value_name("FILE")
        .required(true)
        .value_parser(value_parser!(PathBuf))
        .help("The backup, as `leasehold backup create` wrote it");
    Command::new("restore")
        .about(
            "Make the data directory of a new cluster's lowest node from a backup: docs/BACKUP.md",
        )
        .arg(from)
        .arg(silent_for())
        .args(config_args())
}

/// `recover`.
pub(super) fn recover() -> Command {
    let from = Arg::new("from-data")
        .long("from-data")
        .value_name("DIR")
        .required(true)
        .value_parser(value_parser!(PathBuf))
        .help("The data directory of a node that survived; it is read and not changed");
    let force = Arg::new("force-from-one-node")
        .long("force-from-one-node")
        .required(true)
        .action(ArgAction::SetTrue)
        .help("I know that what the lost majority decided is lost, and that it never comes back");
    Command::new("recover")
        .about(
            "Make a new cluster from one node when the majority is lost for good: docs/BACKUP.md",
        )
        .arg(force)
        .arg(from)
        .arg(silent_for())
        .args(config_args())
}

fn silent_for() -> Arg {
    Arg::new("old-cluster-silent-for")
        .long("old-cluster-silent-for")
        .value_name("TIME")
        .default_value("0s")
        .value_parser(time)
        .help("The old cluster has answered nobody for so long (as in 90s, 10m): wait less")
}

/// What was asked for.
pub(super) fn request(verb: &str, matches: &ArgMatches) -> Request {
    let path =
        |name| -> PathBuf { matches.get_one::<PathBuf>(name).expect("it is required").clone() };
    let source = match verb {
        "restore" => Source::Backup(path("from")),
        _ => Source::Survivor(path("from-data")),
    };
    let silent_for = matches.get_one("old-cluster-silent-for").copied().unwrap_or_default();
    Request { source, silent_for }
}

/// A time: digits and a unit.
fn time(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        _ => return Err("write a number and a unit, s, m or h, as in 90s".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "write a number first, as in 90s".to_owned())?;
    let seconds = number.checked_mul(seconds).ok_or("too long a time")?;
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_needs_a_unit() {
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(time("10m"), Ok(Duration::from_mins(10)));
        assert_eq!(time("2h"), Ok(Duration::from_hours(2)));
        for bad in ["", "10", "s", "1.5m", "-1s", "99999999999999999999s", "99999999999999999h"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }
}
