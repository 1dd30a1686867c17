//! What is possible in a message between nodes, asked or answered, by itself.
//!
//! The engine trusts its peers: it panics where they contradict the protocol, and keeps a term that
//! it is told for good. So everything passes here first.

use leasehold_protocol::ids::NodeId;
use leasehold_protocol::peer::{
    AppendRequest, Ballot, LogEntry, Position, SnapshotAnswer, SnapshotBegin, TransferAnswer,
    VoteAnswer,
};

use super::message::RaftMessage;

/// Terms and indexes above this are nonsense: nobody counts that far.
const NUMBER_MAX: u64 = u64::MAX / 4;

pub(super) fn sane(position: Option<&Position>) -> bool {
    position.is_none_or(|at| at.term <= NUMBER_MAX && at.index <= NUMBER_MAX)
}

/// Not written by a later leader than `vote`'s.
fn within(position: Option<&Position>, vote: &Ballot) -> bool {
    position.is_none_or(|at| (at.term, at.leader) <= (vote.term, vote.node))
}

/// A vote that somebody may have.
pub(super) fn ballot_sane(ballot: &Ballot) -> bool {
    ballot.term <= NUMBER_MAX
}

/// Whether a request is possible, whoever sends it.
pub(super) fn message_sane(message: &RaftMessage) -> bool {
    match message {
        RaftMessage::Append(request) => append_sane(request),
        RaftMessage::Vote(request) | RaftMessage::PreVote(request) => {
            sane(request.last.as_ref())
                && within(request.last.as_ref(), &request.vote)
                && !request.vote.committed
        }
        RaftMessage::Transfer(request) => {
            sane(request.last.as_ref())
                && within(request.last.as_ref(), &request.from)
                && request.from.committed
                && request.to != NodeId(0)
        }
        RaftMessage::SnapshotBegin(SnapshotBegin { cover, vote, .. }) => {
            sane(cover.last.as_ref()) && within(cover.last.as_ref(), vote) && vote.committed
        }
        RaftMessage::SnapshotEnd(request) => request.vote.committed,
        RaftMessage::SnapshotChunk(_) => true,
    }
}

fn append_sane(request: &AppendRequest) -> bool {
    let (previous, committed) = (request.previous.as_ref(), request.committed.as_ref());
    let bounds = request.vote.committed
        && sane(previous)
        && sane(committed)
        && within(previous, &request.vote)
        && within(committed, &request.vote);
    bounds && follows(previous, &request.entries, &request.vote)
}

/// Each entry follows the one before, and no leader writes after a later one.
fn follows(previous: Option<&Position>, entries: &[LogEntry], vote: &Ballot) -> bool {
    let mut before = previous.copied();
    entries.iter().all(|entry| {
        let at = entry.position;
        let index = before.map_or(0, |before| before.index + 1);
        let leader = before.map_or((0, NodeId(0)), |before| (before.term, before.leader));
        before = Some(at);
        at.index == index
            && (at.term, at.leader) >= leader
            && sane(Some(&at))
            && within(Some(&at), vote)
    })
}

/// An answer that is possible by itself.
pub(super) trait AnswerSane {
    fn sane(&self) -> bool;
}

impl AnswerSane for VoteAnswer {
    fn sane(&self) -> bool {
        ballot_sane(&self.vote) && sane(self.last.as_ref())
    }
}

impl AnswerSane for SnapshotAnswer {
    fn sane(&self) -> bool {
        match self {
            Self::Done(ballot) | Self::HigherVote(ballot) => ballot_sane(ballot),
            Self::Continue | Self::Restart => true,
        }
    }
}

impl AnswerSane for TransferAnswer {
    fn sane(&self) -> bool {
        match self {
            Self::Taken => true,
            Self::VoteChanged { expected, actual } => ballot_sane(expected) && ballot_sane(actual),
            Self::NotFlushed { expected, actual } => {
                sane(expected.as_ref()) && sane(actual.as_ref())
            }
        }
    }
}
