//! Raft glue.
mod convert;
mod message;
pub mod peers;
mod rounds;
mod signal;
mod storage;
pub mod types;
