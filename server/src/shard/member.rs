//! One shard's part in a change of the membership.
//!
//! Brings the shard's group nearer to a goal, one step at a time, for a version of the member
//! table. Before anything is changed the shard is *fenced*: the version is committed in its log, and
//! nothing is done for an older one from then on. Invariants: a node gets a vote only when it has
//! the log and answers, or if it had one before the operation that is undone; voters are taken out
//! only while a majority of those that are to vote answers and has the log.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_protocol::command::Command;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::member::{
    GroupGoal, GroupStepRequest, MemberCommand, MembersReply, ShardProgress,
};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::MemberEntry;
use leasehold_protocol::planted;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use openraft::AsyncRuntime;

use super::{Origin, Shard};
use crate::env::Env;
use crate::net::ReplyTo;
use crate::raft::{GroupMembers, Leadership, Member, MemberError};
use crate::rt::channels::oneshot;

/// A node that lacks at most so many entries of the log has caught up.
const LAG_MAX: u64 = 200;
/// A node that does not answer within this time counts as unreachable.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// What came of a step.
enum Step {
    Done,
    Waits { behind: u64, what: String },
}

impl Step {
    fn waits(what: impl Into<String>) -> Self {
        Self::Waits { behind: 0, what: what.into() }
    }
}

impl<E: Env> Shard<E> {
    /// Takes one step towards the goal, at the leader.
    pub(super) fn group_step(
        self: &Rc<Self>,
        request: GroupStepRequest,
        to: ReplyTo,
        origin: Origin,
    ) {
        let timeout_ms = request.timeout_ms;
        let Some(leadership) = self.leads() else {
            return self.pass_on(Request::GroupStep(request), timeout_ms, to, origin);
        };
        if self.stepping.replace(true) {
            return self.busy(&to);
        }
        let shard = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            let step = shard.step(leadership, &request);
            let step = E::Rt::timeout(Self::timeout(timeout_ms), step).await;
            shard.stepping.set(false);
            let (done, behind, waits) = match step {
                Ok(Ok(Step::Done)) => (true, 0, String::new()),
                Ok(Ok(Step::Waits { behind, what })) => (false, behind, what),
                Ok(Err(code)) => return to.error(code, shard.leader()),
                Err(_) => return to.error(ErrorCode::DEADLINE, shard.leader()),
            };
            let progress = ShardProgress { shard: shard.id, done, behind, waits };
            to.send(&Reply::GroupStepped(progress));
        });
    }

    /// Sends a request that is not for this node on to the leader, if it may be.
    pub(crate) fn pass_on(
        self: &Rc<Self>,
        request: Request,
        timeout_ms: u32,
        to: ReplyTo,
        origin: Origin,
    ) {
        match self.elsewhere(origin) {
            Some(leader) => self.forward(leader, request, timeout_ms, to),
            None => to.error(ErrorCode::NOT_LEADER, self.leader()),
        }
    }

    /// The leadership under which this node may change the member table.
    pub(crate) fn leading(&self) -> Option<Leadership> {
        self.leads()
    }

    /// Proposes a member command under this very leadership.
    pub(crate) async fn member_command(
        self: &Rc<Self>,
        leadership: Leadership,
        command: MemberCommand,
    ) -> Result<Outcome, ErrorCode> {
        let (sender, outcome) = oneshot();
        self.propose_internal(leadership, Command::Member(command), move |outcome| {
            // Whoever waited may be gone.
            let _ = sender.send(outcome);
        });
        outcome.await.unwrap_or(Err(ErrorCode::OUTCOME_UNKNOWN))
    }

    /// What the operation's driver saw, for whoever asks.
    pub(crate) fn set_member_progress(&self, version: u64, progress: Vec<ShardProgress>) {
        self.member_progress.replace((version, progress));
    }

    /// The member table as applied here.
    pub(super) fn members_reply(&self) -> MembersReply {
        let state = self.state.borrow();
        let members = state.members();
        let (version, progress) = &*self.member_progress.borrow();
        let current = *version == members.version() && members.operation().is_some();
        MembersReply {
            revision: state.revision(),
            version: members.version(),
            members: members.nodes().cloned().collect(),
            operation: members.operation(),
            progress: if current { progress.clone() } else { Vec::new() },
        }
    }

    async fn step(
        self: &Rc<Self>,
        leadership: Leadership,
        request: &GroupStepRequest,
    ) -> Result<Step, ErrorCode> {
        self.fence(leadership, request.version).await?;
        let seen = self.group.membership();
        let changed = match &request.goal {
            GroupGoal::Learner(entry) => self.learner(leadership, &seen, entry).await,
            GroupGoal::Voters(entries) => self.voters(leadership, &seen, entries).await,
            GroupGoal::Undone(entries) => self.undone(leadership, &seen, entries).await,
        };
        match changed {
            Ok(step) => Ok(step),
            Err(MemberError::NotLeader) => Err(ErrorCode::NOT_LEADER),
            Err(error) => Ok(Step::waits(error.to_string())),
        }
    }

    /// Commits in this shard's log that the table has this version. While one step at a time is
    /// taken, what is appended under the same leadership after it comes before any later fence.
    async fn fence(self: &Rc<Self>, leadership: Leadership, version: u64) -> Result<(), ErrorCode> {
        if self.state.borrow().members().fence() == version {
            return Ok(());
        }
        match self.member_command(leadership, MemberCommand::Fence { version }).await? {
            Outcome::Members { .. } => Ok(()),
            Outcome::Refused { code, .. } => Err(code),
            _ => Err(ErrorCode::INTERNAL),
        }
    }

    async fn learner(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        entry: &MemberEntry,
    ) -> Result<Step, MemberError> {
        match seen.nodes.get(&entry.node) {
            None => {
                let member = member_of(entry);
                self.group.add_learner(leadership, seen, entry.node, member).await?;
                Ok(Step::waits("the node begins to receive the log"))
            }
            Some(member) if member.disk != entry.disk => {
                Ok(Step::waits(format!("node {} is a member with another disk", entry.node)))
            }
            Some(_) => Ok(self.caught_up(entry.node).await),
        }
    }

    /// Whether a node has the log and answers.
    async fn caught_up(&self, node: NodeId) -> Step {
        // Planted (G8): a node votes, whatever it lacks, and whether it is there or not.
        if planted!("learner-votes-early") {
            return Step::Done;
        }
        match self.group.lag_of(node) {
            None => Step::waits(format!("node {node} has not begun to take the log")),
            Some(behind) if behind > LAG_MAX => {
                let what = format!("node {node} is {behind} entries behind");
                Step::Waits { behind, what }
            }
            Some(_) if !self.group.answers(node, ANSWER_TIMEOUT).await => {
                Step::waits(format!("node {node} does not answer"))
            }
            Some(_) => Step::Done,
        }
    }

    async fn voters(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        entries: &[MemberEntry],
    ) -> Result<Step, MemberError> {
        let voters = nodes_of(entries);
        // Planted (G8): a change that is half done is left so.
        let half = planted!("half-a-change-is-done") && seen.voters.last() == Some(&voters);
        if seen.are(&voters) || half {
            return Ok(Step::Done);
        }
        for node in voters.iter().filter(|node| !seen.votes(**node)) {
            if !seen.nodes.contains_key(node) {
                return Ok(Step::waits(format!("node {node} does not receive the log")));
            }
            let step = self.caught_up(*node).await;
            if !matches!(step, Step::Done) {
                return Ok(step);
            }
        }
        let answering = self.answering(&voters).await.len();
        self.change_voters(leadership, seen, &voters, answering).await
    }

    /// Those of them that answer now.
    async fn answering(&self, nodes: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        let asked = nodes.iter().map(|node| self.group.answers(*node, ANSWER_TIMEOUT));
        let answers = join_all(asked).await;
        nodes.iter().zip(answers).filter(|(_, answers)| *answers).map(|(node, _)| *node).collect()
    }

    /// Makes these the voters, of whom so many answer and have the log.
    async fn change_voters(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        voters: &BTreeSet<NodeId>,
        answering: usize,
    ) -> Result<Step, MemberError> {
        if answering <= voters.len() / 2 {
            let of = voters.len();
            let what = format!("{answering} of {of} nodes that are to vote answer: no majority");
            return Ok(Step::waits(what));
        }
        let me = self.peers.node();
        let stays = |node: &&NodeId| seen.votes(**node) && **node != me;
        if !voters.contains(&me) && voters.iter().any(|node| stays(&node)) {
            return Ok(self.move_away(voters.iter().filter(stays).copied().collect()).await);
        }
        self.group.set_voters(leadership, seen, voters).await?;
        Ok(self.are_now(voters))
    }

    /// A change was made: the group is what it is to be, if that is settled.
    fn are_now(&self, voters: &BTreeSet<NodeId>) -> Step {
        if self.group.membership().are(voters) {
            Step::Done
        } else {
            Step::waits("the change is being committed")
        }
    }

    /// A leader that is to go hands its leadership to one that stays, before the change: so the
    /// group is never led by a node that is no member.
    async fn move_away(&self, stay: Vec<NodeId>) -> Step {
        for node in stay {
            if self.group.transfer(Some(node)).await.is_ok() {
                return Step::waits("leadership moved to a node that stays");
            }
        }
        Step::waits("no node that stays takes the leadership")
    }

    /// Back to who voted before the operation, wherever it was given up: not begun here, between two
    /// sets of voters, or done.
    async fn undone(
        &self,
        leadership: Leadership,
        seen: &GroupMembers,
        entries: &[MemberEntry],
    ) -> Result<Step, MemberError> {
        let voters = nodes_of(entries);
        if seen.are(&voters) {
            return Ok(Step::Done);
        }
        if seen.vote_alone(&voters) {
            let Some(came) = seen.nodes.keys().find(|node| !voters.contains(node)) else {
                return Ok(Step::waits("not committed yet"));
            };
            self.group.drop_learner(leadership, seen, *came).await?;
            return Ok(self.are_now(&voters));
        }
        if let Some(gone) = entries.iter().find(|entry| !seen.nodes.contains_key(&entry.node)) {
            self.group.add_learner(leadership, seen, gone.node, member_of(gone)).await?;
            return Ok(Step::waits(format!("node {} begins to receive the log again", gone.node)));
        }
        // One that is dead comes back as what it was, a voter that does not answer: it may be why the
        // operation was begun, and waiting for it would have no end.
        let answering = self.answering(&voters).await;
        for node in answering.iter().filter(|node| !seen.votes(**node)) {
            let step = self.caught_up(*node).await;
            if !matches!(step, Step::Done) {
                return Ok(step);
            }
        }
        self.change_voters(leadership, seen, &voters, answering.len()).await
    }
}

fn nodes_of(entries: &[MemberEntry]) -> BTreeSet<NodeId> {
    entries.iter().map(|entry| entry.node).collect()
}

fn member_of(entry: &MemberEntry) -> Member {
    Member {
        disk: entry.disk,
        peer_addr: entry.peer_addr.clone(),
        client_addr: entry.client_addr.clone(),
    }
}
