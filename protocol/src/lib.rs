//! Leasehold's wire protocol: what travels between clients, nodes and peers, and nothing else.
//!
//! Owns the vocabulary (identifiers, limits, commands, outcomes, events, error codes), the frame
//! (length, header, checksum) and the sans-IO connection that both sides drive. It never opens a
//! socket, reads a clock or allocates more than a stated limit for bytes it has not yet received.
//!
//! Every body is an rkyv archive of flat types: explicit little-endian, 32-bit relative pointers,
//! no alignment, no recursion. A body is validated (`bytecheck`) only after its length and its
//! checksum were accepted. `docs/PROTOCOL.md` draws it byte by byte.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod backup;
pub mod birth;
pub mod codec;
pub mod command;
pub mod conn;
pub mod error;
pub mod event;
pub mod frame;
pub mod ids;
pub mod kind;
pub mod limits;
pub mod member;
pub mod outcome;
pub mod peer;
pub mod planted;
pub mod reply;
pub mod request;
pub mod shard;
pub mod watch;
