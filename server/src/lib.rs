//! Leasehold's server: see `docs/ARCHITECTURE.md` for how the parts fit.

pub mod disk;
pub mod env;
pub mod raft;
pub mod rt;
pub mod wal;
