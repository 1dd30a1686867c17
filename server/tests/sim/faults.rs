//! What goes wrong, when, and for how long: a random schedule drawn from the seed.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::ids::ShardId;
use leasehold_server::rt::sim::{DomainId, SimRt};
use openraft_rt::AsyncRuntime;

use crate::cluster::{Cluster, Death, Machine};
use crate::params::draw_rate_ppm;

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    KillLeader,
    KillBetweenSteps,
    LosePower,
    LosePowerEverywhere,
    Stun,
    StunLeader,
    Isolate,
    IsolateLeader,
    CutOneWay,
    CutPair,
    BreakStreams,
    SlowLink,
    ChangeRate,
    StepWall,
    KillClient,
    StunClient,
}

const FAULTS: [Fault; 17] = [
    Fault::Kill,
    Fault::KillLeader,
    Fault::KillBetweenSteps,
    Fault::LosePower,
    Fault::LosePowerEverywhere,
    Fault::Stun,
    Fault::StunLeader,
    Fault::Isolate,
    Fault::IsolateLeader,
    Fault::CutOneWay,
    Fault::CutPair,
    Fault::BreakStreams,
    Fault::SlowLink,
    Fault::ChangeRate,
    Fault::StepWall,
    Fault::KillClient,
    Fault::StunClient,
];

/// Faults that happened, by kind.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    counts: BTreeMap<Fault, u64>,
}

impl Tally {
    pub(crate) fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    pub(crate) fn text(&self) -> String {
        let each: Vec<_> =
            self.counts.iter().map(|(fault, count)| format!("{fault:?} {count}")).collect();
        each.join(", ")
    }
}

/// Lets faults happen for the length of the storm, then takes all of them back.
pub(crate) async fn storm(
    cluster: &Rc<Cluster>,
    clients: &[DomainId],
    storm: Duration,
    pause_max: Duration,
) -> Tally {
    let world = cluster.world.clone();
    let mut tally = Tally::default();
    let over = Rc::new(Cell::new(false));
    let end_ns = world.now_ns() + storm.as_nanos() as u64;
    while world.now_ns() < end_ns {
        SimRt::sleep(up_to(cluster, pause_max)).await;
        let fault = FAULTS[world.rng().below(FAULTS.len() as u64) as usize];
        inject(cluster, clients, fault, &over);
        *tally.counts.entry(fault).or_default() += 1;
    }
    over.set(true);
    cluster.net.heal_all();
    cluster.net.reset_delays();
    tally
}

fn up_to(cluster: &Cluster, max: Duration) -> Duration {
    Duration::from_nanos(cluster.world.rng().below(max.as_nanos() as u64 + 1))
}

fn any(cluster: &Cluster) -> Rc<Machine> {
    let index = cluster.world.rng().below(cluster.machines.len() as u64);
    cluster.machines[index as usize].clone()
}

/// The leader of any shard.
fn leader(cluster: &Cluster) -> Rc<Machine> {
    let shards = cluster.shards().count() as u64;
    let shard = ShardId(cluster.world.rng().below(shards) as u32);
    cluster.leader(shard).unwrap_or_else(|| any(cluster))
}

/// A while, mostly short, now and then well past an election.
fn spell(cluster: &Cluster) -> Duration {
    let max_ms = if cluster.world.rng().chance(250) { 4_000 } else { 600 };
    up_to(cluster, Duration::from_millis(max_ms))
}

fn inject(cluster: &Rc<Cluster>, clients: &[DomainId], fault: Fault, over: &Rc<Cell<bool>>) {
    let world = &cluster.world;
    let spell = spell(cluster);
    match fault {
        Fault::Kill => cluster.crash(&any(cluster), Death::Killed, spell),
        Fault::KillLeader => cluster.crash(&leader(cluster), Death::Killed, spell),
        Fault::KillBetweenSteps => {
            cluster.crash_soon(&any(cluster), world.rng().below(300), spell);
        }
        Fault::LosePower => cluster.crash(&any(cluster), Death::PowerLost, spell),
        Fault::LosePowerEverywhere => {
            for machine in &cluster.machines {
                cluster.crash(machine, Death::PowerLost, spell);
            }
        }
        Fault::Stun => world.stun(any(cluster).domain, spell),
        Fault::StunLeader => world.stun(leader(cluster).domain, spell),
        Fault::Isolate => isolate(cluster, &any(cluster), spell, over),
        Fault::IsolateLeader => isolate(cluster, &leader(cluster), spell, over),
        Fault::CutOneWay => {
            let (from, to) = pair(cluster, clients);
            cut(cluster, vec![(from, to)], spell, over);
        }
        Fault::CutPair => {
            let (one, other) = pair(cluster, clients);
            cut(cluster, vec![(one, other), (other, one)], spell, over);
        }
        Fault::BreakStreams => {
            let (one, other) = pair(cluster, clients);
            cluster.net.break_streams(one, other);
        }
        Fault::SlowLink => {
            let (from, to) = pair(cluster, clients);
            let min = up_to(cluster, Duration::from_millis(40));
            cluster.net.set_delay(from, to, min, min * 3);
        }
        Fault::ChangeRate => world.set_rate(any(cluster).domain, draw_rate_ppm(world.rng())),
        Fault::StepWall => {
            let by_ms = world.rng().below(7_200_000) as i64 - 3_600_000;
            world.step_wall(any(cluster).domain, by_ms);
        }
        Fault::KillClient => world.kill(any_client(cluster, clients)),
        Fault::StunClient => world.stun(any_client(cluster, clients), spell * 4),
    }
}

fn any_client(cluster: &Cluster, clients: &[DomainId]) -> DomainId {
    clients[cluster.world.rng().below(clients.len() as u64) as usize]
}

/// Two different domains, at least one of them a node's.
fn pair(cluster: &Cluster, clients: &[DomainId]) -> (DomainId, DomainId) {
    let rng = cluster.world.rng();
    let node = any(cluster).domain;
    let nodes = cluster.machines.iter().map(|machine| machine.domain);
    let others: Vec<_> =
        nodes.chain(clients.iter().copied()).filter(|domain| *domain != node).collect();
    let other = others[rng.below(others.len() as u64) as usize];
    if rng.chance(500) { (node, other) } else { (other, node) }
}

/// Cuts a machine off from its peers; half the time from its clients too, who see one more node
/// that does not answer, the other half not, who see a leader that cannot commit.
fn isolate(cluster: &Rc<Cluster>, machine: &Machine, spell: Duration, over: &Rc<Cell<bool>>) {
    let peers = cluster.machines.iter().map(|peer| peer.domain);
    let peers = peers.filter(|peer| *peer != machine.domain);
    let links = peers.flat_map(|peer| [(machine.domain, peer), (peer, machine.domain)]).collect();
    cut(cluster, links, spell, over);
}

/// Cuts links and heals them after `spell`.
fn cut(
    cluster: &Rc<Cluster>,
    links: Vec<(DomainId, DomainId)>,
    spell: Duration,
    over: &Rc<Cell<bool>>,
) {
    for (from, to) in &links {
        cluster.net.cut(*from, *to);
    }
    let (cluster, over) = (cluster.clone(), over.clone());
    drop(SimRt::spawn(async move {
        SimRt::sleep(spell).await;
        // At the end of the storm everything was healed at once.
        if !over.get() {
            for (from, to) in links {
                cluster.net.heal(from, to);
            }
        }
    }));
}
