<<<<<<< HEAD
//! (stand-in)
#![no_std]
#![allow(missing_docs)]
extern crate alloc;
use alloc::vec::Vec;
use leasehold_protocol::codec;
use leasehold_protocol::command::Command;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::{Revision, ShardId, Token};
use leasehold_protocol::outcome::Outcome;
use rkyv::{Archive, Deserialize, Serialize};

#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Batch {
    pub wall_ms: u64,
    pub commands: Vec<Command>,
}
#[derive(Debug)]
pub struct DecodeError;
impl core::fmt::Display for DecodeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("bad batch")
    }
}
impl core::error::Error for DecodeError {}
impl Batch {
    pub fn encode(&self) -> Vec<u8> {
        codec::encode(self)
    }
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        codec::decode(bytes).map_err(|_| DecodeError)
    }
}
#[derive(Clone, Debug)]
pub struct State {
    pub shard: ShardId,
    pub count: u64,
}
impl State {
    pub fn new(shard: ShardId) -> Self {
        Self { shard, count: 0 }
    }
    pub fn apply(&mut self, _wall_ms: u64, _c: &Command, _e: &mut Vec<Event>) -> Outcome {
        self.count += 1;
        Outcome::Begun { revision: Revision(self.count) }
    }
    pub fn revision(&self) -> Revision {
        Revision(self.count)
    }
    pub fn digest(&self) -> u64 {
        self.count
    }
    pub fn last_token(&self) -> Token {
        Token(0)
    }
}
pub mod snapshot {
    use super::*;
    pub struct Encoder(Option<u64>);
    impl Encoder {
        pub fn new(state: &State) -> Self {
            Self(Some(state.count))
        }
        pub fn next_chunk(&mut self) -> Option<Vec<u8>> {
            self.0.take().map(|c| c.to_le_bytes().to_vec())
        }
    }
    pub struct Decoder(Vec<u8>, ShardId);
    #[derive(Debug)]
    pub struct SnapshotError;
    impl core::fmt::Display for SnapshotError {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            f.write_str("bad snapshot")
        }
    }
    impl core::error::Error for SnapshotError {}
    impl Decoder {
        pub fn new(shard: ShardId) -> Self {
            Self(Vec::new(), shard)
        }
        pub fn feed(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
            self.0.extend_from_slice(bytes);
            Ok(())
        }
        pub fn finish(self) -> Result<State, SnapshotError> {
            let count = u64::from_le_bytes(self.0.try_into().map_err(|_| SnapshotError)?);
            Ok(State { shard: self.1, count })
        }
    }
}
=======
//! Leasehold's deterministic state machine: leases, holds, queues, fencing tokens.
//!
//! `State::apply(command)` gives an outcome and events, the same on every node that applies the
//! same log. The crate owns what is replicated, its snapshot format and its invariants, the
//! arithmetic of lease time, and the timing wheel. It does no I/O, reads no clock, draws no random
//! number and walks no unordered table; `no_std` keeps most of that out by construction.
//!
//! Where to start reading: `state` (the door), `acquire`, `release` and `handover` (the lock
//! itself), `retry` and `memory` (one execution per number), `lifecycle` (leases).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod acquire;
mod batch;
mod blob;
mod cow;
mod digest;
mod handover;
mod hash;
pub mod invariants;
pub mod lease;
mod lifecycle;
mod memory;
mod release;
mod retry;
pub mod snapshot;
mod state;
mod table;
mod view;
pub mod wheel;

pub use batch::{BATCH_VERSION, Batch, BatchWriter, DecodeError};
pub use state::State;
pub use view::{LeaseView, PAGE_BYTES_MAX};
>>>>>>> core
