//! Raft glue.
mod convert;
mod group;
mod machine;
mod message;
mod network;
pub mod peers;
mod rounds;
mod serving;
mod signal;
mod snapshot;
mod spec;
mod storage;
#[cfg(test)]
mod suite;
pub mod types;

pub use group::*;
pub use machine::ApplySink;
pub use peers::*;
pub use spec::*;
pub use types::*;

/// The shard that a Raft message is for; `None` if it is malformed or no such message.
pub fn message_shard(kind: u8, body: &[u8]) -> Option<leasehold_protocol::ids::ShardId> {
    message::RaftMessage::decode(kind, body).map(|message| message.shard())
}
