//! Production's sockets: TCP on glommio, accepted by a thread of its own.
//!
//! Listening sockets are made here, not by glommio, whose `bind` sets `SO_REUSEPORT` (a second
//! server on the port would silently take half the connections) and whose accepted sockets leak
//! when dropped. An accepted socket is an `OwnedFd` until a core adopts it.

mod listener;
mod tcp;

pub use listener::{AcceptCounters, Acceptor, ListenError, Listener};
pub use tcp::{TcpNet, TcpReader, TcpWriter, adopt};

#[cfg(test)]
mod tests;
