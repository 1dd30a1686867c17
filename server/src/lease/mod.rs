//! Lease deadlines of the shards that this node leads (DESIGN §5, G3).
//!
//! Owns when a lease may end; never ends one itself: the shard proposes, `apply` decides. Deadlines
//! live in the leader's memory only and start anew, at the full TTL, when the leadership changes.

mod table;
mod wheel;

pub use table::{Due, LeaseTable};
pub use wheel::{CoreWheel, ShardTimers, Timer, TimerKind};
