//! How each kind of fault is done.

use std::cell::Cell;
use std::fmt::Debug;
use std::io::ErrorKind;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::ShardId;
use leasehold_server::disk::sim::{Io, SimDiskConfig};
use leasehold_server::rt::sim::{DomainId, SimRng, SimRt, SimWorld};
use openraft_rt::AsyncRuntime;

use crate::cluster::{Cluster, Death, Link, Machine};
use crate::coverage::Seen;
use crate::faults::Fault;
use crate::params::draw_rate_ppm;

/// A leader that is away for longer has lost its place (150 + 150 ms, and some time to elect).
const ELECTION: Duration = Duration::from_millis(500);

/// How long a stream stalls before it breaks and its bytes are held.
const STALL_MAX: Duration = Duration::from_millis(500);

/// Longest time for which a follower is cut off to be left behind.
const LEAVE_BEHIND_MAX: Duration = Duration::from_secs(6);

/// What a disk does whose failure a node must not survive.
const FAILING: [Io; 6] = [Io::Sync, Io::SyncNew, Io::Write, Io::Create, Io::Rename, Io::SyncDir];

/// See the module.
pub(crate) struct Injector<'a> {
    cluster: &'a Rc<Cluster>,
    world: &'a SimWorld,
    rng: &'a SimRng,
    clients: &'a [DomainId],
    /// Set at the end of the storm, when everything is healed at once.
    over: Rc<Cell<bool>>,
    /// For so long nothing else is to happen.
    calm: Cell<Duration>,
    /// That was so once in this run.
    was_calm: Cell<bool>,
}

impl<'a> Injector<'a> {
    pub(crate) fn new(
        cluster: &'a Rc<Cluster>,
        clients: &'a [DomainId],
        over: &Rc<Cell<bool>>,
    ) -> Self {
        let world = &cluster.world;
        let (calm, was_calm) = (Cell::default(), Cell::default());
        Self { cluster, world, rng: world.rng(), clients, over: over.clone(), calm, was_calm }
    }

    /// How long to wait, besides the usual pause, before the next fault.
    pub(crate) fn calm(&self) -> Duration {
        self.calm.take()
    }

    /// Does it; false if there was nothing to do it to.
    pub(crate) fn inject(&self, fault: Fault) -> bool {
        let spell = self.spell();
        match fault {
            Fault::Kill
            | Fault::KillLeader
            | Fault::KillAll
            | Fault::KillBetweenSteps
            | Fault::LosePower
            | Fault::LosePowerBetweenSteps
            | Fault::LosePowerEverywhere => self.crash(fault, spell),
            Fault::Stun | Fault::StunLeader | Fault::FreezeNode => self.pause(fault, spell),
            Fault::Isolate
            | Fault::IsolateLeader
            | Fault::IsolateLeaderWithClient
            | Fault::IsolateAll
            | Fault::Bridge
            | Fault::CutOneWay
            | Fault::CutPair => self.cut_off(fault, spell),
            Fault::SecludeLeader => self.seclude(),
            Fault::LeaveBehind => self.leave_behind(),
            Fault::LateAcks => self.late_acks(spell),
            Fault::BreakStreams
            | Fault::LoseStreams
            | Fault::HoldStreams
            | Fault::RefuseConnects
            | Fault::SlowLink
            | Fault::ClogLink => self.hinder(fault, spell),
            Fault::SlowDisk | Fault::FailDisk | Fault::FillDisk | Fault::WipeDisk => {
                self.harm_disk(fault, spell)
            }
            Fault::Transfer | Fault::Snapshot => self.order(fault),
            Fault::ChangeRate | Fault::StepWall | Fault::JumpNode | Fault::JumpClient => {
                self.set_clock(fault)
            }
            Fault::KillClient => {
                let client = self.any_client();
                self.note(fault, client, Duration::ZERO);
                self.world.kill(client);
                true
            }
            Fault::StunClient | Fault::FreezeClient => {
                let (client, spell) = (self.any_client(), spell * 4);
                self.note(fault, client, spell);
                if fault == Fault::FreezeClient {
                    self.world.freeze(client, spell);
                } else {
                    self.world.stun(client, spell);
                }
                true
            }
        }
    }

    fn crash(&self, fault: Fault, spell: Duration) -> bool {
        let machine = match fault {
            Fault::KillLeader => match self.leader() {
                Some(leader) => leader,
                None => return false,
            },
            _ => self.any(),
        };
        // Far into the run of a process as often as near its start.
        let steps = self.rng.below(2 << self.rng.below(14));
        match fault {
            Fault::KillAll | Fault::LosePowerEverywhere => {
                let death = if fault == Fault::KillAll { Death::Killed } else { Death::PowerLost };
                self.note(fault, (), spell);
                self.cluster.machines().iter().for_each(|m| self.cluster.crash(m, death, spell));
                return true;
            }
            Fault::KillBetweenSteps | Fault::LosePowerBetweenSteps => {
                let killed = fault == Fault::KillBetweenSteps;
                let death = if killed { Death::Killed } else { Death::PowerLost };
                self.note(fault, (machine.node, steps), spell);
                self.cluster.crash_soon(&machine, death, steps, spell);
                return true;
            }
            _ => {}
        }
        if !self.world.is_alive(machine.domain) {
            return false;
        }
        if Self::leads(&machine) {
            self.cluster.coverage.count(Seen::LeaderKilled);
        }
        let death = if fault == Fault::LosePower { Death::PowerLost } else { Death::Killed };
        self.note(fault, machine.node, spell);
        self.cluster.crash(&machine, death, spell);
        true
    }

    fn pause(&self, fault: Fault, spell: Duration) -> bool {
        let machine = match fault {
            Fault::StunLeader => self.leader(),
            Fault::FreezeNode if self.rng.chance(500) => self.leader(),
            _ => Some(self.any()),
        };
        let Some(machine) = machine else { return false };
        if Self::leads(&machine) && spell > ELECTION {
            self.cluster.coverage.count(Seen::LeaderPausedPastElection);
        }
        self.note(fault, machine.node, spell);
        if fault == Fault::FreezeNode {
            self.world.freeze(machine.domain, spell);
        } else {
            self.world.stun(machine.domain, spell);
        }
        true
    }

    fn cut_off(&self, fault: Fault, spell: Duration) -> bool {
        let nodes: Vec<_> = self.cluster.machines().iter().map(|machine| machine.domain).collect();
        let alone = nodes.len() == 1;
        let (who, links) = match fault {
            Fault::Isolate | Fault::IsolateAll if alone => return false,
            Fault::Isolate => {
                let machine = self.any();
                (format!("node {}", machine.node), both_ways(&[machine.domain], &nodes))
            }
            Fault::IsolateLeader | Fault::IsolateLeaderWithClient => {
                let Some(machine) = self.leader().filter(|_| !alone) else { return false };
                self.cluster.coverage.count(Seen::LeaderInMinority);
                let mut links = both_ways(&[machine.domain], &nodes);
                if fault == Fault::IsolateLeaderWithClient {
                    let others = nodes.iter().copied().filter(|node| *node != machine.domain);
                    links.extend(both_ways(&[self.any_client()], &others.collect::<Vec<_>>()));
                }
                (format!("node {}", machine.node), links)
            }
            Fault::IsolateAll => ("all".to_owned(), both_ways(&nodes, &nodes)),
            Fault::Bridge => match self.bridge(&nodes) {
                Some(bridge) => bridge,
                None => return false,
            },
            _ => {
                let (one, other) = self.pair();
                let mut links = vec![(one, other)];
                if fault == Fault::CutPair {
                    links.push((other, one));
                }
                (format!("{one:?} {other:?}"), links)
            }
        };
        self.note(fault, who, spell);
        self.cut(links, spell, |_| {});
        true
    }

    /// Long enough that others elect a leader and end the leases that it hears nothing of.
    fn seclude(&self) -> bool {
        let nodes: Vec<_> = self.cluster.machines().iter().map(|machine| machine.domain).collect();
        let Some(leader) = self.leader().filter(|_| nodes.len() > 1) else { return false };
        self.cluster.coverage.count(Seen::LeaderInMinority);
        let params = &self.cluster.params;
        let (ttl_ms, spread_ms) = (u64::from(params.ttl_ms_min), u64::from(params.ttl_ms_spread));
        let spell = Duration::from_millis(1_000 + ttl_ms + self.rng.below(spread_ms + 1_000));
        let others: Vec<_> = nodes.iter().copied().filter(|node| *node != leader.domain).collect();
        let first = self.rng.below(self.clients.len() as u64) as usize;
        // Somebody stays outside to move the keys on.
        let len = 1 + self.rng.below(self.clients.len() as u64 - 1) as usize;
        let inside: Vec<_> = self.clients.iter().copied().cycle().skip(first).take(len).collect();
        let mut links = both_ways(&[leader.domain], &others);
        links.extend(both_ways(&inside, &others));
        self.note(Fault::SecludeLeader, (leader.node, inside), spell);
        if !self.was_calm.get() && self.rng.chance(500) {
            self.was_calm.set(true);
            self.calm.set(spell);
        }
        self.cut(links, spell, |_| {});
        true
    }

    /// Others go on meanwhile; what it lacks then comes in a snapshot.
    fn leave_behind(&self) -> bool {
        let shard = self.any_shard();
        let Some(leader) = self.cluster.leader(shard) else { return false };
        let members = self.cluster.members();
        let others: Vec<_> = members.iter().filter(|other| other.node != leader.node).collect();
        // Without it there must be a majority.
        if others.len() < 2 {
            return false;
        }
        let behind = others[self.rng.below(others.len() as u64) as usize].clone();
        let nodes: Vec<_> = self.cluster.machines().iter().map(|machine| machine.domain).collect();
        let links = both_ways(&[behind.domain], &nodes);
        self.note(Fault::LeaveBehind, (behind.node, shard), LEAVE_BEHIND_MAX);
        for link in &links {
            self.cluster.cut_link(*link);
        }
        let (cluster, over) = (self.cluster.clone(), self.over.clone());
        drop(SimRt::spawn(async move {
            let until_ns = cluster.world.now_ns() + LEAVE_BEHIND_MAX.as_nanos() as u64;
            while !over.get() && cluster.world.now_ns() < until_ns {
                let purged = cluster.leader(shard).and_then(|leader| leader.running());
                let purged = purged.map(|node| node.shard(shard).group.status().purged_index);
                let last = behind.running();
                let last = last.map(|node| node.shard(shard).group.status().last_index);
                if purged > last {
                    break;
                }
                SimRt::sleep(Duration::from_millis(20)).await;
            }
            if !over.get() {
                for link in links {
                    cluster.heal_link(link);
                }
            }
        }));
        true
    }

    /// The leader hears late from all but one, who may not hear it at all.
    fn late_acks(&self, spell: Duration) -> bool {
        let nodes: Vec<_> = self.cluster.machines().iter().map(|machine| machine.domain).collect();
        let Some(leader) = self.leader().filter(|_| nodes.len() > 2) else { return false };
        let mut others: Vec<_> =
            nodes.iter().copied().filter(|node| *node != leader.domain).collect();
        let asking = others.swap_remove(self.rng.below(others.len() as u64) as usize);
        let delay = Duration::from_millis(100 + self.rng.below(1_500));
        self.note(Fault::LateAcks, (leader.node, asking, delay), spell);
        let late: Vec<Link> = others.iter().map(|other| (*other, leader.domain)).collect();
        for (from, to) in &late {
            self.cluster.net.set_delay(*from, *to, delay, delay + delay / 4);
        }
        if self.rng.chance(700) {
            let mut links = both_ways(&[asking], &others);
            links.push((leader.domain, asking));
            self.cut(links, spell, |_| {});
        }
        self.after(spell + delay, move |cluster| {
            for (from, to) in late {
                cluster.net.reset_delay(from, to);
            }
        });
        true
    }

    /// The leader talks to one node only, and that one to the others; of five nodes one is alone.
    fn bridge(&self, nodes: &[DomainId]) -> Option<(String, Vec<Link>)> {
        let leader = self.leader().filter(|_| nodes.len() > 2)?;
        let mut rest: Vec<_> =
            nodes.iter().copied().filter(|node| *node != leader.domain).collect();
        let bridge = rest.swap_remove(self.rng.below(rest.len() as u64) as usize);
        let mut links = both_ways(&[leader.domain], &rest);
        if rest.len() > 2 {
            let alone = rest.swap_remove(self.rng.below(rest.len() as u64) as usize);
            links.extend(both_ways(&[alone], nodes));
        }
        Some((format!("node {} over {bridge:?}", leader.node), links))
    }

    fn hinder(&self, fault: Fault, spell: Duration) -> bool {
        let (from, to) = self.pair();
        let net = &self.cluster.net;
        match fault {
            Fault::BreakStreams => net.break_streams(from, to),
            Fault::LoseStreams => {
                self.cut(vec![(from, to), (to, from)], spell, move |cluster| {
                    cluster.net.lose_streams(from, to);
                });
            }
            Fault::HoldStreams => {
                // First it stalls, so that there is something to deliver late.
                self.cut(vec![(from, to)], spell.min(STALL_MAX), move |cluster| {
                    let held = cluster.net.hold_streams(from, to, Duration::from_secs(8));
                    cluster.coverage.add(Seen::LateBytes, held as u64);
                });
            }
            Fault::RefuseConnects => {
                let machine = self.any();
                net.refuse(machine.domain, true);
                net.break_streams(from, to);
                self.note(fault, machine.node, spell);
                self.after(spell, move |cluster| cluster.net.refuse(machine.domain, false));
                return true;
            }
            Fault::SlowLink => {
                let min = Duration::from_micros(self.rng.below(40_000));
                net.set_delay(from, to, min, min * 3);
            }
            _ => {
                net.clog(from, to, 200 + self.rng.below(20_000));
                self.after(spell * 3, move |cluster| cluster.net.unclog(from, to));
            }
        }
        self.note(fault, (from, to), spell);
        true
    }

    fn harm_disk(&self, fault: Fault, spell: Duration) -> bool {
        let machine = if self.rng.chance(500) { self.leader() } else { None };
        let machine = machine.unwrap_or_else(|| self.any());
        let usual = self.cluster.params.disk;
        match fault {
            Fault::SlowDisk => {
                let sync_min = Duration::from_millis(200);
                let sync_max = sync_min + Duration::from_millis(1 + self.rng.below(1_800));
                machine.disk().set_config(SimDiskConfig { sync_min, sync_max, ..usual });
            }
            Fault::FailDisk => {
                let io = FAILING[self.rng.below(FAILING.len() as u64) as usize];
                machine.disk().fail(io, self.rng.below(10), ErrorKind::Other);
                self.note(fault, (machine.node, io), Duration::ZERO);
                return true;
            }
            Fault::FillDisk => {
                let room = self.rng.below(4 << 10);
                let capacity = Some(machine.disk().used_bytes() + room);
                machine.disk().set_config(SimDiskConfig { capacity, ..usual });
            }
            _ => {
                if !self.cluster.wipe(&machine, spell) {
                    return false;
                }
                self.note(fault, machine.node, spell);
                return true;
            }
        }
        let spell = spell * 3;
        self.note(fault, machine.node, spell);
        self.after(spell, move |_| machine.disk().set_config(usual));
        true
    }

    fn order(&self, fault: Fault) -> bool {
        let shard = self.any_shard();
        let machine = match fault {
            Fault::Transfer => self.cluster.leader(shard),
            _ => Some(self.any()),
        };
        let Some((machine, node)) = machine.and_then(|m| m.running().map(|node| (m, node))) else {
            return false;
        };
        let group = node.shard(shard).group.clone();
        self.note(fault, (machine.node, shard), Duration::ZERO);
        let coverage = self.cluster.coverage.clone();
        drop(self.world.spawn_in(machine.domain, async move {
            if fault == Fault::Snapshot {
                group.trigger_snapshot().await;
            } else if group.transfer(None).await.is_ok() {
                coverage.count(Seen::Transferred);
            }
        }));
        true
    }

    fn set_clock(&self, fault: Fault) -> bool {
        let machine = self.any();
        let ahead = Duration::from_millis(100 + self.rng.below(8_000));
        match fault {
            Fault::ChangeRate => {
                let rate_ppm = draw_rate_ppm(self.rng);
                self.note(fault, (machine.node, rate_ppm), Duration::ZERO);
                self.world.set_rate(machine.domain, rate_ppm);
            }
            Fault::StepWall => {
                let by_ms = self.rng.below(7_200_000) as i64 - 3_600_000;
                self.note(fault, (machine.node, by_ms), Duration::ZERO);
                self.world.step_wall(machine.domain, by_ms);
            }
            Fault::JumpNode => {
                self.note(fault, machine.node, ahead);
                self.world.jump(machine.domain, ahead);
            }
            _ => {
                let client = self.any_client();
                self.note(fault, client, ahead);
                self.world.jump(client, ahead);
            }
        }
        true
    }

    fn note(&self, fault: Fault, what: impl Debug, spell: Duration) {
        self.cluster.timeline.note(format!("FAULT {fault:?} {what:?} {spell:?}"));
    }

    /// A while, mostly short, now and then well past an election.
    fn spell(&self) -> Duration {
        let max_ms = if self.rng.chance(250) { 4_000 } else { 600 };
        Duration::from_micros(self.rng.below(max_ms * 1_000))
    }

    fn any(&self) -> Rc<Machine> {
        let machines = self.cluster.machines();
        machines[self.rng.below(machines.len() as u64) as usize].clone()
    }

    fn any_shard(&self) -> ShardId {
        ShardId(self.rng.below(u64::from(self.cluster.params.shards)) as u32)
    }

    /// The leader of any shard.
    fn leader(&self) -> Option<Rc<Machine>> {
        self.cluster.leader(self.any_shard())
    }

    fn leads(machine: &Machine) -> bool {
        machine.running().is_some_and(|node| node.leads())
    }

    fn any_client(&self) -> DomainId {
        self.clients[self.rng.below(self.clients.len() as u64) as usize]
    }

    /// Two different domains, at least one of them a node's.
    fn pair(&self) -> Link {
        let node = self.any().domain;
        let machines = self.cluster.machines();
        let nodes = machines.iter().map(|machine| machine.domain);
        // As often between nodes as between a node and a client.
        let peers: Vec<_> = nodes.filter(|peer| *peer != node).collect();
        let other = if self.rng.chance(500) && !peers.is_empty() {
            peers[self.rng.below(peers.len() as u64) as usize]
        } else {
            self.any_client()
        };
        if self.rng.chance(500) { (node, other) } else { (other, node) }
    }

    /// Cuts links and heals them after `spell`; `then` comes before.
    fn cut(&self, links: Vec<Link>, spell: Duration, then: impl FnOnce(&Cluster) + 'static) {
        for link in &links {
            self.cluster.cut_link(*link);
        }
        self.after(spell, move |cluster| {
            then(cluster);
            for link in links {
                cluster.heal_link(link);
            }
        });
    }

    /// Takes something back, unless the end of the storm did.
    fn after(&self, spell: Duration, undo: impl FnOnce(&Cluster) + 'static) {
        let (cluster, over) = (self.cluster.clone(), self.over.clone());
        drop(SimRt::spawn(async move {
            SimRt::sleep(spell).await;
            if !over.get() {
                undo(&cluster);
            }
        }));
    }
}

/// The links between two groups that may have members in common.
pub(crate) fn both_ways(some: &[DomainId], others: &[DomainId]) -> Vec<Link> {
    let mut links = Vec::new();
    for one in some {
        for other in others.iter().filter(|other| *other != one) {
            links.extend([(*one, *other), (*other, *one)]);
        }
    }
    links
}
