//! Leasehold's server: see `docs/ARCHITECTURE.md` for how the parts fit.

pub mod admin;
pub mod cli;
pub mod config;
pub mod env;
pub mod error;
pub mod identity;
pub mod node;
pub mod shutdown;
pub mod trace;
