//! Leasehold's server: see `docs/ARCHITECTURE.md` for how the parts fit.

pub mod config;
pub mod disk;
pub mod env;
pub mod error;
pub mod identity;
pub mod raft;
pub mod rt;
pub mod wal;
