//! Raft: openraft on this server's runtime, WAL, disk and network, and nothing more.
//!
//! What is here is glue, and three things that are not left to the engine:
//!
//! - **Confirmed rounds** (`rounds`). A renewal or a read needs to know that no other leader was
//!   elected before it arrived. The engine's own notion of "when did a quorum last answer" can be
//!   later than any real answer: its pipelined stream credits the answer to an earlier request to a
//!   later, empty one. So our transport stamps each frame with a counter when it is handed to the
//!   kernel, and only that frame's own accepting answer credits it (DESIGN §5).
//! - **Identity** (`peers`, `serving`). Nodes prove the cluster secret to each other, and a
//!   data directory that the membership does not know takes no part: a wiped voter cannot vote
//!   (DESIGN §7). What a peer says is checked before the engine, which panics on nonsense, sees it.
//! - **Leadership** as the rest of the server means it: a node leads once it has applied the first
//!   entry of that very leadership, and a restarted node never leads without a new election.
//!
//! Who does what: `group` is what a shard uses; `storage` is the log over the WAL, `machine` the
//! state machine over `leasehold_core`, `snapshot` their files, `compact` cuts the log, `spread` moves
//! a new group's leadership; `network` is what the engine says
//! to others, `serving` what it is told; `peers` are the connections; `convert` the engine's types
//! as bytes; `checks` what peers may say. Everything is generic in `E: Env`, so production and the simulator run the same code.
//!
//! It never looks into a batch beyond handing its commands to `State::apply`, never compares a
//! clock, and never answers for a write that is not applied. Bounds: `peers::link` for what waits
//! on a connection, `network` for what one stream has under way, the WAL for what waits for a
//! flush; a caller bounds its own proposals and confirmations.

mod checks;
mod compact;
mod convert;
mod group;
mod machine;
mod member;
mod message;
mod network;
pub mod peers;
mod remains;
mod rounds;
mod serving;
mod signal;
mod snapshot;
mod spec;
mod spread;
mod storage;
#[cfg(test)]
pub(crate) mod suite;
pub mod types;

use leasehold_protocol::ids::ShardId;

pub use group::{
    BATCH_LEN_MAX, ConfirmError, Group, GroupError, GroupFailed, GroupStatus, InitError,
    ProposeError, TransferError,
};
pub use machine::ApplySink;
pub use member::{GroupMembers, MemberError};
pub use peers::{Class, Identity, PeerError, PeerInfo, PeerService, Peers};
pub use remains::{Remains, RemainsError, remains};
pub use spec::{GroupSpec, SpecError, Timings};
pub use spread::first_leader;
pub use types::{EntryData, EntryPrint, Leadership, Member};

/// The shard that a Raft message is for; `None` if it is malformed or no such message.
pub fn message_shard(kind: u8, body: &[u8]) -> Option<ShardId> {
    message::RaftMessage::decode(kind, body).map(|message| message.shard())
}
