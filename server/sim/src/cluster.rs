//! The machines: each has a disk, a clock and a supervisor that starts its node again after
//! every death.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::ShardId;
use leasehold_server::disk::sim::{SimDisk, SimDiskConfig, Tear};
use leasehold_server::rt::sim::{DomainId, SimRt, SimWorld};
use leasehold_server::rt::sim_net::SimNet;
use openraft_rt::AsyncRuntime;

use crate::bounds::Bounds;
use crate::coverage::{Coverage, Seen};
use crate::history::Violations;
use crate::ledger::Ledger;
use crate::node::{Node, Start, disk_id, members};
use crate::params::{Params, draw_rate_ppm};
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

    fn disk_troubles(&self) -> (u64, u64) {
        (self.disk().failures(), self.disk().refusals())
    }
}

pub(crate) struct Cluster {
    pub(crate) world: SimWorld,
    pub(crate) net: SimNet,
    pub(crate) machines: Vec<Rc<Machine>>,
    pub(crate) ledger: Rc<Ledger>,
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
}

impl Cluster {
    /// All machines, started for the first time; node 1 forms the groups.
    pub(crate) fn start(world: &SimWorld, params: &Params) -> Rc<Self> {
        let rng = world.rng();
        let net = SimNet::new(world, params.net);
        let machine = |node| {
            Rc::new(Machine {
                node,
                domain: world
                    .add_domain(Duration::from_secs(rng.below(1_000_000)), draw_rate_ppm(rng)),
                disk: RefCell::new(SimDisk::new(rng.next(), params.disk)),
                troubles: Cell::default(),
                boots: Cell::new(0),
                death: Cell::new(Death::Killed),
                down: Cell::new(Duration::ZERO),
                wiped: Cell::new(false),
                running: RefCell::default(),
            })
        };
        let machines: Vec<_> = (1..=params.nodes).map(machine).collect();
        let cluster = Rc::new(Self {
            world: world.clone(),
            net,
            machines,
            ledger: Rc::default(),
            violations: Rc::default(),
            coverage: Rc::default(),
            timeline: Rc::new(Timeline::new()),
            params: *params,
            cuts: RefCell::default(),
            led: RefCell::default(),
            bounds: Bounds::default(),
            calm: Cell::new(false),
        });
        for machine in &cluster.machines {
            drop(SimRt::spawn(cluster.clone().supervise(machine.clone())));
        }
        cluster
    }

    /// Waits until the groups are formed and led.
    pub(crate) async fn form(&self) {
        let first = loop {
            if let Some(node) = self.machines[0].running() {
                break node;
            }
            SimRt::sleep(Duration::from_millis(1)).await;
        };
        for shard in &*first.shards {
            let formed = shard.group.initialize(members(self.params.nodes)).await;
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

    /// Takes a machine's disk away for good; false if too many would be gone.
    pub(crate) fn wipe(&self, machine: &Machine, down: Duration) -> bool {
        let gone = self.machines.iter().filter(|machine| machine.is_wiped()).count();
        let enough = 2 * (gone + 1) < self.machines.len();
        let can = enough && !machine.is_wiped() && self.world.is_alive(machine.domain);
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
        let leading = self.machines.iter().filter(|machine| term(machine).is_some());
        leading.max_by_key(term).cloned()
    }

    /// The newest leader of the shard, if it led before this time.
    pub(crate) fn led_since(&self, shard: ShardId, true_ns: u64) -> Option<Rc<Machine>> {
        let (_, node, since_ns) = *self.led.borrow().get(&shard)?;
        (since_ns < true_ns).then(|| self.machines[node as usize - 1].clone())
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
        let members = self.machines.iter().filter(|machine| !machine.is_wiped());
        let Some(looks) = members.map(look).collect::<Option<Vec<_>>>() else {
            return false;
        };
        self.leader(shard).is_some()
            && looks[0].0 == looks[0].1
            && looks.iter().all(|look| *look == looks[0])
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
                Ok(Err(why)) => self.exit(&machine, &why),
                Err(_killed) => self.coverage.count(Seen::DiedInStart),
            }
            self.world.killed(machine.domain).await;
            machine.running.take();
            self.timeline.note(format!(
                "node {} is dead ({:?})",
                machine.node,
                machine.death.get()
            ));
            self.leave_disk(&machine);
            SimRt::sleep(machine.down.get()).await;
            self.net.power_on(machine.domain);
            self.world.revive(machine.domain);
        }
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
        Start {
            node: machine.node,
            nodes: self.params.nodes,
            disk_id: disk_id(machine.node, machine.is_wiped()),
            boot: machine.boots.get(),
            disk: machine.disk(),
            host: self.net.host(machine.domain),
            shards: self.params.shards,
            snapshot_entries: self.params.snapshot_entries,
            watch_sizes: self.params.watch_sizes,
            ledger: self.ledger.clone(),
            violations: self.violations.clone(),
            coverage: self.coverage.clone(),
            exit: Rc::new(move |why| cluster.exit(&dying, why)),
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
        }
        let deposed = |machine: &&Rc<Machine>| {
            let leads = |node: Node| node.shard(shard).group.leadership().is_some();
            machine.node != node && machine.running().is_some_and(leads)
        };
        if self.machines.iter().any(|machine| deposed(&machine)) {
            self.coverage.count(Seen::LeaderReplaced);
        }
    }
}
