//! Reports of faults in queues and fencing tokens, tried on real processes (docs/TESTING.md names
//! each). `LEASEHOLD_LONG=1` is the long form.

mod answers;
#[path = "../support/bare.rs"]
mod bare;
mod draw;
mod expiry;
mod fence;
mod frames;
mod pipeline;
mod queue;
mod waits;
