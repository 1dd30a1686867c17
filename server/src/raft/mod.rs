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
pub use spec::*;
