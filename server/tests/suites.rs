//! openraft's conformance suite for runtimes, on both of ours.

use leasehold_server::rt::glommio::GlommioRt;
use leasehold_server::rt::sim::SimRt;
use openraft_rt::testing::Suite;

#[test]
fn glommio_passes_the_runtime_suite() {
    Suite::<GlommioRt>::test_all();
}

#[test]
fn the_simulator_passes_the_runtime_suite() {
    Suite::<SimRt>::test_all();
}
