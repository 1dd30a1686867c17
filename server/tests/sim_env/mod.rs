//! The environment of the tests that run on simulated parts alone.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::time::Duration;

use leasehold_server::disk::sim::SimDisk;
use leasehold_server::env::Env;
use leasehold_server::rt::sim::{SimClock, SimRt, WorldConfig};
use leasehold_server::rt::sim_net::SimHost;
use openraft::AsyncRuntime;

/// Everything simulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SimEnv;

impl Env for SimEnv {
    type Rt = SimRt;
    type Clock = SimClock;
    type Disk = SimDisk;
    type Net = SimHost;
}

/// Runs `test` on a world of its own. Whatever still runs at its end is dropped, as by SIGKILL.
pub fn run<T>(seed: u64, test: impl Future<Output = T>) -> T {
    SimRt::with_config(seed, WorldConfig::default()).block_on(test)
}

/// Lets time pass in the simulated world.
pub async fn sleep_ms(ms: u64) {
    SimRt::sleep(Duration::from_millis(ms)).await;
}
