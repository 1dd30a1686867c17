//! Raft's own promises, checked while a run goes on: the nodes' logs are looked at again and again
//! and compared with each other and with all that was ever seen committed.
//!
//! - matching: entries of one index and one leader are equal, and so is all before them;
//! - safety: what was committed at an index once is what any node has committed there, ever after;
//! - completeness: a leader of a later term has every entry that was committed before;
//! - no node's term or applied position goes back while it runs.
//!
//! In this engine several nodes may lead in one term (term and node order together), so one leader
//! a term is not among them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::ShardId;
use leasehold_server::raft::EntryPrint;
use leasehold_server::rt::sim::SimRt;
use openraft_rt::AsyncRuntime;

use crate::cluster::{Cluster, Machine};
use crate::history::Violations;

/// How often all logs are looked at.
const EVERY: Duration = Duration::from_millis(250);

/// One node's log of one shard, as it is now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Look {
    pub(crate) node: u64,
    /// Starts of its process so far.
    pub(crate) boot: u64,
    pub(crate) term: u64,
    pub(crate) leads: bool,
    pub(crate) applied: u64,
    pub(crate) entries: Vec<EntryPrint>,
}

/// What was ever seen of one shard's logs.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Committed entries, with the lowest term in which a node knew that.
    committed: BTreeMap<u64, (EntryPrint, u64)>,
    /// Boot, term and applied position of each node.
    last: BTreeMap<u64, (u64, u64, u64)>,
    looks: u64,
}

impl Seen {
    /// Compares the logs of all running nodes.
    pub(crate) fn take(&mut self, shard: ShardId, looks: &[Look], violations: &Violations) {
        let wrong = |what: String| violations.add("raft", &format!("shard {shard}: {what}"));
        self.looks += 1;
        for (at, look) in looks.iter().enumerate() {
            self.goes_on(look, &wrong);
            self.commits(look, &wrong);
            looks[at + 1..].iter().for_each(|other| matching(look, other, &wrong));
        }
        looks.iter().filter(|look| look.leads).for_each(|look| self.complete(look, &wrong));
    }

    fn goes_on(&mut self, look: &Look, wrong: &impl Fn(String)) {
        let now = (look.boot, look.term, look.applied);
        let before = self.last.insert(look.node, now);
        let Some((boot, term, applied)) = before else { return };
        if boot == look.boot && (look.term < term || look.applied < applied) {
            wrong(format!("node {} went back from {before:?} to {now:?}", look.node));
        }
    }

    fn commits(&mut self, look: &Look, wrong: &impl Fn(String)) {
        for entry in look.entries.iter().filter(|entry| entry.index <= look.applied) {
            let known = self.committed.entry(entry.index).or_insert((*entry, look.term));
            known.1 = known.1.min(look.term);
            if known.0 != *entry {
                let node = look.node;
                wrong(format!("node {node} committed {entry:?}, somebody {:?}", known.0));
            }
        }
    }

    /// A leader has what was committed in terms before its own.
    fn complete(&self, look: &Look, wrong: &impl Fn(String)) {
        let Some(first) = look.entries.first() else { return };
        for (known, term) in self.committed.range(first.index..).map(|(_, known)| known) {
            let own = look.entries.get((known.index - first.index) as usize);
            if *term < look.term && own != Some(known) {
                let node = look.node;
                wrong(format!("node {node} leads with {own:?} in place of committed {known:?}"));
            }
        }
    }
}

/// The last entry that two logs share by name vouches for all before it.
fn matching(one: &Look, other: &Look, wrong: &impl Fn(String)) {
    let theirs: BTreeMap<u64, EntryPrint> =
        other.entries.iter().map(|entry| (entry.index, *entry)).collect();
    let mut shared = false;
    for entry in one.entries.iter().rev() {
        let Some(their) = theirs.get(&entry.index) else { continue };
        shared |= their.leader == entry.leader;
        if shared && their != entry {
            let (one, other) = (one.node, other.node);
            wrong(format!("nodes {one} and {other} have {entry:?} and {their:?}"));
        }
    }
}

/// All logs of a run.
#[derive(Debug, Default)]
pub(crate) struct Logs {
    shards: RefCell<BTreeMap<ShardId, Seen>>,
}

impl Logs {
    /// Looks at all nodes now.
    pub(crate) fn look(&self, cluster: &Cluster) {
        for shard in cluster.shards() {
            let machines = cluster.machines();
            let looks: Vec<_> =
                machines.iter().filter_map(|machine| look(machine, shard)).collect();
            let mut shards = self.shards.borrow_mut();
            shards.entry(shard).or_default().take(shard, &looks, &cluster.violations);
        }
    }

    /// Entries that were seen committed.
    pub(crate) fn committed(&self) -> u64 {
        self.shards.borrow().values().map(|seen| seen.committed.len() as u64).sum()
    }
}

/// Looks again and again, as long as the run lasts. One task.
pub(crate) async fn watch(cluster: Rc<Cluster>, logs: Rc<Logs>) {
    loop {
        logs.look(&cluster);
        cluster.bounds.look(&cluster);
        SimRt::sleep(EVERY).await;
    }
}

fn look(machine: &Rc<Machine>, shard: ShardId) -> Option<Look> {
    let running = machine.running()?;
    let group = &running.shard(shard).group;
    let status = group.status();
    Some(Look {
        node: machine.node,
        boot: machine.boots(),
        term: status.term,
        leads: group.leadership().is_some(),
        applied: status.applied_index,
        entries: group.log_prints(),
    })
}
