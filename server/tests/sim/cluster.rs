//! The machines: each has a disk, a clock and a supervisor that starts its node again after
//! every death.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::ShardId;
use leasehold_server::disk::sim::{SimDisk, Tear};
use leasehold_server::rt::sim::{DomainId, SimRt, SimWorld};
use leasehold_server::rt::sim_net::SimNet;
use openraft_rt::AsyncRuntime;

use crate::history::Violations;
use crate::ledger::Ledger;
use crate::node::{Node, Start, members};
use crate::params::{NODES, Params, draw_rate_ppm};

/// How a machine's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    /// The process alone: what it wrote is still there, and its streams are reset.
    Killed,
    /// The machine: what was not synced may be gone, and its peers hear nothing.
    PowerLost,
}

pub(crate) struct Machine {
    pub(crate) node: u64,
    pub(crate) domain: DomainId,
    disk: SimDisk,
    boots: Cell<u64>,
    death: Cell<Death>,
    down: Cell<Duration>,
    running: RefCell<Option<Node>>,
}

impl Machine {
    pub(crate) fn running(&self) -> Option<Node> {
        self.running.borrow().clone()
    }

    pub(crate) fn boots(&self) -> u64 {
        self.boots.get()
    }
}

pub(crate) struct Cluster {
    pub(crate) world: SimWorld,
    pub(crate) net: SimNet,
    pub(crate) machines: Vec<Rc<Machine>>,
    pub(crate) ledger: Rc<Ledger>,
    pub(crate) violations: Rc<Violations>,
    params: Params,
}

impl Cluster {
    /// All machines, started for the first time; node 1 forms the group.
    pub(crate) fn start(world: &SimWorld, params: Params) -> Rc<Self> {
        let rng = world.rng();
        let net = SimNet::new(world, params.net);
        let machine = |node| {
            Rc::new(Machine {
                node,
                domain: world
                    .add_domain(Duration::from_secs(rng.below(1_000_000)), draw_rate_ppm(rng)),
                disk: SimDisk::new(rng.next(), params.disk),
                boots: Cell::new(0),
                death: Cell::new(Death::Killed),
                down: Cell::new(Duration::ZERO),
                running: RefCell::default(),
            })
        };
        let machines: Vec<_> = (1..=NODES).map(machine).collect();
        let cluster = Rc::new(Self {
            world: world.clone(),
            net,
            machines,
            ledger: Rc::default(),
            violations: Rc::default(),
            params,
        });
        for machine in &cluster.machines {
            drop(SimRt::spawn(cluster.clone().supervise(machine.clone())));
        }
        cluster
    }

    /// Waits until the group is formed.
    pub(crate) async fn form(&self) {
        let first = &self.machines[0];
        loop {
            if let Some(node) = first.running() {
                for shard in &*node.shards {
                    let formed = shard.group.initialize(members()).await;
                    formed.expect("node 1 is a member");
                }
                return;
            }
            SimRt::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Ends a machine's process and starts it again after `down`.
    pub(crate) fn crash(&self, machine: &Machine, death: Death, down: Duration) {
        if !self.world.is_alive(machine.domain) {
            return;
        }
        machine.death.set(death);
        machine.down.set(down);
        if death == Death::PowerLost {
            self.net.power_off(machine.domain);
        }
        self.world.kill(machine.domain);
    }

    /// The same after `polls` more steps of the process.
    pub(crate) fn crash_soon(&self, machine: &Machine, polls: u64, down: Duration) {
        machine.death.set(Death::Killed);
        machine.down.set(down);
        self.world.kill_after_polls(machine.domain, polls);
    }

    /// The machine that leads the shard now, as far as it knows.
    pub(crate) fn leader(&self, shard: ShardId) -> Option<Rc<Machine>> {
        let leads = |machine: &&Rc<Machine>| {
            machine.running().is_some_and(|node| node.shard(shard).group.leadership().is_some())
        };
        self.machines.iter().find(leads).cloned()
    }

    /// All shards.
    pub(crate) fn shards(&self) -> impl Iterator<Item = ShardId> + use<> {
        (0..self.params.shards).map(ShardId)
    }

    /// True if all nodes run and have applied the same.
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
        let Some(looks) = self.machines.iter().map(look).collect::<Option<Vec<_>>>() else {
            return false;
        };
        self.leader(shard).is_some()
            && looks[0].0 == looks[0].1
            && looks.iter().all(|l| *l == looks[0])
    }

    async fn supervise(self: Rc<Self>, machine: Rc<Machine>) {
        loop {
            machine.boots.set(machine.boots.get() + 1);
            let start = Start {
                node: machine.node,
                boot: machine.boots.get(),
                disk: machine.disk.clone(),
                host: self.net.host(machine.domain),
                shards: self.params.shards,
                snapshot_entries: self.params.snapshot_entries,
                ledger: self.ledger.clone(),
                violations: self.violations.clone(),
            };
            // A machine may die while it starts.
            if let Ok(node) = self.world.spawn_in(machine.domain, start.run()).await {
                machine.running.replace(Some(node));
            }
            self.world.killed(machine.domain).await;
            machine.running.take();
            match machine.death.get() {
                Death::Killed => machine.disk.kill_process(),
                Death::PowerLost => machine.disk.lose_power_at_random(Tear::Sector),
            }
            SimRt::sleep(machine.down.get()).await;
            self.net.power_on(machine.domain);
            self.world.revive(machine.domain);
        }
    }
}
