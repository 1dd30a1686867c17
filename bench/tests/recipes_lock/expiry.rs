//! Holders of every kind that are gone: their expiry itself wakes whom it makes room for.

mod cast;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold_bench::clock::{Deadline, now_ns, to_ms};
use leasehold_bench::cluster::{Cluster, PATIENCE, Spec};
use leasehold_bench::process;
use leasehold_bench::wire::Wire;
use leasehold_protocol::command::Want;
use leasehold_protocol::event::EndReason;
use leasehold_protocol::ids::RequestId;
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;

use crate::answers::{FOR_EVER, granted, open_many};
use crate::bare::{self, Lease, Patient as _, scaled};
use cast::{Cast, casts};

/// Of the holders.
const TTL_MS: u32 = 2_500;

/// A cast at work.
struct Scene {
    cast: Cast,
    silent: Vec<Lease>,
    /// In the order of the queue: lease and node.
    waiters: Vec<(Lease, usize)>,
    grants: BTreeMap<usize, Grant>,
}

impl Scene {
    /// Everybody has a lease, and the holders hold. The first waiter asks `node`, each further one
    /// the next.
    fn open(wire: &mut Wire, cast: Cast, node: usize, nodes: usize) -> Self {
        let mut silent = Vec::new();
        for want in &cast.holders {
            let holder = bare::open_lease(wire, TTL_MS);
            let acquire = holder.acquire_all(1, std::slice::from_ref(want), (0, cast.delay_ms));
            granted(bare::outcome(wire, &acquire));
            silent.push(holder);
        }
        let leases = open_many(wire, cast.woken.len() + cast.behind.len());
        let via = |waiter| (node + waiter) % nodes;
        let waiters = leases.into_iter().enumerate().map(|(index, lease)| (lease, via(index)));
        Self { silent, waiters: waiters.collect(), grants: BTreeMap::new(), cast }
    }

    fn wants(&self, waiter: usize) -> &[Want] {
        let Cast { woken, behind, .. } = &self.cast;
        woken.get(waiter).unwrap_or_else(|| &behind[waiter - woken.len()])
    }

    fn is_woken(&self) -> bool {
        self.grants.len() == self.cast.woken.len()
    }

    /// All were granted in one step, that of the expiry, or of the end of the delay after it; who
    /// comes next still waits.
    fn judge(&self, wire: &mut Wire) {
        let name = self.cast.name;
        let info = bare::key(wire, &self.cast.key);
        let end = info.last_end.expect("a hold has ended");
        assert_eq!(end.reason, EndReason::LeaseExpired, "INVALID: {name}: it ended otherwise");
        assert!(self.silent.iter().any(|lease| lease.id == end.lease), "{name}: {end:?}");
        let at: BTreeSet<_> = self.grants.values().map(|grant| grant.revision).collect();
        let [at] = at.into_iter().collect::<Vec<_>>()[..] else {
            panic!("{name}: not woken together: {:?}", self.grants)
        };
        if self.cast.delay_ms == 0 {
            assert_eq!(at, end.revision, "{name}: not by the expiry");
        } else {
            assert!(at > end.revision && info.delays.is_empty(), "{name}: not by the delay's end");
        }
        let next = String::from_utf8_lossy(&self.cast.behind[0][0].key).into_owned();
        let waiters = bare::key(wire, &next).waiters;
        let behind = &self.waiters[self.cast.woken.len()..];
        let behind = behind.iter().map(|(lease, _)| lease.id);
        assert!(waiters.iter().map(|waiter| waiter.lease).eq(behind), "{name}: {waiters:?}");
    }
}

/// Whose request it is: of which scene, which waiter, and whether it is its release.
type Name = (usize, usize, bool);

/// Connections to all nodes, and what was asked on each.
struct Crowd {
    wires: Vec<Wire>,
    asked: BTreeMap<(usize, RequestId), (Name, Request)>,
}

impl Crowd {
    fn send(&mut self, via: usize, name: Name, request: Request) {
        let id = self.wires[via].send_patiently(&request);
        self.asked.insert((via, id), (name, request));
    }

    /// The next outcome, from whichever node.
    fn next(&mut self) -> (Name, Outcome) {
        let deadline = Deadline::after(PATIENCE);
        loop {
            assert!(!deadline.passed(), "never told: {:?}", self.asked);
            for via in 0..self.wires.len() {
                let turn = Deadline::after(Duration::from_millis(2));
                let Some((id, reply)) = self.wires[via].recv(turn).expect("connected") else {
                    continue;
                };
                let (name, request) = self.asked.get(&(via, id)).cloned().expect("asked for");
                match reply {
                    Reply::Outcome(reply) => {
                        if !matches!(reply.outcome, Outcome::Queued { .. }) {
                            self.asked.remove(&(via, id));
                        }
                        return (name, reply.outcome);
                    }
                    // A change of leader, on a very busy machine: as any client, once more.
                    reply => {
                        println!("asked again after {reply:?}");
                        self.asked.remove(&(via, id));
                        self.send(via, name, request);
                    }
                }
            }
        }
    }
}

/// B33: whoever waits behind a holder that is gone is woken by the expiry, whatever it waits for and
/// whatever node it asked.
#[test]
fn an_expiry_wakes_every_kind_of_waiter_on_every_node() {
    let rounds = scaled(1, 30);
    let _alone = process::alone();
    let spec = Spec::default().flag("election-min-ms", 600).flag("election-max-ms", 1_000);
    let cluster = Cluster::start(spec).expect("a cluster");
    let leader = cluster.wait_leader(0, PATIENCE).expect("a leader");
    let wires = cluster.ids().map(|id| bare::connect(cluster.addresses(id).client)).collect();
    let mut crowd = Crowd { wires, asked: BTreeMap::new() };
    let mut wire = bare::connect(cluster.addresses(leader).client);
    let (mut woken, mut late_ms) = (BTreeMap::<(&str, usize), usize>::new(), Vec::new());
    for round in 0..rounds {
        let mut scenes = Vec::new();
        // Each kind once for each node, which its first waiter asks.
        for node in 0..crowd.wires.len() {
            let nodes = crowd.wires.len();
            for cast in casts(round * nodes + node) {
                scenes.push(Scene::open(&mut wire, cast, node, nodes));
                keep_holding(&mut wire, &scenes);
            }
        }
        queue_up(&mut wire, &mut crowd, &scenes);
        late_ms.extend(wait_for_the_ends(&mut crowd, &mut scenes));
        for scene in &scenes {
            scene.judge(&mut wire);
            for waiter in scene.grants.keys() {
                *woken.entry((scene.cast.name, scene.waiters[*waiter].1)).or_default() += 1;
            }
        }
        give_back(&mut crowd, &scenes);
    }
    late_ms.sort_by(f64::total_cmp);
    println!(
        "woken by kind and node: {woken:?}; {:.0} ms after the TTL (and the delay, if there was one) in the median, {:.0} \
         ms at most",
        late_ms[late_ms.len() / 2],
        late_ms[late_ms.len() - 1]
    );
}

/// Every waiter is queued, in its order, while the holders are alive.
fn queue_up(wire: &mut Wire, crowd: &mut Crowd, scenes: &[Scene]) {
    let longest = scenes.iter().map(|scene| scene.waiters.len()).max().unwrap_or(0);
    for place in 0..longest {
        let mut asked = 0;
        for (index, scene) in scenes.iter().enumerate() {
            let Some((lease, via)) = scene.waiters.get(place) else { continue };
            let acquire = lease.acquire_all(1, scene.wants(place), (FOR_EVER, 0));
            crowd.send(*via, (index, place, false), acquire);
            asked += 1;
        }
        for _ in 0..asked {
            let ((scene, ..), outcome) = crowd.next();
            let queued =
                matches!(outcome, Outcome::Queued { position, .. } if position as usize == place);
            assert!(queued, "INVALID: {}: {outcome:?} at place {place}", scenes[scene].cast.name);
        }
        keep_holding(wire, scenes);
    }
}

/// The holders are not silent yet.
fn keep_holding(wire: &mut Wire, scenes: &[Scene]) {
    let holders: Vec<Lease> = scenes.iter().flat_map(|scene| scene.silent.clone()).collect();
    match bare::call(wire, &bare::renewal(&holders)) {
        Reply::Renewed(reply) => {
            let alive = reply.results.iter().all(|result| result.error.is_none());
            assert!(alive, "INVALID: holders ended too early: {reply:?}");
        }
        reply => panic!("not renewed: {reply:?}"),
    }
}

/// Returns how late after each last hold's end the first of its waiters heard of its grant, in
/// milliseconds.
fn wait_for_the_ends(crowd: &mut Crowd, scenes: &mut [Scene]) -> Vec<f64> {
    let silent_ns = now_ns();
    let mut late_ms = Vec::new();
    while !scenes.iter().all(Scene::is_woken) {
        let ((scene, waiter, _), outcome) = crowd.next();
        if matches!(outcome, Outcome::Queued { .. }) {
            continue;
        }
        let scene = &mut scenes[scene];
        let grant = granted(outcome);
        assert!(waiter < scene.cast.woken.len(), "{}: it passed by: {grant:?}", scene.cast.name);
        if scene.grants.is_empty() {
            let due_ms = TTL_MS + scene.cast.delay_ms;
            late_ms.push(to_ms(now_ns() - silent_ns) - f64::from(due_ms));
        }
        scene.grants.insert(waiter, grant);
    }
    late_ms
}

/// All that were woken release, and so do those behind them when it is their turn.
fn give_back(crowd: &mut Crowd, scenes: &[Scene]) {
    let release = |crowd: &mut Crowd, scene: usize, waiter: usize| {
        let (lease, via) = scenes[scene].waiters[waiter];
        crowd.send(via, (scene, waiter, true), lease.release_all(3, 1));
    };
    for (index, scene) in scenes.iter().enumerate() {
        for waiter in scene.grants.keys() {
            release(crowd, index, *waiter);
        }
    }
    let mut left: usize = scenes.iter().map(|scene| scene.waiters.len()).sum();
    while left > 0 {
        match crowd.next() {
            (_, Outcome::Queued { .. }) => {}
            ((_, _, true), Outcome::Released { .. }) => left -= 1,
            ((scene, waiter, false), Outcome::Granted(_)) => release(crowd, scene, waiter),
            (name, outcome) => panic!("{name:?}: {outcome:?}"),
        }
    }
}
