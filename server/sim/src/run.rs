//! One run: form the cluster, let clients work through a storm of faults, let everything heal,
//! and check.

use std::cell::Cell;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use leasehold_bench::check::{self, Report, Verdict};
use leasehold_bench::history::FaultKind;
use leasehold_core::invariants;
use leasehold_server::raft::GroupStatus;
use leasehold_server::rt::sim::{DomainId, JoinHandle, SimRng, SimRt, SimWorld};
use openraft_rt::AsyncRuntime;

use crate::bridge;
use crate::client::{Board, Client};
use crate::cluster::{Cluster, Machine};
use crate::coverage::Seen;
use crate::faults::{Swarm, storm};
use crate::feed::Feed;
use crate::history::History;
use crate::judge::{self, SERVED_MIN};
use crate::keeper::Keeper;
use crate::logs::{self, Logs};
use crate::node::{Hosted, Node};
use crate::operator::Operator;
use crate::params::{Params, draw_rate_ppm};
use crate::restore::restore;
use crate::wake;
use crate::witness::Witness;

/// Within this, after all faults are taken back, everything must work again.
const HEAL_LIMIT: Duration = Duration::from_mins(1);

/// Watches of one client, at most.
const WATCHES_MAX: u64 = 2;

struct Work {
    domains: Vec<DomainId>,
    clients: Vec<JoinHandle<()>>,
    calm: Rc<Cell<bool>>,
    stop: Rc<Cell<bool>>,
    history: Rc<History>,
    feeds: Vec<Rc<Feed>>,
    operator: Option<(Rc<Operator>, JoinHandle<()>)>,
    keeper: Option<Rc<Keeper>>,
}

pub(crate) fn run_seed(seed: u64) -> ExitCode {
    let rng = SimRng::new(seed);
    let (params, swarm) = (Params::draw(&rng), Swarm::draw(&rng));
    let mut rt = SimRt::with_config(seed, params.world);
    let world = rt.world().clone();
    let (cluster, history, reports) = rt.block_on(async {
        let cluster = Cluster::start(&world, &params);
        cluster.form().await;
        let logs = Rc::new(Logs::default());
        drop(SimRt::spawn(logs::watch(cluster.clone(), logs.clone())));
        let work = start_clients(&cluster, &params, swarm.clocks_lie);
        storm(&cluster, &work.domains, &swarm).await;
        let (history, feeds) = (work.history.clone(), work.feeds.clone());
        let keeper = work.keeper.clone();
        history.fault(FaultKind::Healed, 0);
        heal(&cluster, work).await;
        logs.look(&cluster);
        cluster.coverage.add(Figure::CommittedEntries, logs.committed());
        cluster.coverage.add(Seen::MajorityCompared, logs.majorities());
        cluster.coverage.add(Seen::VoteCompared, logs.votes());
        judge::look(&cluster, &history);
        let reports = judge::judge(&cluster, &history, &feeds, swarm.clocks_lie);
        wake::tell(&cluster).await;
        if let Some(contents) = keeper.and_then(|keeper| keeper.stop()) {
            restore(&cluster, &contents).await;
        }
        (cluster, history, reports)
    });
    count(&cluster, &history);
    report(seed, &cluster, &history, &swarm, &reports)
}

fn start_clients(cluster: &Rc<Cluster>, params: &Params, clocks_lie: bool) -> Work {
    let (calm, stop) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
    let history = Rc::new(History::default());
    let (board, witness) = (Rc::new(Board::default()), Witness::new(cluster, clocks_lie));
    let operator = params.operates.then(|| Operator::new(cluster));
    let operator = operator.map(|operator| (operator.clone(), SimRt::spawn(operator.run())));
    let keeper = params.backs_up.then(|| Keeper::new(cluster));
    if let Some(keeper) = &keeper {
        drop(SimRt::spawn(keeper.clone().run()));
    }
    let (domains, clients, feeds) = (vec![], vec![], vec![]);
    let mut work = Work { domains, clients, calm, stop, history, feeds, operator, keeper };
    let world = &cluster.world;
    for id in 1..=params.clients {
        let rate_ppm = draw_rate_ppm(world.rng());
        let domain = world.add_domain(Duration::from_secs(id), rate_ppm);
        let watches = world.rng().below(WATCHES_MAX + 1);
        let feed = |_| Feed::draw(world.rng(), params, &witness, id);
        let feeds: Vec<_> = (0..watches).map(feed).collect();
        work.feeds.extend(feeds.iter().cloned());
        let client = Client {
            id,
            host: cluster.net.host(domain),
            domain,
            rate_ppm,
            ttl_ms: params.draw_ttl_ms(world.rng()),
            rng: world.rng().fork(),
            params: *params,
            history: work.history.clone(),
            board: board.clone(),
            witness: witness.clone(),
            known: cluster.directory.clone(),
            reads_ms: world.rng().chance(400).then(|| 20 + world.rng().below(300)),
            feeds,
            calm: work.calm.clone(),
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

/// G8: without faults the cluster serves, all clients come to their end and all nodes agree.
async fn heal(cluster: &Rc<Cluster>, work: Work) {
    work.calm.set(true);
    let healed = async {
        for shard in judge::used_shards(cluster) {
            let before = work.history.granted(shard);
            while work.history.granted(shard) < before + SERVED_MIN {
                SimRt::sleep(Duration::from_millis(5)).await;
            }
        }
        cluster.timeline.note("every shard served since the storm".to_owned());
        if let Some((operator, task)) = work.operator {
            settle(cluster, &operator, task).await;
        }
        bridge::serve(cluster, &work.history).await;
        work.stop.set(true);
        for client in work.clients {
            client.await.expect("the harness lives");
        }
        while !cluster.agrees() {
            SimRt::sleep(Duration::from_millis(5)).await;
        }
    };
    if SimRt::timeout(HEAL_LIMIT, healed).await.is_err() {
        let nodes: Vec<_> = cluster.machines().iter().map(|machine| look(machine)).collect();
        cluster.violations.add("G8", &format!("not healed after {HEAL_LIMIT:?}: {nodes:?}"));
    }
    for machine in &cluster.machines() {
        inspect(cluster, machine);
    }
}

/// The change of the members that is under way comes to its end, and they are what was asked for.
async fn settle(cluster: &Cluster, operator: &Operator, task: JoinHandle<()>) {
    if operator.misses_a_node() {
        cluster.coverage.count(Seen::ServedWithoutNew);
    }
    operator.settle();
    task.await.expect("the harness lives");
    while !cluster.is_settled() {
        SimRt::sleep(Duration::from_millis(5)).await;
    }
    operator.judge().await;
    cluster.timeline.note("the members are settled".to_owned());
}

fn look(machine: &Machine) -> String {
    let status = |hosted: &Hosted| {
        let GroupStatus { role, term, leader, last_index, applied_index, .. } =
            hosted.group.status();
        let voters = hosted.group.membership().voters;
        let voters: Vec<Vec<u64>> =
            voters.iter().map(|set| set.iter().map(|node| node.0).collect()).collect();
        format!("{role:?} {term} of {leader:?} {applied_index}/{last_index}, voters {voters:?}")
    };
    let shards = |node: Node| node.shards.iter().map(status).collect::<Vec<_>>();
    format!("node {}: {:?}", machine.node, machine.running().map(shards))
}

/// What must be so of a node at the end.
fn inspect(cluster: &Cluster, machine: &Machine) {
    if machine.outlives_its_disk() {
        let what = format!("node {} goes on after its disk failed", machine.node);
        cluster.violations.add("G5", &what);
    }
    let Some(node) = machine.running() else { return };
    for shard in &*node.shards {
        let name = format!("node {}, shard {}", machine.node, shard.id);
        if let Err(what) = invariants::check(&shard.state.borrow()) {
            cluster.violations.add("state", &format!("{name}: {what}"));
        }
        // A wiped member hears of nothing and decides nothing.
        if machine.is_wiped() && shard.group.status().last_index > 0 {
            cluster.violations.add("G5", &format!("{name} was wiped and takes part"));
        }
    }
}

fn count(cluster: &Cluster, history: &History) {
    let coverage = &cluster.coverage;
    coverage.add(Seen::Retry, history.retries.get());
    coverage.add(Seen::UnknownOutcome, history.unknown.get());
    coverage.add(Seen::SessionLost, history.lost.get());
    coverage.add(Seen::LeaseExpired, cluster.ledger.expiries());
    coverage.add(Seen::Cancel, judge::cancels(&history.records(vec![])));
    coverage.count(match cluster.params.nodes {
        1 => Seen::OneNode,
        3 => Seen::ThreeNodes,
        _ => Seen::FiveNodes,
    });
    coverage.add(Seen::SeveralShards, u64::from(cluster.params.shards > 1));
    coverage.add(Figure::SimulatedMs, cluster.world.now_ns() / 1_000_000);
    coverage.add(Figure::Operations, history.operations());
}

/// Figures that are no faults and need not be there.
#[derive(Clone, Copy, Debug)]
enum Figure {
    SimulatedMs,
    Operations,
    /// Entries whose place in all logs was compared.
    CommittedEntries,
}

fn report(
    seed: u64,
    cluster: &Cluster,
    history: &History,
    swarm: &Swarm,
    reports: &[Report],
) -> ExitCode {
    let (world, params) = (&cluster.world, &cluster.params);
    let boots: u64 = cluster.machines().iter().map(|machine| machine.boots()).sum();
    println!(
        "seed {seed}: hash {:016x}  {} nodes, {} shards, {} clients, {:.1} s simulated, {} polls, \
         {} operations, {boots} boots, {} faults{}",
        world.hash(),
        params.nodes,
        params.shards,
        params.clients,
        world.now_ns() as f64 / 1e9,
        world.polls(),
        history.operations(),
        cluster.coverage.faults(),
        if swarm.clocks_lie { "; clocks lied: nothing is concluded from TTLs" } else { "" },
    );
    println!("{}", cluster.coverage.line());
    for report in reports.iter().filter(|report| report.violations_total > 0) {
        for text in &report.violations {
            cluster.violations.add(report.guarantee, text);
        }
    }
    let violations = cluster.violations.list();
    if violations.is_empty() {
        if check::worst(reports) == Verdict::Ok {
            return ExitCode::SUCCESS;
        }
        print!("seed {seed}: INVALID\n{}", check::text(reports));
        return ExitCode::from(2);
    }
    for violation in &violations {
        println!("seed {seed}: VIOLATION of {violation}");
    }
    cluster.timeline.show(seed, &cluster.ledger, &violations);
    println!("again: make sim SEED={seed}");
    ExitCode::from(1)
}
