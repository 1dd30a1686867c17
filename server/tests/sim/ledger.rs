//! What the nodes applied, by revision: one truth for all of them, across crashes.
//!
//! Whatever a node applies is committed, so another node, or the same one after a crash, must
//! never apply anything else at that revision. The ledger is the harness's and survives them all.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use leasehold_core::State;
use leasehold_protocol::event::Event;
use leasehold_protocol::ids::ShardId;
use leasehold_server::rt::sim::SimWorld;

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
        let (revision, digest) = (state.revision().0, state.digest());
        let first = *self.digests.borrow_mut().entry(revision).or_insert(digest);
        if first != digest {
            violations.add("G5", &format!("node {node} has another state at {revision}"));
        }
    }

    /// Puts events in as if they had been applied at these times.
    pub(crate) fn plant(&self, steps: Vec<(u64, Vec<Event>)>) {
        for (at_ns, step) in steps {
            let revision = step[0].revision.0;
            self.events.borrow_mut().insert(revision, step);
            self.times_ns.borrow_mut().insert(revision, at_ns);
        }
    }

    /// All events in order.
    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.borrow().values().flatten().cloned().collect()
    }

    /// When the first node applied a revision.
    pub(crate) fn applied_ns(&self, revision: u64) -> Option<u64> {
        self.times_ns.borrow().get(&revision).copied()
    }

    /// The events of one revision.
    pub(crate) fn at(&self, revision: u64) -> Vec<Event> {
        self.events.borrow().get(&revision).cloned().unwrap_or_default()
    }
}

fn hash(text: &str) -> u64 {
    let prime = 0x0000_0100_0000_01b3_u64;
    let start = 0xcbf2_9ce4_8422_2325_u64;
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(prime))
}
