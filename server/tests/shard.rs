//! One shard's service on simulated nodes: what it answers when its node was deposed, lags, stood
//! still or is about to end a lease (G1, G3, G4, G7). Each schedule is made by hand.

mod raft_support;
#[path = "shard/restored.rs"]
mod restored;

#[path = "shard/given_up.rs"]
mod given_up;
#[path = "shard/members.rs"]
mod members;

#[path = "shard/delays.rs"]
mod delays;
#[path = "shard/far.rs"]
mod far;
#[path = "shard/following.rs"]
mod following;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, ready};
use leasehold_core::State;
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::{Event, EventKind};
use leasehold_protocol::ids::{HoldSetVersion, LeaseId, Mode, NodeId, Number, Secret, Token};
use leasehold_protocol::outcome::{Grant, Outcome};
use leasehold_protocol::reply::{OutcomeReply, RenewReply, Reply};
use leasehold_protocol::request::{
    CommandRequest, Freshness, GetRequest, RenewItem, RenewRequest, Request,
};
use leasehold_server::admin::Metrics;
use leasehold_server::disk::sim::SimDiskConfig;
use leasehold_server::env::Clock;
use leasehold_server::lease::CoreWheel;
use leasehold_server::net::{ForwardService, Hop, Hops, ReplySink, ReplyTo, Router};
use leasehold_server::raft::{ApplySink, GroupSpec, PeerInfo, PeerService};
use leasehold_server::rt::sim::{SimClock, SimRt};
use leasehold_server::shard::{Beginning, FORWARD_KIND, Origin, Shard, ShardCore, run_wheel};
use leasehold_server::watch::Sizes;
use openraft::AsyncRuntime;
use raft_support::{CLUSTER, Cluster, Running, SHARD, SimEnv, run, sleep_ms, until};

const TTL_MS: u32 = 2_000;
const SECRET: Secret = Secret([5; 16]);
const KEY: &[u8] = b"k";
const TIMEOUT_MS: u32 = 1_500;

/// Passes on to the shard what its node applied.
struct Sink(Rc<Shard<SimEnv>>);

impl ApplySink for Sink {
    fn applied(&self, _state: &State, events: &[Event]) {
        self.0.applied(events);
    }

    fn answered(&self) {
        self.0.answered();
    }

    fn installed(&self, _state: &State) {
        self.0.installed();
    }
}

struct NoHops;

impl Hops for NoHops {
    fn send(&self, _core: usize, hop: Hop) -> Result<(), Hop> {
        Err(hop)
    }
}

/// Answers what other nodes forward.
struct Forwarded(Rc<ForwardService<SimEnv>>);

impl PeerService for Forwarded {
    fn handle(
        &self,
        _from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>> {
        if kind != FORWARD_KIND {
            return ready(Err(ErrorCode::UNKNOWN_KIND)).boxed_local();
        }
        let (forward, body) = (self.0.clone(), body.to_vec());
        async move { forward.forwarded(&body).await }.boxed_local()
    }
}

fn start_shard(running: &Running, beginning: Beginning) -> Rc<Shard<SimEnv>> {
    let (shard, router) = start_routed(running, beginning);
    running.peers.set_service(Rc::new(Forwarded(Rc::new(ForwardService::new(router)))));
    shard
}

/// A running shard and the router over it.
fn start_routed(
    running: &Running,
    beginning: Beginning,
) -> (Rc<Shard<SimEnv>>, Rc<Router<SimEnv>>) {
    let wheel = CoreWheel::new(SimClock.now());
    let metrics = Metrics::new(1, 1).handle(0);
    let core = ShardCore {
        shards_total: 1,
        clock: SimClock,
        wheel: wheel.clone(),
        metrics,
        watch_sizes: Sizes::of(1),
    };
    let Running { group, state, peers, seen, .. } = running.clone();
    let shard = Shard::new(SHARD, group, state, peers.clone(), core);
    seen.other.replace(Some(Rc::new(Sink(shard.clone()))));
    let founders = BTreeMap::new();
    let router = Router::new(
        (0, 1),
        (CLUSTER, 1),
        vec![shard.clone()],
        peers.clone(),
        founders,
        Rc::new(NoHops),
    );
    drop(SimRt::spawn(shard.clone().run_proposals()));
    drop(SimRt::spawn(shard.clone().run_deadlines()));
    drop(SimRt::spawn(shard.clone().run_leadership(beginning)));
    drop(SimRt::spawn(shard.clone().run_watches()));
    drop(SimRt::spawn(shard.clone().run_freshness()));
    drop(SimRt::spawn(run_wheel(wheel, vec![shard.clone()], SimClock)));
    (shard, router)
}

/// The replies to one request.
#[derive(Clone, Default)]
struct Replies(Rc<RefCell<Vec<Reply>>>);

impl ReplySink for Replies {
    fn reply(&self, _id: u64, reply: &Reply) {
        self.0.borrow_mut().push(reply.clone());
    }
}

impl Replies {
    fn last(&self) -> Option<Reply> {
        self.0.borrow().last().cloned()
    }

    /// The last reply, once it satisfies.
    async fn reply(&self, what: &str, fits: impl Fn(&Reply) -> bool) -> Reply {
        until(what, || self.last().as_ref().is_some_and(&fits)).await;
        self.last().expect("just seen")
    }

    fn error(&self) -> Option<ErrorCode> {
        match self.last() {
            Some(Reply::Error(error)) => Some(error.code),
            _ => None,
        }
    }

    /// What became of the one lease of a renewal: nothing yet, renewed, or refused.
    fn renewal(&self) -> Option<Result<(), ErrorCode>> {
        match self.last()? {
            Reply::Renewed(RenewReply { results, .. }) => {
                Some(results[0].error.map_or(Ok(()), Err))
            }
            Reply::Error(error) => Some(Err(error.code)),
            other => panic!("a renewal is answered {other:?}"),
        }
    }
}

/// Nodes that serve one shard.
struct Service {
    cluster: Cluster,
    shards: BTreeMap<u64, Rc<Shard<SimEnv>>>,
}

impl Service {
    async fn start(nodes: u64, spec: impl Fn(&mut GroupSpec) + 'static) -> Self {
        Self::start_with(nodes, spec, Token(100).into()).await
    }

    async fn start_with(
        nodes: u64,
        spec: impl Fn(&mut GroupSpec) + 'static,
        beginning: Beginning,
    ) -> Self {
        let cluster = Cluster::formed_with(nodes, spec).await;
        let mut shards = BTreeMap::new();
        for (node, machine) in &cluster.machines {
            let running = cluster.running(*node);
            let start = async move { start_shard(&running, beginning) };
            let shard = cluster.world.spawn_in(machine.domain, start).await;
            shards.insert(*node, shard.expect("nobody kills it"));
        }
        let service = Self { cluster, shards };
        let begun = || service.cluster.machines.keys().all(|node| service.state(*node).begun());
        until("the token base is applied", begun).await;
        service
    }

    fn state(&self, node: u64) -> std::cell::Ref<'_, State> {
        // Borrowed through the shard, which lives as long as this.
        self.shards[&node].state().borrow()
    }

    fn ask(&self, node: u64, request: Request) -> Replies {
        let replies = Replies::default();
        let (shard, to) = (self.shards[&node].clone(), ReplyTo::new(Rc::new(replies.clone()), 1));
        let submit = async move { shard.submit(request, to, Origin::Client) };
        drop(self.cluster.world.spawn_in(self.cluster.machine(node).domain, submit));
        replies
    }

    fn command(&self, node: u64, command: Command) -> Replies {
        let request = CommandRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, command };
        self.ask(node, Request::Command(request))
    }

    async fn outcome(&self, node: u64, command: Command) -> Outcome {
        let replies = self.command(node, command);
        let is_outcome = |reply: &Reply| matches!(reply, Reply::Outcome(_));
        match replies.reply("an outcome", is_outcome).await {
            Reply::Outcome(OutcomeReply { outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    async fn open(&self, node: u64) -> LeaseId {
        self.open_for(node, TTL_MS).await
    }

    async fn open_for(&self, node: u64, ttl_ms: u32) -> LeaseId {
        let open = Command::Open { ttl_ms, secret: SECRET, label: vec![] };
        match self.outcome(node, open).await {
            Outcome::Opened { lease, .. } => lease,
            other => panic!("{other:?}"),
        }
    }

    async fn acquire(&self, node: u64, lease: LeaseId, number: u64) -> Grant {
        match self.outcome(node, acquire(lease, number, 0)).await {
            Outcome::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    fn renew(&self, node: u64, lease: LeaseId) -> Replies {
        let item = RenewItem { lease, secret: SECRET, version: HoldSetVersion(0) };
        let request = RenewRequest { shard: SHARD, timeout_ms: TIMEOUT_MS, items: vec![item] };
        self.ask(node, Request::Renew(request))
    }

    fn get(&self, node: u64) -> Replies {
        let freshness = Freshness::Linearizable;
        self.ask(
            node,
            Request::Get(GetRequest {
                key: KEY.to_vec(),
                holders_after: LeaseId(0),
                freshness,
                timeout_ms: TIMEOUT_MS,
            }),
        )
    }

    /// More commands, one after the other, than may be proposed at a time; the answer to the last.
    async fn last_of_a_crowd(&self, node: u64, timeout_ms: u32) -> Option<ErrorCode> {
        let mut last = Replies::default();
        for _ in 0..8 {
            let command = Command::Open { ttl_ms: TTL_MS, secret: SECRET, label: vec![] };
            let request = CommandRequest { shard: SHARD, timeout_ms, command };
            last = self.ask(node, Request::Command(request));
            sleep_ms(5).await;
        }
        last.reply("an error", |reply| matches!(reply, Reply::Error(_))).await;
        last.error()
    }

    /// Cuts a node off from the others, or lets it back.
    fn isolate(&self, node: u64) {
        let us = self.cluster.machine(node).domain;
        for (_, machine) in self.cluster.machines.iter().filter(|(other, _)| **other != node) {
            self.cluster.net.partition(&[us], &[machine.domain]);
        }
    }

    fn has_ended(&self, node: u64, lease: LeaseId) -> bool {
        self.state(node).lease(lease).is_none()
    }
}

fn caller(lease: LeaseId, number: u64) -> Caller {
    Caller { lease, secret: SECRET, number: Number(number), floor: Number(0), acks: vec![] }
}

fn acquire(lease: LeaseId, number: u64, wait_ms: u32) -> Command {
    Command::Acquire {
        caller: caller(lease, number),
        key: KEY.to_vec(),
        mode: Mode::EXCLUSIVE,
        own: None,
        value: vec![],
        wait_ms,
    }
}

fn release(lease: LeaseId, number: u64, token: Token) -> Command {
    Command::Release { caller: caller(lease, number), key: KEY.to_vec(), token }
}

#[test]
fn a_leader_that_was_deposed_renews_and_reads_nothing() {
    run(1, async {
        let service = Service::start(3, |_| {}).await;
        let (old, _) = service.cluster.leader().await;
        let lease = service.open(old).await;
        service.acquire(old, lease, 1).await;
        service.isolate(old);
        let (new, _) = service.cluster.leader_but(old).await;
        service.open(new).await;
        assert!(service.cluster.group(old).leadership().is_some(), "it does not know yet");
        let (renewal, read) = (service.renew(old, lease), service.get(old));
        sleep_ms(u64::from(TIMEOUT_MS) + 100).await;
        assert_eq!(renewal.renewal(), Some(Err(ErrorCode::NO_QUORUM)));
        assert_eq!(read.error(), Some(ErrorCode::NO_QUORUM));
    });
}

/// What waits for its turn until its time is over is told why: the shard has more to do than it can,
/// or nobody to agree with.
#[test]
fn what_waits_too_long_hears_whether_the_shard_commits_anything() {
    run(1, async {
        let service = Service::start(3, |_| {}).await;
        let (leader, _) = service.cluster.leader().await;
        let disks = |config| {
            let machines = service.cluster.machines.values();
            machines.for_each(|machine| machine.disk.borrow().set_config(config));
        };
        let slow = Duration::from_millis(150);
        disks(SimDiskConfig { sync_min: slow, sync_max: slow, ..SimDiskConfig::default() });
        service.open(leader).await;
        assert_eq!(service.last_of_a_crowd(leader, 40).await, Some(ErrorCode::BUSY));
        disks(SimDiskConfig::default());
        sleep_ms(1_000).await;
        // Slow disks may have cost it its leadership.
        let (leader, _) = service.cluster.leader().await;
        service.open(leader).await;
        service.isolate(leader);
        assert_eq!(service.last_of_a_crowd(leader, 1_500).await, Some(ErrorCode::NO_QUORUM));
    });
}

#[test]
fn a_node_that_lags_does_not_say_that_a_lease_is_dead() {
    run(2, async {
        let service = Service::start(3, |_| {}).await;
        let (leader, _) = service.cluster.leader().await;
        let lagging = leader % 3 + 1;
        service.isolate(lagging);
        let lease = service.open(leader).await;
        assert!(service.has_ended(lagging, lease), "it has not heard of it yet");
        let renewal = service.renew(lagging, lease);
        sleep_ms(u64::from(TIMEOUT_MS) + 100).await;
        let refusal = renewal.renewal().expect("answered by its deadline");
        assert!(matches!(refusal, Err(code) if code != ErrorCode::LEASE_DEAD), "{refusal:?}");
        service.cluster.net.heal_all();
        service.cluster.agree().await;
        let renewal = service.renew(lagging, lease);
        until("the leader renews it", || renewal.renewal() == Some(Ok(()))).await;
    });
}

/// The end of a lease is in the log and its commit takes long; meanwhile a majority still confirms
/// rounds.
#[test]
fn a_lease_whose_end_is_on_its_way_is_not_renewed() {
    let mut refused = 0;
    for seed in 0..6 {
        run(30 + seed, async {
            let service = Service::start(3, |_| {}).await;
            let (leader, _) = service.cluster.leader().await;
            let lease = service.open(leader).await;
            let last = service.cluster.group(leader).status().last_index;
            let slow = Duration::from_millis(400);
            for (_, machine) in service.cluster.machines.iter().filter(|(node, _)| **node != leader)
            {
                let config = SimDiskConfig { sync_max: slow, ..SimDiskConfig::default() };
                machine.disk.borrow().set_config(config);
            }
            let proposed = || service.cluster.group(leader).status().last_index > last;
            until("its end is proposed", proposed).await;
            assert!(!service.has_ended(leader, lease), "seed {seed}: not committed yet");
            let renewal = service.renew(leader, lease);
            until("the renewal is answered", || renewal.renewal().is_some()).await;
            let answer = renewal.renewal().expect("just seen");
            let known = matches!(answer, Err(ErrorCode::LEASE_EXPIRING | ErrorCode::LEASE_DEAD));
            assert!(known, "seed {seed}: {answer:?}");
            refused += usize::from(answer == Err(ErrorCode::LEASE_EXPIRING));
            until("the lease ends", || service.has_ended(leader, lease)).await;
        });
    }
    assert!(refused > 0, "no renewal came in between");
}

#[test]
fn a_leader_that_stood_still_gives_its_clients_the_time_back() {
    let ttl = u64::from(TTL_MS);
    for (stunned_ms, late_ms) in [(ttl / 2, 150), (ttl, 150), (3 * ttl, 0)] {
        run(4, async {
            let service = Service::start(1, |_| {}).await;
            let lease = service.open(1).await;
            service.acquire(1, lease, 1).await;
            sleep_ms(ttl - 300).await;
            let (world, domain) = (&service.cluster.world, service.cluster.machine(1).domain);
            world.stun(domain, Duration::from_millis(stunned_ms));
            // What was left of the TTL is left when it goes on. It gives back one TTL at most, but
            // a renewal that came while it stood still is served before anything ends.
            sleep_ms(if late_ms == 0 { 1 } else { stunned_ms + late_ms }).await;
            let renewal = service.renew(1, lease);
            until("the renewal is answered", || renewal.renewal().is_some()).await;
            assert_eq!(renewal.renewal(), Some(Ok(())), "stunned for {stunned_ms} ms");
            until("it ends in its time", || service.has_ended(1, lease)).await;
        });
    }
}

#[test]
fn a_wait_that_ended_within_a_snapshot_is_asked_for_again() {
    run(5, async {
        let few = |spec: &mut GroupSpec| (spec.snapshot_entries, spec.log_keep) = (20, 40);
        let service = Service::start(3, few).await;
        let (leader, _) = service.cluster.leader().await;
        let away = leader % 3 + 1;
        let holder = service.open_for(leader, 60_000).await;
        let waiter = service.open_for(leader, 60_000).await;
        let grant = service.acquire(leader, holder, 1).await;
        let waiting = service.command(away, acquire(waiter, 1, 60_000));
        let queued = |reply: &Reply| {
            matches!(reply, Reply::Outcome(OutcomeReply { outcome: Outcome::Queued { .. }, .. }))
        };
        waiting.reply("it waits", queued).await;
        service.isolate(away);
        let installed = service.cluster.running(away).seen.installed.get();
        let passed_on = service.outcome(leader, release(holder, 3, grant.token)).await;
        assert!(matches!(passed_on, Outcome::Released { .. }));
        for _ in 0..150 {
            service.open(leader).await;
        }
        let group = service.cluster.group(leader);
        until("the log is cut", || group.status().purged_index > 60).await;
        // What the streams still hold must not come first.
        for machine in service.cluster.machines.values() {
            let away = service.cluster.machine(away).domain;
            service.cluster.net.break_streams(away, machine.domain);
        }
        service.cluster.net.heal_all();
        let seen = service.cluster.running(away).seen;
        until("the snapshot arrives", || seen.installed.get() > installed).await;
        let told = |event: &Event| matches!(event.kind, EventKind::WaitEnded { .. });
        assert!(!seen.events.borrow().iter().any(told), "the wait's end was in the snapshot");
        let resync =
            |reply: &Reply| matches!(reply, Reply::Error(error) if error.code == ErrorCode::RESYNC);
        waiting.reply("its client is told to ask again", resync).await;
        let again = service.outcome(leader, acquire(waiter, 1, 60_000)).await;
        assert!(matches!(again, Outcome::Granted(_)), "{again:?}");
        assert_eq!(
            service.cluster.leader_now().map(|(node, _)| NodeId(node)),
            Some(NodeId(leader))
        );
    });
}
