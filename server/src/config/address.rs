//! Addresses as people write them. Owns their syntax only: nothing here resolves a name or opens
//! a socket, and every error quotes the item that is wrong.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

use leasehold_protocol::ids::NodeId;

/// `HOST:PORT` where the host is a name, an IPv4 address or a bracketed IPv6 address, and the
/// port is 1..=65535. Names are kept as written and resolved anew at each connect.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    /// The host, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// True for `0.0.0.0` and `::`: fine to listen on, useless to connect to.
    pub fn is_unspecified(&self) -> bool {
        self.host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_unspecified())
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let quoted = |what: &str| format!("\"{text}\": {what}");
        let (host, port) =
            text.rsplit_once(':').ok_or_else(|| quoted("expected HOST:PORT, found no port"))?;
        let port = port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| quoted("the port must be 1..=65535"))?;
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(Some(inner)) if inner.parse::<Ipv6Addr>().is_ok() => inner,
            Some(_) => return Err(quoted("the brackets do not hold an IPv6 address")),
            None if host.contains(':') => {
                return Err(quoted("write an IPv6 address in brackets, as [::1]:7401"));
            }
            None => host,
        };
        if host.is_empty() {
            return Err(quoted("the host is empty"));
        }
        if host.chars().any(|c| !(c.is_ascii_alphanumeric() || "-._:".contains(c))) {
            return Err(quoted("the host has a character that no host name has"));
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

/// An address to listen on: `IP:PORT`, or `localhost:PORT`, which means 127.0.0.1.
pub(super) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let item: HostPort = text.parse()?;
    let host = if item.host() == "localhost" { "127.0.0.1" } else { item.host() };
    let ip = host
        .parse()
        .map_err(|_| format!("\"{text}\": a listen address is IP:PORT, not a host name"))?;
    Ok(SocketAddr::new(ip, item.port()))
}

/// `1=HOST:PORT,2=HOST:PORT,…`; blanks around items and one trailing comma are allowed.
pub(super) fn parse_peers(text: &str) -> Result<BTreeMap<NodeId, HostPort>, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("the list is empty; leave the key out for a single node".to_owned());
    }
    let mut peers = BTreeMap::new();
    for item in text.strip_suffix(',').unwrap_or(text).split(',') {
        let (node, address) = parse_peer(item.trim())?;
        if peers.values().any(|other| *other == address) {
            return Err(format!("\"{}\": this address is in the list twice", item.trim()));
        }
        if peers.insert(node, address).is_some() {
            return Err(format!("\"{}\": node {node} is in the list twice", item.trim()));
        }
    }
    Ok(peers)
}

fn parse_peer(item: &str) -> Result<(NodeId, HostPort), String> {
    let (node, address) =
        item.split_once('=').ok_or_else(|| format!("\"{item}\": expected NODE=HOST:PORT"))?;
    let node = node
        .trim()
        .parse()
        .ok()
        .filter(|node| *node != 0)
        .ok_or_else(|| format!("\"{item}\": the node id must be a whole number from 1"))?;
    let address = address.trim().parse().map_err(|error| format!("\"{item}\": {error}"))?;
    Ok((NodeId(node), address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_what_people_write() {
        for text in ["127.0.0.1:1", "host-a.example:65535", "[::1]:7401", "a_b:9"] {
            assert_eq!(text.parse::<HostPort>().unwrap().to_string(), text);
        }
        assert_eq!(parse_listen("localhost:5").unwrap(), SocketAddr::from(([127, 0, 0, 1], 5)));
        assert_eq!(parse_listen("[::]:5").unwrap().to_string(), "[::]:5");
    }

    #[test]
    fn refusals_quote_the_item() {
        for text in ["", "host", "host:", "host:0", "host:65536", ":1", "::1:7401", "[::1", "a b:1"]
        {
            let error = text.parse::<HostPort>().unwrap_err();
            assert!(error.contains(&format!("\"{text}\"")), "{text}: {error}");
        }
        for text in ["[::1:7401", "[host]:1", "[::1]7401"] {
            assert!(text.parse::<HostPort>().is_err(), "{text}");
        }
        assert!(parse_listen("example.org:1").unwrap_err().contains("example.org:1"));
    }

    #[test]
    fn peers_allow_blanks_and_a_trailing_comma() {
        let peers = parse_peers(" 1=a:1, 2 = [::1]:2 ,3=c:3, ").unwrap();
        let list: Vec<_> =
            peers.iter().map(|(node, address)| format!("{node}={address}")).collect();
        assert_eq!(list, ["1=a:1", "2=[::1]:2", "3=c:3"]);
    }

    #[test]
    fn peers_quote_the_bad_item() {
        for (list, item) in [
            ("1=a:1,2=b", "2=b"),
            ("1=a:1,b:2", "b:2"),
            ("1=a:1,x=b:2", "x=b:2"),
            ("0=a:1", "0=a:1"),
            ("1=a:1,1=b:2", "1=b:2"),
            ("1=a:1,2=a:1", "2=a:1"),
            ("1=a:1,,2=b:2", "\"\""),
            ("1=::1:7401", "1=::1:7401"),
        ] {
            let error = parse_peers(list).unwrap_err();
            assert!(error.contains(item), "{list}: {error}");
        }
        assert!(parse_peers("").unwrap_err().contains("empty"));
    }
}
