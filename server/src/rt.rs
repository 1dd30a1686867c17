//! Everything that drives tasks: channels of one core, the glommio runtime, the simulator's
//! runtime, sockets, clocks and executors.
//!
//! This is the only module that knows glommio's executor, timers and sockets, so that it can be
//! exchanged. It knows nothing about Raft, locks or frames.

pub mod blocking;
pub mod channels;
pub mod clock;
pub mod executor;
pub mod glommio;
pub mod hop;
pub mod inbox;
pub mod instant;
pub mod net;
pub mod sim;
pub mod sim_net;
pub mod timed;
pub mod timeout;
