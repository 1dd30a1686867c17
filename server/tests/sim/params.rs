//! Everything that differs from run to run, drawn from the seed.

use std::time::Duration;

use leasehold_server::disk::sim::SimDiskConfig;
use leasehold_server::rt::sim::{SimRng, WorldConfig};
use leasehold_server::rt::sim_net::SimNetConfig;

/// Voters of every run.
pub(crate) const NODES: u64 = 3;

/// Shards of a run, at most.
const SHARDS_MAX: u64 = 4;

/// A clock's rate error, at most (DESIGN, G3).
pub(crate) const RATE_PPM_MAX: u64 = 500;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    pub(crate) clients: u64,
    pub(crate) keys: u64,
    /// Raft groups of every node.
    pub(crate) shards: u32,
    /// How long faults happen.
    pub(crate) storm: Duration,
    /// The longest pause between two faults.
    pub(crate) fault_pause_max: Duration,
    /// The longest usual hold.
    pub(crate) hold_ms_max: u64,
    pub(crate) snapshot_entries: u64,
    pub(crate) world: WorldConfig,
    pub(crate) net: SimNetConfig,
    pub(crate) disk: SimDiskConfig,
}

impl Params {
    pub(crate) fn draw(rng: &SimRng) -> Self {
        let micros = |min, spread| Duration::from_micros(min + rng.below(spread));
        let millis = |min, spread| Duration::from_millis(min + rng.below(spread));
        Self {
            clients: 4 + rng.below(10),
            keys: 2 + rng.below(8),
            shards: 1 + rng.below(SHARDS_MAX) as u32,
            storm: millis(6_000, 9_000),
            fault_pause_max: millis(300, 3_000),
            hold_ms_max: 1 + rng.below(60),
            snapshot_entries: 20 + rng.below(200),
            world: WorldConfig { poll_cost_max: micros(0, 15), timer_slack_max: micros(0, 1_500) },
            net: SimNetConfig {
                delay_min: micros(20, 100),
                delay_max: micros(150, 2_000),
                split_permille: rng.below(200),
            },
            disk: SimDiskConfig {
                sync_max: micros(50, 4_000),
                io_max: micros(0, 500),
                capacity: None,
            },
        }
    }
}

/// A session's TTL: short, so that leases expire within a run.
pub(crate) fn draw_ttl_ms(rng: &SimRng) -> u32 {
    1_500 + rng.below(4_000) as u32
}

/// A clock's rate error.
pub(crate) fn draw_rate_ppm(rng: &SimRng) -> i32 {
    rng.below(2 * RATE_PPM_MAX + 1) as i32 - RATE_PPM_MAX as i32
}
