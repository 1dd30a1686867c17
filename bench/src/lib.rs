//! Drives Leasehold from outside: starts real nodes, loads them, hurts them, records what clients
//! saw and judges it.
//!
//! The checkers (`check`) and the history they read are pure, so that the simulator uses the same
//! ones. Everything else here works on real processes and loopback sockets only.

pub mod actor;
pub mod check;
pub mod clock;
pub mod cluster;
pub mod contention;
pub mod deny;
pub mod failover;
pub mod finals;
pub mod history;
pub mod http;
pub mod judge;
pub mod links;
pub mod load;
pub mod ports;
pub mod process;
pub mod proxy;
pub mod random;
pub mod stats;
pub mod store;
pub mod watching;
pub mod wire;
pub mod worker;
