//! Tests of the core on virtual time, against answers given by hand.

mod rig;

mod cancels;
mod leases;
mod retries;
mod sessions;
mod versions;
