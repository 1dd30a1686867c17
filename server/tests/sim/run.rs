//! One run: form the cluster, let clients work through a storm of faults, let everything heal,
//! and check.

use std::cell::Cell;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::invariants;
use leasehold_server::rt::sim::{DomainId, JoinHandle, SimRng, SimRt, SimWorld};
use openraft_rt::AsyncRuntime;

use crate::check::{check, expiries};
use crate::client::Client;
use crate::cluster::Cluster;
use crate::faults::{Tally, storm};
use crate::history::History;
use crate::node::Node;
use crate::params::{Params, draw_rate_ppm, draw_ttl_ms};

/// Within this, after all faults are taken back, everything must work again.
const HEAL_LIMIT: Duration = Duration::from_mins(1);

/// A run with fewer grants proves nothing.
const GRANTS_MIN: usize = 20;

struct Work {
    domains: Vec<DomainId>,
    clients: Vec<JoinHandle<()>>,
    stop: Rc<Cell<bool>>,
    history: Rc<History>,
}

pub(crate) fn run_seed(seed: u64) -> ExitCode {
    let params = Params::draw(&SimRng::new(seed));
    let mut rt = SimRt::with_config(seed, params.world);
    let world = rt.world().clone();
    let (cluster, history, tally) = rt.block_on(async {
        let cluster = Cluster::start(&world, params);
        cluster.form().await;
        let work = start_clients(&cluster, params);
        let storm = storm(&cluster, &work.domains, params.storm, params.fault_pause_max);
        let tally = storm.await;
        let history = work.history.clone();
        heal(&cluster, work).await;
        check(&cluster.ledger, &history, &cluster.violations);
        (cluster, history, tally)
    });
    report(seed, &cluster, &history, &tally)
}

fn start_clients(cluster: &Cluster, params: Params) -> Work {
    let (stop, history) = (Rc::new(Cell::new(false)), Rc::new(History::default()));
    let mut work = Work { domains: vec![], clients: vec![], stop, history };
    let world = &cluster.world;
    for id in 1..=params.clients {
        let rate_ppm = draw_rate_ppm(world.rng());
        let domain = world.add_domain(Duration::from_secs(id), rate_ppm);
        let client = Client {
            id,
            host: cluster.net.host(domain),
            domain,
            rate_ppm,
            ttl_ms: draw_ttl_ms(world.rng()),
            rng: world.rng().fork(),
            params,
            history: work.history.clone(),
            stop: work.stop.clone(),
        };
        work.domains.push(domain);
        work.clients.push(SimRt::spawn(supervise(world.clone(), Rc::new(client))));
    }
    work
}

/// A client that is killed comes back as a new one after a while.
async fn supervise(world: SimWorld, client: Rc<Client>) {
    while world.spawn_in(client.domain, client.clone().run()).await.is_err() {
        SimRt::sleep(Duration::from_millis(world.rng().below(3_000))).await;
        world.revive(client.domain);
    }
}

/// G8: without faults, all clients come to their end and all nodes agree.
async fn heal(cluster: &Cluster, work: Work) {
    work.stop.set(true);
    let finish = async {
        for client in work.clients {
            client.await.expect("the harness lives");
        }
        while !cluster.agrees() {
            SimRt::sleep(Duration::from_millis(5)).await;
        }
    };
    if SimRt::timeout(HEAL_LIMIT, finish).await.is_err() {
        let look = |machine: &Rc<crate::cluster::Machine>| {
            let status = |node: Node| {
                node.shards.iter().map(|shard| shard.group.status()).collect::<Vec<_>>()
            };
            format!("node {}: {:?}", machine.node, machine.running().map(status))
        };
        let nodes: Vec<_> = cluster.machines.iter().map(look).collect();
        cluster.violations.add("G8", &format!("not healed after {HEAL_LIMIT:?}: {nodes:?}"));
    }
    for machine in &cluster.machines {
        let Some(node) = machine.running() else { continue };
        for shard in &*node.shards {
            if let Err(what) = invariants::check(&shard.state.borrow()) {
                let text = format!("node {}, shard {}: {what}", machine.node, shard.id);
                cluster.violations.add("state", &text);
            }
        }
    }
}

fn report(seed: u64, cluster: &Cluster, history: &History, tally: &Tally) -> ExitCode {
    let world = &cluster.world;
    let boots: u64 = cluster.machines.iter().map(|machine| machine.boots()).sum();
    let grants = history.holds.borrow().len();
    let expiries = expiries(&cluster.ledger);
    println!(
        "seed {seed}: hash {:016x}  {:.1} s simulated, {} polls, {grants} grants, {} acknowledged, \
         {} reads, {} retries, {} sessions lost, {expiries} expired, {boots} boots, {} faults ({})",
        world.hash(),
        world.now_ns() as f64 / 1e9,
        world.polls(),
        history.acked.borrow().len(),
        history.reads.borrow().len(),
        history.retries.get(),
        history.lost.get(),
        tally.total(),
        tally.text(),
    );
    let violations = cluster.violations.list();
    for violation in &violations {
        println!("seed {seed}: VIOLATION of {violation}");
    }
    if !violations.is_empty() {
        println!("again: cargo test -p leasehold-server --test sim -- --seed {seed}");
        return ExitCode::from(1);
    }
    if grants < GRANTS_MIN || tally.total() == 0 {
        println!("seed {seed}: INVALID, too little happened");
        return ExitCode::from(2);
    }
    ExitCode::SUCCESS
}
