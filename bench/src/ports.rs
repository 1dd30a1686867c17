//! Free loopback ports.
//!
//! They are drawn below the range from which the kernel takes the ports of outgoing connections,
//! so that no connection of a running test can take the port of a node that is about to restart.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

/// Lowest port drawn.
const PORT_MIN: u16 = 12_000;
/// Highest port drawn; Linux starts its own range at 32,768.
const PORT_MAX: u16 = 31_999;
/// Draws before giving up.
const TRIES_MAX: usize = 1_000;

/// A loopback address that nobody uses, and that is not in `taken`, to which it is added.
pub fn free(taken: &mut Vec<u16>) -> io::Result<SocketAddr> {
    for _ in 0..TRIES_MAX {
        let port = PORT_MIN + u16::from_le_bytes(crate::random::bytes()) % (PORT_MAX - PORT_MIN);
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if !taken.contains(&port) && TcpListener::bind(addr).is_ok() {
            taken.push(port);
            return Ok(addr);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "no free port found"))
}
