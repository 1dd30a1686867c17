//! Whether this node lives and is ready, as its cores report it.
//!
//! Cores write reports into atomic cells and never wait. A report that stops coming is noticed by
//! the admin thread, which samples the cells once a second: so a stalled core makes its shards
//! unready without any clock here.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use leasehold_protocol::ids::NodeId;

/// Samples without a new report after which a shard counts as stalled.
const SILENT_SAMPLES_MAX: u32 = 3;
/// Entries that may be committed and not applied yet while a shard counts as ready.
pub const BEHIND_MAX: u64 = 1000;

/// What the node is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Recovering, or waiting for the cluster's birth.
    Starting = 0,
    /// A cluster exists that has no place for this data directory.
    WaitingForAdmission = 1,
    /// Serving.
    Running = 2,
    /// Handing over and stopping.
    Stopping = 3,
    /// Removed from the cluster: serves nobody.
    Removed = 4,
}

/// What a core says about one of its shards; to be repeated at least every second.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardReport {
    /// The leader, if one is known.
    pub leader: Option<NodeId>,
    /// This node leads.
    pub leads: bool,
    /// Raft's term.
    pub term: u64,
    /// The revision that was applied.
    pub applied_revision: u64,
    /// Entries known to be committed, but not applied yet.
    pub behind: u64,
    /// The shard has begun: its token base is applied.
    pub begun: bool,
    /// Last entry that was cut from the log.
    pub purged_index: u64,
}

#[derive(Debug, Default)]
struct Shard {
    leader: AtomicU64,
    leads: AtomicBool,
    term: AtomicU64,
    applied_revision: AtomicU64,
    behind: AtomicU64,
    begun: AtomicBool,
    purged_index: AtomicU64,
    reports: AtomicU64,
    reports_sampled: AtomicU64,
    silent_samples: AtomicU32,
}

/// The health cells of a process.
#[derive(Debug)]
pub struct Health {
    phase: AtomicU8,
    shards: Box<[Shard]>,
}

impl Health {
    pub(super) fn new(shards: u32) -> Self {
        let shards = (0..shards).map(|_| Shard::default()).collect();
        Self { phase: AtomicU8::new(Phase::Starting as u8), shards }
    }

    /// Says what the node is doing.
    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// What the node is doing.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Starting,
            1 => Phase::WaitingForAdmission,
            2 => Phase::Running,
            4 => Phase::Removed,
            _ => Phase::Stopping,
        }
    }

    /// Takes a core's report.
    pub fn report(&self, shard: u32, report: &ShardReport) {
        let cell = &self.shards[shard as usize];
        cell.leader.store(report.leader.map_or(0, |node| node.0), Ordering::Relaxed);
        cell.leads.store(report.leads, Ordering::Relaxed);
        cell.term.store(report.term, Ordering::Relaxed);
        cell.applied_revision.store(report.applied_revision, Ordering::Relaxed);
        cell.behind.store(report.behind, Ordering::Relaxed);
        cell.begun.store(report.begun, Ordering::Relaxed);
        cell.purged_index.store(report.purged_index, Ordering::Relaxed);
        cell.reports.fetch_add(1, Ordering::Release);
    }

    /// Notes which shards went without a report; called once a second.
    pub(super) fn sample(&self) {
        for shard in &self.shards {
            let reports = shard.reports.load(Ordering::Acquire);
            if reports == shard.reports_sampled.swap(reports, Ordering::Relaxed) {
                shard.silent_samples.fetch_add(1, Ordering::Relaxed);
            } else {
                shard.silent_samples.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Why the node is not ready, a line each; empty if it is.
    pub fn unready(&self) -> String {
        let phase = match self.phase() {
            Phase::Running => "",
            Phase::Starting => "starting\n",
            Phase::WaitingForAdmission => "waiting for admission\n",
            Phase::Stopping => "stopping\n",
            Phase::Removed => "removed from the cluster\n",
        };
        let mut reasons = phase.to_owned();
        for (number, shard) in self.shards.iter().enumerate() {
            if let Some(reason) = shard.unready() {
                let _ = writeln!(reasons, "shard {number}: {reason}");
            }
        }
        reasons
    }

    /// A family's value of every shard, in order.
    pub(super) fn values(&self, family: &ShardFamily) -> impl Iterator<Item = u64> {
        self.shards.iter().map(family.value)
    }
}

/// A metric that is kept per shard, as reported last.
pub(super) struct ShardFamily {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    value: fn(&Shard) -> u64,
}

/// Every such metric.
pub(super) const SHARD_FAMILIES: &[ShardFamily] = &[
    ShardFamily {
        name: "leasehold_shard_leader",
        help: "The shard's leader as this node knows it; 0 if unknown.",
        value: |shard| shard.leader.load(Ordering::Relaxed),
    },
    ShardFamily {
        name: "leasehold_shard_leads",
        help: "1 if this node leads the shard.",
        value: |shard| shard.leads.load(Ordering::Relaxed).into(),
    },
    ShardFamily {
        name: "leasehold_shard_term",
        help: "Raft's term of the shard.",
        value: |shard| shard.term.load(Ordering::Relaxed),
    },
    ShardFamily {
        name: "leasehold_shard_applied_revision",
        help: "The revision of the shard that this node has applied.",
        value: |shard| shard.applied_revision.load(Ordering::Relaxed),
    },
    ShardFamily {
        name: "leasehold_shard_behind_entries",
        help: "Entries known to be committed, but not applied yet.",
        value: |shard| shard.behind.load(Ordering::Relaxed),
    },
    ShardFamily {
        name: "leasehold_shard_purged_index",
        help: "Last entry cut from the shard's log; a node that lacks it needs a snapshot.",
        value: |shard| shard.purged_index.load(Ordering::Relaxed),
    },
];

impl Shard {
    fn unready(&self) -> Option<String> {
        if self.reports.load(Ordering::Acquire) == 0 {
            return Some("not recovered yet".to_owned());
        }
        if self.silent_samples.load(Ordering::Relaxed) >= SILENT_SAMPLES_MAX {
            return Some("its core does not report".to_owned());
        }
        if self.leader.load(Ordering::Relaxed) == 0 {
            return Some("no leader is known".to_owned());
        }
        if !self.begun.load(Ordering::Relaxed) {
            return Some("not begun yet".to_owned());
        }
        let behind = self.behind.load(Ordering::Relaxed);
        (behind > BEHIND_MAX).then(|| format!("{behind} entries behind"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: ShardReport = ShardReport {
        leader: Some(NodeId(2)),
        leads: false,
        term: 3,
        applied_revision: 9,
        behind: BEHIND_MAX,
        begun: true,
        purged_index: 5,
    };

    fn health(report: &ShardReport) -> Health {
        let health = Health::new(2);
        health.enter(Phase::Running);
        health.report(0, &GOOD);
        health.report(1, report);
        health
    }

    #[test]
    fn ready_needs_every_shard() {
        assert_eq!(health(&GOOD).unready(), "");
        for (report, reason) in [
            (ShardReport { leader: None, ..GOOD }, "shard 1: no leader is known\n"),
            (ShardReport { begun: false, ..GOOD }, "shard 1: not begun yet\n"),
            (ShardReport { behind: BEHIND_MAX + 1, ..GOOD }, "shard 1: 1001 entries behind\n"),
        ] {
            assert_eq!(health(&report).unready(), reason);
        }
        assert_eq!(
            Health::new(1).unready(),
            "starting\nshard 0: not recovered yet\n",
            "a fresh node is not ready"
        );
    }

    #[test]
    fn ready_needs_the_running_phase() {
        for (phase, text) in [
            (Phase::Starting, "starting\n"),
            (Phase::WaitingForAdmission, "waiting for admission\n"),
            (Phase::Stopping, "stopping\n"),
        ] {
            let health = health(&GOOD);
            health.enter(phase);
            assert_eq!((health.phase(), health.unready().as_str()), (phase, text));
        }
    }

    #[test]
    fn a_core_that_falls_silent_is_noticed_and_one_report_heals_it() {
        let health = health(&GOOD);
        health.sample();
        for _ in 0..SILENT_SAMPLES_MAX {
            assert_eq!(health.unready(), "");
            health.report(0, &GOOD);
            health.sample();
        }
        assert_eq!(health.unready(), "shard 1: its core does not report\n");
        health.report(1, &GOOD);
        health.sample();
        assert_eq!(health.unready(), "");
    }
}
