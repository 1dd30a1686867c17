//! What goes wrong, when, and for how long: a random schedule drawn from the seed.
//!
//! A run has some kinds of faults and not others, each with a weight of its own: faults that never
//! leave each other room hide what only one of them would show.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use leasehold_server::rt::sim::{DomainId, SimRng, SimRt};
use openraft_rt::AsyncRuntime;

use crate::cluster::Cluster;
use crate::inject::Injector;

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Kill,
    KillLeader,
    KillAll,
    /// At any await of the node, in its start too.
    KillBetweenSteps,
    LosePower,
    LosePowerBetweenSteps,
    LosePowerEverywhere,
    Stun,
    StunLeader,
    /// Stunned with a clock that stands still meanwhile.
    FreezeNode,
    Isolate,
    IsolateLeader,
    IsolateLeaderWithClient,
    /// A leader and some clients on one side, for longer than an election and a TTL; in half of the
    /// cases nothing else happens meanwhile.
    SecludeLeader,
    /// What a leader is told arrives late, what it says does not; one node that does not hear it
    /// may ask for votes.
    LateAcks,
    IsolateAll,
    /// Two sides that share only one node.
    Bridge,
    CutOneWay,
    CutPair,
    /// A follower is cut off until the leader has no log for it any more; clients stay with it.
    LeaveBehind,
    BreakStreams,
    /// A cut, and then all that stood in it is gone.
    LoseStreams,
    /// Streams break at one end, and what was sent arrives seconds later.
    HoldStreams,
    RefuseConnects,
    SlowLink,
    ClogLink,
    SlowDisk,
    /// EIO in one of the next writes, syncs or makings of files.
    FailDisk,
    /// ENOSPC.
    FillDisk,
    /// A disk is replaced by an empty one.
    WipeDisk,
    Transfer,
    Snapshot,
    ChangeRate,
    StepWall,
    KillClient,
    StunClient,
    /// These break the clock model (G3): see `Swarm::clocks_lie`.
    FreezeClient,
    JumpNode,
    JumpClient,
}

impl Fault {
    /// All kinds with how often they come compared to others.
    const WEIGHTS: [(Self, u64); 39] = [
        (Self::Kill, 2),
        (Self::KillLeader, 3),
        (Self::KillAll, 1),
        (Self::KillBetweenSteps, 5),
        (Self::LosePower, 3),
        (Self::LosePowerBetweenSteps, 4),
        (Self::LosePowerEverywhere, 2),
        (Self::Stun, 2),
        (Self::StunLeader, 3),
        (Self::FreezeNode, 2),
        (Self::Isolate, 2),
        (Self::IsolateLeader, 3),
        (Self::IsolateLeaderWithClient, 3),
        (Self::SecludeLeader, 6),
        (Self::LateAcks, 4),
        (Self::IsolateAll, 1),
        (Self::Bridge, 3),
        (Self::CutOneWay, 3),
        (Self::CutPair, 2),
        (Self::LeaveBehind, 3),
        (Self::BreakStreams, 2),
        (Self::LoseStreams, 2),
        (Self::HoldStreams, 4),
        (Self::RefuseConnects, 2),
        (Self::SlowLink, 2),
        (Self::ClogLink, 2),
        (Self::SlowDisk, 3),
        (Self::FailDisk, 3),
        (Self::FillDisk, 2),
        (Self::WipeDisk, 2),
        (Self::Transfer, 3),
        (Self::Snapshot, 2),
        (Self::ChangeRate, 1),
        (Self::StepWall, 1),
        (Self::KillClient, 2),
        (Self::StunClient, 2),
        (Self::FreezeClient, 4),
        (Self::JumpNode, 4),
        (Self::JumpClient, 4),
    ];

    pub(crate) const ALL: [Self; 39] = {
        let mut all = [Self::Kill; 39];
        let mut index = 0;
        while index < all.len() {
            all[index] = Self::WEIGHTS[index].0;
            index += 1;
        }
        all
    };

    /// True if it breaks the clock model, so that only what no clock decides can hold.
    fn is_lie(self) -> bool {
        matches!(self, Self::FreezeClient | Self::JumpNode | Self::JumpClient)
    }
}

/// The kinds of one run.
#[derive(Clone, Debug)]
pub(crate) struct Swarm {
    weights: Vec<(Fault, u64)>,
    /// Clocks may do what no real one does: G1 and G3 are not judged, everything else is.
    pub(crate) clocks_lie: bool,
}

impl Swarm {
    pub(crate) fn draw(rng: &SimRng) -> Self {
        let clocks_lie = rng.chance(120);
        let share = 250 + rng.below(600);
        let drawn = Fault::WEIGHTS.map(|(fault, weight)| {
            let chosen = rng.chance(share) || fault.is_lie();
            let weight = weight * (1 + rng.below(3));
            (fault, if chosen && (clocks_lie || !fault.is_lie()) { weight } else { 0 })
        });
        let mut weights: Vec<_> = drawn.into_iter().filter(|(_, weight)| *weight > 0).collect();
        if weights.is_empty() {
            weights.push((Fault::KillLeader, 1));
        }
        Self { weights, clocks_lie }
    }

    fn choose(&self, rng: &SimRng) -> Fault {
        let total = self.weights.iter().map(|(_, weight)| weight).sum();
        let mut left = rng.below(total);
        for (fault, weight) in &self.weights {
            if left < *weight {
                return *fault;
            }
            left -= weight;
        }
        unreachable!("the weights add up to the total")
    }
}

/// Lets faults happen for the length of the storm, then takes all of them back.
pub(crate) async fn storm(cluster: &Rc<Cluster>, clients: &[DomainId], swarm: &Swarm) {
    let world = cluster.world.clone();
    let params = &cluster.params;
    let over = Rc::new(Cell::new(false));
    let injector = Injector::new(cluster, clients, &over);
    let end_ns = world.now_ns() + params.storm.as_nanos() as u64;
    while world.now_ns() < end_ns {
        let pause_ns = world.rng().below(params.fault_pause_max.as_nanos() as u64 + 1);
        SimRt::sleep(Duration::from_nanos(pause_ns)).await;
        let fault = swarm.choose(world.rng());
        if injector.inject(fault) {
            cluster.coverage.count(fault);
        }
        SimRt::sleep(injector.calm()).await;
    }
    over.set(true);
    cluster.timeline.note("the storm is over".to_owned());
    cluster.heal_links();
    cluster.net.reset_delays();
    cluster.net.unclog_all();
    for machine in &cluster.machines() {
        cluster.net.refuse(machine.domain, false);
        machine.mend_disk(cluster.params.disk);
    }
}
