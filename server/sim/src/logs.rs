//! Raft's own promises, checked while a run goes on: the nodes' logs are looked at again and again
//! and compared with each other and with all that was ever seen committed.
//!
//! - matching: entries of one index and one leader are equal, and so is all before them;
//! - safety: what was committed at an index once is what any node has committed there, ever after;
//! - completeness: a leader of a later term has every entry that was committed before;
//! - no node's term or applied position goes back while it runs;
//! - a node votes only where the member table lets it, and it gets its first vote in a shard when it
//!   has the log;
//! - a leader votes in its own configuration, and what it applied under one that is settled is in
//!   the logs of a majority of that one's voters, as far as they run.
//!
//! In this engine several nodes may lead in one term (term and node order together), so one leader
//! a term is not among them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_server::raft::EntryPrint;
use leasehold_server::rt::sim::SimRt;
use openraft_rt::AsyncRuntime;

use crate::cluster::{Cluster, Machine};
use crate::history::Violations;

/// How often all logs are looked at.
const EVERY: Duration = Duration::from_millis(250);

/// A node that lacks more than this had not caught up when it got its vote: what the server allows
/// (200), and what may be appended between its look and the one here.
const LAG_MAX: u64 = 400;

/// What is known of a shard's nodes besides their logs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes {
    /// The founders, and all that any member table lets vote.
    pub(crate) may_vote: BTreeSet<u64>,
    /// The end of the longest log that each node ever had.
    pub(crate) reached: BTreeMap<u64, u64>,
}

/// One node's log of one shard, as it is now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Look {
    pub(crate) node: u64,
    /// Starts of its process so far.
    pub(crate) boot: u64,
    pub(crate) term: u64,
    pub(crate) leads: bool,
    pub(crate) applied: u64,
    /// The index of its last entry.
    pub(crate) last: u64,
    pub(crate) entries: Vec<EntryPrint>,
    /// The sets of voters, as its log has them.
    pub(crate) voters: Vec<BTreeSet<u64>>,
    /// That is committed, as far as it knows.
    pub(crate) settled: bool,
}

impl Look {
    /// It runs, and its log has something else, or nothing, in the entry's place.
    fn lacks(&self, entry: &EntryPrint) -> bool {
        let own = self.entries.iter().find(|own| own.index == entry.index);
        self.last < entry.index || own.is_some_and(|own| own != entry)
    }
}

/// What was ever seen of one shard's logs.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Committed entries, with the lowest term in which a node knew that.
    committed: BTreeMap<u64, (EntryPrint, u64)>,
    /// Boot, term and applied position of each node.
    last: BTreeMap<u64, (u64, u64, u64)>,
    /// The settled voters of each leader, and the end of its log when they were first seen.
    settled: BTreeMap<u64, (Vec<BTreeSet<u64>>, u64)>,
    /// The nodes that were seen to vote.
    voted: BTreeSet<u64>,
    /// The end of the longest log of a leader at the last look.
    led_to: u64,
    looks: u64,
    /// How often a majority was looked for.
    pub(crate) majorities: u64,
    /// How many nodes got their vote after the first look.
    pub(crate) votes: u64,
}

impl Seen {
    /// Compares the logs of all running nodes.
    pub(crate) fn take(
        &mut self,
        shard: ShardId,
        looks: &[Look],
        nodes: &Nodes,
        violations: &Violations,
    ) {
        let wrong = |what: String| violations.add("raft", &format!("shard {shard}: {what}"));
        self.votes(looks, nodes, &wrong);
        self.looks += 1;
        for (at, look) in looks.iter().enumerate() {
            self.goes_on(look, &wrong);
            self.commits(look, &wrong);
            looks[at + 1..].iter().for_each(|other| matching(look, other, &wrong));
        }
        for look in looks.iter().filter(|look| look.leads) {
            self.complete(look, &wrong);
            self.majority(look, looks, &wrong);
        }
    }

    /// Who votes for the first time may, and had caught up by the last look.
    fn votes(&mut self, looks: &[Look], nodes: &Nodes, wrong: &impl Fn(String)) {
        let voters: BTreeSet<u64> =
            looks.iter().flat_map(|look| look.voters.iter().flatten().copied()).collect();
        for node in voters {
            if !self.voted.insert(node) || self.looks == 0 {
                continue;
            }
            self.votes += 1;
            if !nodes.may_vote.contains(&node) {
                wrong(format!("node {node} votes, and no operation says so"));
            }
            let reached = nodes.reached.get(&node).copied().unwrap_or(0);
            if reached + LAG_MAX < self.led_to {
                let led_to = self.led_to;
                wrong(format!(
                    "node {node} votes with a log up to {reached}, leaders' to {led_to}"
                ));
            }
        }
        let leaders = looks.iter().filter(|look| look.leads);
        self.led_to = leaders.map(|look| look.last).max().unwrap_or(0);
    }

    /// What a leader applied after its configuration was settled is where that one says.
    fn majority(&mut self, look: &Look, looks: &[Look], wrong: &impl Fn(String)) {
        let node = look.node;
        // Where only one node votes it is led by that node until another one has taken over.
        let several = look.voters.iter().all(|set| set.len() > 1);
        if several && !look.voters.iter().any(|set| set.contains(&node)) {
            wrong(format!("node {node} leads voters {:?}", look.voters));
        }
        if !look.settled {
            self.settled.remove(&node);
            return;
        }
        let (voters, since) =
            self.settled.entry(node).or_insert_with(|| (look.voters.clone(), look.last));
        if *voters != look.voters {
            (*voters, *since) = (look.voters.clone(), look.last);
        }
        let applied = look.entries.iter().find(|entry| entry.index == look.applied);
        let Some(applied) = applied.filter(|applied| applied.index > *since) else { return };
        for set in &look.voters {
            let lack = |other: &&Look| set.contains(&other.node) && other.lacks(applied);
            let lacking: Vec<u64> = looks.iter().filter(lack).map(|other| other.node).collect();
            if lacking.len() > (set.len() - 1) / 2 {
                wrong(format!("node {node} applied {applied:?}; of {set:?} {lacking:?} lack it"));
            }
            self.majorities += 1;
        }
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
        let mut may_vote = cluster.tables.may_vote();
        may_vote.extend(cluster.born.members.iter().map(|member| member.node.0));
        for shard in cluster.shards() {
            let machines = cluster.machines();
            let looks: Vec<_> =
                machines.iter().filter_map(|machine| look(machine, shard)).collect();
            let reached = machines.iter().map(|machine| (machine.node, machine.reached(shard)));
            let nodes = Nodes { may_vote: may_vote.clone(), reached: reached.collect() };
            let mut shards = self.shards.borrow_mut();
            shards.entry(shard).or_default().take(shard, &looks, &nodes, &cluster.violations);
        }
    }

    /// How often a node's first vote was compared with the table and with its log.
    pub(crate) fn votes(&self) -> u64 {
        self.shards.borrow().values().map(|seen| seen.votes).sum()
    }

    /// How often an applied entry was looked for at a majority.
    pub(crate) fn majorities(&self) -> u64 {
        self.shards.borrow().values().map(|seen| seen.majorities).sum()
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
    let (status, membership) = (group.status(), group.membership());
    let nodes = |set: &BTreeSet<NodeId>| set.iter().map(|node| node.0).collect();
    Some(Look {
        node: machine.node,
        boot: machine.boots(),
        term: status.term,
        leads: group.leadership().is_some(),
        applied: status.applied_index,
        // Nobody knows what was on a disk that is gone.
        last: if machine.is_wiped() { u64::MAX } else { status.last_index },
        entries: group.log_prints(),
        voters: membership.voters.iter().map(nodes).collect(),
        settled: membership.committed,
    })
}
