//! Everything that differs from run to run, drawn from the seed.

use std::time::Duration;

use leasehold_server::disk::sim::SimDiskConfig;
use leasehold_server::rt::sim::{SimRng, WorldConfig};
use leasehold_server::rt::sim_net::SimNetConfig;
use leasehold_server::watch::Sizes;

/// Shards of a run, at most.
const SHARDS_MAX: u64 = 4;

/// A clock's rate error, at most (DESIGN, G3).
pub(crate) const RATE_PPM_MAX: u64 = 500;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    /// Voters: 1, 3 or 5.
    pub(crate) nodes: u64,
    pub(crate) clients: u64,
    pub(crate) keys: u64,
    /// Raft groups of every node.
    pub(crate) shards: u32,
    /// How long faults happen.
    pub(crate) storm: Duration,
    /// The longest pause between two faults.
    pub(crate) fault_pause_max: Duration,
    /// The shortest TTL of a session.
    pub(crate) ttl_ms_min: u32,
    /// By how much TTLs differ.
    pub(crate) ttl_ms_spread: u32,
    /// The longest usual hold.
    pub(crate) hold_ms_max: u64,
    pub(crate) snapshot_entries: u64,
    /// Small in most runs, so that watches are cut off, fall behind and lose their history.
    pub(crate) watch_sizes: Sizes,
    /// An operator changes the members.
    pub(crate) operates: bool,
    /// Backups are taken, and in the end another cluster is born from the last one.
    pub(crate) backs_up: bool,
    /// Far ahead of the clock in some runs, as an operator may have stated.
    pub(crate) token_base: u64,
    pub(crate) world: WorldConfig,
    pub(crate) net: SimNetConfig,
    pub(crate) disk: SimDiskConfig,
}

impl Params {
    pub(crate) fn draw(rng: &SimRng) -> Self {
        let micros = |min, spread| Duration::from_micros(min + rng.below(spread));
        let millis = |min, spread| Duration::from_millis(min + rng.below(spread));
        Self {
            nodes: [1, 3, 3, 3, 3, 3, 5, 5][rng.below(8) as usize],
            clients: 3 + rng.below(8),
            keys: 1 + rng.below(8),
            shards: if rng.chance(500) { 1 } else { 2 + rng.below(SHARDS_MAX - 1) as u32 },
            storm: millis(4_000, 9_000),
            fault_pause_max: millis(200, 2_000),
            ttl_ms_min: 1_000 + rng.below(1_000) as u32,
            ttl_ms_spread: 1 + rng.below(4_000) as u32,
            hold_ms_max: 1 + rng.below(60),
            // Few in some runs, so that a follower that lags is soon too far behind for the log.
            snapshot_entries: if rng.chance(400) { 4 + rng.below(16) } else { 20 + rng.below(200) },
            watch_sizes: draw_watch_sizes(rng),
            operates: rng.chance(600),
            backs_up: rng.chance(500),
            token_base: if rng.chance(300) { 1 << 55 } else { 1 << 20 },
            world: WorldConfig { poll_cost_max: micros(0, 15), timer_slack_max: micros(0, 1_500) },
            net: SimNetConfig {
                delay_min: micros(20, 100),
                delay_max: micros(150, 2_000),
                split_permille: rng.below(200),
            },
            disk: SimDiskConfig {
                sync_max: micros(50, 4_000),
                io_max: micros(0, 500),
                ..SimDiskConfig::default()
            },
        }
    }

    /// A session's TTL: short, so that leases expire within a run.
    pub(crate) fn draw_ttl_ms(&self, rng: &SimRng) -> u32 {
        self.ttl_ms_min + rng.below(u64::from(self.ttl_ms_spread)) as u32
    }
}

/// An event costs about 300 bytes.
fn draw_watch_sizes(rng: &SimRng) -> Sizes {
    if rng.chance(300) {
        return Sizes::of(1);
    }
    Sizes {
        history: 1_000 + rng.below(100_000) as usize,
        frame: 300 + rng.below(4_000) as usize,
        replay: 1_000 + rng.below(10_000) as usize,
        pending: 1_000 + rng.below(10_000) as usize,
        page: 1 + rng.below(4) as usize,
    }
}

/// A clock's rate error.
pub(crate) fn draw_rate_ppm(rng: &SimRng) -> i32 {
    rng.below(2 * RATE_PPM_MAX + 1) as i32 - RATE_PPM_MAX as i32
}
