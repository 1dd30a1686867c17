//! Leasehold's server: see `docs/ARCHITECTURE.md` for how the parts fit.

pub mod admin;
pub mod cli;
pub mod config;
pub mod disk;
pub mod env;
pub mod error;
#[cfg(test)]
#[path = "../../protocol/tests/hostile_support/mod.rs"]
mod hostile_support;
pub mod identity;
pub mod lease;
pub mod member;
pub mod net;
pub mod node;
pub mod raft;
pub mod restore;
pub mod rt;
pub mod shard;
pub mod shutdown;
pub mod trace;
pub mod wal;
pub mod watch;
