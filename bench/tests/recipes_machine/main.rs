//! Reports of faults in disks, `io_uring` and the runtime, tried on real processes (docs/TESTING.md
//! names each). `LEASEHOLD_LONG=1` is the long form.

#[path = "../support/bare.rs"]
mod bare;
mod crowds;
mod disk;
mod refusals;
