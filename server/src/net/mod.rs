//! Connections: frames in, requests routed to their shards, replies out. Knows frames and request
//! ids; never Raft.

mod connection;
mod front;
mod lanes;
mod news;
mod peer_service;
mod reply;
mod router;
mod service;
mod status;
mod watching;

pub use connection::{Asked, Connections, Front};
pub use front::{EarlyFront, NodeFront};
pub use peer_service::{BirthService, CoreService};
pub use reply::{ReplySink, ReplyTo, error};
pub use router::{Hop, Hops, Router};
pub use service::ForwardService;
pub(crate) use status::OneReply;
