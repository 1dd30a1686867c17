//! The sans-IO connection: handshake, pairing of requests and replies, limits and time-outs, for
//! both sides of a client connection. It knows bytes, frames and time as an argument; it never
//! opens a socket and never reads a clock, so that any byte stream (TLS too) can carry it.
//!
//! A driver turns the same verbs for both sides:
//!
//! 1. `feed(bytes, now_ns)` what was read;
//! 2. `poll_event()` until there is none, and act on each event;
//! 3. `take_output(spare)` and write it: one write carries all frames of the turn;
//! 4. `tick(now_ns)` at `next_deadline()`, after feeding what can be read by then: a process that
//!    was stopped for a while must not take its own pause for the other side's silence.
//!
//! After an event `Closed` the driver writes what output is left and closes the stream. Nothing
//! that comes from the other side makes a connection panic or grow past its limits (G9).

mod client;
mod server;

use alloc::string::String;
use alloc::vec::Vec;

pub use self::client::{ClientConn, ClientEvent, RequestError};
pub use self::server::{Answer, ServerConn, ServerEvent};
use crate::command::Command;
use crate::error::ErrorCode;
use crate::frame::FrameError;
use crate::limits::{HANDSHAKE_MS_MAX, IDLE_MS_MAX, IN_FLIGHT_MAX, IN_FLIGHT_RESERVE};
use crate::reply::ErrorReply;
use crate::request::{CommandRequest, Request};

/// A spare output buffer larger than this is not kept.
const SPARE_KEPT_MAX: usize = 64 * 1024;
const NS_PER_MS: u64 = 1_000_000;

/// Why a connection ended; its text is for one line of a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The byte stream cannot be read any further.
    #[error("{0}")]
    Frame(FrameError),
    /// This side refused the other, or gave the connection up.
    #[error("{code}: {message}")]
    Refused {
        /// The code that the other side was told, where it could be told.
        code: ErrorCode,
        /// What was wrong.
        message: String,
    },
    /// The other side refused this one, or gave the connection up.
    #[error("the other side says {0}")]
    RefusedByPeer(ErrorReply),
    /// The handshake was not made in time.
    #[error("no handshake within {HANDSHAKE_MS_MAX} ms")]
    HandshakeTimeout,
    /// No whole frame came for `IDLE_MS_MAX`.
    #[error("no frame within {IDLE_MS_MAX} ms")]
    IdleTimeout,
}

/// What a connection has carried so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Whole, sound frames received.
    pub frames_in: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Frames put out.
    pub frames_out: u64,
    /// Bytes put out.
    pub bytes_out: u64,
}

/// How many requests may be in flight before this one is refused.
const fn in_flight_max(request: &Request) -> usize {
    match request {
        Request::Renew(_)
        | Request::Unwatch(_)
        | Request::Command(CommandRequest {
            command:
                Command::Cancel { .. }
                | Command::Release { .. }
                | Command::ReleaseOwn { .. }
                | Command::Close { .. },
            ..
        }) => IN_FLIGHT_MAX + IN_FLIGHT_RESERVE,
        _ => IN_FLIGHT_MAX,
    }
}

/// Swaps the output with an empty buffer that reuses the memory of `spare`.
fn swap_output(output: &mut Vec<u8>, mut spare: Vec<u8>) -> Vec<u8> {
    if spare.capacity() > SPARE_KEPT_MAX {
        spare = Vec::new();
    }
    spare.clear();
    core::mem::replace(output, spare)
}
