//! What became of a change of the membership whose answer was lost.
//!
//! A change has no number. When its reply is lost and it is over before it is repeated, the
//! repetition is refused for what the change itself did: the node is a member no longer, the id is
//! used. So after an attempt whose effect is not known such a refusal is not passed on: the member
//! table is read, and the call is answered by what it says. Invariant: a change that was applied is
//! never answered with an error of class *not applied*.

use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::ids::{NodeId, ShardId};
use leasehold_protocol::member::{
    MemberChange, MemberChangeReply, MemberChangeRequest, MemberOperation, MemberPhase,
    MembersReply, MembersRequest, NewMember, Standing,
};
use leasehold_protocol::reply::Reply;
use leasehold_protocol::request::Request;

use super::exchange::{Exchange, Owner};
use super::{Call, CallId, Core, Event, route};
use crate::clock::BootTime;
use crate::error::Failure;

/// Shard 0 keeps the member table.
const TABLE: Option<ShardId> = Some(ShardId(0));

/// A change that may have been applied, and what its repetition was told.
#[derive(Debug)]
pub(super) struct Doubt {
    change: MemberChange,
    refusal: Failure,
}

impl Doubt {
    /// If `result` of a request that was uncertain before leaves it open whether it was applied.
    pub(super) fn of(request: &Request, result: &Result<Reply, Failure>) -> Option<Self> {
        let Request::MemberChange(MemberChangeRequest { change, .. }) = request else {
            return None;
        };
        let refusal = result.as_ref().err().filter(|failure| is_own_trace(failure.code))?;
        Some(Self { change: change.clone(), refusal: refusal.clone() })
    }

    /// What is asked for instead.
    pub(super) fn request(timeout_ms: u32) -> Request {
        Request::Members(MembersRequest { timeout_ms })
    }

    /// What the table says of the change.
    fn verdict(self, table: &MembersReply) -> Result<Reply, Failure> {
        match trace(&self.change, table) {
            Trace::Applied(operation) => Ok(Reply::MemberChanged(MemberChangeReply { operation })),
            Trace::None => Err(self.refusal),
            Trace::Unclear => Err(self.unknown()),
        }
    }

    fn unknown(self) -> Failure {
        let text = format!(
            "the reply to the change was lost, and the repeated one was refused: {}; look at the \
             member table",
            self.refusal
        );
        Failure::new(ErrorCode::OUTCOME_UNKNOWN, text)
    }
}

impl Core {
    /// Asks for the table instead of answering a call.
    pub(super) fn look_it_up(&mut self, call: CallId, doubt: Doubt, deadline: BootTime) {
        self.calls.insert(call, Call::Doubt(doubt));
        self.start(Exchange::new(Owner::Call(call), TABLE, route::Lane::Bulk, deadline));
    }

    pub(super) fn looked_up(&mut self, call: CallId, doubt: Doubt, table: &Result<Reply, Failure>) {
        let result = match table {
            Ok(Reply::Members(table)) => doubt.verdict(table),
            _ => Err(doubt.unknown()),
        };
        self.events.push_back(Event::Answered { call, result });
    }
}

/// Refusals that a change can bring upon its own repetition, once it is over or another began.
const fn is_own_trace(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::NODE_ID_USED
            | ErrorCode::NOT_A_MEMBER
            | ErrorCode::MEMBER_CHANGE_UNDER_WAY
            | ErrorCode::MEMBER_CHANGE_OVER
            | ErrorCode::NO_MAJORITY_LEFT
    )
}

/// What a change has left in the table.
enum Trace {
    /// What was asked for is so, by this operation; 0 if it is over.
    Applied(u64),
    None,
    Unclear,
}

fn trace(change: &MemberChange, table: &MembersReply) -> Trace {
    let present = table.operation;
    let number = |is: &dyn Fn(&MemberOperation) -> bool| {
        present.filter(|operation| is(operation)).map_or(0, |operation| operation.operation)
    };
    match change {
        MemberChange::Add(new) => match came(new, table) {
            Trace::Applied(_) => Trace::Applied(number(&|it| it.add == new.node)),
            other => other,
        },
        MemberChange::Remove { node } => {
            let goes = number(&|it| it.remove == *node && it.add == NodeId(0));
            let gone = standing(*node, table) == Some(Standing::Removed);
            if gone || goes != 0 { Trace::Applied(goes) } else { Trace::None }
        }
        MemberChange::Replace { old, new } => match came(new, table) {
            Trace::Applied(_) => {
                let comes = number(&|it| it.add == new.node && it.remove == *old);
                let gone = standing(*old, table) == Some(Standing::Removed);
                if gone || comes != 0 { Trace::Applied(comes) } else { Trace::None }
            }
            other => other,
        },
        MemberChange::Abort { operation } => match present {
            Some(present) if present.operation == *operation => match present.phase {
                MemberPhase::Undo => Trace::Applied(*operation),
                MemberPhase::Learn | MemberPhase::Vote => Trace::None,
            },
            // Given up, or carried through: the table does not say of an operation that is over.
            _ => Trace::Unclear,
        },
    }
}

/// Whether a node came as it was asked for. An id comes only once, so one that is there with
/// another address came by another change; of one that went again the address is not kept.
fn came(new: &NewMember, table: &MembersReply) -> Trace {
    let Some(info) = table.members.iter().find(|info| info.entry.node == new.node) else {
        return Trace::None;
    };
    match info.standing {
        Standing::Removed => Trace::Unclear,
        _ if info.entry.peer_addr == new.peer_addr => Trace::Applied(0),
        _ => Trace::None,
    }
}

fn standing(node: NodeId, table: &MembersReply) -> Option<Standing> {
    table.members.iter().find(|info| info.entry.node == node).map(|info| info.standing)
}
