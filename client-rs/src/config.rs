//! Settings of a client, and the parsing of endpoint lists. Everything is checked at once, before
//! anything is sent.

use std::time::Duration;

use leasehold_protocol::limits::LABEL_LEN_MAX;

use crate::error::ConfigError;

/// Most endpoints and nodes that a client keeps.
pub(crate) const TARGETS_MAX: usize = 64;

/// Settings of a `Client`. Every field has a default that fits most uses.
#[derive(Clone, Debug)]
pub struct Config {
    pub(crate) endpoints: Vec<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) attempt_timeout: Duration,
    pub(crate) call_timeout: Duration,
    pub(crate) label: String,
}

impl Config {
    /// Settings for a list of endpoints, `HOST:PORT` each, separated by commas. An IPv6 address
    /// stands in brackets. Spaces around items, a comma at the end and repeated items are
    /// accepted; anything else that is not an endpoint is an error that quotes it.
    ///
    /// One reachable node is enough: the others are learnt from it.
    pub fn new(endpoints: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            endpoints: parse_endpoints(endpoints)?,
            connect_timeout: Duration::from_secs(1),
            attempt_timeout: Duration::from_secs(2),
            call_timeout: Duration::from_secs(10),
            label: default_label(),
        })
    }

    /// How long one connection may take to be set up, handshake included, before another node is
    /// tried. Default 1 s.
    #[must_use]
    pub const fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long one attempt of a request waits for its answer before it is sent again, possibly to
    /// another node, under the same number. Default 2 s; renewals use less where their TTL
    /// demands it.
    #[must_use]
    pub const fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// The deadline of every call, all its attempts included; an acquire has this on top of its
    /// wait. Default 10 s.
    #[must_use]
    pub const fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// What listings show for this client's sessions; at most 128 bytes. Default
    /// `PROGRAM:PROCESS-ID`.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let timeouts = [
            ("connect_timeout", self.connect_timeout),
            ("attempt_timeout", self.attempt_timeout),
            ("call_timeout", self.call_timeout),
        ];
        for (name, timeout) in timeouts {
            if timeout < Duration::from_millis(10) || timeout > Duration::from_mins(10) {
                return Err(ConfigError::BadTimeout { name, given_ms: timeout.as_millis() });
            }
        }
        if self.label.len() > LABEL_LEN_MAX {
            return Err(ConfigError::LabelTooLong { len: self.label.len() });
        }
        Ok(())
    }
}

fn default_label() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = std::path::Path::new(&path).file_name().unwrap_or_default().to_string_lossy();
    let name: String = name.chars().take(24).collect();
    format!("{name}:{}", std::process::id())
}

/// Parses a comma-separated list; see `Config::new`.
pub fn parse_endpoints(list: &str) -> Result<Vec<String>, ConfigError> {
    let list = list.trim();
    let list = list.strip_suffix(',').unwrap_or(list);
    if list.trim().is_empty() {
        return Err(ConfigError::NoEndpoint);
    }
    let mut endpoints: Vec<String> = Vec::new();
    for item in list.split(',') {
        let endpoint = item.trim();
        check_endpoint(endpoint)
            .map_err(|reason| ConfigError::BadEndpoint { endpoint: item.to_owned(), reason })?;
        if !endpoints.iter().any(|known| known == endpoint) {
            endpoints.push(endpoint.to_owned());
        }
    }
    if endpoints.len() > TARGETS_MAX {
        let count = endpoints.len();
        return Err(ConfigError::TooManyEndpoints { count, count_max: TARGETS_MAX });
    }
    Ok(endpoints)
}

/// That it is `HOST:PORT`; else what is wrong with it.
pub(crate) fn check_endpoint(endpoint: &str) -> Result<(), &'static str> {
    if endpoint.is_empty() {
        return Err("the item is empty");
    }
    if endpoint.contains("://") {
        return Err("a scheme is not expected, only HOST:PORT");
    }
    let (host, port) = match endpoint.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("the closing bracket is missing")?;
            host.parse::<std::net::Ipv6Addr>().map_err(|_| "no IPv6 address in the brackets")?;
            (host, rest.strip_prefix(':').ok_or("the port is missing")?)
        }
        None => endpoint.rsplit_once(':').ok_or("the port is missing")?,
    };
    if host.is_empty() {
        return Err("the host is missing");
    }
    if !endpoint.starts_with('[') && host.contains(':') {
        return Err("an IPv6 address needs brackets, as in [::1]:7000");
    }
    if host.chars().any(|c| c.is_whitespace() || c == '/' || c == '[' || c == ']') {
        return Err("the host has a character that no host has");
    }
    match port.parse::<u16>() {
        Ok(1..) if port.bytes().all(|byte| byte.is_ascii_digit()) => Ok(()),
        _ => Err("the port is not a number from 1 to 65535"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_lists_are_read_with_care() {
        let list = parse_endpoints(" a.example:7000, 10.0.0.1:7001 ,[::1]:7002,a.example:7000, ");
        assert_eq!(list.expect("valid"), ["a.example:7000", "10.0.0.1:7001", "[::1]:7002"]);
    }

    #[test]
    fn a_bad_endpoint_is_quoted() {
        let bad = [
            "host",
            "host:",
            ":7000",
            "host:0",
            "host:70000",
            "host:+80",
            "::1:7000",
            "[::1]7000",
            "[::1",
            "[host]:7000",
            "http://host:7000",
            "ho st:7000",
            "a:1,,b:2",
            "host/x:80",
        ];
        for list in bad {
            let error = parse_endpoints(list).expect_err(list);
            let ConfigError::BadEndpoint { endpoint, .. } = &error else {
                panic!("{list}: {error}");
            };
            assert!(error.to_string().contains(&format!("{endpoint:?}")), "{error}");
            assert!(list.contains(endpoint.as_str()));
        }
        assert_eq!(parse_endpoints(" , "), Err(ConfigError::NoEndpoint));
        assert_eq!(parse_endpoints(""), Err(ConfigError::NoEndpoint));
    }

    #[test]
    fn the_list_is_bounded() {
        let list: Vec<_> = (0..=TARGETS_MAX).map(|n| format!("host{n}:1")).collect();
        let error = parse_endpoints(&list.join(",")).expect_err("too many");
        assert!(matches!(error, ConfigError::TooManyEndpoints { count: 65, .. }));
    }

    #[test]
    fn impossible_settings_name_themselves() {
        let config = Config::new("a:1").expect("valid");
        assert_eq!(config.validate(), Ok(()));
        let error = config.clone().call_timeout(Duration::ZERO).validate().expect_err("too short");
        assert!(error.to_string().contains("call_timeout"), "{error}");
        let error = config.label("x".repeat(129)).validate().expect_err("too long");
        assert_eq!(error, ConfigError::LabelTooLong { len: 129 });
    }
}
