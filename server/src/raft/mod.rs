//! Raft glue.
mod convert;
mod message;
pub mod peers;
mod rounds;
mod signal;
pub mod types;
