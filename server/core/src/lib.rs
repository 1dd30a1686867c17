//! Leasehold's deterministic state machine: leases, holds, queues, fencing tokens.
//!
//! `State::apply(command)` gives an outcome and events, the same on every node that applies the
//! same log. The crate owns what is replicated, its snapshot format and its invariants, the
//! arithmetic of lease time, and the timing wheel. It does no I/O, reads no clock, draws no random
//! number and walks no unordered table; `no_std` keeps most of that out by construction.
//!
//! Where to start reading: `state` (the door), `acquire`, `several`, `release`, `convert` and
//! `handover` (the lock itself), `retry` and `memory` (one execution per number), `lifecycle` (leases).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod acquire;
pub mod backup;
mod batch;
mod blob;
mod convert;
mod cow;
mod delay;
mod digest;
mod ends;
mod handover;
mod hash;
pub mod invariants;
pub mod lease;
mod lifecycle;
mod members;
mod memory;
mod quarantine;
mod reenter;
mod release;
mod retry;
mod several;
mod slots;
pub mod snapshot;
mod state;
mod table;
mod value;
mod view;
pub mod wheel;

pub use batch::{BATCH_VERSION, Batch, BatchWriter, DecodeError};
pub use members::Members;
pub use memory::Kind;
pub use state::State;
pub use view::{LeaseView, PAGE_BYTES_MAX, Remembered};
