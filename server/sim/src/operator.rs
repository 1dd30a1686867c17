//! An operator who changes the cluster's members while everything else goes wrong: adds fresh nodes,
//! removes some, replaces others, and those first that lost their disks; gives operations up, also
//! while the voters change, meets nodes that then cannot be reached, asks for two things at once,
//! spreads leaders.
//!
//! Asks through the requests of the wire, of any node, until the answer is certain; the cluster
//! carries the changes out. Remembers what was asked for and what became of it, so that in the end
//! the members must be those.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use leasehold_protocol::error::{ErrorClass, ErrorCode};
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_protocol::member::{
    MemberChange, MemberChangeRequest, MembersReply, MembersRequest, NewMember,
};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::{Request, TransferRequest};
use leasehold_server::rt::sim::{SimRng, SimRt};
use leasehold_server::rt::sim_net::SimHost;
use openraft_rt::{AsyncRuntime, MpscReceiver};

use crate::cluster::{Cluster, Death, Machine};
use crate::coverage::Seen;
use crate::link::Link;
use crate::node::peer_addr;

/// A node answers within this, or another one is asked. Longer than a node asks others.
const PATIENCE: Duration = Duration::from_secs(4);
const TIMEOUT_MS: u32 = 3_000;

const VOTERS_MAX: usize = 5;

/// What became of a change that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Refused at once: nothing was changed.
    Never,
    /// Begun: it is carried out.
    Carried,
    /// Begun, and given up.
    Aborted,
    /// An answer was lost, and the next one does not tell.
    Open,
}

/// One change.
#[derive(Clone, Copy, Debug)]
struct Asked {
    add: Option<u64>,
    remove: Option<u64>,
    fate: Fate,
}

/// A certain answer to a request for a change.
enum Answer {
    Begun(u64),
    Refused(ErrorCode),
    /// Refused, but perhaps because an earlier copy was taken.
    Unclear,
}

/// See the module.
pub(crate) struct Operator {
    cluster: Rc<Cluster>,
    host: SimHost,
    rng: SimRng,
    /// No further changes; what is under way comes to its end.
    settle: Cell<bool>,
    asked: RefCell<Vec<Asked>>,
}

impl Operator {
    pub(crate) fn new(cluster: &Rc<Cluster>) -> Rc<Self> {
        let world = &cluster.world;
        let domain = world.add_domain(Duration::from_secs(1), 0);
        Rc::new(Self {
            cluster: cluster.clone(),
            host: cluster.net.host(domain),
            rng: world.rng().fork(),
            settle: Cell::new(false),
            asked: RefCell::default(),
        })
    }

    /// Whatever is under way is brought to its end now, and nothing else is begun.
    pub(crate) fn settle(&self) {
        self.settle.set(true);
    }

    /// A node that is to come cannot be reached now.
    pub(crate) fn misses_a_node(&self) -> bool {
        self.cluster.machines().iter().any(|machine| machine.is_lost())
    }

    /// One change after another. One task.
    pub(crate) async fn run(self: Rc<Self>) {
        self.pause(2_000).await;
        while !self.settle.get() {
            self.turn().await;
            self.pause(2_500).await;
        }
    }

    async fn pause(&self, max_ms: u64) {
        SimRt::sleep(Duration::from_millis(1 + self.rng.below(max_ms))).await;
    }

    async fn turn(&self) {
        let voters = self.cluster.voters();
        let (grows, shrinks) = (voters.len() < VOTERS_MAX, voters.len() > 2);
        match self.rng.below(12) {
            0..2 => self.add_nobody().await,
            2..6 if grows => self.change(true, None).await,
            6..9 if shrinks => self.change(false, Some(self.victim())).await,
            _ => self.change(true, Some(self.victim())).await,
        }
    }

    /// Who is to go: one whose disk is lost, or else often a leader.
    fn victim(&self) -> u64 {
        let voters: Vec<_> = self.cluster.voters().into_iter().collect();
        let wiped = voters.iter().find(|node| self.cluster.machine(**node).is_wiped());
        if let Some(wiped) = wiped.filter(|_| self.rng.chance(900)) {
            return *wiped;
        }
        let shard = ShardId(self.rng.below(u64::from(self.cluster.params.shards)) as u32);
        let leader = self.cluster.leader(shard).map(|machine| machine.node);
        let leader = leader.filter(|node| voters.contains(node) && self.rng.chance(500));
        leader.unwrap_or_else(|| voters[self.rng.below(voters.len() as u64) as usize])
    }

    /// A machine that waits for admission, set up anew if there is none.
    fn newcomer(&self) -> Rc<Machine> {
        let used = |node| {
            let asked = self.asked.borrow();
            asked.iter().any(|asked| asked.add == Some(node) && asked.fate != Fate::Never)
        };
        let founders = self.cluster.born.members.len();
        let mut waiting = self.cluster.machines().into_iter().skip(founders);
        let waiting = waiting.find(|machine| !used(machine.node) && !machine.is_removed());
        waiting.unwrap_or_else(|| {
            let machine = self.cluster.set_up(None);
            self.cluster.timeline.note(format!("OPERATOR sets node {} up", machine.node));
            machine
        })
    }

    async fn change(&self, adds: bool, remove: Option<u64>) {
        let newcomer = adds.then(|| self.newcomer());
        if newcomer.is_some() {
            self.pause(300).await;
        }
        let add = newcomer.as_ref().map(|machine| machine.node);
        let led = remove.is_some_and(|node| {
            self.cluster.machine(node).running().is_some_and(|node| node.leads())
        });
        let wiped = remove.is_some_and(|node| self.cluster.machine(node).is_wiped());
        self.cluster.changing.set(true);
        let index = self.note(add, remove);
        let change = change(add, remove);
        match self.ask(&change).await {
            Answer::Begun(operation) => {
                self.asked.borrow_mut()[index].fate = Fate::Carried;
                self.rival(operation).await;
                self.follow(operation, index, newcomer).await;
            }
            Answer::Refused(code) => {
                self.say(format_args!("{change:?} is refused: {code}"));
                self.asked.borrow_mut()[index].fate = Fate::Never;
            }
            // Whatever it was, it is over before anything else is asked.
            Answer::Unclear => self.until_over(None).await,
        }
        self.cluster.changing.set(false);
        self.cluster.publish();
        if self.rng.chance(400) {
            self.spread().await;
        }
        if self.asked.borrow()[index].fate == Fate::Carried {
            let cluster = &self.cluster;
            cluster.coverage.add(Seen::LeaderRemoved, u64::from(led));
            cluster.coverage.add(Seen::WipedReplaced, u64::from(wiped && adds));
        }
    }

    fn note(&self, add: Option<u64>, remove: Option<u64>) -> usize {
        self.asked.borrow_mut().push(Asked { add, remove, fate: Fate::Open });
        self.asked.borrow().len() - 1
    }

    fn say(&self, what: std::fmt::Arguments<'_>) {
        self.cluster.timeline.note(format!("OPERATOR {what}"));
    }

    /// Asks for something else while an operation is under way, now and then.
    async fn rival(&self, operation: u64) {
        if !self.rng.chance(300) {
            return;
        }
        let victim = self.victim();
        let index = self.note(None, Some(victim));
        match self.ask(&change(None, Some(victim))).await {
            // Not another one.
            Answer::Begun(same) if same == operation => {
                self.asked.borrow_mut()[index].fate = Fate::Never;
            }
            // Then the first was over.
            Answer::Begun(other) => {
                self.asked.borrow_mut()[index].fate = Fate::Carried;
                self.until_over(Some(other)).await;
            }
            Answer::Refused(code) => {
                self.asked.borrow_mut()[index].fate = Fate::Never;
                if code == ErrorCode::MEMBER_CHANGE_UNDER_WAY {
                    self.cluster.coverage.count(Seen::SecondRefused);
                }
            }
            Answer::Unclear => {}
        }
    }

    /// Waits for the end of an operation, which is given up now and then.
    async fn follow(&self, operation: u64, index: usize, newcomer: Option<Rc<Machine>>) {
        if self.rng.chance(250) {
            self.give_up_in_vote(operation, index, newcomer.as_deref()).await;
        } else {
            self.wait_or_give_up(operation, index, newcomer.as_deref()).await;
        }
        while !self.is_over(operation).await {
            self.pause(300).await;
        }
        if let Some(machine) = &newcomer {
            let without = self.is_given_up(index) && machine.is_lost();
            self.cluster.coverage.add(Seen::UndoneWithoutNew, u64::from(without));
            machine.lose(false);
        }
    }

    /// As soon as a shard has changed; then the newcomer dies first, now and then.
    async fn give_up_in_vote(&self, operation: u64, index: usize, newcomer: Option<&Machine>) {
        let asked = self.asked.borrow()[index];
        while !self.has_changed(&asked) {
            let now = self.cluster.tables.latest().and_then(|table| table.operation);
            if self.settle.get() || now.is_none_or(|now| now.operation > operation) {
                return;
            }
            SimRt::sleep(Duration::from_millis(5)).await;
        }
        let dies = self.go_on_without(&asked) && self.rng.chance(500);
        if let Some(machine) = newcomer.filter(|_| dies) {
            self.loses(machine);
        }
        self.abort(operation, index).await;
        if let Some(machine) = newcomer.filter(|_| !self.is_given_up(index)) {
            machine.lose(false);
        }
    }

    /// Now and then, or because the newcomer cannot be reached.
    async fn wait_or_give_up(&self, operation: u64, index: usize, newcomer: Option<&Machine>) {
        let asked = self.asked.borrow()[index];
        let lost = newcomer.filter(|_| self.rng.chance(300));
        if let Some(machine) = lost {
            self.pause(400).await;
            self.loses(machine);
        }
        // One that cannot be reached is waited for up to the end of the storm, or not.
        let waits = lost.is_some() && self.rng.chance(600);
        if lost.is_none() && !self.rng.chance(250) {
            return;
        }
        let mut looks = if waits { u64::MAX } else { self.rng.below(12) };
        while looks > 0 {
            if self.is_over(operation).await {
                return;
            }
            self.pause(300).await;
            if let Some(machine) = lost
                && self.votes(machine.node)
                && !self.go_on_without(&asked)
            {
                // From now on it is needed: nothing but its return brings this to an end.
                machine.lose(false);
            }
            looks = if self.settle.get() { 0 } else { looks.saturating_sub(1) };
        }
        self.abort(operation, index).await;
        let stays_away = self.is_given_up(index) && self.rng.chance(500);
        if let Some(machine) = newcomer.filter(|_| !stays_away || !self.go_on_without(&asked)) {
            machine.lose(false);
        }
    }

    fn loses(&self, machine: &Machine) {
        self.say(format_args!("cannot reach node {}", machine.node));
        machine.lose(true);
        self.cluster.crash(machine, Death::Killed, Duration::ZERO);
    }

    fn is_given_up(&self, index: usize) -> bool {
        self.asked.borrow()[index].fate == Fate::Aborted
    }

    /// The voters from before, and those that are to be, are majorities without the node that comes
    /// and without those whose disks are lost.
    fn go_on_without(&self, asked: &Asked) -> bool {
        let before = self.cluster.voters();
        let mut then = before.clone();
        then.extend(asked.add);
        then.retain(|node| Some(*node) != asked.remove);
        [before, then].iter().all(|voters| {
            let there = voters.iter().filter(|node| {
                Some(**node) != asked.add && !self.cluster.machine(**node).is_wiped()
            });
            2 * there.count() > voters.len()
        })
    }

    /// A shard has, or is about to have, the voters that were asked for.
    fn has_changed(&self, asked: &Asked) -> bool {
        self.cluster.shards().any(|shard| {
            let Some(leader) = self.cluster.leader(shard) else { return false };
            let Some(node) = leader.running() else { return false };
            let membership = node.shard(shard).group.membership();
            let comes = asked.add.is_some_and(|node| membership.votes(NodeId(node)));
            let votes_on =
                |node: u64| membership.voters.iter().all(|set| set.contains(&NodeId(node)));
            comes || asked.remove.is_some_and(|node| !votes_on(node))
        })
    }

    async fn abort(&self, operation: u64, index: usize) {
        let changed = self.has_changed(&self.asked.borrow()[index]);
        let answer = self.ask(&MemberChange::Abort { operation }).await;
        let fate = match answer {
            Answer::Begun(_) => Fate::Aborted,
            // Carried out before.
            Answer::Refused(_) => Fate::Carried,
            Answer::Unclear => Fate::Open,
        };
        self.cluster.coverage.add(Seen::VoteUndone, u64::from(changed && fate == Fate::Aborted));
        self.say(format_args!("gives operation {operation} up: {fate:?}"));
        self.asked.borrow_mut()[index].fate = fate;
    }

    /// Any node has it among its voters in any shard.
    fn votes(&self, node: u64) -> bool {
        self.cluster.machines().iter().filter_map(|machine| machine.running()).any(|running| {
            running.shards.iter().any(|shard| shard.group.membership().votes(NodeId(node)))
        })
    }

    async fn is_over(&self, operation: u64) -> bool {
        let table = self.members().await;
        table.is_some_and(|table| table.operation.is_none_or(|now| now.operation != operation))
    }

    /// Waits until this operation, or any that is under way, is over.
    async fn until_over(&self, operation: Option<u64>) {
        loop {
            let table = self.members().await;
            if let Some(table) = table {
                let present = table.operation.map(|now| now.operation);
                if present.is_none() || (operation.is_some() && present != operation) {
                    return;
                }
            }
            self.pause(300).await;
        }
    }

    /// A node that nobody set up cannot be added.
    async fn add_nobody(&self) {
        let node = 100 + self.rng.below(20);
        match self.ask(&change(Some(node), None)).await {
            Answer::Refused(ErrorCode::NODE_UNREACHABLE) => {
                self.cluster.coverage.count(Seen::NobodyRefused);
            }
            Answer::Refused(_) | Answer::Unclear => {}
            Answer::Begun(_) => {
                let what = format!("node {node}, which is not there, is to be added");
                self.cluster.violations.add("members", &what);
            }
        }
    }

    /// Each voter is to lead as many shards as the others.
    async fn spread(&self) {
        let voters: Vec<_> = self.cluster.voters().into_iter().collect();
        for shard in self.cluster.shards() {
            let to = NodeId(voters[shard.0 as usize % voters.len()]);
            if self.cluster.leader(shard).is_some_and(|leader| leader.node == to.0) {
                continue;
            }
            let transfer = TransferRequest { shard, to, timeout_ms: TIMEOUT_MS };
            if let Some(Reply::Transferred) = self.try_once(&Request::Transfer(transfer)).await {
                self.cluster.coverage.count(Seen::LeadersSpread);
            }
        }
    }

    /// Asks until the answer is certain.
    async fn ask(&self, change: &MemberChange) -> Answer {
        self.say(format_args!("asks for {change:?}"));
        let request = MemberChangeRequest { change: change.clone(), timeout_ms: TIMEOUT_MS };
        let request = Request::MemberChange(request);
        let mut clear = true;
        loop {
            match self.try_once(&request).await {
                Some(Reply::MemberChanged(reply)) => return Answer::Begun(reply.operation),
                Some(Reply::Error(error)) => match error.code.class() {
                    ErrorClass::NotApplied if clear => return Answer::Refused(error.code),
                    ErrorClass::NotApplied => return Answer::Unclear,
                    ErrorClass::Retryable => {}
                    ErrorClass::Unknown => clear = false,
                },
                Some(other) => panic!("a change of the members gave {other:?}"),
                None => clear = false,
            }
            self.pause(80).await;
        }
    }

    /// The table, read linearizably; `None` if nobody answers.
    async fn members(&self) -> Option<MembersReply> {
        let request = Request::Members(MembersRequest { timeout_ms: TIMEOUT_MS });
        match self.try_once(&request).await? {
            Reply::Members(reply) => Some(reply),
            Reply::Error(_) => None,
            other => panic!("a reading of the members gave {other:?}"),
        }
    }

    /// Sends once, to any node.
    async fn try_once(&self, request: &Request) -> Option<Reply> {
        let machines = self.cluster.machines();
        let node = machines[self.rng.below(machines.len() as u64) as usize].node;
        let link = Link::open(&self.host, node).await?;
        SimRt::timeout(PATIENCE, link.request(request).recv()).await.ok().flatten()
    }

    /// What is wrong with the members in the end, when nothing is under way any more.
    pub(crate) async fn judge(&self) {
        let Some(table) = self.cluster.tables.latest() else { return };
        let wrong = |what: String| self.cluster.violations.add("members", &what);
        if let Some(operation) = table.operation {
            wrong(format!("{operation:?} is under way in the end"));
        }
        for (node, (may, may_not)) in self.allowed() {
            let votes = table.voters.contains(&node);
            if votes && !may || !votes && !may_not {
                wrong(format!("node {node} votes: {votes}; asked for: {:?}", self.asked.borrow()));
            }
        }
        for node in &table.removed {
            self.is_refused(*node).await;
        }
    }

    /// Of each node whether it may vote and whether it may not.
    fn allowed(&self) -> BTreeMap<u64, (bool, bool)> {
        let founders = self.cluster.born.members.iter();
        let mut allowed: BTreeMap<_, _> =
            founders.map(|member| (member.node.0, (true, false))).collect();
        for Asked { add, remove, fate } in &*self.asked.borrow() {
            for (node, done) in [(*add, (true, false)), (*remove, (false, true))] {
                let Some(node) = node else { continue };
                let before = allowed.entry(node).or_insert((false, true));
                match fate {
                    Fate::Never | Fate::Aborted => {}
                    Fate::Carried => *before = done,
                    Fate::Open => *before = (before.0 || done.0, before.1 || done.1),
                }
            }
        }
        allowed
    }

    /// A node that was removed knows it by now, if it runs, and serves nobody.
    async fn is_refused(&self, node: u64) {
        let machine = self.cluster.machine(node);
        let Some(running) = machine.running() else { return };
        let shard = ShardId(0);
        if !running.front.is_removed() && machine.knows_nobody(&self.cluster.voters()) {
            return self.cluster.coverage.count(Seen::KnowsNobody);
        }
        if !running.front.is_removed() {
            let what = format!("node {node} was removed and does not know it");
            return self.cluster.violations.add("members", &what);
        }
        let requests = [
            Request::Members(MembersRequest { timeout_ms: TIMEOUT_MS }),
            Request::Transfer(TransferRequest { shard, to: NodeId(0), timeout_ms: TIMEOUT_MS }),
        ];
        let Some(link) = Link::open(&self.host, node).await else { return };
        for request in requests {
            match SimRt::timeout(PATIENCE, link.request(&request).recv()).await {
                Ok(Some(Reply::Error(error))) if error.code == ErrorCode::NODE_REMOVED => {
                    self.cluster.coverage.count(Seen::RemovedRefuses);
                }
                other => {
                    let what = format!("node {node} was removed and answers {other:?}");
                    self.cluster.violations.add("members", &what);
                }
            }
        }
    }
}

fn change(add: Option<u64>, remove: Option<u64>) -> MemberChange {
    let new = add.map(|node| NewMember {
        node: NodeId(node),
        peer_addr: peer_addr(node),
        client_addr: String::new(),
    });
    match (new, remove.map(NodeId)) {
        (Some(new), None) => MemberChange::Add(new),
        (Some(new), Some(old)) => MemberChange::Replace { old, new },
        (None, Some(node)) => MemberChange::Remove { node },
        (None, None) => unreachable!("a change changes something"),
    }
}
