//! What the nodes applied, by revision: one truth for all of them, across crashes.
//!
//! Whatever a node applies is committed, so another node, or the same one after a crash, must
//! never apply anything else at that revision. The ledger is the harness's and survives them all.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_bench::check::modes::Step;
use leasehold_bench::check::watch::Log;
use leasehold_bench::history::Applied;
use leasehold_core::State;
use leasehold_protocol::event::{EndReason, Event, EventKind};
use leasehold_protocol::ids::{Revision, ShardId};
use leasehold_server::rt::sim::SimWorld;

use crate::client::MODE_KEYS;
use crate::history::Violations;

/// One log a shard.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    shards: RefCell<BTreeMap<ShardId, Rc<ShardLedger>>>,
}

impl Ledger {
    pub(crate) fn shard(&self, shard: ShardId) -> Rc<ShardLedger> {
        self.shards.borrow_mut().entry(shard).or_default().clone()
    }

    /// Everything, for the checkers.
    pub(crate) fn records(&self) -> Vec<Applied> {
        let of_shard = |(shard, log): (&ShardId, &Rc<ShardLedger>)| {
            let (events, times) = (log.events.borrow(), log.times_ns.borrow());
            let record = |(revision, events): (&u64, &Vec<Event>)| {
                let plain: Vec<_> =
                    events.iter().filter(|event| !is_of_a_mode(&event.kind)).cloned().collect();
                // The nodes agree, as is checked when they apply: it is no single node's log.
                Applied::new(0, shard.0, times.get(revision).copied(), &plain)
            };
            let plain = |(_, events): &(&u64, &Vec<Event>)| {
                events.iter().any(|event| !is_of_a_mode(&event.kind))
            };
            events.iter().filter(plain).map(record).collect::<Vec<_>>()
        };
        self.shards.borrow().iter().flat_map(of_shard).collect()
    }

    /// What happened to the keys that are held in modes.
    pub(crate) fn mode_steps(&self) -> Vec<Step> {
        let of_shard = |(shard, log): (&ShardId, &Rc<ShardLedger>)| {
            let (events, times) = (log.events.borrow(), log.times_ns.borrow());
            let step = |(revision, events): (&u64, &Vec<Event>)| Step {
                shard: shard.0,
                revision: *revision,
                at_ns: times.get(revision).copied().unwrap_or(0),
                events: events
                    .iter()
                    .filter(|event| is_of_a_mode(&event.kind))
                    .map(|event| event.kind.clone())
                    .collect(),
            };
            events.iter().map(step).filter(|step| !step.events.is_empty()).collect::<Vec<_>>()
        };
        self.shards.borrow().iter().flat_map(of_shard).collect()
    }

    /// All events of keys, as watchers are told them.
    pub(crate) fn keyed(&self) -> Log {
        let mut log = Log::new();
        for (shard, known) in &*self.shards.borrow() {
            for (revision, events) in &*known.events.borrow() {
                let keyed = events.iter().map(|event| &event.kind);
                let keyed: Vec<_> = keyed.filter(|kind| kind.key().is_some()).cloned().collect();
                if !keyed.is_empty() {
                    log.insert((*shard, Revision(*revision)), keyed);
                }
            }
        }
        log
    }

    /// The most leases that a shard of each node ever had.
    pub(crate) fn leases_peaks(&self) -> BTreeMap<u64, u64> {
        let mut peaks = BTreeMap::new();
        for shard in self.shards.borrow().values() {
            for (node, leases) in &*shard.leases.borrow() {
                let peak = peaks.entry(*node).or_insert(0);
                *peak = (*peak).max(*leases);
            }
        }
        peaks
    }

    /// Leases that ended for want of renewals.
    pub(crate) fn expiries(&self) -> u64 {
        let expired = |event: &&Event| {
            matches!(event.kind, EventKind::LeaseEnded { reason: EndReason::LeaseExpired, .. })
        };
        let logs = self.shards.borrow();
        logs.values().map(|log| log.events().iter().filter(expired).count() as u64).sum()
    }

    /// All shards that applied anything.
    pub(crate) fn shards(&self) -> Vec<ShardId> {
        self.shards.borrow().keys().copied().collect()
    }
}

/// What was applied in one shard.
#[derive(Debug, Default)]
pub(crate) struct ShardLedger {
    events: RefCell<BTreeMap<u64, Vec<Event>>>,
    digests: RefCell<BTreeMap<u64, u64>>,
    /// The most leases that each node had.
    leases: RefCell<BTreeMap<u64, u64>>,
    /// How often each node's state was replaced by a snapshot.
    installs: RefCell<BTreeMap<u64, u64>>,
    /// True time at which the first node applied each revision with events.
    times_ns: RefCell<BTreeMap<u64, u64>>,
}

impl ShardLedger {
    /// Node `node` applied an entry.
    pub(crate) fn applied(
        &self,
        node: u64,
        state: &State,
        events: &[Event],
        violations: &Violations,
    ) {
        let world = SimWorld::current();
        let mut known = self.events.borrow_mut();
        for group in events.chunk_by(|a, b| a.revision == b.revision) {
            let revision = group[0].revision.0;
            let first = known.entry(revision).or_insert_with(|| {
                world.record(hash(&format!("{group:?}")));
                self.times_ns.borrow_mut().insert(revision, world.now_ns());
                group.to_vec()
            });
            if first != group {
                violations.add("G5", &format!("node {node} applied {group:?}, others {first:?}"));
            }
        }
        let mut leases = self.leases.borrow_mut();
        let peak = leases.entry(node).or_default();
        *peak = (*peak).max(state.leases_len() as u64);
        let (revision, digest) = (state.revision().0, state.digest());
        let first = *self.digests.borrow_mut().entry(revision).or_insert(digest);
        if first != digest {
            violations.add("G5", &format!("node {node} has another state at {revision}"));
        }
    }

    /// A snapshot replaced node `node`'s state.
    pub(crate) fn installed(&self, node: u64) {
        *self.installs.borrow_mut().entry(node).or_default() += 1;
    }

    /// How often that was so.
    pub(crate) fn installs(&self, node: u64) -> u64 {
        self.installs.borrow().get(&node).copied().unwrap_or(0)
    }

    /// The newest revision that any node has applied.
    pub(crate) fn latest(&self) -> u64 {
        self.digests.borrow().last_key_value().map_or(0, |(revision, _)| *revision)
    }

    /// All events in order.
    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.borrow().values().flatten().cloned().collect()
    }

    /// All events up to a revision, in order.
    pub(crate) fn until(&self, revision: u64) -> Vec<Event> {
        self.events.borrow().range(..=revision).flat_map(|(_, events)| events.clone()).collect()
    }

    /// When the first node applied a revision.
    pub(crate) fn applied_ns(&self, revision: u64) -> Option<u64> {
        self.times_ns.borrow().get(&revision).copied()
    }
}

fn is_of_a_mode(kind: &EventKind) -> bool {
    match kind {
        EventKind::LeaseOpened { .. }
        | EventKind::LeaseEnded { .. }
        | EventKind::QuarantineBegan { .. }
        | EventKind::QuarantineEnded => false,
        EventKind::Granted { key, .. }
        | EventKind::Queued { key, .. }
        | EventKind::WaitEnded { key, .. }
        | EventKind::Ended { key, .. }
        | EventKind::ForcedPending { key, .. }
        | EventKind::Vacant { key }
        | EventKind::Converted { key, .. }
        | EventKind::LimitChanged { key, .. }
        | EventKind::DelayBegan { key, .. }
        | EventKind::DelayEnded { key, .. }
        | EventKind::ValueChanged { key, .. }
        | EventKind::YieldAsked { key, .. } => key.starts_with(MODE_KEYS),
    }
}

fn hash(text: &str) -> u64 {
    let prime = 0x0000_0100_0000_01b3_u64;
    let start = 0xcbf2_9ce4_8422_2325_u64;
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(prime))
}
