//! What a restore leaves in a fresh data directory for the birth of its cluster: how far the old
//! cluster's counters may have come, and how long its leases may still be relied on.
//!
//! Pure arithmetic; who reads the backup, or the surviving disk, is `crate::restore`.

use leasehold_core::backup::Contents;
use leasehold_core::lease::pad_ms;
use leasehold_protocol::birth::Restored;
use leasehold_protocol::limits::TTL_MS_MAX;
use leasehold_protocol::planted;

/// Lease ids and revisions go on this far above the old cluster's: more than it can have used since.
const COUNTER_STEP: u64 = 1 << 32;
/// Tokens rise slower than this, in bits per millisecond, however busy a shard is: a clock's tokens
/// (`unix milliseconds << 10`) do.
const TOKEN_RATE_BITS: u32 = 10;
/// By how much clocks of machines may differ, in milliseconds, without a token of the old cluster
/// coming out above the new ones. (That its clocks ran ahead of ours is refused in any case.)
const CLOCKS_DIFFER_MS: u64 = 60_000;
/// The highest base: the last tokens below the end of the counter are of no use.
const BASE_MAX: u64 = i64::MAX as u64 - 1;

/// Kept in the data directory until the birth, and left there.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestorePlan {
    /// The wall clock of the old cluster at its last sign of life, in Unix milliseconds.
    pub old_wall_ms: u64,
    /// Tokens start above this, and above what the clock says.
    pub token_floor: u64,
    /// For the birth record.
    pub restored: Restored,
}

/// Why there can be no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The clock is behind the old cluster's.
    #[error(
        "the wall clock ({wall_ms} ms since 1970) is behind that of the old cluster ({old_ms} ms); \
         tokens could start too low: set the clock"
    )]
    Clock {
        /// The clock, in Unix milliseconds.
        wall_ms: u64,
        /// The old cluster's, in Unix milliseconds.
        old_ms: u64,
    },
    /// A counter of the old cluster is at its end.
    #[error("a counter of the old cluster is at its end; nothing can start above it")]
    Exhausted,
}

impl RestorePlan {
    /// From what is known of the old cluster. `silent_ms`: for how long it has answered nobody, by
    /// the operator's word.
    pub fn new(old: &Contents, wall_ms: u64, silent_ms: u64) -> Result<Self, PlanError> {
        let old_wall_ms = old.header.wall_ms;
        if wall_ms < old_wall_ms {
            return Err(PlanError::Clock { wall_ms, old_ms: old_wall_ms });
        }
        let shards = || old.shards.iter().map(|shard| shard.about);
        let last_token = shards().map(|about| about.last_token.0).max().unwrap_or(0);
        let last_lease = shards().map(|about| about.last_lease.0).max().unwrap_or(0);
        let revision = shards().map(|about| about.revision.0).max().unwrap_or(0);
        let since_ms = (wall_ms - old_wall_ms).saturating_add(CLOCKS_DIFFER_MS);
        let since_max = since_ms.min(u64::MAX >> TOKEN_RATE_BITS) << TOKEN_RATE_BITS;
        // Planted (G2): what the old cluster granted after the backup is not counted.
        let since_max = if planted!("tokens-after-the-backup") { 0 } else { since_max };
        let token_floor = last_token.saturating_add(since_max).min(BASE_MAX);
        if last_token >= BASE_MAX || last_lease.max(revision) >= 1 << 61 {
            return Err(PlanError::Exhausted);
        }
        let wait_ms = u64::from(TTL_MS_MAX + pad_ms(TTL_MS_MAX));
        let restored = Restored {
            from: old.header.cluster,
            lease_base: last_lease + COUNTER_STEP,
            revision_base: revision + COUNTER_STEP,
            quarantine_ms: wait_ms.saturating_sub(silent_ms) as u32,
        };
        Ok(Self { old_wall_ms, token_floor, restored })
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::backup::ShardContents;
    use leasehold_protocol::backup::BackupHeader;
    use leasehold_protocol::ids::{ClusterId, LeaseId, Revision, ShardId, Token};
    use leasehold_protocol::reply::BackupShard;

    use super::*;

    const OLD_MS: u64 = 1_000_000;

    fn old(tokens: [u64; 2]) -> Contents {
        let shards = [0, 1].map(|shard| ShardContents {
            about: BackupShard {
                shard: ShardId(shard),
                revision: Revision(100 + u64::from(shard)),
                last_token: Token(tokens[shard as usize]),
                last_lease: LeaseId(50 - u64::from(shard)),
                leases: 3,
                keys: 2,
            },
            holds: 1,
            waiters: 1,
        });
        let cluster = ClusterId([3; 16]);
        let header = BackupHeader { cluster, wall_ms: OLD_MS, shards: 2, key_hash: 1 };
        Contents { header, shards: shards.to_vec() }
    }

    #[test]
    fn every_counter_goes_on_above_the_highest_of_all_shards() {
        let plan = RestorePlan::new(&old([7, 9_000]), OLD_MS, 0).unwrap();
        assert!(plan.token_floor > 9_000 && plan.old_wall_ms == OLD_MS);
        assert_eq!(plan.restored.lease_base, 50 + COUNTER_STEP);
        assert_eq!(plan.restored.revision_base, 101 + COUNTER_STEP);
        assert_eq!(plan.restored.quarantine_ms, 600_600);
    }

    /// A cluster whose counter is ahead of the clock (`token-floor`) went on after the backup.
    #[test]
    fn a_counter_ahead_of_the_clock_is_outrun_as_well() {
        let ahead = 1 << 60;
        let day_ms = 86_400_000;
        let plan = RestorePlan::new(&old([ahead, 0]), OLD_MS + day_ms, 0).unwrap();
        assert!(plan.token_floor > ahead + (day_ms << 10));
        let plan = RestorePlan::new(&old([BASE_MAX - 1, 0]), OLD_MS + day_ms, 0).unwrap();
        assert_eq!(plan.token_floor, BASE_MAX);
        let none = RestorePlan::new(&old([BASE_MAX, 0]), OLD_MS, 0);
        assert_eq!(none, Err(PlanError::Exhausted));
    }

    #[test]
    fn the_operators_word_shortens_the_wait() {
        for (silent_ms, wait_ms) in [(1, 600_599), (598_600, 2_000), (600_600, 0), (u64::MAX, 0)] {
            let plan = RestorePlan::new(&old([1, 1]), OLD_MS, silent_ms).unwrap();
            assert_eq!(plan.restored.quarantine_ms, wait_ms);
        }
    }

    #[test]
    fn a_clock_behind_the_old_one_is_refused() {
        let error = RestorePlan::new(&old([1, 1]), OLD_MS - 1, 0).unwrap_err();
        assert_eq!(error, PlanError::Clock { wall_ms: OLD_MS - 1, old_ms: OLD_MS });
    }
}
