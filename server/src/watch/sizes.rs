//! How much is kept for watches, and how much is told at once. A server always takes `Sizes::of`;
//! tests take less, so that everything that these bounds lead to happens.

use leasehold_protocol::limits::{HISTORY_BYTES, HISTORY_SHARE_MIN, PAGE_LEN_MAX};

/// See the module. All but `page` are in bytes, about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// What a shard keeps of past events.
    pub history: usize,
    /// Events that one frame carries.
    pub frame: usize,
    /// Past events that one answer carries; for more the client asks again.
    pub replay: usize,
    /// What one watch may have waiting between two turns; beyond it the client asks again, and is
    /// told from the history.
    pub pending: usize,
    /// Keys of a page of the state.
    pub page: usize,
}

impl Sizes {
    /// Of one of so many shards.
    pub fn of(shards_total: u32) -> Self {
        Self {
            history: (HISTORY_BYTES / shards_total.max(1) as usize).max(HISTORY_SHARE_MIN),
            frame: 128 * 1024,
            replay: 1024 * 1024,
            pending: 2 * 1024 * 1024,
            page: PAGE_LEN_MAX as usize,
        }
    }
}
