//! Carries out the operation under way, at the leader of shard 0.
//!
//! Works from the table alone: it asks every shard's leader to bring its group nearer to what the
//! present phase wants, again and again, and puts the next phase into the table when all say that
//! they are there. So it can be stopped at any step, and another node's driver goes on. Shard 0
//! changes its voters last, there and back: a node that is out of it in the end is out of all shards.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_protocol::member::{
    GroupGoal, GroupStepRequest, MemberCommand, MemberOperation, MemberPhase, ShardProgress,
};
use leasehold_protocol::peer::{self, MemberEntry};
use leasehold_protocol::planted;
use leasehold_protocol::reply::{Reply, Role};
use leasehold_protocol::request::Request;
use openraft::AsyncRuntime;

use super::Membership;
use crate::env::Env;
use crate::net::OneReply;
use crate::raft::{Class, Leadership};
use crate::shard::{FORWARD_KIND, Origin};

/// From one round over the shards to the next, while an operation is under way.
const ROUND_PAUSE: Duration = Duration::from_millis(100);
/// How often the table is looked at otherwise.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Longest step of one shard.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);

impl<E: Env> Membership<E> {
    /// Follows the table and drives its operation, as long as the node lives. One task.
    pub async fn run(self: Rc<Self>) {
        loop {
            self.follow();
            let pause = if let Some(leadership) = self.shard.leading() {
                self.lead(leadership).await
            } else {
                self.ask_if_outside().await;
                LOOK_EVERY
            };
            E::Rt::select2(E::Rt::sleep(pause), self.begun.notified()).await;
        }
    }

    /// One look at the table by its leader; how long the next may wait.
    async fn lead(self: &Rc<Self>, leadership: Leadership) -> Duration {
        let (version, begun, operation) = {
            let state = self.shard.state().borrow();
            let members = state.members();
            (members.version(), state.begun(), members.operation())
        };
        if version == 0 && begun {
            let found = MemberCommand::Found(self.founders());
            // Whoever leads next does it if this leadership could not.
            self.propose(leadership, found).await;
        }
        let Some(operation) = operation else { return LOOK_EVERY };
        self.round(leadership, version, operation).await;
        ROUND_PAUSE
    }

    fn founders(&self) -> Vec<MemberEntry> {
        let entry = |member: &leasehold_protocol::birth::BirthMember| MemberEntry {
            node: member.node,
            disk: member.disk,
            peer_addr: member.peer_addr.clone(),
            client_addr: member.client_addr.clone(),
        };
        self.record.members.iter().map(entry).collect()
    }

    async fn round(
        self: &Rc<Self>,
        leadership: Leadership,
        version: u64,
        operation: MemberOperation,
    ) {
        let Some(goal) = self.goal(operation) else { return };
        let others = (1..self.record.shards).map(ShardId);
        let steps = others.map(|shard| self.step(shard, version, goal.clone()));
        let mut progress = join_all(steps).await;
        let own = if progress.iter().all(|other| other.done) {
            self.step(ShardId(0), version, goal).await
        } else {
            waiting(ShardId(0), "the other shards come first")
        };
        progress.insert(0, own);
        // Planted (G8): the next phase begins when one shard is there, whatever the others are.
        let mut done = progress.iter().all(|shard| shard.done);
        done |= planted!("over-before-all-shards") && progress.iter().any(|shard| shard.done);
        self.shard.set_member_progress(version, progress);
        if !done {
            return;
        }
        let MemberOperation { operation, phase, .. } = operation;
        let next = match phase {
            MemberPhase::Learn => MemberCommand::Promote { operation },
            MemberPhase::Vote | MemberPhase::Undo => MemberCommand::Finish { operation, version },
        };
        tracing::info!(operation, ?phase, "done in all shards");
        self.propose(leadership, next).await;
    }

    /// Proposes a change of the table. Refused, or not known: the next round sees the table as it is
    /// then. A node that is out of its group hears of its proposals no more, and is not to wait.
    async fn propose(&self, leadership: Leadership, command: MemberCommand) {
        let proposed = self.shard.member_command(leadership, command);
        let _seen_later = E::Rt::timeout(STEP_TIMEOUT, proposed).await;
    }

    /// What every shard is to become in this phase.
    fn goal(&self, operation: MemberOperation) -> Option<GroupGoal> {
        let state = self.shard.state().borrow();
        let members = state.members();
        match operation.phase {
            MemberPhase::Learn => {
                members.node(operation.add).map(|info| GroupGoal::Learner(info.entry.clone()))
            }
            MemberPhase::Vote => Some(GroupGoal::Voters(members.voters_after())),
            MemberPhase::Undo => Some(GroupGoal::Undone(members.voters_after())),
        }
    }

    /// Asks a shard's leader for one step. A node that is to go and is out of that shard already hears
    /// of its leaders no more: then it asks the others.
    async fn step(&self, shard: ShardId, version: u64, goal: GroupGoal) -> ShardProgress {
        let Some(router) = self.router.upgrade() else { return waiting(shard, "stopping") };
        let timeout_ms = STEP_TIMEOUT.as_millis() as u32;
        let request = Request::GroupStep(GroupStepRequest { shard, version, goal, timeout_ms });
        let (to, answer) = OneReply::pair();
        router.route(request.clone(), to, Origin::Client);
        let mut answer = E::Rt::timeout(2 * STEP_TIMEOUT, answer).await.ok().and_then(Result::ok);
        if is_not_leader(answer.as_ref()) {
            answer = self.step_by_others(&request).await.or(answer);
        }
        match answer {
            Some(Reply::GroupStepped(progress)) => progress,
            Some(Reply::Error(error)) => waiting(shard, &error.message),
            _ => waiting(shard, "no answer"),
        }
    }

    /// Asks each other node of the table to take the step, until one does or may have.
    async fn step_by_others(&self, request: &Request) -> Option<Reply> {
        let mut body = vec![request.kind()];
        request.encode_body(&mut body);
        let mut last = None;
        for node in self.others() {
            let asked = self.peers.call(node, Class::Forward, FORWARD_KIND, &body, STEP_TIMEOUT);
            let Ok(answer) = asked.await else { continue };
            let (kind, answer) = answer.split_first()?;
            last = Reply::decode(*kind, answer).ok();
            if !is_not_leader(last.as_ref()) {
                break;
            }
        }
        last
    }

    /// A node that is out of shard 0 may be out of the cluster: its peers know, and refuse it then.
    /// So may one without a vote, which nobody tells when it is given up.
    async fn ask_if_outside(&self) {
        if !matches!(self.shard.group().status().role, Role::Outside | Role::Learner) {
            return;
        }
        // One that was given up before it had anything of the log has no table: it knows those
        // who admitted it.
        let admitted_by = self.record.members.iter().map(|member| member.node);
        let nodes: BTreeSet<NodeId> = self.others().into_iter().chain(admitted_by).collect();
        for node in nodes.into_iter().filter(|node| *node != self.peers.node()) {
            let _refused =
                self.peers.call(node, Class::Heartbeat, peer::PING, &[], LOOK_EVERY).await;
        }
    }
}

/// The node that was asked does not lead the shard: nothing was done.
fn is_not_leader(answer: Option<&Reply>) -> bool {
    matches!(answer, Some(Reply::Error(error)) if error.code == ErrorCode::NOT_LEADER)
}

fn waiting(shard: ShardId, what: &str) -> ShardProgress {
    ShardProgress { shard, done: false, behind: 0, waits: what.to_owned() }
}
