//! What an operator asks for: checked against the world, then put into the table.
//!
//! The state machine decides what the table allows; here is what it cannot see: whether the coming
//! node is there, fresh and configured alike, and whether those that stay answer.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_protocol::birth::{BirthAnswer, KIND_QUERY};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::member::{
    MemberChange, MemberChangeReply, MemberChangeRequest, MemberCommand, NewMember,
};
use leasehold_protocol::outcome::Outcome;
use leasehold_protocol::peer::{ADDR_LEN_MAX, MemberEntry};
use leasehold_protocol::planted;
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;
use openraft::AsyncRuntime;
use rkyv::rancor;

use super::Membership;
use crate::env::Env;
use crate::net::{ReplyTo, error};
use crate::raft::{Leadership, PeerError};
use crate::shard::Origin;

/// A node that does not answer within this time is not there.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

/// A refusal with its sentence.
struct Refusal(ErrorCode, String);

impl From<ErrorCode> for Refusal {
    fn from(code: ErrorCode) -> Self {
        Self(code, code.text().to_owned())
    }
}

impl<E: Env> Membership<E> {
    /// Begins the change at the leader of shard 0, or gives one up.
    pub fn change(self: &Rc<Self>, request: MemberChangeRequest, to: ReplyTo, origin: Origin) {
        let Some(leadership) = self.shard.leading() else {
            let timeout_ms = request.timeout_ms;
            let request = Request::MemberChange(request);
            return self.shard.pass_on(request, timeout_ms, to, origin);
        };
        let membership = Rc::clone(self);
        let _detached = E::Rt::spawn(async move {
            match membership.begin(leadership, request.change).await {
                Ok(operation) => to.send(&Reply::MemberChanged(MemberChangeReply { operation })),
                Err(Refusal(code, text)) => to.send(&error(code, text, NodeId(0), 0)),
            }
            membership.begun.notify_one();
        });
    }

    async fn begin(
        self: &Rc<Self>,
        leadership: Leadership,
        change: MemberChange,
    ) -> Result<u64, Refusal> {
        let command = match change {
            MemberChange::Add(new) => {
                MemberCommand::Start { add: Some(self.meet(new).await?), remove: None }
            }
            MemberChange::Remove { node } => {
                self.check_majority(node, 0).await?;
                MemberCommand::Start { add: None, remove: Some(node) }
            }
            MemberChange::Replace { old, new } => {
                let add = self.meet(new).await?;
                self.check_majority(old, 1).await?;
                MemberCommand::Start { add: Some(add), remove: Some(old) }
            }
            MemberChange::Abort { operation } => MemberCommand::Abort { operation },
        };
        match self.shard.member_command(leadership, command).await? {
            Outcome::Members { operation, .. } => Ok(operation),
            Outcome::Refused { code, .. } => Err(code.into()),
            _ => Err(ErrorCode::INTERNAL.into()),
        }
    }

    /// Asks a node that is to come who it is.
    async fn meet(&self, new: NewMember) -> Result<MemberEntry, Refusal> {
        let NewMember { node, peer_addr, client_addr } = new;
        if node == NodeId(0) || peer_addr.is_empty() {
            let text = "a node has an id above 0 and a peer address".to_owned();
            return Err(Refusal(ErrorCode::BAD_COMBINATION, text));
        }
        if peer_addr.len() > ADDR_LEN_MAX || client_addr.len() > ADDR_LEN_MAX {
            let text = format!("an address has at most {ADDR_LEN_MAX} bytes");
            return Err(Refusal(ErrorCode::BAD_COMBINATION, text));
        }
        if let Some(entry) = self.known(node)? {
            return Ok(entry);
        }
        // Until it is a member, nothing of it is remembered, least of all a wrong address.
        let asked = self.peers.ask_at(node, &peer_addr, KIND_QUERY, &[], ASK_TIMEOUT).await;
        let body = asked.map_err(|error| not_met(node, &peer_addr, &error))?;
        let answer = rkyv::from_bytes::<BirthAnswer, rancor::Error>(&body);
        let answer = answer.map_err(|_| Refusal::from(ErrorCode::MALFORMED))?;
        self.check_fresh(node, &answer)?;
        let told = answer.member.client_addr;
        let client_addr = if client_addr.is_empty() { told } else { client_addr };
        Ok(MemberEntry { node, disk: answer.member.disk, peer_addr, client_addr })
    }

    /// The table's entry of a node that the operation under way adds; an error if the id was used.
    /// Those of the record are in the table as soon as there is one.
    fn known(&self, node: NodeId) -> Result<Option<MemberEntry>, Refusal> {
        let state = self.shard.state().borrow();
        let members = state.members();
        let info = members.node(node);
        match (members.operation(), info) {
            (Some(operation), Some(info)) if operation.add == node => Ok(Some(info.entry.clone())),
            (Some(_), _) => Err(ErrorCode::MEMBER_CHANGE_UNDER_WAY.into()),
            (None, None) if !self.record.members.iter().any(|founder| founder.node == node) => {
                Ok(None)
            }
            (None, _) => {
                let text = format!("node id {node} is or was a member's: it is never used again");
                Err(Refusal(ErrorCode::NODE_ID_USED, text))
            }
        }
    }

    fn check_fresh(&self, node: NodeId, answer: &BirthAnswer) -> Result<(), Refusal> {
        let refuse = |what: String| Err(Refusal(ErrorCode::NODE_NOT_FRESH, what));
        let (plan, record) = (&answer.plan, &self.record);
        if answer.member.node != node {
            return refuse(format!("node {} answers there, not node {node}", answer.member.node));
        }
        // Planted (identity): a node of another cluster is taken.
        if let Some(other) = &answer.promised
            && !planted!("foreign-node-taken")
        {
            return refuse(format!("node {node} belongs to cluster {} already", other.cluster));
        }
        if plan.name != record.name {
            let (theirs, ours) = (&plan.name, &record.name);
            return refuse(format!("node {node} is configured for cluster {theirs}, not {ours}"));
        }
        if plan.shards != record.shards {
            let (theirs, ours) = (plan.shards, record.shards);
            return refuse(format!("node {node} is configured with {theirs} shards, not {ours}"));
        }
        if plan.key_hash != record.key_hash {
            return refuse(format!("node {node} has another key hash"));
        }
        Ok(())
    }

    /// Those that stay, and the `comes` that come and have answered, must be a majority of what
    /// will be.
    async fn check_majority(&self, goes: NodeId, comes: usize) -> Result<(), Refusal> {
        let mut stay = self.voters();
        stay.retain(|node| *node != goes);
        let asked = stay.iter().map(|node| self.shard.group().answers(*node, ASK_TIMEOUT));
        let answers = join_all(asked).await.into_iter().filter(|answers| *answers).count();
        let (answering, of) = (answers + comes, stay.len() + comes);
        // Nobody left is the state machine's to refuse.
        // Planted (G8): what is left may be unable to decide anything.
        let enough = answering > of / 2 || planted!("removed-without-a-majority");
        if of == 0 || enough {
            return Ok(());
        }
        let text = format!("without node {goes} only {answering} of {of} voters answer");
        Err(Refusal(ErrorCode::NO_MAJORITY_LEFT, text))
    }
}

/// Why a node that was asked at an address is not added.
fn not_met(node: NodeId, peer_addr: &str, error: &PeerError) -> Refusal {
    let elsewhere = [ErrorCode::NO_SUCH_NODE, ErrorCode::WRONG_CLUSTER];
    match error {
        PeerError::Refused { code, message } if elsewhere.contains(code) => {
            let text = format!("who answers at {peer_addr} is not a fresh node {node}: {message}");
            Refusal(ErrorCode::NODE_NOT_FRESH, text)
        }
        _ => {
            let text = format!("node {node} does not answer at {peer_addr}: {error}");
            Refusal(ErrorCode::NODE_UNREACHABLE, text)
        }
    }
}
