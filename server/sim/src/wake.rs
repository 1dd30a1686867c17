//! G4 past a snapshot: a client that waits at a follower and asks nothing again by itself is told
//! of its grant, though the node never applied it: while it was cut off, the key was released and
//! so much happened that what it lacks comes in a snapshot.
//!
//! The clients of the storm ask again when they hear nothing, so they would not miss what they are
//! not told. This one trusts its connection: it sends again only when the node asks it to.

use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, ShardId, Token};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::{OutcomeReply, Reply};
use leasehold_protocol::request::Request;
use leasehold_protocol::shard::shard_of;
use leasehold_server::rt::channels::Receiver;
use leasehold_server::rt::sim::SimRt;
use openraft_rt::{AsyncRuntime, MpscReceiver};

use crate::asker::{Asker, is_certain, request};
use crate::cluster::{Cluster, Machine};
use crate::coverage::Seen;
use crate::inject::both_ways;
use crate::link::Link;
use crate::node::CLUSTER;

/// Where logs are kept for longer, too much would have to happen until they are cut.
const SNAPSHOT_ENTRIES_MAX: u64 = 20;

/// Within this, simulated, after the links are healed, the waiter must be told.
const LIMIT: Duration = Duration::from_secs(10);

/// The whole step takes at most this long.
const STEP_LIMIT: Duration = Duration::from_mins(1);

/// Longer than the step: nobody renews.
const TTL_MS: u32 = 120_000;

const SECRET: Secret = Secret([9; 16]);

/// Carries it out, if the cluster is whole and it takes few entries to leave a node behind.
pub(crate) async fn tell(cluster: &Rc<Cluster>) {
    let few = cluster.params.snapshot_entries <= SNAPSHOT_ENTRIES_MAX;
    if !few || !cluster.violations.list().is_empty() {
        return;
    }
    let Some(step) = Step::draw(cluster) else { return };
    if SimRt::timeout(STEP_LIMIT, step.run()).await.is_err() {
        cluster.violations.add("G8", "a calm cluster did not serve a waiter and a holder");
    }
}

/// See the module.
struct Step<'a> {
    cluster: &'a Rc<Cluster>,
    asker: Asker,
    shard: ShardId,
    key: Vec<u8>,
    /// The follower that is left behind.
    behind: Rc<Machine>,
    others: Vec<u64>,
}

impl<'a> Step<'a> {
    fn draw(cluster: &'a Rc<Cluster>) -> Option<Self> {
        let (world, members) = (&cluster.world, cluster.members());
        let runs = members.iter().all(|member| member.running().is_some());
        if !runs || members.len() < cluster.voters().len() {
            return None;
        }
        let shard = ShardId(world.rng().below(u64::from(cluster.params.shards)) as u32);
        let leader = cluster.leader(shard)?.node;
        let followers: Vec<_> = members.iter().filter(|member| member.node != leader).collect();
        // Without the one there must be a majority.
        if followers.len() < 2 {
            return None;
        }
        let behind = followers[world.rng().below(followers.len() as u64) as usize].clone();
        let others = members.iter().map(|member| member.node);
        let others = others.filter(|node| *node != behind.node).collect();
        let mut keys = (0..).map(|number: u32| format!("wake/{number}").into_bytes());
        let key = keys.find(|key| shard_of(key, cluster.params.shards) == shard)?;
        let host = cluster.net.host(world.add_domain(Duration::from_secs(1), 0));
        let asker = Asker { host, cluster: CLUSTER, rng: world.rng().fork() };
        Some(Self { cluster, asker, shard, key, behind, others })
    }

    async fn run(&self) {
        let node = self.behind.node;
        let (holder, waiter) = (self.open().await, self.open().await);
        let granted = self.command(self.acquire(holder)).await;
        let Some(Outcome::Granted(grant)) = granted else {
            return self.wrong(&format!("an acquire of a free key gave {granted:?}"));
        };
        let Some(link) = Link::open(&self.asker.host, node).await else {
            return self.wrong(&format!("node {node} takes no connection"));
        };
        let acquire = request(self.shard, self.acquire(waiter));
        let mut answers = link.request(&acquire);
        let queued = told(&link, &acquire, &mut answers).await;
        if !queued.as_ref().is_some_and(is_queued) {
            return self.wrong(&format!("an acquire of a held key gave {queued:?}"));
        }
        let log = self.cluster.ledger.shard(self.shard);
        let installs = log.installs(node);
        self.leave_behind(holder, grant.token).await;
        let end = async {
            loop {
                let reply = told(&link, &acquire, &mut answers).await;
                if !reply.as_ref().is_some_and(is_queued) {
                    return reply;
                }
            }
        };
        match SimRt::timeout(LIMIT, end).await {
            Ok(Some(Reply::Outcome(OutcomeReply { outcome: Outcome::Granted(_), .. }))) => {
                let installed = log.installs(node) - installs;
                self.cluster.coverage.add(Seen::ToldPastSnapshot, installed);
            }
            Ok(other) => self.wrong(&format!("node {node} ends a granted wait with {other:?}")),
            Err(_) => self.wrong(&format!(
                "shard {}: node {node} came back and does not tell a waiter of its grant within \
                 {LIMIT:?}",
                self.shard
            )),
        }
    }

    /// Cuts the node off from all others, not from the waiter, until they have no log for it any
    /// more; the key is released meanwhile.
    async fn leave_behind(&self, holder: LeaseId, token: Token) {
        self.cluster.timeline.note(format!("WAKE: node {} is left behind", self.behind.node));
        let nodes: Vec<_> = self.cluster.machines().iter().map(|machine| machine.domain).collect();
        let links = both_ways(&[self.behind.domain], &nodes);
        for link in &links {
            self.cluster.cut_link(*link);
        }
        let release = Command::Release { caller: caller(holder, 3), key: self.key.clone(), token };
        let released = self.command(release).await;
        if !matches!(released, Some(Outcome::Released { .. })) {
            self.wrong(&format!("a release gave {released:?}"));
        }
        while !self.is_behind() {
            let lease = self.open().await;
            self.command(Command::Close { lease, secret: SECRET }).await;
        }
        self.cluster.timeline.note("WAKE: it is healed".to_owned());
        for link in links {
            // What stood in the streams since the cut would be entries of the log.
            self.cluster.net.lose_streams(link.0, link.1);
            self.cluster.heal_link(link);
        }
    }

    /// The leader's log begins after the end of the node's.
    fn is_behind(&self) -> bool {
        let leader = self.cluster.leader(self.shard).and_then(|leader| leader.running());
        let purged = leader.map(|node| node.shard(self.shard).group.status().purged_index);
        let last = self.behind.running();
        let last = last.map(|node| node.shard(self.shard).group.status().last_index);
        purged > last
    }

    async fn open(&self) -> LeaseId {
        let open = Command::Open { ttl_ms: TTL_MS, secret: SECRET, label: b"wake".to_vec() };
        match self.command(open).await {
            Some(Outcome::Opened { lease, .. }) => lease,
            other => panic!("an opening gave {other:?}"),
        }
    }

    fn acquire(&self, lease: LeaseId) -> Command {
        Command::Acquire {
            caller: caller(lease, 1),
            key: self.key.clone(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: vec![],
            wait_ms: u32::MAX,
        }
    }

    async fn command(&self, command: Command) -> Option<Outcome> {
        self.asker.command(&self.others, self.shard, command).await
    }

    fn wrong(&self, what: &str) {
        self.cluster.violations.add("G4", what);
    }
}

/// The next certain answer; what is to be asked for again is, on the same connection. `None` if that
/// ended.
async fn told(link: &Link, acquire: &Request, answers: &mut Receiver<Reply>) -> Option<Reply> {
    loop {
        let reply = answers.recv().await?;
        if is_certain(&reply) {
            return Some(reply);
        }
        SimRt::sleep(Duration::from_millis(5)).await;
        *answers = link.request(acquire);
    }
}

fn is_queued(reply: &Reply) -> bool {
    matches!(reply, Reply::Outcome(OutcomeReply { outcome: Outcome::Queued { .. }, .. }))
}

fn caller(lease: LeaseId, number: u64) -> Caller {
    Caller { lease, secret: SECRET, number: Number(number), floor: Number(0), acks: vec![] }
}
