//! Drives Leasehold from outside: starts real nodes, loads them, hurts them, records what clients
//! saw and judges it.
//!
//! The checkers (`check`) and the history they read are pure, so that the simulator uses the same
//! ones. Everything else here works on real processes and loopback sockets only.

pub mod check;
pub mod clock;
pub mod history;
