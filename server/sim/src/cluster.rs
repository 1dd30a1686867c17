//! The machines: each has a disk, a clock and a supervisor that starts its node again after
//! every death. The first are the cluster's founders; an operator sets up further ones.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::birth::BirthRecord;
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_server::disk::sim::{SimDisk, SimDiskConfig, Tear};
use leasehold_server::identity::Promise;
use leasehold_server::rt::sim::{DomainId, SimRt, SimWorld};
use leasehold_server::rt::sim_net::SimNet;
use openraft_rt::AsyncRuntime;

use crate::birth::{Outside, Promised};
use crate::bounds::Bounds;
use crate::coverage::{Coverage, Seen};
use crate::history::Violations;
use crate::ledger::Ledger;
use crate::node::{Node, Start, members, record};
use crate::params::{Params, draw_rate_ppm};
use crate::tables::{Table, Tables};
use crate::timeline::Timeline;

/// How a machine's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    /// The process alone: what it wrote is still there, and its streams are reset.
    Killed,
    /// The machine: what was not synced may be gone, and its peers hear nothing.
    PowerLost,
    /// The machine with its disk; what comes back is an empty one.
    Wiped,
}

/// One direction between two machines.
pub(crate) type Link = (DomainId, DomainId);

pub(crate) struct Machine {
    pub(crate) node: u64,
    pub(crate) domain: DomainId,
    disk: RefCell<SimDisk>,
    /// Failures and refusals of the disk when the node was started.
    troubles: Cell<(u64, u64)>,
    boots: Cell<u64>,
    death: Cell<Death>,
    down: Cell<Duration>,
    /// Its disk was replaced: it is no member any more and stays outside.
    wiped: Cell<bool>,
    /// Where it is configured to look for its cluster.
    looks_for: Vec<u64>,
    /// What its directory says of its cluster.
    promised: Promised,
    /// Its directory says that the node was removed: it does not start again.
    removed: Cell<bool>,
    /// It does not come back before the operator says so.
    lost: Cell<bool>,
    /// The end of the longest log of each shard that a process of its left.
    left: RefCell<BTreeMap<ShardId, u64>>,
    running: RefCell<Option<Node>>,
}

impl Machine {
    pub(crate) fn running(&self) -> Option<Node> {
        self.running.borrow().clone()
    }

    pub(crate) fn boots(&self) -> u64 {
        self.boots.get()
    }

    pub(crate) fn disk(&self) -> SimDisk {
        self.disk.borrow().clone()
    }

    pub(crate) fn is_wiped(&self) -> bool {
        self.wiped.get()
    }

    /// Its disk is empty, and of the nodes that it looks for none is a member any more: nobody tells
    /// it what has become of it.
    pub(crate) fn knows_nobody(&self, voters: &BTreeSet<u64>) -> bool {
        let gone = |node: &u64| *node == self.node || !voters.contains(node);
        self.is_wiped() && self.looks_for.iter().all(gone)
    }

    /// Its directory says that the node was removed.
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.get()
    }

    /// The operator cannot reach it for as long as he likes, or can again.
    pub(crate) fn lose(&self, lost: bool) {
        self.lost.set(lost);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get()
    }

    /// From now on nothing is wrong with the disk.
    pub(crate) fn mend_disk(&self, config: SimDiskConfig) {
        self.disk().heal();
        self.disk().set_config(config);
    }

    /// True if the node runs on although its disk failed under it. It may if the disk was full: a
    /// segment that is made ahead can wait.
    pub(crate) fn outlives_its_disk(&self) -> bool {
        self.running.borrow().is_some() && self.disk().failures() > self.troubles.get().0
    }

    /// The end of the longest log of a shard that it ever had.
    pub(crate) fn reached(&self, shard: ShardId) -> u64 {
        let left = self.left.borrow().get(&shard).copied().unwrap_or(0);
        let running = self.running.borrow();
        let has = running.as_ref().map(|node| node.shard(shard).group.status().last_index);
        left.max(has.unwrap_or(0))
    }

    /// Its process has ended.
    fn end(&self) {
        if let Some(node) = &*self.running.borrow() {
            for shard in &*node.shards {
                let reached = self.reached(shard.id);
                self.left.borrow_mut().insert(shard.id, reached);
            }
        }
        self.running.take();
    }

    fn disk_troubles(&self) -> (u64, u64) {
        (self.disk().failures(), self.disk().refusals())
    }
}

pub(crate) struct Cluster {
    pub(crate) world: SimWorld,
    pub(crate) net: SimNet,
    machines: RefCell<Vec<Rc<Machine>>>,
    /// What the cluster is born with.
    pub(crate) born: Rc<BirthRecord>,
    pub(crate) ledger: Rc<Ledger>,
    pub(crate) tables: Rc<Tables>,
    pub(crate) violations: Rc<Violations>,
    pub(crate) coverage: Rc<Coverage>,
    pub(crate) timeline: Rc<Timeline>,
    pub(crate) params: Params,
    /// How many faults each cut link has: it heals with the last of them.
    cuts: RefCell<BTreeMap<Link, u32>>,
    /// The newest leadership of each shard: term, node, and since when.
    led: RefCell<BTreeMap<ShardId, (u64, u64, u64)>>,
    pub(crate) bounds: Bounds,
    /// All faults are taken back.
    calm: Cell<bool>,
    /// Where clients look for nodes, besides those that nodes name.
    pub(crate) directory: Rc<RefCell<BTreeSet<u64>>>,
    /// An operator has asked for other members and does not know yet what became of it.
    pub(crate) changing: Cell<bool>,
}

impl Cluster {
    /// All founders, started for the first time; node 1 forms the groups.
    pub(crate) fn start(world: &SimWorld, params: &Params) -> Rc<Self> {
        let record = record(params.nodes, params.shards, params.token_base);
        Self::start_as(world, params, record)
    }

    /// The same of a cluster that is born so.
    pub(crate) fn start_as(world: &SimWorld, params: &Params, born: BirthRecord) -> Rc<Self> {
        let cluster = Rc::new(Self {
            world: world.clone(),
            net: SimNet::new(world, params.net),
            machines: RefCell::default(),
            born: Rc::new(born),
            ledger: Rc::default(),
            tables: Rc::default(),
            violations: Rc::default(),
            coverage: Rc::default(),
            timeline: Rc::new(Timeline::new()),
            params: *params,
            cuts: RefCell::default(),
            led: RefCell::default(),
            bounds: Bounds::default(),
            calm: Cell::new(false),
            directory: Rc::default(),
            changing: Cell::new(false),
        });
        cluster.publish();
        for _ in 0..cluster.born.members.len() {
            let record = (*cluster.born).clone();
            cluster.set_up(Some(Promise { record, founded: true, joined: false }));
        }
        cluster
    }

    /// A further machine, with a fresh disk: it waits for admission.
    pub(crate) fn set_up(self: &Rc<Self>, promise: Option<Promise>) -> Rc<Machine> {
        let (world, rng) = (&self.world, self.world.rng());
        let node = self.machines.borrow().len() as u64 + 1;
        let looks_for = self.voters().into_iter().collect();
        let machine = Rc::new(Machine {
            node,
            domain: world.add_domain(Duration::from_secs(rng.below(1_000_000)), draw_rate_ppm(rng)),
            disk: RefCell::new(SimDisk::new(rng.next(), self.params.disk)),
            troubles: Cell::default(),
            boots: Cell::new(0),
            death: Cell::new(Death::Killed),
            down: Cell::new(Duration::ZERO),
            wiped: Cell::new(false),
            looks_for,
            promised: Rc::new(RefCell::new(promise)),
            removed: Cell::new(false),
            lost: Cell::new(false),
            left: RefCell::default(),
            running: RefCell::default(),
        });
        self.machines.borrow_mut().push(machine.clone());
        drop(SimRt::spawn(self.clone().supervise(machine.clone())));
        machine
    }

    /// All machines there are.
    pub(crate) fn machines(&self) -> Vec<Rc<Machine>> {
        self.machines.borrow().clone()
    }

    pub(crate) fn machine(&self, node: u64) -> Rc<Machine> {
        self.machines.borrow()[node as usize - 1].clone()
    }

    /// The nodes that vote, by the newest table that any of them has.
    pub(crate) fn voters(&self) -> BTreeSet<u64> {
        let founders = || self.born.members.iter().map(|member| member.node.0).collect();
        self.tables.latest().map_or_else(founders, |table| table.voters)
    }

    /// Tells clients of all who vote now, as whoever keeps their configuration does.
    pub(crate) fn publish(&self) {
        self.directory.borrow_mut().extend(self.voters());
    }

    /// The machines of those nodes, less those whose disks were replaced.
    pub(crate) fn members(&self) -> Vec<Rc<Machine>> {
        let voters = self.voters().into_iter().map(|node| self.machine(node));
        voters.filter(|machine| !machine.is_wiped()).collect()
    }

    /// Waits until the groups are formed and led.
    pub(crate) async fn form(&self) {
        let first = loop {
            if let Some(node) = self.machine(1).running() {
                break node;
            }
            SimRt::sleep(Duration::from_millis(1)).await;
        };
        for shard in &*first.shards {
            let formed = shard.group.initialize(members(&self.born)).await;
            formed.expect("node 1 is a member");
        }
        while self.shards().any(|shard| self.leader(shard).is_none()) {
            SimRt::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Nothing passes the link until everyone who cut it heals it.
    pub(crate) fn cut_link(&self, link: Link) {
        *self.cuts.borrow_mut().entry(link).or_default() += 1;
        self.net.cut(link.0, link.1);
    }

    /// Takes one cut back.
    pub(crate) fn heal_link(&self, link: Link) {
        let mut cuts = self.cuts.borrow_mut();
        let left = cuts.get_mut(&link).expect("a link that is healed was cut");
        *left -= 1;
        if *left == 0 {
            cuts.remove(&link);
            self.net.heal(link.0, link.1);
        }
    }

    /// True from the end of the storm on.
    pub(crate) fn storm_is_over(&self) -> bool {
        self.calm.get()
    }

    /// Takes all cuts back: the storm is over.
    pub(crate) fn heal_links(&self) {
        self.calm.set(true);
        self.cuts.borrow_mut().clear();
        self.net.heal_all();
    }

    /// Ends a machine's process and starts it again after `down`.
    pub(crate) fn crash(&self, machine: &Machine, death: Death, down: Duration) {
        if !self.world.is_alive(machine.domain) {
            return;
        }
        machine.death.set(death);
        machine.down.set(down);
        if death != Death::Killed {
            self.net.power_off(machine.domain);
        }
        self.world.kill(machine.domain);
    }

    /// The same after `polls` more steps of the process, and while it is down, of its next start.
    /// Its peers hear of the end of its streams in any case.
    pub(crate) fn crash_soon(&self, machine: &Machine, death: Death, polls: u64, down: Duration) {
        if self.world.is_alive(machine.domain) {
            machine.death.set(death);
            machine.down.set(down);
        }
        self.world.kill_after_polls(machine.domain, polls);
    }

    /// Takes a member's disk away for good; false if too many would be gone, or might be once the
    /// members have changed.
    pub(crate) fn wipe(&self, machine: &Machine, down: Duration) -> bool {
        let voters = self.voters();
        let operation = self.tables.latest().and_then(|table| table.operation);
        let gone = voters.len() - self.members().len();
        let enough = 2 * (gone + 1) < voters.len() && voters.contains(&machine.node);
        let settled = !self.changing.get() && operation.is_none();
        let can = enough && settled && !machine.is_wiped() && self.world.is_alive(machine.domain);
        if can {
            machine.wiped.set(true);
            self.crash(machine, Death::Wiped, down);
        }
        can
    }

    /// The node cannot go on, as it says; a real process exits.
    fn exit(&self, machine: &Machine, why: &str) {
        self.timeline.note(format!("node {} exits: {why}", machine.node));
        let ((failures, refusals), before) = (machine.disk_troubles(), machine.troubles.get());
        if (failures, refusals) == before {
            self.violations.add("exit", &format!("node {}, without reason: {why}", machine.node));
        } else {
            let failed = failures > before.0;
            self.coverage.count(if failed { Seen::EioExit } else { Seen::EnospcExit });
        }
        let rng = self.world.rng();
        let death = if rng.chance(500) { Death::PowerLost } else { Death::Killed };
        self.crash(machine, death, Duration::from_millis(1 + rng.below(500)));
    }

    /// The machine that leads the shard now, as far as it knows; the newest if several think so.
    pub(crate) fn leader(&self, shard: ShardId) -> Option<Rc<Machine>> {
        let term = |machine: &&Rc<Machine>| {
            let leadership = machine.running()?.shard(shard).group.leadership()?;
            Some(leadership.term)
        };
        let machines = self.machines();
        let leading = machines.iter().filter(|machine| term(machine).is_some());
        leading.max_by_key(term).cloned()
    }

    /// The newest leader of the shard, if it led before this time.
    pub(crate) fn led_since(&self, shard: ShardId, true_ns: u64) -> Option<Rc<Machine>> {
        let (_, node, since_ns) = *self.led.borrow().get(&shard)?;
        (since_ns < true_ns).then(|| self.machine(node))
    }

    /// Since when the newest leader of the shard leads.
    pub(crate) fn led_ns(&self, shard: ShardId) -> Option<u64> {
        self.led.borrow().get(&shard).map(|(_, _, since_ns)| *since_ns)
    }

    /// All shards.
    pub(crate) fn shards(&self) -> impl Iterator<Item = ShardId> + use<> {
        (0..self.params.shards).map(ShardId)
    }

    /// True if all members run, have applied the same, and one leads each shard.
    pub(crate) fn agrees(&self) -> bool {
        self.shards().all(|shard| self.agrees_on(shard))
    }

    fn agrees_on(&self, shard: ShardId) -> bool {
        let look = |machine: &Rc<Machine>| {
            let node = machine.running()?;
            let shard = node.shard(shard);
            let status = shard.group.status();
            let state = shard.state.borrow();
            Some((status.applied_index, status.last_index, state.revision(), state.digest()))
        };
        let Some(looks) = self.members().iter().map(look).collect::<Option<Vec<_>>>() else {
            return false;
        };
        self.leader(shard).is_some()
            && looks[0].0 == looks[0].1
            && looks.iter().all(|look| *look == looks[0])
    }

    /// True if no change of the members is under way, every shard has the voters of the table, as
    /// each of them knows, and the removed nodes know that they are.
    pub(crate) fn is_settled(&self) -> bool {
        let Some(newest) = self.tables.latest() else { return true };
        let voters = newest.voters.iter().map(|node| NodeId(*node)).collect();
        let knows = |machine: &Rc<Machine>| {
            machine.running().is_some_and(|node| {
                Table::of(node.shard(ShardId(0)).state.borrow().members()) == newest
                    && node.shards.iter().all(|shard| shard.group.membership().are(&voters))
            })
        };
        let leaves = |node: &u64| {
            let machine = self.machine(*node);
            machine.running().is_none_or(|running| running.front.is_removed())
                || machine.knows_nobody(&newest.voters)
        };
        newest.operation.is_none()
            && self.members().iter().all(knows)
            && newest.removed.iter().all(leaves)
    }

    async fn supervise(self: Rc<Self>, machine: Rc<Machine>) {
        loop {
            machine.boots.set(machine.boots.get() + 1);
            machine.troubles.set(machine.disk_troubles());
            self.timeline.note(format!("node {} starts", machine.node));
            match self.world.spawn_in(machine.domain, self.start_of(&machine).run()).await {
                Ok(Ok(node)) => {
                    self.follow_leadership(&machine, &node);
                    machine.running.replace(Some(node));
                }
                Ok(Err(Outside::Failed(why))) => self.exit(&machine, &why),
                Ok(Err(Outside::Refused)) => {
                    self.mark_removed(&machine);
                    self.crash(&machine, Death::Killed, Duration::ZERO);
                }
                Err(_killed) => self.coverage.count(Seen::DiedInStart),
            }
            self.world.killed(machine.domain).await;
            machine.end();
            self.timeline.note(format!(
                "node {} is dead ({:?})",
                machine.node,
                machine.death.get()
            ));
            self.leave_disk(&machine);
            SimRt::sleep(machine.down.get()).await;
            while machine.lost.get() {
                SimRt::sleep(Duration::from_millis(10)).await;
            }
            if machine.is_removed() {
                return;
            }
            self.net.power_on(machine.domain);
            self.world.revive(machine.domain);
        }
    }

    fn mark_removed(&self, machine: &Machine) {
        self.timeline.note(format!("node {} knows that it was removed", machine.node));
        machine.removed.set(true);
    }

    /// What the death leaves on the disk.
    fn leave_disk(&self, machine: &Machine) {
        match machine.death.replace(Death::Killed) {
            Death::Killed => machine.disk().kill_process(),
            Death::PowerLost => {
                machine.disk().lose_power_at_random(Tear::Sector);
                self.coverage.count(Seen::PowerCutRecovered);
            }
            Death::Wiped => {
                let empty = SimDisk::new(self.world.rng().next(), self.params.disk);
                machine.disk.replace(empty);
            }
        }
    }

    fn start_of(self: &Rc<Self>, machine: &Rc<Machine>) -> Start {
        let (cluster, dying) = (self.clone(), machine.clone());
        let (marking, removed) = (self.clone(), machine.clone());
        Start {
            node: machine.node,
            wiped: machine.is_wiped(),
            born: self.born.clone(),
            looks_for: machine.looks_for.clone(),
            promised: machine.promised.clone(),
            boot: machine.boots.get(),
            disk: machine.disk(),
            host: self.net.host(machine.domain),
            snapshot_entries: self.params.snapshot_entries,
            watch_sizes: self.params.watch_sizes,
            ledger: self.ledger.clone(),
            tables: self.tables.clone(),
            violations: self.violations.clone(),
            coverage: self.coverage.clone(),
            exit: Rc::new(move |why| cluster.exit(&dying, why)),
            mark_removed: Rc::new(move || marking.mark_removed(&removed)),
        }
    }

    /// Notes who leads.
    fn follow_leadership(self: &Rc<Self>, machine: &Rc<Machine>, node: &Node) {
        for hosted in &*node.shards {
            let (cluster, number) = (self.clone(), machine.node);
            let (shard, group) = (hosted.id, hosted.group.clone());
            drop(self.world.spawn_in(machine.domain, async move {
                let mut before = None;
                loop {
                    let changed = group.leadership_changed();
                    let leads = group.leadership().map(|leadership| leadership.term);
                    if leads != before {
                        cluster.note_leader(shard, number, leads);
                        before = leads;
                    }
                    changed.await;
                }
            }));
        }
    }

    fn note_leader(&self, shard: ShardId, node: u64, term: Option<u64>) {
        let Some(term) = term else {
            self.timeline.note(format!("shard {shard}: node {node} does not lead any more"));
            return;
        };
        self.timeline.note(format!("shard {shard}: node {node} leads in term {term}"));
        let newest = self.led.borrow().get(&shard).map(|(term, node, _)| (*term, *node));
        if newest.is_none_or(|newest| newest < (term, node)) {
            self.led.borrow_mut().insert(shard, (term, node, self.world.now_ns()));
            if shard == ShardId(0) && newest.is_some_and(|(_, former)| former != node) {
                self.tables.driver_changed();
            }
        }
        let deposed = |machine: &&Rc<Machine>| {
            let leads = |node: Node| node.shard(shard).group.leadership().is_some();
            machine.node != node && machine.running().is_some_and(leads)
        };
        if self.machines().iter().any(|machine| deposed(&machine)) {
            self.coverage.count(Seen::LeaderReplaced);
        }
    }
}
