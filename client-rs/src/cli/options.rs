//! Options of every verb, and times with units.

use std::time::Duration;

use clap::Args;
use leasehold::{Client, Config};

use super::exit::CliError;

/// Where a cluster is looked for unless told otherwise.
const DEFAULT_ENDPOINTS: &str = "127.0.0.1:7400";

/// See the module.
#[derive(Args, Clone, Debug)]
pub(super) struct Options {
    /// Nodes, HOST:PORT, separated by commas; one that answers is enough
    #[arg(long, global = true, env = "LEASEHOLD_ENDPOINTS", default_value = DEFAULT_ENDPOINTS)]
    pub(super) endpoints: String,
    /// Prints JSON
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Deadline of each request
    #[arg(long, global = true, value_name = "TIME", default_value = "10s", value_parser = time)]
    pub(super) timeout: Duration,
}

impl Options {
    pub(super) fn config(&self) -> Result<Config, CliError> {
        let label = label();
        Ok(Config::new(&self.endpoints)?.call_timeout(self.timeout).label(label))
    }

    pub(super) async fn connect(&self) -> Result<Client, CliError> {
        Ok(Client::with_config(self.config()?).await?)
    }
}

/// What listings show: `USER@HOST:PROCESS-ID`.
pub(super) fn label() -> String {
    let name = rustix::system::uname();
    let host: String = name.nodename().to_string_lossy().chars().take(60).collect();
    format!("{}@{host}:{}", user(), std::process::id())
}

/// Who this is, for listings and for the record of forced releases.
pub(super) fn user() -> String {
    let user = std::env::var("USER").unwrap_or_else(|_| "unknown".to_owned());
    user.chars().filter(|c| !c.is_control()).take(16).collect()
}

/// A time: digits and a unit.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a time; write a number and a unit, as in 15s"))?;
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "" => return Err(format!("{text:?} has no unit; write {text}ms, {text}s or {text}m")),
        other => return Err(format!("{other:?} is no unit of time; use ms, s, m or h")),
    };
    let ms = number.checked_mul(unit_ms).ok_or_else(|| format!("{text:?} is too long a time"))?;
    Ok(Duration::from_millis(ms))
}

/// A time to live: a time within the range of leases.
pub(super) fn ttl(text: &str) -> Result<Duration, String> {
    let ttl = time(text)?;
    if ttl < Duration::from_secs(1) || ttl > Duration::from_mins(10) {
        return Err(format!("{text:?} is out of range: a TTL is 1s to 600s (10m)"));
    }
    Ok(ttl)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_needs_a_unit() {
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("15s"), Ok(Duration::from_secs(15)));
        assert_eq!(time("2m"), Ok(Duration::from_mins(2)));
        assert_eq!(time("1h"), Ok(Duration::from_hours(1)));
        for bad in ["15", "", "s", "-1s", "1.5s", "15 s", "15sec", "99999999999999999999s", "1e3s"]
        {
            assert!(time(bad).is_err(), "{bad}");
        }
        assert!(time("15").expect_err("bare").contains("15s"));
        assert!(time("18446744073709551615h").expect_err("overflow").contains("too long"));
    }

    #[test]
    fn a_ttl_out_of_range_is_refused_with_the_range() {
        assert_eq!(ttl("1s"), Ok(Duration::from_secs(1)));
        assert_eq!(ttl("10m"), Ok(Duration::from_mins(10)));
        for bad in ["0s", "999ms", "601s", "11m", "24h", "15000000000ms"] {
            assert!(ttl(bad).expect_err(bad).contains("1s to 600s"), "{bad}");
        }
    }

    #[test]
    fn the_label_fits() {
        assert!(label().len() <= 128, "{}", label());
        assert!(label().contains(&std::process::id().to_string()));
    }
}
