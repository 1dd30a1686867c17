//! Reports of faults in queues and fencing tokens, tried on real processes (docs/TESTING.md names
//! each). `LEASEHOLD_LONG=1` is the long form.

#[path = "../support/bare.rs"]
mod bare;
mod fence;
mod pipeline;
mod queue;
