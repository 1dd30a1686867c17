//! In the end of some runs the cluster is lost, and another is born from its last backup, with any
//! number of nodes and shards: by the server's own plan and birth, though without files and without
//! messages between the founders. What must hold of it:
//!
//! - its tokens are above every token that the old cluster ever granted, also after the backup; so
//!   are its lease ids and revisions;
//! - it has no leases, holds or waiters, and knows no session of the old cluster, whose clients it
//!   refuses;
//! - it grants nothing before the waiting time has passed since its leader began, whoever leads.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_core::backup::Contents;
use leasehold_protocol::birth::{BirthRecord, BirthReply, Plan};
use leasehold_protocol::command::{Caller, Command};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::event::EventKind;
use leasehold_protocol::ids::{
    ClusterId, HoldSetVersion, LeaseId, Mode, NodeId, Number, Secret, ShardId,
};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{RenewItem, RenewRequest, Request};
use leasehold_protocol::shard::{KEY_HASH, shard_of};
use leasehold_server::env::Clock;
use leasehold_server::identity::{Birth, Mint, RestorePlan};
use leasehold_server::rt::sim::{SimClock, SimRt};
use openraft_rt::AsyncRuntime;

use crate::asker::{Asker, TIMEOUT_MS};
use crate::cluster::{Cluster, Death};
use crate::coverage::Seen;
use crate::ledger::Ledger;
use crate::link::Link;
use crate::node::{CLUSTER, birth_member};
use crate::params::{Params, RATE_PPM_MAX};

/// The new cluster's name for itself.
const RESTORED: ClusterId = ClusterId([2; 16]);

/// Longest TTL and its pad: how long nothing is granted if the old cluster was not silent before.
const WAIT_MS_MAX: u64 = 600_600;

/// Within this, simulated, and the waiting time of two leaders, it must serve.
const LIMIT: Duration = Duration::from_mins(1);

/// A leader is seen to lead so much after it began, at most.
const SEEN_LATE: Duration = Duration::from_millis(20);

const SECRET: Secret = Secret([7; 16]);
const KEYS: u64 = 6;

/// The highest that the old cluster ever came.
struct Highest {
    token: u64,
    lease: u64,
    revision: u64,
}

impl Highest {
    fn of(ledger: &Ledger) -> Self {
        let mut highest = Self { token: 0, lease: 0, revision: 0 };
        for shard in ledger.shards() {
            let log = ledger.shard(shard);
            highest.revision = highest.revision.max(log.latest());
            for event in log.events() {
                match event.kind {
                    EventKind::Granted { token, .. } => highest.token = highest.token.max(token.0),
                    EventKind::LeaseOpened { lease, .. } => {
                        highest.lease = highest.lease.max(lease.0);
                    }
                    _ => {}
                }
            }
        }
        highest
    }
}

/// Ends the old cluster and brings another up from its backup; what is wrong with that one is the old
/// one's violation.
pub(crate) async fn restore(old: &Rc<Cluster>, contents: &Contents) {
    for machine in old.machines() {
        machine.lose(true);
        old.crash(&machine, Death::Killed, Duration::ZERO);
    }
    let rng = old.world.rng();
    let wait_ms = 300 + rng.below(2_500);
    let nodes = [1, 3, 3][rng.below(3) as usize];
    let params = Params { nodes, shards: 1 + rng.below(4) as u32, ..old.params };
    let born = born(contents, &params, WAIT_MS_MAX - wait_ms);
    old.timeline.note(format!("RESTORED into {nodes} nodes, {} shards", params.shards));
    let new = Cluster::start_as(&old.world, &params, born);
    let domain = old.world.add_domain(Duration::from_secs(1), 0);
    let asker = Asker { host: new.net.host(domain), cluster: RESTORED, rng: rng.fork() };
    let probe = Probe { old, new: &new, asker, nodes: (1..=nodes).collect(), wait_ms };
    if SimRt::timeout(LIMIT, probe.run()).await.is_err() {
        new.violations.add("G8", &format!("a restored cluster does not serve within {LIMIT:?}"));
    }
    for violation in new.violations.list() {
        old.violations.add("restored", &violation);
    }
}

/// The record that the founders promise themselves to.
fn born(contents: &Contents, params: &Params, silent_ms: u64) -> BirthRecord {
    let wall_ms = SimClock.wall_ms();
    let restore = RestorePlan::new(contents, wall_ms, silent_ms);
    let restore = Some(restore.expect("time went on since the backup"));
    let nodes: Vec<NodeId> = (1..=params.nodes).map(NodeId).collect();
    let name = "restored".to_owned();
    let plan = Plan { name, nodes: nodes.clone(), shards: params.shards, key_hash: KEY_HASH };
    let birth = |node: &NodeId| {
        let birth = Birth::new(birth_member(node.0, false), plan.clone(), None);
        (*node, birth.expect("nothing is promised yet"))
    };
    let mut births: BTreeMap<NodeId, Birth> = nodes.iter().map(birth).collect();
    let mut first = births.remove(&NodeId(1)).expect("it is one of them");
    let answers = births.iter().map(|(node, birth)| (*node, birth.answer())).collect();
    let mint = || Mint { cluster: RESTORED, wall_ms, earliest_ms: 0, token_floor: 0, restore };
    let promise = first.answered(&answers, mint).expect("the clock went on");
    let mut promise = promise.expect("all of them are fresh");
    first.saved(promise.clone());
    for (node, birth) in births {
        birth.proposed(&promise.record).expect("it is named");
        promise = first.replied(node, BirthReply::Promised).unwrap_or(promise);
    }
    assert!(promise.founded, "all have promised");
    promise.record
}

struct Probe<'a> {
    old: &'a Rc<Cluster>,
    new: &'a Rc<Cluster>,
    asker: Asker,
    nodes: Vec<u64>,
    wait_ms: u64,
}

impl Probe<'_> {
    async fn run(&self) {
        let highest = Highest::of(&self.old.ledger);
        self.new.form().await;
        for shard in self.new.shards() {
            self.is_empty(shard, &highest).await;
            self.knows_nobody(shard).await;
        }
        if Link::open_to(&self.asker.host, CLUSTER, 1).await.is_some() {
            self.wrong("a client of the old cluster is let in");
        }
        self.change_leader().await;
        for key in 0..KEYS {
            self.first_grant(format!("key/{key}").as_bytes(), &highest).await;
        }
        self.new.coverage.count(Seen::Restored);
        self.old.coverage.count(Seen::Restored);
        while !self.new.agrees() {
            SimRt::sleep(Duration::from_millis(5)).await;
        }
    }

    fn wrong(&self, what: &str) {
        self.new.violations.add("restore", what);
    }

    /// As its leader has it at its beginning.
    async fn is_empty(&self, shard: ShardId, highest: &Highest) {
        loop {
            let leader = self.new.leader(shard).and_then(|leader| leader.running());
            if let Some(node) = leader {
                let state = node.shard(shard).state.borrow();
                if state.begun() {
                    let (keys, leases) = (state.list(b"", b"", 1).0, state.leases_len());
                    if !keys.is_empty() || leases > 0 {
                        self.wrong(&format!("shard {shard} begins with {keys:?}, {leases} leases"));
                    }
                    if state.revision().0 <= highest.revision {
                        self.wrong(&format!("shard {shard} begins at {:?}", state.revision()));
                    }
                    return;
                }
            }
            SimRt::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sessions of the old cluster are dead here.
    async fn knows_nobody(&self, shard: ShardId) {
        for lease in (1..=5).map(LeaseId) {
            let item = RenewItem { lease, secret: SECRET, version: HoldSetVersion(0) };
            let renew = RenewRequest { shard, timeout_ms: TIMEOUT_MS, items: vec![item] };
            let reply = self.asker.ask(&self.nodes, &Request::Renew(renew)).await;
            let Reply::Renewed(renewed) = &reply else {
                return self.wrong(&format!("a renewal of an old lease gave {reply:?}"));
            };
            if renewed.results[0].error != Some(ErrorCode::LEASE_DEAD) {
                self.wrong(&format!("a renewal of an old lease gave {renewed:?}"));
            }
        }
    }

    /// Now and then a leader dies while nothing is granted yet.
    async fn change_leader(&self) {
        SimRt::sleep(Duration::from_millis(self.asker.rng.below(self.wait_ms / 2))).await;
        let leader = self.new.leader(ShardId(0)).filter(|_| self.asker.rng.chance(500));
        if let Some(leader) = leader {
            self.old.timeline.note(format!("RESTORED: node {} dies", leader.node));
            self.old.coverage.count(Seen::RestoredUnderAnother);
            self.new.crash(
                &leader,
                Death::Killed,
                Duration::from_millis(self.asker.rng.below(1_000)),
            );
        }
    }

    async fn first_grant(&self, key: &[u8], highest: &Highest) {
        let shard = shard_of(key, self.new.born.shards);
        let open = Command::Open { ttl_ms: 60_000, secret: SECRET, label: b"probe".to_vec() };
        let opened = self.command(shard, open).await;
        let Some(Outcome::Opened { lease, .. }) = opened else {
            return self.wrong(&format!("an opening gave {opened:?}"));
        };
        if lease.0 <= highest.lease {
            self.wrong(&format!("lease {} was the old cluster's", lease.0));
        }
        let caller =
            Caller { lease, secret: SECRET, number: Number(1), floor: Number(0), acks: vec![] };
        let acquire = Command::Acquire {
            caller,
            key: key.to_vec(),
            mode: Mode::EXCLUSIVE,
            own: None,
            value: vec![],
            wait_ms: 0,
        };
        let granted = self.command(shard, acquire).await;
        let Some(Outcome::Granted(grant)) = granted else {
            return self.wrong(&format!("an acquire gave {granted:?}"));
        };
        if grant.token.0 <= highest.token {
            let (token, highest) = (grant.token.0, highest.token);
            self.wrong(&format!("token {token} is not above the old cluster's {highest}"));
        }
        self.waited(shard, grant.revision.0);
    }

    /// The grant came after the waiting time of the leader that gave it.
    fn waited(&self, shard: ShardId, revision: u64) {
        let granted_ns = self.new.ledger.shard(shard).applied_ns(revision);
        let (Some(granted_ns), Some(led_ns)) = (granted_ns, self.new.led_ns(shard)) else { return };
        let Some(waited_ns) = granted_ns.checked_sub(led_ns) else { return };
        let waited = Duration::from_nanos(waited_ns) + SEEN_LATE;
        let wait = Duration::from_millis(self.wait_ms);
        if waited + wait.mul_f64(RATE_PPM_MAX as f64 / 1e6) < wait {
            self.wrong(&format!(
                "shard {shard} grants {waited:?} after its leader began, not {wait:?}"
            ));
        }
    }

    /// `None` if it was refused for good.
    async fn command(&self, shard: ShardId, command: Command) -> Option<Outcome> {
        self.asker.command(&self.nodes, shard, command).await
    }
}
