//! Connections: frames in, requests routed to their shards, replies out. Knows frames and request
//! ids; never Raft.

mod connection;
mod reply;
mod router;

pub use connection::{Connection, ConnectionLimits, serve};
pub use reply::{ReplySink, ReplyTo, error};
pub use router::{Hops, NodeView, Router};
