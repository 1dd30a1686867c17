//! Tests of the core on virtual time: against answers given by hand, and against the real state
//! machine over a bad network.

#[path = "../../../tests/support/authority.rs"]
mod authority;
mod rig;

mod cancels;
mod changes;
mod leases;
mod members;
mod retries;
mod sessions;
mod sim;
mod versions;
mod watches;
